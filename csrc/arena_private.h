/* Inside of a client's view, shared by arena.c (reading) and ring.c (saving). */
#ifndef INFERA_ARENA_PRIVATE_H
#define INFERA_ARENA_PRIVATE_H

#include <pthread.h>
#include <string.h>

#include "arena.h"

/* What a client's saving threads share. */
typedef struct {
    pthread_mutex_t mutex;
    uint64_t promised;   /* ring entries kept free for copies under way */
    uint32_t stock_hint; /* where the last extent was found */
    uint32_t touch_turn; /* which of many records are touched next */
} arena_producer;

struct arena_view {
    const arena_header *header; /* for what changes in it; sizes are taken from `geometry` */
    arena_header geometry;      /* copied, then checked: what the file says later does not count */
    const arena_bucket *buckets;
    const arena_shard *shards;
    const void *data;            /* null for a view that only looks */
    arena_ledger_header *ledger; /* null for a view that only looks */
    _Atomic uint8_t *pins;       /* likewise */
    arena_producer *producer;    /* likewise */
    uint32_t slots;
    uint64_t data_bytes;
};

/* One look-up: fetch what it will touch, then ask. */
void arena_prefetch(const arena_view *view, uint32_t class_id, const uint8_t *key);
int arena_has(const arena_view *view, uint32_t class_id, uint64_t full_mask, const uint8_t *key);

/* Copies whole words that a client may be changing, each read once: what is checked afterwards in
 * the copy is what is used. */
static inline void arena_copy_once(void *target, const void *source, size_t bytes) {
    const volatile uint64_t *words = source;
    for (size_t i = 0; i < bytes / sizeof *words; i++) {
        uint64_t word = words[i];
        memcpy((char *)target + i * sizeof word, &word, sizeof word);
    }
}

#define ARENA_LEDGER_HELD_OFFSET  (sizeof(arena_ledger_header))
#define ARENA_LEDGER_STOCK_OFFSET (ARENA_LEDGER_HELD_OFFSET + ARENA_HELD_MAX * sizeof(arena_held))
#define ARENA_LEDGER_RING_OFFSET                                                                   \
    (ARENA_LEDGER_STOCK_OFFSET + ARENA_STOCK_MAX * sizeof(arena_stock_entry))
#define ARENA_LEDGER_PINS_OFFSET                                                                   \
    (ARENA_LEDGER_RING_OFFSET + ARENA_RING_MAX * sizeof(arena_ring_entry))

#endif
