/* Giving segments up, oldest first.
 *
 * Everything in a segment goes at once: records nobody asked for and whose class is short are
 * dropped; `long` and `pinned` ones, and those read since they were written (a second chance), are
 * moved to the segment being written, as long as the writes this adds stay under DISK_MOVE_PERCENT
 * of what was put.  The allowance is saved up with each put, at most a segment's worth, and heads
 * and tables are paid from it too.  What cannot be paid is dropped, so giving up always ends.
 *
 * A record stays readable where it was until its copy is written; the copy is synced before the old
 * place is written over (disk_job.c).
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "disk_private.h"
#include "store_policy.h"

static int is_long(const disk_entry *entry) {
    return entry->retention >= STORE_RETAIN_LONG;
}

static int has_expired(const disk_store *store, const disk_entry *entry) {
    return entry->expires_s && entry->expires_s <= store->now_s;
}

static void drop(disk_store *store, uint32_t at) {
    store->stats.reclaimed_objects_total++;
    store->stats.reclaimed_long_total += is_long(&store->index.entries[at]);
    disk_remove_entry(store, at);
}

void disk_reclaim_begin(disk_store *store, uint16_t number, int is_dropped) {
    disk_segment *segment = &store->segments[number];
    segment->state = SEGMENT_RECLAIMING;
    store->devices[segment->device].victim = number;
    store->stats.reclaimed_segments_total++;
    uint32_t at = store->index.segment_heads[number];
    while (at != DISK_NONE) {
        const disk_entry *entry = &store->index.entries[at];
        uint32_t next = entry->next_of_segment;
        if (is_dropped || has_expired(store, entry) || (!is_long(entry) && !entry->uses))
            drop(store, at);
        at = next;
    }
}

int disk_reclaim_oldest(disk_store *store, uint32_t number, int is_dropped) {
    uint16_t oldest = DISK_NO_SEGMENT;
    const disk_device *device = &store->devices[number];
    if (device->victim != DISK_NO_SEGMENT || device->state != DISK_ON) return 0;
    for (uint32_t i = 0; i < store->segments_end; i++) {
        const disk_segment *segment = &store->segments[i];
        if (segment->state != SEGMENT_SEALED || segment->device != number) continue;
        if (oldest == DISK_NO_SEGMENT || segment->generation < store->segments[oldest].generation)
            oldest = (uint16_t)i;
    }
    if (oldest == DISK_NO_SEGMENT) return 0;
    disk_reclaim_begin(store, oldest, is_dropped);
    return 1;
}

/* The long ones are first in line for what may be moved. */
static uint32_t pick(const disk_store *store, uint16_t victim) {
    uint32_t first = store->index.segment_heads[victim];
    for (uint32_t at = first; at != DISK_NONE; at = store->index.entries[at].next_of_segment)
        if (is_long(&store->index.entries[at])) return at;
    return first;
}

static int has_buffer(disk_store *store, uint32_t number, uint64_t bytes) {
    if (store->move_buffer_bytes[number] >= bytes) return 1;
    free(store->move_buffers[number]);
    store->move_buffers[number] = aligned_alloc(DISK_UNIT_BYTES, bytes);
    store->move_buffer_bytes[number] = store->move_buffers[number] ? bytes : 0;
    return store->move_buffers[number] != NULL;
}

enum move { MOVE_BEGUN, MOVE_LATER, MOVE_REFUSED };

static enum move begin_move(disk_store *store, uint32_t number, uint32_t at) {
    disk_device *device = &store->devices[number];
    const disk_entry *entry = &store->index.entries[at];
    uint64_t bytes = disk_record_units(entry->length_bytes) * DISK_UNIT_BYTES;
    if (device->move_credit_bytes < (int64_t)bytes ||
        (store->settings.day_bytes && store->stats.day_bytes + bytes > store->settings.day_bytes) ||
        !has_buffer(store, number, bytes))
        return MOVE_REFUSED;
    disk_operation *operation = disk_operation_take(store);
    if (!operation) return MOVE_LATER;
    operation->kind = OPERATION_MOVE_READ;
    operation->from_sequence = entry->sequence;
    device->moves_under_way++;
    disk_read_record(store, operation, at, store->move_buffers[number]);
    return MOVE_BEGUN;
}

void disk_reclaim_poll(disk_store *store, uint32_t number) {
    disk_device *device = &store->devices[number];
    if (device->victim == DISK_NO_SEGMENT || device->state != DISK_ON) return;
    disk_segment *segment = &store->segments[device->victim];
    while (!device->moves_under_way && store->index.segment_heads[device->victim] != DISK_NONE) {
        uint32_t at = pick(store, device->victim);
        enum move move = begin_move(store, number, at);
        if (move == MOVE_LATER) return;
        if (move == MOVE_REFUSED) drop(store, at);
    }
    if (device->moves_under_way || segment->readers || segment->writers) return;
    segment->state = SEGMENT_FREE;
    device->victim = DISK_NO_SEGMENT;
}

static uint32_t moving_entry(const disk_store *store, const disk_operation *operation) {
    const disk_object *object = &operation->object;
    uint32_t at = disk_index_find(&store->index, object->class_id, object->key, object->shard);
    if (at == DISK_NONE || store->index.entries[at].sequence != operation->from_sequence)
        return DISK_NONE;
    return at;
}

static int write_copy(disk_store *store, disk_operation *operation) {
    uint16_t from = operation->segment, to;
    uint32_t start_unit, device = store->segments[from].device;
    if (operation->request.result != 0 || moving_entry(store, operation) == DISK_NONE) return 0;
    to = disk_append_place(store, device, operation->object.length_bytes, 1, &start_unit);
    if (to == DISK_NO_SEGMENT) return 0;
    operation->kind = OPERATION_MOVE_WRITE;
    operation->begun_ns = store->now_ns;
    operation->request.work = NULL;
    store->devices[device].move_credit_bytes -= (int64_t)operation->transfer_bytes;
    disk_write_record(store, operation, to, start_unit);
    return 1;
}

void disk_move_ended(disk_store *store, disk_operation *operation) {
    uint32_t device = store->segments[operation->segment].device;
    if (operation->kind == OPERATION_MOVE_READ && write_copy(store, operation)) return;
    uint32_t at = moving_entry(store, operation);
    if (at != DISK_NONE) {
        if (operation->kind == OPERATION_MOVE_WRITE && operation->request.result == 0) {
            disk_index_move(&store->index, at, operation->segment, operation->start_unit,
                            operation->sequence);
            store->devices[device].has_unsynced_moves = 1;
            store->stats.moved_total++;
            store->stats.moved_bytes_total += operation->object.length_bytes;
        } else {
            drop(store, at);
        }
    }
    store->devices[device].moves_under_way--;
    disk_operation_free(store, operation);
}

static void remove_file(disk_store *store, uint32_t number, uint16_t chosen) {
    disk_job *job = disk_job_make(store, number, JOB_REMOVE);
    if (!job) return;
    disk_segment *segment = &store->segments[chosen];
    job->segment = chosen;
    job->file = segment->file;
    job->number = segment->number;
    segment->state = SEGMENT_REMOVING;
    disk_job_submit(store, number, job);
}

/* One segment less: an empty one, else the oldest, with all that is in it. */
void disk_give_back(disk_store *store, uint32_t number) {
    disk_device *device = &store->devices[number];
    if (device->kinds_under_way >> JOB_REMOVE & 1) return;
    for (uint32_t i = 0; i < store->segments_end; i++) {
        const disk_segment *segment = &store->segments[i];
        if (segment->device != number || segment->state != SEGMENT_FREE || segment->readers)
            continue;
        remove_file(store, number, (uint16_t)i);
        return;
    }
    disk_reclaim_oldest(store, number, 1);
}
