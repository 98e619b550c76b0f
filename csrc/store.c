/* The store: the daemon's books over an arena.
 *
 * What is true is in the index, which clients read; everything here (lists, allocator,
 * reservations) is private and can be rebuilt from it.  One thread at a time calls in, so there are
 * no locks; the only concurrency is with lock-free readers, and it lives in store_index.c.  The
 * parts:
 *
 *   store_index.c    records in their buckets, the writer's half of the pin protocol
 *   store_evict.c    which record goes when room is needed
 *   store_policy.c   retention, time to live, quotas
 *   store_reserve.c  reservations, commits, quarantine
 *   store_class.c    what each (namespace, group) stores
 *   store_list.c     listings for people
 *   store_adopt.c    a store from the index of an earlier daemon
 *   store.c          life cycle, clients, classes, events, books
 *
 * Invariants, checked by store_audit: a slot with a tag is in exactly one list (pending while its
 * shard mask is not full, else one of its size's queues); used units are those of all committed
 * shards and all reservations; every live reservation is on a pending slot; the counts in `stats`
 * are the numbers found by walking.
 */
#include "store.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "arena_private.h"
#include "checksum.h"
#include "store_private.h"

#define RUN_SCRATCH 4096

static void empty_lists(store *state) {
    const slot_list empty = {ARENA_NONE, ARENA_NONE, 0};
    state->pending = empty;
    for (uint32_t i = 0; i < EXTENTS_SIZES_MAX; i++)
        for (uint32_t queue = 0; queue < QUEUES; queue++) state->queues[i][queue] = empty;
    for (uint32_t i = 0; i < state->slots; i++)
        state->books[i] =
            (slot_book){.reservations = ARENA_NONE, .parent = ARENA_NONE, .child = ARENA_NONE};
    for (uint32_t i = 0; i < STORE_RESERVATIONS_MAX; i++) {
        uint32_t next = i + 1 < STORE_RESERVATIONS_MAX ? i + 1 : ARENA_NONE;
        state->reservations[i].next_of_client = next;
    }
    state->live = state->stock = (age_list){ARENA_NONE, ARENA_NONE};
    for (uint32_t i = 0; i < STORE_CLIENTS_MAX; i++)
        state->clients[i].first_reservation = ARENA_NONE;
}

static int take_memory(store *state) {
    state->books = calloc(state->slots, sizeof *state->books);
    state->reservations = calloc(STORE_RESERVATIONS_MAX, sizeof *state->reservations);
    state->events = calloc(STORE_EVENTS_MAX, sizeof *state->events);
    state->run_scratch = calloc(RUN_SCRATCH, sizeof *state->run_scratch);
    arena_slab *slabs = (arena_slab *)((char *)state->header + state->header->slabs_offset);
    state->pool = extents_create(state->header, slabs);
    state->ghosts_mask = state->slots - 1;
    state->ghosts = calloc(state->slots, sizeof *state->ghosts);
    return state->books && state->reservations && state->events && state->run_scratch &&
           state->pool && state->ghosts && store_policy_create(state);
}

/* A store without records over an index whose header is right. */
store *store_over(void *index) {
    store *state = calloc(1, sizeof *state);
    if (!state) return NULL;
    state->header = index;
    state->buckets = (arena_bucket *)((char *)index + state->header->buckets_offset);
    state->shards = (arena_shard *)((char *)index + state->header->shards_offset);
    state->classes = (arena_class *)((char *)index + state->header->classes_offset);
    state->slots = state->header->bucket_count * ARENA_BUCKET_SLOTS;
    if (!take_memory(state)) {
        store_destroy(state);
        return NULL;
    }
    empty_lists(state);
    state->stats.data_bytes = state->header->data_bytes;
    state->stats.record_capacity = state->slots;
    return state;
}

store *store_create(void *index, const uint8_t *instance, uint64_t generation, uint64_t records,
                    uint32_t shards_per_record, uint64_t data_bytes, const uint64_t *seed) {
    if (records > STORE_RECORDS_MAX || data_bytes / ARENA_UNIT_BYTES >= UINT32_MAX) return NULL;
    arena_write_header(index, instance, generation, records, shards_per_record, data_bytes, seed);
    return store_over(index);
}

void store_destroy(store *state) {
    if (!state) return;
    extents_destroy(state->pool);
    for (uint32_t i = 0; i < STORE_CLIENTS_MAX; i++) free(state->clients[i].held_free);
    free(state->books);
    free(state->reservations);
    free(state->events);
    free(state->run_scratch);
    free(state->ghosts);
    store_policy_destroy(state);
    free(state);
}

/* Enters a client whose ledger is laid out; 0 when memory is short. */
int store_enter_client(store *state, uint32_t number, arena_ledger_header *ledger) {
    client_book *book = &state->clients[number];
    book->held_free = malloc(ARENA_HELD_MAX * sizeof *book->held_free);
    if (!book->held_free) return 0;
    for (uint32_t i = 0; i < ARENA_HELD_MAX; i++)
        book->held_free[i] = (uint16_t)(ARENA_HELD_MAX - 1 - i);
    book->held_free_count = ARENA_HELD_MAX;
    book->held = (arena_held *)((char *)ledger + ARENA_LEDGER_HELD_OFFSET);
    book->ledger = ledger;
    book->pins = (_Atomic uint8_t *)((char *)ledger + ARENA_LEDGER_PINS_OFFSET);
    ledger->client = number;
    if (number >= state->clients_end) state->clients_end = number + 1;
    state->stats.clients++;
    return 1;
}

int store_client_attach(store *state, void *ledger, uint64_t token) {
    for (uint32_t i = 0; i < STORE_CLIENTS_MAX; i++) {
        if (state->clients[i].pins) continue;
        arena_write_ledger(ledger, state->header->instance, state->slots, token);
        return store_enter_client(state, i, ledger) ? (int)i : -1;
    }
    return -1;
}

void store_client_describe(store *state, uint32_t client, uint32_t process_id, const char *name) {
    if (client >= STORE_CLIENTS_MAX || !state->clients[client].pins) return;
    arena_ledger_header *ledger = state->clients[client].ledger;
    ledger->process_id = process_id;
    strncpy(ledger->name, name, sizeof ledger->name - 1);
}

int store_client_read(const store *state, uint32_t client, store_client_facts *facts) {
    if (client >= STORE_CLIENTS_MAX || !state->clients[client].pins) return 0;
    const arena_ledger_header *ledger = state->clients[client].ledger;
    facts->token = ledger->token;
    facts->process_id = ledger->process_id;
    memcpy(facts->name, ledger->name, sizeof facts->name);
    facts->name[sizeof facts->name - 1] = 0;
    return 1;
}

void store_client_detach(store *state, uint32_t client) {
    if (client >= STORE_CLIENTS_MAX || !state->clients[client].pins) return;
    store_release_client(state, client);
    free(state->clients[client].held_free);
    state->clients[client].held_free = NULL;
    state->clients[client].pins = NULL;
    state->clients[client].ledger = NULL;
    state->stats.clients--;
}

arena_ledger_header *store_ledger(const store *state, uint32_t client) {
    return state->clients[client].ledger;
}

uint32_t store_clients_end(const store *state) {
    return state->clients_end;
}

void store_set_sleeping(store *state, uint32_t is_sleeping) {
    atomic_store_explicit(&state->header->daemon_sleeping, is_sleeping, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst); /* pairs with the one before a client's doorbell */
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
    const arena_class *kind = &state->classes[store_record(state, slot)->class_id];
    for (uint32_t i = 0; i < kind->shard_count; i++) {
        const arena_shard *shard = store_shard(state, slot, i);
        const char *bytes = (const char *)data + (uint64_t)shard->extent_start * ARENA_UNIT_BYTES;
        if (checksum_bytes(bytes, kind->shard_bytes[i]) != shard->sum) return 0;
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
    if (event->is_removed)
        atomic_fetch_add_explicit(&state->header->removed_count, 1, memory_order_release);
    atomic_fetch_add_explicit(&state->header->change_count, 1, memory_order_release);
    if (state->events_count == STORE_EVENTS_MAX) {
        state->events_overflowed = 1;
        state->stats.events_lost_total++;
        return;
    }
    state->events[(state->events_head + state->events_count++) % STORE_EVENTS_MAX] = *event;
}

int store_has_events(const store *state) {
    return state->events_count > 0 || state->events_overflowed;
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
    const uint64_t *bytes = state->retained_bytes, *records = state->retained_records;
    stats->ephemeral_bytes = bytes[STORE_RETAIN_EPHEMERAL];
    stats->short_bytes = bytes[STORE_RETAIN_SHORT];
    stats->long_bytes = bytes[STORE_RETAIN_LONG];
    stats->pinned_bytes = bytes[STORE_RETAIN_PINNED];
    stats->ephemeral_records = records[STORE_RETAIN_EPHEMERAL];
    stats->short_records = records[STORE_RETAIN_SHORT];
    stats->long_records = records[STORE_RETAIN_LONG];
    stats->pinned_records = records[STORE_RETAIN_PINNED];
    stats->tenants = store_count_tenants(state);
    stats->reservations -= stats->stock_extents; /* stock is not being written */
}

typedef struct {
    uint64_t present, incomplete, present_bytes, incomplete_bytes, reserved, reserved_bytes;
} walk;

/* Live reservations of a record, and the space they hold. */
static const char *audit_reservations(const store *state, uint32_t slot, walk *found) {
    const arena_record *record = store_record(state, slot);
    for (uint32_t i = state->books[slot].reservations; i != ARENA_NONE;
         i = state->reservations[i].next_of_slot) {
        const reservation *entry = &state->reservations[i];
        if (entry->slot != slot) return "a reservation names another slot";
        if (record->shard_mask >> entry->shard & 1) return "a committed shard is reserved";
        found->reserved++;
        found->reserved_bytes += (uint64_t)entry->extent_units * ARENA_UNIT_BYTES;
    }
    return NULL;
}

static const char *audit_slot(const store *state, uint32_t slot, walk *found) {
    const arena_record *record = store_record(state, slot);
    if (!store_is_used(state, slot)) return record->shard_mask ? "a free slot has shards" : NULL;
    if (record->check != arena_record_check(record, store_shard(state, slot, 0)))
        return "a record's check word is wrong";
    if (store_find(state, record->class_id, (const uint8_t *)record->key) != slot)
        return "a record cannot be found by its key";
    uint64_t bytes = 0, reserved_before = found->reserved;
    for (uint64_t left = record->shard_mask; left; left &= left - 1) {
        const arena_shard *shard = store_shard(state, slot, (uint32_t)__builtin_ctzll(left));
        bytes += (uint64_t)shard->extent_units * ARENA_UNIT_BYTES;
    }
    const char *wrong = audit_reservations(state, slot, found);
    if (wrong) return wrong;
    if (store_is_present(state, slot)) {
        found->present++;
        found->present_bytes += bytes;
        return found->reserved > reserved_before ? "a present record is reserved" : NULL;
    }
    found->incomplete++;
    found->incomplete_bytes += bytes;
    return NULL;
}

/* Number of slots in a list of the first kind, one more than there are when it is broken. */
static uint64_t list_length(const store *state, const slot_list *list) {
    uint64_t length = 0;
    for (uint32_t slot = list->head; slot != ARENA_NONE && length <= state->slots;
         slot = state->books[slot].links[LINK_QUEUE].next)
        length++;
    return length == list->length ? length : (uint64_t)state->slots + 1;
}

const char *store_audit(const store *state) {
    walk found = {0};
    for (uint32_t slot = 0; slot < state->slots; slot++) {
        const char *wrong = audit_slot(state, slot, &found);
        if (wrong) return wrong;
    }
    uint64_t listed = 0, unbound = 0;
    for (uint32_t i = 0; i < EXTENTS_SIZES_MAX; i++)
        for (uint32_t queue = 0; queue < QUEUES; queue++)
            listed += list_length(state, &state->queues[i][queue]);
    for (uint32_t i = 0; i < STORE_RESERVATIONS_MAX; i++)
        unbound += state->reservations[i].state == RESERVATION_QUARANTINED ||
                   state->reservations[i].state == RESERVATION_STOCK;
    const store_stats *stats = &state->stats;
    if (found.present != stats->records_present || found.present != listed)
        return "present records do not add up";
    if (found.incomplete != stats->records_incomplete ||
        found.incomplete != list_length(state, &state->pending))
        return "incomplete records do not add up";
    if (found.present_bytes != stats->present_bytes) return "present bytes do not add up";
    if (found.reserved + unbound != stats->reservations) return "reservations do not add up";
    uint64_t used = found.present_bytes + found.incomplete_bytes + found.reserved_bytes +
                    stats->quarantined_bytes + stats->stock_bytes;
    if (used != (uint64_t)extents_used_units(state->pool) * ARENA_UNIT_BYTES)
        return "used space does not add up";
    return store_audit_policy(state);
}
