/* The daemon's side of the arena: who may write where, what is present, what must go. */
#ifndef INFERA_STORE_H
#define INFERA_STORE_H

#include <stddef.h>
#include <stdint.h>

#include "arena.h"

/* cffi: begin */
enum {
    STORE_CLIENTS_MAX = 256,
    STORE_RESERVATIONS_MAX = 65536,
    STORE_RESERVATIONS_PER_CLIENT_MAX = 8192,
    STORE_EVENTS_MAX = 65536,
    STORE_STOCK_OVERDUE_MAX = 64, /* stock a client may have forgotten before it gets no more */
    STORE_STOCK_SHARE = 20,       /* stock is at most the arena divided by this */
    STORE_AHEAD_SHARE = 256,      /* likewise what is evicted before it is asked for */
    STORE_RECORDS_MAX = 1 << 30,  /* a slot number leaves one bit of 32 free */
};

enum store_status {
    STORE_OK = 0,
    STORE_EXISTS = 1,      /* this shard is committed already */
    STORE_BUSY = 2,        /* another client is writing this shard now */
    STORE_NO_SPACE = 3,    /* everything that could make room is pinned or being written */
    STORE_LIMIT = 4,       /* the client holds too many reservations */
    STORE_STALE = 5,       /* no such reservation (any more) */
    STORE_BAD_REQUEST = 6, /* class, shard or key out of range */
    STORE_PINNED = 7,      /* cannot be dropped: a client reads it */
    STORE_ABSENT = 8,
    STORE_CLASSES_FULL = 9,
    STORE_MISMATCH = 10,    /* the class exists with another geometry */
    STORE_TOO_LARGE = 11,   /* a record does not fit the arena, or has too many shards */
    STORE_DAMAGED = 12,     /* the bytes do not match the checksum */
    STORE_UNWANTED = 13,    /* its retention class is "none": not to be stored */
    STORE_PINNED_FULL = 14, /* records of class "pinned" hold their share of the arena */
    STORE_OVER_QUOTA = 15,  /* its namespace or tenant has its quota and nothing left to give up */
};

typedef struct store store;

typedef struct {
    uint64_t data_bytes, used_bytes, present_bytes, quarantined_bytes, stock_bytes, stock_extents;
    uint64_t records_present, records_incomplete, record_capacity;
    uint64_t reservations, clients, classes;
    uint64_t stored_total, evicted_total, dropped_total, damaged_total, expired_total,
        aborted_total;
    uint64_t reserve_exists_total, reserve_busy_total, reserve_no_space_total, reserve_limit_total;
    uint64_t reserve_unwanted_total, reserve_pinned_full_total, reserve_over_quota_total;
    uint64_t ephemeral_bytes, short_bytes, long_bytes, pinned_bytes; /* being written included */
    uint64_t ephemeral_records, short_records, long_records, pinned_records, tenants;
    uint64_t ttl_expired_total, evicted_quota_total, orphaned_total, ghost_hits_total;
    uint64_t pinned_refused_total, evict_steps_total, evict_steps_most;
    uint64_t stock_overdue_total, duplicates_total, commit_stale_total, touched_total,
        events_lost_total;
    uint64_t adopted_total, adopt_mended_total; /* mended: only its version was half-changed */
    uint64_t adopt_dropped_half_total, adopt_dropped_check_total, adopt_dropped_class_total,
        adopt_dropped_incomplete_total, adopt_dropped_place_total, adopt_dropped_extent_total;
    uint64_t adopt_damaged_classes_total, adopt_damaged_slabs_total, adopt_set_aside_total;
} store_stats;

typedef struct {
    uint64_t reservation;
    uint64_t offset_bytes; /* of the shard's bytes in the data file */
    uint32_t status;
    uint32_t reserved;
} store_grant;

typedef struct {
    uint8_t key[16];
    uint32_t depth_grains;
    uint32_t reserved;
} store_wish;

typedef struct {
    uint64_t reservation;
    uint64_t sum;
} store_commitment;

/* What a commit from stock says that a reservation would have said before. */
typedef struct {
    store_wish wish;
    uint32_t retention; /* the terms, as in store_terms */
    uint32_t ttl_s;
    uint64_t tenant_tag;
    uint64_t sum;
} store_late_wish;

typedef struct {
    uint8_t key[16];
    uint32_t class_id;
    uint32_t is_removed; /* 0: the record is present now; 1: it is gone */
} store_event;

/* Formats `index` (arena_index_bytes long, zeroed) and makes the store that owns it. NULL when
 * memory is short, or when there are more than STORE_RECORDS_MAX records or 2^32 units. One thread
 * at a time may call any store function. */
store *store_create(void *index, const uint8_t *instance, uint64_t generation, uint64_t records,
                    uint32_t shards_per_record, uint64_t data_bytes, const uint64_t *seed);
/* Makes the store of an index that an earlier daemon left, with every record that verifies; the
 * rest is dropped and counted. NULL when memory is short or the header is refused
 * (arena_read_facts says why). Call store_adopt_client for each ledger that a live process has
 * locked, then store_adopt_records once, before anything else. */
store *store_adopt(void *index, uint64_t index_bytes, uint64_t data_bytes);
/* Takes a live client's ledger over as it is: its pins count, what it may be writing to is kept.
 * Returns its number (the one it had, unless that is damaged), or -1 when this is no ledger of this
 * arena or memory is short. */
int store_adopt_client(store *state, void *ledger, uint64_t ledger_bytes);
void store_adopt_records(store *state);
/* A client that comes back on a new connection says which reservations it still writes to. Its
 * others end, but for stock: it was never told of them, or its word that they are over was lost. */
void store_resume(store *state, uint32_t client, const uint64_t *reservations, uint64_t n);
void store_destroy(store *state);

/* Registers a client's ledger (zeroed; its header is written here) and returns the client's number,
 * or -1 at the limit. Detaching clears its pins and gives up its reservations; the ledger's memory
 * may be unmapped afterwards. */
int store_client_attach(store *state, void *ledger, uint64_t token);
void store_client_detach(store *state, uint32_t client);

typedef struct {
    uint64_t token;
    uint32_t process_id;
    char name[48];
} store_client_facts;

/* Notes in a client's ledger who it is, for the next daemon, and reads that back. */
void store_client_describe(store *state, uint32_t client, uint32_t process_id, const char *name);
int store_client_read(const store *state, uint32_t client, store_client_facts *facts);

typedef struct {
    uint8_t name_space[16];
    char model[128];
    uint32_t group;
    uint32_t shard_count;
} store_class_identity;

/* What a class id stands for; 0 when for nothing. */
int store_class_identify(const store *state, uint32_t class_id, store_class_identity *facts);

/* Finds or makes the class of one (namespace, group): a record of it has `shard_count` shards. */
int store_class_open(store *state, const uint8_t *name_space, uint32_t group, uint32_t shard_count,
                     const uint64_t *shard_bytes, const char *model, uint32_t *class_id);

/* What is said of each record of a put. */
typedef struct {
    uint32_t retention;  /* enum store_retention in store_policy.h */
    uint32_t ttl_s;      /* seconds it may be used, from now; 0: no limit */
    uint64_t tenant_tag; /* 0: nobody's */
} store_terms;

/* Reserves space for one shard of each wished record, wishes in the order of their chain. The terms
 * of a record are those of its first reservation; asking for one that is present raises its class
 * and its time to live to what is asked. A grant with STORE_OK must be committed or given up before
 * `deadline_ns` (same clock as every `now_ns`), which must not decrease from call to call; grants
 * answer wishes in order. */
void store_reserve(store *state, uint32_t client, uint32_t class_id, uint32_t shard,
                   const store_terms *terms, const store_wish *wishes, uint64_t n, uint64_t now_ns,
                   uint64_t deadline_ns, store_grant *grants);
/* Publishes shards whose bytes are in place, in order; statuses[i] is STORE_OK or STORE_STALE. */
void store_commit(store *state, uint32_t client, const store_commitment *commitments, uint64_t n,
                  uint32_t *statuses);
void store_give_up(store *state, uint32_t client, const uint64_t *reservations, uint64_t n);

/* Space taken ahead for one client, for any record of a class: committed later under a key, or
 * given up. All stock together is at most a twentieth of the arena. Returns the grant's status. */
int store_stock(store *state, uint32_t client, uint32_t class_id, uint32_t shard,
                store_grant *grant);
/* Evicts a few records ahead, until `count` extents for a shard are free, or a 256th of the arena
 * is: what a client has just reserved it will want again, and then need not wait. Returns whether
 * there is more to do. Class and shard are known to exist. */
int store_prepare_room(store *state, uint32_t class_id, uint32_t shard, uint32_t count);

/* Makes a shard of a record of a stock reservation whose bytes are in place. STORE_EXISTS: somebody
 * else saved the same first, and the space is free again. */
int store_commit_stock(store *state, uint32_t client, uint64_t reservation,
                       const store_late_wish *wish, uint64_t now_ns);

/* Notes that these records were useful: a whole run, so that its head is used as often as its tail.
 */
void store_touch(store *state, uint32_t class_id, const uint8_t *keys, uint64_t n);
int store_drop(store *state, uint32_t class_id, const uint8_t *key);
/* Checks a present record's bytes (in `data`, the mapped data file) against its checksums and drops
 * it when they differ: STORE_OK when they are right, STORE_ABSENT, STORE_PINNED, or STORE_DAMAGED
 * when it was dropped. */
int store_verify(store *state, const void *data, uint32_t class_id, const uint8_t *key);
/* Drops every record of a class that is not pinned; returns how many. */
uint64_t store_drop_class(store *state, uint32_t class_id);

/* Quarantines reservations past their deadline, and stock that was out of its client's table for
 * `incomplete_max_ns`, drops records left incomplete too long, and removes
 * a bounded number of those whose time to live has passed (see store_set_clock). */
void store_expire(store *state, uint64_t now_ns, uint64_t incomplete_max_ns);

/* Moves up to `max` events out, oldest first. *lost is 1 once when the queue overflowed since the
 * last call: what was announced is incomplete and listeners need a snapshot. */
uint64_t store_take_events(store *state, store_event *events, uint64_t max, int *lost);
/* All present records as events, from *cursor (start with 0) on; 0 when the end is reached. */
uint64_t store_snapshot(const store *state, uint64_t *cursor, store_event *events, uint64_t max);

void store_read_stats(const store *state, store_stats *stats);
/* Walks everything and compares with the books: NULL when they add up, else what does not. */
const char *store_audit(const store *state);
/* cffi: end */

/* For the thread that serves clients (loop.c). */
arena_ledger_header *store_ledger(const store *state, uint32_t client);
uint32_t store_clients_end(const store *state);
int store_has_events(const store *state);
/* Tells clients whether they must ring; a full fence follows. */
void store_set_sleeping(store *state, uint32_t is_sleeping);

#endif
