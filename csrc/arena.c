/* Reading side of the arena: a look-up without lock, socket or system call.
 *
 * Files.  The *index* (header, buckets, shard table, class table, slab table) is written by the
 * daemon alone; clients map it read-only.  The *data* file is raw extents, mapped read-write.  Each
 * client has a *ledger*: a header and one byte per record slot, its pins.  Offsets, never pointers.
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

#include "arena_private.h"
#include "checksum.h"

#define READ_TRIES        4  /* a record still changing after this many reads counts as a miss */
#define PREFETCH_DISTANCE 32 /* keys ahead at which tags are fetched, a power of two */
#define RECORD_DISTANCE   16 /* keys ahead at which tags are there and records are fetched */

static uint64_t bucket_count_for(uint64_t records) {
    uint64_t buckets = 1;
    while (buckets * ARENA_BUCKET_SLOTS < records) buckets *= 2;
    return buckets;
}

uint64_t arena_record_capacity(uint64_t records) {
    return bucket_count_for(records) * ARENA_BUCKET_SLOTS;
}

/* Slabs are a thousandth of the file, within bounds that keep both waste and the table small. */
uint32_t arena_slab_units(uint64_t data_bytes) {
    uint64_t total = data_bytes / ARENA_UNIT_BYTES, units = total / 1024;
    if (units < 16) units = 16;
    if (units > 16384) units = 16384;
    return (uint32_t)(units < total ? units : total);
}

/* The parts of an index file, in order. */
static void lay_out(arena_header *header, uint64_t records, uint32_t shards_per_record,
                    uint64_t data_bytes) {
    uint64_t slots = arena_record_capacity(records);
    header->bucket_count = (uint32_t)(slots / ARENA_BUCKET_SLOTS);
    header->shards_per_record = shards_per_record;
    header->data_bytes = data_bytes;
    header->slab_units = arena_slab_units(data_bytes);
    header->slab_count =
        header->slab_units ? (uint32_t)(data_bytes / ARENA_UNIT_BYTES / header->slab_units) : 0;
    header->classes_max = ARENA_CLASSES_MAX;
    header->buckets_offset = ARENA_HEADER_BYTES;
    header->shards_offset = header->buckets_offset + header->bucket_count * sizeof(arena_bucket);
    header->classes_offset =
        header->shards_offset + slots * shards_per_record * sizeof(arena_shard);
    header->slabs_offset = header->classes_offset + ARENA_CLASSES_MAX * sizeof(arena_class);
    uint64_t end = header->slabs_offset + header->slab_count * sizeof(arena_slab);
    header->index_bytes = (end + ARENA_UNIT_BYTES - 1) / ARENA_UNIT_BYTES * ARENA_UNIT_BYTES;
}

uint64_t arena_index_bytes(uint64_t records, uint32_t shards_per_record, uint64_t data_bytes) {
    arena_header header = {0};
    lay_out(&header, records, shards_per_record, data_bytes);
    return header.index_bytes;
}

/* The parts of a client's file, in order; pins last, because their number varies. */
static void lay_out_ledger(arena_ledger_header *ledger) {
    ledger->held_offset = ARENA_LEDGER_HELD_OFFSET;
    ledger->stock_offset = ARENA_LEDGER_STOCK_OFFSET;
    ledger->ring_offset = ARENA_LEDGER_RING_OFFSET;
    ledger->pins_offset = ARENA_LEDGER_PINS_OFFSET;
}

uint64_t arena_ledger_bytes(uint64_t records) {
    arena_ledger_header ledger = {0};
    lay_out_ledger(&ledger);
    return ledger.pins_offset + arena_record_capacity(records);
}

static uint32_t header_check(const arena_header *header) {
    return checksum_crc32c(0, header, offsetof(arena_header, check));
}

void arena_write_header(arena_header *header, const uint8_t instance[16], uint64_t generation,
                        uint64_t records, uint32_t shards_per_record, uint64_t data_bytes,
                        const uint64_t seed[2]) {
    memset(header, 0, sizeof *header);
    lay_out(header, records, shards_per_record, data_bytes);
    header->magic = ARENA_MAGIC_INDEX;
    header->layout_version = ARENA_LAYOUT_VERSION;
    header->header_bytes = ARENA_HEADER_BYTES;
    memcpy(header->instance, instance, 16);
    header->generation = generation;
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
    lay_out_ledger(ledger);
}

static int check_header(const arena_header *header, uint64_t index_bytes, uint64_t data_bytes) {
    if (header->magic != ARENA_MAGIC_INDEX) return ARENA_BAD_MAGIC;
    if (header->layout_version != ARENA_LAYOUT_VERSION) return ARENA_BAD_VERSION;
    if (header->check != header_check(header)) return ARENA_BAD_CHECK;
    uint64_t buckets = header->bucket_count;
    uint32_t shards = header->shards_per_record;
    int sound = header->header_bytes == ARENA_HEADER_BYTES && buckets > 0 &&
                buckets <= ARENA_BUCKETS_MAX && (buckets & (buckets - 1)) == 0 && shards > 0 &&
                shards <= ARENA_SHARDS_MAX;
    if (!sound) return ARENA_BAD_GEOMETRY;
    arena_header expected = {0};
    lay_out(&expected, buckets * ARENA_BUCKET_SLOTS, shards, header->data_bytes);
    int fits = header->classes_max == ARENA_CLASSES_MAX && header->index_bytes <= index_bytes &&
               header->index_bytes == expected.index_bytes && header->data_bytes <= data_bytes &&
               header->buckets_offset == expected.buckets_offset &&
               header->shards_offset == expected.shards_offset &&
               header->classes_offset == expected.classes_offset &&
               header->slabs_offset == expected.slabs_offset &&
               header->slab_units == expected.slab_units &&
               header->slab_count == expected.slab_count;
    return fits ? ARENA_OK : ARENA_BAD_GEOMETRY;
}

int arena_check_index(const void *index, uint64_t index_bytes, uint64_t data_bytes) {
    if (index_bytes < ARENA_HEADER_BYTES) return ARENA_BAD_GEOMETRY;
    return check_header(index, index_bytes, data_bytes);
}

int arena_read_facts(const void *index, uint64_t index_bytes, uint64_t data_bytes,
                     arena_facts *facts) {
    memset(facts, 0, sizeof *facts);
    int status = arena_check_index(index, index_bytes, data_bytes);
    const arena_header *header = index;
    if (status == ARENA_OK || status == ARENA_BAD_VERSION)
        facts->layout_version = header->layout_version;
    if (status != ARENA_OK) return status;
    memcpy(facts->instance, header->instance, sizeof facts->instance);
    facts->generation = header->generation;
    facts->data_bytes = header->data_bytes;
    facts->records = (uint64_t)header->bucket_count * ARENA_BUCKET_SLOTS;
    facts->shards_per_record = header->shards_per_record;
    return ARENA_OK;
}

int arena_check_ledger(const arena_header *header, const arena_ledger_header *ledger,
                       uint64_t ledger_bytes) {
    uint64_t slots = (uint64_t)header->bucket_count * ARENA_BUCKET_SLOTS;
    arena_ledger_header expected = {0};
    lay_out_ledger(&expected);
    if (ledger_bytes < expected.pins_offset + slots) return ARENA_BAD_GEOMETRY;
    if (ledger->magic != ARENA_MAGIC_LEDGER) return ARENA_BAD_MAGIC;
    if (ledger->layout_version != ARENA_LAYOUT_VERSION) return ARENA_BAD_VERSION;
    int fits = ledger->slots == slots && ledger->held_offset == expected.held_offset &&
               ledger->stock_offset == expected.stock_offset &&
               ledger->ring_offset == expected.ring_offset &&
               ledger->pins_offset == expected.pins_offset;
    if (!fits) return ARENA_BAD_GEOMETRY;
    return memcmp(ledger->instance, header->instance, 16) ? ARENA_BAD_CHECK : ARENA_OK;
}

arena_view *arena_view_open(const void *index, uint64_t index_bytes, const void *data,
                            uint64_t data_bytes, void *ledger, uint64_t ledger_bytes, int *status) {
    *status = index_bytes < ARENA_HEADER_BYTES ? ARENA_BAD_GEOMETRY : ARENA_OK;
    if (*status != ARENA_OK) return NULL;
    arena_header geometry;
    memcpy((void *)&geometry, index, sizeof geometry);
    *status = check_header(&geometry, index_bytes, data_bytes);
    if (*status == ARENA_OK && ledger)
        *status = arena_check_ledger(&geometry, ledger, ledger_bytes);
    if (*status != ARENA_OK) return NULL;
    arena_view *view = calloc(1, sizeof *view);
    arena_producer *producer = ledger ? calloc(1, sizeof *producer) : NULL;
    if (!view || (ledger && !producer)) {
        free(view);
        free(producer);
        return NULL;
    }
    view->header = index;
    view->geometry = geometry;
    view->buckets = (const arena_bucket *)((const char *)index + geometry.buckets_offset);
    view->shards = (const arena_shard *)((const char *)index + geometry.shards_offset);
    view->slots = geometry.bucket_count * ARENA_BUCKET_SLOTS;
    view->data_bytes = geometry.data_bytes;
    view->data = data;
    if (ledger) {
        pthread_mutex_init(&producer->mutex, NULL);
        view->producer = producer;
        view->ledger = ledger;
        view->pins = (_Atomic uint8_t *)((char *)ledger + ARENA_LEDGER_PINS_OFFSET);
    }
    return view;
}

void arena_view_close(arena_view *view) {
    if (view) free(view->producer);
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

/* Bit i for each lane i of a bucket whose tag may be `tag`: all that are, now and then one more. */
static uint32_t matching_lanes(const arena_bucket *bucket, uint16_t tag) {
    const uint64_t ones = 0x0001000100010001ull, tops = 0x8000800080008000ull;
    uint32_t lanes = 0;
    for (uint32_t half = 0; half < 2; half++) {
        uint64_t word = atomic_load_explicit(&bucket->tags[half], memory_order_relaxed);
        uint64_t unequal = word ^ (tag * ones);
        uint64_t zeros = (unequal - ones) & ~unequal & tops; /* top bit of each lane of zeroes */
        lanes |= (uint32_t)(((zeros >> 15) * 0x0001000200040008ull) >> 48 & 15) << (4 * half);
    }
    return lanes;
}

/* The daemon keeps the clock, so that a look-up needs no system call. */
static int is_expired(const arena_view *view, const arena_record *record) {
    return record->expires_s != 0 &&
           record->expires_s <= atomic_load_explicit(&view->header->now_s, memory_order_relaxed);
}

/* Slot of a present record and its copy, or ARENA_NONE. */
static uint32_t find(const arena_view *view, const arena_place *place, uint32_t class_id,
                     uint64_t full_mask, const uint64_t key[2], arena_record *copy) {
    for (int choice = 0; choice < 2; choice++) {
        const arena_bucket *bucket = &view->buckets[place->bucket[choice]];
        for (uint32_t left = matching_lanes(bucket, place->tag); left; left &= left - 1) {
            uint32_t lane = (uint32_t)__builtin_ctz(left);
            if (!read_record(&bucket->records[lane], copy)) continue;
            if (is_present(copy, class_id, full_mask, key) && !is_expired(view, copy))
                return (uint32_t)place->bucket[choice] * ARENA_BUCKET_SLOTS + lane;
        }
    }
    return ARENA_NONE;
}

static void load_key(const uint8_t *bytes, uint64_t key[2]) {
    memcpy(key, bytes, 16);
}

static void prefetch_tags(const arena_view *view, const arena_place *place) {
    __builtin_prefetch(&view->buckets[place->bucket[0]]);
    __builtin_prefetch(&view->buckets[place->bucket[1]]);
}

static void prefetch_records(const arena_view *view, const arena_place *place) {
    for (int choice = 0; choice < 2; choice++) {
        const arena_bucket *bucket = &view->buckets[place->bucket[choice]];
        for (uint32_t left = matching_lanes(bucket, place->tag); left; left &= left - 1)
            __builtin_prefetch(&bucket->records[__builtin_ctz(left)]);
    }
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
        ahead[i] = arena_place_of(&view->geometry, key, class_id);
        prefetch_tags(view, &ahead[i]);
    }
    for (uint64_t i = 0; i < primed && i < RECORD_DISTANCE; i++) prefetch_records(view, &ahead[i]);
    for (uint64_t i = 0; i < n; i++) {
        arena_place place = ahead[i % PREFETCH_DISTANCE];
        if (i + PREFETCH_DISTANCE < n) {
            load_key(keys + (i + PREFETCH_DISTANCE) * ARENA_KEY_BYTES, key);
            ahead[i % PREFETCH_DISTANCE] = arena_place_of(&view->geometry, key, class_id);
            prefetch_tags(view, &ahead[i % PREFETCH_DISTANCE]);
        }
        if (i + RECORD_DISTANCE < n)
            prefetch_records(view, &ahead[(i + RECORD_DISTANCE) % PREFETCH_DISTANCE]);
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

void arena_prefetch(const arena_view *view, uint32_t class_id, const uint8_t *key) {
    uint64_t words[2];
    load_key(key, words);
    arena_place place = arena_place_of(&view->geometry, words, class_id);
    prefetch_tags(view, &place);
}

int arena_has(const arena_view *view, uint32_t class_id, uint64_t full_mask, const uint8_t *key) {
    uint64_t words[2];
    load_key(key, words);
    arena_place place = arena_place_of(&view->geometry, words, class_id);
    arena_record copy;
    return find(view, &place, class_id, full_mask, words, &copy) != ARENA_NONE;
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

uint32_t arena_pin(const arena_view *view, uint32_t class_id, uint64_t full_mask,
                   const uint8_t *key) {
    if (!view->pins) return ARENA_NO_SLOT;
    uint64_t words[2];
    load_key(key, words);
    arena_place place = arena_place_of(&view->geometry, words, class_id);
    arena_record copy;
    uint32_t slot = find(view, &place, class_id, full_mask, words, &copy);
    if (slot == ARENA_NONE || !raise_pin(&view->pins[slot])) return ARENA_NO_SLOT;
    atomic_thread_fence(memory_order_seq_cst); /* pairs with the one in the daemon's eviction */
    if (read_record(record_at(view, slot), &copy) &&
        is_present(&copy, class_id, full_mask, words) && !is_expired(view, &copy))
        return slot;
    arena_unpin(view, slot);
    return ARENA_NO_SLOT;
}

uint64_t arena_pin_run(const arena_view *view, uint32_t class_id, uint64_t full_mask,
                       const uint8_t *keys, uint64_t n, uint32_t *slots) {
    uint64_t pinned = 0;
    for (; pinned < n; pinned++) {
        slots[pinned] = arena_pin(view, class_id, full_mask, keys + pinned * ARENA_KEY_BYTES);
        if (slots[pinned] == ARENA_NO_SLOT) break;
    }
    return pinned;
}

void arena_unpin(const arena_view *view, uint32_t slot) {
    if (slot >= view->slots) return;
    uint8_t held = atomic_load_explicit(&view->pins[slot], memory_order_relaxed);
    do {
        if (held == 0) return; /* a second unpin must not become 255 pins */
    } while (!atomic_compare_exchange_weak_explicit(&view->pins[slot], &held, held - 1,
                                                    memory_order_release, memory_order_relaxed));
}

int arena_locate(const arena_view *view, uint32_t slot, uint32_t shard, arena_location *location) {
    uint32_t per_record = view->geometry.shards_per_record;
    if (slot >= view->slots || shard >= per_record) return 0;
    /* A pinned record's shards do not change; atomic, because an unpinned one's may. */
    const _Atomic uint64_t *words =
        (const _Atomic uint64_t *)&view->shards[(uint64_t)slot * per_record + shard];
    uint64_t place = atomic_load_explicit(&words[1], memory_order_relaxed);
    location->sum = atomic_load_explicit(&words[0], memory_order_relaxed);
    location->offset_bytes = (uint64_t)(uint32_t)place * ARENA_UNIT_BYTES;
    location->size_bytes = (place >> 32) * ARENA_UNIT_BYTES;
    return location->size_bytes > 0 &&
           location->offset_bytes + location->size_bytes <= view->data_bytes;
}

uint64_t arena_change_count(const arena_view *view) {
    return atomic_load_explicit(&view->header->change_count, memory_order_acquire);
}

uint64_t arena_removed_count(const arena_view *view) {
    return atomic_load_explicit(&view->header->removed_count, memory_order_acquire);
}

uint64_t arena_pins_held(const arena_view *view) {
    uint64_t held = 0;
    for (uint32_t slot = 0; view->pins && slot < view->slots; slot++)
        held += atomic_load_explicit(&view->pins[slot], memory_order_relaxed);
    return held;
}

uint32_t arena_record_check(const arena_record *record, const arena_shard *shards) {
    size_t start = offsetof(arena_record, key);
    uint32_t crc =
        checksum_crc32c(0, (const char *)record + start, offsetof(arena_record, check) - start);
    for (uint64_t left = record->shard_mask; left; left &= left - 1)
        crc = checksum_crc32c(crc, &shards[__builtin_ctzll(left)], sizeof *shards);
    return crc;
}

uint32_t arena_class_check(const arena_class *kind) {
    arena_class copy = *kind;
    copy.check = 0;
    return checksum_crc32c(0, &copy, sizeof copy);
}
