/* BLAKE3, written from its public specification (O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020).
 *
 * Content keys need exactly one compression per 16 tokens, each keyed by the one before, so the
 * chain is bound by the latency of a single compression and wide SIMD cannot help: the rounds are
 * unrolled scalar code with constant message schedules, which keeps four independent quarter
 * rounds in flight.  The tree part below only ever sees identities (salts, adapter digests,
 * image hashes), which are short; it is the plain recursive definition.
 */
#include "blake3.h"

#include <string.h>

static const uint32_t iv[8] = {
    0x6A09E667u, 0xBB67AE85u, 0x3C6EF372u, 0xA54FF53Au,
    0x510E527Fu, 0x9B05688Cu, 0x1F83D9ABu, 0x5BE0CD19u,
};

static inline uint32_t rotate_right(uint32_t value, int bits) {
    return (value >> bits) | (value << (32 - bits));
}

#define QUARTER(a, b, c, d, x, y)                                                                  \
    do {                                                                                           \
        a += b + (x);                                                                              \
        d = rotate_right(d ^ a, 16);                                                               \
        c += d;                                                                                    \
        b = rotate_right(b ^ c, 12);                                                               \
        a += b + (y);                                                                              \
        d = rotate_right(d ^ a, 8);                                                                \
        c += d;                                                                                    \
        b = rotate_right(b ^ c, 7);                                                                \
    } while (0)

/* One round: four columns, then four diagonals, with the sixteen message words in round order. */
#define ROUND(m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15)                \
    do {                                                                                           \
        QUARTER(s0, s4, s8, s12, m[m0], m[m1]);                                                    \
        QUARTER(s1, s5, s9, s13, m[m2], m[m3]);                                                    \
        QUARTER(s2, s6, s10, s14, m[m4], m[m5]);                                                   \
        QUARTER(s3, s7, s11, s15, m[m6], m[m7]);                                                   \
        QUARTER(s0, s5, s10, s15, m[m8], m[m9]);                                                   \
        QUARTER(s1, s6, s11, s12, m[m10], m[m11]);                                                 \
        QUARTER(s2, s7, s8, s13, m[m12], m[m13]);                                                  \
        QUARTER(s3, s4, s9, s14, m[m14], m[m15]);                                                  \
    } while (0)

void infera_blake3_compress(const uint32_t chaining[8], const uint32_t m[16], uint64_t counter,
                            uint32_t block_len, uint32_t flags, uint32_t out[8]) {
    uint32_t s0 = chaining[0], s1 = chaining[1], s2 = chaining[2], s3 = chaining[3];
    uint32_t s4 = chaining[4], s5 = chaining[5], s6 = chaining[6], s7 = chaining[7];
    uint32_t s8 = iv[0], s9 = iv[1], s10 = iv[2], s11 = iv[3];
    uint32_t s12 = (uint32_t)counter, s13 = (uint32_t)(counter >> 32);
    uint32_t s14 = block_len, s15 = flags;

    /* Each line is the previous one sent through the specification's message permutation. */
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    ROUND(2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8);
    ROUND(3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1);
    ROUND(10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6);
    ROUND(12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4);
    ROUND(9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7);
    ROUND(11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13);

    out[0] = s0 ^ s8;
    out[1] = s1 ^ s9;
    out[2] = s2 ^ s10;
    out[3] = s3 ^ s11;
    out[4] = s4 ^ s12;
    out[5] = s5 ^ s13;
    out[6] = s6 ^ s14;
    out[7] = s7 ^ s15;
}

static uint32_t load_word(const uint8_t *bytes) {
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 |
           (uint32_t)bytes[3] << 24;
}

static void store_word(uint8_t *bytes, uint32_t word) {
    bytes[0] = (uint8_t)word;
    bytes[1] = (uint8_t)(word >> 8);
    bytes[2] = (uint8_t)(word >> 16);
    bytes[3] = (uint8_t)(word >> 24);
}

static void load_block(const uint8_t *data, size_t len, uint32_t block[16]) {
    uint8_t padded[BLAKE3_BLOCK_BYTES] = {0};
    memcpy(padded, data, len);
    for (int i = 0; i < 16; i++) block[i] = load_word(padded + 4 * i);
}

/* Chaining value of one chunk (at most 1024 bytes); `root_flag` is BLAKE3_ROOT for a lone chunk. */
static void hash_chunk(const uint32_t key[8], const uint8_t *data, size_t len, uint64_t counter,
                       uint32_t root_flag, uint32_t out[8]) {
    memcpy(out, key, 32);
    size_t offset = 0;
    do {
        size_t take = len - offset < BLAKE3_BLOCK_BYTES ? len - offset : BLAKE3_BLOCK_BYTES;
        uint32_t flags = BLAKE3_KEYED_HASH;
        if (offset == 0) flags |= BLAKE3_CHUNK_START;
        if (offset + take == len) flags |= BLAKE3_CHUNK_END | root_flag;
        uint32_t block[16];
        load_block(data + offset, take, block);
        infera_blake3_compress(out, block, counter, (uint32_t)take, flags, out);
        offset += take;
    } while (offset < len);
}

/* Bytes in the left subtree: the largest power of two of whole chunks that leaves some right. */
static size_t left_bytes(size_t len) {
    size_t chunks = (len - 1) / BLAKE3_CHUNK_BYTES;
    size_t power = 1;
    while (power * 2 <= chunks) power *= 2;
    return power * BLAKE3_CHUNK_BYTES;
}

/* Recursion depth is log2(len / 1024): at most 54 levels whatever the length. */
static void hash_subtree(const uint32_t key[8], const uint8_t *data, size_t len, uint64_t counter,
                         uint32_t root_flag, uint32_t out[8]) {
    if (len <= BLAKE3_CHUNK_BYTES) {
        hash_chunk(key, data, len, counter, root_flag, out);
        return;
    }
    size_t left = left_bytes(len);
    uint32_t children[16];
    hash_subtree(key, data, left, counter, 0, children);
    hash_subtree(key, data + left, len - left, counter + left / BLAKE3_CHUNK_BYTES, 0,
                 children + 8);
    infera_blake3_compress(key, children, 0, BLAKE3_BLOCK_BYTES,
                           BLAKE3_KEYED_HASH | BLAKE3_PARENT | root_flag, out);
}

void infera_blake3_keyed(const uint8_t key[32], const uint8_t *data, size_t len,
                         uint8_t out[BLAKE3_OUT_BYTES]) {
    uint32_t key_words[8], result[8];
    for (int i = 0; i < 8; i++) key_words[i] = load_word(key + 4 * i);
    hash_subtree(key_words, data, len, 0, BLAKE3_ROOT, result);
    for (int i = 0; i < 8; i++) store_word(out + 4 * i, result[i]);
}
