/* Self-test of the disk store for sanitizers.
 *
 *   selftest_disk SECONDS SEED
 *
 * 1. The kill matrix: one workload, stopped at every write, sync, allocation, rename and removal in
 *    turn, with the process killed or the power lost; the store that comes back serves nothing
 * wrong and, after a kill, all that was there.
 * 2. Damage: bits flipped, files cut and swapped, another format version; never a wrong byte,
 * always a count.
 * 3. Faults while it runs: errors, full, short transfers, hanging, the folder removed; a miss, a
 *    reason, and healing.
 *
 * SECONDS below 5 leave out the matrix over the other number of devices.
 *
 * Every object's bytes follow from its key, so whatever is read can be told right from wrong.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../checksum.h"
#include "../disk_private.h"
#include "../store_policy.h"
#include "disk_memfs.h"

enum {
    KEYS = 48,
    SHARDS_MAX = 2,
    SEGMENT_BYTES = 65536,
    OBJECT_UNITS = 3,
    ACTIONS = 100,
#ifdef __SANITIZE_THREAD__
    STRIDE = 23, /* the matrix has one thread: a sample will do */
#else
    STRIDE = 1,
#endif
    NOW_S = 1000000,
};

typedef struct {
    memfs *fs;
    disk_store *store;
    uint64_t dice, now_ns;
    int classes[2];
    uint32_t devices;
    int was_dropped[KEYS]; /* for good, and not put again */
    uint64_t wrong;
} world;

static uint8_t *contents[KEYS][SHARDS_MAX], *target;

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "selftest_disk: line %d: %s\n", __LINE__, #condition);                 \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static uint64_t mixed(uint64_t value) {
    value += 0x9E3779B97F4A7C15ull;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
    return value ^ (value >> 31);
}

static uint64_t roll(world *self, uint64_t sides) {
    self->dice = mixed(self->dice);
    return self->dice % sides;
}

static uint64_t length_of(uint32_t key, uint32_t shard) {
    return 1 + (key * 977 + shard * 313) % (OBJECT_UNITS * DISK_UNIT_BYTES);
}

static uint32_t shards_of(uint32_t key) {
    return 1 + key % 2;
}

static void make_key(uint32_t number, uint8_t key[16]) {
    uint64_t words[2] = {mixed(number), mixed(~(uint64_t)number)};
    memcpy(key, words, 16);
}

static void make_contents(void) {
    target = aligned_alloc(DISK_UNIT_BYTES, OBJECT_UNITS * DISK_UNIT_BYTES);
    for (uint32_t key = 0; key < KEYS; key++) {
        for (uint32_t shard = 0; shard < SHARDS_MAX; shard++) {
            uint64_t units = OBJECT_UNITS * DISK_UNIT_BYTES;
            uint64_t *words = aligned_alloc(DISK_UNIT_BYTES, units);
            CHECK(words && target);
            for (uint64_t i = 0; i < units / 8; i++) words[i] = mixed(key << 20 | shard << 16 | i);
            contents[key][shard] = (uint8_t *)words;
        }
    }
}

static disk_settings settings_for(uint32_t devices) {
    return (disk_settings){.size_bytes = devices * 6ull * SEGMENT_BYTES,
                           .segment_bytes = SEGMENT_BYTES,
                           .entries = 256,
                           .depth = 4,
                           .deadline_ms = 1000,
                           .sync_ms = 50};
}

static void poll_store(world *self, uint64_t ms) {
    self->now_ns += ms * NS_PER_MS;
    disk_poll(self->store, self->now_ns, NOW_S);
    CHECK(disk_audit(self->store) == NULL);
    disk_event events[256];
    int lost;
    while (disk_take_events(self->store, events, 256, &lost)) continue;
}

static void open_over(world *self, uint32_t engine, const disk_settings *settings) {
    static const char *const paths[2] = {"/a", "/b"};
    const uint64_t seed[2] = {3, 5};
    char error[256];
    self->store = disk_open_over(memfs_io(self->fs), engine, settings, paths, self->devices, seed,
                                 error, sizeof error);
    CHECK(self->store);
    uint8_t name[16] = {7};
    for (uint32_t i = 0; i < 2; i++)
        self->classes[i] = disk_class(self->store, name, i, i + 1, "model");
    CHECK(self->classes[0] >= 0 && self->classes[1] >= 0);
}

static void open_inline(world *self) {
    disk_settings settings = settings_for(self->devices);
    open_over(self, DISK_ENGINE_INLINE, &settings);
    for (int i = 0; i < 4; i++) poll_store(self, 1);
}

/* The put's status, or what its completion says. */
static uint32_t put(world *self, uint32_t key, uint32_t shard, uint32_t retention) {
    disk_object object = {.class_id = (uint32_t)self->classes[shards_of(key) - 1],
                          .shard = shard,
                          .retention = retention,
                          .depth_grains = key,
                          .tenant_tag = key,
                          .length_bytes = length_of(key, shard)};
    make_key(key, object.key);
    object.sum = checksum_bytes(contents[key][shard], object.length_bytes);
    int status = disk_put(self->store, &object, contents[key][shard], key);
    if (status != DISK_OK) return (uint32_t)status;
    poll_store(self, 1);
    disk_completion done;
    CHECK(disk_take_completions(self->store, &done, 1) == 1);
    CHECK(done.is_put && done.token == key);
    return done.status;
}

static uint32_t get(world *self, uint32_t key, uint32_t shard) {
    uint8_t name[16];
    make_key(key, name);
    memset(target, 0xEE, OBJECT_UNITS * DISK_UNIT_BYTES);
    int status = disk_get(self->store, (uint32_t)self->classes[shards_of(key) - 1], name, shard,
                          target, OBJECT_UNITS * DISK_UNIT_BYTES, 1000, key);
    if (status != DISK_OK) return (uint32_t)status;
    poll_store(self, 1);
    disk_completion done;
    CHECK(disk_take_completions(self->store, &done, 1) == 1);
    CHECK(!done.is_put && done.token == key);
    if (done.status == DISK_OK) {
        CHECK(memcmp(target, contents[key][shard], length_of(key, shard)) == 0);
        CHECK(done.object.depth_grains == key && done.object.tenant_tag == key);
    }
    return done.status;
}

static int is_indexed(const world *self, uint32_t key, uint32_t shard) {
    uint8_t name[16];
    make_key(key, name);
    return disk_length(self->store, (uint32_t)self->classes[shards_of(key) - 1], name, shard) > 0;
}

/* Reads all there is; how many shards were served. */
static uint32_t read_all(world *self) {
    uint32_t served = 0;
    for (uint32_t key = 0; key < KEYS; key++)
        for (uint32_t shard = 0; shard < shards_of(key); shard++)
            if (is_indexed(self, key, shard)) served += get(self, key, shard) == DISK_OK;
    return served;
}

static void drop(world *self, uint32_t kind) {
    disk_drop_class(self->store, (uint32_t)self->classes[kind]);
    poll_store(self, 1);
    for (uint32_t i = 0; i < self->devices; i++)
        if (self->store->devices[i].marks_are_dirty || self->store->devices[i].state != DISK_ON)
            return;
    if (memfs_has_stopped(self->fs)) return;
    for (uint32_t key = 0; key < KEYS; key++)
        if (shards_of(key) - 1 == kind) self->was_dropped[key] = 1;
}

static void act(world *self) {
    static const uint32_t retentions[4] = {STORE_RETAIN_EPHEMERAL, STORE_RETAIN_SHORT,
                                           STORE_RETAIN_SHORT, STORE_RETAIN_LONG};
    uint32_t key = (uint32_t)roll(self, KEYS);
    uint64_t what = roll(self, 100);
    if (what < 70) {
        uint32_t retention = retentions[roll(self, 4)];
        for (uint32_t shard = 0; shard < shards_of(key); shard++) {
            self->was_dropped[key] = 0; /* even a failed write may be found again */
            put(self, key, shard, retention);
        }
    } else if (what < 88) {
        get(self, key, 0);
    } else if (what < 91) {
        drop(self, (uint32_t)roll(self, 2));
    } else {
        poll_store(self, roll(self, 200));
    }
}

static void work(world *self, uint32_t actions) {
    while (actions-- && !memfs_has_stopped(self->fs)) act(self);
}

static world begin(uint64_t seed) {
    world self = {.fs = memfs_make(), .dice = seed, .now_ns = NS_PER_MS};
    self.devices = 1 + (uint32_t)(seed & 1);
    return self;
}

static void end(world *self) {
    CHECK(disk_close(self->store, 1000));
    self->store = NULL;
}

/* ---- 1. the kill matrix ---- */

typedef struct {
    int is_there[KEYS][SHARDS_MAX];
} holdings;

/* What must survive: everything, or what is in synced segments. */
static holdings held(const world *self, int power_is_lost) {
    holdings all;
    memset(&all, 0, sizeof all);
    for (uint32_t key = 0; key < KEYS; key++) {
        for (uint32_t shard = 0; shard < shards_of(key); shard++) {
            uint8_t name[16];
            make_key(key, name);
            uint32_t at = disk_index_find(&self->store->index,
                                          (uint32_t)self->classes[shards_of(key) - 1], name, shard);
            if (at == DISK_NONE) continue;
            const disk_entry *entry = &self->store->index.entries[at];
            const disk_segment *segment = &self->store->segments[entry->segment];
            if (entry->state != DISK_ENTRY_READY) continue;
            if (power_is_lost && (segment->state != SEGMENT_SEALED || segment->is_dirty)) continue;
            all.is_there[key][shard] = 1;
        }
    }
    return all;
}

/* A store that comes back full gives up its oldest segment to write on: that, and no more, is gone.
 */
static void check_survivors(world *self, const holdings *before) {
    uint64_t missing = 0;
    for (uint32_t key = 0; key < KEYS; key++)
        for (uint32_t shard = 0; shard < shards_of(key); shard++) {
            int is_there = is_indexed(self, key, shard);
            if (is_there) CHECK(get(self, key, shard) == DISK_OK || !before->is_there[key][shard]);
            missing += before->is_there[key][shard] && !is_there;
            if (self->was_dropped[key]) CHECK(!is_there);
        }
    disk_stats stats;
    disk_read_stats(self->store, &stats);
    CHECK(missing <= stats.reclaimed_objects_total);
}

/* Stops at one step; returns whether that step was ever reached. */
static int stop_once(uint64_t seed, uint64_t step, int power_is_lost) {
    world self = begin(seed);
    memfs_stop_at(self.fs, step, (int)(step & 1));
    open_inline(&self);
    work(&self, ACTIONS);
    int was_reached = memfs_has_stopped(self.fs);
    holdings before = held(&self, power_is_lost);
    end(&self);
    if (power_is_lost)
        memfs_lose_power(self.fs, mixed(seed + step));
    else
        memfs_kill(self.fs);
    open_inline(&self);
    for (uint32_t i = 0; i < self.devices; i++) CHECK(self.store->devices[i].state == DISK_ON);
    check_survivors(&self, &before);
    work(&self, ACTIONS / 4);
    read_all(&self);
    end(&self);
    memfs_free(self.fs);
    return was_reached;
}

static uint64_t run_matrix(uint64_t seed) {
    uint64_t step = 1;
    while (stop_once(seed, step, 0) | stop_once(seed, step, 1)) step += STRIDE;
    return step;
}

/* ---- 2. damage ---- */

static uint64_t counted(const world *self) {
    disk_stats stats;
    disk_read_stats(self->store, &stats);
    uint64_t refused = 0;
    for (uint32_t i = 0; i < self->devices; i++)
        refused += self->store->devices[i].state == DISK_OFF;
    return refused + stats.damaged_total + stats.load_segments_damaged_total +
           stats.load_tables_damaged_total + stats.load_marks_damaged_total +
           stats.read_failed_total;
}

/* Reads a damaged store: nothing wrong is served, and what is missing was counted. */
static uint64_t read_damaged(memfs *fs, uint32_t devices, uint32_t served_before) {
    world self = {.fs = fs, .now_ns = NS_PER_MS, .devices = devices};
    open_inline(&self);
    uint32_t served = read_all(&self);
    uint64_t count = counted(&self);
    CHECK(served >= served_before || count > 0);
    end(&self);
    return count;
}

/* A store of full segments only, so that all that can go missing is known of; `served`: what it
 * serves when it is opened again, which may be less, for it makes room to write on. */
static world make_store(uint64_t seed, uint32_t *served) {
    world self = begin(seed);
    open_inline(&self);
    work(&self, 2 * ACTIONS);
    for (uint32_t key = 0; key < KEYS; key++) put(&self, key, 0, STORE_RETAIN_SHORT);
    for (uint32_t i = 0; i < self.devices; i++)
        if (self.store->devices[i].active != DISK_NO_SEGMENT)
            disk_seal_segment(self.store, self.store->devices[i].active);
    for (int i = 0; i < 4; i++) poll_store(&self, 100);
    end(&self);
    memfs_kill(self.fs);
    world again = {.fs = memfs_copy(self.fs), .now_ns = NS_PER_MS, .devices = self.devices};
    open_inline(&again);
    *served = read_all(&again);
    CHECK(*served > 0 && counted(&again) == 0);
    end(&again);
    memfs_free(again.fs);
    return self;
}

static void path_of_segment(const world *self, uint64_t number, char *path) {
    disk_segment_path(path, self->devices == 2 && number & 1 ? "/b" : "/a",
                      (uint32_t)(number / self->devices));
}

static void test_damage(uint64_t seed) {
    uint32_t served;
    char path[DISK_FILE_PATH_BYTES], other[DISK_FILE_PATH_BYTES];
    world self = make_store(seed, &served);
    uint64_t counts = 0;
    for (int round = 0; round < 40; round++) {
        memfs *copy = memfs_copy(self.fs);
        uint64_t size = 0;
        path_of_segment(&self, roll(&self, 4 * self.devices), path);
        uint8_t *bytes = memfs_bytes(copy, path, &size);
        for (uint64_t flips = 1 + roll(&self, 24); bytes && flips; flips--)
            bytes[roll(&self, size)] ^= (uint8_t)(1u << roll(&self, 8));
        counts += read_damaged(copy, self.devices, served);
        memfs_free(copy);
    }
    CHECK(counts > 0);
    for (uint64_t number = 0; number < 4; number++) {
        memfs *copy = memfs_copy(self.fs);
        path_of_segment(&self, number * self.devices, path);
        path_of_segment(&self, ((number + 1) % 4) * self.devices, other);
        memfs_truncate(copy, path, roll(&self, SEGMENT_BYTES));
        CHECK(read_damaged(copy, self.devices, served) > 0);
        memfs_free(copy);
        copy = memfs_copy(self.fs);
        memfs_swap(copy, path, other);
        CHECK(read_damaged(copy, self.devices, served) > 0);
        memfs_free(copy);
    }
    const char *const small[] = {"/a/format", "/a/marks"};
    for (int i = 0; i < 2; i++) {
        memfs *copy = memfs_copy(self.fs);
        uint64_t size;
        uint8_t *bytes = memfs_bytes(copy, small[i], &size);
        bytes[roll(&self, size)] ^= 4;
        CHECK(read_damaged(copy, self.devices, served) > 0);
        memfs_free(copy);
    }
    memfs_free(self.fs);
}

static void test_another_version(uint64_t seed) {
    uint32_t served;
    world self = make_store(seed & ~1ull, &served);
    uint64_t size;
    disk_format_block *block = (disk_format_block *)memfs_bytes(self.fs, "/a/format", &size);
    block->version = 7;
    DISK_SEAL(block);
    open_inline(&self);
    CHECK(self.store->devices[0].state == DISK_OFF);
    CHECK(strstr(self.store->devices[0].reason, "version 7"));
    CHECK(read_all(&self) == 0 && put(&self, 0, 0, STORE_RETAIN_SHORT) == DISK_UNAVAILABLE);
    for (int i = 0; i < 10; i++) poll_store(&self, 10000);
    CHECK(self.store->devices[0].state == DISK_OFF);
    end(&self);
    block = (disk_format_block *)memfs_bytes(self.fs, "/a/format", &size);
    CHECK(block->version == 7);
    memfs_free(self.fs);
}

/* ---- 3. faults ---- */

static uint32_t fill(world *self, uint32_t first, uint32_t count) {
    uint32_t stored = 0;
    for (uint32_t key = first; key < first + count; key++)
        for (uint32_t shard = 0; shard < shards_of(key); shard++)
            stored += put(self, key, shard, STORE_RETAIN_SHORT) == DISK_OK;
    return stored;
}

static void heal(world *self) {
    for (int i = 0; i < 12 && self->store->devices[0].state != DISK_ON; i++)
        poll_store(self, 40000);
    CHECK(self->store->devices[0].state == DISK_ON && !self->store->devices[0].reason[0]);
}

static void test_write_errors(void) {
    static const int errors[3] = {EIO, ENOSPC, EROFS};
    for (int i = 0; i < 3; i++) {
        world self = begin(0);
        open_inline(&self);
        uint32_t stored = fill(&self, 0, 8);
        CHECK(stored == 12);
        memfs_fail_writes(self.fs, errors[i]);
        CHECK(put(&self, 9, 0, STORE_RETAIN_SHORT) == DISK_FAILED);
        CHECK(self.store->devices[0].state == DISK_READ_ONLY);
        CHECK(strstr(self.store->devices[0].reason, strerror(errors[i])));
        CHECK(put(&self, 10, 0, STORE_RETAIN_SHORT) == DISK_UNAVAILABLE);
        CHECK(read_all(&self) == stored);
        for (int j = 0; j < 5; j++) poll_store(&self, 10000);
        CHECK(self.store->devices[0].state == DISK_READ_ONLY);
        memfs_fail_writes(self.fs, 0);
        heal(&self);
        CHECK(put(&self, 9, 0, STORE_RETAIN_SHORT) == DISK_OK);
        CHECK(read_all(&self) == stored + 1);
        end(&self);
        memfs_kill(self.fs);
        open_inline(&self);
        CHECK(read_all(&self) == stored + 1);
        end(&self);
        memfs_free(self.fs);
    }
}

static void test_read_errors(void) {
    world self = begin(0);
    open_inline(&self);
    fill(&self, 0, 12);
    memfs_fail_reads(self.fs, EIO);
    for (uint32_t key = 0; key < 4; key++) CHECK(get(&self, key, 0) == DISK_FAILED);
    CHECK(self.store->devices[0].state == DISK_OFF);
    CHECK(get(&self, 6, 0) == DISK_UNAVAILABLE);
    memfs_fail_reads(self.fs, 0);
    heal(&self);
    CHECK(get(&self, 6, 0) == DISK_OK);
    end(&self);
    memfs_free(self.fs);
}

static void test_a_full_file_system(void) {
    world self = begin(0);
    memfs_fail_allocations(self.fs, ENOSPC);
    open_inline(&self);
    CHECK(put(&self, 0, 0, STORE_RETAIN_SHORT) == DISK_UNAVAILABLE);
    CHECK(self.store->devices[0].state == DISK_READ_ONLY);
    memfs_fail_allocations(self.fs, 0);
    heal(&self);
    poll_store(&self, 10);
    for (int round = 0; round < 3; round++) fill(&self, 0, KEYS);
    CHECK(read_all(&self) > 0);
    /* Another fills the file system: segments are given back until the floor is free again. */
    self.store->settings.free_floor_bytes = 10 * SEGMENT_BYTES;
    memfs_set_free_bytes(self.fs, 8 * SEGMENT_BYTES);
    for (int i = 0; i < 10; i++) poll_store(&self, 3000);
    disk_stats stats;
    disk_read_stats(self.store, &stats);
    CHECK(stats.floor_segments_total > 0 && stats.segments == DISK_SEGMENTS_MIN);
    CHECK(self.store->devices[0].state == DISK_ON);
    for (int round = 0; round < 3; round++) fill(&self, 0, KEYS);
    CHECK(read_all(&self) > 0);
    end(&self);
    memfs_free(self.fs);
}

static void test_short_transfers(void) {
    world self = begin(0);
    memfs_cut_transfers(self.fs, 1000);
    open_inline(&self);
    uint32_t stored = fill(&self, 0, 10);
    CHECK(stored == 15 && read_all(&self) == 15);
    end(&self);
    memfs_free(self.fs);
}

static void test_the_folder_removed(void) {
    world self = begin(0);
    open_inline(&self);
    fill(&self, 0, 20);
    memfs_unlink_all(self.fs);
    for (int i = 0; i < 6; i++) poll_store(&self, 3000);
    CHECK(read_all(&self) == 0);
    heal(&self);
    poll_store(&self, 1);
    CHECK(fill(&self, 0, 8) == 12 && read_all(&self) == 12);
    end(&self);
    memfs_kill(self.fs);
    open_inline(&self);
    CHECK(read_all(&self) == 12);
    end(&self);
    memfs_free(self.fs);
}

static void test_a_smaller_size(void) {
    world self = begin(0);
    open_inline(&self);
    for (int round = 0; round < 3; round++) fill(&self, 0, KEYS);
    end(&self);
    memfs_kill(self.fs);
    disk_settings settings = settings_for(1);
    settings.size_bytes = 4 * SEGMENT_BYTES;
    open_over(&self, DISK_ENGINE_INLINE, &settings);
    poll_store(&self, 1);
    disk_stats stats;
    disk_read_stats(self.store, &stats);
    CHECK(stats.segments <= 4 && stats.shrunk_segments_total > 0 && read_all(&self) > 0);
    end(&self);
    memfs_kill(self.fs);
    settings.segment_bytes = 2 * SEGMENT_BYTES; /* of new stores only */
    settings.size_bytes = 8 * SEGMENT_BYTES;
    open_over(&self, DISK_ENGINE_INLINE, &settings);
    poll_store(&self, 1);
    CHECK(read_all(&self) > 0);
    end(&self);
    memfs_free(self.fs);
}

static void wait_until(world *self, int (*is_so)(const world *self)) {
    for (int i = 0; i < 5000 && !is_so(self); i++) {
        poll_store(self, 0);
        usleep(1000);
    }
    CHECK(is_so(self));
}

static int is_loaded(const world *self) {
    return disk_is_loaded(self->store) && self->store->devices[0].active != DISK_NO_SEGMENT;
}
static int has_completion(const world *self) {
    return self->store->completions_count > 0;
}
static int is_on(const world *self) {
    return self->store->devices[0].state == DISK_ON;
}

/* Reachable, so that no leak is reported: it is on purpose. */
static void *volatile left_behind[2];

static void test_a_hanging_device(void) {
    world self = begin(0);
    disk_settings settings = settings_for(1);
    open_over(&self, DISK_ENGINE_THREADS, &settings);
    for (int i = 0; i < 5000 && !is_loaded(&self); i++) {
        disk_activate(self.store, 0);
        poll_store(&self, 0);
        usleep(1000);
    }
    disk_object object = {.class_id = (uint32_t)self.classes[0],
                          .retention = STORE_RETAIN_SHORT,
                          .length_bytes = length_of(0, 0)};
    make_key(0, object.key);
    object.sum = checksum_bytes(contents[0][0], object.length_bytes);
    disk_completion done;
    CHECK(disk_put(self.store, &object, contents[0][0], 1) == DISK_OK);
    wait_until(&self, has_completion);
    CHECK(disk_take_completions(self.store, &done, 1) == 1 && done.status == DISK_OK);
    memfs_hang(self.fs, 1);
    CHECK(disk_get(self.store, object.class_id, object.key, 0, target, 3 * DISK_UNIT_BYTES, 20,
                   2) == DISK_OK);
    poll_store(&self, 30);
    CHECK(disk_take_completions(self.store, &done, 1) == 1 && done.status == DISK_LATE);
    CHECK(self.store->devices[0].state == DISK_ON); /* late for its caller only */
    poll_store(&self, 2000);
    CHECK(self.store->devices[0].state == DISK_OFF);
    CHECK(disk_get(self.store, object.class_id, object.key, 0, target, 3 * DISK_UNIT_BYTES, 20,
                   3) == DISK_UNAVAILABLE);
    memfs_hang(self.fs, 0);
    wait_until(&self, has_completion);
    CHECK(disk_take_completions(self.store, &done, 1) == 1);
    CHECK(done.status == DISK_RELEASED && done.token == 2);
    self.now_ns += 100000 * NS_PER_MS;
    wait_until(&self, is_on);
    CHECK(disk_get(self.store, object.class_id, object.key, 0, target, 3 * DISK_UNIT_BYTES, 900,
                   4) == DISK_OK);
    wait_until(&self, has_completion);
    CHECK(disk_take_completions(self.store, &done, 1) == 1 && done.status == DISK_OK);
    memfs_hang(self.fs, 1);
    CHECK(disk_get(self.store, object.class_id, object.key, 0, target, 3 * DISK_UNIT_BYTES, 900,
                   5) == DISK_OK);
    usleep(20000); /* until a thread has it */
    /* Closing does not wait for it for ever: what it may touch stays. */
    left_behind[0] = self.store;
    left_behind[1] = self.fs;
    CHECK(disk_close(self.store, 50) == 0);
    memfs_hang(self.fs, 0);
    usleep(100000);
}

/* ---- retention and limits ---- */

static uint32_t put_large(world *self, uint8_t *bytes, uint64_t number, uint32_t retention) {
    enum { LARGE = 65536 };
    disk_object object = {
        .class_id = (uint32_t)self->classes[0], .retention = retention, .length_bytes = LARGE};
    memcpy(object.key, &number, sizeof number);
    memset(bytes, (int)number, LARGE);
    object.sum = checksum_bytes(bytes, LARGE);
    int status = disk_put(self->store, &object, bytes, number);
    if (status != DISK_OK) return (uint32_t)status;
    poll_store(self, 1);
    disk_completion done;
    CHECK(disk_take_completions(self->store, &done, 1) == 1);
    return done.status;
}

static void test_long_ones_outlive_short_ones(void) {
    world self = begin(0);
    disk_settings settings = settings_for(1);
    settings.segment_bytes = 1 << 20;
    settings.size_bytes = 8 << 20;
    open_over(&self, DISK_ENGINE_INLINE, &settings);
    poll_store(&self, 1);
    uint8_t *bytes = aligned_alloc(DISK_UNIT_BYTES, 65536);
    CHECK(bytes);
    for (uint64_t number = 0; number < 400; number++) {
        uint32_t status =
            put_large(&self, bytes, number, number < 4 ? STORE_RETAIN_LONG : STORE_RETAIN_SHORT);
        CHECK(status == DISK_OK || status == DISK_BUSY);
    }
    disk_stats stats;
    disk_read_stats(self.store, &stats);
    CHECK(stats.reclaimed_segments_total > 4 && stats.moved_total >= 8);
    CHECK(stats.written_bytes_total < stats.put_bytes_total * 13 / 10);
    for (uint64_t number = 0; number < 4; number++) {
        uint8_t key[16] = {0};
        memcpy(key, &number, sizeof number);
        CHECK(disk_get(self.store, (uint32_t)self.classes[0], key, 0, bytes, 65536, 1000, 1) ==
              DISK_OK);
        poll_store(&self, 1);
        disk_completion done;
        CHECK(disk_take_completions(self.store, &done, 1) == 1 && done.status == DISK_OK);
        CHECK(bytes[0] == number && bytes[65535] == number);
    }
    /* All `long`: what cannot be paid for is dropped, and writing goes on. */
    for (uint64_t number = 1000; number < 1400; number++)
        put_large(&self, bytes, number, STORE_RETAIN_LONG);
    disk_read_stats(self.store, &stats);
    CHECK(stats.reclaimed_long_total > 0);
    CHECK(stats.written_bytes_total < stats.put_bytes_total * 13 / 10);
    CHECK(self.store->devices[0].state == DISK_ON);
    free(bytes);
    end(&self);
    memfs_free(self.fs);
}

static void test_limits(void) {
    world self = begin(0);
    open_inline(&self);
    disk_settings *settings = &self.store->settings;
    disk_object object = {.class_id = (uint32_t)self.classes[0],
                          .retention = STORE_RETAIN_SHORT,
                          .length_bytes = SEGMENT_BYTES};
    CHECK(disk_put(self.store, &object, contents[0][0], 0) == DISK_TOO_LARGE);
    object.length_bytes = 100;
    object.retention = STORE_RETAIN_NONE;
    CHECK(disk_put(self.store, &object, contents[0][0], 0) == DISK_NOT_WANTED);
    object.retention = STORE_RETAIN_SHORT;
    object.shard = 1;
    CHECK(disk_put(self.store, &object, contents[0][0], 0) == DISK_BAD_REQUEST);
    object.shard = 0;
    object.expires_s = NOW_S;
    CHECK(disk_put(self.store, &object, contents[0][0], 0) == DISK_NOT_WANTED);
    CHECK(put(&self, 0, 0, STORE_RETAIN_SHORT) == DISK_OK);
    CHECK(put(&self, 0, 0, STORE_RETAIN_SHORT) == DISK_EXISTS);
    settings->namespace_bytes = 1000;
    CHECK(put(&self, 2, 0, STORE_RETAIN_SHORT) == DISK_OVER_QUOTA);
    settings->namespace_bytes = 0;
    settings->day_bytes = self.store->stats.day_bytes + DISK_UNIT_BYTES;
    CHECK(put(&self, 2, 0, STORE_RETAIN_SHORT) == DISK_OVER_BUDGET);
    settings->day_bytes = 0;
    uint32_t capacity = self.store->index.capacity;
    self.store->index.capacity = self.store->index.count;
    CHECK(put(&self, 2, 0, STORE_RETAIN_SHORT) == DISK_INDEX_FULL);
    self.store->index.capacity = capacity;
    CHECK(put(&self, 2, 0, STORE_RETAIN_SHORT) == DISK_OK);
    end(&self);
    memfs_free(self.fs);
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s SECONDS SEED\n", argv[0]);
        return 2;
    }
    double seconds = atof(argv[1]);
    uint64_t seed = strtoull(argv[2], NULL, 10);
    printf("selftest_disk: seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    make_contents();
    uint64_t steps = run_matrix(seed);
    if (seconds >= 5) steps += run_matrix(seed + 1); /* with the other number of devices */
    printf("selftest_disk: stopped at %llu steps, each by a kill and by a loss of power\n",
           (unsigned long long)steps);
    CHECK(steps > 100);
    for (uint64_t i = 0; i < 4; i++) test_damage(seed + i);
    test_another_version(seed);
    test_write_errors();
    test_read_errors();
    test_a_full_file_system();
    test_short_transfers();
    test_the_folder_removed();
    test_a_smaller_size();
    test_long_ones_outlive_short_ones();
    test_limits();
    test_a_hanging_device();
    printf("selftest_disk: all right\n");
    return 0;
}
