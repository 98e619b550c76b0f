/* What the store holds, for people to look at. */
#ifndef INFERA_STORE_LIST_H
#define INFERA_STORE_LIST_H

#include <stdint.h>

#include "store.h"

/* cffi: begin */
enum {
    STORE_LIST_SLOTS_MAX = 65536, /* slots one call walks, so that no listing holds the store up */
};

typedef struct {
    uint8_t key[16];
    uint32_t class_id;
    uint32_t slot;
    uint32_t depth_grains;
    uint32_t retention;
    uint32_t expires_s; /* seconds of the wall clock; 0: never */
    uint32_t is_present;
    uint64_t tenant_tag;
    uint64_t shard_mask;
    uint64_t stored_bytes; /* of its committed shards, whole extents */
} store_listing;

typedef struct {
    uint64_t records;      /* present or being written */
    uint64_t record_bytes; /* one record's, over all shards, without rounding */
    uint32_t shard_count;  /* 0: no such class */
    uint32_t reserved;
} store_class_usage;

/* Records of the classes for which wanted[class_id] is not 0 (ARENA_CLASSES_MAX entries), from slot
 * *cursor on; *cursor moves behind the last slot looked at and equals the number of slots at the
 * end. Returns how many of `max` listings were filled: none found does not mean the end. */
uint64_t store_list(const store *state, const uint8_t *wanted, uint64_t *cursor,
                    store_listing *listings, uint64_t max);

void store_read_usage(const store *state, uint32_t class_id, store_class_usage *facts);
/* cffi: end */

#endif
