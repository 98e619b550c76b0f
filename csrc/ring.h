/* Saving without a round trip: stock taken ahead, commits left in a ring. */
#ifndef INFERA_RING_H
#define INFERA_RING_H

#include "arena.h"

/* cffi: begin */
enum ring_kind {
    RING_COMMIT = 1,  /* a stock reservation now holds the bytes of `key` */
    RING_GIVE_UP = 2, /* a stock reservation is not wanted after all */
    RING_TOUCH = 3,   /* the record of `key` was useful */
};

/* What every record of one put has in common. */
typedef struct {
    uint32_t class_id;
    uint32_t shard;
    uint32_t flags; /* retention class */
    uint32_t ttl_s; /* 0: none */
    uint64_t tenant_tag;
    int32_t doorbell; /* eventfd of the daemon, -1 for none */
} ring_put_facts;

/* Saves up to n blocks from stock: takes an extent, copies the block (as copy_blocks_gather does),
 * leaves the commit in the ring. Stops where stock or ring end; returns how many were saved. The
 * caller asks the daemon over the socket for the rest. Safe from several threads of one process. */
uint64_t ring_put(const arena_view *view, const ring_put_facts *facts, const uint8_t *keys,
                  const uint32_t *depths_grains, const uint64_t *segment_base,
                  const uint64_t *segment_stride, const uint64_t *segment_bytes,
                  uint64_t n_segments, const uint64_t *block_ids, uint64_t n);

/* Leaves word that n records, in chain order, were useful: of at most `most` of them, evenly spread
 * and others each time. Never waits, and leaves half of the ring to commits. Returns of how many
 * word was left: 0 when the ring is half full, or another thread is at it. */
uint64_t ring_touch(const arena_view *view, uint32_t class_id, int32_t doorbell,
                    const uint8_t *keys, uint64_t n, uint64_t most);
/* cffi: end */

/* An entry of stock goes EMPTY -> READY (daemon fills it) -> TAKEN -> EMPTY (client) or READY ->
 * EMPTY (daemon takes it back). The upper half of the word counts fillings, so that a client which
 * slept between looking and taking cannot take what has been filled anew. */
enum { STOCK_EMPTY = 0, STOCK_READY = 1, STOCK_TAKEN = 2, STOCK_OTHER = 3 };

typedef struct {
    uint64_t reservation;
    uint64_t offset_bytes;
} ring_stock_item;

/* Client: takes one extent; 0 when there is none of this class and shard. */
int ring_stock_take(const arena_view *view, uint32_t class_id, uint32_t shard,
                    ring_stock_item *item);

/* Daemon's half, over a ledger whose header it wrote itself. */
int ring_stock_offer(arena_ledger_header *ledger, uint32_t entry, uint32_t class_id, uint32_t shard,
                     uint64_t reservation, uint64_t offset_bytes);
int ring_stock_revoke(arena_ledger_header *ledger, uint32_t entry, uint64_t *reservation);
/* What an entry is: STOCK_EMPTY, STOCK_READY of this class and shard, or STOCK_OTHER. */
int ring_stock_peek(const arena_ledger_header *ledger, uint32_t entry, uint32_t class_id,
                    uint32_t shard);
/* Whether the client has not taken this reservation yet, by its own word. */
int ring_stock_offers(const arena_ledger_header *ledger, uint64_t reservation);
int ring_has_entries(const arena_ledger_header *ledger);
/* Copies the oldest entry out; 0 when empty; -1 when head and tail make no sense together (the
 * client wrote over its ledger), after which the ring is empty. */
int ring_peek(arena_ledger_header *ledger, arena_ring_entry *entry);
/* Lets go of the entry peeked at, once it has been applied: a daemon that is killed in between
 * leaves it to the next one, to which a repeated entry is only a stale reservation. */
void ring_advance(arena_ledger_header *ledger);

#endif
