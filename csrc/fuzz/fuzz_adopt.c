/* Fuzz target: a daemon that adopts an index and a live client's ledger in which anything may
 * stand.
 *
 * A real store with real records is made once.  Each input edits copies of its files (one byte of
 * flags, then 5-byte edits: where, and what); a new store adopts them, must pass its own audit, and
 * is then used: records are saved until others are evicted, and the client is detached.  The files
 * lie in allocations of exactly their size, so the address sanitizer sees every access outside.
 *
 * With flag 1 the check words of all records are made right again after the edits, with flag 2
 * those of the classes, so that nonsense gets past them.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../arena.h"
#include "../store.h"

enum { RECORDS = 64, SHARDS = 4, DATA_BYTES = 256 * 4096, KEYS = 40, EDITS_MAX = 256 };
enum { FLAG_FIX_RECORDS = 1, FLAG_FIX_CLASSES = 2, FLAG_WITH_CLIENT = 4 };

static uint8_t *index_master, *index_file, *ledger_master, *ledger_file;
static uint64_t index_bytes, ledger_bytes;

static void require(int condition) {
    if (!condition) abort();
}

static void save(store *state, uint32_t client, uint32_t class_id, uint32_t number) {
    store_wish wish = {.depth_grains = number};
    memset(wish.key, (int)(number * 37 % 251), sizeof wish.key);
    wish.key[0] = (uint8_t)number;
    for (uint32_t shard = 0; shard < SHARDS; shard++) {
        store_grant grant;
        const store_terms terms = {2, 0, 0};
        store_reserve(state, client, class_id, shard, &terms, &wish, 1, 1, 2, &grant);
        if (grant.status != STORE_OK || (number % 10 == 9 && shard == 0)) continue;
        store_commitment commitment = {grant.reservation, 7};
        uint32_t status;
        store_commit(state, client, &commitment, 1, &status);
    }
}

static void make_files(void) {
    const uint8_t instance[16] = "fuzzed instance", name_space[16] = "fuzzed namespace";
    const uint64_t seed[2] = {11, 13}, shard_bytes[SHARDS] = {4096, 100, 9000, 4096};
    uint32_t class_id;
    index_bytes = arena_index_bytes(RECORDS, SHARDS, DATA_BYTES);
    ledger_bytes = arena_ledger_bytes(RECORDS);
    index_master = calloc(1, index_bytes);
    ledger_master = calloc(1, ledger_bytes);
    index_file = malloc(index_bytes);
    ledger_file = malloc(ledger_bytes);
    require(index_master && ledger_master && index_file && ledger_file);
    store *state = store_create(index_master, instance, 1, RECORDS, SHARDS, DATA_BYTES, seed);
    require(state && store_client_attach(state, ledger_master, 5) == 0);
    require(store_class_open(state, name_space, 0, SHARDS, shard_bytes, "m", &class_id) ==
            STORE_OK);
    for (uint32_t i = 0; i < KEYS; i++) save(state, 0, class_id, i);
    store_grant grant;
    for (uint32_t i = 0; i < 2; i++) store_stock(state, 0, class_id, i, &grant);
    store_destroy(state);
}

/* Two edits in three are in what matters most: records, classes and slabs, or held space. */
static void edit(const uint8_t *words) {
    const arena_header *header = (const arena_header *)index_master;
    uint32_t place = (uint32_t)words[0] | (uint32_t)words[1] << 8 | (uint32_t)words[2] << 16;
    int in_ledger = (words[3] & 7) == 7;
    uint8_t *file = in_ledger ? ledger_file : index_file;
    uint64_t start = in_ledger ? 0 : header->buckets_offset;
    uint64_t end = in_ledger ? sizeof(arena_ledger_header) + 64 * sizeof(arena_held) : index_bytes;
    if (!in_ledger && (words[3] & 3) == 1) start = header->classes_offset;
    if (!in_ledger && (words[3] & 3) == 2) start = header->slabs_offset;
    if (!in_ledger && (words[3] & 3) == 3) end = header->classes_offset;
    uint64_t at = start + place % (end - start);
    if (words[3] & 16)
        file[at] ^= (uint8_t)(1u << (words[4] & 7));
    else
        file[at] = words[4];
}

static void fix_checks(uint8_t flags) {
    const arena_header *header = (const arena_header *)index_file;
    arena_bucket *buckets = (arena_bucket *)(index_file + header->buckets_offset);
    arena_shard *shards = (arena_shard *)(index_file + header->shards_offset);
    arena_class *classes = (arena_class *)(index_file + header->classes_offset);
    for (uint32_t slot = 0; flags & FLAG_FIX_RECORDS && slot < RECORDS; slot++) {
        arena_record *record =
            &buckets[slot / ARENA_BUCKET_SLOTS].records[slot % ARENA_BUCKET_SLOTS];
        if (record->shard_mask >> SHARDS) continue;
        record->check = arena_record_check(record, &shards[slot * SHARDS]);
    }
    for (uint32_t id = 0; flags & FLAG_FIX_CLASSES && id < ARENA_CLASSES_MAX; id++)
        if (classes[id].shard_count) classes[id].check = arena_class_check(&classes[id]);
}

static void use(store *state, int client) {
    const uint8_t name_space[16] = "another";
    const uint64_t shard_bytes[SHARDS] = {4096, 4096, 20000, 1};
    uint32_t class_id;
    uint8_t *fresh = calloc(1, ledger_bytes);
    int other = store_client_attach(state, fresh, 6);
    require(other >= 0 && other != client);
    if (store_class_open(state, name_space, 1, SHARDS, shard_bytes, "n", &class_id) == STORE_OK)
        for (uint32_t i = 0; i < 2 * KEYS; i++) save(state, (uint32_t)other, class_id, i);
    require(store_audit(state) == NULL);
    uint64_t name = 3;
    if (client >= 0) {
        store_resume(state, (uint32_t)client, &name, 1);
        require(store_audit(state) == NULL);
        store_client_detach(state, (uint32_t)client);
    }
    store_client_detach(state, (uint32_t)other);
    for (uint32_t id = 0; id < ARENA_CLASSES_MAX; id++) store_drop_class(state, id);
    store_expire(state, ~0ull >> 1, 0);
    require(store_audit(state) == NULL);
    store_stats stats;
    store_read_stats(state, &stats);
    require(stats.used_bytes == 0 && stats.reservations == 0);
    free(fresh);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    if (!index_master) make_files();
    if (size < 1) return 0;
    memcpy(index_file, index_master, index_bytes);
    memcpy(ledger_file, ledger_master, ledger_bytes);
    for (size_t i = 0; i < EDITS_MAX && 1 + i * 5 + 5 <= size; i++) edit(input + 1 + i * 5);
    fix_checks(input[0]);
    store *state = store_adopt(index_file, index_bytes, DATA_BYTES);
    require(state != NULL);
    int client = -1;
    if (input[0] & FLAG_WITH_CLIENT) {
        client = store_adopt_client(state, ledger_file, ledger_bytes);
        require(client >= 0);
    }
    store_adopt_records(state);
    require(store_audit(state) == NULL);
    use(state, client);
    store_destroy(state);
    return 0;
}
