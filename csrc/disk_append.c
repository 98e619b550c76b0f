/* Writing: one segment of each device is written from front to back, another is ready behind it.
 *
 * A record is given its place and its sequence number here, in that order within the segment, and
 * many may be under way at once.  Room for the table is kept at the end, so that a full segment can
 * always be sealed.  Files are made as they are needed, up to the device's part of the size; then
 * the oldest segment is given up (disk_reclaim.c).
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "checksum.h"
#include "disk_private.h"

void disk_activate(disk_store *store, uint32_t number) {
    disk_device *device = &store->devices[number];
    if (device->active != DISK_NO_SEGMENT || device->ready == DISK_NO_SEGMENT) return;
    device->active = device->ready;
    device->ready = DISK_NO_SEGMENT;
    store->segments[device->active].state = SEGMENT_ACTIVE;
}

void disk_seal_segment(disk_store *store, uint16_t number) {
    disk_segment *segment = &store->segments[number];
    disk_device *device = &store->devices[segment->device];
    segment->state = SEGMENT_SEALING;
    device->sealing_count++;
    if (device->active == number) device->active = DISK_NO_SEGMENT;
}

static int has_room(const disk_store *store, const disk_device *device, const disk_segment *segment,
                    uint64_t units) {
    uint64_t records = segment->appended + 1;
    uint64_t classes = records < store->class_count ? records : store->class_count;
    return segment->used_units + units + disk_table_units(classes, records) + 1 <=
           device->segment_units;
}

/* While a segment is being given up, room for what may move out of it is not given to puts. */
static uint64_t kept_for_moves(const disk_store *store, const disk_device *device) {
    if (device->victim == DISK_NO_SEGMENT || device->move_credit_bytes <= 0 ||
        store->index.segment_heads[device->victim] == DISK_NONE)
        return 0;
    uint64_t bytes = (uint64_t)device->move_credit_bytes;
    if (bytes > device->segment_bytes / 4) bytes = device->segment_bytes / 4;
    return bytes / DISK_UNIT_BYTES;
}

uint16_t disk_append_place(disk_store *store, uint32_t number, uint64_t length_bytes, int is_move,
                           uint32_t *start_unit) {
    disk_device *device = &store->devices[number];
    uint64_t units = disk_record_units(length_bytes);
    if (device->state != DISK_ON) return DISK_NO_SEGMENT;
    disk_activate(store, number);
    if (device->active == DISK_NO_SEGMENT) return DISK_NO_SEGMENT;
    if (!has_room(store, device, &store->segments[device->active], units)) {
        if (device->ready == DISK_NO_SEGMENT) return DISK_NO_SEGMENT;
        disk_seal_segment(store, device->active);
        disk_activate(store, number);
    }
    disk_segment *segment = &store->segments[device->active];
    uint64_t kept = is_move ? 0 : kept_for_moves(store, device);
    if (!has_room(store, device, segment, units + kept)) return DISK_NO_SEGMENT;
    *start_unit = segment->used_units;
    segment->used_units += (uint32_t)units;
    segment->appended++;
    return device->active;
}

/* ---- sealing ---- */

static uint32_t row_of_class(disk_class_row *rows, uint32_t *count, const disk_class_book *kind,
                             uint16_t *row_of, uint32_t class_id) {
    if (row_of[class_id] == DISK_NO_SEGMENT) {
        row_of[class_id] = (uint16_t)*count;
        disk_class_row *row = &rows[(*count)++];
        *row = (disk_class_row){.group = kind->group, .shard_count = kind->shard_count};
        memcpy(row->name_space, kind->name_space, sizeof row->name_space);
        memcpy(row->model, kind->model, sizeof row->model);
    }
    return row_of[class_id];
}

static void fill_table(const disk_store *store, uint16_t number, disk_class_row *classes,
                       uint32_t *class_count, disk_record_row *records, uint32_t *record_count) {
    uint16_t row_of[DISK_CLASSES_MAX];
    memset(row_of, 0xFF, sizeof row_of);
    uint32_t at = store->index.segment_heads[number];
    for (; at != DISK_NONE; at = store->index.entries[at].next_of_segment) {
        const disk_entry *entry = &store->index.entries[at];
        if (entry->state != DISK_ENTRY_READY) continue;
        uint32_t row = row_of_class(classes, class_count, &store->classes[entry->class_id], row_of,
                                    entry->class_id);
        records[*record_count] = (disk_record_row){.sequence = entry->sequence,
                                                   .length_bytes = entry->length_bytes,
                                                   .start_unit = entry->start_unit,
                                                   .expires_s = entry->expires_s,
                                                   .class_row = (uint16_t)row,
                                                   .shard = entry->shard,
                                                   .retention = entry->retention};
        memcpy(records[(*record_count)++].key, entry->key, sizeof entry->key);
    }
}

/* Makes the job's table and trailer; 0 when memory is short. */
static int make_table(const disk_store *store, uint16_t number, disk_job *job) {
    const disk_segment *segment = &store->segments[number];
    disk_class_row *classes = malloc(DISK_CLASSES_MAX * sizeof *classes);
    disk_record_row *records = malloc((segment->appended + 1) * sizeof *records);
    uint32_t class_count = 0, record_count = 0;
    int is_made = classes && records;
    if (is_made) fill_table(store, number, classes, &class_count, records, &record_count);
    /* There is room for all of them, unless the heads in the file were made up. */
    uint64_t room = store->devices[segment->device].segment_units - 1 - segment->used_units;
    while (record_count && disk_table_units(class_count, record_count) > room) record_count--;
    if (disk_table_units(class_count, record_count) > room) class_count = 0;
    uint64_t units = disk_table_units(class_count, record_count);
    job->byte_count = (units + 1) * DISK_UNIT_BYTES;
    job->bytes = is_made ? aligned_alloc(DISK_UNIT_BYTES, job->byte_count) : NULL;
    is_made = job->bytes != NULL;
    if (is_made) {
        memset(job->bytes, 0, job->byte_count);
        uint64_t classes_bytes = class_count * sizeof *classes;
        uint64_t records_bytes = record_count * sizeof *records;
        memcpy(job->bytes, classes, classes_bytes);
        memcpy(job->bytes + classes_bytes, records, records_bytes);
        job->offset = (uint64_t)segment->used_units * DISK_UNIT_BYTES;
        disk_trailer_block *trailer = (disk_trailer_block *)(job->bytes + units * DISK_UNIT_BYTES);
        *trailer = (disk_trailer_block){.magic = DISK_MAGIC_TRAILER,
                                        .version = DISK_FORMAT_VERSION,
                                        .number = segment->number,
                                        .generation = segment->generation,
                                        .table_offset = job->offset,
                                        .class_count = class_count,
                                        .record_count = record_count};
        trailer->table_check = checksum_crc32c(0, job->bytes, classes_bytes + records_bytes);
        memcpy(trailer->store_id, job->name.store_id, sizeof trailer->store_id);
        DISK_SEAL(trailer);
    }
    free(classes);
    free(records);
    return is_made;
}

static void seal_those_that_wait(disk_store *store, uint32_t number) {
    disk_device *device = &store->devices[number];
    uint32_t left = device->sealing_count;
    for (uint32_t i = 0; left && i < store->segments_end; i++) {
        disk_segment *segment = &store->segments[i];
        if (segment->state != SEGMENT_SEALING || segment->device != number) continue;
        left--;
        if (segment->writers || segment->is_job_under_way) continue;
        disk_job *job = disk_job_make(store, number, JOB_SEAL);
        if (!job) return;
        if (!make_table(store, (uint16_t)i, job)) {
            free(job);
            return;
        }
        job->segment = (uint16_t)i;
        job->file = segment->file;
        segment->is_job_under_way = 1;
        device->move_credit_bytes -= (int64_t)job->byte_count;
        store->stats.written_bytes_total += job->byte_count;
        store->stats.day_bytes += job->byte_count;
        disk_job_submit(store, number, job);
    }
}

/* ---- preparing ---- */

static uint32_t dirty_files(const disk_store *store, uint32_t number, int *files) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < store->segments_end && count < SYNC_FILES_MAX; i++) {
        const disk_segment *segment = &store->segments[i];
        if (segment->state != SEGMENT_NONE && segment->device == number && segment->is_dirty)
            files[count++] = segment->file;
    }
    return count;
}

static uint16_t find_free(const disk_store *store, uint32_t number) {
    for (uint32_t i = 0; i < store->segments_end; i++) {
        const disk_segment *segment = &store->segments[i];
        if (segment->state == SEGMENT_FREE && segment->device == number && !segment->readers &&
            !segment->must_go)
            return (uint16_t)i;
    }
    return DISK_NO_SEGMENT;
}

static void prepare(disk_store *store, uint32_t number, uint16_t chosen, int must_create) {
    disk_device *device = &store->devices[number];
    disk_job *job = disk_job_make(store, number, JOB_PREPARE);
    if (!job) return;
    job->bytes = aligned_alloc(DISK_UNIT_BYTES, DISK_UNIT_BYTES);
    job->files = malloc(SYNC_FILES_MAX * sizeof *job->files);
    if (must_create && job->bytes && job->files)
        chosen = disk_segment_add(store, number, device->next_number++, -1);
    if (!job->bytes || !job->files || chosen == DISK_NO_SEGMENT) {
        free(job->bytes);
        free(job->files);
        free(job);
        return;
    }
    memset(job->bytes, 0, DISK_UNIT_BYTES);
    disk_segment *segment = &store->segments[chosen];
    segment->state = SEGMENT_PREPARING;
    segment->generation = ++device->sequence;
    segment->used_units = 1;
    segment->appended = 0;
    if (device->has_unsynced_moves) job->file_count = dirty_files(store, number, job->files);
    device->has_unsynced_moves = 0;
    job->segment = chosen;
    job->must_create = must_create;
    job->file = segment->file;
    job->number = segment->number;
    job->name.generation = segment->generation;
    job->name.number = segment->number;
    job->day = store->day;
    job->day_bytes = store->stats.day_bytes / store->device_count;
    disk_job_submit(store, number, job);
}

static void keep_one_ready(disk_store *store, uint32_t number) {
    disk_device *device = &store->devices[number];
    if (device->ready != DISK_NO_SEGMENT || device->kinds_under_way >> JOB_PREPARE & 1) return;
    if (device->sealing_count >= SYNC_FILES_MAX - 1)
        return; /* all dirty ones must be synced first */
    uint16_t chosen = find_free(store, number);
    if (chosen != DISK_NO_SEGMENT) {
        prepare(store, number, chosen, 0);
    } else if (device->segment_count < device->segments_allowed && !device->has_no_room) {
        prepare(store, number, DISK_NO_SEGMENT, 1);
    } else if (device->victim == DISK_NO_SEGMENT) {
        disk_reclaim_oldest(store, number, 0);
    }
}

static void sync_what_is_dirty(disk_store *store, uint32_t number) {
    disk_device *device = &store->devices[number];
    if (store->now_ns < device->sync_ns || device->kinds_under_way >> JOB_SYNC & 1) return;
    device->sync_ns = store->now_ns + store->settings.sync_ms * NS_PER_MS;
    if (device->active == DISK_NO_SEGMENT || !store->segments[device->active].is_dirty) return;
    disk_job *job = disk_job_make(store, number, JOB_SYNC);
    if (!job) return;
    job->files = malloc(sizeof *job->files);
    if (!job->files) {
        free(job);
        return;
    }
    job->files[0] = store->segments[device->active].file;
    job->file_count = 1;
    job->segment = device->active;
    store->segments[device->active].is_dirty = 0;
    disk_job_submit(store, number, job);
}

void disk_append_poll(disk_store *store, uint32_t number) {
    disk_activate(store, number);
    seal_those_that_wait(store, number);
    keep_one_ready(store, number);
    sync_what_is_dirty(store, number);
}
