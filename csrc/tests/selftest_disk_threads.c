/* Self-test of the disk store's threads for sanitizers: puts and gets over real files, through
 * io_uring and through the pool, half of the time each.
 *
 *   selftest_disk_threads SECONDS SEED
 *
 * Every object's bytes follow from its number, so whatever is read can be told right from wrong.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../checksum.h"
#include "../disk_private.h"

enum { NOW_S = 1000000 };

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "selftest_disk_threads: line %d: %s\n", __LINE__, #condition);         \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static uint64_t mixed(uint64_t value) {
    value += 0x9E3779B97F4A7C15ull;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
    return value ^ (value >> 31);
}

static void test_threads(uint64_t seed, double seconds, uint32_t way) {
    enum { LARGE = 1 << 20, SLOTS = 16, OBJECTS = 2048 };
    char folder[] = "/tmp/infera-selftest-disk-XXXXXX";
    CHECK(mkdtemp(folder));
    const char *const paths[1] = {folder};
    const uint64_t seeds[2] = {seed, 9};
    disk_settings settings = {
        .size_bytes = 64 << 20, .segment_bytes = 8 << 20, .entries = 4096, .depth = 8, .ring = way};
    char error[256];
    disk_store *store = disk_open(&settings, paths, 1, seeds, error, sizeof error);
    CHECK(store);
    uint8_t name[16] = {1}, *slots[SLOTS];
    int is_busy[SLOTS] = {0};
    uint64_t of_slot[SLOTS] = {0};
    int class_id = disk_class(store, name, 0, 1, "m");
    for (int i = 0; i < SLOTS; i++) CHECK((slots[i] = aligned_alloc(DISK_UNIT_BYTES, LARGE)));
    uint64_t dice = seed, served = 0, written = 0;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double end_s = (double)now.tv_sec + (double)now.tv_nsec / 1e9 + seconds;
    int is_over = 0;
    while (!is_over || store->live_operations) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        is_over = (double)now.tv_sec + (double)now.tv_nsec / 1e9 > end_s;
        disk_poll(store, (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec, NOW_S);
        disk_completion done;
        while (disk_take_completions(store, &done, 1)) {
            uint64_t number = of_slot[done.token];
            is_busy[done.token] = done.status == DISK_LATE;
            if (done.status != DISK_OK) continue;
            if (done.is_put) {
                written++;
                continue;
            }
            served++;
            for (uint64_t i = 0; i < done.object.length_bytes; i += 4096)
                CHECK(slots[done.token][i] == (uint8_t)mixed(number + i));
        }
        for (uint64_t slot = 0; slot < SLOTS && !is_over; slot++) {
            if (is_busy[slot]) continue;
            dice = mixed(dice);
            uint64_t number = dice % OBJECTS, length = 4096 + mixed(number) % (LARGE - 4096);
            disk_object object = {.class_id = (uint32_t)class_id,
                                  .retention = 1 + (uint32_t)(number % 3),
                                  .length_bytes = length};
            memcpy(object.key, &number, sizeof number);
            of_slot[slot] = number;
            if (dice >> 32 & 1) {
                is_busy[slot] = disk_get(store, (uint32_t)class_id, object.key, 0, slots[slot],
                                         LARGE, 5000, slot) == DISK_OK;
                continue;
            }
            memset(slots[slot], 0, LARGE);
            for (uint64_t i = 0; i < length; i += 4096) slots[slot][i] = (uint8_t)mixed(number + i);
            object.sum = checksum_bytes(slots[slot], length);
            is_busy[slot] = disk_put(store, &object, slots[slot], slot) == DISK_OK;
        }
        usleep(100);
    }
    CHECK(disk_audit(store) == NULL);
    CHECK(store->devices[0].state == DISK_ON);
    printf("selftest_disk_threads: %s: %llu written, %llu read\n", store->devices[0].way,
           (unsigned long long)written, (unsigned long long)served);
    CHECK(written && served);
    CHECK(disk_close(store, 5000));
    for (int i = 0; i < SLOTS; i++) free(slots[i]);
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK(system(command) == 0);
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s SECONDS SEED\n", argv[0]);
        return 2;
    }
    double seconds = atof(argv[1]);
    uint64_t seed = strtoull(argv[2], NULL, 10);
    printf("selftest_disk_threads: seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    test_threads(seed, seconds / 2, DISK_WAY_PROBE);
    test_threads(seed, seconds / 2, DISK_WAY_NO);
    return 0;
}
