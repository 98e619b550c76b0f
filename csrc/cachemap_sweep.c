/* Forgetting a holder without stopping.
 *
 * A holder that is cleared or leaves gives up its slot, and with it every entry at once: readers no
 * longer look at that bit.  The bits themselves go in passes over all nodes and aliases, a part
 * with every tick, and only then may the slot be used again.  A pass takes along every slot that
 * was given up before it began.  Where room is short the pass is done at once: its work is bounded
 * by the size of the map.
 */
#include "cachemap_private.h"

static void begin_pass(cachemap *map) {
    for (uint32_t slot = 1; slot < SLOTS; slot++)
        if (map->slot_states[slot] == SLOT_RETIRED) map->slot_states[slot] = SLOT_SWEEPING;
    map->slots_sweeping = map->slots_retired;
    map->slots_retired = 0;
    map->sweep_node = 1;
    map->sweep_alias = 0;
}

static void end_pass(cachemap *map) {
    for (uint32_t slot = 1; slot < SLOTS; slot++) {
        if (map->slot_states[slot] != SLOT_SWEEPING) continue;
        map->slot_states[slot] = SLOT_FREE;
        map->slots_free[map->slots_free_count++] = (uint16_t)slot;
    }
    map->slots_sweeping = 0;
}

static void show(cachemap *map) {
    atomic_store_explicit(&map->header->sweeping, map->slots_retired + map->slots_sweeping,
                          memory_order_relaxed);
}

/* A node in use has a set; one in the list of free ones has none. */
static void sweep_node(cachemap *map, uint32_t node) {
    if (!atomic_load_explicit(&map->nodes[node].set, memory_order_relaxed)) return;
    cachemap_set_sweep(map, node);
    if (!atomic_load_explicit(&map->nodes[node].set, memory_order_relaxed))
        cachemap_node_free(map, node);
}

int cachemap_sweep(cachemap *map, uint64_t steps) {
    if (!map->slots_sweeping) {
        if (!map->slots_retired) return 0;
        begin_pass(map);
    }
    for (; steps && map->sweep_node < map->nodes_fresh; steps--)
        sweep_node(map, (uint32_t)map->sweep_node++);
    for (; steps && map->sweep_alias < map->alias_slots; steps--) {
        cachemap_alias *alias = &map->aliases[map->sweep_alias];
        if (alias->place && map->slot_states[alias->place >> 3] == SLOT_SWEEPING)
            cachemap_alias_erase(map, alias); /* what moved here is looked at next */
        else
            map->sweep_alias++;
    }
    if (map->sweep_node >= map->nodes_fresh && map->sweep_alias >= map->alias_slots) end_pass(map);
    show(map);
    return map->slots_retired || map->slots_sweeping;
}

void cachemap_sweep_all(cachemap *map) {
    while (cachemap_sweep(map, UINT64_MAX)) continue;
}

void cachemap_slot_retire(cachemap *map, uint32_t slot) {
    map->slot_states[slot] = SLOT_RETIRED;
    map->slots_retired++;
    show(map);
}

uint32_t cachemap_slot_take(cachemap *map) {
    if (!map->slots_free_count) cachemap_sweep_all(map);
    if (!map->slots_free_count) return 0;
    uint32_t slot = map->slots_free[--map->slots_free_count];
    map->slot_states[slot] = SLOT_USED;
    return slot;
}
