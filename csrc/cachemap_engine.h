/* One engine rank's part of the cache map: what its source files share. */
#ifndef INFERA_CACHEMAP_ENGINE_H
#define INFERA_CACHEMAP_ENGINE_H

#include "cachemap_private.h"
#include "content_key.h"
#include "msgpack.h"

#define GRAIN_TOKENS     CONTENT_KEY_GRAIN_TOKENS
#define PAGE_TOKENS_MAX  (GRAIN_TOKENS / 2)
#define IDENTITY_MAX     65536 /* bytes of a salt or digest, as for every content key */
#define ADAPTER_NAME_MAX 512
#define DIGEST_MAX       128
#define IMAGES_MAX       1024 /* that begin in the blocks of one event */

/* A group of layers that this rank's events name. */
typedef struct {
    uint64_t index; /* as the events have it */
    uint64_t holder;
} engine_group;

typedef struct {
    uint32_t name_bytes, digest_bytes;
    uint8_t name[ADAPTER_NAME_MAX], digest[DIGEST_MAX];
} engine_adapter;

/* An image of the event being read, where it begins. */
typedef struct {
    uint64_t token; /* its first, counted from the event's first */
    msgpack_text identifier;
} engine_image;

/* A page below the grain; see cachemap_pages.c. */
typedef struct {
    uint8_t key[KEY_BYTES]; /* of its grain when it completes one, else of the grain before */
    uint64_t hash;
    uint32_t parent, child, next, before; /* pages of the same grain */
    uint32_t node;                        /* what a complete grain is entered as, 0: not entered */
    uint16_t count;                       /* how often it is held; 0: only its children keep it */
    uint8_t filled;                       /* tokens of the grain up to its end */
    uint8_t tier;
    uint32_t tokens[PAGE_TOKENS_MAX];
} engine_page;

struct cachemap_engine {
    cachemap *map;
    uint64_t holder;
    uint32_t dialect;
    uint32_t group_count, adapter_count, adapter_room;
    engine_group groups[CACHEMAP_GROUPS_MAX];
    engine_adapter *adapters;
    uint64_t aliases;
    engine_page *pages; /* 0 is never used */
    uint32_t pages_room, pages_fresh, page_free;
    /* What one event holds; as large as the largest frame needed. */
    uint64_t *hashes;
    uint32_t *tokens;
    uint8_t *keys;
    engine_image *images; /* IMAGES_MAX of them, in order; NULL before the first */
    uint8_t *extra;       /* encoded images of one grain */
    uint64_t hashes_room, tokens_room, keys_room, extra_room;
    uint32_t image_count;
    uint8_t *identity;
};

enum event_kind { EVENT_OTHER, EVENT_STORED, EVENT_REMOVED, EVENT_CLEARED };

/* One event as it was read. Texts point into the frame. */
typedef struct {
    enum event_kind kind;
    uint64_t hash_count, token_count;
    uint64_t parent;
    int has_hashes, has_tokens, has_parent, has_bad_token, has_lora_id, is_remote;
    int is_broken; /* a field has another shape than this kind of event gives it */
    uint64_t block_size_tokens, group, window_tokens;
    msgpack_text medium, lora_name, group_kind, salt;
    msgpack extra; /* at the array of extra keys; empty when there is none */
    uint64_t extra_count;
} engine_event;

/* cachemap_decode.c */
uint64_t engine_fold_hash(const cachemap_engine *engine, const uint8_t *bytes, uint32_t count);

/* cachemap_engine.c */
void engine_stored(cachemap_engine *engine, const engine_event *event);
void engine_removed(cachemap_engine *engine, const engine_event *event);
void engine_note(cachemap_engine *engine, uint32_t counter, uint64_t more);

/* cachemap_extras.c */
const engine_adapter *engine_find_adapter(const cachemap_engine *engine, const msgpack_text *name);
/* Reads an event's salt and images. Returns the counter of why it cannot be indexed, or
 * CACHEMAP_STORED. */
uint32_t engine_read_extras(cachemap_engine *engine, const engine_event *event, msgpack_text *salt);
/* Start of a chain under a salt and an adapter (or NULL), encoded as infera_core.keys.root_key
 * does; 0 when the salt is too long for a key. */
int engine_root(cachemap_engine *engine, const msgpack_text *salt, const engine_adapter *adapter,
                uint8_t root[KEY_BYTES]);
/* Computes the keys of the event's grains after `parent`; 0 when memory is short. */
int engine_chain(cachemap_engine *engine, const uint8_t parent[KEY_BYTES],
                 const engine_event *event);

/* cachemap_pages.c: n pages of event->block_size_tokens tokens each */
void engine_pages_stored(cachemap_engine *engine, cachemap_holder *holder, uint32_t tier,
                         const engine_event *event, const uint8_t *root);
/* Takes a page away once; 0 when it is not known. */
int engine_page_removed(cachemap_engine *engine, cachemap_holder *holder, uint32_t tier,
                        uint64_t hash);
void engine_pages_reset(cachemap_engine *engine);

/* Whether an event has tokens of more blocks than it names. */
static inline int engine_is_sparse(const engine_event *event) {
    return event->token_count / event->block_size_tokens > event->hash_count;
}

static inline uint32_t engine_slot(const cachemap_holder *holder) {
    return atomic_load_explicit(&holder->slot, memory_order_relaxed);
}

#endif
