/* Turns one engine rank's events into entries of the cache map.
 *
 * An engine names blocks by hashes of its own.  They are only aliases here: each leads to the
 * content key of the prefix it ends, computed from the tokens in the event, so engines, versions
 * and hash seeds do not matter.  A key carries the state of its chain, so the alias of the parent
 * is all that is needed to go on.
 *
 * What an event says ambiguously is counted and left out: a LoRA without a known digest, extra keys
 * that cannot be told apart (see cachemap_extras.c), a medium or place that is not this host's. One
 * hash given to two prefixes keeps the later one.
 *
 * A hybrid model's groups each have a holder.  The first group that is heard of has the rank's own.
 */
#include "cachemap_engine.h"

#include <stdlib.h>
#include <string.h>

#define BATCH     16
#define COUNT_MAX UINT16_MAX

void engine_note(cachemap_engine *engine, uint32_t counter, uint64_t more) {
    if (more) cachemap_count(engine->map, CACHEMAP_ENGINE, counter, more);
}

cachemap_engine *cachemap_engine_open(cachemap *map, uint64_t holder, uint32_t dialect) {
    if (!cachemap_holder_of(map, holder)) return NULL;
    cachemap_engine *engine = calloc(1, sizeof *engine);
    uint8_t *identity = malloc(2 * (IDENTITY_MAX + 8));
    if (!engine || !identity) {
        free(engine);
        free(identity);
        return NULL;
    }
    engine->map = map;
    engine->holder = holder;
    engine->dialect = dialect;
    engine->identity = identity;
    engine->pages_fresh = 1;
    return engine;
}

void cachemap_engine_close(cachemap_engine *engine) {
    if (!engine) return;
    cachemap_holder_unlink(engine->map, engine->holder);
    for (uint32_t i = 0; i < engine->group_count; i++)
        if (engine->groups[i].holder != engine->holder)
            cachemap_holder_drop(engine->map, engine->groups[i].holder);
    free(engine->adapters);
    free(engine->images);
    free(engine->extra);
    free(engine->pages);
    free(engine->hashes);
    free(engine->tokens);
    free(engine->keys);
    free(engine->identity);
    free(engine);
}

uint64_t cachemap_engine_aliases(const cachemap_engine *engine) {
    return engine->aliases;
}

void cachemap_engine_reset(cachemap_engine *engine) {
    cachemap_holder_clear(engine->map, engine->holder);
    for (uint32_t i = 0; i < engine->group_count; i++)
        cachemap_holder_clear(engine->map, engine->groups[i].holder);
    engine_pages_reset(engine);
    engine->aliases = 0;
}

/* Where an event's blocks lie; CACHEMAP_TIERS when that is no tier of this map. */
static uint32_t tier_of(const engine_event *event) {
    const msgpack_text *medium = &event->medium;
    if (event->is_remote) return CACHEMAP_TIERS;
    if (!medium->bytes || msgpack_is(medium, "GPU")) return CACHEMAP_HBM;
    if (msgpack_is(medium, "CPU") || msgpack_is(medium, "CPU_PINNED")) return CACHEMAP_RAM;
    return msgpack_is(medium, "DISK") ? CACHEMAP_DISK : CACHEMAP_TIERS;
}

/* ---- groups ---- */

static uint32_t rule_of(cachemap_engine *engine, const engine_event *event) {
    const msgpack_text *kind = &event->group_kind;
    if (!kind->bytes || msgpack_is(kind, "full_attention") || msgpack_is(kind, "mla_attention") ||
        msgpack_is(kind, "sink_full_attention"))
        return CACHEMAP_RULE_FULL;
    if (msgpack_is(kind, "mamba")) return CACHEMAP_RULE_STATE;
    if (event->window_tokens > 1 && event->window_tokens <= UINT32_MAX / 2 &&
        (msgpack_is(kind, "sliding_window") || msgpack_is(kind, "sliding_window_mla")))
        return CACHEMAP_RULE_WINDOW;
    engine_note(engine, CACHEMAP_GROUP_UNKNOWN, event->hash_count);
    return CACHEMAP_RULE_FULL;
}

static cachemap_holder *find_group(const cachemap_engine *engine, uint64_t index) {
    for (uint32_t i = 0; i < engine->group_count; i++)
        if (engine->groups[i].index == index)
            return cachemap_holder_of(engine->map, engine->groups[i].holder);
    return NULL;
}

/* The holder of an event's group, a new one for a group not heard of before; NULL at the limit. */
static cachemap_holder *need_group(cachemap_engine *engine, const engine_event *event) {
    cachemap_holder *known = find_group(engine, event->group);
    if (known || engine->group_count == CACHEMAP_GROUPS_MAX) return known;
    uint32_t rule = rule_of(engine, event);
    uint64_t handle = engine->holder;
    if (engine->group_count) {
        handle = cachemap_holder_add(engine->map, 1);
        if (!handle) return NULL;
        if (cachemap_holder_add_group(engine->map, engine->holder, handle, rule,
                                      (uint32_t)event->window_tokens) != CACHEMAP_OK) {
            cachemap_holder_drop(engine->map, handle);
            return NULL;
        }
    } else {
        cachemap_holder_set_rule(engine->map, handle, rule, (uint32_t)event->window_tokens);
    }
    engine->groups[engine->group_count++] = (engine_group){event->group, handle};
    return cachemap_holder_of(engine->map, handle);
}

/* ---- blocks ---- */

static void drop_alias(cachemap_engine *engine, cachemap_holder *holder, uint32_t tier,
                       cachemap_alias *alias) {
    uint32_t node = alias->node;
    cachemap_alias_erase(engine->map, alias);
    engine->aliases--;
    cachemap_leave(engine->map, holder, tier, node, 1);
}

static int has_key(const cachemap *map, uint32_t node, const uint64_t key[2]) {
    return map->nodes[node].key[0] == key[0] && map->nodes[node].key[1] == key[1];
}

/* Enters one block under its alias. Returns which counter it belongs to. */
static uint32_t enter_block(cachemap_engine *engine, cachemap_holder *holder, uint32_t tier,
                            uint64_t name, const uint64_t key[2], uint64_t hash) {
    cachemap *map = engine->map;
    uint32_t place = PLACE(engine_slot(holder), tier), node;
    cachemap_alias *alias = cachemap_alias_find(map, name, place);
    if (alias && !has_key(map, alias->node, key)) {
        /* The engine gave one name to two prefixes; which one it still has cannot be told. */
        drop_alias(engine, holder, tier, alias);
        engine_note(engine, CACHEMAP_ALIAS_CHANGED, 1);
        alias = NULL;
    }
    if (alias) {
        if (alias->count < COUNT_MAX)
            alias->count++;
        else
            engine_note(engine, CACHEMAP_COPIES_UNCOUNTED, 1);
        return CACHEMAP_STORED;
    }
    if (!cachemap_enter(map, holder, tier, key, hash, 1, &node)) return CACHEMAP_REFUSED_FULL;
    alias = cachemap_alias_add(map, name, place);
    if (!alias) {
        cachemap_leave(map, holder, tier, node, 1);
        return CACHEMAP_REFUSED_FULL;
    }
    alias->node = node;
    engine->aliases++;
    if (tier == CACHEMAP_HBM && cachemap_unpredict(map, holder, node))
        engine_note(engine, CACHEMAP_PREDICTIONS_CONFIRMED, 1);
    return CACHEMAP_STORED;
}

/* Keys of some blocks of an event, and what is fetched for them before they are entered. */
typedef struct {
    uint64_t key[BATCH][2], hash[BATCH];
} batch;

static void fetch_batch(const cachemap_engine *engine, uint32_t place, const engine_event *event,
                        uint64_t first, batch *ahead) {
    const cachemap *map = engine->map;
    uint64_t stride = event->block_size_tokens / GRAIN_TOKENS;
    for (uint64_t i = 0; i < BATCH && first + i < event->hash_count; i++) {
        uint64_t grain = (first + i + 1) * stride - 1;
        cachemap_load_key(engine->keys + grain * KEY_BYTES, ahead->key[i]);
        ahead->hash[i] = cachemap_hash(map->seed, ahead->key[i]);
        __builtin_prefetch(&map->buckets[cachemap_home(ahead->hash[i], map->bucket_count)], 1);
        cachemap_alias_prefetch(map, engine->hashes[first + i], place);
    }
}

static void enter_blocks(cachemap_engine *engine, cachemap_holder *holder, uint32_t tier,
                         const engine_event *event) {
    uint32_t place = PLACE(engine_slot(holder), tier);
    uint64_t counts[2] = {0};
    batch batches[2];
    fetch_batch(engine, place, event, 0, &batches[0]);
    for (uint64_t first = 0; first < event->hash_count; first += BATCH) {
        const batch *now = &batches[first / BATCH % 2];
        fetch_batch(engine, place, event, first + BATCH, &batches[(first / BATCH + 1) % 2]);
        for (uint64_t i = 0; i < BATCH && first + i < event->hash_count; i++) {
            uint32_t counter = enter_block(engine, holder, tier, engine->hashes[first + i],
                                           now->key[i], now->hash[i]);
            counts[counter == CACHEMAP_REFUSED_FULL]++;
        }
    }
    engine_note(engine, CACHEMAP_STORED, counts[0]);
    engine_note(engine, CACHEMAP_REFUSED_FULL, counts[1]);
}

static const cachemap_alias *find_in(const cachemap_engine *engine, uint64_t handle, uint64_t hash,
                                     uint32_t tier) {
    const cachemap_holder *holder = cachemap_holder_of(engine->map, handle);
    if (!holder) return NULL;
    return cachemap_alias_find(engine->map, hash, PLACE(engine_slot(holder), tier));
}

/* Key of the block with a hash; 0 when it is not known. Any group and any tier of the rank may know
 * it: a window has long forgotten what its next block follows. */
static int known_key(const cachemap_engine *engine, uint32_t tier, uint64_t hash,
                     uint8_t key[KEY_BYTES]) {
    const cachemap_alias *alias = NULL;
    for (uint32_t i = 0; !alias && i < engine->group_count; i++) {
        alias = find_in(engine, engine->groups[i].holder, hash, tier);
        if (!alias && tier != CACHEMAP_HBM)
            alias = find_in(engine, engine->groups[i].holder, hash, CACHEMAP_HBM);
    }
    if (!alias) return 0;
    memcpy(key, engine->map->nodes[alias->node].key, KEY_BYTES);
    return 1;
}

static int is_page(uint64_t block_size_tokens) {
    return block_size_tokens < GRAIN_TOKENS && GRAIN_TOKENS % block_size_tokens == 0;
}

static int need_keys(cachemap_engine *engine, uint64_t tokens) {
    uint64_t bytes = tokens / GRAIN_TOKENS * KEY_BYTES;
    if (bytes <= engine->keys_room) return 1;
    uint8_t *grown = realloc(engine->keys, bytes);
    if (!grown) return 0;
    engine->keys = grown;
    engine->keys_room = bytes;
    return 1;
}

/* Why an event is not indexed; CACHEMAP_STORED when it is. Then `root` is the start of its chain,
 * unless it is sparse. */
static uint32_t why_not(cachemap_engine *engine, const engine_event *event, uint32_t tier,
                        uint8_t root[KEY_BYTES]) {
    if (tier == CACHEMAP_TIERS) return CACHEMAP_OTHER_MEDIUM;
    const engine_adapter *adapter = engine_find_adapter(engine, &event->lora_name);
    if (!adapter && (event->has_lora_id || event->lora_name.bytes)) return CACHEMAP_LORA;
    if (event->block_size_tokens % GRAIN_TOKENS && !is_page(event->block_size_tokens))
        return CACHEMAP_BLOCK_SIZE;
    if (event->has_bad_token) return CACHEMAP_BAD_TOKEN;
    /* Another group's names lead to its keys; which blocks the extra keys are of is not known. */
    if (engine_is_sparse(event)) return CACHEMAP_STORED;
    msgpack_text salt;
    uint32_t reason = engine_read_extras(engine, event, &salt);
    if (reason != CACHEMAP_STORED) return reason;
    return engine_root(engine, &salt, adapter, root) ? CACHEMAP_STORED : CACHEMAP_EXTRA_KEYS;
}

/* Enters the blocks of a sparse event under the keys that other groups know them by. */
static void enter_sparse(cachemap_engine *engine, cachemap_holder *holder, uint32_t tier,
                         const engine_event *event) {
    for (uint64_t i = 0; i < event->hash_count; i++) {
        uint8_t bytes[KEY_BYTES];
        uint64_t key[2];
        if (!known_key(engine, tier, engine->hashes[i], bytes)) {
            engine_note(engine, CACHEMAP_UNKNOWN_PLACE, 1);
            continue;
        }
        cachemap_load_key(bytes, key);
        uint64_t hash = cachemap_hash(engine->map->seed, key);
        engine_note(engine, enter_block(engine, holder, tier, engine->hashes[i], key, hash), 1);
    }
}

void engine_stored(cachemap_engine *engine, const engine_event *event) {
    uint32_t tier = tier_of(event);
    uint8_t parent[KEY_BYTES];
    uint32_t reason = why_not(engine, event, tier, parent);
    cachemap_holder *holder = reason == CACHEMAP_STORED ? need_group(engine, event) : NULL;
    if (reason == CACHEMAP_STORED && !holder) reason = CACHEMAP_OTHER_GROUP;
    if (reason != CACHEMAP_STORED) {
        engine_note(engine, reason, event->hash_count);
        return;
    }
    int is_small = is_page(event->block_size_tokens);
    if (tier == CACHEMAP_HBM)
        atomic_store_explicit(&holder->block_size_tokens,
                              is_small ? GRAIN_TOKENS : (uint32_t)event->block_size_tokens,
                              memory_order_relaxed);
    if (engine_is_sparse(event)) {
        enter_sparse(engine, holder, tier, event);
        return;
    }
    if (is_small) {
        engine_pages_stored(engine, holder, tier, event, parent);
        return;
    }
    if (event->has_parent && !known_key(engine, tier, event->parent, parent)) {
        engine_note(engine, CACHEMAP_UNKNOWN_PARENT, event->hash_count);
        return;
    }
    if (!need_keys(engine, event->token_count) || !engine_chain(engine, parent, event)) {
        engine_note(engine, CACHEMAP_REFUSED_FULL, event->hash_count);
        return;
    }
    enter_blocks(engine, holder, tier, event);
}

/* Takes one block out once; 0 when it is not known. */
static int remove_block(cachemap_engine *engine, cachemap_holder *holder, uint32_t tier,
                        uint64_t name) {
    cachemap *map = engine->map;
    cachemap_alias *alias = cachemap_alias_find(map, name, PLACE(engine_slot(holder), tier));
    if (!alias) return engine_page_removed(engine, holder, tier, name);
    if (--alias->count) return 1;
    uint32_t node = alias->node;
    /* What was predicted of an evicted block will not come true either. */
    if (tier == CACHEMAP_HBM) cachemap_unpredict(map, holder, node);
    drop_alias(engine, holder, tier, alias);
    return 1;
}

void engine_removed(cachemap_engine *engine, const engine_event *event) {
    uint32_t tier = tier_of(event);
    cachemap_holder *holder = find_group(engine, event->group);
    if (tier == CACHEMAP_TIERS || !holder) {
        engine_note(engine, tier == CACHEMAP_TIERS ? CACHEMAP_OTHER_MEDIUM : CACHEMAP_OTHER_GROUP,
                    event->hash_count);
        return;
    }
    uint64_t removed = 0;
    for (uint64_t i = 0; i < event->hash_count; i++) {
        if (i + BATCH < event->hash_count)
            cachemap_alias_prefetch(engine->map, engine->hashes[i + BATCH],
                                    PLACE(engine_slot(holder), tier));
        removed += (uint64_t)remove_block(engine, holder, tier, engine->hashes[i]);
    }
    engine_note(engine, CACHEMAP_REMOVED, removed);
    engine_note(engine, CACHEMAP_REMOVED_UNKNOWN, event->hash_count - removed);
}
