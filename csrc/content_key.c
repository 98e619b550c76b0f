/* Content keys.
 *
 * Every key is a plain BLAKE3 keyed hash truncated to 16 bytes, so that any language with a BLAKE3
 * library computes the same (test vectors: tests/vectors/content_keys.json):
 *
 *   root(identity)       = keyed_hash(key = "infera content-key root v1" zero-padded to 32,
 * identity) key[i]               = keyed_hash(key = key[i-1] || "infera grain v1\0", 16 tokens as
 * u32 LE) extra(parent, bytes) = keyed_hash(key = parent || "infera extra v1\0", bytes)
 *
 * where key[-1] is the root.  A grain is exactly one 64-byte BLAKE3 block, hence one compression.
 * The hash is cryptographic because a key decides whose KV is read: finding two prompts with one
 * key takes about 2^64 work, finding one that meets a given prompt's about 2^128.  The key itself
 * carries the whole chain state, so an event decoder can go on from any stored key.
 */
#include "content_key.h"

#include <string.h>

#include "blake3.h"

static const char root_context[32] = "infera content-key root v1";
static const char grain_context[16] = "infera grain v1";
static const char extra_context[16] = "infera extra v1";

void infera_key_root(const uint8_t *identity, size_t len, uint8_t *out) {
    uint8_t digest[BLAKE3_OUT_BYTES];
    infera_blake3_keyed((const uint8_t *)root_context, identity, len, digest);
    memcpy(out, digest, CONTENT_KEY_BYTES);
}

void infera_key_extra(const uint8_t *parent, const uint8_t *extra, size_t len, uint8_t *out) {
    uint8_t key[32], digest[BLAKE3_OUT_BYTES];
    memcpy(key, parent, 16);
    memcpy(key + 16, extra_context, 16);
    infera_blake3_keyed(key, extra, len, digest);
    memcpy(out, digest, CONTENT_KEY_BYTES);
}

/* Words are stored in host order; the arena and its keys are defined little-endian, and the build
 * refuses any other host. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "infera needs a little-endian host");

size_t infera_key_chain(const uint8_t *parent, const uint32_t *tokens, size_t count, uint8_t *out) {
    const uint32_t flags = BLAKE3_KEYED_HASH | BLAKE3_CHUNK_START | BLAKE3_CHUNK_END | BLAKE3_ROOT;
    size_t grains = count / CONTENT_KEY_GRAIN_TOKENS;
    uint32_t chain[8];
    uint32_t context[4];
    memcpy(chain, parent, CONTENT_KEY_BYTES);
    memcpy(context, grain_context, sizeof context);
    for (size_t i = 0; i < grains; i++) {
        memcpy(chain + 4, context, sizeof context);
        infera_blake3_compress(chain, tokens + i * CONTENT_KEY_GRAIN_TOKENS, 0, BLAKE3_BLOCK_BYTES,
                               flags, chain);
        memcpy(out + i * CONTENT_KEY_BYTES, chain, CONTENT_KEY_BYTES);
    }
    return grains;
}
