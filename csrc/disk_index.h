/* Where on disk the objects are: the disk tier's index, in the daemon's own memory. */
#ifndef INFERA_DISK_INDEX_H
#define INFERA_DISK_INDEX_H

#include <stdint.h>

#define DISK_NONE 0xFFFFFFFFu

enum disk_entry_state { DISK_ENTRY_FREE, DISK_ENTRY_WRITING, DISK_ENTRY_READY };

/* One shard of one record. */
typedef struct {
    uint64_t key[2];
    uint64_t sequence;
    uint32_t length_bytes;
    uint32_t start_unit;
    uint32_t expires_s;
    uint32_t next_of_bucket;
    uint32_t previous_of_segment, next_of_segment;
    uint16_t class_id;
    uint16_t segment;
    uint8_t shard;
    uint8_t retention;
    uint8_t uses; /* reads since it was written or moved, at most 3 */
    uint8_t state;
} disk_entry;
_Static_assert(sizeof(disk_entry) == 56, "bytes of an entry are stated in docs/kvd-store.md");

typedef struct {
    disk_entry *entries;
    uint32_t *buckets; /* heads of chains; all shards of a record are in one */
    uint32_t bucket_mask;
    uint32_t capacity, count, free_entry;
    uint64_t seed[2];
    uint32_t *segment_heads; /* first entry of each segment */
} disk_index;

/* 0 when memory is short. */
int disk_index_make(disk_index *index, uint32_t capacity, uint32_t segments,
                    const uint64_t seed[2]);
void disk_index_free(disk_index *index);

uint32_t disk_index_find(const disk_index *index, uint32_t class_id, const uint8_t key[16],
                         uint32_t shard);
/* Bit s: shard s is READY and not expired at now_s. */
uint64_t disk_index_mask(const disk_index *index, uint32_t class_id, const uint8_t key[16],
                         uint32_t now_s);
/* Enters a copy of `fresh` (links aside); DISK_NONE when it is full. */
uint32_t disk_index_add(disk_index *index, const disk_entry *fresh);
void disk_index_remove(disk_index *index, uint32_t entry);
/* The record moved: `fresh` says where it is now. */
void disk_index_move(disk_index *index, uint32_t entry, uint16_t segment, uint32_t start_unit,
                     uint64_t sequence);

#endif
