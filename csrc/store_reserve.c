/* Reservations: the right to write one shard of one record into the arena.
 *
 * The first reservation of a record enters it in the index with an empty shard mask; each has an
 * extent of its own.  A commit hands the extent to the record and sets the shard's bit; the last
 * one makes the record present.
 *
 * The space of a live process is never reused under it.  When a deadline passes, or a record is
 * dropped while somebody may still be writing a shard, the record leaves the index but that extent
 * stays with its reservation, in *quarantine*, until its writer has committed (refused as stale),
 * given up, or died.  A quarantined reservation still counts against its client's limit, so one
 * client cannot put more than that out of use.
 *
 * Stock is space that a client was given ahead.  It takes some by itself, so nobody knows when;
 * what is out of its table for long counts as quarantined.  It is never given to anybody else
 * before the client commits it (which still counts), gives it up, says which ones it goes on with,
 * or is gone; and who has forgotten too much gets no more.
 *
 * Every reservation is noted in its client's file, so that a daemon which adopts the arena keeps
 * off that space too: it stays in quarantine (or stock) under the name the client knows.
 */
#include <stdatomic.h>
#include <string.h>

#include "arena_private.h"
#include "ring.h"
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

static void link_by_age(store *state, age_list *list, uint32_t index) {
    reservation *entry = &state->reservations[index];
    entry->older = list->newest;
    entry->newer = ARENA_NONE;
    if (entry->older != ARENA_NONE)
        state->reservations[entry->older].newer = index;
    else
        list->oldest = index;
    list->newest = index;
}

static void unlink_by_age(store *state, age_list *list, uint32_t index) {
    const reservation *entry = &state->reservations[index];
    if (entry->older != ARENA_NONE)
        state->reservations[entry->older].newer = entry->newer;
    else
        list->oldest = entry->newer;
    if (entry->newer != ARENA_NONE)
        state->reservations[entry->newer].older = entry->older;
    else
        list->newest = entry->older;
}

/* The one at the old end whose deadline has passed, or ARENA_NONE. */
static uint32_t next_due(const store *state, const age_list *list, uint64_t now_ns) {
    int is_due =
        list->oldest != ARENA_NONE && state->reservations[list->oldest].deadline_ns < now_ns;
    return is_due ? list->oldest : ARENA_NONE;
}

/* Notes in the client's file that it may write there, before it is told so. */
static void note_held(store *state, uint32_t index) {
    reservation *entry = &state->reservations[index];
    client_book *owner = &state->clients[entry->client];
    entry->held = owner->held_free[--owner->held_free_count];
    owner->held[entry->held] = (arena_held){
        name_of(state, index), entry->extent_start,    entry->extent_units,
        entry->class_id,       (uint16_t)entry->shard, entry->state == RESERVATION_STOCK};
}

static void clear_held(store *state, const reservation *entry) {
    client_book *owner = &state->clients[entry->client];
    if (entry->held == ARENA_NONE) return;
    memset(&owner->held[entry->held], 0, sizeof *owner->held);
    owner->held_free[owner->held_free_count++] = (uint16_t)entry->held;
}

static void link_to_client(store *state, uint32_t index) {
    reservation *entry = &state->reservations[index];
    client_book *owner = &state->clients[entry->client];
    entry->previous_of_client = ARENA_NONE;
    entry->next_of_client = owner->first_reservation;
    if (owner->first_reservation != ARENA_NONE)
        state->reservations[owner->first_reservation].previous_of_client = index;
    owner->first_reservation = index;
    owner->reservation_count++;
    state->stats.reservations++;
}

static uint32_t new_reservation(store *state, uint32_t client, uint32_t class_id, uint32_t shard,
                                uint32_t kind) {
    uint32_t index = state->free_reservation;
    reservation *entry = &state->reservations[index];
    state->free_reservation = entry->next_of_client;
    entry->generation++;
    entry->name = NAME_KNOWN;
    entry->held = ARENA_NONE;
    entry->state = kind;
    entry->client = client;
    entry->class_id = class_id;
    entry->shard = shard;
    entry->extent_units = 0;
    link_to_client(state, index);
    return index;
}

/* Makes a reservation one for a shard of the incomplete record in `slot`. */
static void bind_to_slot(store *state, uint32_t index, uint32_t slot, uint64_t deadline_ns) {
    reservation *entry = &state->reservations[index];
    entry->slot = slot;
    entry->deadline_ns = deadline_ns;
    entry->next_of_slot = state->books[slot].reservations;
    state->books[slot].reservations = index;
    state->books[slot].reserved_mask |= 1ull << entry->shard;
    link_by_age(state, &state->live, index);
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
    clear_held(state, entry);
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
    unlink_by_age(state, &state->live, index);
}

static uint64_t extent_bytes(const reservation *entry) {
    return (uint64_t)entry->extent_units * ARENA_UNIT_BYTES;
}

static void quarantine(store *state, uint32_t index) {
    detach_from_slot(state, index);
    state->reservations[index].state = RESERVATION_QUARANTINED;
    state->stats.quarantined_bytes += extent_bytes(&state->reservations[index]);
}

/* Takes an incomplete record out. What is committed is free at once; what may still be written to
 * is not. */
void store_drop_incomplete(store *state, uint32_t slot) {
    arena_record gone = *store_record(state, slot);
    while (state->books[slot].reservations != ARENA_NONE)
        quarantine(state, state->books[slot].reservations);
    store_list_remove(state, LINK_QUEUE, &state->pending, slot);
    store_remove_record(state, slot, 1);
    store_unlink_chain(state, slot);
    store_unaccount(state, slot, &gone);
    store_give_extents(state, slot, gone.shard_mask);
    state->class_records[gone.class_id]--;
    state->stats.records_incomplete--;
}

/* Enters a new, empty record. ARENA_NONE with *status set when it may not be stored, or its buckets
 * are full of what may not go. */
static uint32_t start_record(store *state, uint32_t class_id, const store_wish *wish,
                             const store_terms *terms, uint64_t now_ns, uint32_t *status) {
    *status = store_admit(state, class_id, terms->retention, terms->tenant_tag);
    if (*status != STORE_OK) return ARENA_NONE;
    *status = STORE_NO_SPACE;
    uint32_t slot = store_make_slot(state, class_id, wish->key);
    if (slot == ARENA_NONE) return ARENA_NONE;
    arena_record fresh;
    memset((void *)&fresh, 0, sizeof fresh);
    memcpy(fresh.key, wish->key, ARENA_KEY_BYTES);
    fresh.class_id = class_id;
    fresh.depth_grains = wish->depth_grains;
    fresh.tenant_tag = terms->tenant_tag;
    fresh.flags = terms->retention;
    fresh.expires_s = store_expiry(state, terms->ttl_s);
    state->books[slot] = (slot_book){.reservations = ARENA_NONE,
                                     .size_class = state->class_sizes[class_id][0],
                                     .stamp = now_ns,
                                     .parent = ARENA_NONE,
                                     .child = ARENA_NONE,
                                     .serial = ++state->record_serial};
    store_list_append(state, LINK_QUEUE, &state->pending, slot);
    store_write_record(state, slot, &fresh);
    store_account(state, slot);
    state->class_records[class_id]++;
    state->stats.records_incomplete++;
    return slot;
}

static int is_unused(const store *state, uint32_t slot) {
    return store_record(state, slot)->shard_mask == 0 &&
           state->books[slot].reservations == ARENA_NONE;
}

static uint32_t refuse(store *state, uint32_t status) {
    if (status == STORE_EXISTS) state->stats.reserve_exists_total++;
    if (status == STORE_BUSY) state->stats.reserve_busy_total++;
    if (status == STORE_NO_SPACE) state->stats.reserve_no_space_total++;
    if (status == STORE_LIMIT) state->stats.reserve_limit_total++;
    if (status == STORE_UNWANTED) state->stats.reserve_unwanted_total++;
    if (status == STORE_PINNED_FULL) state->stats.reserve_pinned_full_total++;
    if (status == STORE_OVER_QUOTA) state->stats.reserve_over_quota_total++;
    return status;
}

/* Each reservation needs an entry in the client's file; some may be taken by what was set aside. */
static int is_at_limit(const store *state, uint32_t client) {
    const client_book *owner = &state->clients[client];
    return owner->reservation_count >= STORE_RESERVATIONS_PER_CLIENT_MAX ||
           owner->held_free_count == 0 || state->free_reservation == ARENA_NONE;
}

static uint32_t reserve_one(store *state, uint32_t client, uint32_t class_id, uint32_t shard,
                            const store_terms *terms, const store_wish *wish, uint64_t now_ns,
                            uint64_t deadline_ns, store_grant *grant) {
    if (is_at_limit(state, client)) return refuse(state, STORE_LIMIT);
    uint32_t slot = store_find_fresh(state, class_id, wish->key);
    if (slot == ARENA_NONE) {
        uint32_t status;
        slot = start_record(state, class_id, wish, terms, now_ns, &status);
        if (slot == ARENA_NONE) return refuse(state, status);
    }
    store_link_chain(state, client, slot);
    if (store_is_present(state, slot)) store_raise(state, slot, terms->retention, terms->ttl_s);
    if (store_record(state, slot)->shard_mask >> shard & 1) return refuse(state, STORE_EXISTS);
    if (state->books[slot].reserved_mask >> shard & 1) return refuse(state, STORE_BUSY);
    uint32_t index = new_reservation(state, client, class_id, shard, RESERVATION_LIVE);
    bind_to_slot(state, index, slot, deadline_ns);
    reservation *entry = &state->reservations[index];
    uint32_t size = state->class_sizes[class_id][shard];
    entry->extent_start = store_make_room(state, size, OWNER_RESERVATION | index);
    if (entry->extent_start == EXTENTS_NONE) {
        detach_from_slot(state, index);
        free_reservation(state, index);
        if (is_unused(state, slot)) store_drop_incomplete(state, slot);
        return refuse(state, STORE_NO_SPACE);
    }
    entry->extent_units = extents_units(state->pool, size);
    note_held(state, index);
    grant->reservation = name_of(state, index);
    grant->offset_bytes = (uint64_t)entry->extent_start * ARENA_UNIT_BYTES;
    return STORE_OK;
}

static int is_client(const store *state, uint32_t client) {
    return client < STORE_CLIENTS_MAX && state->clients[client].pins;
}

void store_reserve(store *state, uint32_t client, uint32_t class_id, uint32_t shard,
                   const store_terms *terms, const store_wish *wishes, uint64_t n, uint64_t now_ns,
                   uint64_t deadline_ns, store_grant *grants) {
    int sound = is_client(state, client) && class_id < ARENA_CLASSES_MAX &&
                shard < state->classes[class_id].shard_count;
    for (uint64_t i = 0; i < n; i++) {
        grants[i] = (store_grant){0, 0, STORE_BAD_REQUEST, 0};
        if (!sound) continue;
        grants[i].status = reserve_one(state, client, class_id, shard, terms, &wishes[i], now_ns,
                                       deadline_ns, &grants[i]);
    }
}

static void become_present(store *state, uint32_t slot) {
    const arena_record *record = store_record(state, slot);
    store_list_remove(state, LINK_QUEUE, &state->pending, slot);
    store_queue(state, slot, 0);
    store_enter_owners(state, slot);
    state->stats.records_incomplete--;
    state->stats.records_present++;
    state->stats.stored_total++;
    state->stats.present_bytes += store_record_bytes(state, record->class_id);
    store_event event = {.class_id = record->class_id};
    memcpy(event.key, record->key, sizeof event.key);
    store_announce_event(state, &event);
}

/* Gives a reservation back with its extent, out of quarantine. */
static void end_quarantine(store *state, uint32_t index) {
    state->stats.quarantined_bytes -= extent_bytes(&state->reservations[index]);
    extents_give(state->pool, state->reservations[index].extent_start);
    free_reservation(state, index);
}

/* Enters a reservation whose space is taken ahead. */
static void enter_stock(store *state, uint32_t index) {
    reservation *entry = &state->reservations[index];
    entry->stock_place = STOCK_OFFERED;
    entry->deadline_ns = state->stock_due_ns;
    link_by_age(state, &state->stock, index);
    state->stats.stock_bytes += extent_bytes(entry);
    state->stats.stock_extents++;
}

/* Undoes enter_stock; the extent is the caller's to give back or to use. */
static void leave_stock(store *state, uint32_t index) {
    const reservation *entry = &state->reservations[index];
    if (entry->stock_place == STOCK_OVERDUE) {
        state->stats.quarantined_bytes -= extent_bytes(entry);
        state->clients[entry->client].overdue_count--;
        return;
    }
    unlink_by_age(state, &state->stock, index);
    state->stats.stock_bytes -= extent_bytes(entry);
    state->stats.stock_extents--;
}

/* Its client took it long ago and may still be writing: it is kept back for that client alone, and
 * counts as quarantined, so that what others may have as stock does not shrink. */
static void become_overdue(store *state, uint32_t index) {
    reservation *entry = &state->reservations[index];
    leave_stock(state, index);
    entry->stock_place = STOCK_OVERDUE;
    state->clients[entry->client].overdue_count++;
    state->stats.quarantined_bytes += extent_bytes(entry);
    state->stats.stock_overdue_total++;
}

/* Gives a stock reservation back with its extent. */
static void end_stock(store *state, uint32_t index) {
    leave_stock(state, index);
    extents_give(state->pool, state->reservations[index].extent_start);
    free_reservation(state, index);
}

static void give_up_one(store *state, uint32_t index) {
    reservation *entry = &state->reservations[index];
    if (entry->state == RESERVATION_QUARANTINED) {
        end_quarantine(state, index);
        return;
    }
    if (entry->state == RESERVATION_STOCK) {
        end_stock(state, index);
        return;
    }
    uint32_t slot = entry->slot;
    detach_from_slot(state, index);
    extents_give(state->pool, entry->extent_start);
    free_reservation(state, index);
    state->stats.aborted_total++;
    if (is_unused(state, slot)) store_drop_incomplete(state, slot);
}

static uint32_t commit_one(store *state, uint32_t client, const store_commitment *commitment) {
    uint32_t index = lookup(state, client, commitment->reservation);
    if (index == ARENA_NONE || state->reservations[index].state != RESERVATION_LIVE) {
        state->stats.commit_stale_total++;
        if (index != ARENA_NONE) give_up_one(state, index);
        return STORE_STALE;
    }
    reservation done = state->reservations[index];
    detach_from_slot(state, index);
    free_reservation(state, index);
    arena_shard shard = {commitment->sum, done.extent_start, done.extent_units};
    extents_set_owner(state->pool, done.extent_start, done.slot);
    store_add_shard(state, done.slot, done.shard, &shard);
    if (store_is_present(state, done.slot)) become_present(state, done.slot);
    return STORE_OK;
}

void store_commit(store *state, uint32_t client, const store_commitment *commitments, uint64_t n,
                  uint32_t *statuses) {
    for (uint64_t i = 0; i < n; i++)
        statuses[i] = is_client(state, client) ? commit_one(state, client, &commitments[i])
                                               : (uint32_t)STORE_BAD_REQUEST;
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

/* Looks whether stock is still in its client's table. Out of it twice in a row, a whole period
 * apart, it counts as forgotten. */
static void look_at_stock(store *state, uint32_t index) {
    reservation *entry = &state->reservations[index];
    if (ring_stock_offers(state->clients[entry->client].ledger, name_of(state, index)))
        entry->stock_place = STOCK_OFFERED;
    else if (entry->stock_place == STOCK_OFFERED)
        entry->stock_place = STOCK_OUT;
    else {
        become_overdue(state, index);
        return;
    }
    unlink_by_age(state, &state->stock, index);
    entry->deadline_ns = state->stock_due_ns;
    link_by_age(state, &state->stock, index);
}

void store_expire(store *state, uint64_t now_ns, uint64_t incomplete_max_ns) {
    uint32_t due;
    while ((due = next_due(state, &state->live, now_ns)) != ARENA_NONE) {
        store_drop_incomplete(state, state->reservations[due].slot);
        state->stats.expired_total++;
    }
    while (state->pending.head != ARENA_NONE &&
           state->books[state->pending.head].stamp + incomplete_max_ns < now_ns) {
        store_drop_incomplete(state, state->pending.head);
        state->stats.expired_total++;
    }
    state->stock_due_ns = now_ns + incomplete_max_ns;
    while ((due = next_due(state, &state->stock, now_ns)) != ARENA_NONE) look_at_stock(state, due);
    store_expire_records(state);
}

/* ---- stock: space taken ahead ---- */

int store_stock(store *state, uint32_t client, uint32_t class_id, uint32_t shard,
                store_grant *grant) {
    *grant = (store_grant){0, 0, STORE_BAD_REQUEST, 0};
    int sound = is_client(state, client) && class_id < ARENA_CLASSES_MAX &&
                shard < state->classes[class_id].shard_count;
    if (!sound) return STORE_BAD_REQUEST;
    uint32_t size = state->class_sizes[class_id][shard];
    uint64_t bytes = (uint64_t)extents_units(state->pool, size) * ARENA_UNIT_BYTES;
    uint64_t limit = state->header->data_bytes / STORE_STOCK_SHARE;
    int is_forgetful = state->clients[client].overdue_count >= STORE_STOCK_OVERDUE_MAX;
    if (is_forgetful || is_at_limit(state, client) || state->stats.stock_bytes + bytes > limit)
        return STORE_LIMIT;
    uint32_t index = new_reservation(state, client, class_id, shard, RESERVATION_STOCK);
    reservation *entry = &state->reservations[index];
    entry->extent_start = store_make_room(state, size, OWNER_RESERVATION | index);
    if (entry->extent_start == EXTENTS_NONE) {
        free_reservation(state, index);
        return STORE_NO_SPACE;
    }
    entry->extent_units = (uint32_t)(bytes / ARENA_UNIT_BYTES);
    enter_stock(state, index);
    note_held(state, index);
    grant->reservation = name_of(state, index);
    grant->offset_bytes = (uint64_t)entry->extent_start * ARENA_UNIT_BYTES;
    return STORE_OK;
}

/* The record a stock commit is for: found, or entered; ARENA_NONE with *status set when neither. */
static uint32_t slot_for_commit(store *state, const reservation *entry, const store_late_wish *wish,
                                uint64_t now_ns, uint32_t *status) {
    const store_terms terms = {wish->retention, wish->ttl_s, wish->tenant_tag};
    uint32_t slot = store_find_fresh(state, entry->class_id, wish->wish.key);
    if (slot == ARENA_NONE) {
        slot = start_record(state, entry->class_id, &wish->wish, &terms, now_ns, status);
        if (slot == ARENA_NONE) return ARENA_NONE;
    }
    store_link_chain(state, entry->client, slot);
    if (store_is_present(state, slot)) store_raise(state, slot, terms.retention, terms.ttl_s);
    if (store_record(state, slot)->shard_mask >> entry->shard & 1) {
        *status = STORE_EXISTS; /* two clients saved the same: one copy stays */
        state->stats.duplicates_total++;
        return ARENA_NONE;
    }
    /* Another client reserved this shard and is slower; what it still writes goes nowhere. */
    for (uint32_t i = state->books[slot].reservations; i != ARENA_NONE;
         i = state->reservations[i].next_of_slot) {
        if (state->reservations[i].shard != entry->shard) continue;
        quarantine(state, i);
        break;
    }
    return slot;
}

int store_commit_stock(store *state, uint32_t client, uint64_t name, const store_late_wish *wish,
                       uint64_t now_ns) {
    uint32_t index = is_client(state, client) ? lookup(state, client, name) : ARENA_NONE;
    if (index == ARENA_NONE || state->reservations[index].state != RESERVATION_STOCK) {
        state->stats.commit_stale_total++;
        if (index != ARENA_NONE) give_up_one(state, index); /* it has written what it will */
        return STORE_STALE;
    }
    reservation done = state->reservations[index];
    uint32_t status = STORE_OK;
    uint32_t slot = slot_for_commit(state, &done, wish, now_ns, &status);
    if (slot == ARENA_NONE) {
        end_stock(state, index);
        return (int)refuse(state, status);
    }
    leave_stock(state, index);
    free_reservation(state, index);
    arena_shard shard = {wish->sum, done.extent_start, done.extent_units};
    extents_set_owner(state->pool, done.extent_start, slot);
    store_add_shard(state, slot, done.shard, &shard);
    if (store_is_present(state, slot)) become_present(state, slot);
    return STORE_OK;
}

/* ---- adoption ---- */

/* Where a restored reservation can stand: its own place, so that its name stays right. */
static uint32_t place_for(const store *state, uint64_t name) {
    uint32_t index = (uint32_t)name;
    if (index < STORE_RESERVATIONS_MAX && state->reservations[index].state == RESERVATION_FREE)
        return index;
    for (index = 0; index < STORE_RESERVATIONS_MAX; index++)
        if (state->reservations[index].state == RESERVATION_FREE) return index;
    return ARENA_NONE;
}

/* Whether an entry agrees with the class it names. */
static int is_sound_held(const store *state, const arena_held *held) {
    return held->class_id < ARENA_CLASSES_MAX &&
           held->shard < state->classes[held->class_id].shard_count &&
           held->extent_units ==
               extents_units(state->pool, state->class_sizes[held->class_id][held->shard]);
}

/* Whether somebody may be writing where no extent is: the slab table is wrong there, or the class
 * is, and with it the size. All else is nonsense, of which a client's file may be full. */
static int may_be_written(const store *state, const arena_held *held) {
    if (extents_owner(state->pool, held->extent_start) != EXTENTS_NONE) return 0; /* committed */
    return is_sound_held(state, held) ||
           (held->class_id < ARENA_CLASSES_MAX && state->classes[held->class_id].is_retired == 1);
}

/* Takes one entry of a client's file over; 0 when it says nothing any more. */
static int restore(store *state, uint32_t client, uint32_t place, const arena_held *held) {
    uint32_t index = place_for(state, held->reservation);
    if (index == ARENA_NONE || !extents_claim(state->pool, held->extent_start, held->extent_units,
                                              OWNER_RESERVATION | index)) {
        if (!may_be_written(state, held)) return 0;
        extents_set_aside(state->pool, held->extent_start, held->extent_units);
        state->stats.adopt_set_aside_total++;
        return 1;
    }
    reservation *entry = &state->reservations[index];
    int has_name = index == (uint32_t)held->reservation;
    *entry = (reservation){.generation = (uint32_t)(held->reservation >> 32),
                           .state = RESERVATION_QUARANTINED,
                           .client = client,
                           .held = place,
                           .name = has_name ? NAME_KNOWN : NAME_LOST,
                           .extent_start = held->extent_start,
                           .extent_units = held->extent_units};
    if (held->is_stock == 1 && is_sound_held(state, held)) {
        entry->state = RESERVATION_STOCK;
        entry->class_id = held->class_id;
        entry->shard = held->shard;
        enter_stock(state, index);
    } else {
        state->stats.quarantined_bytes += extent_bytes(entry);
    }
    link_to_client(state, index);
    return 1;
}

void store_adopt_held(store *state, uint32_t client) {
    client_book *owner = &state->clients[client];
    owner->held_free_count = 0;
    for (uint32_t place = ARENA_HELD_MAX; place-- > 0;) {
        arena_held held;
        arena_copy_once(&held, &owner->held[place], sizeof held);
        if (held.extent_units && restore(state, client, place, &held)) continue;
        memset(&owner->held[place], 0, sizeof *owner->held);
        owner->held_free[owner->held_free_count++] = (uint16_t)place;
    }
}

void store_end_adoption(store *state) {
    /* New names begin elsewhere than the last daemon's: an answer it never gave fits none of them.
     */
    uint64_t changes = atomic_load_explicit(&state->header->change_count, memory_order_relaxed);
    uint32_t base = (uint32_t)mix_words(changes ^ state->header->generation, 0x9E3779B97F4A7C15ull);
    state->free_reservation = ARENA_NONE;
    for (uint32_t index = STORE_RESERVATIONS_MAX; index-- > 0;) {
        if (state->reservations[index].state != RESERVATION_FREE) continue;
        state->reservations[index].generation = base;
        state->reservations[index].next_of_client = state->free_reservation;
        state->free_reservation = index;
    }
}

/* Whether a client's reservation ends unless it says that it goes on. */
static int ends_unspoken(const reservation *entry) {
    return entry->state != RESERVATION_STOCK && entry->name == NAME_KNOWN;
}

void store_resume(store *state, uint32_t client, const uint64_t *reservations, uint64_t n) {
    if (!is_client(state, client)) return;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t index = lookup(state, client, reservations[i]);
        if (index != ARENA_NONE && state->reservations[index].name == NAME_KNOWN)
            state->reservations[index].name = NAME_SPOKEN;
    }
    uint32_t next = state->clients[client].first_reservation;
    while (next != ARENA_NONE) {
        uint32_t index = next;
        reservation *entry = &state->reservations[index];
        next = entry->next_of_client;
        if (ends_unspoken(entry))
            give_up_one(state, index);
        else if (entry->name == NAME_SPOKEN)
            entry->name = NAME_KNOWN; /* until it comes back once more */
    }
}
