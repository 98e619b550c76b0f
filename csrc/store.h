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
    STORE_RECORDS_MAX = 1 << 30, /* a slot number leaves one bit of 32 free */
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
    STORE_MISMATCH = 10,  /* the class exists with another geometry */
    STORE_TOO_LARGE = 11, /* a record does not fit the arena, or has too many shards */
    STORE_DAMAGED = 12,   /* the bytes do not match the checksum */
};

typedef struct store store;

typedef struct {
    uint64_t data_bytes, used_bytes, present_bytes, quarantined_bytes;
    uint64_t records_present, records_incomplete, record_capacity;
    uint64_t reservations, clients, classes;
    uint64_t stored_total, evicted_total, dropped_total, damaged_total, expired_total,
        aborted_total;
    uint64_t reserve_exists_total, reserve_busy_total, reserve_no_space_total, reserve_limit_total;
    uint64_t commit_stale_total, touched_total, events_lost_total;
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

typedef struct {
    uint8_t key[16];
    uint32_t class_id;
    uint32_t is_removed; /* 0: the record is present now; 1: it is gone */
} store_event;

/* Formats `index` (arena_index_bytes long, zeroed) and makes the store that owns it. NULL when
 * memory is short, or when there are more than STORE_RECORDS_MAX records or 2^32 units. One thread
 * at a time may call any store function. */
store *store_create(void *index, const uint8_t *instance, uint64_t generation, uint64_t records,
                    uint32_t sums_per_record, uint64_t data_bytes, const uint64_t *seed);
void store_destroy(store *state);

/* Registers a client's ledger (zeroed; its header is written here) and returns the client's number,
 * or -1 at the limit. Detaching clears its pins and gives up its reservations; the ledger's memory
 * may be unmapped afterwards. */
int store_client_attach(store *state, void *ledger, uint64_t token);
void store_client_detach(store *state, uint32_t client);

/* Finds or makes the class of one (namespace, group). The shards of a record lie one after another,
 * each rounded up to a unit; `shard_offsets` receives where. */
int store_class_open(store *state, const uint8_t *name_space, uint32_t group, uint32_t shard_count,
                     const uint64_t *shard_bytes, const char *model, uint32_t *class_id,
                     uint64_t *shard_offsets);

/* Reserves space for one shard of each wished record. A grant with STORE_OK must be committed or
 * given up before `deadline_ns` (same clock as every `now_ns`), which must not decrease from call
 * to call; grants answer wishes in order. */
void store_reserve(store *state, uint32_t client, uint32_t class_id, uint32_t shard,
                   uint32_t retention, uint64_t tenant_tag, const store_wish *wishes, uint64_t n,
                   uint64_t now_ns, uint64_t deadline_ns, store_grant *grants);
/* Publishes shards whose bytes are in place, in order; statuses[i] is STORE_OK or STORE_STALE. */
void store_commit(store *state, uint32_t client, const store_commitment *commitments, uint64_t n,
                  uint32_t *statuses);
void store_give_up(store *state, uint32_t client, const uint64_t *reservations, uint64_t n);

/* Notes that these records were useful. In order of the chain: its head survives longest. */
void store_touch(store *state, uint32_t class_id, const uint8_t *keys, uint64_t n);
int store_drop(store *state, uint32_t class_id, const uint8_t *key);
/* Checks a present record's bytes (in `data`, the mapped data file) against its checksums and drops
 * it when they differ: STORE_OK when they are right, STORE_ABSENT, STORE_PINNED, or STORE_DAMAGED
 * when it was dropped. */
int store_verify(store *state, const void *data, uint32_t class_id, const uint8_t *key);
/* Drops every record of a class that is not pinned; returns how many. */
uint64_t store_drop_class(store *state, uint32_t class_id);

/* Quarantines reservations past their deadline and drops records left incomplete too long. */
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

#endif
