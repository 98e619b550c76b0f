/* Taking in what a device's thread loaded: a bounded number of rows with each call.
 *
 * Segments come newest first, so when the index has no room it is the oldest records that stay out,
 * and of two copies of one the newer is found first.  Nothing is served before all is in.
 */
#define _GNU_SOURCE /* O_DIRECT */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "disk_private.h"

static int was_dropped(const disk_device *device, const disk_class_row *kind, uint64_t sequence) {
    for (uint32_t i = 0; i < device->drop_count; i++) {
        const disk_drop_row *row = &device->drops[i];
        if (row->group == kind->group && sequence < row->before_sequence &&
            memcmp(row->name_space, kind->name_space, sizeof row->name_space) == 0)
            return 1;
    }
    return 0;
}

/* Another's entry of the same record: the later one counts. */
static void take_twice(disk_store *store, uint32_t at, uint16_t segment,
                       const disk_record_row *row) {
    disk_entry *entry = &store->index.entries[at];
    store->stats.load_twice_total++;
    if (entry->segment != segment || row->sequence <= entry->sequence) return;
    store->classes[entry->class_id].bytes += row->length_bytes - entry->length_bytes;
    entry->length_bytes = (uint32_t)row->length_bytes;
    entry->expires_s = row->expires_s;
    entry->retention = row->retention;
    disk_index_move(&store->index, at, segment, row->start_unit, row->sequence);
}

static void take_row(disk_store *store, disk_device *device, uint16_t segment,
                     const disk_loaded_segment *loaded, const disk_record_row *row) {
    uint16_t class_id = device->loaded_classes[row->class_row];
    if (row->expires_s && row->expires_s <= store->now_s) {
        store->stats.load_expired_total++;
        return;
    }
    if (was_dropped(device, &loaded->classes[row->class_row], row->sequence)) {
        store->stats.load_dropped_total++;
        return;
    }
    if (class_id == DISK_NO_SEGMENT) {
        store->stats.load_no_room_total++;
        return;
    }
    uint32_t at = disk_index_find(&store->index, class_id, row->key, row->shard);
    if (at != DISK_NONE) {
        take_twice(store, at, segment, row);
        return;
    }
    disk_entry entry = {.sequence = row->sequence,
                        .length_bytes = (uint32_t)row->length_bytes,
                        .start_unit = row->start_unit,
                        .expires_s = row->expires_s,
                        .class_id = class_id,
                        .segment = segment,
                        .shard = row->shard,
                        .retention = row->retention,
                        .state = DISK_ENTRY_WRITING};
    memcpy(entry.key, row->key, sizeof entry.key);
    at = disk_index_add(&store->index, &entry);
    if (at == DISK_NONE) {
        store->stats.load_no_room_total++;
        return;
    }
    store->stats.loaded_total++;
    store->classes[class_id].objects++;
    store->classes[class_id].bytes += row->length_bytes;
    disk_entry_ready(store, at);
}

static void take_classes(disk_store *store, disk_device *device,
                         const disk_loaded_segment *loaded) {
    for (uint32_t i = 0; i < loaded->class_count && i < DISK_CLASSES_MAX; i++) {
        const disk_class_row *row = &loaded->classes[i];
        char model[DISK_MODEL_BYTES];
        memcpy(model, row->model, sizeof model);
        model[sizeof model - 1] = 0;
        int class_id = disk_class(store, row->name_space, row->group, row->shard_count, model);
        device->loaded_classes[i] = class_id < 0 ? DISK_NO_SEGMENT : (uint16_t)class_id;
    }
}

static void begin(disk_store *store, uint32_t number) {
    disk_device *device = &store->devices[number];
    const disk_loaded *loaded = device->loaded;
    device->loaded_ids = malloc((loaded->segment_count + 1) * sizeof *device->loaded_ids);
    if (!device->loaded_ids) return;
    device->loaded_segment = device->loaded_record = 0;
    device->lock_file = loaded->lock_file;
    device->is_read_only = loaded->is_read_only;
    device->direct_flag = loaded->uses_direct ? O_DIRECT : 0;
    device->segment_bytes = loaded->segment_bytes;
    device->segment_units = (uint32_t)(loaded->segment_bytes / DISK_UNIT_BYTES);
    device->segments_allowed =
        (uint32_t)(store->settings.size_bytes / store->device_count / loaded->segment_bytes);
    device->epoch = loaded->epoch;
    device->sequence = loaded->epoch << DISK_SEQUENCE_BITS;
    device->free_bytes = loaded->free_bytes;
    device->drop_count = loaded->drop_count;
    memcpy(device->drops, loaded->drops, sizeof device->drops);
    memcpy(device->store_id, loaded->store_id, sizeof device->store_id);
    memcpy(device->way, loaded->way, sizeof device->way);
    store->stats.load_segments_damaged_total += loaded->segments_damaged;
    store->stats.load_tables_damaged_total += loaded->tables_damaged;
    store->stats.load_tail_total += loaded->tail_records;
    store->stats.load_marks_damaged_total += loaded->marks_damaged;
    store->stats.shrunk_segments_total += loaded->shrunk;
    uint64_t day_bytes = 0;
    for (uint32_t i = 0; i < loaded->segment_count; i++) {
        disk_loaded_segment *segment = &loaded->segments[i];
        device->loaded_ids[i] = disk_segment_add(store, number, segment->number, segment->file);
        if (segment->number >= device->next_number) device->next_number = segment->number + 1;
        if (segment->day == store->day && segment->day_bytes > day_bytes)
            day_bytes = segment->day_bytes;
        if (device->loaded_ids[i] == DISK_NO_SEGMENT) continue;
        disk_segment *own = &store->segments[device->loaded_ids[i]];
        own->generation = segment->generation;
        own->used_units = segment->used_units;
        own->appended = segment->appended;
        own->state = segment->generation ? SEGMENT_SEALED : SEGMENT_FREE;
        segment->file = -1; /* the store's from now on */
    }
    store->stats.day_bytes += day_bytes;
}

/* The newest segment without a table is written on, if what is behind its end can be told from what
 * will be; others get the table they lack. */
static void settle(disk_store *store, uint32_t number) {
    disk_device *device = &store->devices[number];
    const disk_loaded *loaded = device->loaded;
    for (uint32_t i = 0; i < loaded->segment_count; i++) {
        const disk_loaded_segment *segment = &loaded->segments[i];
        uint16_t id = device->loaded_ids[i];
        if (id == DISK_NO_SEGMENT || !segment->generation || loaded->is_read_only) continue;
        disk_segment *own = &store->segments[id];
        if (own->appended == 0 && store->index.segment_heads[id] == DISK_NONE) {
            own->state = SEGMENT_FREE;
        } else if (!segment->is_sealed) {
            own->is_dirty = 1;
            if (device->active == DISK_NO_SEGMENT && loaded->may_resume &&
                own->used_units < device->segment_units) {
                device->active = id;
                own->state = SEGMENT_ACTIVE;
            } else {
                disk_seal_segment(store, id);
            }
        }
    }
}

static void finish(disk_store *store, uint32_t number) {
    disk_device *device = &store->devices[number];
    disk_loaded *loaded = device->loaded;
    settle(store, number);
    int uses_ring = loaded->uses_ring, is_read_only = loaded->is_read_only;
    free(device->loaded_ids);
    device->loaded_ids = NULL;
    device->loaded = NULL;
    loaded->lock_file = -1;
    disk_loaded_free(store->io, loaded, 1); /* closes the files the store has no room for */
    uint32_t engine = store->engine ? store->engine
                      : uses_ring   ? DISK_ENGINE_RING
                                    : DISK_ENGINE_THREADS;
    if (!device->serves_transfers)
        device->serves_transfers = disk_queue_serve(device->queue, engine, store->settings.depth);
    device->state = DISK_READ_ONLY;                       /* so far: what is there can be read */
    if (store->index.count) store->events_overflowed = 1; /* who follows takes a snapshot */
    device->look_ns = store->now_ns;
    device->reason[0] = 0;
    device->failed_errno = 0;
    device->read_failures = 0;
    if (!device->serves_transfers)
        disk_device_fail(store, number, DISK_OFF, "cannot start its threads", EAGAIN);
    else if (is_read_only)
        disk_device_fail(store, number, DISK_READ_ONLY, "its file system is read-only", EROFS);
    else
        device->state = DISK_ON;
}

void disk_merge(disk_store *store, uint32_t number) {
    disk_device *device = &store->devices[number];
    const disk_loaded *loaded = device->loaded;
    if (!device->loaded_ids) begin(store, number);
    if (!device->loaded_ids) return; /* no memory now */
    uint32_t rows = 0;
    while (device->loaded_segment < loaded->segment_count) {
        const disk_loaded_segment *segment = &loaded->segments[device->loaded_segment];
        uint16_t id = device->loaded_ids[device->loaded_segment];
        if (device->loaded_record == 0) take_classes(store, device, segment);
        while (id != DISK_NO_SEGMENT && device->loaded_record < segment->record_count) {
            if (rows++ == DISK_MERGE_ROWS) return;
            take_row(store, device, id, segment, &segment->records[device->loaded_record++]);
        }
        device->loaded_segment++;
        device->loaded_record = 0;
    }
    finish(store, number);
}
