/* Object checksums.
 *
 * An object's bytes are cut into leaves of 16 KiB.  With c[i] the CRC32C of leaf i (the last one
 * may be short), the checksum is
 *
 *     sum over i of mix(i << 32 | c[i])  +  mix(~length)      (mod 2^64)
 *
 * where mix is the finaliser of splitmix64.  Leaves are independent and the sum commutes, so
 * threads or GPU kernels can each do some leaves and add up.  On a CPU the crc32 instruction has a
 * latency of three cycles and a throughput of one: two leaves are walked side by side, which hides
 * enough of it, and each word is stored from the register that was summed.  What reaches the target
 * is therefore exactly what was verified, even if the source changes underneath.
 */
#include "checksum.h"

#include <string.h>

#if defined(__x86_64__) && !defined(CHECKSUM_PORTABLE) /* the self-test builds both */
#include <immintrin.h>
#define HAVE_CRC_INSTRUCTION 1
#define CRC_TARGET           __attribute__((target("sse4.2")))
#else
#define HAVE_CRC_INSTRUCTION 0
#endif

#define STEP_BYTES             64           /* a cache line */
#define STREAMING_OBJECT_BYTES (256 * 1024) /* larger objects would only wash out the cache */

static uint32_t crc_table[8][256];
#if HAVE_CRC_INSTRUCTION
static int use_instruction;
#endif

__attribute__((constructor)) static void prepare_tables(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? 0x82F63B78u : 0);
        crc_table[0][i] = crc;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int row = 1; row < 8; row++)
            crc_table[row][i] =
                (crc_table[row - 1][i] >> 8) ^ crc_table[0][crc_table[row - 1][i] & 0xFF];
#if HAVE_CRC_INSTRUCTION
    __builtin_cpu_init();
    use_instruction = __builtin_cpu_supports("sse4.2");
#endif
}

static uint64_t load_u64(const void *source) {
    uint64_t word;
    memcpy(&word, source, sizeof word);
    return word;
}

static uint32_t crc_portable(uint32_t crc, const uint8_t *data, size_t len) {
    for (; len >= 8; len -= 8, data += 8) {
        uint64_t word = load_u64(data) ^ crc;
        crc = 0;
        for (int byte = 0; byte < 8; byte++)
            crc ^= crc_table[7 - byte][(word >> (8 * byte)) & 0xFF];
    }
    for (; len; len--, data++) crc = (crc >> 8) ^ crc_table[0][(crc ^ *data) & 0xFF];
    return crc;
}

#if HAVE_CRC_INSTRUCTION
CRC_TARGET static uint32_t crc_instruction(uint32_t crc, const uint8_t *data, size_t len) {
    uint64_t wide = crc;
    for (; len >= 8; len -= 8, data += 8) wide = _mm_crc32_u64(wide, load_u64(data));
    crc = (uint32_t)wide;
    for (; len; len--, data++) crc = _mm_crc32_u8(crc, *data);
    return crc;
}
#endif

uint32_t checksum_crc32c(uint32_t crc, const void *data, size_t len) {
#if HAVE_CRC_INSTRUCTION
    if (use_instruction) return ~crc_instruction(~crc, data, len);
#endif
    return ~crc_portable(~crc, data, len);
}

static uint64_t mix(uint64_t value) {
    value += 0x9E3779B97F4A7C15ull;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
    return value ^ (value >> 31);
}

static void add_leaf(checksum_state *state, uint64_t leaf, uint32_t crc) {
    state->sum += mix(leaf << 32 | crc);
}

#if HAVE_CRC_INSTRUCTION
enum { SUM_ONLY, STORE, STREAM };

/* Copies `bytes` (a multiple of STEP_BYTES) in each of `lanes` leaves, side by side, and continues
 * their sums in `crcs`. `lanes` and `mode` are constants at each call. A lane writes a whole cache
 * line before the next lane has its turn, and there are two lanes at most: stores around the cache
 * are gathered in a few line buffers, and four streams through them are twenty times slower. */
CRC_TARGET static inline __attribute__((always_inline)) void copy_lanes(uint8_t *target,
                                                                        const uint8_t *source,
                                                                        size_t bytes, int lanes,
                                                                        int mode, uint64_t *crcs) {
    for (size_t offset = 0; offset < bytes; offset += STEP_BYTES) {
        for (int lane = 0; lane < lanes; lane++) {
            size_t start = (size_t)lane * CHECKSUM_LEAF_BYTES + offset;
            for (size_t at = start; at < start + STEP_BYTES; at += 16) {
                __m128i pair = _mm_loadu_si128((const __m128i *)(source + at));
                crcs[lane] = _mm_crc32_u64(crcs[lane], (uint64_t)_mm_cvtsi128_si64(pair));
                crcs[lane] = _mm_crc32_u64(crcs[lane], (uint64_t)_mm_extract_epi64(pair, 1));
                if (mode == STREAM) _mm_stream_si128((__m128i *)(target + at), pair);
                if (mode == STORE) _mm_storeu_si128((__m128i *)(target + at), pair);
            }
        }
    }
}

/* The loop for one lane or two and for each mode, so that none of them is asked for within it. */
CRC_TARGET static inline __attribute__((always_inline)) void
copy_in_mode(uint8_t *target, const uint8_t *source, size_t bytes, int lanes, int mode,
             uint64_t *crcs) {
    if (mode == STREAM)
        copy_lanes(target, source, bytes, lanes, STREAM, crcs);
    else if (mode == STORE)
        copy_lanes(target, source, bytes, lanes, STORE, crcs);
    else
        copy_lanes(target, source, bytes, lanes, SUM_ONLY, crcs);
}

CRC_TARGET static void copy_one(uint8_t *target, const uint8_t *source, size_t bytes, int mode,
                                uint64_t *crc) {
    copy_in_mode(target, source, bytes, 1, mode, crc);
}

CRC_TARGET static void copy_two(uint8_t *target, const uint8_t *source, size_t bytes, int mode,
                                uint64_t *crcs) {
    copy_in_mode(target, source, bytes, 2, mode, crcs);
}

static int mode_of(const uint8_t *target, int streaming) {
    if (!target) return SUM_ONLY;
    return streaming && ((uintptr_t)target & 15) == 0 ? STREAM : STORE;
}

/* As many leaves as are whole in `len`; returns the bytes done. */
static size_t copy_whole_leaves(checksum_state *state, uint8_t *target, const uint8_t *source,
                                size_t len, int streaming) {
    size_t done = 0;
    int mode = mode_of(target, streaming);
    while (len - done >= CHECKSUM_LEAF_BYTES) {
        uint8_t *to = target ? target + done : NULL;
        size_t lanes = len - done >= 2 * CHECKSUM_LEAF_BYTES ? 2 : 1;
        uint64_t crcs[2] = {~0u, ~0u};
        if (lanes == 2)
            copy_two(to, source + done, CHECKSUM_LEAF_BYTES, mode, crcs);
        else
            copy_one(to, source + done, CHECKSUM_LEAF_BYTES, mode, crcs);
        for (size_t lane = 0; lane < lanes; lane++)
            add_leaf(state, state->bytes / CHECKSUM_LEAF_BYTES + lane, ~(uint32_t)crcs[lane]);
        state->bytes += lanes * CHECKSUM_LEAF_BYTES;
        done += lanes * CHECKSUM_LEAF_BYTES;
    }
    return done;
}

/* The whole steps of a piece within one leaf; returns the bytes done. */
static size_t copy_steps(checksum_state *state, uint8_t *target, const uint8_t *source, size_t len,
                         int streaming) {
    size_t whole = len / STEP_BYTES * STEP_BYTES;
    uint64_t crc = (uint32_t)~state->leaf_crc;
    copy_one(target, source, whole, mode_of(target, streaming), &crc);
    state->leaf_crc = ~(uint32_t)crc;
    return whole;
}
#endif

/* A piece within one leaf. The source is read once, into the target or a bounce line, and summed
 * from there, for the same reason as above. */
static void copy_in_leaf(checksum_state *state, uint8_t *target, const uint8_t *source, size_t len,
                         int streaming) {
    uint64_t leaf = state->bytes / CHECKSUM_LEAF_BYTES;
    uint8_t bounce[256];
    size_t done = 0;
#if HAVE_CRC_INSTRUCTION
    if (use_instruction) done = copy_steps(state, target, source, len, streaming);
#else
    (void)streaming;
#endif
    while (done < len) {
        size_t take = len - done < sizeof bounce ? len - done : sizeof bounce;
        memcpy(bounce, source + done, take);
        state->leaf_crc = checksum_crc32c(state->leaf_crc, bounce, take);
        if (target) memcpy(target + done, bounce, take);
        done += take;
    }
    state->bytes += len;
    if (state->bytes % CHECKSUM_LEAF_BYTES == 0) {
        add_leaf(state, leaf, state->leaf_crc);
        state->leaf_crc = 0;
    }
}

void checksum_copy(checksum_state *state, void *target, const void *source, size_t len,
                   int streaming) {
    uint8_t *to = target;
    const uint8_t *from = source;
    while (len) {
        size_t in_leaf = state->bytes % CHECKSUM_LEAF_BYTES;
        size_t done = 0;
#if HAVE_CRC_INSTRUCTION
        if (in_leaf == 0 && use_instruction)
            done = copy_whole_leaves(state, to, from, len, streaming);
#endif
        if (done == 0) {
            size_t room = CHECKSUM_LEAF_BYTES - in_leaf;
            done = len < room ? len : room;
            copy_in_leaf(state, to, from, done, streaming);
        }
        if (to) to += done;
        from += done;
        len -= done;
    }
#if HAVE_CRC_INSTRUCTION
    if (streaming) _mm_sfence(); /* streamed bytes before what says that they are there */
#endif
}

uint64_t checksum_finish(checksum_state *state) {
    if (state->bytes % CHECKSUM_LEAF_BYTES)
        add_leaf(state, state->bytes / CHECKSUM_LEAF_BYTES, state->leaf_crc);
    return state->sum + mix(~state->bytes);
}

uint64_t checksum_bytes(const void *data, uint64_t len) {
    checksum_state state = {0};
    checksum_copy(&state, NULL, data, len, 0);
    return checksum_finish(&state);
}

static int is_streaming(const uint64_t *segment_bytes, uint64_t n_segments) {
    uint64_t total = 0;
    for (uint64_t s = 0; s < n_segments; s++) total += segment_bytes[s];
    return total >= STREAMING_OBJECT_BYTES;
}

void copy_blocks_gather(const uint64_t *segment_base, const uint64_t *segment_stride,
                        const uint64_t *segment_bytes, uint64_t n_segments,
                        const uint64_t *block_ids, const uint64_t *object_address,
                        uint64_t n_objects, uint64_t *sums) {
    int streaming = is_streaming(segment_bytes, n_segments);
    for (uint64_t i = 0; i < n_objects; i++) {
        checksum_state state = {0};
        uint8_t *object = (uint8_t *)(uintptr_t)object_address[i];
        for (uint64_t s = 0; s < n_segments; s++) {
            uint64_t address = segment_base[s] + block_ids[i] * segment_stride[s];
            checksum_copy(&state, object + state.bytes, (const void *)(uintptr_t)address,
                          segment_bytes[s], streaming);
        }
        sums[i] = checksum_finish(&state);
    }
}

void copy_blocks_scatter(const uint64_t *segment_base, const uint64_t *segment_stride,
                         const uint64_t *segment_bytes, uint64_t n_segments,
                         const uint64_t *block_ids, const uint64_t *object_address,
                         uint64_t n_objects, uint64_t *sums) {
    int streaming = is_streaming(segment_bytes, n_segments);
    for (uint64_t i = 0; i < n_objects; i++) {
        checksum_state state = {0};
        const uint8_t *object = (const uint8_t *)(uintptr_t)object_address[i];
        for (uint64_t s = 0; s < n_segments; s++) {
            uint64_t address = segment_base[s] + block_ids[i] * segment_stride[s];
            checksum_copy(&state, (void *)(uintptr_t)address, object + state.bytes,
                          segment_bytes[s], streaming);
        }
        sums[i] = checksum_finish(&state);
    }
}
