/* Content keys: 128 bits naming a prompt prefix that ends at a 16-token boundary. */
#ifndef INFERA_CONTENT_KEY_H
#define INFERA_CONTENT_KEY_H

#include <stddef.h>
#include <stdint.h>

#define CONTENT_KEY_BYTES        16
#define CONTENT_KEY_GRAIN_TOKENS 16

/* cffi: begin */
/* Start of a chain. `identity` is the canonical encoding of what else shapes the KV of every
 * token (salt, adapter); empty for a plain request. */
void infera_key_root(const uint8_t *identity, size_t len, uint8_t *out);

/* Extends a chain over `count` token ids: writes count / 16 keys, returns that number. A tail
 * shorter than a grain has no key. */
size_t infera_key_chain(const uint8_t *parent, const uint32_t *tokens, size_t count, uint8_t *out);

/* Mixes in an identity that holds from this grain on and not before (an image under the next
 * grain's placeholder tokens): the result replaces `parent` for that grain. */
void infera_key_extra(const uint8_t *parent, const uint8_t *extra, size_t len, uint8_t *out);
/* cffi: end */

#endif
