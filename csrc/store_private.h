/* Shared between store.c and its parts; nobody else includes this. */
#ifndef INFERA_STORE_PRIVATE_H
#define INFERA_STORE_PRIVATE_H

#include "extents.h"
#include "store.h"

/* Per record slot, private to the daemon. A slot is in one list: pending while incomplete, else
 * the least-recently-used list of its size. */
typedef struct {
    uint32_t previous, next;
    uint32_t reservations; /* head of the chain of live reservations on it */
    uint32_t size_class;
    uint64_t reserved_mask;
    uint64_t stamp; /* creation time while incomplete, use counter when present */
} slot_book;

typedef struct {
    uint32_t head, tail; /* head: next to go */
} slot_list;

enum reservation_state { RESERVATION_FREE, RESERVATION_LIVE, RESERVATION_QUARANTINED };

typedef struct {
    uint32_t generation;
    uint32_t state;
    uint32_t slot;       /* while live */
    uint32_t quarantine; /* entry, while quarantined */
    uint32_t client;
    uint32_t shard;
    uint64_t deadline_ns;
    uint32_t next_of_slot;
    uint32_t older, newer;                       /* all live ones, by deadline */
    uint32_t previous_of_client, next_of_client; /* also the free list */
} reservation;

/* An extent whose record is gone but which a live process may still write to. */
typedef struct {
    uint32_t start_unit;
    uint32_t writers; /* 0: this entry is free */
    uint32_t units;
    uint32_t next_free;
} quarantine;

typedef struct {
    _Atomic uint8_t *pins; /* null: no such client */
    arena_ledger_header *ledger;
    uint32_t first_reservation;
    uint32_t reservation_count;
} client_book;

struct store {
    arena_header *header;
    arena_bucket *buckets;
    uint64_t *sums;
    arena_class *classes;
    uint32_t slots;
    uint32_t clients_end; /* clients above this number were never attached */
    slot_book *books;
    extents *pool;
    slot_list pending;
    slot_list recent[EXTENTS_SIZES_MAX];
    uint64_t use_counter;
    reservation *reservations;
    uint32_t free_reservation;
    uint32_t oldest_reservation, newest_reservation;
    quarantine *quarantines;
    uint32_t free_quarantine;
    client_book clients[STORE_CLIENTS_MAX];
    uint64_t class_records[ARENA_CLASSES_MAX];
    uint32_t class_sizes[ARENA_CLASSES_MAX];
    store_event *events;
    uint64_t events_head, events_count;
    int events_overflowed;
    uint32_t *run_scratch;
    store_stats stats;
};

/* An extent's owner is a slot, or with this bit a quarantine entry. */
#define OWNER_QUARANTINE 0x80000000u

/* store_index.c: records in their buckets */
arena_record *store_record(const store *state, uint32_t slot);
uint32_t store_find(const store *state, uint32_t class_id, const uint8_t *key);
uint32_t store_empty_slot(const store *state, uint32_t class_id, const uint8_t *key,
                          uint32_t *candidates, uint32_t *candidate_count);
void store_write_record(store *state, uint32_t slot, const arena_record *fresh);
void store_set_shards(store *state, uint32_t slot, uint64_t shard_mask);
int store_remove_record(store *state, uint32_t slot, int even_if_pinned);
int store_is_present(const store *state, uint32_t slot);
uint64_t store_full_mask(const store *state, uint32_t class_id);

/* store_evict.c: making room */
void store_list_append(store *state, slot_list *list, uint32_t slot);
void store_list_remove(store *state, slot_list *list, uint32_t slot);
void store_mark_used(store *state, uint32_t slot);
int store_evict(store *state, uint32_t slot);
uint32_t store_make_room(store *state, uint32_t size_class);
uint32_t store_make_slot(store *state, uint32_t class_id, const uint8_t *key);

/* store_reserve.c: reservations and quarantine */
void store_drop_incomplete(store *state, uint32_t slot);
void store_release_client(store *state, uint32_t client);

/* store.c */
void store_announce_event(store *state, const store_event *event);

#endif
