/* Reads the KV event frames of engines: vLLM's and SGLang's, maps or arrays.
 *
 * A frame is an array [time, events, rank?]; an event a map with its type under "type", or (older
 * versions) an array that begins with it.  Events are read one at a time into buffers that grow
 * with the bytes that are there, never with a count that is only claimed, and applied at once.
 * Fields this version does not know are passed over, so that a newer engine still works; a frame
 * that breaks its own format ends with CACHEMAP_BAD_FRAME, and the caller forgets what it knew of
 * the rank.
 *
 * vLLM publishes a run of tokens of a sliding window or of states with fewer hashes than blocks:
 * those it does not keep are left out, and nothing says which.  The group with every block names
 * them by the same hashes, so such a sparse event waits until the stored blocks around it are
 * known.
 *
 * Under speculative decoding SGLang's tokens are overlapping pairs [a, b], [b, c]: the first of
 * each pair is the token.
 */
#include <stdlib.h>
#include <string.h>

#include "cachemap_engine.h"

#define DEFERRED_MAX 256

enum field {
    FIELD_TYPE,
    FIELD_HASHES,
    FIELD_PARENT,
    FIELD_TOKENS,
    FIELD_BLOCK_SIZE,
    FIELD_LORA_ID,
    FIELD_MEDIUM,
    FIELD_LORA_NAME,
    FIELD_EXTRA_KEYS,
    FIELD_GROUP,
    FIELD_GROUP_KIND,
    FIELD_WINDOW,
    FIELD_LOCALITY,
    FIELD_SALT,
    FIELD_OTHER,
};

static const struct {
    const char *name;
    enum field field;
} field_names[] = {
    {"type", FIELD_TYPE},
    {"block_hashes", FIELD_HASHES},
    {"parent_block_hash", FIELD_PARENT},
    {"token_ids", FIELD_TOKENS},
    {"block_size", FIELD_BLOCK_SIZE},
    {"lora_id", FIELD_LORA_ID},
    {"medium", FIELD_MEDIUM},
    {"lora_name", FIELD_LORA_NAME},
    {"extra_keys", FIELD_EXTRA_KEYS},
    {"group_idx", FIELD_GROUP},
    {"kv_cache_spec_kind", FIELD_GROUP_KIND},
    {"kv_cache_spec_sliding_window", FIELD_WINDOW},
    {"locality", FIELD_LOCALITY},
    {"cache_salt", FIELD_SALT},
};

/* Fields of the array form after the type. */
static const enum field vllm_stored[] = {FIELD_HASHES,     FIELD_PARENT,     FIELD_TOKENS,
                                         FIELD_BLOCK_SIZE, FIELD_LORA_ID,    FIELD_MEDIUM,
                                         FIELD_LORA_NAME,  FIELD_EXTRA_KEYS, FIELD_GROUP,
                                         FIELD_GROUP_KIND, FIELD_WINDOW,     FIELD_LOCALITY};
static const enum field vllm_removed[] = {FIELD_HASHES, FIELD_MEDIUM, FIELD_GROUP, FIELD_LOCALITY};
static const enum field sglang_stored[] = {FIELD_HASHES,     FIELD_PARENT,  FIELD_TOKENS,
                                           FIELD_BLOCK_SIZE, FIELD_LORA_ID, FIELD_MEDIUM,
                                           FIELD_SALT,       FIELD_OTHER,   FIELD_LORA_NAME};
static const enum field sglang_removed[] = {FIELD_HASHES, FIELD_MEDIUM};

#define COUNT(array) (sizeof(array) / sizeof *(array))

uint64_t engine_fold_hash(const cachemap_engine *engine, const uint8_t *bytes, uint32_t count) {
    const uint64_t *seed = engine->map->seed;
    uint64_t folded = seed[0] ^ count;
    for (uint32_t at = 0; at < count; at += 8) {
        uint64_t word = 0;
        memcpy(&word, bytes + at, count - at < 8 ? count - at : 8);
        folded = mix_words(folded ^ word ^ seed[1], 0x9E3779B97F4A7C15ull);
    }
    return folded;
}

static int need_room(void **buffer, uint64_t *room, uint64_t count, uint64_t each) {
    if (count <= *room) return 1;
    uint64_t larger = count + count / 2;
    void *grown = realloc(*buffer, larger * each);
    if (!grown) return 0;
    *buffer = grown;
    *room = larger;
    return 1;
}

static int read_hash(const cachemap_engine *engine, msgpack *reader, uint64_t *hash) {
    msgpack_text bytes;
    int is_negative;
    if (msgpack_integer(reader, hash, &is_negative)) return 1;
    if (!msgpack_binary(reader, &bytes)) return 0;
    *hash = engine_fold_hash(engine, bytes.bytes, bytes.count);
    return 1;
}

static int read_hashes(cachemap_engine *engine, msgpack *reader, engine_event *event) {
    uint32_t count;
    if (!msgpack_array(reader, &count)) return 0;
    if (!need_room((void **)&engine->hashes, &engine->hashes_room, count, sizeof(uint64_t)))
        return 0;
    for (uint32_t i = 0; i < count; i++)
        if (!read_hash(engine, reader, &engine->hashes[i])) return 0;
    event->hash_count = count;
    event->has_hashes = 1;
    return 1;
}

/* A token that is not a small number: a wide or negative one, or a pair. */
static int read_odd_token(msgpack *reader, engine_event *event, uint32_t *token) {
    uint64_t value, second;
    uint32_t count;
    int is_negative = 0, ignored = 0;
    if (msgpack_array(reader, &count)) {
        if (count != 2 || !msgpack_integer(reader, &value, &is_negative) ||
            !msgpack_integer(reader, &second, &ignored))
            return 0;
    } else if (!msgpack_integer(reader, &value, &is_negative)) {
        return 0;
    }
    if (is_negative || value > UINT32_MAX) event->has_bad_token = 1;
    *token = (uint32_t)value;
    return 1;
}

/* How tokens are written: bytes in all, how far the four bytes after the tag are shifted down, and
 * what of the tag itself belongs to the number. A table instead of branches: which width comes next
 * cannot be predicted. Length 0: none of the plain forms. */
typedef struct {
    uint8_t bytes, shift, own;
} token_form;

static const token_form token_forms[256] = {
    [0x00 ... 0x7F] = {1, 32, 0x7F}, [0xCC] = {2, 24, 0}, [0xCD] = {3, 16, 0}, [0xCE] = {5, 0, 0}};

static int read_tokens(cachemap_engine *engine, msgpack *reader, engine_event *event) {
    uint32_t count;
    if (!msgpack_array(reader, &count)) return 0;
    if (!need_room((void **)&engine->tokens, &engine->tokens_room, count, sizeof(uint32_t)))
        return 0;
    uint32_t *tokens = engine->tokens;
    const uint8_t *at = reader->at, *end = reader->end;
    for (uint32_t i = 0; i < count; i++) {
        if (end - at >= 5 && token_forms[*at].bytes) {
            token_form form = token_forms[*at];
            uint32_t after;
            memcpy(&after, at + 1, sizeof after);
            tokens[i] =
                (uint32_t)((uint64_t)__builtin_bswap32(after) >> form.shift) | (*at & form.own);
            at += form.bytes;
            continue;
        }
        reader->at = at;
        if (!read_odd_token(reader, event, &tokens[i])) return 0;
        at = reader->at;
    }
    reader->at = at;
    event->token_count = count;
    event->has_tokens = 1;
    return 1;
}

/* A string, or nil or anything else for none. */
static int read_text(msgpack *reader, msgpack_text *text) {
    *text = (msgpack_text){0};
    return msgpack_string(reader, text) || msgpack_skip(reader);
}

/* A whole number that is not negative; anything else leaves what was there. */
static int read_count(msgpack *reader, uint64_t *value) {
    uint64_t number;
    int is_negative;
    if (!msgpack_integer(reader, &number, &is_negative)) return msgpack_skip(reader);
    if (!is_negative) *value = number;
    return 1;
}

static int read_extra_keys(msgpack *reader, engine_event *event) {
    uint32_t count;
    if (msgpack_is_nil(reader)) return msgpack_skip(reader);
    if (!msgpack_array(reader, &count)) return 0;
    event->extra = *reader;
    event->extra_count = count;
    for (uint32_t i = 0; i < count; i++)
        if (!msgpack_skip(reader)) return 0;
    event->extra.end = reader->at;
    return 1;
}

static enum event_kind kind_of(const msgpack_text *type) {
    if (msgpack_is(type, "BlockStored")) return EVENT_STORED;
    if (msgpack_is(type, "BlockRemoved")) return EVENT_REMOVED;
    return msgpack_is(type, "AllBlocksCleared") ? EVENT_CLEARED : EVENT_OTHER;
}

static int read_known(cachemap_engine *engine, msgpack *reader, enum field field,
                      engine_event *event) {
    msgpack_text text;
    switch (field) {
    case FIELD_TYPE:
        if (!read_text(reader, &text)) return 0;
        event->kind = text.bytes ? kind_of(&text) : EVENT_OTHER;
        return 1;
    case FIELD_HASHES:
        return read_hashes(engine, reader, event);
    case FIELD_PARENT:
        event->has_parent = !msgpack_is_nil(reader);
        return event->has_parent ? read_hash(engine, reader, &event->parent) : msgpack_skip(reader);
    case FIELD_TOKENS:
        return read_tokens(engine, reader, event);
    case FIELD_BLOCK_SIZE:
        return read_count(reader, &event->block_size_tokens);
    case FIELD_LORA_ID:
        event->has_lora_id = !msgpack_is_nil(reader);
        return msgpack_skip(reader);
    case FIELD_MEDIUM:
        return read_text(reader, &event->medium);
    case FIELD_LORA_NAME:
        return read_text(reader, &event->lora_name);
    case FIELD_EXTRA_KEYS:
        return read_extra_keys(reader, event);
    case FIELD_GROUP:
        return read_count(reader, &event->group);
    case FIELD_GROUP_KIND:
        return read_text(reader, &event->group_kind);
    case FIELD_WINDOW:
        return read_count(reader, &event->window_tokens);
    case FIELD_LOCALITY:
        if (!read_text(reader, &text)) return 0;
        event->is_remote = text.bytes && !msgpack_is(&text, "LOCAL");
        return 1;
    case FIELD_SALT:
        return read_text(reader, &event->salt);
    default:
        return msgpack_skip(reader);
    }
}

/* Reads a field. One of an unexpected shape is passed over: an event of a kind not known here may
 * use a name in its own way, and only of known kinds it breaks the frame. */
static int read_field(cachemap_engine *engine, msgpack *reader, enum field field,
                      engine_event *event) {
    msgpack before = *reader;
    if (read_known(engine, reader, field, event)) return 1;
    *reader = before;
    event->is_broken = 1;
    return msgpack_skip(reader);
}

static enum field field_of(const msgpack_text *name) {
    for (size_t i = 0; i < COUNT(field_names); i++)
        if (msgpack_is(name, field_names[i].name)) return field_names[i].field;
    return FIELD_OTHER;
}

static int read_map_event(cachemap_engine *engine, msgpack *reader, engine_event *event) {
    uint32_t count;
    if (!msgpack_map(reader, &count)) return 0;
    for (uint32_t i = 0; i < count; i++) {
        msgpack_text name;
        enum field field = FIELD_OTHER;
        if (msgpack_string(reader, &name))
            field = field_of(&name);
        else if (!msgpack_skip(reader))
            return 0;
        if (!read_field(engine, reader, field, event)) return 0;
    }
    return 1;
}

static int read_array_event(cachemap_engine *engine, msgpack *reader, engine_event *event) {
    uint32_t count;
    msgpack_text type;
    if (!msgpack_array(reader, &count) || !count || !msgpack_string(reader, &type)) return 0;
    event->kind = kind_of(&type);
    int is_sglang = engine->dialect == CACHEMAP_SGLANG;
    const enum field *fields = NULL;
    size_t known = 0;
    if (event->kind == EVENT_STORED) {
        fields = is_sglang ? sglang_stored : vllm_stored;
        known = is_sglang ? COUNT(sglang_stored) : COUNT(vllm_stored);
    } else if (event->kind == EVENT_REMOVED) {
        fields = is_sglang ? sglang_removed : vllm_removed;
        known = is_sglang ? COUNT(sglang_removed) : COUNT(vllm_removed);
    }
    for (uint32_t i = 1; i < count; i++) {
        enum field field = i - 1 < known ? fields[i - 1] : FIELD_OTHER;
        if (!read_field(engine, reader, field, event)) return 0;
    }
    return 1;
}

static int is_sound_stored(const engine_event *event) {
    uint64_t size = event->block_size_tokens;
    if (event->is_broken || !event->has_hashes || !event->has_tokens || !size || size > UINT32_MAX)
        return 0;
    if (event->token_count % size || event->token_count / size < event->hash_count) return 0;
    return !event->extra.at || event->extra_count == event->hash_count;
}

static int read_event(cachemap_engine *engine, msgpack *reader, engine_event *event) {
    uint32_t count;
    msgpack ahead = *reader;
    *event = (engine_event){0};
    if (msgpack_map(&ahead, &count)) return read_map_event(engine, reader, event);
    return read_array_event(engine, reader, event);
}

/* Sparse events that wait for the others of their run of stored blocks. */
typedef struct {
    msgpack at[DEFERRED_MAX];
    uint32_t count;
} deferral;

/* Applies what waits. The event that was read last is lost: the buffers are shared. */
static void apply_deferred(cachemap_engine *engine, deferral *waiting) {
    for (uint32_t i = 0; i < waiting->count; i++) {
        engine_event event;
        if (read_event(engine, &waiting->at[i], &event)) engine_stored(engine, &event);
    }
    waiting->count = 0;
}

static int apply_event(cachemap_engine *engine, msgpack *reader, deferral *waiting) {
    engine_event event;
    msgpack start = *reader;
    if (!read_event(engine, reader, &event)) return 0;
    int is_stored = event.kind == EVENT_STORED;
    if (is_stored && !is_sound_stored(&event)) return 0;
    int is_sparse = is_stored && engine_is_sparse(&event);
    if (waiting->count && (!is_stored || (is_sparse && waiting->count == DEFERRED_MAX))) {
        apply_deferred(engine, waiting);
        *reader = start;
        if (!read_event(engine, reader, &event)) return 0;
    }
    switch (event.kind) {
    case EVENT_STORED:
        if (is_sparse)
            waiting->at[waiting->count++] = start;
        else
            engine_stored(engine, &event);
        return 1;
    case EVENT_REMOVED:
        if (event.is_broken || !event.has_hashes) return 0;
        engine_removed(engine, &event);
        return 1;
    case EVENT_CLEARED:
        cachemap_engine_reset(engine);
        engine_note(engine, CACHEMAP_CLEARED, 1);
        return 1;
    default:
        engine_note(engine, CACHEMAP_UNKNOWN_EVENT, 1);
        return 1;
    }
}

/* The time: a number, whole or not. */
static int read_time(msgpack *reader) {
    uint64_t value;
    int is_negative;
    if (reader->at < reader->end && (*reader->at == 0xCA || *reader->at == 0xCB))
        return msgpack_skip(reader);
    return msgpack_integer(reader, &value, &is_negative);
}

int cachemap_engine_apply(cachemap_engine *engine, const uint8_t *payload, uint64_t bytes) {
    msgpack reader = {payload, payload + bytes};
    uint32_t parts, events = 0;
    int is_sound = cachemap_holder_of(engine->map, engine->holder) != NULL;
    if (!is_sound) return CACHEMAP_NO_HOLDER;
    cachemap_holder_saw_frame(engine->map, engine->holder);
    engine_note(engine, CACHEMAP_FRAMES, 1);
    is_sound = msgpack_array(&reader, &parts) && parts >= 2 && read_time(&reader) &&
               msgpack_array(&reader, &events) && events <= CACHEMAP_EVENTS_MAX;
    deferral waiting;
    waiting.count = 0;
    for (uint32_t i = 0; is_sound && i < events; i++)
        is_sound = apply_event(engine, &reader, &waiting);
    if (is_sound) apply_deferred(engine, &waiting);
    for (uint32_t i = 2; is_sound && i < parts; i++) is_sound = msgpack_skip(&reader);
    if (is_sound && reader.at == reader.end) return CACHEMAP_OK;
    engine_note(engine, CACHEMAP_BAD_FRAMES, 1);
    return CACHEMAP_BAD_FRAME;
}
