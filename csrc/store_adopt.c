/* Adoption: a store from the index that an earlier daemon left, killed at any point or stopped.
 *
 * The index says what is present; lists, allocator and reservations are private and made anew here.
 * A record is believed when everything about it agrees: its version is even, its check word right,
 * its class known, all its shards committed, it stands where its key belongs, and each of its
 * extents lies where the slab table says extents of that size lie and belongs to no other record.
 * What does not is dropped and counted.  Bytes are verified when they are loaded, not here.
 *
 * Clients may be alive all the while: they look up, pin and copy.  Their pins count from before the
 * first record is looked at, and what they may be writing to is claimed before the first extent is
 * given out.  One case needs care: a daemon killed between taking a victim's version to odd and
 * looking at the pins leaves a record that a client may be reading.  Such a record is whole but for
 * its version, and is mended.
 *
 * Order of eviction: the deepest records of chains go first, as nothing more is known.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "arena_private.h"
#include "store_private.h"

#define LOOK_AHEAD 24 /* slots; about a memory latency of work */
#define DEPTHS     33 /* records are put in order by the number of bits of their depth */

typedef enum {
    SOUND,
    MENDABLE,
    HALF,       /* killed in the middle of a change */
    BAD_CHECK,  /* check word wrong */
    NO_CLASS,   /* of no class, or of one that is damaged */
    INCOMPLETE, /* shards are missing, and so is who would bring them */
    MISPLACED,  /* not in one of its buckets, or twice */
} verdict;

/* Slots by depth. The chains stand apart from the books, so that following them is cheap and what
 * lies ahead can be fetched; without memory for them (null) records come in the order of slots. */
typedef struct {
    uint32_t head[DEPTHS];
    uint32_t tail[DEPTHS];
    uint32_t *next;
} depth_order;

store *store_adopt(void *index, uint64_t index_bytes, uint64_t data_bytes) {
    if (arena_check_index(index, index_bytes, data_bytes) != ARENA_OK) return NULL;
    return store_over(index);
}

static int is_number_free(const store *state, uint32_t number) {
    return number < STORE_CLIENTS_MAX && !state->clients[number].pins;
}

int store_adopt_client(store *state, void *memory, uint64_t ledger_bytes) {
    arena_ledger_header *ledger = memory;
    if (ledger_bytes < ARENA_LEDGER_PINS_OFFSET + state->slots) return -1;
    int sound = arena_check_ledger(state->header, ledger, ledger_bytes) == ARENA_OK;
    uint32_t number = *(const volatile uint32_t *)&ledger->client; /* read once, then checked */
    if (!sound || !is_number_free(state, number))
        for (number = 0; number < STORE_CLIENTS_MAX && !is_number_free(state, number);) number++;
    if (number == STORE_CLIENTS_MAX || !store_enter_client(state, number, ledger)) return -1;
    return (int)number;
}

static int is_pinned(const store *state, uint32_t slot) {
    for (uint32_t i = 0; i < state->clients_end; i++) {
        const client_book *book = &state->clients[i];
        if (book->pins && atomic_load_explicit(&book->pins[slot], memory_order_acquire)) return 1;
    }
    return 0;
}

/* Whether nothing is there, as in a slot never used or properly emptied. */
static int is_blank(const arena_record *record) {
    const uint64_t *words = (const uint64_t *)(const void *)record;
    uint64_t any = words[0] & 1;
    for (size_t i = 1; i < sizeof *record / 8; i++) any |= words[i];
    return any == 0;
}

static int has_right_check(const store *state, uint32_t slot) {
    const arena_record *record = store_record(state, slot);
    uint32_t shards = state->header->shards_per_record;
    if (shards < 64 && record->shard_mask >> shards) return 0;
    return record->check == arena_record_check(record, store_shard(state, slot, 0));
}

static int is_class(const store *state, uint32_t class_id) {
    return class_id < ARENA_CLASSES_MAX && state->classes[class_id].shard_count > 0;
}

/* Whether look-ups for the key end at this slot. */
static int is_in_place(const store *state, uint32_t slot) {
    const arena_record *record = store_record(state, slot);
    return store_find(state, record->class_id, (const uint8_t *)record->key) == slot;
}

static verdict judge(const store *state, uint32_t slot) {
    const arena_record *record = store_record(state, slot);
    int is_odd = atomic_load_explicit(&record->version, memory_order_relaxed) & 1;
    if (is_odd && !is_pinned(state, slot)) return HALF;
    if (!has_right_check(state, slot)) return is_odd ? HALF : BAD_CHECK;
    if (!is_class(state, record->class_id)) return NO_CLASS;
    if (record->shard_mask != store_full_mask(state, record->class_id)) return INCOMPLETE;
    if (!is_in_place(state, slot)) return MISPLACED;
    return is_odd ? MENDABLE : SOUND;
}

/* Claims the extents of all shards, or none. */
static int claim_extents(store *state, uint32_t slot) {
    const arena_record *record = store_record(state, slot);
    uint32_t count = state->classes[record->class_id].shard_count;
    for (uint32_t i = 0; i < count; i++) {
        const arena_shard *shard = store_shard(state, slot, i);
        uint32_t units = extents_units(state->pool, state->class_sizes[record->class_id][i]);
        if (shard->extent_units == units &&
            extents_claim(state->pool, shard->extent_start, units, slot))
            continue;
        while (i-- > 0) extents_unclaim(state->pool, store_shard(state, slot, i)->extent_start);
        return 0;
    }
    return 1;
}

static void count_dropped(store_stats *stats, verdict why) {
    stats->adopt_dropped_half_total += why == HALF;
    stats->adopt_dropped_check_total += why == BAD_CHECK;
    stats->adopt_dropped_class_total += why == NO_CLASS;
    stats->adopt_dropped_incomplete_total += why == INCOMPLETE;
    stats->adopt_dropped_place_total += why == MISPLACED;
}

/* Takes what is in a slot out; its version is even afterwards, whatever it was. */
static void clear_slot(store *state, uint32_t slot) {
    arena_record *record = store_record(state, slot);
    uint64_t version = atomic_load_explicit(&record->version, memory_order_relaxed);
    if (version & 1) atomic_store_explicit(&record->version, version + 1, memory_order_relaxed);
    store_remove_record(state, slot, 1);
}

static void enter_list(store *state, uint32_t slot) {
    slot_book *book = &state->books[slot];
    book->size_class = state->class_sizes[store_record(state, slot)->class_id][0];
    book->serial = ++state->record_serial;
    store_account(state, slot);
    store_queue(state, slot, 1);
    store_enter_owners(state, slot);
}

static void enter(store *state, uint32_t slot, depth_order *order) {
    const arena_record *record = store_record(state, slot);
    uint32_t units = 0, shards = state->classes[record->class_id].shard_count;
    for (uint32_t i = 0; i < shards; i++) units += store_shard(state, slot, i)->extent_units;
    state->stats.present_bytes += (uint64_t)units * ARENA_UNIT_BYTES;
    state->stats.records_present++;
    state->stats.adopted_total++;
    state->class_records[record->class_id]++;
    uint32_t depth = record->depth_grains;
    uint32_t bits = depth ? 32 - (uint32_t)__builtin_clz(depth) : 0;
    if (!order->next) {
        enter_list(state, slot);
        return;
    }
    order->next[slot] = ARENA_NONE;
    if (order->head[bits] == ARENA_NONE)
        order->head[bits] = slot;
    else
        order->next[order->tail[bits]] = slot;
    order->tail[bits] = slot;
}

static void adopt_slot(store *state, uint32_t slot, depth_order *order) {
    arena_record *record = store_record(state, slot);
    if (!store_is_used(state, slot) && is_blank(record)) return;
    verdict found = judge(state, slot);
    if (found == SOUND || found == MENDABLE) {
        if (claim_extents(state, slot)) {
            if (found == MENDABLE) {
                atomic_fetch_add_explicit(&record->version, 1, memory_order_release);
                state->stats.adopt_mended_total++;
            }
            enter(state, slot, order);
            return;
        }
        state->stats.adopt_dropped_extent_total++;
    }
    count_dropped(&state->stats, found);
    clear_slot(state, slot);
}

/* Puts the records into the lists of eviction, the deepest next to go. */
static void put_in_order(store *state, const depth_order *order) {
    for (uint32_t bits = DEPTHS; bits-- > 0;) {
        uint32_t ahead = order->head[bits];
        for (uint32_t i = 0; i < LOOK_AHEAD && ahead != ARENA_NONE; i++) ahead = order->next[ahead];
        for (uint32_t slot = order->head[bits]; slot != ARENA_NONE; slot = order->next[slot]) {
            if (ahead != ARENA_NONE) {
                __builtin_prefetch(&state->books[ahead], 1);
                __builtin_prefetch(&state->books[ahead] + 1, 1);
                __builtin_prefetch(store_record(state, ahead));
                ahead = order->next[ahead];
            }
            enter_list(state, slot);
        }
    }
}

/* Fetches ahead what judging a slot will touch far away. */
static void look_ahead(const store *state, uint32_t slot) {
    if (slot >= state->slots || !store_is_used(state, slot)) return;
    const arena_record *record = store_record(state, slot);
    arena_place place = arena_place_of(state->header, record->key, record->class_id);
    __builtin_prefetch(&state->buckets[place.bucket[0]]);
    __builtin_prefetch(&state->buckets[place.bucket[1]]);
    extents_prefetch(state->pool, store_shard(state, slot, 0)->extent_start);
}

void store_adopt_records(store *state) {
    depth_order order;
    memset(&order, 0xFF, sizeof order);
    order.next = malloc(state->slots * sizeof *order.next);
    state->stats.adopt_damaged_classes_total = store_adopt_classes(state);
    state->stats.adopt_damaged_slabs_total = extents_adopt_runs(state->pool);
    for (uint32_t slot = 0; slot < state->slots; slot++) {
        look_ahead(state, slot + LOOK_AHEAD);
        adopt_slot(state, slot, &order);
    }
    for (uint32_t client = 0; client < state->clients_end; client++)
        if (state->clients[client].pins) store_adopt_held(state, client);
    store_end_adoption(state);
    extents_end_adoption(state->pool);
    if (order.next) put_in_order(state, &order);
    free(order.next);
    atomic_fetch_add_explicit(&state->header->removed_count, 1, memory_order_release);
    atomic_fetch_add_explicit(&state->header->change_count, 1, memory_order_release);
}
