/* Fuzz target: the cache map's decoders, fed frames from anybody.
 *
 * With the first byte's lowest bit the rest goes to the decoders as it is.  Without, the rest is
 * taken as a list of small steps from which a sound frame is written (few names, few tokens, every
 * block size and tier), so that the search goes past the format into what events do to each other.
 * The books must add up afterwards, and whatever is left must be gone after a reset.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../cachemap.h"

enum { ENTRIES = 256, FRAME_BYTES = 1 << 16, STEP_BYTES = 5, AUDIT_EVERY = 16 };

static cachemap *map;
static uint64_t holder, shared;
static cachemap_engine *engines[2];
static cachemap_kvd *kvd;

static void require(int condition) {
    if (!condition) abort();
}

static void start(void) {
    const uint64_t seed[2] = {5, 7};
    uint64_t bytes = cachemap_bytes(ENTRIES);
    void *memory = aligned_alloc(4096, bytes);
    require(memory != NULL);
    memset(memory, 0, bytes);
    map = cachemap_create(memory, bytes, ENTRIES, seed);
    require(map != NULL);
    holder = cachemap_holder_add(map, 1);
    shared = cachemap_holder_add(map, 0);
    engines[0] = cachemap_engine_open(map, holder, CACHEMAP_VLLM);
    engines[1] = cachemap_engine_open(map, cachemap_holder_add(map, 1), CACHEMAP_SGLANG);
    kvd = cachemap_kvd_open(map);
    require(engines[0] && engines[1] && kvd);
    require(cachemap_kvd_namespace(kvd, (const uint8_t *)"n", 1, shared) == CACHEMAP_OK);
    require(cachemap_engine_adapter(engines[0], (const uint8_t *)"a", 1, (const uint8_t *)"d", 1) ==
            CACHEMAP_OK);
}

typedef struct {
    uint8_t *at, *end;
} out;

static void put(out *to, const void *bytes, size_t count) {
    require((size_t)(to->end - to->at) >= count);
    memcpy(to->at, bytes, count);
    to->at += count;
}

static void put_byte(out *to, uint8_t byte) {
    put(to, &byte, 1);
}

static void put_text(out *to, const char *text) {
    put_byte(to, (uint8_t)(0xA0 | strlen(text)));
    put(to, text, strlen(text));
}

static void put_hashes(out *to, uint8_t first, uint32_t count) {
    put_byte(to, 0xDC);
    put_byte(to, 0);
    put_byte(to, (uint8_t)count);
    for (uint32_t i = 0; i < count; i++) put_byte(to, (uint8_t)((first + i) & 0x1F));
}

static void put_name(out *to, uint8_t adapter) {
    static const char *names[] = {NULL, NULL, "a", "unknown"};
    if (names[adapter])
        put_text(to, names[adapter]);
    else
        put_byte(to, 0xC0);
}

/* Extra keys as vLLM writes them, for every block the same images: one that began before, one that
 * begins in the block, sometimes where it cannot. */
static void put_extras(out *to, const uint8_t *step, uint32_t count, uint32_t size) {
    uint8_t kind = step[4] >> 4 & 3, adapter = step[4] >> 2 & 3;
    int has_salt = kind == 1 && step[2] >= 128;
    put_byte(to, 0xDC);
    put_byte(to, 0);
    put_byte(to, (uint8_t)count);
    for (uint32_t i = 0; i < count; i++) {
        int images = kind >= 2 ? kind - 1 : 0;
        put_byte(to, (uint8_t)(0x90 | ((adapter >= 2) + images + (has_salt && !i))));
        if (adapter >= 2) put_name(to, adapter);
        for (int image = 0; image < images; image++) {
            put_byte(to, 0x92);
            put_text(to, step[0] & 8 ? "cat" : "dog");
            put_byte(to, image || images == 1 ? (uint8_t)(step[1] % (size + 1)) : 0xFF);
        }
        if (has_salt && !i) put_text(to, "s");
    }
}

/* One event from five bytes: what, name, parent, shape, detail. */
static void put_event(out *to, const uint8_t *step) {
    static const uint8_t sizes[] = {1, 2, 4, 8, 16, 32, 24, 16};
    static const char *media[] = {"GPU", "GPU", "CPU", "DISK"};
    uint32_t count = 1 + (step[3] >> 3) % 20, size = sizes[step[3] & 7];
    int is_stored = step[0] % 8 < 5;
    if (step[0] >= 250) {
        put_byte(to, 0x81);
        put_text(to, "type");
        put_byte(to, 0xB0);
        put(to, "AllBlocksCleared", 16);
        return;
    }
    put_byte(to, (uint8_t)(0x80 | (is_stored ? 10 : 4)));
    put_text(to, "type");
    put_text(to, is_stored ? "BlockStored" : "BlockRemoved");
    put_text(to, "block_hashes");
    put_hashes(to, step[1], count);
    put_text(to, "medium");
    put_text(to, media[step[4] & 3]);
    put_text(to, "group_idx");
    put_byte(to, (uint8_t)(step[4] >> 6));
    if (!is_stored) return;
    put_text(to, "parent_block_hash");
    put_byte(to, step[2] >= 128 ? 0xC0 : step[2] & 0x1F);
    put_text(to, "block_size");
    put_byte(to, (uint8_t)size);
    put_text(to, "token_ids");
    uint32_t tokens = size * (count + step[0] / 200); /* sometimes of more blocks than named */
    put_byte(to, 0xDC);
    put_byte(to, (uint8_t)(tokens >> 8));
    put_byte(to, (uint8_t)tokens);
    for (uint32_t i = 0; i < tokens; i++) put_byte(to, (uint8_t)((step[1] + i / size) & 3));
    put_text(to, "kv_cache_spec_kind");
    put_text(to, (step[4] >> 6) == 2 ? "mamba" : "full_attention");
    put_text(to, "lora_name");
    put_name(to, step[4] >> 2 & 3);
    put_text(to, "extra_keys");
    put_extras(to, step, count, size);
}

static size_t write_frame(const uint8_t *input, size_t size, uint8_t *frame) {
    out to = {frame, frame + FRAME_BYTES};
    size_t steps = size / STEP_BYTES;
    if (steps > 15) steps = 15;
    put_byte(&to, 0x92);
    put_byte(&to, 0);
    put_byte(&to, (uint8_t)(0x90 | steps));
    for (size_t i = 0; i < steps; i++) put_event(&to, input + i * STEP_BYTES);
    return (size_t)(to.at - frame);
}

/* What names stand for changes while blocks are known. */
static void change_adapters(void) {
    static uint8_t digest;
    digest++;
    cachemap_engine_forget_adapters(engines[0]);
    require(cachemap_engine_adapter(engines[0], (const uint8_t *)"a", 1, &digest, 1) ==
            CACHEMAP_OK);
}

static void check_books(void) {
    static unsigned executions;
    if (++executions % AUDIT_EVERY) return;
    require(cachemap_audit(map) == NULL);
    if (executions % (AUDIT_EVERY * 64)) return;
    for (int i = 0; i < 2; i++) cachemap_engine_reset(engines[i]);
    cachemap_kvd_reset(kvd);
    while (cachemap_tick(map, 0)) continue;
    require(cachemap_audit(map) == NULL);
    require(cachemap_engine_aliases(engines[0]) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    static uint8_t frame[FRAME_BYTES];
    if (!map) start();
    if (size < 1) return 0;
    cachemap_engine *engine = engines[input[0] >> 1 & 1];
    if (input[0] & 1) {
        /* A copy of exactly its size, so that one byte read beyond it is seen. */
        uint8_t *copy = malloc(size);
        require(copy != NULL);
        memcpy(copy, input + 1, size - 1);
        int status = input[0] & 4 ? cachemap_kvd_apply(kvd, copy, size - 1)
                                  : cachemap_engine_apply(engine, copy, size - 1);
        free(copy);
        if (status != CACHEMAP_OK) cachemap_engine_reset(engine);
    } else {
        size_t count = write_frame(input + 1, size - 1, frame);
        if (input[0] & 8) change_adapters();
        require(cachemap_engine_apply(engine, frame, count) == CACHEMAP_OK);
    }
    check_books();
    return 0;
}
