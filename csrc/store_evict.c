/* Making room.
 *
 * Present records stand in one list per extent size, least recently used first.  A record's turn
 * comes when it is the oldest of all sizes: if it has the wanted size it alone goes, else the whole
 * run it lies in is emptied, so that space follows demand from one size to another.  A pinned
 * record is in use, so it moves to the young end instead.  Every loop below has a limit; at the
 * limit the caller is told there is no space, and the engine goes on without saving.
 */
#include "store_private.h"

#define PINNED_SKIPS_MAX 64   /* victims looked at, all pinned, before giving up */
#define ROOM_TRIES_MAX   32   /* records or runs given up for one new extent */
#define RUN_OWNERS_MAX   4096 /* extents of one run emptied in a go */

void store_list_append(store *state, slot_list *list, uint32_t slot) {
    slot_book *book = &state->books[slot];
    book->previous = list->tail;
    book->next = ARENA_NONE;
    if (list->tail != ARENA_NONE)
        state->books[list->tail].next = slot;
    else
        list->head = slot;
    list->tail = slot;
}

void store_list_remove(store *state, slot_list *list, uint32_t slot) {
    slot_book *book = &state->books[slot];
    if (book->previous != ARENA_NONE)
        state->books[book->previous].next = book->next;
    else
        list->head = book->next;
    if (book->next != ARENA_NONE)
        state->books[book->next].previous = book->previous;
    else
        list->tail = book->previous;
}

void store_mark_used(store *state, uint32_t slot) {
    slot_book *book = &state->books[slot];
    slot_list *list = &state->recent[book->size_class];
    store_list_remove(state, list, slot);
    book->stamp = ++state->use_counter;
    store_list_append(state, list, slot);
}

/* Evicts one present record; 0 when it is pinned. */
int store_evict(store *state, uint32_t slot) {
    arena_record gone = *store_record(state, slot);
    if (!store_remove_record(state, slot, 0)) return 0;
    store_list_remove(state, &state->recent[state->books[slot].size_class], slot);
    extents_give(state->pool, gone.extent_start);
    state->class_records[gone.class_id]--;
    state->stats.records_present--;
    state->stats.present_bytes -= (uint64_t)gone.extent_units * ARENA_UNIT_BYTES;
    store_event event = {.class_id = gone.class_id, .is_removed = 1};
    __builtin_memcpy(event.key, gone.key, sizeof event.key);
    store_announce_event(state, &event);
    return 1;
}

/* Oldest size list by the stamp of its head, or EXTENTS_NONE when nothing is present. */
static uint32_t oldest_size(const store *state) {
    uint32_t best = EXTENTS_NONE;
    uint64_t best_stamp = UINT64_MAX;
    for (uint32_t size = 0; size < EXTENTS_SIZES_MAX; size++) {
        uint32_t head = state->recent[size].head;
        if (head == ARENA_NONE || state->books[head].stamp >= best_stamp) continue;
        best_stamp = state->books[head].stamp;
        best = size;
    }
    return best;
}

/* Evicts the oldest record of a size that is not pinned; 0 when all looked at were. */
static int evict_oldest(store *state, uint32_t size) {
    for (int skips = 0; skips < PINNED_SKIPS_MAX; skips++) {
        uint32_t victim = state->recent[size].head;
        if (victim == ARENA_NONE) return 0;
        if (store_evict(state, victim)) {
            state->stats.evicted_total++;
            return 1;
        }
        store_mark_used(state, victim);
    }
    return 0;
}

/* Empties the run in which the oldest record of `size` lies, as far as nothing there is pinned or
 * being written. */
static void empty_oldest_run(store *state, uint32_t size) {
    uint32_t victim = state->recent[size].head;
    uint32_t start = store_record(state, victim)->extent_start;
    uint32_t count = extents_run_owners(state->pool, start, state->run_scratch, RUN_OWNERS_MAX);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t owner = state->run_scratch[i];
        if (owner & OWNER_QUARANTINE || !store_is_present(state, owner)) continue;
        if (store_evict(state, owner))
            state->stats.evicted_total++;
        else
            store_mark_used(state, owner);
    }
}

/* Start of a free extent of a size, evicting as needed; EXTENTS_NONE when nothing may go. The
 * extent is owned by slot 0 until the caller sets its owner. */
uint32_t store_make_room(store *state, uint32_t size) {
    for (int attempt = 0; attempt < ROOM_TRIES_MAX; attempt++) {
        uint32_t start = extents_take(state->pool, size, 0);
        if (start != EXTENTS_NONE) return start;
        uint32_t oldest = oldest_size(state);
        if (oldest == EXTENTS_NONE) return EXTENTS_NONE;
        if (oldest != size)
            empty_oldest_run(state, oldest);
        else if (!evict_oldest(state, size))
            return EXTENTS_NONE;
    }
    /* Runs freed so far did not lie together; the wanted size gives up one of its own. */
    return evict_oldest(state, size) ? extents_take(state->pool, size, 0) : EXTENTS_NONE;
}

/* A free index slot for a key, evicting the least recently used of its two buckets when both are
 * full; ARENA_NONE when all sixteen are pinned or being written. */
uint32_t store_make_slot(store *state, uint32_t class_id, const uint8_t *key) {
    uint32_t candidates[2 * ARENA_BUCKET_SLOTS], count;
    uint32_t slot = store_empty_slot(state, class_id, key, candidates, &count);
    for (uint32_t tries = 0; slot == ARENA_NONE && tries < count; tries++) {
        uint32_t victim = ARENA_NONE;
        for (uint32_t i = 0; i < count; i++) {
            uint32_t other = candidates[i];
            if (!store_is_present(state, other)) continue;
            if (victim == ARENA_NONE || state->books[other].stamp < state->books[victim].stamp)
                victim = other;
        }
        if (victim == ARENA_NONE) return ARENA_NONE;
        if (store_evict(state, victim)) {
            state->stats.evicted_total++;
            return victim;
        }
        store_mark_used(state, victim);
    }
    return slot;
}
