/* Reads one kvd's event frames: a map whose "events" are maps, with the 16-byte keys of whole
 * records packed into one byte string.
 *
 * Only namespaces that somebody asked for are entered, each in its own holder, and of these only
 * the first group: what the router counts for plain models.
 */
#include <stdlib.h>
#include <string.h>

#include "cachemap_private.h"
#include "msgpack.h"

#define NAME_BYTES_MAX 128

typedef struct {
    uint32_t name_bytes;
    uint8_t name[NAME_BYTES_MAX];
    uint64_t holder;
} kvd_namespace;

struct cachemap_kvd {
    cachemap *map;
    uint32_t count;
    kvd_namespace namespaces[CACHEMAP_NAMESPACES_MAX];
};

typedef struct {
    msgpack_text type, tier, name_space, keys;
    uint64_t group;
    int has_bad_group;
} kvd_event;

cachemap_kvd *cachemap_kvd_open(cachemap *map) {
    cachemap_kvd *kvd = calloc(1, sizeof *kvd);
    if (kvd) kvd->map = map;
    return kvd;
}

void cachemap_kvd_close(cachemap_kvd *kvd) {
    free(kvd);
}

static kvd_namespace *find_namespace(cachemap_kvd *kvd, const uint8_t *name, uint32_t bytes) {
    for (uint32_t i = 0; i < kvd->count; i++)
        if (kvd->namespaces[i].name_bytes == bytes && !memcmp(kvd->namespaces[i].name, name, bytes))
            return &kvd->namespaces[i];
    return NULL;
}

int cachemap_kvd_namespace(cachemap_kvd *kvd, const uint8_t *name, uint32_t name_bytes,
                           uint64_t holder) {
    if (!name_bytes || name_bytes > NAME_BYTES_MAX) return CACHEMAP_FULL;
    kvd_namespace *known = find_namespace(kvd, name, name_bytes);
    if (!holder) {
        if (known) *known = kvd->namespaces[--kvd->count];
        return CACHEMAP_OK;
    }
    if (!known) {
        if (kvd->count == CACHEMAP_NAMESPACES_MAX) return CACHEMAP_FULL;
        known = &kvd->namespaces[kvd->count++];
        known->name_bytes = name_bytes;
        memcpy(known->name, name, name_bytes);
    }
    known->holder = holder;
    return CACHEMAP_OK;
}

void cachemap_kvd_reset(cachemap_kvd *kvd) {
    for (uint32_t i = 0; i < kvd->count; i++)
        cachemap_holder_clear(kvd->map, kvd->namespaces[i].holder);
}

static void note(cachemap_kvd *kvd, uint32_t counter, uint64_t more) {
    cachemap_count(kvd->map, CACHEMAP_KVD, counter, more);
}

static uint32_t tier_of(const msgpack_text *tier) {
    if (!tier->bytes) return CACHEMAP_TIERS;
    if (msgpack_is(tier, "ram")) return CACHEMAP_RAM;
    if (msgpack_is(tier, "disk")) return CACHEMAP_DISK;
    return msgpack_is(tier, "peer") || msgpack_is(tier, "store") ? CACHEMAP_PEER : CACHEMAP_TIERS;
}

static int read_group(msgpack *reader, kvd_event *event) {
    int is_negative;
    if (!msgpack_integer(reader, &event->group, &is_negative)) {
        event->has_bad_group = 1;
        return msgpack_skip(reader);
    }
    event->has_bad_group = is_negative;
    return 1;
}

static int read_event(msgpack *reader, kvd_event *event) {
    uint32_t count;
    if (!msgpack_map(reader, &count)) return 0;
    for (uint32_t i = 0; i < count; i++) {
        msgpack_text name = {0};
        if (!msgpack_string(reader, &name) && !msgpack_skip(reader)) return 0;
        msgpack_text *text = NULL;
        int is_read;
        if (name.bytes && msgpack_is(&name, "type")) text = &event->type;
        if (name.bytes && msgpack_is(&name, "tier")) text = &event->tier;
        if (name.bytes && msgpack_is(&name, "namespace")) text = &event->name_space;
        if (text)
            is_read = msgpack_string(reader, text) || msgpack_skip(reader);
        else if (name.bytes && msgpack_is(&name, "keys"))
            is_read = msgpack_binary(reader, &event->keys) || msgpack_skip(reader);
        else if (name.bytes && msgpack_is(&name, "group"))
            is_read = read_group(reader, event);
        else
            is_read = msgpack_skip(reader);
        if (!is_read) return 0;
    }
    return 1;
}

static void change(cachemap_kvd *kvd, const kvd_event *event, uint32_t tier, int is_stored) {
    uint64_t n = event->keys.count / KEY_BYTES;
    kvd_namespace *known = find_namespace(kvd, event->name_space.bytes, event->name_space.count);
    if (!known || event->group) {
        note(kvd, known ? CACHEMAP_OTHER_GROUP : CACHEMAP_OTHER_NAMESPACE, n);
        return;
    }
    uint64_t left = is_stored
                        ? cachemap_store(kvd->map, known->holder, tier, event->keys.bytes, n)
                        : cachemap_remove(kvd->map, known->holder, tier, event->keys.bytes, n);
    note(kvd, is_stored ? CACHEMAP_STORED : CACHEMAP_REMOVED, n - left);
    note(kvd, is_stored ? CACHEMAP_REFUSED_FULL : CACHEMAP_REMOVED_UNKNOWN, left);
}

static int apply_event(cachemap_kvd *kvd, msgpack *reader) {
    kvd_event event = {0};
    if (!read_event(reader, &event)) return 0;
    int is_stored = event.type.bytes && msgpack_is(&event.type, "stored");
    if (event.type.bytes && msgpack_is(&event.type, "cleared")) {
        note(kvd, CACHEMAP_CLEARED, 1);
        cachemap_kvd_reset(kvd);
        return 1;
    }
    uint32_t tier = tier_of(&event.tier);
    if ((!is_stored && !(event.type.bytes && msgpack_is(&event.type, "removed"))) ||
        tier == CACHEMAP_TIERS) {
        note(kvd, CACHEMAP_UNKNOWN_EVENT, 1);
        return 1;
    }
    if (!event.keys.bytes || event.keys.count % KEY_BYTES || !event.name_space.bytes ||
        event.has_bad_group)
        return 0;
    change(kvd, &event, tier, is_stored);
    return 1;
}

int cachemap_kvd_apply(cachemap_kvd *kvd, const uint8_t *payload, uint64_t bytes) {
    msgpack reader = {payload, payload + bytes};
    uint32_t fields, events, seen = 0;
    note(kvd, CACHEMAP_FRAMES, 1);
    int is_sound = msgpack_map(&reader, &fields);
    for (uint32_t i = 0; is_sound && i < fields; i++) {
        msgpack_text name = {0};
        is_sound = msgpack_string(&reader, &name) || msgpack_skip(&reader);
        if (!is_sound) break;
        if (!name.bytes || !msgpack_is(&name, "events")) {
            is_sound = msgpack_skip(&reader);
            continue;
        }
        seen = 1;
        is_sound = msgpack_array(&reader, &events) && events <= CACHEMAP_EVENTS_MAX;
        for (uint32_t j = 0; is_sound && j < events; j++) is_sound = apply_event(kvd, &reader);
    }
    if (is_sound && seen && reader.at == reader.end) return CACHEMAP_OK;
    note(kvd, CACHEMAP_BAD_FRAMES, 1);
    return CACHEMAP_BAD_FRAME;
}
