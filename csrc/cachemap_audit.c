/* Adds up the cache map's books. Slow: every node, every alias; for tests and fuzzing. */
#include <stdlib.h>
#include <string.h>

#include "cachemap_private.h"

static uint64_t word_of(const _Atomic uint64_t *word) {
    return atomic_load_explicit(word, memory_order_relaxed);
}

/* Nodes in the hash table, each found by its own key, with sets that make sense. */
static const char *audit_nodes(const cachemap *map, uint64_t *nodes, uint64_t *places,
                               uint64_t *chunks) {
    uint64_t strayed = 0;
    for (uint32_t at = 0; at < map->bucket_count; at++) {
        const cachemap_bucket *bucket = &map->buckets[at];
        strayed += atomic_load_explicit(&bucket->strayed, memory_order_relaxed);
        for (uint32_t lane = 0; lane < BUCKET_LANES; lane++) {
            uint32_t node = atomic_load_explicit(&bucket->nodes[lane], memory_order_relaxed);
            int has_tag = atomic_load_explicit(&bucket->tags[lane], memory_order_relaxed) != 0;
            if (has_tag != (node != 0)) return "a lane has a tag or a node, not both";
            if (!node) continue;
            if (node >= map->nodes_fresh) return "a bucket names a node that was never used";
            const cachemap_node *found = &map->nodes[node];
            uint64_t hash = cachemap_hash(map->seed, found->key);
            if (cachemap_node_find(map, found->key, hash) != node) return "a node is not found";
            uint64_t before = *places;
            uint32_t used = cachemap_set_chunks(map, node, places);
            if (used == UINT32_MAX) return "a set's chain is broken";
            if (*places == before) return "a node nobody holds";
            *chunks += used;
            strayed -= cachemap_home(hash, map->bucket_count) != at;
            ++*nodes;
        }
    }
    return strayed ? "the count of strayed keys is wrong" : NULL;
}

static const char *audit_free_lists(const cachemap *map, uint64_t nodes, uint64_t chunks) {
    uint64_t free_nodes = 0, free_chunks = 0;
    for (uint32_t at = map->node_free; at; at = (uint32_t)map->nodes[at].key[0]) {
        if (at >= map->nodes_fresh || ++free_nodes > map->nodes_max) return "free nodes: a loop";
        if (word_of(&map->nodes[at].set)) return "a free node has a set";
    }
    for (uint32_t at = map->chunk_free; at;
         at = atomic_load_explicit(&map->chunks[at].next, memory_order_relaxed))
        if (at >= map->chunks_fresh || ++free_chunks > map->chunks_max)
            return "free chunks: a loop";
    if (nodes + free_nodes != map->nodes_fresh - 1) return "nodes were lost";
    return chunks + free_chunks == map->chunks_fresh - 1 ? NULL : "chunks were lost";
}

/* Places in use must be those of holders, or of slots that wait for the sweeper. */
static const char *audit_holders(const cachemap *map, uint64_t places) {
    uint64_t entries = 0, predicted = 0, holders = 0;
    for (uint32_t at = 1; at <= CACHEMAP_HOLDERS_MAX; at++) {
        const cachemap_holder *holder = &map->holders[at];
        if (!word_of(&holder->handle)) continue;
        holders++;
        uint32_t slot = atomic_load_explicit(&holder->slot, memory_order_relaxed);
        if (!slot || map->slot_states[slot] != SLOT_USED) return "a holder's slot is not its own";
        for (uint32_t tier = 0; tier < CACHEMAP_PREDICTED; tier++)
            entries += word_of(&holder->blocks[tier]);
        predicted += word_of(&holder->blocks[CACHEMAP_PREDICTED]);
    }
    const cachemap_header *header = map->header;
    if (entries != word_of(&header->entries)) return "entries do not add up";
    if (predicted != word_of(&header->predicted)) return "predictions do not add up";
    if (holders != word_of(&header->holders)) return "holders do not add up";
    int is_swept = !map->slots_retired && !map->slots_sweeping;
    if (places < entries + predicted) return "an entry has no place";
    return is_swept && places != entries + predicted ? "a place belongs to nobody" : NULL;
}

/* Every alias of a live slot is found, and what it leads to is held there. */
static const char *audit_aliases(const cachemap *map) {
    uint64_t count = 0;
    for (uint64_t at = 0; at < map->alias_slots; at++) {
        const cachemap_alias *alias = &map->aliases[at];
        if (!alias->place) continue;
        count++;
        uint32_t slot = alias->place >> 3, tier = alias->place & 7;
        if (cachemap_slot_is_dead(map, slot)) continue;
        if (map->slot_states[slot] != SLOT_USED) return "an alias of a free slot";
        if (cachemap_alias_find(map, alias->hash, alias->place) != alias)
            return "an alias is not found";
        if (!alias->count && tier < CACHEMAP_PREDICTED) return "an alias of nothing";
        if (tier < CACHEMAP_PREDICTED && !cachemap_set_has(map, alias->node, slot, tier))
            return "an alias leads to what is not held";
        if (tier == COPIES_TIER &&
            !cachemap_set_has(map, (uint32_t)(alias->hash >> 3), slot, alias->hash & 7))
            return "copies of what is not held";
    }
    return count == word_of(&map->header->aliases) ? NULL : "aliases do not add up";
}

const char *cachemap_audit(cachemap *map) {
    uint64_t nodes = 0, places = 0, chunks = 0;
    const char *wrong = audit_nodes(map, &nodes, &places, &chunks);
    if (!wrong && nodes != word_of(&map->header->nodes)) wrong = "nodes do not add up";
    if (!wrong) wrong = audit_free_lists(map, nodes, chunks);
    if (!wrong) wrong = audit_holders(map, places);
    return wrong ? wrong : audit_aliases(map);
}
