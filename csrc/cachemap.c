/* The cache map: content key -> who holds it, in which tier.
 *
 * One process writes, any number read, in one piece of shared memory that holds offsets and
 * numbers, never pointers:
 *
 *   header | holders | nodes | buckets (keys -> nodes) | chunks (sets of holders) | aliases
 *
 * A *holder* is one cache: the memory of one engine rank (or of one of its layer groups), or one
 * namespace of one kvd.  It has a *slot*, its bit in the sets.  A *node* is a key that somebody
 * holds. A *place* is a slot and a tier; an *entry* is a place in a node's set.  An *alias* is what
 * one engine calls a block, and leads to the node.
 *
 * Memory is bounded when the map is made: `entries_max` entries, as many nodes and aliases, a
 * quarter of that in chunks.  At the bound new blocks are refused and counted; what is there stays,
 * and removals make room.  The oldest entries are system prompts, the most useful ones, and a
 * refused entry only means a hit that was not predicted.  Pages that were never needed are never
 * touched.
 *
 * The writer is one thread.  What readers may meet is written with care in cachemap_set.c,
 * cachemap_index.c and here (a holder's slot); everything else is the writer's own.
 */
#include "cachemap.h"

#include <stdlib.h>
#include <string.h>

#include "cachemap_private.h"
#include "checksum.h"

#define PAGE_BYTES    4096
#define SWEEP_STEPS   16384 /* of a tick: some hundred microseconds */
#define CHUNK_SHARE   4     /* entries for each chunk */
#define BATCH         16    /* keys whose memory is fetched ahead */
#define COUNT_MAX     UINT16_MAX
#define HANDLE_INDEX  0xFFFFu
#define HANDLE_SHIFT  16
#define PREDICTED_LIM CACHEMAP_PREDICTED_MAX

static uint64_t whole_pages(uint64_t bytes) {
    return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

/* The parts of the memory, in order. */
static void lay_out(cachemap_header *header, uint64_t entries_max) {
    /* Ten lanes a bucket, at most seven in use on average. */
    uint64_t buckets = entries_max / 8 + entries_max / 64 + BUCKET_WINDOW;
    header->entries_max = entries_max;
    header->nodes_max = (uint32_t)entries_max + 1;
    header->bucket_count = (uint32_t)buckets;
    header->chunks_max = (uint32_t)(entries_max / CHUNK_SHARE) + 1;
    header->alias_slots = entries_max + entries_max / 4 + 1;
    header->holders_offset = CACHEMAP_HEADER_BYTES;
    header->nodes_offset =
        header->holders_offset + whole_pages((CACHEMAP_HOLDERS_MAX + 1) * sizeof(cachemap_holder));
    header->buckets_offset =
        header->nodes_offset + whole_pages(header->nodes_max * sizeof(cachemap_node));
    header->chunks_offset = header->buckets_offset + whole_pages(buckets * sizeof(cachemap_bucket));
    header->aliases_offset =
        header->chunks_offset + whole_pages(header->chunks_max * sizeof(cachemap_chunk));
    header->bytes =
        header->aliases_offset + whole_pages(header->alias_slots * sizeof(cachemap_alias));
}

static uint32_t header_check(const cachemap_header *header) {
    return checksum_crc32c(0, header, offsetof(cachemap_header, check));
}

uint64_t cachemap_bytes(uint64_t entries_max) {
    if (entries_max < CACHEMAP_ENTRIES_MIN || entries_max > CACHEMAP_ENTRIES_LIM) return 0;
    cachemap_header header = {0};
    lay_out(&header, entries_max);
    return header.bytes;
}

cachemap *cachemap_create(void *base, uint64_t bytes, uint64_t entries_max,
                          const uint64_t seed[2]) {
    uint64_t needed = cachemap_bytes(entries_max);
    if (!needed || bytes < needed) return NULL;
    cachemap *map = calloc(1, sizeof *map);
    cachemap_prediction *ring = malloc(PREDICTED_LIM * sizeof *ring);
    if (!map || !ring) {
        free(map);
        free(ring);
        return NULL;
    }
    cachemap_header *header = base;
    lay_out(header, entries_max);
    header->magic = CACHEMAP_MAGIC;
    header->layout_version = CACHEMAP_LAYOUT_VERSION;
    header->header_bytes = CACHEMAP_HEADER_BYTES;
    memcpy(header->seed, seed, sizeof header->seed);
    memcpy(map->seed, seed, sizeof map->seed);
    char *start = base;
    map->header = header;
    map->holders = (cachemap_holder *)(start + header->holders_offset);
    map->nodes = (cachemap_node *)(start + header->nodes_offset);
    map->buckets = (cachemap_bucket *)(start + header->buckets_offset);
    map->chunks = (cachemap_chunk *)(start + header->chunks_offset);
    map->aliases = (cachemap_alias *)(start + header->aliases_offset);
    map->entries_max = entries_max;
    map->alias_slots = header->alias_slots;
    map->nodes_max = header->nodes_max;
    map->bucket_count = header->bucket_count;
    map->chunks_max = header->chunks_max;
    map->nodes_fresh = map->chunks_fresh = 1; /* 0 means none */
    map->predictions = ring;
    /* The last in is the first out: whole groups of 64 first, so that 64 holders share one word. */
    for (uint32_t slot = 1; slot < 64; slot++)
        map->slots_free[map->slots_free_count++] = (uint16_t)slot;
    for (uint32_t slot = SLOTS - 1; slot >= 64; slot--)
        map->slots_free[map->slots_free_count++] = (uint16_t)slot;
    header->check = header_check(header);
    return map;
}

void cachemap_close(cachemap *map) {
    if (map) free(map->predictions);
    free(map);
}

void cachemap_abandon(cachemap *map) {
    atomic_store_explicit(&map->header->is_abandoned, 1, memory_order_release);
}

void cachemap_count(cachemap *map, uint32_t source, uint32_t counter, uint64_t more) {
    if (source < CACHEMAP_SOURCES && counter < CACHEMAP_COUNTERS)
        cachemap_add(&map->header->counters[source][counter], more);
}

/* ---- holders ---- */

cachemap_holder *cachemap_holder_of(const cachemap *map, uint64_t handle) {
    uint64_t index = handle & HANDLE_INDEX;
    if (!handle || index > CACHEMAP_HOLDERS_MAX) return NULL;
    cachemap_holder *holder = &map->holders[index];
    return atomic_load_explicit(&holder->handle, memory_order_relaxed) == handle ? holder : NULL;
}

static uint32_t slot_of(const cachemap_holder *holder) {
    return atomic_load_explicit(&holder->slot, memory_order_relaxed);
}

/* Field by field: a reader with an old handle may be looking. */
static void reset_holder(cachemap_holder *holder, uint32_t counts_copies) {
    atomic_store_explicit(&holder->block_size_tokens, 0, memory_order_relaxed);
    atomic_store_explicit(&holder->rule, CACHEMAP_RULE_FULL, memory_order_relaxed);
    atomic_store_explicit(&holder->window_tokens, 0, memory_order_relaxed);
    atomic_store_explicit(&holder->next_group, 0, memory_order_relaxed);
    for (uint32_t tier = 0; tier < CACHEMAP_TIERS; tier++)
        atomic_store_explicit(&holder->blocks[tier], 0, memory_order_relaxed);
    atomic_store_explicit(&holder->frames, 0, memory_order_relaxed);
    holder->counts_copies = counts_copies;
    holder->has_pages = 0;
}

uint64_t cachemap_holder_add(cachemap *map, int counts_copies) {
    uint32_t index = 1;
    while (index <= CACHEMAP_HOLDERS_MAX &&
           atomic_load_explicit(&map->holders[index].handle, memory_order_relaxed))
        index++;
    uint32_t slot = index <= CACHEMAP_HOLDERS_MAX ? cachemap_slot_take(map) : 0;
    if (!slot) return 0;
    cachemap_holder *holder = &map->holders[index];
    reset_holder(holder, counts_copies != 0);
    atomic_store_explicit(&holder->slot, slot, memory_order_relaxed);
    uint64_t handle = ++map->handles_made << HANDLE_SHIFT | index;
    atomic_store_explicit(&holder->handle, handle, memory_order_release);
    cachemap_add(&map->header->holders, 1);
    return handle;
}

/* Lets go of everything a holder has, at once. */
static void give_up_slot(cachemap *map, cachemap_holder *holder) {
    for (uint32_t tier = 0; tier < CACHEMAP_TIERS; tier++) {
        uint64_t blocks = atomic_load_explicit(&holder->blocks[tier], memory_order_relaxed);
        cachemap_add(tier == CACHEMAP_PREDICTED ? &map->header->predicted : &map->header->entries,
                     ~blocks + 1);
        atomic_store_explicit(&holder->blocks[tier], 0, memory_order_relaxed);
    }
    cachemap_slot_retire(map, slot_of(holder));
}

int cachemap_holder_clear(cachemap *map, uint64_t handle) {
    cachemap_holder *holder = cachemap_holder_of(map, handle);
    if (!holder) return CACHEMAP_NO_HOLDER;
    uint64_t blocks = 0;
    for (uint32_t tier = 0; tier < CACHEMAP_TIERS; tier++)
        blocks += atomic_load_explicit(&holder->blocks[tier], memory_order_relaxed);
    if (!blocks && !holder->has_pages) return CACHEMAP_OK;
    holder->has_pages = 0;
    /* There are as many slots as holders can be; the one given up counts once it is swept. */
    uint32_t slot = cachemap_slot_take(map);
    give_up_slot(map, holder);
    if (!slot) slot = cachemap_slot_take(map);
    atomic_store_explicit(&holder->slot, slot, memory_order_release);
    return CACHEMAP_OK;
}

int cachemap_holder_drop(cachemap *map, uint64_t handle) {
    cachemap_holder *holder = cachemap_holder_of(map, handle);
    if (!holder) return CACHEMAP_NO_HOLDER;
    atomic_store_explicit(&holder->handle, 0, memory_order_release);
    give_up_slot(map, holder);
    cachemap_add(&map->header->holders, ~0ull);
    return CACHEMAP_OK;
}

void cachemap_holder_set_rule(cachemap *map, uint64_t handle, uint32_t rule,
                              uint32_t window_tokens) {
    cachemap_holder *holder = cachemap_holder_of(map, handle);
    if (!holder) return;
    atomic_store_explicit(&holder->rule, rule, memory_order_relaxed);
    atomic_store_explicit(&holder->window_tokens, window_tokens, memory_order_relaxed);
}

void cachemap_holder_unlink(cachemap *map, uint64_t handle) {
    cachemap_holder *holder = cachemap_holder_of(map, handle);
    if (holder) atomic_store_explicit(&holder->next_group, 0, memory_order_release);
}

int cachemap_holder_add_group(cachemap *map, uint64_t handle, uint64_t group, uint32_t rule,
                              uint32_t window_tokens) {
    cachemap_holder *last = cachemap_holder_of(map, handle);
    cachemap_holder *added = cachemap_holder_of(map, group);
    if (!last || !added || rule > CACHEMAP_RULE_STATE) return CACHEMAP_NO_HOLDER;
    uint32_t next, count = 1;
    while ((next = atomic_load_explicit(&last->next_group, memory_order_relaxed)) != 0) {
        if (++count >= CACHEMAP_GROUPS_MAX) return CACHEMAP_FULL;
        last = &map->holders[next];
    }
    cachemap_holder_set_rule(map, group, rule, window_tokens);
    atomic_store_explicit(&last->next_group, (uint32_t)(group & HANDLE_INDEX),
                          memory_order_release);
    return CACHEMAP_OK;
}

void cachemap_holder_set_block_size(cachemap *map, uint64_t handle, uint32_t tokens) {
    cachemap_holder *holder = cachemap_holder_of(map, handle);
    if (holder) atomic_store_explicit(&holder->block_size_tokens, tokens, memory_order_relaxed);
}

void cachemap_holder_saw_frame(cachemap *map, uint64_t handle) {
    cachemap_holder *holder = cachemap_holder_of(map, handle);
    if (holder) cachemap_add(&holder->frames, 1);
}

/* ---- entries ---- */

static void count_entry(cachemap *map, cachemap_holder *holder, uint32_t tier, uint64_t more) {
    cachemap_add(&holder->blocks[tier], more);
    cachemap_add(tier == CACHEMAP_PREDICTED ? &map->header->predicted : &map->header->entries,
                 more);
}

static int is_full(const cachemap *map) {
    return atomic_load_explicit(&map->header->entries, memory_order_relaxed) +
               atomic_load_explicit(&map->header->predicted, memory_order_relaxed) >=
           map->entries_max;
}

static uint64_t copies_hash(uint32_t node, uint32_t tier) {
    return (uint64_t)node << 3 | tier;
}

/* Notes one copy more of an entry that is there; 0 at a limit. A copy that is not counted must not
 * be entered: when it left it would take the entry of the others with it. */
static int add_copy(cachemap *map, uint32_t slot, uint32_t tier, uint32_t node) {
    uint32_t place = PLACE(slot, COPIES_TIER);
    cachemap_alias *copies = cachemap_alias_find(map, copies_hash(node, tier), place);
    if (!copies) return cachemap_alias_add(map, copies_hash(node, tier), place) != NULL;
    if (copies->count == COUNT_MAX) return 0;
    copies->count++;
    return 1;
}

/* Takes one copy away; 0 when there is only the one. */
static int take_copy(cachemap *map, uint32_t slot, uint32_t tier, uint32_t node) {
    cachemap_alias *copies =
        cachemap_alias_find(map, copies_hash(node, tier), PLACE(slot, COPIES_TIER));
    if (!copies) return 0;
    if (--copies->count == 0) cachemap_alias_erase(map, copies);
    return 1;
}

static int is_held(const cachemap *map, uint32_t node) {
    return atomic_load_explicit(&map->nodes[node].set, memory_order_relaxed) != 0;
}

int cachemap_enter(cachemap *map, cachemap_holder *holder, uint32_t tier, const uint64_t key[2],
                   uint64_t hash, int counts_copies, uint32_t *node) {
    uint32_t slot = slot_of(holder), found = cachemap_node_find(map, key, hash);
    if (found && cachemap_set_has(map, found, slot, tier)) {
        if (counts_copies && !add_copy(map, slot, tier, found)) return 0;
        *node = found;
        return 1;
    }
    if (is_full(map)) return 0;
    if (!found) found = cachemap_node_add(map, key, hash);
    if (!found && (map->slots_retired || map->slots_sweeping)) {
        cachemap_sweep_all(map);
        found = cachemap_node_add(map, key, hash);
    }
    if (!found) return 0;
    if (cachemap_set_add(map, found, slot, tier) == SET_FULL) {
        /* May free the node, if only what is forgotten held it. */
        cachemap_sweep_all(map);
        found = cachemap_node_find(map, key, hash);
        if (!found) found = cachemap_node_add(map, key, hash);
        if (!found) return 0;
        if (cachemap_set_add(map, found, slot, tier) == SET_FULL) {
            if (!is_held(map, found)) cachemap_node_free(map, found);
            return 0;
        }
    }
    count_entry(map, holder, tier, 1);
    *node = found;
    return 1;
}

void cachemap_leave(cachemap *map, cachemap_holder *holder, uint32_t tier, uint32_t node,
                    int counts_copies) {
    uint32_t slot = slot_of(holder);
    if (counts_copies && take_copy(map, slot, tier, node)) return;
    if (cachemap_set_remove(map, node, slot, tier) != SET_CHANGED) return;
    count_entry(map, holder, tier, ~0ull);
    if (!is_held(map, node)) cachemap_node_free(map, node);
}

/* Fetches what the next keys will need. */
static void fetch_ahead(const cachemap *map, const uint8_t *keys, uint64_t n, uint64_t hashes[]) {
    uint64_t key[2];
    for (uint64_t i = 0; i < n; i++) {
        cachemap_load_key(keys + i * KEY_BYTES, key);
        hashes[i] = cachemap_hash(map->seed, key);
        __builtin_prefetch(&map->buckets[cachemap_home(hashes[i], map->bucket_count)]);
    }
    for (uint64_t i = 0; i < n; i++) {
        const cachemap_bucket *bucket = &map->buckets[cachemap_home(hashes[i], map->bucket_count)];
        uint32_t lanes = cachemap_lanes(bucket, cachemap_tag(hashes[i]));
        if (!lanes) continue;
        uint32_t node =
            atomic_load_explicit(&bucket->nodes[__builtin_ctz(lanes)], memory_order_relaxed);
        __builtin_prefetch(&map->nodes[node]);
    }
}

uint64_t cachemap_store(cachemap *map, uint64_t handle, uint32_t tier, const uint8_t *keys,
                        uint64_t n) {
    cachemap_holder *holder = cachemap_holder_of(map, handle);
    if (!holder || tier >= CACHEMAP_PREDICTED) return n;
    uint64_t key[2], hashes[BATCH], refused = 0;
    uint32_t node;
    for (uint64_t i = 0; i < n; i++) {
        if (i % BATCH == 0)
            fetch_ahead(map, keys + i * KEY_BYTES, n - i < BATCH ? n - i : BATCH, hashes);
        cachemap_load_key(keys + i * KEY_BYTES, key);
        refused += !cachemap_enter(map, holder, tier, key, hashes[i % BATCH],
                                   (int)holder->counts_copies, &node);
    }
    return refused;
}

uint64_t cachemap_remove(cachemap *map, uint64_t handle, uint32_t tier, const uint8_t *keys,
                         uint64_t n) {
    cachemap_holder *holder = cachemap_holder_of(map, handle);
    if (!holder || tier >= CACHEMAP_PREDICTED) return n;
    uint64_t key[2], hashes[BATCH], unknown = 0;
    for (uint64_t i = 0; i < n; i++) {
        if (i % BATCH == 0)
            fetch_ahead(map, keys + i * KEY_BYTES, n - i < BATCH ? n - i : BATCH, hashes);
        cachemap_load_key(keys + i * KEY_BYTES, key);
        uint32_t node = cachemap_node_find(map, key, hashes[i % BATCH]);
        if (node && cachemap_set_has(map, node, slot_of(holder), tier))
            cachemap_leave(map, holder, tier, node, (int)holder->counts_copies);
        else
            unknown++;
    }
    return unknown;
}

/* ---- predictions ---- */

/* Ends a prediction that is still there. Returns whether it was. */
static int end_prediction(cachemap *map, const cachemap_prediction *made) {
    cachemap_holder *holder = cachemap_holder_of(map, made->holder);
    if (!holder) return 0;
    uint64_t key[2];
    cachemap_load_key(made->key, key);
    uint32_t node = cachemap_node_find(map, key, cachemap_hash(map->seed, key));
    if (!node || !cachemap_set_has(map, node, slot_of(holder), CACHEMAP_PREDICTED)) return 0;
    cachemap_leave(map, holder, CACHEMAP_PREDICTED, node, 1);
    return 1;
}

int cachemap_unpredict(cachemap *map, cachemap_holder *holder, uint32_t node) {
    uint32_t slot = slot_of(holder), found = 0;
    if (!atomic_load_explicit(&holder->blocks[CACHEMAP_PREDICTED], memory_order_relaxed)) return 0;
    for (; is_held(map, node) && cachemap_set_has(map, node, slot, CACHEMAP_PREDICTED); found = 1)
        cachemap_leave(map, holder, CACHEMAP_PREDICTED, node, 1);
    return (int)found;
}

static cachemap_prediction *prediction_at(const cachemap *map, uint64_t number) {
    return &map->predictions[number % PREDICTED_LIM];
}

uint64_t cachemap_predict(cachemap *map, uint64_t handle, const uint8_t *keys, uint64_t n,
                          uint64_t now_ms, uint32_t life_ms) {
    cachemap_holder *holder = cachemap_holder_of(map, handle);
    if (!holder) return 0;
    uint64_t key[2], entered = 0;
    uint32_t node;
    if (n > PREDICTED_LIM / 4) n = PREDICTED_LIM / 4; /* one prompt must not push out all others */
    for (uint64_t i = 0; i < n; i++) {
        cachemap_load_key(keys + i * KEY_BYTES, key);
        uint64_t hash = cachemap_hash(map->seed, key);
        uint32_t found = cachemap_node_find(map, key, hash);
        if (found && cachemap_set_has(map, found, slot_of(holder), CACHEMAP_HBM)) continue;
        if (map->predictions_head - map->predictions_tail == PREDICTED_LIM) {
            int was_there = end_prediction(map, prediction_at(map, map->predictions_tail++));
            cachemap_count(map, CACHEMAP_ENGINE, CACHEMAP_PREDICTIONS_DROPPED, (uint64_t)was_there);
        }
        if (!cachemap_enter(map, holder, CACHEMAP_PREDICTED, key, hash, 1, &node)) {
            cachemap_count(map, CACHEMAP_ENGINE, CACHEMAP_REFUSED_FULL, n - i);
            break;
        }
        cachemap_prediction *made = prediction_at(map, map->predictions_head++);
        memcpy(made->key, keys + i * KEY_BYTES, KEY_BYTES);
        made->holder = handle;
        made->ends_ms = now_ms + life_ms;
        entered++;
    }
    cachemap_count(map, CACHEMAP_ENGINE, CACHEMAP_PREDICTIONS, entered);
    return entered;
}

int cachemap_tick(cachemap *map, uint64_t now_ms) {
    atomic_store_explicit(&map->header->beat_ms, now_ms, memory_order_relaxed);
    while (map->predictions_tail != map->predictions_head) {
        cachemap_prediction *oldest = prediction_at(map, map->predictions_tail);
        if (oldest->ends_ms > now_ms) break;
        map->predictions_tail++;
        cachemap_count(map, CACHEMAP_ENGINE, CACHEMAP_PREDICTIONS_EXPIRED,
                       (uint64_t)end_prediction(map, oldest));
    }
    return cachemap_sweep(map, SWEEP_STEPS);
}
