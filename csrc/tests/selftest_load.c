/* Self-test of the load table for sanitizers: writers that never rest, readers that never lock.
 *
 *   selftest_load SECONDS SEED
 *
 * Each writer owns a lane and keeps three numbers of a place in a fixed relation (queued = n,
 * requests = 2 n, context = 4 n). A sum over lanes keeps that relation, so a torn row shows. One
 * more lane is claimed, filled and released all the time: released lanes leave nothing behind.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../loadtable.h"

enum { WRITERS = 3, READERS = 2, PLACES = 200, VALUES = 1000 };

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static struct {
    void *memory;
    _Atomic int is_over;
    _Atomic uint64_t sums;
} world;

typedef struct {
    int lane;
    uint64_t dice;
} worker;

static uint64_t roll(uint64_t *dice, uint64_t limit) { /* splitmix64 */
    uint64_t value = *dice += 0x9E3779B97F4A7C15ull;
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ value >> 27) * 0x94D049BB133111EBull;
    return (value ^ value >> 31) % limit;
}

static void put(int lane, uint64_t place, double value) {
    loadtable_load load = {value, 2 * value, 4 * value};
    CHECK(loadtable_put(world.memory, lane, place, &load, value, 1.0) == LOADTABLE_OK);
}

static void *write_for_ever(void *argument) {
    worker *self = argument;
    while (!atomic_load(&world.is_over)) {
        put(self->lane, 1 + roll(&self->dice, PLACES), (double)roll(&self->dice, VALUES));
        loadtable_beat(world.memory, self->lane, 1.0);
    }
    return NULL;
}

static void *come_and_go(void *argument) {
    worker *self = argument;
    while (!atomic_load(&world.is_over)) {
        int lane = loadtable_claim(world.memory);
        CHECK(lane >= 0);
        loadtable_beat(world.memory, lane, 1.0);
        for (int i = 0; i < 20; i++) put(lane, 1 + roll(&self->dice, PLACES), VALUES - 1);
        loadtable_release(world.memory, lane);
    }
    return NULL;
}

static void *read_for_ever(void *argument) {
    uint64_t places[PLACES];
    double speeds[PLACES] = {0};
    loadtable_load loads[PLACES];
    (void)argument;
    for (uint64_t i = 0; i < PLACES; i++) places[i] = i + 1;
    while (!atomic_load(&world.is_over)) {
        loadtable_sum(world.memory, -1, places, speeds, PLACES, 1.5, 2.0, loads);
        for (int i = 0; i < PLACES; i++) {
            CHECK(loads[i].queued_tokens <= (WRITERS + 1) * VALUES);
            CHECK(loads[i].requests == 2 * loads[i].queued_tokens);
            CHECK(loads[i].context_tokens == 4 * loads[i].queued_tokens);
        }
        atomic_fetch_add(&world.sums, 1);
    }
    return NULL;
}

int main(int argc, char **argv) {
    double seconds = argc > 1 ? atof(argv[1]) : 2;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    world.memory = aligned_alloc(64, loadtable_bytes());
    CHECK(world.memory);
    memset(world.memory, 0, loadtable_bytes());
    CHECK(loadtable_check(world.memory, loadtable_bytes()) == LOADTABLE_BAD_MEMORY);
    CHECK(loadtable_create(world.memory, 64) == LOADTABLE_BAD_MEMORY);
    CHECK(loadtable_create(world.memory, loadtable_bytes()) == LOADTABLE_OK);
    pthread_t threads[WRITERS + READERS + 1];
    worker workers[WRITERS + 1];
    for (int i = 0; i <= WRITERS; i++) {
        workers[i] = (worker){i < WRITERS ? loadtable_claim(world.memory) : -1, seed + (uint64_t)i};
        pthread_create(&threads[i], NULL, i < WRITERS ? write_for_ever : come_and_go, &workers[i]);
    }
    for (int i = 0; i < READERS; i++)
        pthread_create(&threads[WRITERS + 1 + i], NULL, read_for_ever, NULL);
    struct timespec rest = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&rest, NULL);
    atomic_store(&world.is_over, 1);
    for (int i = 0; i < WRITERS + READERS + 1; i++) pthread_join(threads[i], NULL);
    CHECK(world.sums > 0);
    CHECK(loadtable_live(world.memory, 1.5, 2.0) == WRITERS);
    printf("selftest_load: %llu sums, seed %llu\n", (unsigned long long)world.sums,
           (unsigned long long)seed);
    free(world.memory);
    return 0;
}
