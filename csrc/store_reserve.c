/* Reservations: the right to write one shard of one record into the arena.
 *
 * The first reservation of a record takes its extent (all shards at once) and enters it in the
 * index with an empty shard mask; each commit sets a bit, and the last one makes it present.
 *
 * The space of a live process is never reused under it.  When a deadline passes, or a record is
 * given up while somebody may still be writing, the record leaves the index but the extent goes to
 * *quarantine* until every such writer has committed (refused as stale), given up, or died.  A
 * quarantined reservation still counts against its client's limit, so one client cannot put more
 * than that out of use.
 */
#include <string.h>

#include "store_private.h"

static uint64_t name_of(const store *state, uint32_t index) {
    return (uint64_t)state->reservations[index].generation << 32 | index;
}

/* Index of the client's reservation with this name, or ARENA_NONE. */
static uint32_t lookup(const store *state, uint32_t client, uint64_t name) {
    uint32_t index = (uint32_t)name;
    if (index >= STORE_RESERVATIONS_MAX) return ARENA_NONE;
    const reservation *entry = &state->reservations[index];
    int matches = entry->state != RESERVATION_FREE && entry->client == client &&
                  entry->generation == (uint32_t)(name >> 32);
    return matches ? index : ARENA_NONE;
}

static void link_by_age(store *state, uint32_t index) {
    reservation *entry = &state->reservations[index];
    entry->older = state->newest_reservation;
    entry->newer = ARENA_NONE;
    if (entry->older != ARENA_NONE)
        state->reservations[entry->older].newer = index;
    else
        state->oldest_reservation = index;
    state->newest_reservation = index;
}

static void unlink_by_age(store *state, uint32_t index) {
    const reservation *entry = &state->reservations[index];
    if (entry->older != ARENA_NONE)
        state->reservations[entry->older].newer = entry->newer;
    else
        state->oldest_reservation = entry->newer;
    if (entry->newer != ARENA_NONE)
        state->reservations[entry->newer].older = entry->older;
    else
        state->newest_reservation = entry->older;
}

static uint32_t take_reservation(store *state, uint32_t client, uint32_t slot, uint32_t shard,
                                 uint64_t deadline_ns) {
    uint32_t index = state->free_reservation;
    reservation *entry = &state->reservations[index];
    state->free_reservation = entry->next_of_client;
    client_book *owner = &state->clients[client];
    entry->generation++;
    entry->state = RESERVATION_LIVE;
    entry->slot = slot;
    entry->client = client;
    entry->shard = shard;
    entry->deadline_ns = deadline_ns;
    entry->next_of_slot = state->books[slot].reservations;
    state->books[slot].reservations = index;
    state->books[slot].reserved_mask |= 1ull << shard;
    entry->previous_of_client = ARENA_NONE;
    entry->next_of_client = owner->first_reservation;
    if (owner->first_reservation != ARENA_NONE)
        state->reservations[owner->first_reservation].previous_of_client = index;
    owner->first_reservation = index;
    owner->reservation_count++;
    state->stats.reservations++;
    link_by_age(state, index);
    return index;
}

/* Gives the table entry back; the caller has taken it out of its slot or quarantine. */
static void free_reservation(store *state, uint32_t index) {
    reservation *entry = &state->reservations[index];
    client_book *owner = &state->clients[entry->client];
    if (entry->previous_of_client != ARENA_NONE)
        state->reservations[entry->previous_of_client].next_of_client = entry->next_of_client;
    else
        owner->first_reservation = entry->next_of_client;
    if (entry->next_of_client != ARENA_NONE)
        state->reservations[entry->next_of_client].previous_of_client = entry->previous_of_client;
    owner->reservation_count--;
    state->stats.reservations--;
    entry->state = RESERVATION_FREE;
    entry->next_of_client = state->free_reservation;
    state->free_reservation = index;
}

static void detach_from_slot(store *state, uint32_t index) {
    const reservation *entry = &state->reservations[index];
    slot_book *book = &state->books[entry->slot];
    uint32_t *link = &book->reservations;
    while (*link != index) link = &state->reservations[*link].next_of_slot;
    *link = entry->next_of_slot;
    book->reserved_mask &= ~(1ull << entry->shard);
    unlink_by_age(state, index);
}

static void leave_quarantine(store *state, uint32_t index) {
    uint32_t number = state->reservations[index].quarantine;
    quarantine *entry = &state->quarantines[number];
    if (--entry->writers > 0) return;
    extents_give(state->pool, entry->start_unit);
    state->stats.quarantined_bytes -= (uint64_t)entry->units * ARENA_UNIT_BYTES;
    entry->next_free = state->free_quarantine;
    state->free_quarantine = number;
}

/* Moves an incomplete record's extent and writers to quarantine. There is an entry for each
 * reservation that can exist, so the table cannot run out. */
static void move_to_quarantine(store *state, uint32_t slot, const arena_record *gone) {
    uint32_t number = state->free_quarantine;
    quarantine *entry = &state->quarantines[number];
    state->free_quarantine = entry->next_free;
    *entry = (quarantine){gone->extent_start, 0, gone->extent_units, ARENA_NONE};
    while (state->books[slot].reservations != ARENA_NONE) {
        uint32_t index = state->books[slot].reservations;
        detach_from_slot(state, index);
        state->reservations[index].state = RESERVATION_QUARANTINED;
        state->reservations[index].quarantine = number;
        entry->writers++;
    }
    extents_set_owner(state->pool, gone->extent_start, OWNER_QUARANTINE | number);
    state->stats.quarantined_bytes += (uint64_t)gone->extent_units * ARENA_UNIT_BYTES;
}

/* Takes an incomplete record out. Its space stays untouched while anybody may write to it. */
void store_drop_incomplete(store *state, uint32_t slot) {
    arena_record gone = *store_record(state, slot);
    store_list_remove(state, &state->pending, slot);
    if (state->books[slot].reservations != ARENA_NONE)
        move_to_quarantine(state, slot, &gone);
    else
        extents_give(state->pool, gone.extent_start);
    store_remove_record(state, slot, 1);
    state->class_records[gone.class_id]--;
    state->stats.records_incomplete--;
}

/* Enters a new, empty record; ARENA_NONE when there is no room. */
static uint32_t start_record(store *state, uint32_t class_id, const store_wish *wish,
                             uint32_t retention, uint64_t tenant_tag, uint64_t now_ns) {
    uint32_t size = state->class_sizes[class_id];
    uint32_t start = store_make_room(state, size);
    if (start == EXTENTS_NONE) return ARENA_NONE;
    extents_set_owner(state->pool, start, OWNER_QUARANTINE); /* not a victim while slots move */
    uint32_t slot = store_make_slot(state, class_id, wish->key);
    if (slot == ARENA_NONE) {
        extents_give(state->pool, start);
        return ARENA_NONE;
    }
    extents_set_owner(state->pool, start, slot);
    arena_record fresh;
    memset((void *)&fresh, 0, sizeof fresh);
    memcpy(fresh.key, wish->key, ARENA_KEY_BYTES);
    fresh.class_id = class_id;
    fresh.depth_grains = wish->depth_grains;
    fresh.extent_start = start;
    fresh.extent_units = state->classes[class_id].record_units;
    fresh.tenant_tag = tenant_tag;
    fresh.flags = retention & 7;
    slot_book *book = &state->books[slot];
    *book = (slot_book){.reservations = ARENA_NONE, .size_class = size, .stamp = now_ns};
    store_list_append(state, &state->pending, slot);
    store_write_record(state, slot, &fresh);
    state->class_records[class_id]++;
    state->stats.records_incomplete++;
    return slot;
}

static uint64_t shard_offset(const store *state, uint32_t class_id, uint32_t shard) {
    uint64_t offset = 0;
    for (uint32_t i = 0; i < shard; i++) {
        uint64_t units =
            (state->classes[class_id].shard_bytes[i] + ARENA_UNIT_BYTES - 1) / ARENA_UNIT_BYTES;
        offset += units * ARENA_UNIT_BYTES;
    }
    return offset;
}

static uint32_t refuse(store *state, uint32_t status) {
    if (status == STORE_EXISTS) state->stats.reserve_exists_total++;
    if (status == STORE_BUSY) state->stats.reserve_busy_total++;
    if (status == STORE_NO_SPACE) state->stats.reserve_no_space_total++;
    if (status == STORE_LIMIT) state->stats.reserve_limit_total++;
    return status;
}

static uint32_t reserve_one(store *state, uint32_t client, uint32_t class_id, uint32_t shard,
                            uint32_t retention, uint64_t tenant_tag, const store_wish *wish,
                            uint64_t now_ns, uint64_t deadline_ns, store_grant *grant) {
    if (state->clients[client].reservation_count >= STORE_RESERVATIONS_PER_CLIENT_MAX ||
        state->free_reservation == ARENA_NONE)
        return refuse(state, STORE_LIMIT);
    uint32_t slot = store_find(state, class_id, wish->key);
    if (slot != ARENA_NONE) {
        if (store_record(state, slot)->shard_mask >> shard & 1) return refuse(state, STORE_EXISTS);
        if (state->books[slot].reserved_mask >> shard & 1) return refuse(state, STORE_BUSY);
    } else {
        slot = start_record(state, class_id, wish, retention, tenant_tag, now_ns);
        if (slot == ARENA_NONE) return refuse(state, STORE_NO_SPACE);
    }
    uint32_t index = take_reservation(state, client, slot, shard, deadline_ns);
    grant->reservation = name_of(state, index);
    grant->offset_bytes = (uint64_t)store_record(state, slot)->extent_start * ARENA_UNIT_BYTES +
                          shard_offset(state, class_id, shard);
    return STORE_OK;
}

static int is_client(const store *state, uint32_t client) {
    return client < STORE_CLIENTS_MAX && state->clients[client].pins;
}

void store_reserve(store *state, uint32_t client, uint32_t class_id, uint32_t shard,
                   uint32_t retention, uint64_t tenant_tag, const store_wish *wishes, uint64_t n,
                   uint64_t now_ns, uint64_t deadline_ns, store_grant *grants) {
    int sound = is_client(state, client) && class_id < ARENA_CLASSES_MAX &&
                shard < state->classes[class_id].shard_count;
    for (uint64_t i = 0; i < n; i++) {
        grants[i] = (store_grant){0, 0, STORE_BAD_REQUEST, 0};
        if (!sound) continue;
        grants[i].status = reserve_one(state, client, class_id, shard, retention, tenant_tag,
                                       &wishes[i], now_ns, deadline_ns, &grants[i]);
    }
}

static void become_present(store *state, uint32_t slot) {
    const arena_record *record = store_record(state, slot);
    slot_book *book = &state->books[slot];
    store_list_remove(state, &state->pending, slot);
    book->stamp = ++state->use_counter;
    store_list_append(state, &state->recent[book->size_class], slot);
    state->stats.records_incomplete--;
    state->stats.records_present++;
    state->stats.present_bytes += (uint64_t)record->extent_units * ARENA_UNIT_BYTES;
    state->stats.stored_total++;
    store_event event = {.class_id = record->class_id};
    memcpy(event.key, record->key, sizeof event.key);
    store_announce_event(state, &event);
}

static uint32_t commit_one(store *state, uint32_t client, const store_commitment *commitment) {
    uint32_t index = lookup(state, client, commitment->reservation);
    if (index == ARENA_NONE || state->reservations[index].state != RESERVATION_LIVE) {
        state->stats.commit_stale_total++;
        if (index == ARENA_NONE) return STORE_STALE;
        leave_quarantine(state, index);
        free_reservation(state, index);
        return STORE_STALE;
    }
    uint32_t slot = state->reservations[index].slot, shard = state->reservations[index].shard;
    detach_from_slot(state, index);
    free_reservation(state, index);
    uint64_t at = (uint64_t)slot * state->header->sums_per_record + shard;
    __atomic_store_n(&state->sums[at], commitment->sum, __ATOMIC_RELAXED);
    store_set_shards(state, slot, store_record(state, slot)->shard_mask | 1ull << shard);
    if (store_is_present(state, slot)) become_present(state, slot);
    return STORE_OK;
}

void store_commit(store *state, uint32_t client, const store_commitment *commitments, uint64_t n,
                  uint32_t *statuses) {
    for (uint64_t i = 0; i < n; i++)
        statuses[i] = is_client(state, client) ? commit_one(state, client, &commitments[i])
                                               : (uint32_t)STORE_BAD_REQUEST;
}

static void give_up_one(store *state, uint32_t index) {
    if (state->reservations[index].state == RESERVATION_QUARANTINED) {
        leave_quarantine(state, index);
        free_reservation(state, index);
        return;
    }
    uint32_t slot = state->reservations[index].slot;
    detach_from_slot(state, index);
    free_reservation(state, index);
    state->stats.aborted_total++;
    int unused =
        store_record(state, slot)->shard_mask == 0 && state->books[slot].reservations == ARENA_NONE;
    if (unused) store_drop_incomplete(state, slot);
}

void store_give_up(store *state, uint32_t client, const uint64_t *reservations, uint64_t n) {
    if (!is_client(state, client)) return;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t index = lookup(state, client, reservations[i]);
        if (index != ARENA_NONE) give_up_one(state, index);
    }
}

void store_release_client(store *state, uint32_t client) {
    while (state->clients[client].first_reservation != ARENA_NONE)
        give_up_one(state, state->clients[client].first_reservation);
}

void store_expire(store *state, uint64_t now_ns, uint64_t incomplete_max_ns) {
    while (state->oldest_reservation != ARENA_NONE &&
           state->reservations[state->oldest_reservation].deadline_ns < now_ns) {
        store_drop_incomplete(state, state->reservations[state->oldest_reservation].slot);
        state->stats.expired_total++;
    }
    while (state->pending.head != ARENA_NONE &&
           state->books[state->pending.head].stamp + incomplete_max_ns < now_ns) {
        store_drop_incomplete(state, state->pending.head);
        state->stats.expired_total++;
    }
}
