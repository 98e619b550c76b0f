/* Layout of the cache map's memory, and what its source files share. See cachemap.c. */
#ifndef INFERA_CACHEMAP_PRIVATE_H
#define INFERA_CACHEMAP_PRIVATE_H

#include <stdatomic.h>

#if defined(__SANITIZE_THREAD__)
#undef __SSE2__ /* the thread sanitizer does not know vector loads for what they are */
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "cachemap.h"
#include "mix.h"

#define CACHEMAP_MAGIC        0x3150414d48434649ull /* "IFCHMAP1" */
#define CACHEMAP_HEADER_BYTES 4096
#define CACHEMAP_ENTRIES_MIN  64
#define CACHEMAP_ENTRIES_LIM  (1ull << 30)
#define KEY_BYTES             16
#define BUCKET_LANES          10
#define BUCKET_WINDOW         64 /* a key lies in its home bucket or one of the next ones */
#define SLOTS                 4096
#define SLOT_GROUPS           (SLOTS / 64)
#define NO_HOLDER_INDEX       0

/* The header is written once but for what follows `check`. */
typedef struct {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t header_bytes;
    uint64_t bytes;
    uint64_t entries_max;
    uint64_t seed[2];
    uint64_t holders_offset;
    uint64_t nodes_offset;
    uint64_t buckets_offset;
    uint64_t chunks_offset;
    uint64_t aliases_offset;
    uint64_t alias_slots;
    uint32_t nodes_max;
    uint32_t bucket_count;
    uint32_t chunks_max;
    uint32_t check; /* crc32c of the bytes before it */
    _Atomic uint64_t is_abandoned;
    _Atomic uint64_t beat_ms;
    _Atomic uint64_t entries;
    _Atomic uint64_t nodes;
    _Atomic uint64_t predicted;
    _Atomic uint64_t aliases;
    _Atomic uint64_t sweeping;
    _Atomic uint64_t holders;
    _Atomic uint64_t counters[CACHEMAP_SOURCES][CACHEMAP_COUNTERS];
} cachemap_header;
_Static_assert(sizeof(cachemap_header) <= CACHEMAP_HEADER_BYTES, "the header has one page");

/* One cache that can hold blocks. */
typedef struct {
    _Atomic uint64_t handle; /* 0: free */
    _Atomic uint32_t slot;   /* its bit in every set; another one after each clear */
    _Atomic uint32_t block_size_tokens;
    _Atomic uint32_t rule;
    _Atomic uint32_t window_tokens;
    _Atomic uint32_t next_group; /* index of the holder of the rank's next group */
    uint32_t counts_copies;
    _Atomic uint64_t blocks[CACHEMAP_TIERS];
    _Atomic uint64_t frames;
    uint64_t has_pages; /* aliases lead to pages, which are no blocks yet */
    uint64_t reserved[5];
} cachemap_holder;
_Static_assert(sizeof(cachemap_holder) == 128, "a holder is two cache lines");

/* One key and who holds it. The set word is read and written whole:
 *   top bit 0: up to four places of 15 bits (slot << 3 | tier), 0 for none
 *   top bit 1: 31 bits of version, 32 bits of index of the first chunk */
typedef struct {
    uint64_t key[2];
    _Atomic uint64_t set;
} cachemap_node;

/* Holders of one tier among 64 neighbouring slots. */
typedef struct {
    _Atomic uint64_t bits;
    _Atomic uint32_t next;  /* index, 0 at the end */
    _Atomic uint32_t place; /* slot group << 3 | tier */
} cachemap_chunk;

/* Part of the hash table from keys to nodes: one cache line. */
typedef struct {
    _Atomic uint16_t tags[BUCKET_LANES];  /* never 0 where a node is */
    _Atomic uint16_t strayed;             /* keys at home here that lie further on */
    _Atomic uint16_t reach;               /* how far the farthest of them was put */
    _Atomic uint32_t nodes[BUCKET_LANES]; /* 0: free */
} cachemap_bucket;
_Static_assert(sizeof(cachemap_bucket) == 64, "a bucket is one cache line");

/* What an engine calls a block, or how many copies of one there are. Only the writer reads these.
 */
typedef struct {
    uint64_t hash;
    uint32_t node;
    uint16_t place; /* slot << 3 | tier; 0: free */
    uint16_t count;
} cachemap_alias;
#define COPIES_TIER 7u /* marks an entry that counts copies; its hash is node << 3 | tier */

typedef struct {
    uint8_t key[KEY_BYTES];
    uint64_t holder;
    uint64_t ends_ms;
} cachemap_prediction;

enum slot_state { SLOT_FREE, SLOT_USED, SLOT_RETIRED, SLOT_SWEEPING };

struct cachemap {
    cachemap_header *header;
    cachemap_holder *holders;
    cachemap_node *nodes;
    cachemap_bucket *buckets;
    cachemap_chunk *chunks;
    cachemap_alias *aliases;
    uint64_t entries_max, alias_slots, seed[2];
    uint32_t nodes_max, bucket_count, chunks_max;
    uint32_t node_free, nodes_fresh;   /* list of freed ones, first never used */
    uint32_t chunk_free, chunks_fresh; /* likewise */
    uint32_t version;
    uint64_t handles_made;
    uint8_t slot_states[SLOTS];
    uint16_t slots_free[SLOTS];
    uint32_t slots_free_count, slots_retired, slots_sweeping;
    uint64_t sweep_node, sweep_alias;
    cachemap_prediction *predictions; /* a ring */
    uint64_t predictions_head, predictions_tail;
};

struct cachemap_view {
    const cachemap_header *header;
    const cachemap_holder *holders;
    const cachemap_node *nodes;
    const cachemap_bucket *buckets;
    const cachemap_chunk *chunks;
    uint64_t seed[2];
    uint32_t nodes_max, bucket_count, chunks_max;
};

static inline void cachemap_load_key(const uint8_t *bytes, uint64_t key[2]) {
    __builtin_memcpy(key, bytes, KEY_BYTES);
}

static inline uint64_t cachemap_hash(const uint64_t seed[2], const uint64_t key[2]) {
    return mix_words(key[0] ^ seed[0], key[1] ^ seed[1]);
}

static inline uint32_t cachemap_home(uint64_t hash, uint32_t bucket_count) {
    return (uint32_t)((__uint128_t)hash * bucket_count >> 64);
}

static inline uint16_t cachemap_tag(uint64_t hash) {
    return (uint16_t)(hash | 1);
}

/* Bit i for each lane i whose tag may be `tag`: all that are, now and then one more. */
#ifdef __SSE2__
static inline uint32_t cachemap_lanes(const cachemap_bucket *bucket, uint16_t tag) {
    /* One aligned load of eight tags; each is read whole, which is all that is asked of it. */
    __m128i tags = _mm_load_si128((const __m128i *)(const void *)bucket);
    __m128i equal = _mm_cmpeq_epi16(tags, _mm_set1_epi16((short)tag));
    uint32_t lanes = (uint32_t)_mm_movemask_epi8(_mm_packs_epi16(equal, _mm_setzero_si128()));
    for (uint32_t lane = 8; lane < BUCKET_LANES; lane++)
        lanes |= (uint32_t)(atomic_load_explicit(&bucket->tags[lane], memory_order_relaxed) == tag)
                 << lane;
    return lanes;
}
#else
static inline uint32_t cachemap_lanes(const cachemap_bucket *bucket, uint16_t tag) {
    const uint64_t ones = 0x0001000100010001ull, tops = 0x8000800080008000ull;
    const _Atomic uint64_t *words = (const _Atomic uint64_t *)(const void *)bucket;
    uint32_t lanes = 0;
    for (uint32_t part = 0; part < 3; part++) {
        uint64_t unequal =
            atomic_load_explicit(&words[part], memory_order_relaxed) ^ ((uint64_t)tag * ones);
        uint64_t zeros = (unequal - ones) & ~unequal & tops;
        lanes |= (uint32_t)(((zeros >> 15) * 0x0001000200040008ull) >> 48 & 15) << (4 * part);
    }
    return lanes & ((1u << BUCKET_LANES) - 1);
}
#endif

#define SET_IS_CHAIN         (1ull << 63)
#define SET_PLACES           4
#define SET_PLACE_BITS       15
#define SET_PLACE_MASK       0x7FFFull
#define PLACE(slot, tier)    ((uint32_t)(slot) << 3 | (tier))
#define GROUP_PLACE(s, tier) ((uint32_t)(s) >> 6 << 3 | (tier))

static inline uint32_t set_place(uint64_t set, int lane) {
    return (uint32_t)(set >> (SET_PLACE_BITS * lane) & SET_PLACE_MASK);
}

/* cachemap_set.c: who holds one key */
enum set_change { SET_UNCHANGED, SET_CHANGED, SET_FULL };
int cachemap_set_has(const cachemap *map, uint32_t node, uint32_t slot, uint32_t tier);
enum set_change cachemap_set_add(cachemap *map, uint32_t node, uint32_t slot, uint32_t tier);
enum set_change cachemap_set_remove(cachemap *map, uint32_t node, uint32_t slot, uint32_t tier);
/* Takes out every place whose slot is being swept. */
void cachemap_set_sweep(cachemap *map, uint32_t node);
/* Chunks in use, for the audit; UINT32_MAX when a chain is broken. */
uint32_t cachemap_set_chunks(const cachemap *map, uint32_t node, uint64_t *places);

/* cachemap_index.c: keys -> nodes, engine hashes -> nodes */
uint32_t cachemap_node_find(const cachemap *map, const uint64_t key[2], uint64_t hash);
/* A node for a key that has none; 0 when there is no room. */
uint32_t cachemap_node_add(cachemap *map, const uint64_t key[2], uint64_t hash);
void cachemap_node_free(cachemap *map, uint32_t node);
cachemap_alias *cachemap_alias_find(const cachemap *map, uint64_t hash, uint32_t place);
cachemap_alias *cachemap_alias_add(cachemap *map, uint64_t hash, uint32_t place); /* NULL: full */
void cachemap_alias_erase(cachemap *map, cachemap_alias *alias);
void cachemap_alias_prefetch(const cachemap *map, uint64_t hash, uint32_t place);

/* cachemap_sweep.c */
void cachemap_slot_retire(cachemap *map, uint32_t slot);
uint32_t cachemap_slot_take(cachemap *map); /* 0: none left */
int cachemap_sweep(cachemap *map, uint64_t steps);
void cachemap_sweep_all(cachemap *map);
static inline int cachemap_slot_is_dead(const cachemap *map, uint32_t slot) {
    return map->slot_states[slot] >= SLOT_RETIRED;
}

/* cachemap.c: entries, whoever says so */
cachemap_holder *cachemap_holder_of(const cachemap *map, uint64_t handle);
void cachemap_holder_set_rule(cachemap *map, uint64_t handle, uint32_t rule,
                              uint32_t window_tokens);
/* A holder's further groups are its own no longer. */
void cachemap_holder_unlink(cachemap *map, uint64_t handle);
/* One more reason for (node's key, holder, tier); the node may be new. 0 when refused. */
int cachemap_enter(cachemap *map, cachemap_holder *holder, uint32_t tier, const uint64_t key[2],
                   uint64_t hash, int counts_copies, uint32_t *node);
/* One reason less; the node is gone with its last entry. */
void cachemap_leave(cachemap *map, cachemap_holder *holder, uint32_t tier, uint32_t node,
                    int counts_copies);
/* Ends what was predicted for a block; returns whether anything was. */
int cachemap_unpredict(cachemap *map, cachemap_holder *holder, uint32_t node);

static inline void cachemap_add(_Atomic uint64_t *counter, uint64_t more) {
    /* One writer: no need for a locked addition. */
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + more,
                          memory_order_relaxed);
}

#endif
