/* The daemon's writes to the index.
 *
 * One thread writes, any number of clients read without lock (arena.c).  A change goes: version to
 * odd, fence, fields, version to the next even number.  A tag is set after its record is complete
 * and cleared before the record goes, so that a reader who follows a stale tag only compares keys
 * in vain.
 */
#include <stdatomic.h>
#include <string.h>

#include "store_private.h"

arena_record *store_record(const store *state, uint32_t slot) {
    return &state->buckets[slot / ARENA_BUCKET_SLOTS].records[slot % ARENA_BUCKET_SLOTS];
}

static uint16_t tag_of(const store *state, uint32_t slot) {
    const arena_bucket *bucket = &state->buckets[slot / ARENA_BUCKET_SLOTS];
    uint32_t lane = slot % ARENA_BUCKET_SLOTS;
    uint64_t word = atomic_load_explicit(&bucket->tags[lane / 4], memory_order_relaxed);
    return (uint16_t)(word >> (16 * (lane % 4)));
}

static void set_tag(store *state, uint32_t slot, uint16_t tag) {
    arena_bucket *bucket = &state->buckets[slot / ARENA_BUCKET_SLOTS];
    uint32_t lane = slot % ARENA_BUCKET_SLOTS, shift = 16 * (lane % 4);
    uint64_t word = atomic_load_explicit(&bucket->tags[lane / 4], memory_order_relaxed);
    word = (word & ~(0xFFFFull << shift)) | (uint64_t)tag << shift;
    atomic_store_explicit(&bucket->tags[lane / 4], word, memory_order_release);
}

static arena_place place_of(const store *state, uint32_t class_id, const uint8_t *key,
                            uint64_t words[2]) {
    memcpy(words, key, ARENA_KEY_BYTES);
    return arena_place_of(state->header, words, class_id);
}

uint32_t store_find(const store *state, uint32_t class_id, const uint8_t *key) {
    uint64_t words[2];
    arena_place place = place_of(state, class_id, key, words);
    for (int choice = 0; choice < 2; choice++) {
        uint32_t first = (uint32_t)place.bucket[choice] * ARENA_BUCKET_SLOTS;
        for (uint32_t slot = first; slot < first + ARENA_BUCKET_SLOTS; slot++) {
            if (tag_of(state, slot) != place.tag) continue;
            const arena_record *record = store_record(state, slot);
            if (record->key[0] == words[0] && record->key[1] == words[1] &&
                record->class_id == class_id)
                return slot;
        }
    }
    return ARENA_NONE;
}

/* An empty slot for the key, from the emptier of its two buckets. When both are full, ARENA_NONE,
 * and the sixteen slots that would have to give way in `candidates`. */
uint32_t store_empty_slot(const store *state, uint32_t class_id, const uint8_t *key,
                          uint32_t *candidates, uint32_t *candidate_count) {
    uint64_t words[2];
    arena_place place = place_of(state, class_id, key, words);
    uint32_t best = ARENA_NONE, best_empty = 0;
    *candidate_count = 0;
    for (int choice = 0; choice < 2; choice++) {
        uint32_t first = (uint32_t)place.bucket[choice] * ARENA_BUCKET_SLOTS;
        uint32_t empty = 0, found = ARENA_NONE;
        for (uint32_t slot = first; slot < first + ARENA_BUCKET_SLOTS; slot++) {
            candidates[(*candidate_count)++] = slot;
            if (tag_of(state, slot) != 0) continue;
            empty++;
            found = slot;
        }
        if (empty > best_empty) {
            best_empty = empty;
            best = found;
        }
    }
    return best;
}

static void begin_change(arena_record *record) {
    uint64_t version = atomic_load_explicit(&record->version, memory_order_relaxed);
    atomic_store_explicit(&record->version, version + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
}

static void end_change(arena_record *record) {
    uint64_t version = atomic_load_explicit(&record->version, memory_order_relaxed);
    atomic_store_explicit(&record->version, version + 1, memory_order_release);
}

/* Fields are stored as relaxed words, because readers load them while they change. */
static void copy_fields(arena_record *record, const arena_record *fresh) {
    _Atomic uint64_t *target = (_Atomic uint64_t *)record;
    uint64_t words[sizeof(arena_record) / 8];
    memcpy(words, (const void *)fresh, sizeof words);
    for (size_t i = 1; i < sizeof words / 8; i++)
        atomic_store_explicit(&target[i], words[i], memory_order_relaxed);
}

void store_write_record(store *state, uint32_t slot, const arena_record *fresh) {
    arena_record *record = store_record(state, slot);
    arena_record checked = *fresh;
    checked.check = arena_record_check(&checked, store_shard(state, slot, 0));
    begin_change(record);
    copy_fields(record, &checked);
    end_change(record);
    set_tag(state, slot, arena_place_of(state->header, checked.key, checked.class_id).tag);
}

arena_shard *store_shard(const store *state, uint32_t slot, uint32_t shard) {
    return &state->shards[(uint64_t)slot * state->header->shards_per_record + shard];
}

/* Enters a committed shard: its table entry first, then the mask that makes it count. */
void store_add_shard(store *state, uint32_t slot, uint32_t shard, const arena_shard *fresh) {
    arena_record *record = store_record(state, slot);
    _Atomic uint64_t *entry = (_Atomic uint64_t *)store_shard(state, slot, shard);
    uint64_t words[2];
    memcpy(words, fresh, sizeof words);
    begin_change(record);
    atomic_store_explicit(&entry[0], words[0], memory_order_relaxed);
    atomic_store_explicit(&entry[1], words[1], memory_order_relaxed);
    arena_record changed = *record;
    changed.shard_mask |= 1ull << shard;
    changed.check = arena_record_check(&changed, store_shard(state, slot, 0));
    copy_fields(record, &changed);
    end_change(record);
}

/* Whether any client has pinned the record. */
int store_is_pinned(const store *state, uint32_t slot) {
    for (uint32_t client = 0; client < state->clients_end; client++) {
        const client_book *book = &state->clients[client];
        /* Acquire: a reader's last loads come before the next writer's stores into its extent. */
        if (book->pins && atomic_load_explicit(&book->pins[slot], memory_order_acquire)) return 1;
    }
    return 0;
}

/* Takes a record out of the index unless a client has pinned it; returns whether it went. The odd
 * version and the fence in begin_change are one half of the pin protocol (arena.c has the other).
 * Incomplete records go even if pinned: a sound client pins only what is present. */
int store_remove_record(store *state, uint32_t slot, int even_if_pinned) {
    arena_record *record = store_record(state, slot);
    begin_change(record);
    if (!even_if_pinned && store_is_pinned(state, slot)) {
        end_change(record);
        return 0;
    }
    set_tag(state, slot, 0);
    arena_record empty;
    memset((void *)&empty, 0, sizeof empty);
    copy_fields(record, &empty);
    end_change(record);
    return 1;
}

uint64_t store_full_mask(const store *state, uint32_t class_id) {
    uint32_t shards = state->classes[class_id].shard_count;
    return shards == 64 ? ~0ull : (1ull << shards) - 1;
}

int store_is_used(const store *state, uint32_t slot) {
    return tag_of(state, slot) != 0;
}

int store_is_present(const store *state, uint32_t slot) {
    const arena_record *record = store_record(state, slot);
    return tag_of(state, slot) != 0 &&
           record->shard_mask == store_full_mask(state, record->class_id);
}
