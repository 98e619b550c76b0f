/* Reading side of the arena: a look-up without lock, socket or system call.
 *
 * Files.  The *index* (header, buckets, shard checksums, class table) is written by the daemon
 * alone; clients map it read-only.  The *data* file is raw extents, mapped read-write.  Each client
 * has a *ledger*: a header and one byte per record slot, its pins.  Offsets, never pointers.
 *
 * Finding.  A (class, key) may live in two buckets of eight records (two-choice hashing keeps the
 * table usable to over 90% full with records that never move).  Sixteen-bit tags filter; the record
 * itself is read under its version (a seqlock: even = stable, and the same before and after).
 *
 * Pinning.  The client writes its ledger byte, fences, and reads the record again; the daemon marks
 * a victim's version odd, fences, and reads the byte of every client.  With both fences
 * sequentially consistent at least one of them sees the other, so either the pin fails (a miss) or
 * the eviction is called off.  No counter is shared, so a dead client's pins vanish with its
 * ledger.
 */
#include "arena.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "checksum.h"

#define READ_TRIES        4  /* a record still changing after this many reads counts as a miss */
#define PREFETCH_DISTANCE 16 /* keys ahead; about one memory latency of work */

struct arena_view {
    const arena_header *header;
    const arena_bucket *buckets;
    const uint64_t *sums;
    _Atomic uint8_t *pins; /* null for a view that only looks */
    uint32_t slots;
    uint64_t data_bytes;
};

static uint64_t bucket_count_for(uint64_t records) {
    uint64_t buckets = 1;
    while (buckets * ARENA_BUCKET_SLOTS < records) buckets *= 2;
    return buckets;
}

uint64_t arena_record_capacity(uint64_t records) {
    return bucket_count_for(records) * ARENA_BUCKET_SLOTS;
}

static uint64_t classes_offset_for(uint64_t records, uint32_t sums_per_record) {
    return ARENA_HEADER_BYTES + bucket_count_for(records) * sizeof(arena_bucket) +
           arena_record_capacity(records) * sums_per_record * sizeof(uint64_t);
}

uint64_t arena_index_bytes(uint64_t records, uint32_t sums_per_record) {
    uint64_t end =
        classes_offset_for(records, sums_per_record) + ARENA_CLASSES_MAX * sizeof(arena_class);
    return (end + ARENA_UNIT_BYTES - 1) / ARENA_UNIT_BYTES * ARENA_UNIT_BYTES;
}

uint64_t arena_ledger_bytes(uint64_t records) {
    return sizeof(arena_ledger_header) + arena_record_capacity(records);
}

static uint32_t header_check(const arena_header *header) {
    return checksum_crc32c(0, header, offsetof(arena_header, check));
}

void arena_write_header(arena_header *header, const uint8_t instance[16], uint64_t generation,
                        uint64_t records, uint32_t sums_per_record, uint64_t data_bytes,
                        const uint64_t seed[2]) {
    memset(header, 0, sizeof *header);
    header->magic = ARENA_MAGIC_INDEX;
    header->layout_version = ARENA_LAYOUT_VERSION;
    header->header_bytes = ARENA_HEADER_BYTES;
    memcpy(header->instance, instance, 16);
    header->generation = generation;
    header->index_bytes = arena_index_bytes(records, sums_per_record);
    header->data_bytes = data_bytes;
    header->buckets_offset = ARENA_HEADER_BYTES;
    header->bucket_count = (uint32_t)bucket_count_for(records);
    header->sums_per_record = sums_per_record;
    header->sums_offset = ARENA_HEADER_BYTES + header->bucket_count * sizeof(arena_bucket);
    header->classes_offset = classes_offset_for(records, sums_per_record);
    header->classes_max = ARENA_CLASSES_MAX;
    header->seed[0] = seed[0];
    header->seed[1] = seed[1];
    header->check = header_check(header);
}

void arena_write_ledger(arena_ledger_header *ledger, const uint8_t instance[16], uint32_t slots,
                        uint64_t token) {
    memset(ledger, 0, sizeof *ledger);
    ledger->magic = ARENA_MAGIC_LEDGER;
    ledger->layout_version = ARENA_LAYOUT_VERSION;
    ledger->slots = slots;
    memcpy(ledger->instance, instance, 16);
    ledger->token = token;
}

int arena_check_index(const void *index, uint64_t index_bytes, uint64_t data_bytes) {
    if (index_bytes < ARENA_HEADER_BYTES) return ARENA_BAD_GEOMETRY;
    const arena_header *header = index;
    if (header->magic != ARENA_MAGIC_INDEX) return ARENA_BAD_MAGIC;
    if (header->layout_version != ARENA_LAYOUT_VERSION) return ARENA_BAD_VERSION;
    if (header->check != header_check(header)) return ARENA_BAD_CHECK;
    uint64_t buckets = header->bucket_count;
    uint32_t sums = header->sums_per_record;
    int sound = header->header_bytes == ARENA_HEADER_BYTES && buckets > 0 &&
                (buckets & (buckets - 1)) == 0 && sums > 0 && sums <= ARENA_SHARDS_MAX &&
                header->classes_max == ARENA_CLASSES_MAX &&
                header->buckets_offset == ARENA_HEADER_BYTES;
    if (!sound) return ARENA_BAD_GEOMETRY;
    uint64_t records = buckets * ARENA_BUCKET_SLOTS;
    int fits = header->index_bytes == arena_index_bytes(records, sums) &&
               header->index_bytes <= index_bytes && header->data_bytes <= data_bytes &&
               header->sums_offset == ARENA_HEADER_BYTES + buckets * sizeof(arena_bucket) &&
               header->classes_offset == classes_offset_for(records, sums);
    return fits ? ARENA_OK : ARENA_BAD_GEOMETRY;
}

static int check_ledger(const arena_header *header, const arena_ledger_header *ledger,
                        uint64_t ledger_bytes) {
    uint64_t slots = (uint64_t)header->bucket_count * ARENA_BUCKET_SLOTS;
    if (ledger_bytes < sizeof *ledger + slots) return ARENA_BAD_GEOMETRY;
    if (ledger->magic != ARENA_MAGIC_LEDGER) return ARENA_BAD_MAGIC;
    if (ledger->layout_version != ARENA_LAYOUT_VERSION) return ARENA_BAD_VERSION;
    if (ledger->slots != slots) return ARENA_BAD_GEOMETRY;
    if (memcmp(ledger->instance, header->instance, 16) != 0) return ARENA_BAD_CHECK;
    return ARENA_OK;
}

arena_view *arena_view_open(const void *index, uint64_t index_bytes, const void *data,
                            uint64_t data_bytes, void *ledger, uint64_t ledger_bytes, int *status) {
    (void)data; /* only its size matters here: clients copy through their own mapping */
    *status = arena_check_index(index, index_bytes, data_bytes);
    const arena_header *header = index;
    if (*status == ARENA_OK && ledger) *status = check_ledger(header, ledger, ledger_bytes);
    if (*status != ARENA_OK) return NULL;
    arena_view *view = calloc(1, sizeof *view);
    if (!view) return NULL;
    view->header = header;
    view->buckets = (const arena_bucket *)((const char *)index + header->buckets_offset);
    view->sums = (const uint64_t *)((const char *)index + header->sums_offset);
    view->slots = header->bucket_count * ARENA_BUCKET_SLOTS;
    view->data_bytes = header->data_bytes;
    if (ledger) view->pins = (_Atomic uint8_t *)((char *)ledger + sizeof(arena_ledger_header));
    return view;
}

void arena_view_close(arena_view *view) {
    free(view);
}

static const arena_record *record_at(const arena_view *view, uint32_t slot) {
    return &view->buckets[slot / ARENA_BUCKET_SLOTS].records[slot % ARENA_BUCKET_SLOTS];
}

/* Copies a record that is stable; 0 when the daemon kept changing it. Word-wise relaxed loads: the
 * version check afterwards decides whether what was read belongs together. */
static int read_record(const arena_record *record, arena_record *copy) {
    const _Atomic uint64_t *source = (const _Atomic uint64_t *)record;
    uint64_t words[sizeof(arena_record) / 8];
    for (int attempt = 0; attempt < READ_TRIES; attempt++) {
        words[0] = atomic_load_explicit(&source[0], memory_order_acquire);
        if (words[0] & 1) continue;
        for (size_t i = 1; i < sizeof words / 8; i++)
            words[i] = atomic_load_explicit(&source[i], memory_order_relaxed);
        atomic_thread_fence(memory_order_acquire);
        if (atomic_load_explicit(&source[0], memory_order_relaxed) == words[0]) {
            memcpy((void *)copy, words, sizeof words);
            return 1;
        }
    }
    return 0;
}

static int is_present(const arena_record *record, uint32_t class_id, uint64_t full_mask,
                      const uint64_t key[2]) {
    return record->key[0] == key[0] && record->key[1] == key[1] && record->class_id == class_id &&
           (record->shard_mask & full_mask) == full_mask;
}

/* Slot of a present record and its copy, or ARENA_NONE. */
static uint32_t find(const arena_view *view, const arena_place *place, uint32_t class_id,
                     uint64_t full_mask, const uint64_t key[2], arena_record *copy) {
    for (int choice = 0; choice < 2; choice++) {
        const arena_bucket *bucket = &view->buckets[place->bucket[choice]];
        uint64_t words[2] = {atomic_load_explicit(&bucket->tags[0], memory_order_relaxed),
                             atomic_load_explicit(&bucket->tags[1], memory_order_relaxed)};
        uint16_t tags[ARENA_BUCKET_SLOTS];
        memcpy(tags, words, sizeof tags);
        for (uint32_t i = 0; i < ARENA_BUCKET_SLOTS; i++) {
            if (tags[i] != place->tag) continue;
            if (!read_record(&bucket->records[i], copy)) continue;
            if (is_present(copy, class_id, full_mask, key))
                return (uint32_t)place->bucket[choice] * ARENA_BUCKET_SLOTS + i;
        }
    }
    return ARENA_NONE;
}

static void load_key(const uint8_t *bytes, uint64_t key[2]) {
    memcpy(key, bytes, 16);
}

static void prefetch_place(const arena_view *view, const arena_place *place) {
    __builtin_prefetch(&view->buckets[place->bucket[0]]);
    __builtin_prefetch(&view->buckets[place->bucket[1]]);
}

/* Look-ups in order with the bucket lines fetched ahead. `present` and `slots` may be null; stops
 * at the first miss when `leading_only`. */
static uint64_t probe(const arena_view *view, uint32_t class_id, uint64_t full_mask,
                      const uint8_t *keys, uint64_t n, int leading_only, uint32_t *slots,
                      uint8_t *present) {
    arena_place ahead[PREFETCH_DISTANCE];
    uint64_t key[2], found = 0;
    uint64_t primed = n < PREFETCH_DISTANCE ? n : PREFETCH_DISTANCE;
    for (uint64_t i = 0; i < primed; i++) {
        load_key(keys + i * ARENA_KEY_BYTES, key);
        ahead[i] = arena_place_of(view->header, key, class_id);
        prefetch_place(view, &ahead[i]);
    }
    for (uint64_t i = 0; i < n; i++) {
        arena_place place = ahead[i % PREFETCH_DISTANCE];
        if (i + PREFETCH_DISTANCE < n) {
            load_key(keys + (i + PREFETCH_DISTANCE) * ARENA_KEY_BYTES, key);
            ahead[i % PREFETCH_DISTANCE] = arena_place_of(view->header, key, class_id);
            prefetch_place(view, &ahead[i % PREFETCH_DISTANCE]);
        }
        arena_record copy;
        load_key(keys + i * ARENA_KEY_BYTES, key);
        uint32_t slot = find(view, &place, class_id, full_mask, key, &copy);
        if (present) present[i] = slot != ARENA_NONE;
        if (slot == ARENA_NONE && leading_only) return found;
        if (slot != ARENA_NONE && slots) slots[found] = slot;
        found += slot != ARENA_NONE;
    }
    return found;
}

uint64_t arena_probe_run(const arena_view *view, uint32_t class_id, uint64_t full_mask,
                         const uint8_t *keys, uint64_t n, uint32_t *slots) {
    return probe(view, class_id, full_mask, keys, n, 1, slots, NULL);
}

uint64_t arena_probe_each(const arena_view *view, uint32_t class_id, uint64_t full_mask,
                          const uint8_t *keys, uint64_t n, uint8_t *present) {
    return probe(view, class_id, full_mask, keys, n, 0, NULL, present);
}

/* One more pin on a slot; 0 at the limit of a byte, which counts as a miss. */
static int raise_pin(_Atomic uint8_t *pin) {
    uint8_t held = atomic_load_explicit(pin, memory_order_relaxed);
    do {
        if (held == ARENA_PINS_PER_RECORD_MAX) return 0;
    } while (!atomic_compare_exchange_weak_explicit(pin, &held, held + 1, memory_order_relaxed,
                                                    memory_order_relaxed));
    return 1;
}

int arena_pin(const arena_view *view, uint32_t class_id, uint64_t full_mask, const uint8_t *key,
              arena_extent *extent) {
    if (!view->pins) return 0;
    uint64_t words[2];
    load_key(key, words);
    arena_place place = arena_place_of(view->header, words, class_id);
    arena_record copy;
    uint32_t slot = find(view, &place, class_id, full_mask, words, &copy);
    if (slot == ARENA_NONE || !raise_pin(&view->pins[slot])) return 0;
    atomic_thread_fence(memory_order_seq_cst); /* pairs with the one in the daemon's eviction */
    uint64_t end = 0;
    int stable =
        read_record(record_at(view, slot), &copy) && is_present(&copy, class_id, full_mask, words);
    if (stable) end = ((uint64_t)copy.extent_start + copy.extent_units) * ARENA_UNIT_BYTES;
    if (!stable || end > view->data_bytes) {
        arena_unpin(view, slot);
        return 0;
    }
    extent->slot = slot;
    extent->offset_bytes = (uint64_t)copy.extent_start * ARENA_UNIT_BYTES;
    extent->size_bytes = (uint64_t)copy.extent_units * ARENA_UNIT_BYTES;
    extent->depth_grains = copy.depth_grains;
    return 1;
}

void arena_unpin(const arena_view *view, uint32_t slot) {
    if (slot >= view->slots) return;
    uint8_t held = atomic_load_explicit(&view->pins[slot], memory_order_relaxed);
    do {
        if (held == 0) return; /* a second unpin must not become 255 pins */
    } while (!atomic_compare_exchange_weak_explicit(&view->pins[slot], &held, held - 1,
                                                    memory_order_release, memory_order_relaxed));
}

uint64_t arena_shard_sum(const arena_view *view, uint32_t slot, uint32_t shard) {
    uint32_t per_record = view->header->sums_per_record;
    if (slot >= view->slots || shard >= per_record) return 0;
    const _Atomic uint64_t *sums = (const _Atomic uint64_t *)view->sums;
    return atomic_load_explicit(&sums[(uint64_t)slot * per_record + shard], memory_order_relaxed);
}

uint64_t arena_pins_held(const arena_view *view) {
    uint64_t held = 0;
    for (uint32_t slot = 0; view->pins && slot < view->slots; slot++)
        held += atomic_load_explicit(&view->pins[slot], memory_order_relaxed);
    return held;
}

uint32_t arena_record_check(const arena_record *record) {
    size_t start = offsetof(arena_record, key);
    return checksum_crc32c(0, (const char *)record + start, offsetof(arena_record, check) - start);
}
