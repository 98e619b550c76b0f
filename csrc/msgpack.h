/* Reading MessagePack from bytes nobody vouches for.
 *
 * A reader is a place and an end. Every function checks what it needs against the end and returns 0
 * without moving on when it is not there. No function allocates, recurses, or believes a count that
 * the bytes left cannot hold: an element has at least one byte.
 */
#ifndef INFERA_MSGPACK_H
#define INFERA_MSGPACK_H

#include <stdint.h>
#include <string.h>

typedef struct {
    const uint8_t *at, *end;
} msgpack;

typedef struct {
    const uint8_t *bytes;
    uint32_t count;
} msgpack_text;

static inline uint64_t msgpack_left(const msgpack *reader) {
    return (uint64_t)(reader->end - reader->at);
}

/* A big-endian number of 1, 2, 4 or 8 bytes that starts `skip` bytes on. */
static inline uint64_t msgpack_number(const msgpack *reader, uint32_t skip, uint32_t bytes) {
    const uint8_t *from = reader->at + skip;
    uint64_t value = 0;
    if (bytes == 8) {
        memcpy(&value, from, 8);
        return __builtin_bswap64(value); /* hosts are little-endian; see content_key.c */
    }
    for (uint32_t i = 0; i < bytes; i++) value = value << 8 | from[i];
    return value;
}

static inline int msgpack_is_nil(const msgpack *reader) {
    return reader->at < reader->end && *reader->at == 0xC0;
}

/* Reads the head of an array (tags 0x90, 0xDC, 0xDD) or a map (0x80, 0xDE, 0xDF). */
static inline int msgpack_head(msgpack *reader, uint8_t fix, uint8_t wide, uint32_t per_element,
                               uint32_t *count) {
    uint64_t left = msgpack_left(reader), number;
    uint32_t used;
    if (!left) return 0;
    if ((*reader->at & 0xF0) == fix) {
        number = *reader->at & 0x0F;
        used = 1;
    } else if (*reader->at == wide && left >= 3) {
        number = msgpack_number(reader, 1, 2);
        used = 3;
    } else if (*reader->at == wide + 1 && left >= 5) {
        number = msgpack_number(reader, 1, 4);
        used = 5;
    } else {
        return 0;
    }
    if (number * per_element > left - used) return 0;
    reader->at += used;
    *count = (uint32_t)number;
    return 1;
}

static inline int msgpack_array(msgpack *reader, uint32_t *count) {
    return msgpack_head(reader, 0x90, 0xDC, 1, count);
}

static inline int msgpack_map(msgpack *reader, uint32_t *count) {
    return msgpack_head(reader, 0x80, 0xDE, 2, count);
}

static inline int msgpack_sized(msgpack *reader, uint32_t head, uint64_t count,
                                msgpack_text *text) {
    if (msgpack_left(reader) < head || msgpack_left(reader) - head < count) return 0;
    *text = (msgpack_text){reader->at + head, (uint32_t)count};
    reader->at += head + count;
    return 1;
}

/* Reads a string (its bytes are not checked to be UTF-8). */
static inline int msgpack_string(msgpack *reader, msgpack_text *text) {
    uint64_t left = msgpack_left(reader);
    if (!left) return 0;
    uint8_t tag = *reader->at;
    if ((tag & 0xE0) == 0xA0) return msgpack_sized(reader, 1, tag & 0x1F, text);
    if (tag < 0xD9 || tag > 0xDB) return 0;
    uint32_t width = 1u << (tag - 0xD9);
    if (left < 1 + width) return 0;
    return msgpack_sized(reader, 1 + width, msgpack_number(reader, 1, width), text);
}

static inline int msgpack_binary(msgpack *reader, msgpack_text *bytes) {
    uint64_t left = msgpack_left(reader);
    if (!left || *reader->at < 0xC4 || *reader->at > 0xC6) return 0;
    uint32_t width = 1u << (*reader->at - 0xC4);
    if (left < 1 + width) return 0;
    return msgpack_sized(reader, 1 + width, msgpack_number(reader, 1, width), bytes);
}

/* Reads a whole number of up to 64 bits; negative ones as two's complement. */
static inline int msgpack_integer(msgpack *reader, uint64_t *value, int *is_negative) {
    uint64_t left = msgpack_left(reader);
    if (!left) return 0;
    uint8_t tag = *reader->at;
    *is_negative = 0;
    if (tag < 0x80 || tag >= 0xE0) {
        *value = (uint64_t)(int64_t)(int8_t)tag;
        *is_negative = tag >= 0xE0;
        reader->at++;
        return 1;
    }
    if (tag < 0xCC || tag > 0xD3) return 0;
    uint32_t width = 1u << ((tag - 0xCC) & 3);
    if (left < 1 + width) return 0;
    uint64_t number = msgpack_number(reader, 1, width);
    if (tag >= 0xD0) {
        uint32_t shift = 64 - 8 * width;
        number = (uint64_t)((int64_t)(number << shift) >> shift);
        *is_negative = (int64_t)number < 0;
    }
    *value = number;
    reader->at += 1 + width;
    return 1;
}

/* Bytes of the value at the reader without what it contains, and how many values that is. 0 for an
 * unknown tag or when the bytes are not there. */
static inline int msgpack_extent(const msgpack *reader, uint64_t *bytes, uint64_t *inside) {
    static const uint8_t fixed[0x20] = {
        /* C0 */ 1, 0, 1, 1, 0, 0, 0, 0,  0,  0, 5, 9, 2, 3, 5, 9,
        /* D0 */ 2, 3, 5, 9, 3, 4, 6, 10, 18, 0, 0, 0, 0, 0, 0, 0};
    uint64_t left = msgpack_left(reader);
    uint32_t count;
    msgpack copy = *reader;
    msgpack_text text;
    *inside = 0;
    if (!left) return 0;
    uint8_t tag = *reader->at;
    if (tag < 0x80 || tag >= 0xE0) {
        *bytes = 1;
        return 1;
    }
    if (tag >= 0xC0 && fixed[tag - 0xC0]) {
        *bytes = fixed[tag - 0xC0];
        return *bytes <= left;
    }
    if (tag >= 0xC7 && tag <= 0xC9) { /* extension: size, type, bytes */
        uint32_t width = 1u << (tag - 0xC7);
        if (left < 2 + width) return 0;
        *bytes = 2 + width + msgpack_number(reader, 1, width);
        return *bytes <= left;
    }
    if (msgpack_array(&copy, &count)) {
        *inside = count;
    } else if (msgpack_map(&copy, &count)) {
        *inside = 2ull * count;
    } else if (!msgpack_string(&copy, &text) && !msgpack_binary(&copy, &text)) {
        return 0;
    }
    *bytes = (uint64_t)(copy.at - reader->at);
    return 1;
}

/* Passes over one value, however deep. */
static inline int msgpack_skip(msgpack *reader) {
    uint64_t pending = 1, bytes, inside;
    while (pending) {
        if (!msgpack_extent(reader, &bytes, &inside)) return 0;
        reader->at += bytes;
        pending += inside - 1;
        if (pending > msgpack_left(reader)) return 0;
    }
    return 1;
}

static inline int msgpack_is(const msgpack_text *text, const char *word) {
    return text->count == strlen(word) && memcmp(text->bytes, word, text->count) == 0;
}

#endif
