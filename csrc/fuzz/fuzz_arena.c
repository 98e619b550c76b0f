/* Fuzz target: a client over an index and a ledger in which anything may stand.
 *
 * A real store with real records is made once.  Each input then edits copies of its files (one byte
 * of flags, then 5-byte edits: where, and what), and a client opens, looks up, pins, locates and
 * saves.  The files lie in allocations of exactly their size, so the address sanitizer sees every
 * access outside.  Answers may be wrong, which checksums catch; memory may not be touched.
 *
 * With flag 1 the header's check word is made right again after the edits, so that they get past
 * it; with flag 2 half of the edits come after the view was opened, as from a daemon gone mad.
 */
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../arena.h"
#include "../checksum.h"
#include "../ring.h"
#include "../store.h"

enum { RECORDS = 64, SHARDS = 4, DATA_BYTES = 256 * 4096, KEYS = 40, EDITS_MAX = 256 };
enum { FLAG_FIX_CHECK = 1, FLAG_LATE = 2, FLAG_SHORT_INDEX = 4, FLAG_SHORT_LEDGER = 8 };

static uint8_t *index_master, *index_file, *ledger_master, *ledger_file, *data_file;
static uint64_t index_bytes, ledger_bytes;
static uint8_t keys[KEYS * ARENA_KEY_BYTES];
static uint32_t class_id;

static void require(int condition) {
    if (!condition) abort();
}

static void save_records(store *state, uint32_t client) {
    for (uint32_t i = 0; i < KEYS; i++) {
        store_wish wish = {.depth_grains = i};
        memcpy(wish.key, keys + (size_t)i * ARENA_KEY_BYTES, ARENA_KEY_BYTES);
        for (uint32_t shard = 0; shard < SHARDS; shard++) {
            store_grant grant;
            const store_terms terms = {2, 0, 0};
            store_reserve(state, client, class_id, shard, &terms, &wish, 1, 1, 2, &grant);
            require(grant.status == STORE_OK);
            if (i >= KEYS - 4 && shard == 0) continue; /* some stay incomplete */
            store_commitment commitment = {grant.reservation, 7};
            uint32_t status;
            store_commit(state, client, &commitment, 1, &status);
            require(status == STORE_OK);
        }
    }
}

/* The files as a sound daemon leaves them. */
static void make_files(void) {
    const uint8_t instance[16] = "fuzzed instance", name_space[16] = "fuzzed namespace";
    const uint64_t seed[2] = {11, 13}, shard_bytes[SHARDS] = {4096, 100, 5000, 4096};
    index_bytes = arena_index_bytes(RECORDS, SHARDS, DATA_BYTES);
    ledger_bytes = arena_ledger_bytes(RECORDS);
    index_master = calloc(1, index_bytes);
    ledger_master = calloc(1, ledger_bytes);
    index_file = malloc(index_bytes);
    ledger_file = malloc(ledger_bytes);
    data_file = calloc(1, DATA_BYTES);
    require(index_master && ledger_master && index_file && ledger_file && data_file);
    for (size_t i = 0; i < sizeof keys; i++) keys[i] = (uint8_t)(i * 151 >> 3);
    store *state = store_create(index_master, instance, 1, RECORDS, SHARDS, DATA_BYTES, seed);
    require(state != NULL);
    int client = store_client_attach(state, ledger_master, 5);
    require(client >= 0);
    require(store_class_open(state, name_space, 0, SHARDS, shard_bytes, "m", &class_id) ==
            STORE_OK);
    save_records(state, (uint32_t)client);
    for (uint32_t i = 0; i < 8; i++)
        ring_stock_offer((arena_ledger_header *)ledger_master, i, class_id, 0, i, i * 4096ull);
    store_destroy(state);
}

/* An edit: 5 bytes, three of place, one of kind, one of value. Two places in three are in what
 * matters most: the headers and the records. */
static void edit(const uint8_t *words) {
    uint32_t place = (uint32_t)words[0] | (uint32_t)words[1] << 8 | (uint32_t)words[2] << 16;
    int in_ledger = words[3] & 1, shape = words[3] >> 1 & 3;
    uint64_t end = in_ledger ? ledger_bytes : index_bytes;
    if (words[3] & 8) end = in_ledger ? sizeof(arena_ledger_header) : sizeof(arena_header);
    if ((words[3] & 24) == 16)
        end = in_ledger ? end : ARENA_HEADER_BYTES + 8 * sizeof(arena_bucket);
    uint8_t *file = in_ledger ? ledger_file : index_file;
    uint64_t at = place % end;
    if (shape == 0) file[at] = words[4];
    if (shape == 1) file[at] ^= (uint8_t)(1u << (words[4] & 7));
    uint64_t word_at = at / 8 * 8;
    if (word_at + 8 > end) return;
    uint64_t value =
        words[4] & 1 ? ~0ull >> (words[4] >> 2) : (uint64_t)words[4] << (words[4] >> 2);
    if (shape == 2) memcpy(file + word_at, &value, 8);
    if (shape == 3) memcpy(file + word_at, index_master + ARENA_HEADER_BYTES + words[4] * 8u, 8);
}

static void fix_check(void) {
    arena_header *header = (arena_header *)index_file;
    header->check = checksum_crc32c(0, header, offsetof(arena_header, check));
}

static void save_and_tell(const arena_view *view, const uint8_t *input, size_t size) {
    ring_put_facts facts = {.class_id = class_id, .flags = 2, .doorbell = -1};
    uint8_t block[4096] = {0};
    uint64_t base = (uint64_t)(uintptr_t)block, stride = 0, bytes = sizeof block;
    uint64_t ids[3] = {0, 0, 0};
    uint32_t depths[3] = {1, 2, 3};
    facts.class_id += size > 3 ? input[3] & 1u : 0;
    ring_put(view, &facts, keys, depths, &base, &stride, &bytes, 1, ids, 3);
    ring_touch(view, class_id, -1, keys, KEYS, KEYS);
    arena_ring_entry entry;
    uint64_t reservation;
    for (int i = 0; i < 8 && ring_peek((arena_ledger_header *)ledger_file, &entry) > 0; i++)
        ring_advance((arena_ledger_header *)ledger_file);
    for (uint32_t i = 0; i < 4; i++)
        ring_stock_revoke((arena_ledger_header *)ledger_file, i, &reservation);
}

static void look_up(const arena_view *view) {
    uint8_t present[KEYS];
    uint32_t slots[KEYS];
    uint64_t full_mask = (1u << SHARDS) - 1;
    arena_probe_each(view, class_id, full_mask, keys, KEYS, present);
    arena_probe_run(view, class_id, full_mask, keys, KEYS, slots);
    uint64_t pinned = arena_pin_run(view, class_id, full_mask, keys, KEYS, slots);
    require(pinned <= KEYS);
    for (uint64_t i = 0; i < pinned; i++) {
        for (uint32_t shard = 0; shard < SHARDS + 1; shard++) {
            arena_location at;
            if (!arena_locate(view, slots[i], shard, &at)) continue;
            volatile uint8_t first = data_file[at.offset_bytes];
            volatile uint8_t last = data_file[at.offset_bytes + at.size_bytes - 1];
            (void)first;
            (void)last;
        }
        arena_unpin(view, slots[i]);
    }
    arena_location at;
    arena_locate(view, ARENA_NO_SLOT, 0, &at);
    arena_unpin(view, ARENA_NO_SLOT);
    arena_pins_held(view);
    arena_change_count(view);
    arena_removed_count(view);
    arena_question questions[2] = {{keys, full_mask, class_id, KEYS, 3, 0},
                                   {keys, full_mask, class_id, 0, 0, 0}};
    uint32_t turn = 0;
    for (int were_removed = 0; were_removed < 2; were_removed++)
        arena_ask_again(view, questions, 2, were_removed, 4, &turn);
    require(questions[0].found <= KEYS && questions[1].found == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    if (!index_master) make_files();
    if (size < 1) return 0;
    memcpy(index_file, index_master, index_bytes);
    memcpy(ledger_file, ledger_master, ledger_bytes);
    size_t edits = (size - 1) / 5;
    if (edits > EDITS_MAX) edits = EDITS_MAX;
    size_t early = input[0] & FLAG_LATE ? edits / 2 : edits;
    for (size_t i = 0; i < early; i++) edit(input + 1 + i * 5);
    if (input[0] & FLAG_FIX_CHECK) fix_check();
    uint64_t known_index = input[0] & FLAG_SHORT_INDEX ? index_bytes / 2 : index_bytes;
    uint64_t known_ledger = input[0] & FLAG_SHORT_LEDGER ? ledger_bytes / 2 : ledger_bytes;
    int status;
    arena_view *view = arena_view_open(index_file, known_index, data_file, DATA_BYTES, ledger_file,
                                       known_ledger, &status);
    if (!view) return 0;
    for (size_t i = early; i < edits; i++) edit(input + 1 + i * 5);
    look_up(view);
    save_and_tell(view, input, size);
    arena_view_close(view);
    return 0;
}
