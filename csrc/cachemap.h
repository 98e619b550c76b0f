/* The cache map: which worker holds which prefix, in which tier. One writer, any number of readers.
 */
#ifndef INFERA_CACHEMAP_H
#define INFERA_CACHEMAP_H

#include <stddef.h>
#include <stdint.h>

/* cffi: begin */
enum {
    CACHEMAP_LAYOUT_VERSION = 2,
    CACHEMAP_HOLDERS_MAX = 4095,
    CACHEMAP_SHARED_MAX = 4, /* other holders one target can load from */
    CACHEMAP_TARGETS_MAX = 4096,
    CACHEMAP_GROUPS_MAX = 16,       /* groups of one rank of a hybrid model */
    CACHEMAP_ADAPTERS_MAX = 256,    /* LoRA names one engine's events may use */
    CACHEMAP_NAMESPACES_MAX = 256,  /* of one kvd */
    CACHEMAP_EVENTS_MAX = 1000000,  /* in one frame */
    CACHEMAP_PREDICTED_MAX = 65536, /* predicted blocks waiting for their event at any time */
};

enum cachemap_tier {
    CACHEMAP_HBM = 0,
    CACHEMAP_RAM = 1,
    CACHEMAP_DISK = 2,
    CACHEMAP_PEER = 3,
    CACHEMAP_PREDICTED = 4, /* entered by the router, not yet confirmed; counts as HBM in a match */
    CACHEMAP_TIERS = 5,
};

enum cachemap_status {
    CACHEMAP_OK = 0,
    CACHEMAP_BAD_MAGIC = 1,
    CACHEMAP_BAD_VERSION = 2,
    CACHEMAP_BAD_GEOMETRY = 3,
    CACHEMAP_BAD_FRAME = 4, /* bytes that are not what their sender's format says */
    CACHEMAP_NO_MEMORY = 5,
    CACHEMAP_NO_HOLDER = 6, /* the handle is void */
    CACHEMAP_FULL = 7,      /* a limit on names, groups or holders */
};

/* How a group of layers uses what it holds. */
enum cachemap_rule {
    CACHEMAP_RULE_FULL = 0,   /* every block of the prefix */
    CACHEMAP_RULE_WINDOW = 1, /* the blocks of the last window */
    CACHEMAP_RULE_STATE = 2,  /* the state at the end of the prefix */
};

enum cachemap_source { CACHEMAP_ENGINE = 0, CACHEMAP_KVD = 1, CACHEMAP_SOURCES = 2 };

/* What became of what was said; blocks unless named otherwise. The Python binding has the names. */
enum cachemap_counter {
    CACHEMAP_STORED,
    CACHEMAP_REMOVED,
    CACHEMAP_REMOVED_UNKNOWN,
    CACHEMAP_CLEARED, /* events */
    CACHEMAP_UNKNOWN_PARENT,
    CACHEMAP_UNKNOWN_PLACE, /* of a sparse event: no group says which block of the prompt it is */
    CACHEMAP_LORA,
    CACHEMAP_EXTRA_KEYS,
    CACHEMAP_IMAGES_OVER_LIMIT, /* of events in which more images begin than are read of one */
    CACHEMAP_OTHER_MEDIUM,
    CACHEMAP_OTHER_GROUP,
    CACHEMAP_OTHER_NAMESPACE,
    CACHEMAP_BLOCK_SIZE, /* neither a multiple of the grain nor a part of it */
    CACHEMAP_BAD_TOKEN,
    CACHEMAP_REFUSED_FULL,
    CACHEMAP_ALIAS_CHANGED,
    CACHEMAP_COPIES_UNCOUNTED, /* a copy past what can be counted: gone with the first removal */
    CACHEMAP_UNKNOWN_EVENT,    /* events */
    CACHEMAP_GROUP_UNKNOWN,    /* of a group whose rule is not known: taken as full attention */
    CACHEMAP_PAGES,            /* pages below the grain that were gathered */
    CACHEMAP_PREDICTIONS,
    CACHEMAP_PREDICTIONS_CONFIRMED,
    CACHEMAP_PREDICTIONS_EXPIRED,
    CACHEMAP_PREDICTIONS_DROPPED, /* early, to make room */
    CACHEMAP_BAD_FRAMES,          /* frames, as the next ones */
    CACHEMAP_FRAMES,
    CACHEMAP_DUPLICATES,
    CACHEMAP_GAPS,
    CACHEMAP_REPLAYS,
    CACHEMAP_REPLAY_TIMEOUTS,
    CACHEMAP_RESYNCS,
    CACHEMAP_SNAPSHOTS,
    CACHEMAP_OTHER_TOPIC,
    CACHEMAP_COUNTERS,
};

typedef struct cachemap cachemap;
typedef struct cachemap_view cachemap_view;
typedef struct cachemap_engine cachemap_engine;
typedef struct cachemap_kvd cachemap_kvd;

/* ---- the writer ---- */

/* Bytes to map for at most `entries_max` (block, holder, tier) entries; 0 for a number no map can
 * have. Memory is used only as far as it was touched. */
uint64_t cachemap_bytes(uint64_t entries_max);
/* Makes an empty map in zeroed memory. NULL when a number makes no sense or memory is short. */
cachemap *cachemap_create(void *base, uint64_t bytes, uint64_t entries_max, const uint64_t seed[2]);
void cachemap_close(cachemap *map);
/* Tells readers that nobody keeps this map any more. */
void cachemap_abandon(cachemap *map);

/* A new, empty holder; 0 at the limit. `counts_copies`: stored twice needs two removals. */
uint64_t cachemap_holder_add(cachemap *map, int counts_copies);
/* Forgets what a holder held, at once for every reader; its memory is swept up little by little. */
int cachemap_holder_clear(cachemap *map, uint64_t holder);
int cachemap_holder_drop(cachemap *map, uint64_t holder);
/* Makes `group` a further group of the rank `holder`, matched by its rule; CACHEMAP_FULL at the
 * limit. */
int cachemap_holder_add_group(cachemap *map, uint64_t holder, uint64_t group, uint32_t rule,
                              uint32_t window_tokens);
void cachemap_holder_set_block_size(cachemap *map, uint64_t holder, uint32_t tokens);

/* Enters n keys of 16 bytes; returns how many were refused at the limit. */
uint64_t cachemap_store(cachemap *map, uint64_t holder, uint32_t tier, const uint8_t *keys,
                        uint64_t n);
/* Takes n keys out once; returns how many were unknown. */
uint64_t cachemap_remove(cachemap *map, uint64_t holder, uint32_t tier, const uint8_t *keys,
                         uint64_t n);
/* Enters blocks a request will soon store at a holder. They count as HBM until `now_ms` is past
 * their life. Returns how many were entered. */
uint64_t cachemap_predict(cachemap *map, uint64_t holder, const uint8_t *keys, uint64_t n,
                          uint64_t now_ms, uint32_t life_ms);
/* Ends predictions whose life is over; call now and then. Sweeps a part of the map as well, and
 * returns 1 while there is more to sweep. */
int cachemap_tick(cachemap *map, uint64_t now_ms);
void cachemap_count(cachemap *map, uint32_t source, uint32_t counter, uint64_t more);
/* Adds one frame to what is known to have come for a holder. */
void cachemap_holder_saw_frame(cachemap *map, uint64_t holder);
/* What is wrong with the books, or NULL. Slow; for tests. */
const char *cachemap_audit(cachemap *map);

/* ---- decoders: one call for a frame ---- */

enum cachemap_dialect { CACHEMAP_VLLM = 0, CACHEMAP_SGLANG = 1 };

/* Decodes the events of one engine rank into `holder`. NULL when memory is short. */
cachemap_engine *cachemap_engine_open(cachemap *map, uint64_t holder, uint32_t dialect);
/* Frees it and drops the holders of further groups; `holder` itself stays. */
void cachemap_engine_close(cachemap_engine *engine);
/* Says what a LoRA name in events stands for from now on: the digest of its weights. */
int cachemap_engine_adapter(cachemap_engine *engine, const uint8_t *name, uint32_t name_bytes,
                            const uint8_t *digest, uint32_t digest_bytes);
/* Forgets what LoRA names stand for, and nothing else. */
void cachemap_engine_forget_adapters(cachemap_engine *engine);
/* Applies a frame's payload in order. After CACHEMAP_BAD_FRAME a part may have been applied. */
int cachemap_engine_apply(cachemap_engine *engine, const uint8_t *payload, uint64_t bytes);
/* Forgets everything: what this rank holds is no longer known. */
void cachemap_engine_reset(cachemap_engine *engine);
/* Engine hashes known at the moment, over all groups. */
uint64_t cachemap_engine_aliases(const cachemap_engine *engine);

cachemap_kvd *cachemap_kvd_open(cachemap *map);
void cachemap_kvd_close(cachemap_kvd *kvd);
/* Enters a namespace's events in a holder; 0 as holder forgets the namespace. */
int cachemap_kvd_namespace(cachemap_kvd *kvd, const uint8_t *name, uint32_t name_bytes,
                           uint64_t holder);
int cachemap_kvd_apply(cachemap_kvd *kvd, const uint8_t *payload, uint64_t bytes);
void cachemap_kvd_reset(cachemap_kvd *kvd);

/* ---- readers ---- */

/* A place to send a request. */
typedef struct {
    uint64_t own;                         /* its own holder, or 0 */
    uint64_t shared[CACHEMAP_SHARED_MAX]; /* the first 0 ends them */
    uint32_t stride_grains;               /* block size in grains of 16 tokens */
    uint32_t reserved;
} cachemap_target;

/* The longest usable prefix there, in grains, by where each block would come from. */
typedef struct {
    uint32_t grains[4];
} cachemap_match;

typedef struct {
    uint64_t entries;
    uint64_t entries_max;
    uint64_t nodes;     /* different keys */
    uint64_t predicted; /* not in `entries` */
    uint64_t aliases;
    uint64_t sweeping; /* holders' places that are not swept yet */
    uint64_t holders;
    uint64_t is_abandoned;
    uint64_t beat_ms; /* when the writer was last seen, by its clock */
    uint64_t counters[CACHEMAP_SOURCES * CACHEMAP_COUNTERS];
} cachemap_facts;

typedef struct {
    uint64_t blocks[CACHEMAP_TIERS];
    uint64_t frames;
    uint32_t block_size_tokens;
    uint32_t groups;
} cachemap_holder_facts;

/* A reader of mapped memory, which must outlive it. NULL with *status set when refused. */
cachemap_view *cachemap_view_open(const void *base, uint64_t bytes, int *status);
void cachemap_view_close(cachemap_view *view);
/* Longest match of one prompt, `grains` keys of 16 bytes, for all targets in one walk. A target
 * whose handles are void matches nothing. Returns CACHEMAP_OK, CACHEMAP_FULL for too many targets,
 * or CACHEMAP_NO_MEMORY. Lock-free, no system call unless a target is a hybrid model's. */
int cachemap_match_all(const cachemap_view *view, const uint8_t *keys, uint64_t grains,
                       const cachemap_target *targets, uint32_t n, cachemap_match *matches);
/* The same after computing the keys of `tokens` under `root`; writes them to `keys`, which has room
 * for tokens / 16 of them. */
int cachemap_match_tokens(const cachemap_view *view, const uint8_t *root, const uint32_t *tokens,
                          uint64_t count, uint8_t *keys, const cachemap_target *targets, uint32_t n,
                          cachemap_match *matches);
void cachemap_read_facts(const cachemap_view *view, cachemap_facts *facts);
/* 0 when the handle is void. */
int cachemap_read_holder(const cachemap_view *view, uint64_t holder, cachemap_holder_facts *facts);
/* cffi: end */

#endif
