/* The two hash tables of the cache map.
 *
 * Keys lead to nodes through buckets of one cache line: ten 16-bit tags and ten node numbers.  A
 * key whose home bucket is full strays to one of the next 63, and its home notes how far, so that a
 * look-up goes on only where something strayed.  Nodes never move while they are in the table, so a
 * reader that walks it beside the writer finds every key that is there all the time.  Keys are
 * hashed under a secret seed: whoever writes prompts cannot aim at a bucket.
 *
 * What engines call their blocks, and counts of copies, are open addressing with linear probing
 * (only the writer reads them), four to a cache line, at most four fifths full.
 */
#include "cachemap_private.h"

static cachemap_bucket *bucket_at(const cachemap *map, uint32_t home, uint32_t step) {
    uint32_t index = home + step;
    return &map->buckets[index < map->bucket_count ? index : index - map->bucket_count];
}

uint32_t cachemap_node_find(const cachemap *map, const uint64_t key[2], uint64_t hash) {
    uint32_t home = cachemap_home(hash, map->bucket_count);
    uint32_t reach = atomic_load_explicit(&map->buckets[home].reach, memory_order_relaxed);
    for (uint32_t step = 0; step <= reach; step++) {
        const cachemap_bucket *bucket = bucket_at(map, home, step);
        for (uint32_t left = cachemap_lanes(bucket, cachemap_tag(hash)); left; left &= left - 1) {
            uint32_t node =
                atomic_load_explicit(&bucket->nodes[__builtin_ctz(left)], memory_order_relaxed);
            if (node && map->nodes[node].key[0] == key[0] && map->nodes[node].key[1] == key[1])
                return node;
        }
    }
    return 0;
}

/* Readers look at key words without a lock; see read_set in cachemap_match.c. */
static void write_key(cachemap_node *node, uint64_t low, uint64_t high) {
    atomic_store_explicit((_Atomic uint64_t *)&node->key[0], low, memory_order_relaxed);
    atomic_store_explicit((_Atomic uint64_t *)&node->key[1], high, memory_order_relaxed);
}

static uint32_t take_node(cachemap *map, const uint64_t key[2]) {
    uint32_t node = map->node_free;
    if (node)
        map->node_free = (uint32_t)map->nodes[node].key[0];
    else if (map->nodes_fresh < map->nodes_max)
        node = map->nodes_fresh++;
    else
        return 0;
    /* The set was emptied when the node was freed; nobody may see a new set with the old key. */
    atomic_thread_fence(memory_order_release);
    write_key(&map->nodes[node], key[0], key[1]);
    atomic_thread_fence(memory_order_release);
    return node;
}

/* One key more or less that is at home in a bucket and lies `step` further on. */
static void note_stray(cachemap_bucket *home, int more, uint32_t step) {
    int strayed = atomic_load_explicit(&home->strayed, memory_order_relaxed) + more;
    uint32_t reach = atomic_load_explicit(&home->reach, memory_order_relaxed);
    if (step > reach) reach = step;
    atomic_store_explicit(&home->strayed, (uint16_t)strayed, memory_order_relaxed);
    atomic_store_explicit(&home->reach, (uint16_t)(strayed ? reach : 0), memory_order_release);
}

uint32_t cachemap_node_add(cachemap *map, const uint64_t key[2], uint64_t hash) {
    uint32_t home = cachemap_home(hash, map->bucket_count);
    for (uint32_t step = 0; step < BUCKET_WINDOW; step++) {
        cachemap_bucket *bucket = bucket_at(map, home, step);
        uint32_t free_lanes = cachemap_lanes(bucket, 0);
        if (!free_lanes) continue;
        uint32_t lane = (uint32_t)__builtin_ctz(free_lanes), node = take_node(map, key);
        if (!node) return 0;
        if (step) note_stray(&map->buckets[home], 1, step);
        atomic_store_explicit(&bucket->nodes[lane], node, memory_order_relaxed);
        atomic_store_explicit(&bucket->tags[lane], cachemap_tag(hash), memory_order_release);
        cachemap_add(&map->header->nodes, 1);
        return node;
    }
    return 0;
}

void cachemap_node_free(cachemap *map, uint32_t node) {
    const uint64_t *key = map->nodes[node].key;
    uint64_t hash = cachemap_hash(map->seed, key);
    uint32_t home = cachemap_home(hash, map->bucket_count);
    for (uint32_t step = 0; step < BUCKET_WINDOW; step++) {
        cachemap_bucket *bucket = bucket_at(map, home, step);
        for (uint32_t lane = 0; lane < BUCKET_LANES; lane++) {
            if (atomic_load_explicit(&bucket->nodes[lane], memory_order_relaxed) != node) continue;
            atomic_store_explicit(&bucket->tags[lane], 0, memory_order_relaxed);
            atomic_store_explicit(&bucket->nodes[lane], 0, memory_order_relaxed);
            if (step) note_stray(&map->buckets[home], -1, 0);
            write_key(&map->nodes[node], map->node_free, 0);
            map->node_free = node;
            cachemap_add(&map->header->nodes, ~0ull);
            return;
        }
    }
}

static uint64_t alias_home(const cachemap *map, uint64_t hash, uint32_t place) {
    uint64_t mixed = mix_words(hash ^ map->seed[1],
                               (map->seed[0] | 1) ^ (uint64_t)place * 0x9E3779B97F4A7C16ull);
    return (uint64_t)((__uint128_t)mixed * map->alias_slots >> 64);
}

static uint64_t alias_next(const cachemap *map, uint64_t at) {
    return at + 1 < map->alias_slots ? at + 1 : 0;
}

void cachemap_alias_prefetch(const cachemap *map, uint64_t hash, uint32_t place) {
    __builtin_prefetch(&map->aliases[alias_home(map, hash, place)], 1);
}

cachemap_alias *cachemap_alias_find(const cachemap *map, uint64_t hash, uint32_t place) {
    uint64_t at = alias_home(map, hash, place);
    for (; map->aliases[at].place; at = alias_next(map, at))
        if (map->aliases[at].hash == hash && map->aliases[at].place == place)
            return &map->aliases[at];
    return NULL;
}

cachemap_alias *cachemap_alias_add(cachemap *map, uint64_t hash, uint32_t place) {
    uint64_t count = atomic_load_explicit(&map->header->aliases, memory_order_relaxed);
    if (count >= map->entries_max) {
        /* What was forgotten but not swept may make room. */
        if (!map->slots_retired && !map->slots_sweeping) return NULL;
        cachemap_sweep_all(map);
        if (atomic_load_explicit(&map->header->aliases, memory_order_relaxed) >= map->entries_max)
            return NULL;
    }
    uint64_t at = alias_home(map, hash, place);
    while (map->aliases[at].place) at = alias_next(map, at);
    map->aliases[at] = (cachemap_alias){hash, 0, (uint16_t)place, 1};
    cachemap_add(&map->header->aliases, 1);
    return &map->aliases[at];
}

/* Takes an alias out and closes the gap, so that every probe still ends at the first free place.
 * What belongs to a dead slot is not looked for any more and stays where the sweeper expects it. */
void cachemap_alias_erase(cachemap *map, cachemap_alias *alias) {
    uint64_t hole = (uint64_t)(alias - map->aliases);
    for (uint64_t at = alias_next(map, hole); map->aliases[at].place; at = alias_next(map, at)) {
        if (cachemap_slot_is_dead(map, map->aliases[at].place >> 3)) continue;
        uint64_t home = alias_home(map, map->aliases[at].hash, map->aliases[at].place);
        int stays = hole <= at ? (home > hole && home <= at) : (home > hole || home <= at);
        if (stays) continue;
        map->aliases[hole] = map->aliases[at];
        hole = at;
    }
    map->aliases[hole].place = 0;
    cachemap_add(&map->header->aliases, ~0ull);
}
