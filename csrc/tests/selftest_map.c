/* Self-test of the cache map for sanitizers: one writer that never rests, readers that never lock.
 *
 *   selftest_map SECONDS SEED
 *
 * One holder has the first half of the prompt all the time, one has nothing all the time, one left
 * before the start; a hundred others come and go on the same keys, so that sets grow into chains,
 * shrink, and are swept under the readers' eyes.  Whatever a reader meets, the first must match in
 * full, the others never, and nobody more than the prompt.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../cachemap.h"

enum { ENTRIES = 20000, KEYS = 64, HELD = 32, OTHERS = 100, READERS = 3, STEPS_PER_LOOK = 64 };

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static struct {
    void *memory;
    uint64_t bytes;
    cachemap *map;
    uint64_t always, never, gone;
    uint8_t keys[KEYS * 16];
    _Atomic int is_over;
} world;

typedef struct {
    cachemap_view *view;
    uint64_t walks;
} reader;

static uint64_t dice;

static uint64_t roll(uint64_t limit) { /* splitmix64 */
    uint64_t value = dice += 0x9E3779B97F4A7C15ull;
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ value >> 27) * 0x94D049BB133111EBull;
    return (value ^ value >> 31) % limit;
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void *read_for_ever(void *argument) {
    reader *self = argument;
    const cachemap_target targets[] = {{.own = world.always, .stride_grains = 1},
                                       {.own = world.never, .stride_grains = 1},
                                       {.own = world.gone, .stride_grains = 1},
                                       {.own = world.always, .stride_grains = 4},
                                       {.shared = {world.never, world.gone}, .stride_grains = 1}};
    enum { TARGETS = sizeof targets / sizeof *targets };
    cachemap_match matches[TARGETS];
    while (!atomic_load(&world.is_over)) {
        CHECK(cachemap_match_all(self->view, world.keys, KEYS, targets, TARGETS, matches) ==
              CACHEMAP_OK);
        CHECK(matches[0].grains[CACHEMAP_HBM] == HELD);
        CHECK(matches[3].grains[CACHEMAP_HBM] == HELD);
        for (int tier = 0; tier < 4; tier++)
            CHECK(!matches[1].grains[tier] && !matches[2].grains[tier] && !matches[4].grains[tier]);
        self->walks++;
    }
    return NULL;
}

static void make_world(uint64_t seed) {
    const uint64_t seeds[2] = {seed, seed + 1};
    world.bytes = cachemap_bytes(ENTRIES);
    world.memory = aligned_alloc(4096, world.bytes);
    CHECK(world.memory);
    memset(world.memory, 0, world.bytes);
    world.map = cachemap_create(world.memory, world.bytes, ENTRIES, seeds);
    CHECK(world.map);
    for (size_t i = 0; i < sizeof world.keys; i++) world.keys[i] = (uint8_t)roll(256);
    world.always = cachemap_holder_add(world.map, 1);
    world.never = cachemap_holder_add(world.map, 1);
    world.gone = cachemap_holder_add(world.map, 1);
    CHECK(cachemap_store(world.map, world.gone, CACHEMAP_HBM, world.keys, KEYS) == 0);
    CHECK(cachemap_store(world.map, world.always, CACHEMAP_HBM, world.keys, HELD) == 0);
    CHECK(cachemap_holder_drop(world.map, world.gone) == CACHEMAP_OK);
}

static void change_something(uint64_t others[OTHERS]) {
    uint64_t *holder = &others[roll(OTHERS)];
    uint64_t first = roll(KEYS), count = roll(KEYS - first) + 1;
    uint32_t tier = (uint32_t)roll(4);
    const uint8_t *keys = world.keys + 16 * first;
    uint64_t what = roll(100);
    if (what < 55)
        cachemap_store(world.map, *holder, tier, keys, count);
    else if (what < 93)
        cachemap_remove(world.map, *holder, tier, keys, count);
    else if (what < 95)
        CHECK(cachemap_holder_clear(world.map, *holder) == CACHEMAP_OK);
    else if (what < 97) {
        CHECK(cachemap_holder_drop(world.map, *holder) == CACHEMAP_OK);
        *holder = cachemap_holder_add(world.map, 1);
        CHECK(*holder);
    } else if (what < 98)
        cachemap_predict(world.map, *holder, keys, count, 0, 5);
    else
        cachemap_tick(world.map, roll(10));
}

int main(int argc, char **argv) {
    double seconds = argc > 1 ? atof(argv[1]) : 2.0;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    dice = seed;
    make_world(seed);
    pthread_t threads[READERS];
    reader readers[READERS] = {0};
    for (int i = 0; i < READERS; i++) {
        int status;
        readers[i].view = cachemap_view_open(world.memory, world.bytes, &status);
        CHECK(readers[i].view && status == CACHEMAP_OK);
        CHECK(pthread_create(&threads[i], NULL, read_for_ever, &readers[i]) == 0);
    }
    uint64_t others[OTHERS], steps = 0, walks = 0;
    for (int i = 0; i < OTHERS; i++) others[i] = cachemap_holder_add(world.map, i % 2);
    for (double end = now_s() + seconds; now_s() < end; steps += STEPS_PER_LOOK)
        for (int i = 0; i < STEPS_PER_LOOK; i++) change_something(others);
    atomic_store(&world.is_over, 1);
    for (int i = 0; i < READERS; i++) {
        pthread_join(threads[i], NULL);
        walks += readers[i].walks;
        cachemap_view_close(readers[i].view);
    }
    CHECK(cachemap_audit(world.map) == NULL);
    for (int i = 0; i < OTHERS; i++)
        CHECK(cachemap_holder_drop(world.map, others[i]) == CACHEMAP_OK);
    while (cachemap_tick(world.map, 100)) continue;
    CHECK(cachemap_audit(world.map) == NULL);
    printf("selftest_map: seed %llu: %llu steps, %llu walks\n", (unsigned long long)seed,
           (unsigned long long)steps, (unsigned long long)walks);
    cachemap_close(world.map);
    free(world.memory);
    return 0;
}
