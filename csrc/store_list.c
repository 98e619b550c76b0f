/* Listings: a walk over the slots, a bounded piece at a time.
 *
 * Between two pieces records come and go, so a listing is of no single moment; but records never
 * move, so what stays is listed exactly once.
 */
#include "store_list.h"

#include <string.h>

#include "store_private.h"

static uint64_t stored_bytes(const store *state, uint32_t slot, uint64_t shard_mask) {
    uint64_t units = 0;
    for (uint64_t left = shard_mask; left; left &= left - 1)
        units += store_shard(state, slot, (uint32_t)__builtin_ctzll(left))->extent_units;
    return units * ARENA_UNIT_BYTES;
}

static void fill(const store *state, uint32_t slot, store_listing *listing) {
    const arena_record *record = store_record(state, slot);
    *listing = (store_listing){
        .class_id = record->class_id,
        .slot = slot,
        .depth_grains = record->depth_grains,
        .retention = record->flags & 7,
        .expires_s = record->expires_s,
        .is_present = (uint32_t)store_is_present(state, slot),
        .tenant_tag = record->tenant_tag,
        .shard_mask = record->shard_mask,
        .stored_bytes = stored_bytes(state, slot, record->shard_mask),
    };
    memcpy(listing->key, record->key, ARENA_KEY_BYTES);
}

uint64_t store_list(const store *state, const uint8_t *wanted, uint64_t *cursor,
                    store_listing *listings, uint64_t max) {
    uint64_t filled = 0;
    for (uint32_t looked = 0; *cursor < state->slots && filled < max; (*cursor)++) {
        if (looked++ == STORE_LIST_SLOTS_MAX) break;
        uint32_t slot = (uint32_t)*cursor;
        if (!store_is_used(state, slot) || !wanted[store_record(state, slot)->class_id]) continue;
        fill(state, slot, &listings[filled++]);
    }
    return filled;
}

void store_read_usage(const store *state, uint32_t class_id, store_class_usage *facts) {
    memset(facts, 0, sizeof *facts);
    if (class_id >= ARENA_CLASSES_MAX) return;
    const arena_class *kind = &state->classes[class_id];
    facts->shard_count = kind->shard_count;
    facts->records = state->class_records[class_id];
    for (uint32_t i = 0; i < kind->shard_count; i++) facts->record_bytes += kind->shard_bytes[i];
}
