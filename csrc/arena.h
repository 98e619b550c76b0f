/* The shared-memory arena: layout of its files, and what a client does with them. */
#ifndef INFERA_ARENA_H
#define INFERA_ARENA_H

#include <stddef.h>
#include <stdint.h>

/* cffi: begin */
enum {
    ARENA_LAYOUT_VERSION = 1,
    ARENA_KEY_BYTES = 16,
    ARENA_UNIT_BYTES = 4096, /* extents are counted in these, so O_DIRECT works from the arena */
    ARENA_BUCKET_SLOTS = 8,
    ARENA_CLASSES_MAX = 256,
    ARENA_SHARDS_MAX = 64,
    ARENA_MODEL_BYTES = 128,
    ARENA_PINS_PER_RECORD_MAX = 255,
};

enum arena_status {
    ARENA_OK = 0,
    ARENA_BAD_MAGIC = 1,    /* not an arena file */
    ARENA_BAD_VERSION = 2,  /* another layout version */
    ARENA_BAD_GEOMETRY = 3, /* sizes in the header do not fit the file */
    ARENA_BAD_CHECK = 4,    /* header check word is wrong */
};

/* Where the bytes of one record are, as a client sees them after pinning. */
typedef struct {
    uint64_t offset_bytes; /* from the start of the data file */
    uint64_t size_bytes;
    uint32_t slot;
    uint32_t depth_grains;
} arena_extent;

typedef struct arena_view arena_view;

/* Checks the headers and makes a client's view of mapped files; the mappings must outlive it.
 * `ledger` may be null (a view that only looks). NULL with *status set when a header is refused. */
arena_view *arena_view_open(const void *index, uint64_t index_bytes, const void *data,
                            uint64_t data_bytes, void *ledger, uint64_t ledger_bytes, int *status);
void arena_view_close(arena_view *view);

/* Counts the leading keys of `keys` (n times 16 bytes) whose record is present with all shards of
 * `full_mask`. Lock-free, no side effect, no system call. `slots` (n entries, may be null) gets
 * the slot of each one found, a hint for arena_pin. */
uint64_t arena_probe_run(const arena_view *view, uint32_t class_id, uint64_t full_mask,
                         const uint8_t *keys, uint64_t n, uint32_t *slots);

/* Marks in `present` (n bytes, 0 or 1) which of n keys are present; returns how many. */
uint64_t arena_probe_each(const arena_view *view, uint32_t class_id, uint64_t full_mask,
                          const uint8_t *keys, uint64_t n, uint8_t *present);

/* Pins one record against eviction and returns 1 with *extent filled, or 0 when it is not (any
 * more) present, which is a miss. Each success needs one arena_unpin of extent->slot. */
int arena_pin(const arena_view *view, uint32_t class_id, uint64_t full_mask, const uint8_t *key,
              arena_extent *extent);
void arena_unpin(const arena_view *view, uint32_t slot);

/* Checksum that was committed for one shard of a pinned record. */
uint64_t arena_shard_sum(const arena_view *view, uint32_t slot, uint32_t shard);

/* Pins this view's ledger holds in all: 0 when nothing leaked. */
uint64_t arena_pins_held(const arena_view *view);

/* Bytes each file needs for a geometry. `records` is rounded up to whole power-of-two buckets. */
uint64_t arena_index_bytes(uint64_t records, uint32_t sums_per_record);
uint64_t arena_ledger_bytes(uint64_t records);
uint64_t arena_record_capacity(uint64_t records);
/* cffi: end */

/* ---- layout: everything below is what docs/kvd-arena.md describes ---- */

#define ARENA_MAGIC_INDEX  0x31584449414b4649ull /* "IFKAIDX1" */
#define ARENA_MAGIC_LEDGER 0x3147444c414b4649ull /* "IFKALDG1" */
#define ARENA_HEADER_BYTES 4096
#define ARENA_NONE         UINT32_MAX

typedef struct {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t header_bytes;
    uint8_t instance[16];
    uint64_t generation;
    uint64_t index_bytes;
    uint64_t data_bytes;
    uint64_t buckets_offset;
    uint64_t sums_offset;
    uint64_t classes_offset;
    uint64_t seed[2];      /* keyed hashing of content keys, so that buckets cannot be aimed at */
    uint32_t bucket_count; /* a power of two */
    uint32_t sums_per_record;
    uint32_t classes_max;
    uint32_t check; /* crc32c of the bytes before it */
} arena_header;

/* What one (namespace, group) stores; written once before its id is given out. */
typedef struct {
    uint8_t name_space[16];
    uint32_t group;
    uint32_t shard_count; /* 0: this entry is free */
    uint32_t record_units;
    uint32_t reserved;
    uint64_t shard_bytes[ARENA_SHARDS_MAX];
    char model[ARENA_MODEL_BYTES];
} arena_class;

/* One record. `version` is even when stable, odd while the daemon changes it. */
typedef struct {
    _Atomic uint64_t version;
    uint64_t key[2];
    uint32_t class_id;
    uint32_t depth_grains;
    uint64_t shard_mask;   /* shards whose bytes are committed */
    uint32_t extent_start; /* in units */
    uint32_t extent_units;
    uint64_t tenant_tag;
    uint32_t flags; /* retention class in the low 3 bits */
    uint32_t check; /* crc32c of everything between version and check */
} arena_record;
_Static_assert(sizeof(arena_record) == 64, "a record is one cache line");

/* 16-bit tags of eight records share a line, so a probe costs two cache misses. Tag 0: empty. */
typedef struct {
    _Atomic uint64_t tags[2];
    uint64_t padding[6];
    arena_record records[ARENA_BUCKET_SLOTS];
} arena_bucket;
_Static_assert(sizeof(arena_bucket) == 576, "bucket is nine cache lines");

typedef struct {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t slots;
    uint8_t instance[16];
    uint64_t token; /* proves to the daemon that a reconnecting client owns this ledger */
    uint8_t padding[24];
} arena_ledger_header; /* followed by one pin count a slot */
_Static_assert(sizeof(arena_ledger_header) == 64, "ledger header is one cache line");

typedef struct {
    uint64_t bucket[2];
    uint16_t tag;
} arena_place;

static inline uint64_t arena_mix(uint64_t a, uint64_t b) {
    __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline arena_place arena_place_of(const arena_header *header, const uint64_t key[2],
                                         uint32_t class_id) {
    uint64_t hash = arena_mix(key[0] ^ header->seed[0], key[1] ^ header->seed[1]);
    hash = arena_mix(hash ^ class_id, 0x9E3779B97F4A7C15ull);
    uint64_t mask = header->bucket_count - 1;
    return (arena_place){{hash & mask, (hash >> 32) & mask}, (uint16_t)((hash >> 48) | 1)};
}

int arena_check_index(const void *index, uint64_t index_bytes, uint64_t data_bytes);
uint32_t arena_record_check(const arena_record *record);
void arena_write_header(arena_header *header, const uint8_t instance[16], uint64_t generation,
                        uint64_t records, uint32_t sums_per_record, uint64_t data_bytes,
                        const uint64_t seed[2]);
void arena_write_ledger(arena_ledger_header *ledger, const uint8_t instance[16], uint32_t slots,
                        uint64_t token);

#endif
