/* The store: the daemon's books over an arena.
 *
 * What is true is in the index, which clients read; everything here (lists, allocator,
 * reservations) is private and can be rebuilt from it.  One thread at a time calls in, so there are
 * no locks; the only concurrency is with lock-free readers, and it lives in store_index.c.  The
 * parts:
 *
 *   store_index.c    records in their buckets, the writer's half of the pin protocol
 *   store_evict.c    which record goes when room is needed
 *   store_reserve.c  reservations, commits, quarantine
 *   store.c          life cycle, clients, classes, events, books
 *
 * Invariants, checked by store_audit: a slot with a tag is in exactly one list (pending while its
 * shard mask is not full, else the list of its size); used units are those of all records and
 * quarantine entries; every live reservation is on a pending slot; the counts in `stats` are the
 * numbers found by walking.
 */
#include "store.h"

#include <stdlib.h>
#include <string.h>

#include "checksum.h"
#include "store_private.h"

#define RUN_SCRATCH 4096

static void empty_lists(store *state) {
    state->pending = (slot_list){ARENA_NONE, ARENA_NONE};
    for (uint32_t i = 0; i < EXTENTS_SIZES_MAX; i++)
        state->recent[i] = (slot_list){ARENA_NONE, ARENA_NONE};
    for (uint32_t i = 0; i < state->slots; i++) state->books[i].reservations = ARENA_NONE;
    for (uint32_t i = 0; i < STORE_RESERVATIONS_MAX; i++) {
        uint32_t next = i + 1 < STORE_RESERVATIONS_MAX ? i + 1 : ARENA_NONE;
        state->reservations[i].next_of_client = next;
        state->quarantines[i].next_free = next;
    }
    state->oldest_reservation = state->newest_reservation = ARENA_NONE;
    for (uint32_t i = 0; i < STORE_CLIENTS_MAX; i++)
        state->clients[i].first_reservation = ARENA_NONE;
}

static int take_memory(store *state) {
    state->books = calloc(state->slots, sizeof *state->books);
    state->reservations = calloc(STORE_RESERVATIONS_MAX, sizeof *state->reservations);
    state->quarantines = calloc(STORE_RESERVATIONS_MAX, sizeof *state->quarantines);
    state->events = calloc(STORE_EVENTS_MAX, sizeof *state->events);
    state->run_scratch = calloc(RUN_SCRATCH, sizeof *state->run_scratch);
    state->pool = extents_create((uint32_t)(state->header->data_bytes / ARENA_UNIT_BYTES));
    return state->books && state->reservations && state->quarantines && state->events &&
           state->run_scratch && state->pool;
}

store *store_create(void *index, const uint8_t *instance, uint64_t generation, uint64_t records,
                    uint32_t sums_per_record, uint64_t data_bytes, const uint64_t *seed) {
    if (records > STORE_RECORDS_MAX || data_bytes / ARENA_UNIT_BYTES >= UINT32_MAX) return NULL;
    store *state = calloc(1, sizeof *state);
    if (!state) return NULL;
    state->header = index;
    arena_write_header(state->header, instance, generation, records, sums_per_record, data_bytes,
                       seed);
    state->buckets = (arena_bucket *)((char *)index + state->header->buckets_offset);
    state->sums = (uint64_t *)((char *)index + state->header->sums_offset);
    state->classes = (arena_class *)((char *)index + state->header->classes_offset);
    state->slots = state->header->bucket_count * ARENA_BUCKET_SLOTS;
    if (!take_memory(state)) {
        store_destroy(state);
        return NULL;
    }
    empty_lists(state);
    state->stats.data_bytes = data_bytes;
    state->stats.record_capacity = state->slots;
    return state;
}

void store_destroy(store *state) {
    if (!state) return;
    extents_destroy(state->pool);
    free(state->books);
    free(state->reservations);
    free(state->quarantines);
    free(state->events);
    free(state->run_scratch);
    free(state);
}

int store_client_attach(store *state, void *ledger, uint64_t token) {
    for (uint32_t i = 0; i < STORE_CLIENTS_MAX; i++) {
        client_book *book = &state->clients[i];
        if (book->pins) continue;
        arena_write_ledger(ledger, state->header->instance, state->slots, token);
        book->ledger = ledger;
        book->pins = (_Atomic uint8_t *)((char *)ledger + sizeof(arena_ledger_header));
        if (i >= state->clients_end) state->clients_end = i + 1;
        state->stats.clients++;
        return (int)i;
    }
    return -1;
}

void store_client_detach(store *state, uint32_t client) {
    if (client >= STORE_CLIENTS_MAX || !state->clients[client].pins) return;
    store_release_client(state, client);
    state->clients[client].pins = NULL;
    state->clients[client].ledger = NULL;
    state->stats.clients--;
}

static uint32_t units_for(uint64_t bytes) {
    return (uint32_t)((bytes + ARENA_UNIT_BYTES - 1) / ARENA_UNIT_BYTES);
}

static int same_geometry(const arena_class *known, uint32_t shard_count,
                         const uint64_t *shard_bytes) {
    return known->shard_count == shard_count &&
           memcmp(known->shard_bytes, shard_bytes, shard_count * sizeof *shard_bytes) == 0;
}

/* A class id is never given to another (namespace, group) in the life of an arena: clients keep it,
 * and content keys alone do not tell namespaces apart. */
static uint32_t free_class(const store *state) {
    for (uint32_t i = 0; i < ARENA_CLASSES_MAX; i++)
        if (state->classes[i].shard_count == 0) return i;
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

static int make_class(store *state, uint32_t id, const uint8_t *name_space, uint32_t group,
                      uint32_t shard_count, const uint64_t *shard_bytes, const char *model) {
    uint64_t units = 0;
    for (uint32_t i = 0; i < shard_count; i++) {
        if (shard_bytes[i] == 0 || shard_bytes[i] > state->header->data_bytes)
            return STORE_TOO_LARGE;
        units += units_for(shard_bytes[i]);
    }
    if (units > state->header->data_bytes / ARENA_UNIT_BYTES) return STORE_TOO_LARGE;
    if (!extents_fits(state->pool, (uint32_t)units)) return STORE_TOO_LARGE;
    uint32_t size = extents_size_class(state->pool, (uint32_t)units);
    if (size == EXTENTS_NONE) return STORE_CLASSES_FULL;
    state->class_sizes[id] = size;
    arena_class *fresh = &state->classes[id];
    memset(fresh, 0, sizeof *fresh);
    memcpy(fresh->name_space, name_space, 16);
    fresh->group = group;
    fresh->record_units = (uint32_t)units;
    memcpy(fresh->shard_bytes, shard_bytes, shard_count * sizeof *shard_bytes);
    strncpy(fresh->model, model, ARENA_MODEL_BYTES - 1);
    __atomic_store_n(&fresh->shard_count, shard_count, __ATOMIC_RELEASE);
    state->stats.classes++;
    return STORE_OK;
}

int store_class_open(store *state, const uint8_t *name_space, uint32_t group, uint32_t shard_count,
                     const uint64_t *shard_bytes, const char *model, uint32_t *class_id,
                     uint64_t *shard_offsets) {
    if (shard_count == 0 || shard_count > state->header->sums_per_record) return STORE_TOO_LARGE;
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
    uint64_t offset = 0;
    for (uint32_t i = 0; i < shard_count; i++) {
        shard_offsets[i] = offset;
        offset += (uint64_t)units_for(shard_bytes[i]) * ARENA_UNIT_BYTES;
    }
    return STORE_OK;
}

void store_touch(store *state, uint32_t class_id, const uint8_t *keys, uint64_t n) {
    if (class_id >= ARENA_CLASSES_MAX) return;
    for (uint64_t i = n; i-- > 0;) {
        uint32_t slot = store_find(state, class_id, keys + i * ARENA_KEY_BYTES);
        if (slot == ARENA_NONE || !store_is_present(state, slot)) continue;
        store_mark_used(state, slot);
        state->stats.touched_total++;
    }
}

int store_drop(store *state, uint32_t class_id, const uint8_t *key) {
    if (class_id >= ARENA_CLASSES_MAX) return STORE_BAD_REQUEST;
    uint32_t slot = store_find(state, class_id, key);
    if (slot == ARENA_NONE || !store_is_present(state, slot)) return STORE_ABSENT;
    if (!store_evict(state, slot)) return STORE_PINNED;
    state->stats.dropped_total++;
    return STORE_OK;
}

static int is_intact(const store *state, const void *data, uint32_t slot) {
    const arena_record *record = store_record(state, slot);
    const arena_class *kind = &state->classes[record->class_id];
    const char *bytes = (const char *)data + (uint64_t)record->extent_start * ARENA_UNIT_BYTES;
    for (uint32_t shard = 0; shard < kind->shard_count; shard++) {
        uint64_t sum = state->sums[(uint64_t)slot * state->header->sums_per_record + shard];
        if (checksum_bytes(bytes, kind->shard_bytes[shard]) != sum) return 0;
        bytes += (uint64_t)units_for(kind->shard_bytes[shard]) * ARENA_UNIT_BYTES;
    }
    return 1;
}

int store_verify(store *state, const void *data, uint32_t class_id, const uint8_t *key) {
    if (class_id >= ARENA_CLASSES_MAX) return STORE_BAD_REQUEST;
    uint32_t slot = store_find(state, class_id, key);
    if (slot == ARENA_NONE || !store_is_present(state, slot)) return STORE_ABSENT;
    if (is_intact(state, data, slot)) return STORE_OK;
    if (!store_evict(state, slot)) return STORE_PINNED;
    state->stats.damaged_total++;
    return STORE_DAMAGED;
}

uint64_t store_drop_class(store *state, uint32_t class_id) {
    uint64_t dropped = 0;
    for (uint32_t slot = 0; slot < state->slots; slot++) {
        if (!store_is_present(state, slot) || store_record(state, slot)->class_id != class_id)
            continue;
        if (store_evict(state, slot)) dropped++;
    }
    state->stats.dropped_total += dropped;
    return dropped;
}

/* Events wait in a ring until the daemon's loop publishes them. When it is full the event is lost,
 * and said to be: listeners then take a snapshot, so nothing is wrong for longer than that. */
void store_announce_event(store *state, const store_event *event) {
    if (state->events_count == STORE_EVENTS_MAX) {
        state->events_overflowed = 1;
        state->stats.events_lost_total++;
        return;
    }
    state->events[(state->events_head + state->events_count++) % STORE_EVENTS_MAX] = *event;
}

uint64_t store_take_events(store *state, store_event *events, uint64_t max, int *lost) {
    uint64_t taken = 0;
    while (taken < max && state->events_count) {
        events[taken++] = state->events[state->events_head];
        state->events_head = (state->events_head + 1) % STORE_EVENTS_MAX;
        state->events_count--;
    }
    *lost = state->events_overflowed;
    state->events_overflowed = 0;
    return taken;
}

uint64_t store_snapshot(const store *state, uint64_t *cursor, store_event *events, uint64_t max) {
    uint64_t taken = 0;
    for (; *cursor < state->slots && taken < max; (*cursor)++) {
        uint32_t slot = (uint32_t)*cursor;
        if (!store_is_present(state, slot)) continue;
        const arena_record *record = store_record(state, slot);
        events[taken] = (store_event){.class_id = record->class_id};
        memcpy(events[taken++].key, record->key, ARENA_KEY_BYTES);
    }
    return taken;
}

void store_read_stats(const store *state, store_stats *stats) {
    *stats = state->stats;
    stats->used_bytes = (uint64_t)extents_used_units(state->pool) * ARENA_UNIT_BYTES;
}

typedef struct {
    uint64_t present, incomplete, present_bytes, incomplete_bytes, reserved;
} walk;

static const char *audit_slot(const store *state, uint32_t slot, walk *found) {
    const arena_record *record = store_record(state, slot);
    if (record->extent_units == 0) return record->shard_mask ? "a free slot has shards" : NULL;
    if (record->check != arena_record_check(record)) return "a record's check word is wrong";
    if (store_find(state, record->class_id, (const uint8_t *)record->key) != slot)
        return "a record cannot be found by its key";
    uint64_t bytes = (uint64_t)record->extent_units * ARENA_UNIT_BYTES;
    uint64_t reserved = 0;
    for (uint32_t i = state->books[slot].reservations; i != ARENA_NONE;
         i = state->reservations[i].next_of_slot) {
        if (state->reservations[i].slot != slot) return "a reservation names another slot";
        if (record->shard_mask >> state->reservations[i].shard & 1)
            return "a committed shard is reserved";
        reserved++;
    }
    found->reserved += reserved;
    if (store_is_present(state, slot)) {
        found->present++;
        found->present_bytes += bytes;
        return reserved ? "a present record is reserved" : NULL;
    }
    found->incomplete++;
    found->incomplete_bytes += bytes;
    return NULL;
}

static uint64_t list_length(const store *state, const slot_list *list) {
    uint64_t length = 0;
    for (uint32_t slot = list->head; slot != ARENA_NONE && length <= state->slots;
         slot = state->books[slot].next)
        length++;
    return length;
}

const char *store_audit(const store *state) {
    walk found = {0};
    for (uint32_t slot = 0; slot < state->slots; slot++) {
        const char *wrong = audit_slot(state, slot, &found);
        if (wrong) return wrong;
    }
    uint64_t listed = 0, quarantined = 0;
    for (uint32_t i = 0; i < EXTENTS_SIZES_MAX; i++)
        listed += list_length(state, &state->recent[i]);
    for (uint32_t i = 0; i < STORE_RESERVATIONS_MAX; i++)
        quarantined += state->reservations[i].state == RESERVATION_QUARANTINED;
    const store_stats *stats = &state->stats;
    if (found.present != stats->records_present || found.present != listed)
        return "present records do not add up";
    if (found.incomplete != stats->records_incomplete ||
        found.incomplete != list_length(state, &state->pending))
        return "incomplete records do not add up";
    if (found.present_bytes != stats->present_bytes) return "present bytes do not add up";
    if (found.reserved + quarantined != stats->reservations) return "reservations do not add up";
    uint64_t used = found.present_bytes + found.incomplete_bytes + stats->quarantined_bytes;
    if (used != (uint64_t)extents_used_units(state->pool) * ARENA_UNIT_BYTES)
        return "used space does not add up";
    return NULL;
}
