/* BLAKE3: the compression function for content keys, and the whole hash for identities. */
#ifndef INFERA_BLAKE3_H
#define INFERA_BLAKE3_H

#include <stddef.h>
#include <stdint.h>

#define BLAKE3_BLOCK_BYTES 64
#define BLAKE3_CHUNK_BYTES 1024
#define BLAKE3_KEY_WORDS   8
#define BLAKE3_OUT_BYTES   32

enum blake3_flag {
    BLAKE3_CHUNK_START = 1,
    BLAKE3_CHUNK_END = 2,
    BLAKE3_PARENT = 4,
    BLAKE3_ROOT = 8,
    BLAKE3_KEYED_HASH = 16,
};

/* One compression. `chaining` holds 8 words, `block` 16 little-endian words; the first 8 output
 * words (all that a 256-bit result needs) are written to `out`, which may be `chaining`. */
void infera_blake3_compress(const uint32_t chaining[8], const uint32_t block[16], uint64_t counter,
                            uint32_t block_len, uint32_t flags, uint32_t out[8]);

/* BLAKE3 keyed_hash of `len` bytes under a 32-byte key; writes 32 bytes. Any length. */
void infera_blake3_keyed(const uint8_t key[32], const uint8_t *data, size_t len,
                         uint8_t out[BLAKE3_OUT_BYTES]);

#endif
