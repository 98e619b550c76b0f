/* Puts and gets: what is refused, what is under way, what ends it.
 *
 * An operation belongs to its queue's threads from submission until it comes back.  Its caller may
 * be told earlier that it is late; then the memory is not the caller's again before a second
 * completion says so, because the device may still write there.
 *
 * What comes back is looked for in the index by name and sequence number: meanwhile the entry may
 * have been dropped, or be another one's.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "checksum.h"
#include "disk_private.h"
#include "store_policy.h"

#define READ_FAILURES_MAX 4 /* in a row; then the device is off until probing succeeds */

disk_operation *disk_operation_take(disk_store *store) {
    /* Each that is under way may still complete twice. */
    if (store->free_operation == DISK_NONE ||
        store->completions_count + 2 * (store->live_operations + 1) > 4 * DISK_OPERATIONS_MAX)
        return NULL;
    uint32_t number = store->free_operation;
    disk_operation *operation = &store->operations[number];
    store->free_operation = operation->next_free;
    store->live_operations++;
    *operation = (disk_operation){
        .state = OPERATION_LIVE,
        .segment = DISK_NO_SEGMENT,
        .begun_ns = store->now_ns,
        .head = (disk_record_block *)(store->heads + (size_t)number * DISK_UNIT_BYTES)};
    operation->request.owner = operation;
    return operation;
}

void disk_operation_free(disk_store *store, disk_operation *operation) {
    operation->state = OPERATION_FREE;
    operation->next_free = store->free_operation;
    store->free_operation = (uint32_t)(operation - store->operations);
    store->live_operations--;
}

static void segment_name(const disk_store *store, uint16_t segment, disk_segment_name *name) {
    const disk_segment *from = &store->segments[segment];
    const disk_device *device = &store->devices[from->device];
    *name = (disk_segment_name){.generation = from->generation,
                                .segment_bytes = device->segment_bytes,
                                .number = from->number};
    memcpy(name->store_id, device->store_id, sizeof name->store_id);
}

static void set_class(const disk_store *store, disk_operation *operation) {
    const disk_class_book *kind = &store->classes[operation->object.class_id];
    memcpy(operation->name_space, kind->name_space, sizeof operation->name_space);
    operation->group = kind->group;
}

static void submit(disk_store *store, disk_operation *operation, uint32_t kind) {
    disk_segment *segment = &store->segments[operation->segment];
    disk_device *device = &store->devices[segment->device];
    uint64_t bytes = disk_record_units(operation->object.length_bytes) * DISK_UNIT_BYTES;
    operation->transfer_bytes = bytes;
    device->in_flight_bytes += bytes;
    if (kind == DISK_REQUEST_READ) {
        segment->readers++;
        store->stats.read_queue_bytes += bytes;
    } else {
        segment->writers++;
        segment->is_dirty = 1;
        store->stats.write_queue_bytes += bytes;
    }
    disk_request *request = &operation->request;
    request->kind = kind;
    request->descriptor = segment->file;
    request->offset = (uint64_t)operation->start_unit * DISK_UNIT_BYTES;
    request->parts[0] = (struct iovec){operation->head, DISK_UNIT_BYTES};
    request->parts[1] = (struct iovec){operation->bytes, bytes - DISK_UNIT_BYTES};
    request->part_count = 2;
    disk_queue_submit(device->queue, request);
}

static void leave_segment(disk_store *store, const disk_operation *operation) {
    disk_segment *segment = &store->segments[operation->segment];
    store->devices[segment->device].in_flight_bytes -= operation->transfer_bytes;
    if (operation->request.kind == DISK_REQUEST_READ) {
        segment->readers--;
        store->stats.read_queue_bytes -= operation->transfer_bytes;
    } else {
        segment->writers--;
        store->stats.write_queue_bytes -= operation->transfer_bytes;
    }
}

/* The entry an operation is about, if it is still the same. */
static uint32_t entry_of(const disk_store *store, const disk_operation *operation,
                         uint64_t sequence) {
    const disk_object *object = &operation->object;
    uint32_t at = disk_index_find(&store->index, object->class_id, object->key, object->shard);
    return at != DISK_NONE && store->index.entries[at].sequence == sequence ? at : DISK_NONE;
}

/* ---- writing ---- */

void disk_write_record(disk_store *store, disk_operation *operation, uint16_t segment,
                       uint32_t start_unit) {
    disk_device *device = &store->devices[store->segments[segment].device];
    const disk_object *object = &operation->object;
    const disk_class_book *kind = &store->classes[object->class_id];
    operation->segment = segment;
    operation->start_unit = start_unit;
    operation->sequence = ++device->sequence;
    segment_name(store, segment, &operation->name);
    memset(operation->head, 0, DISK_UNIT_BYTES);
    disk_record_block *head = operation->head;
    *head = (disk_record_block){.magic = DISK_MAGIC_RECORD,
                                .version = DISK_FORMAT_VERSION,
                                .kind = DISK_KIND_OBJECT,
                                .generation = operation->name.generation,
                                .sequence = operation->sequence,
                                .segment = operation->name.number,
                                .start_unit = start_unit,
                                .group = kind->group,
                                .shard = (uint16_t)object->shard,
                                .shard_count = (uint16_t)kind->shard_count,
                                .length_bytes = object->length_bytes,
                                .sum = object->sum,
                                .sum_kind = DISK_SUM_LEAVES,
                                .retention = object->retention,
                                .expires_s = object->expires_s,
                                .depth_grains = object->depth_grains,
                                .tenant_tag = object->tenant_tag,
                                .stored_s = store->now_s};
    memcpy(head->store_id, operation->name.store_id, sizeof head->store_id);
    memcpy(head->name_space, kind->name_space, sizeof head->name_space);
    memcpy(head->key, object->key, sizeof head->key);
    memcpy(head->model, kind->model, sizeof head->model);
    DISK_SEAL(head);
    uint64_t bytes = disk_record_units(object->length_bytes) * DISK_UNIT_BYTES;
    store->stats.written_bytes_total += bytes;
    store->stats.day_bytes += bytes;
    submit(store, operation, DISK_REQUEST_WRITE);
}

static int check_put(disk_store *store, const disk_object *object, const void *bytes) {
    if (object->class_id >= DISK_CLASSES_MAX || !store->classes[object->class_id].shard_count ||
        object->shard >= store->classes[object->class_id].shard_count ||
        object->length_bytes == 0 || (uintptr_t)bytes % DISK_UNIT_BYTES) {
        store->stats.refused_bad_total++;
        return DISK_BAD_REQUEST;
    }
    if (object->retention == STORE_RETAIN_NONE || object->retention >= STORE_RETENTIONS ||
        (object->expires_s && object->expires_s <= store->now_s)) {
        store->stats.refused_not_wanted_total++;
        return DISK_NOT_WANTED;
    }
    return DISK_OK;
}

/* A second put of the same is no write; the more lasting terms hold until the daemon ends. */
static int is_stored(disk_store *store, const disk_object *object) {
    uint32_t at = disk_index_find(&store->index, object->class_id, object->key, object->shard);
    if (at == DISK_NONE) return 0;
    disk_entry *entry = &store->index.entries[at];
    if (entry->expires_s && entry->expires_s <= store->now_s && entry->state == DISK_ENTRY_READY) {
        disk_remove_entry(store, at);
        store->stats.expired_total++;
        return 0;
    }
    if (object->retention > entry->retention) entry->retention = (uint8_t)object->retention;
    if (!object->expires_s || (entry->expires_s && object->expires_s > entry->expires_s))
        entry->expires_s = object->expires_s;
    store->stats.refused_exists_total++;
    return 1;
}

static uint64_t namespace_bytes(const disk_store *store, uint32_t class_id) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < DISK_CLASSES_MAX; i++)
        if (store->classes[i].shard_count &&
            memcmp(store->classes[i].name_space, store->classes[class_id].name_space, 16) == 0)
            bytes += store->classes[i].bytes;
    return bytes;
}

static int check_limits(disk_store *store, const disk_object *object) {
    const disk_settings *settings = &store->settings;
    uint64_t bytes = disk_record_units(object->length_bytes) * DISK_UNIT_BYTES;
    if (settings->namespace_bytes &&
        namespace_bytes(store, object->class_id) + object->length_bytes >
            settings->namespace_bytes) {
        store->stats.refused_over_quota_total++;
        return DISK_OVER_QUOTA;
    }
    if (settings->day_bytes && store->stats.day_bytes + bytes > settings->day_bytes) {
        store->stats.refused_over_budget_total++;
        return DISK_OVER_BUDGET;
    }
    if (store->index.count == store->index.capacity) {
        uint32_t device = store->turn++ % store->device_count;
        if (store->devices[device].victim == DISK_NO_SEGMENT) disk_reclaim_oldest(store, device, 0);
        store->stats.refused_index_full_total++;
        return DISK_INDEX_FULL;
    }
    return DISK_OK;
}

/* The least busy device that has a place; enum disk_status. */
static int find_place(disk_store *store, uint64_t length_bytes, uint16_t *segment,
                      uint32_t *start_unit) {
    int status = DISK_UNAVAILABLE;
    uint32_t tried = 0, first = store->turn++;
    for (uint32_t round = 0; round < store->device_count; round++) {
        uint32_t best = DISK_NONE;
        for (uint32_t i = 0; i < store->device_count; i++) {
            uint32_t number = (first + i) % store->device_count;
            const disk_device *device = &store->devices[number];
            if (tried >> number & 1 || device->state != DISK_ON) continue;
            if (best == DISK_NONE || device->in_flight_bytes < store->devices[best].in_flight_bytes)
                best = number;
        }
        if (best == DISK_NONE) break;
        tried |= 1u << best;
        uint64_t units = store->devices[best].segment_units;
        if (disk_record_units(length_bytes) + 3 > units) { /* header, table, trailer */
            if (status == DISK_UNAVAILABLE) status = DISK_TOO_LARGE;
            continue;
        }
        *segment = disk_append_place(store, best, length_bytes, 0, start_unit);
        if (*segment != DISK_NO_SEGMENT) return DISK_OK;
        status = DISK_BUSY;
    }
    if (status == DISK_UNAVAILABLE) store->stats.refused_unavailable_total++;
    if (status == DISK_TOO_LARGE) store->stats.refused_too_large_total++;
    if (status == DISK_BUSY) store->stats.refused_busy_total++;
    return status;
}

int disk_put(disk_store *store, const disk_object *object, const void *bytes, uint64_t token) {
    int status = check_put(store, object, bytes);
    if (status != DISK_OK) return status;
    if (object->length_bytes > UINT32_MAX) {
        store->stats.refused_too_large_total++;
        return DISK_TOO_LARGE;
    }
    if (is_stored(store, object)) return DISK_EXISTS;
    status = check_limits(store, object);
    if (status != DISK_OK) return status;
    uint16_t segment;
    uint32_t start_unit;
    disk_operation *operation = disk_operation_take(store);
    if (!operation) {
        store->stats.refused_busy_total++;
        return DISK_BUSY;
    }
    status = find_place(store, object->length_bytes, &segment, &start_unit);
    if (status != DISK_OK) {
        disk_operation_free(store, operation);
        return status;
    }
    operation->kind = OPERATION_PUT;
    operation->object = *object;
    operation->bytes = (void *)(uintptr_t)bytes;
    operation->token = token;
    operation->deadline_ns = store->now_ns + store->settings.deadline_ms * NS_PER_MS;
    set_class(store, operation);
    disk_device *device = &store->devices[store->segments[segment].device];
    disk_entry entry = {.sequence = device->sequence + 1, /* what disk_write_record gives it */
                        .length_bytes = (uint32_t)object->length_bytes,
                        .start_unit = start_unit,
                        .expires_s = object->expires_s,
                        .class_id = (uint16_t)object->class_id,
                        .segment = segment,
                        .shard = (uint8_t)object->shard,
                        .retention = (uint8_t)object->retention,
                        .state = DISK_ENTRY_WRITING};
    memcpy(entry.key, object->key, sizeof entry.key);
    disk_index_add(&store->index, &entry);
    store->classes[object->class_id].objects++;
    store->classes[object->class_id].bytes += object->length_bytes;
    int64_t allowed = (int64_t)(object->length_bytes * DISK_MOVE_PERCENT / 100);
    int64_t added =
        (int64_t)(disk_record_units(object->length_bytes) * DISK_UNIT_BYTES - object->length_bytes);
    device->move_credit_bytes += allowed - added;
    if (device->move_credit_bytes > (int64_t)device->segment_bytes)
        device->move_credit_bytes = (int64_t)device->segment_bytes;
    if (device->move_credit_bytes < -(int64_t)device->segment_bytes)
        device->move_credit_bytes = -(int64_t)device->segment_bytes;
    disk_write_record(store, operation, segment, start_unit);
    return DISK_OK;
}

static uint32_t put_ended(disk_store *store, disk_operation *operation) {
    uint32_t at = entry_of(store, operation, operation->sequence);
    if (operation->request.result == 0) {
        store->stats.put_total++;
        store->stats.put_bytes_total += operation->object.length_bytes;
        store->stats.put_us_total += (store->now_ns - operation->begun_ns) / 1000;
        if (at != DISK_NONE) disk_entry_ready(store, at);
        return DISK_OK;
    }
    store->stats.write_failed_total++;
    if (at != DISK_NONE) disk_remove_entry(store, at);
    return DISK_FAILED;
}

/* ---- reading ---- */

/* On the queue's thread: what came is what was asked for, and whole. */
static int verify(disk_request *request) {
    const disk_operation *operation = request->owner;
    const disk_record_block *head = operation->head;
    const disk_object *object = &operation->object;
    if (!disk_is_record(head, &operation->name, operation->start_unit) ||
        head->kind != DISK_KIND_OBJECT || head->sequence != operation->sequence ||
        memcmp(head->name_space, operation->name_space, sizeof head->name_space) != 0 ||
        memcmp(head->key, object->key, sizeof head->key) != 0 || head->group != operation->group ||
        head->shard != object->shard || head->length_bytes != object->length_bytes ||
        head->sum_kind != DISK_SUM_LEAVES)
        return -EBADMSG;
    return checksum_bytes(operation->bytes, head->length_bytes) == head->sum ? 0 : -EBADMSG;
}

void disk_read_record(disk_store *store, disk_operation *operation, uint32_t at, void *target) {
    const disk_entry *entry = &store->index.entries[at];
    operation->segment = entry->segment;
    operation->start_unit = entry->start_unit;
    operation->sequence = entry->sequence;
    operation->bytes = target;
    operation->object = (disk_object){.class_id = entry->class_id,
                                      .shard = entry->shard,
                                      .retention = entry->retention,
                                      .expires_s = entry->expires_s,
                                      .length_bytes = entry->length_bytes};
    memcpy(operation->object.key, entry->key, sizeof entry->key);
    segment_name(store, entry->segment, &operation->name);
    set_class(store, operation);
    operation->request.work = verify;
    submit(store, operation, DISK_REQUEST_READ);
}

int disk_get(disk_store *store, uint32_t class_id, const uint8_t *key, uint32_t shard, void *target,
             uint64_t capacity, uint32_t deadline_ms, uint64_t token) {
    if (class_id >= DISK_CLASSES_MAX || (uintptr_t)target % DISK_UNIT_BYTES ||
        capacity % DISK_UNIT_BYTES) {
        store->stats.refused_bad_total++;
        return DISK_BAD_REQUEST;
    }
    uint32_t at = disk_index_find(&store->index, class_id, key, shard);
    const disk_entry *entry = at == DISK_NONE ? NULL : &store->index.entries[at];
    if (!entry || entry->state != DISK_ENTRY_READY ||
        (entry->expires_s && entry->expires_s <= store->now_s)) {
        store->stats.absent_total++;
        return DISK_ABSENT;
    }
    if (!disk_device_is_readable(&store->devices[store->segments[entry->segment].device])) {
        store->stats.refused_unavailable_total++;
        return DISK_UNAVAILABLE;
    }
    if (disk_units(entry->length_bytes) * DISK_UNIT_BYTES > capacity) {
        store->stats.refused_bad_total++;
        return DISK_BAD_REQUEST;
    }
    disk_operation *operation = disk_operation_take(store);
    if (!operation) {
        store->stats.refused_busy_total++;
        return DISK_BUSY;
    }
    operation->kind = OPERATION_GET;
    operation->token = token;
    if (deadline_ms > store->settings.deadline_ms) deadline_ms = store->settings.deadline_ms;
    operation->deadline_ns = store->now_ns + deadline_ms * NS_PER_MS;
    disk_read_record(store, operation, at, target);
    return DISK_OK;
}

static uint32_t get_ended(disk_store *store, disk_operation *operation) {
    disk_device *device = &store->devices[store->segments[operation->segment].device];
    uint32_t at = entry_of(store, operation, operation->sequence);
    int result = operation->request.result;
    if (result == 0) {
        device->read_failures = 0;
        operation->object.sum = operation->head->sum;
        operation->object.depth_grains = operation->head->depth_grains;
        operation->object.tenant_tag = operation->head->tenant_tag;
        if (at != DISK_NONE && store->index.entries[at].uses < 3) store->index.entries[at].uses++;
        if (operation->kind == OPERATION_MOVE_READ) return DISK_OK;
        store->stats.get_total++;
        store->stats.get_bytes_total += operation->object.length_bytes;
        store->stats.get_us_total += (store->now_ns - operation->begun_ns) / 1000;
        return DISK_OK;
    }
    if (result == -ECANCELED) return DISK_FAILED;
    if (at != DISK_NONE) disk_remove_entry(store, at);
    if (result == -EBADMSG || result == -ENODATA) {
        store->stats.damaged_total++;
        return DISK_DAMAGED;
    }
    store->stats.read_failed_total++;
    if (++device->read_failures >= READ_FAILURES_MAX)
        disk_device_fail(store, (uint32_t)(device - store->devices), DISK_OFF, "reading failed",
                         -result);
    return DISK_FAILED;
}

/* ---- both ---- */

static void write_failed(disk_store *store, const disk_operation *operation) {
    int result = operation->request.result;
    if (result == 0 || result == -ECANCELED) return;
    disk_segment *segment = &store->segments[operation->segment];
    disk_device_fail(store, segment->device, DISK_READ_ONLY, "writing failed", -result);
    /* What was written behind the hole would be out of reach of a walk, but not of a table. */
    if (segment->state == SEGMENT_ACTIVE) disk_seal_segment(store, operation->segment);
}

void disk_transfer_ended(disk_store *store, disk_operation *operation) {
    leave_segment(store, operation);
    int was_late = operation->state == OPERATION_LATE;
    if (was_late) store->devices[store->segments[operation->segment].device].late_count--;
    int is_write = operation->request.kind == DISK_REQUEST_WRITE;
    if (is_write) write_failed(store, operation);
    if (operation->kind == OPERATION_MOVE_READ) get_ended(store, operation);
    if (operation->kind == OPERATION_MOVE_READ || operation->kind == OPERATION_MOVE_WRITE) {
        operation->state = OPERATION_LIVE;
        disk_move_ended(store, operation);
        return;
    }
    uint32_t status = is_write ? put_ended(store, operation) : get_ended(store, operation);
    disk_complete(store, operation, was_late ? DISK_RELEASED : status);
    disk_operation_free(store, operation);
}

void disk_apply_deadlines(disk_store *store) {
    uint64_t patience_ns = store->settings.deadline_ms * NS_PER_MS;
    for (uint32_t i = 0; store->live_operations && i < DISK_OPERATIONS_MAX; i++) {
        disk_operation *operation = &store->operations[i];
        if (operation->state == OPERATION_FREE) continue;
        uint32_t number = store->segments[operation->segment].device;
        int is_callers = operation->kind == OPERATION_PUT || operation->kind == OPERATION_GET;
        int is_hanging = store->now_ns >= operation->begun_ns + patience_ns;
        int is_late = is_callers ? store->now_ns >= operation->deadline_ns : is_hanging;
        if (operation->state == OPERATION_LIVE && is_late) {
            operation->state = OPERATION_LATE;
            store->devices[number].late_count++;
            store->stats.late_total++;
            if (is_callers) disk_complete(store, operation, DISK_LATE);
        }
        if (is_hanging && !store->devices[number].is_hanging) {
            disk_device_fail(store, number, DISK_OFF, "it does not answer", ETIMEDOUT);
            store->devices[number].is_hanging = 1;
        }
    }
}
