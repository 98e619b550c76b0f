/* Classes: what one (namespace, group) stores, and how large each shard of it is.
 *
 * A class id is never given to another (namespace, group) in the life of an arena: clients keep it,
 * and content keys alone do not tell namespaces apart.
 */
#include <string.h>

#include "store_private.h"

static int same_geometry(const arena_class *known, uint32_t shard_count,
                         const uint64_t *shard_bytes) {
    return known->shard_count == shard_count &&
           memcmp(known->shard_bytes, shard_bytes, shard_count * sizeof *shard_bytes) == 0;
}

static uint32_t free_class(const store *state) {
    for (uint32_t i = 0; i < ARENA_CLASSES_MAX; i++)
        if (state->classes[i].shard_count == 0 && !state->classes[i].is_retired) return i;
    return ARENA_NONE;
}

static uint32_t find_class(const store *state, const uint8_t *name_space, uint32_t group) {
    for (uint32_t i = 0; i < ARENA_CLASSES_MAX; i++) {
        const arena_class *known = &state->classes[i];
        if (known->shard_count && known->group == group &&
            memcmp(known->name_space, name_space, 16) == 0)
            return i;
    }
    return ARENA_NONE;
}

/* Finds the extent sizes of all shards; `sizes` is written only when the class can be. */
static int find_sizes(store *state, uint32_t shard_count, const uint64_t *shard_bytes,
                      uint32_t *sizes) {
    uint64_t units = 0, total_units = state->header->data_bytes / ARENA_UNIT_BYTES;
    for (uint32_t i = 0; i < shard_count; i++) {
        if (shard_bytes[i] == 0 || shard_bytes[i] > state->header->data_bytes)
            return STORE_TOO_LARGE;
        uint32_t own = (uint32_t)((shard_bytes[i] + ARENA_UNIT_BYTES - 1) / ARENA_UNIT_BYTES);
        units += own;
        if (units > total_units || !extents_fits(state->pool, own)) return STORE_TOO_LARGE;
    }
    for (uint32_t i = 0; i < shard_count; i++) {
        uint64_t own = (shard_bytes[i] + ARENA_UNIT_BYTES - 1) / ARENA_UNIT_BYTES;
        sizes[i] = extents_size_class(state->pool, (uint32_t)own);
        if (sizes[i] == EXTENTS_NONE) return STORE_CLASSES_FULL;
    }
    return STORE_OK;
}

static int make_class(store *state, uint32_t id, const uint8_t *name_space, uint32_t group,
                      uint32_t shard_count, const uint64_t *shard_bytes, const char *model) {
    int status = find_sizes(state, shard_count, shard_bytes, state->class_sizes[id]);
    if (status != STORE_OK) return status;
    arena_class *fresh = &state->classes[id];
    memset(fresh, 0, sizeof *fresh);
    memcpy(fresh->name_space, name_space, 16);
    fresh->group = group;
    memcpy(fresh->shard_bytes, shard_bytes, shard_count * sizeof *shard_bytes);
    strncpy(fresh->model, model, ARENA_MODEL_BYTES - 1);
    fresh->shard_count = shard_count;
    uint32_t check = arena_class_check(fresh);
    fresh->shard_count = 0;
    fresh->check = check;
    __atomic_store_n(&fresh->shard_count, shard_count, __ATOMIC_RELEASE);
    state->stats.classes++;
    store_class_opened(state, id);
    return STORE_OK;
}

int store_class_open(store *state, const uint8_t *name_space, uint32_t group, uint32_t shard_count,
                     const uint64_t *shard_bytes, const char *model, uint32_t *class_id) {
    if (shard_count == 0 || shard_count > state->header->shards_per_record) return STORE_TOO_LARGE;
    uint32_t id = find_class(state, name_space, group);
    if (id == ARENA_NONE) {
        id = free_class(state);
        if (id == ARENA_NONE) return STORE_CLASSES_FULL;
        int status = make_class(state, id, name_space, group, shard_count, shard_bytes, model);
        if (status != STORE_OK) return status;
    } else if (!same_geometry(&state->classes[id], shard_count, shard_bytes)) {
        return STORE_MISMATCH;
    }
    *class_id = id;
    return STORE_OK;
}

static int is_blank(const arena_class *entry) {
    const char *bytes = (const char *)entry;
    return bytes[0] == 0 && memcmp(bytes, bytes + 1, sizeof *entry - 1) == 0;
}

static int is_sound(store *state, uint32_t id) {
    const arena_class *entry = &state->classes[id];
    uint32_t shards = entry->shard_count;
    return shards > 0 && shards <= state->header->shards_per_record &&
           entry->check == arena_class_check(entry) &&
           find_sizes(state, shards, entry->shard_bytes, state->class_sizes[id]) == STORE_OK;
}

uint32_t store_adopt_classes(store *state) {
    uint32_t damaged = 0;
    for (uint32_t id = 0; id < ARENA_CLASSES_MAX; id++) {
        arena_class *entry = &state->classes[id];
        if (is_blank(entry) || (entry->is_retired == 1 && entry->shard_count == 0)) continue;
        if (is_sound(state, id)) {
            state->stats.classes++;
            store_class_opened(state, id);
            continue;
        }
        /* A client may still look things up under this id: nobody else's records may be there. */
        memset(entry, 0, sizeof *entry);
        entry->is_retired = 1;
        damaged++;
    }
    return damaged;
}

int store_class_identify(const store *state, uint32_t class_id, store_class_identity *facts) {
    if (class_id >= ARENA_CLASSES_MAX || state->classes[class_id].shard_count == 0) return 0;
    const arena_class *kind = &state->classes[class_id];
    memcpy(facts->name_space, kind->name_space, sizeof facts->name_space);
    memcpy(facts->model, kind->model, sizeof facts->model);
    facts->group = kind->group;
    facts->shard_count = kind->shard_count;
    return 1;
}
