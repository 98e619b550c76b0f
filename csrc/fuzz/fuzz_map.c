/* Fuzz target: the cache map itself.
 *
 * With the first byte's lowest bit the rest damages a copy of a map's memory, which a reader then
 * opens and walks: it may answer anything and must not leave the memory.  Without, the rest is a
 * list of steps on a map with little room (stores, removals, clears, new holders, predictions,
 * sweeps), whose books must add up after each.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../cachemap.h"

enum { ENTRIES = 96, HOLDERS = 70, KEYS = 40, TARGETS = 75, DAMAGE_BYTES = 5 };

static const uint64_t seed[2] = {11, 13};
static uint64_t bytes;
static void *memory;
static cachemap *map;
static cachemap_view *view;
static uint64_t holders[HOLDERS];
static uint8_t keys[KEYS * 16];
static uint64_t now_ms;

static void require(int condition) {
    if (!condition) abort();
}

static void start(void) {
    int status;
    bytes = cachemap_bytes(ENTRIES);
    memory = aligned_alloc(4096, bytes);
    require(memory != NULL);
    memset(memory, 0, bytes);
    map = cachemap_create(memory, bytes, ENTRIES, seed);
    view = map ? cachemap_view_open(memory, bytes, &status) : NULL;
    require(view != NULL);
    for (size_t i = 0; i < sizeof keys; i++) keys[i] = (uint8_t)(i / 16 * 37 + i % 16);
    for (int i = 0; i < HOLDERS; i++) holders[i] = cachemap_holder_add(map, i % 3 != 0);
}

static void ask(const cachemap_view *asked) {
    cachemap_target targets[TARGETS];
    cachemap_match matches[TARGETS];
    memset(targets, 0, sizeof targets);
    for (uint32_t i = 0; i < TARGETS; i++) {
        targets[i].own = i % 9 ? holders[i % HOLDERS] : 0;
        targets[i].shared[0] = holders[(i * 7) % HOLDERS];
        targets[i].stride_grains = 1 + i % 6;
    }
    require(cachemap_match_all(asked, keys, KEYS, targets, TARGETS, matches) == CACHEMAP_OK);
    cachemap_facts facts;
    cachemap_holder_facts holder;
    cachemap_read_facts(asked, &facts);
    cachemap_read_holder(asked, holders[3], &holder);
    if (asked != view) return;
    for (uint32_t i = 0; i < TARGETS; i++) {
        uint64_t total = 0;
        for (int tier = 0; tier < 4; tier++) total += matches[i].grains[tier];
        require(total <= KEYS);
    }
}

static void take_step(const uint8_t *step) {
    uint32_t at = step[1] % HOLDERS, first = step[2] % KEYS;
    uint64_t count = step[3] % (KEYS - first) + 1;
    uint32_t tier = step[0] >> 4 & 3;
    const uint8_t *from = keys + first * 16;
    switch (step[0] & 7) {
    case 0:
    case 1:
    case 2:
        cachemap_store(map, holders[at], tier, from, count);
        break;
    case 3:
    case 4:
        cachemap_remove(map, holders[at], tier, from, count);
        break;
    case 5:
        cachemap_predict(map, holders[at], from, count, now_ms, 20);
        break;
    case 6:
        if (step[3] & 1) {
            require(cachemap_holder_clear(map, holders[at]) == CACHEMAP_OK);
        } else {
            require(cachemap_holder_drop(map, holders[at]) == CACHEMAP_OK);
            holders[at] = cachemap_holder_add(map, step[3] >> 1 & 1);
            require(holders[at] != 0);
        }
        break;
    default:
        cachemap_tick(map, now_ms += step[3] & 15);
    }
}

static void damage(const uint8_t *input, size_t size) {
    int status;
    uint8_t *copy = aligned_alloc(4096, bytes);
    require(copy != NULL);
    memcpy(copy, memory, bytes);
    for (; size >= DAMAGE_BYTES; input += DAMAGE_BYTES, size -= DAMAGE_BYTES) {
        uint64_t place = ((uint64_t)input[0] << 16 | (uint64_t)input[1] << 8 | input[2]) % bytes;
        copy[place] ^= input[3];
        copy[(place + 1) % bytes] = input[4];
    }
    cachemap_view *damaged = cachemap_view_open(copy, bytes, &status);
    require((damaged != NULL) == (status == CACHEMAP_OK));
    if (damaged) ask(damaged);
    cachemap_view_close(damaged);
    free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    if (!map) start();
    if (size < 5) return 0;
    if (input[0] & 1) {
        damage(input + 1, size - 1);
        return 0;
    }
    if (size > 1024) size = 1024;
    for (size_t at = 1; at + 4 <= size; at += 4) take_step(input + at);
    ask(view);
    require(cachemap_audit(map) == NULL);
    return 0;
}
