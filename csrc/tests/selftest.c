/* Self-test of the C core for sanitizers: a random driver over the store while reader threads look
 * up, pin, and read what they pinned, and a saver thread saves from stock through its ring.
 *
 *   selftest SECONDS SEED
 *
 * The writer plays the daemon and its saving clients; each reader has a ledger of its own, as a
 * client process has.  Every record's bytes follow from its key, so a reader that holds a pin knows
 * what it must see, whatever the writer does meanwhile.  `make sanitize` builds this under ASan
 * with UBSan and under TSan.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../arena.h"
#include "../blake3.h"
#include "../checksum.h"
#include "../content_key.h"
#include "../ring.h"
#include "../store.h"
#include "../store_policy.h"

enum {
    DATA_BYTES = 2 << 20,
    RECORDS = 256,
    SHARDS_MAX = 4,
    READERS = 2,
    CLASSES = 4,
    KEYS = 100,
    WRITERS = 3,
    HELD_MAX = 32,
};

static const struct {
    uint32_t shards;
    uint64_t bytes[SHARDS_MAX];
} shapes[CLASSES] = {{1, {4096}}, {2, {100, 9000}}, {1, {40000}}, {4, {4096, 1, 12288, 500}}};

typedef struct {
    uint64_t state;
} dice;

typedef struct {
    uint64_t name, offset_bytes;
    uint32_t class_id, shard, key;
} held;

typedef struct {
    int number;
    held entries[HELD_MAX];
    int count;
} writer;

typedef struct {
    arena_view *view;
    uint64_t seed, pins, misses;
} reader;

static struct {
    void *index, *ledgers[READERS], *writer_ledgers[WRITERS], *saver_ledger;
    uint8_t *data;
    store *state;
    int saver; /* client number of the saver */
    uint64_t now_ns;
    _Atomic int is_over;
} world;

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "selftest: line %d: %s\n", __LINE__, #condition);                      \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static uint64_t roll(dice *source, uint64_t sides) {
    source->state += 0x9E3779B97F4A7C15ull;
    uint64_t value = source->state;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
    return (value ^ (value >> 31)) % sides;
}

static void make_key(uint32_t number, uint8_t key[16]) {
    for (int i = 0; i < 4; i++) memcpy(key + 4 * i, &number, 4);
}

static uint64_t word_of(uint32_t class_id, uint32_t shard, uint32_t key, uint64_t position) {
    return ((uint64_t)class_id << 56 | (uint64_t)shard << 48 | (uint64_t)key << 24) + position;
}

static void fill(uint8_t *to, uint64_t bytes, uint32_t class_id, uint32_t shard, uint32_t key) {
    for (uint64_t i = 0; i + 8 <= bytes; i += 8) {
        uint64_t word = word_of(class_id, shard, key, i);
        memcpy(to + i, &word, 8);
    }
}

static void *zeroed(uint64_t bytes) {
    void *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    CHECK(memory);
    memset(memory, 0, bytes);
    return memory;
}

static void make_world(uint64_t seed) {
    const uint64_t seeds[2] = {seed, ~seed};
    uint8_t instance[16] = {1};
    world.index = zeroed(arena_index_bytes(RECORDS, SHARDS_MAX, DATA_BYTES));
    world.data = zeroed(DATA_BYTES);
    world.now_ns = 1000;
    world.state = store_create(world.index, instance, 1, RECORDS, SHARDS_MAX, DATA_BYTES, seeds);
    CHECK(world.state);
    for (uint32_t i = 0; i < CLASSES; i++) {
        uint8_t name[16] = {(uint8_t)i};
        uint32_t class_id;
        CHECK(store_class_open(world.state, name, 0, shapes[i].shards, shapes[i].bytes, "model",
                               &class_id) == STORE_OK);
        CHECK(class_id == i);
    }
    for (int i = 0; i < READERS; i++) {
        world.ledgers[i] = zeroed(arena_ledger_bytes(RECORDS));
        CHECK(store_client_attach(world.state, world.ledgers[i], 1) == i);
    }
    world.saver_ledger = zeroed(arena_ledger_bytes(RECORDS));
    world.saver = store_client_attach(world.state, world.saver_ledger, 3);
    CHECK(world.saver == READERS);
}

static void end_world(void) {
    store_destroy(world.state);
    for (int i = 0; i < READERS; i++) free(world.ledgers[i]);
    for (int i = 0; i < WRITERS; i++) free(world.writer_ledgers[i]);
    free(world.saver_ledger);
    free(world.index);
    free(world.data);
}

/* ---- readers ---- */

static void read_pinned(const arena_view *view, uint32_t slot, uint32_t class_id, uint32_t key) {
    for (uint32_t shard = 0; shard < shapes[class_id].shards; shard++) {
        arena_location place;
        CHECK(arena_locate(view, slot, shard, &place));
        const uint8_t *bytes = world.data + place.offset_bytes;
        for (uint64_t i = 0; i + 8 <= shapes[class_id].bytes[shard]; i += 8) {
            uint64_t word;
            memcpy(&word, bytes + i, 8);
            CHECK(word == word_of(class_id, shard, key, i));
        }
    }
}

static void *read_for_ever(void *argument) {
    reader *self = argument;
    dice source = {self->seed};
    uint8_t keys[64 * 16], present[64];
    uint32_t slots[64];
    while (!atomic_load(&world.is_over)) {
        uint32_t class_id = (uint32_t)roll(&source, CLASSES);
        uint64_t mask = (1ull << shapes[class_id].shards) - 1;
        uint32_t numbers[64];
        for (int i = 0; i < 64; i++) {
            numbers[i] = (uint32_t)roll(&source, KEYS);
            make_key(numbers[i], keys + 16 * i);
        }
        uint64_t run = arena_probe_run(self->view, class_id, mask, keys, 64, slots);
        uint64_t all = arena_probe_each(self->view, class_id, mask, keys, 64, present);
        CHECK(run <= 64 && all <= 64);
        for (int i = 0; i < 64; i++) {
            uint32_t slot = arena_pin(self->view, class_id, mask, keys + 16 * i);
            if (slot == ARENA_NO_SLOT) {
                self->misses++;
                continue;
            }
            self->pins++;
            read_pinned(self->view, slot, class_id, numbers[i]);
            arena_unpin(self->view, slot);
        }
    }
    CHECK(arena_pins_held(self->view) == 0);
    return NULL;
}

/* ---- the saver: class 0 and 2 have one shard, so that a put is a whole record ---- */

static void *save_for_ever(void *argument) {
    reader *self = argument;
    dice source = {self->seed};
    static uint8_t block[40000];
    uint64_t base = (uint64_t)(uintptr_t)block, stride = 0, block_id = 0;
    while (!atomic_load(&world.is_over)) {
        uint32_t class_id = roll(&source, 2) ? 0 : 2, depth = 1;
        uint32_t number = (uint32_t)roll(&source, KEYS);
        uint8_t key[16];
        make_key(number, key);
        fill(block, shapes[class_id].bytes[0], class_id, 0, number);
        ring_put_facts facts = {.class_id = class_id, .doorbell = -1};
        uint64_t done = ring_put(self->view, &facts, key, &depth, &base, &stride,
                                 &shapes[class_id].bytes[0], 1, &block_id, 1);
        self->pins += done;
        self->misses += !done;
        if (roll(&source, 8) == 0) (void)ring_touch(self->view, class_id, -1, key, 1, 1);
    }
    return NULL;
}

/* What loop.c does for a client: take in its ring, keep its stock filled, take some of it back. */
static void serve_saver(dice *source) {
    arena_ledger_header *ledger = world.saver_ledger;
    arena_ring_entry entry;
    uint32_t client = (uint32_t)world.saver;
    for (; ring_peek(ledger, &entry) > 0; ring_advance(ledger)) {
        store_late_wish wish = {.sum = entry.sum};
        memcpy(wish.wish.key, entry.key, sizeof wish.wish.key);
        wish.wish.depth_grains = entry.depth_grains;
        if (entry.kind == RING_COMMIT)
            (void)store_commit_stock(world.state, client, entry.reservation, &wish, world.now_ns);
        else if (entry.kind == RING_TOUCH)
            store_touch(world.state, entry.class_id, entry.key, 1);
        else
            store_give_up(world.state, client, &entry.reservation, 1);
    }
    uint32_t class_id = roll(source, 2) ? 0 : 2;
    for (uint32_t at = 0; at < 4; at++) {
        store_grant grant;
        uint64_t name;
        if (roll(source, 4) == 0 && ring_stock_revoke(ledger, at, &name))
            store_give_up(world.state, client, &name, 1);
        if (ring_stock_peek(ledger, at, class_id, 0) != STOCK_EMPTY) continue;
        if (store_stock(world.state, client, class_id, 0, &grant) != STORE_OK) continue;
        CHECK(ring_stock_offer(ledger, at, class_id, 0, grant.reservation, grant.offset_bytes));
    }
}

/* ---- the writer ---- */

static void come(writer *self, int place) {
    free(world.writer_ledgers[place]);
    world.writer_ledgers[place] = zeroed(arena_ledger_bytes(RECORDS));
    self->number = store_client_attach(world.state, world.writer_ledgers[place], 2);
    self->count = 0;
    CHECK(self->number >= 0);
}

static void reserve(writer *self, dice *source, uint32_t class_id, uint32_t shard, uint32_t key) {
    if (self->count == HELD_MAX) return;
    store_wish wish = {.depth_grains = 1};
    make_key(key, wish.key);
    store_grant grant;
    const store_terms terms = {STORE_RETAIN_SHORT, 0, 0};
    store_reserve(world.state, (uint32_t)self->number, class_id, shard, &terms, &wish, 1,
                  world.now_ns, world.now_ns + 100, &grant);
    if (grant.status != STORE_OK) return;
    uint64_t bytes = shapes[class_id].bytes[shard];
    CHECK(grant.offset_bytes + bytes <= DATA_BYTES);
    /* Written at once, and again before the commit: a late writer must not hurt anybody. */
    memset(world.data + grant.offset_bytes, (int)roll(source, 256), bytes);
    self->entries[self->count++] =
        (held){grant.reservation, grant.offset_bytes, class_id, shard, key};
}

/* Mostly all shards of a record, sometimes just one. */
static void reserve_record(writer *self, dice *source) {
    uint32_t class_id = (uint32_t)roll(source, CLASSES), key = (uint32_t)roll(source, KEYS);
    uint32_t only = (uint32_t)roll(source, 4 * SHARDS_MAX);
    for (uint32_t shard = 0; shard < shapes[class_id].shards; shard++)
        if (only >= shapes[class_id].shards || only == shard)
            reserve(self, source, class_id, shard, key);
}

static void finish(writer *self, dice *source) {
    if (self->count == 0) return;
    int place = (int)roll(source, (uint64_t)self->count);
    held entry = self->entries[place];
    self->entries[place] = self->entries[--self->count];
    if (roll(source, 16) == 0) {
        store_give_up(world.state, (uint32_t)self->number, &entry.name, 1);
        return;
    }
    uint64_t bytes = shapes[entry.class_id].bytes[entry.shard];
    fill(world.data + entry.offset_bytes, bytes, entry.class_id, entry.shard, entry.key);
    store_commitment commitment = {entry.name,
                                   checksum_bytes(world.data + entry.offset_bytes, bytes)};
    uint32_t status;
    store_commit(world.state, (uint32_t)self->number, &commitment, 1, &status);
    CHECK(status == STORE_OK || status == STORE_STALE);
}

static void one_step(writer *writers, dice *source) {
    int place = (int)roll(source, WRITERS);
    writer *self = &writers[place];
    uint8_t key[16];
    make_key((uint32_t)roll(source, KEYS), key);
    uint32_t class_id = (uint32_t)roll(source, CLASSES);
    switch (roll(source, 40)) {
    case 0:
        store_client_detach(world.state, (uint32_t)self->number);
        come(self, place);
        break;
    case 1:
        (void)store_drop(world.state, class_id, key);
        break;
    case 2:
        store_touch(world.state, class_id, key, 1);
        break;
    case 3:
        CHECK(store_verify(world.state, world.data, class_id, key) != STORE_DAMAGED);
        break;
    case 4:
        world.now_ns += roll(source, 6);
        store_expire(world.state, world.now_ns, 150);
        break;
    case 5:
        if (roll(source, 20) == 0) (void)store_drop_class(world.state, class_id);
        break;
    default:
        if (roll(source, 3) == 0)
            reserve_record(self, source);
        else
            finish(self, source);
    }
}

static void drain_events(void) {
    static store_event events[256];
    int lost;
    while (store_take_events(world.state, events, 256, &lost) == 256) {
    }
    CHECK(!lost);
    uint64_t cursor = 0, found = 0, taken;
    while ((taken = store_snapshot(world.state, &cursor, events, 256))) found += taken;
    store_stats stats;
    store_read_stats(world.state, &stats);
    CHECK(stats.records_present == found);
}

static uint64_t write_until(double seconds, dice *source) {
    writer writers[WRITERS];
    for (int i = 0; i < WRITERS; i++) come(&writers[i], i);
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    uint64_t steps = 0;
    do {
        for (int i = 0; i < 200; i++) {
            one_step(writers, source);
            serve_saver(source);
        }
        steps += 200;
        const char *wrong = store_audit(world.state);
        if (wrong) fprintf(stderr, "selftest: audit: %s\n", wrong);
        CHECK(!wrong);
        drain_events();
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((double)(now.tv_sec - start.tv_sec) + 1e-9 * (double)(now.tv_nsec - start.tv_nsec) <
             seconds);
    for (int i = 0; i < WRITERS; i++) store_client_detach(world.state, (uint32_t)writers[i].number);
    return steps;
}

/* ---- what needs no threads ---- */

static void test_checksums(dice *source) {
    CHECK(checksum_crc32c(0, "123456789", 9) == 0xE3069283u);
    for (int round = 0; round < 200; round++) {
        uint64_t len = roll(source, round % 10 ? 20000 : 300000), skew = roll(source, 17);
        uint8_t *from = malloc(len + skew + 1), *to = malloc(len + 1);
        CHECK(from && to);
        for (uint64_t i = 0; i < len + skew; i++) from[i] = (uint8_t)roll(source, 256);
        uint64_t cut = len ? roll(source, len) : 0;
        checksum_state whole = {0}, pieces = {0};
        checksum_copy(&whole, NULL, from + skew, len, 0);
        checksum_copy(&pieces, to, from + skew, cut, 1);
        checksum_copy(&pieces, to + cut, from + skew + cut, len - cut, 1);
        CHECK(checksum_finish(&whole) == checksum_finish(&pieces));
        CHECK(memcmp(to, from + skew, len) == 0);
        free(from);
        free(to);
    }
}

static void test_keys(dice *source) {
    static uint32_t tokens[64 * 16];
    static uint8_t bytes[5000], whole[64 * 16], piece[64 * 16];
    for (int round = 0; round < 200; round++) {
        uint8_t root[16], other[16];
        size_t len = roll(source, sizeof bytes);
        infera_key_root(bytes, len, root);
        infera_key_extra(root, bytes, len, other);
        CHECK(memcmp(root, other, 16) != 0);
        size_t count = roll(source, 64 * 16), cut = roll(source, 64) * 16;
        if (cut > count) cut = count / 16 * 16;
        for (size_t i = 0; i < count; i++) tokens[i] = (uint32_t)roll(source, 1ull << 32);
        size_t grains = infera_key_chain(root, tokens, count, whole);
        CHECK(grains == count / 16);
        size_t done = infera_key_chain(root, tokens, cut, piece);
        const uint8_t *parent = done ? piece + 16 * (done - 1) : root;
        CHECK(infera_key_chain(parent, tokens + cut, count - cut, piece + 16 * done) ==
              grains - done);
        CHECK(memcmp(whole, piece, 16 * grains) == 0);
    }
}

int main(int argc, char **argv) {
    double seconds = argc > 1 ? atof(argv[1]) : 2.0;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    dice source = {seed};
    test_checksums(&source);
    test_keys(&source);
    make_world(seed);
    pthread_t threads[READERS];
    reader readers[READERS];
    for (int i = 0; i < READERS; i++) {
        int status;
        readers[i] = (reader){.seed = seed + 1000 + (uint64_t)i};
        readers[i].view = arena_view_open(
            world.index, arena_index_bytes(RECORDS, SHARDS_MAX, DATA_BYTES), world.data, DATA_BYTES,
            world.ledgers[i], arena_ledger_bytes(RECORDS), &status);
        CHECK(readers[i].view && status == ARENA_OK);
        CHECK(pthread_create(&threads[i], NULL, read_for_ever, &readers[i]) == 0);
    }
    int status;
    reader saver = {.seed = seed + 2000};
    saver.view =
        arena_view_open(world.index, arena_index_bytes(RECORDS, SHARDS_MAX, DATA_BYTES), world.data,
                        DATA_BYTES, world.saver_ledger, arena_ledger_bytes(RECORDS), &status);
    pthread_t saving;
    CHECK(saver.view && pthread_create(&saving, NULL, save_for_ever, &saver) == 0);
    uint64_t steps = write_until(seconds, &source), pins = 0, misses = 0;
    atomic_store(&world.is_over, 1);
    pthread_join(saving, NULL);
    serve_saver(&source);
    arena_view_close(saver.view);
    store_client_detach(world.state, (uint32_t)world.saver);
    for (int i = 0; i < READERS; i++) {
        pthread_join(threads[i], NULL);
        pins += readers[i].pins;
        misses += readers[i].misses;
        arena_view_close(readers[i].view);
        store_client_detach(world.state, (uint32_t)i);
    }
    store_stats stats;
    store_read_stats(world.state, &stats);
    CHECK(!store_audit(world.state));
    CHECK(stats.reservations == 0 && stats.quarantined_bytes == 0 && stats.clients == 0);
    printf("selftest: seed %llu: %llu steps, %llu evicted, %llu expired, %llu pins read, %llu "
           "misses, %llu saved through the ring\n",
           (unsigned long long)seed, (unsigned long long)steps,
           (unsigned long long)stats.evicted_total, (unsigned long long)stats.expired_total,
           (unsigned long long)pins, (unsigned long long)misses, (unsigned long long)saver.pins);
    end_world();
    return 0;
}
