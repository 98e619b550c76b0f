/* The shared-memory arena: layout of its files, and what a client does with them. */
#ifndef INFERA_ARENA_H
#define INFERA_ARENA_H

#include <stddef.h>
#include <stdint.h>

#include "mix.h"

/* cffi: begin */
enum {
    ARENA_LAYOUT_VERSION = 3,
    ARENA_KEY_BYTES = 16,
    ARENA_UNIT_BYTES = 4096, /* extents are counted in these, so O_DIRECT works from the arena */
    ARENA_BUCKET_SLOTS = 8,
    ARENA_CLASSES_MAX = 256,
    ARENA_SHARDS_MAX = 64,
    ARENA_MODEL_BYTES = 128,
    ARENA_PINS_PER_RECORD_MAX = 255,
};

#define ARENA_NO_SLOT 0xFFFFFFFF

enum arena_status {
    ARENA_OK = 0,
    ARENA_BAD_MAGIC = 1,    /* not an arena file */
    ARENA_BAD_VERSION = 2,  /* another layout version */
    ARENA_BAD_GEOMETRY = 3, /* sizes in the header do not fit the file */
    ARENA_BAD_CHECK = 4,    /* header check word is wrong */
};

/* Where the bytes of one shard of a pinned record are, and their checksum. */
typedef struct {
    uint64_t offset_bytes; /* from the start of the data file */
    uint64_t size_bytes;   /* of the extent: at least the shard's, rounded up to a unit */
    uint64_t sum;
} arena_location;

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

/* Pins one record against eviction and returns its slot, or ARENA_NO_SLOT when it is not (any more)
 * present, which is a miss. Each success needs one arena_unpin. */
uint32_t arena_pin(const arena_view *view, uint32_t class_id, uint64_t full_mask,
                   const uint8_t *key);
/* Pins the leading ones of n records; returns how many, their slots in `slots`. */
uint64_t arena_pin_run(const arena_view *view, uint32_t class_id, uint64_t full_mask,
                       const uint8_t *keys, uint64_t n, uint32_t *slots);
void arena_unpin(const arena_view *view, uint32_t slot);

/* Where one shard of a pinned record lies; 0 when the index holds nonsense there. */
int arena_locate(const arena_view *view, uint32_t slot, uint32_t shard, arena_location *location);

/* A number that changes with every record stored or removed: as long as it stays the same, an
 * answer given before is still right. */
uint64_t arena_change_count(const arena_view *view);

/* A run of keys that is asked for again and again. `found` is the last answer. */
typedef struct {
    const uint8_t *keys; /* n times 16 bytes */
    uint64_t full_mask;
    uint32_t class_id;
    uint32_t n;
    uint32_t found;
    uint32_t reserved;
} arena_question;

/* How many records have been removed, in all. Read it before asking; see arena_ask_again. */
uint64_t arena_removed_count(const arena_view *view);

/* Brings the answers of n questions up to date. `were_removed`: whether records have been removed
 * since they were given. Then a run is believed when its last record is there, since chains are
 * evicted from their end, and about `whole_keys_max` keys are looked up anew, one by one, going
 * round from question *turn on; so a run with a gap is found out after a few calls, or when it is
 * pinned. */
void arena_ask_again(const arena_view *view, arena_question *questions, uint32_t n,
                     int were_removed, uint32_t whole_keys_max, uint32_t *turn);

/* Pins this view's ledger holds in all: 0 when nothing leaked. */
uint64_t arena_pins_held(const arena_view *view);

/* Bytes each file needs for a geometry. `records` is rounded up to whole power-of-two buckets. */
uint64_t arena_index_bytes(uint64_t records, uint32_t shards_per_record, uint64_t data_bytes);
uint64_t arena_ledger_bytes(uint64_t records);
uint64_t arena_record_capacity(uint64_t records);

/* What the header of an index file says; what is not known to be right is 0. */
typedef struct {
    uint8_t instance[16];
    uint64_t generation;
    uint64_t data_bytes;
    uint64_t records;
    uint32_t layout_version; /* right also when it is an unknown one */
    uint32_t shards_per_record;
} arena_facts;

/* Reads and checks a header; ARENA_OK when the files can be used. */
int arena_read_facts(const void *index, uint64_t index_bytes, uint64_t data_bytes,
                     arena_facts *facts);
/* cffi: end */

/* ---- layout: everything below is what docs/kvd-arena.md describes ---- */

#define ARENA_MAGIC_INDEX  0x31584449414b4649ull /* "IFKAIDX1" */
#define ARENA_MAGIC_LEDGER 0x3147444c414b4649ull /* "IFKALDG1" */
#define ARENA_HEADER_BYTES 4096
#define ARENA_BUCKETS_MAX  (1u << 27) /* so that a slot number leaves bits of 32 free */
#define ARENA_NONE         ARENA_NO_SLOT

typedef struct {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t header_bytes;
    uint8_t instance[16];
    uint64_t generation;
    uint64_t index_bytes;
    uint64_t data_bytes;
    uint64_t buckets_offset;
    uint64_t shards_offset;
    uint64_t classes_offset;
    uint64_t slabs_offset;
    uint64_t seed[2];      /* keyed hashing of content keys, so that buckets cannot be aimed at */
    uint32_t bucket_count; /* a power of two */
    uint32_t shards_per_record;
    uint32_t classes_max;
    uint32_t slab_units;
    uint32_t slab_count;
    uint32_t check; /* crc32c of the bytes before it */
    uint32_t reserved;
    uint8_t padding[64];              /* what follows changes all the time: its own line */
    _Atomic uint64_t change_count;    /* see arena_change_count */
    _Atomic uint32_t now_s;           /* of the wall clock, by which records expire; coarse */
    _Atomic uint32_t daemon_sleeping; /* 1: a client that left something in its ring must ring */
    _Atomic uint64_t removed_count;   /* see arena_removed_count */
} arena_header;

/* What one (namespace, group) stores; written once before its id is given out. */
typedef struct {
    uint8_t name_space[16];
    uint32_t group;
    uint32_t shard_count; /* 0: this entry is free, or retired */
    uint32_t check;       /* crc32c of the entry, with this field 0 */
    uint32_t is_retired;  /* 1: was damaged; its id is never given out again */
    uint64_t shard_bytes[ARENA_SHARDS_MAX];
    char model[ARENA_MODEL_BYTES];
} arena_class;

/* One record. `version` is even when stable, odd while the daemon changes it. */
typedef struct {
    _Atomic uint64_t version;
    uint64_t key[2];
    uint32_t class_id;
    uint32_t depth_grains;
    uint64_t shard_mask; /* shards whose bytes are committed */
    uint64_t tenant_tag;
    uint32_t flags;     /* retention class in the low 3 bits */
    uint32_t expires_s; /* seconds of the wall clock at which it may no longer be used; 0: never */
    uint32_t reserved;
    uint32_t
        check; /* crc32c of everything between version and check, and of its committed shards */
} arena_record;
_Static_assert(sizeof(arena_record) == 64, "a record is one cache line");

/* One committed shard of a record. */
typedef struct {
    uint64_t sum;
    uint32_t extent_start; /* in units */
    uint32_t extent_units;
} arena_shard;

/* What a slab of the data file is part of: extents of `units` each, counted from `first_slab`. */
typedef struct {
    uint32_t first_slab;
    uint32_t units; /* 0: the slab is free */
} arena_slab;

/* 16-bit tags of eight records share a line, so a probe costs two cache misses. Tag 0: empty. */
typedef struct {
    _Atomic uint64_t tags[2];
    uint64_t padding[6];
    arena_record records[ARENA_BUCKET_SLOTS];
} arena_bucket;
_Static_assert(sizeof(arena_bucket) == 576, "bucket is nine cache lines");

/* Space a client may be writing to, noted by the daemon so that the next one keeps off it too. */
typedef struct {
    uint64_t reservation;
    uint32_t extent_start; /* in units */
    uint32_t extent_units; /* 0: this entry is free */
    uint32_t class_id;
    uint16_t shard;
    uint16_t is_stock; /* 1: taken ahead; a commit of it may still be in the ring */
} arena_held;
_Static_assert(sizeof(arena_held) == 24, "no padding in files");

/* One message from client to daemon. */
typedef struct {
    uint32_t kind; /* enum ring_kind in ring.h */
    uint32_t class_id;
    uint64_t reservation;
    uint8_t key[16];
    uint32_t depth_grains;
    uint32_t flags;
    uint64_t tenant_tag;
    uint64_t sum;
    uint32_t ttl_s;
    uint32_t reserved;
} arena_ring_entry;
_Static_assert(sizeof(arena_ring_entry) == 64, "a ring entry is one cache line");

/* Space reserved ahead for one client, to be taken without asking. */
typedef struct {
    _Atomic uint64_t state; /* see ring.h: who has it, and its generation */
    _Atomic uint64_t kind;  /* class id in the low half, shard in the high */
    uint64_t reservation;
    uint64_t offset_bytes;
} arena_stock_entry;

/* A client's file: header, then held[ARENA_HELD_MAX], stock[ARENA_STOCK_MAX], ring entries, and one
 * pin count a slot. Client and daemon both write it; the daemon believes nothing in it unchecked.
 */
typedef struct {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t slots;
    uint8_t instance[16];
    uint64_t token; /* proves to the daemon that a reconnecting client owns this ledger */
    uint64_t held_offset;
    uint64_t stock_offset;
    uint64_t ring_offset;
    uint64_t pins_offset;
    uint32_t client; /* the daemon's number of it */
    uint32_t process_id;
    char name[48];
    _Atomic uint64_t ring_head; /* entries ever written, by the client */
    uint8_t head_padding[56];
    _Atomic uint64_t ring_tail; /* entries ever read, by the daemon */
    uint8_t tail_padding[56];
} arena_ledger_header;
_Static_assert(sizeof(arena_ledger_header) == 256, "ledger header is four cache lines");

#define ARENA_HELD_MAX  8192
#define ARENA_STOCK_MAX 256
#define ARENA_RING_MAX  4096 /* a power of two */

typedef struct {
    uint64_t bucket[2];
    uint16_t tag;
} arena_place;

static inline arena_place arena_place_of(const arena_header *header, const uint64_t key[2],
                                         uint32_t class_id) {
    uint64_t hash = mix_words(key[0] ^ header->seed[0], key[1] ^ header->seed[1]);
    hash = mix_words(hash ^ class_id, 0x9E3779B97F4A7C15ull);
    uint64_t mask = header->bucket_count - 1;
    return (arena_place){{hash & mask, (hash >> 32) & mask}, (uint16_t)((hash >> 48) | 1)};
}

int arena_check_ledger(const arena_header *header, const arena_ledger_header *ledger,
                       uint64_t ledger_bytes);
int arena_check_index(const void *index, uint64_t index_bytes, uint64_t data_bytes);
uint32_t arena_record_check(const arena_record *record, const arena_shard *shards);
uint32_t arena_class_check(const arena_class *kind);
uint32_t arena_slab_units(uint64_t data_bytes);
void arena_write_header(arena_header *header, const uint8_t instance[16], uint64_t generation,
                        uint64_t records, uint32_t shards_per_record, uint64_t data_bytes,
                        const uint64_t seed[2]);
void arena_write_ledger(arena_ledger_header *ledger, const uint8_t instance[16], uint32_t slots,
                        uint64_t token);

#endif
