/* What an event's tokens stand on beside themselves: salt, adapter and images.
 *
 * vLLM writes nil or a list for every block: the LoRA's name, then a pair [identifier, offset] for
 * each image that lies over the block, then, on the first block of a prompt, the salt.  Nothing
 * says which is which, so only a list of exactly this form is taken; an event with anything else in
 * it is counted and left out.  The offset counts from the block's start to the image's, and is
 * negative where the image began in an earlier block.
 *
 * An event does not say where an image ends.  So it enters the chain once, before the grain that it
 * begins in: every later key carries it, and blocks of any size give the same keys.
 */
#include <stdlib.h>
#include <string.h>

#include "cachemap_engine.h"

#define IMAGE_FIELD_BYTES 9 /* of an encoded image, beside its identifier */

/* ---- adapters ---- */

int cachemap_engine_adapter(cachemap_engine *engine, const uint8_t *name, uint32_t name_bytes,
                            const uint8_t *digest, uint32_t digest_bytes) {
    if (!name_bytes || name_bytes > ADAPTER_NAME_MAX || !digest_bytes ||
        digest_bytes > DIGEST_MAX || engine->adapter_count == CACHEMAP_ADAPTERS_MAX)
        return CACHEMAP_FULL;
    if (engine->adapter_count == engine->adapter_room) {
        uint32_t room = engine->adapter_room ? 2 * engine->adapter_room : 4;
        engine_adapter *grown = realloc(engine->adapters, room * sizeof *grown);
        if (!grown) return CACHEMAP_NO_MEMORY;
        engine->adapters = grown;
        engine->adapter_room = room;
    }
    engine_adapter *made = &engine->adapters[engine->adapter_count++];
    made->name_bytes = name_bytes;
    made->digest_bytes = digest_bytes;
    memcpy(made->name, name, name_bytes);
    memcpy(made->digest, digest, digest_bytes);
    return CACHEMAP_OK;
}

void cachemap_engine_forget_adapters(cachemap_engine *engine) {
    engine->adapter_count = 0;
}

const engine_adapter *engine_find_adapter(const cachemap_engine *engine, const msgpack_text *name) {
    if (!name->bytes) return NULL;
    for (uint32_t i = engine->adapter_count; i-- > 0;) { /* the latest meaning of a name */
        const engine_adapter *known = &engine->adapters[i];
        if (known->name_bytes == name->count && !memcmp(known->name, name->bytes, name->count))
            return known;
    }
    return NULL;
}

/* ---- the root ---- */

static void put_word(uint8_t *to, uint32_t word) {
    for (int byte = 0; byte < 4; byte++) to[byte] = (uint8_t)(word >> 8 * byte);
}

static int put_field(uint8_t *to, uint64_t *used, char tag, const uint8_t *bytes, uint32_t count) {
    if (!count) return 1;
    if (count > IDENTITY_MAX) return 0;
    to[*used] = (uint8_t)tag;
    put_word(to + *used + 1, count);
    memcpy(to + *used + 5, bytes, count);
    *used += 5 + count;
    return 1;
}

int engine_root(cachemap_engine *engine, const msgpack_text *salt, const engine_adapter *adapter,
                uint8_t root[KEY_BYTES]) {
    uint64_t used = 0;
    if (!put_field(engine->identity, &used, 'S', salt->bytes, salt->count)) return 0;
    if (adapter && !put_field(engine->identity, &used, 'L', adapter->digest, adapter->digest_bytes))
        return 0;
    infera_key_root(engine->identity, used, root);
    return 1;
}

/* ---- extra keys ---- */

static int is_text(const msgpack_text *one, const msgpack_text *other) {
    return other->bytes && one->count == other->count &&
           !memcmp(one->bytes, other->bytes, one->count);
}

/* Takes in an image that lies over block number `block`. Returns as engine_read_extras. */
static uint32_t add_image(cachemap_engine *engine, const engine_event *event, uint64_t block,
                          const msgpack_text *identifier, uint64_t offset, int is_negative) {
    if (!identifier->count || identifier->count > IDENTITY_MAX) return CACHEMAP_EXTRA_KEYS;
    if (is_negative) /* what goes before has it already, unless nothing goes before */
        return block || event->has_parent ? CACHEMAP_STORED : CACHEMAP_EXTRA_KEYS;
    if (offset >= event->block_size_tokens || event->block_size_tokens < GRAIN_TOKENS)
        return CACHEMAP_EXTRA_KEYS;
    uint64_t token = block * event->block_size_tokens + offset;
    uint32_t count = engine->image_count;
    if (count && engine->images[count - 1].token > token) return CACHEMAP_EXTRA_KEYS;
    if (count == IMAGES_MAX) return CACHEMAP_IMAGES_OVER_LIMIT;
    if (!engine->images) engine->images = malloc(IMAGES_MAX * sizeof *engine->images);
    if (!engine->images) return CACHEMAP_REFUSED_FULL;
    engine->images[engine->image_count++] = (engine_image){token, *identifier};
    return CACHEMAP_STORED;
}

/* Reads one block's extra keys. Returns as engine_read_extras. */
static uint32_t read_block(cachemap_engine *engine, msgpack *reader, const engine_event *event,
                           uint64_t block, msgpack_text *salt) {
    uint32_t count, two;
    int is_last = 0;
    if (msgpack_is_nil(reader)) return reader->at++, CACHEMAP_STORED;
    if (!msgpack_array(reader, &count)) return CACHEMAP_EXTRA_KEYS;
    for (uint32_t i = 0; i < count; i++) {
        msgpack_text text;
        if (is_last) return CACHEMAP_EXTRA_KEYS;
        if (msgpack_string(reader, &text)) {
            if (i == 0 && is_text(&text, &event->lora_name)) continue;
            if (block || event->has_parent || salt->bytes) return CACHEMAP_EXTRA_KEYS;
            *salt = text;
            is_last = 1;
            continue;
        }
        uint64_t offset;
        int is_negative;
        if (!msgpack_array(reader, &two) || two != 2 || !msgpack_string(reader, &text) ||
            !msgpack_integer(reader, &offset, &is_negative))
            return CACHEMAP_EXTRA_KEYS;
        uint32_t found = add_image(engine, event, block, &text, offset, is_negative);
        if (found != CACHEMAP_STORED) return found;
    }
    return CACHEMAP_STORED;
}

uint32_t engine_read_extras(cachemap_engine *engine, const engine_event *event,
                            msgpack_text *salt) {
    msgpack reader = event->extra;
    uint32_t found = CACHEMAP_STORED;
    *salt = event->salt;
    engine->image_count = 0;
    for (uint64_t block = 0; found == CACHEMAP_STORED && block < event->extra_count; block++)
        found = read_block(engine, &reader, event, block, salt);
    return found;
}

/* ---- the chain ---- */

static int need_extra(cachemap_engine *engine, uint64_t bytes) {
    if (bytes <= engine->extra_room) return 1;
    uint8_t *grown = realloc(engine->extra, bytes);
    if (!grown) return 0;
    engine->extra = grown;
    engine->extra_room = bytes;
    return 1;
}

/* Mixes the images from number `first` on that begin in a grain into `parent`, encoded as
 * infera_core.keys.image_extra does. Returns how many, or 0 when memory is short. */
static uint32_t mix_images(cachemap_engine *engine, uint32_t first, uint64_t grain,
                           uint8_t parent[KEY_BYTES]) {
    uint32_t end = first;
    uint64_t bytes = 0, used = 0;
    for (; end < engine->image_count && engine->images[end].token / GRAIN_TOKENS == grain; end++)
        bytes += IMAGE_FIELD_BYTES + engine->images[end].identifier.count;
    if (!need_extra(engine, bytes)) return 0;
    for (uint32_t i = first; i < end; i++) {
        const engine_image *image = &engine->images[i];
        put_field(engine->extra, &used, 'I', image->identifier.bytes, image->identifier.count);
        put_word(engine->extra + used, (uint32_t)(image->token % GRAIN_TOKENS));
        used += 4;
    }
    infera_key_extra(parent, engine->extra, used, parent);
    return end - first;
}

int engine_chain(cachemap_engine *engine, const uint8_t parent[KEY_BYTES],
                 const engine_event *event) {
    uint64_t grains = event->token_count / GRAIN_TOKENS;
    uint8_t last[KEY_BYTES];
    uint32_t image = 0;
    memcpy(last, parent, KEY_BYTES);
    for (uint64_t start = 0; start < grains;) {
        int begins =
            image < engine->image_count && engine->images[image].token / GRAIN_TOKENS == start;
        uint32_t mixed = begins ? mix_images(engine, image, start, last) : 0;
        if (begins && !mixed) return 0;
        image += mixed;
        uint64_t end =
            image < engine->image_count ? engine->images[image].token / GRAIN_TOKENS : grains;
        infera_key_chain(last, engine->tokens + start * GRAIN_TOKENS, (end - start) * GRAIN_TOKENS,
                         engine->keys + start * KEY_BYTES);
        memcpy(last, engine->keys + (end - 1) * KEY_BYTES, KEY_BYTES);
        start = end;
    }
    return 1;
}
