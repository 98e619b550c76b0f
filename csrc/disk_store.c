/* The disk tier's store: settings, the poll that drives everything, books and their audit.
 *
 * Which part does what:
 *
 *     disk_store     this file
 *     disk_device    states of a device, its jobs, healing
 *     disk_transfer  puts and gets
 *     disk_append    the segment being written, the next one, tables
 *     disk_reclaim   giving segments up, moving what is worth it
 *     disk_merge     taking in what was loaded
 *     disk_load, disk_job   what runs on a device's thread
 *     disk_queue, disk_ring threads and io_uring
 *     disk_index     where everything is
 *     disk_format    what stands in the files
 *     disk_io        the system
 *
 * One thread calls the store, and never waits for a device: it hands requests to queues and, in
 * disk_poll, takes in what came back, applies deadlines by the clock it is given, and lets each
 * device go on with what waits.  What is over is handed out as completions and events.
 */
#include "disk_store.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "disk_private.h"

#define COMPLETIONS_MAX  (4 * DISK_OPERATIONS_MAX)
#define INLINE_ROUNDS    1000 /* of a store without threads, in one poll */
#define SECONDS_OF_A_DAY 86400
#define NS_PER_S         1000000000ull

/* ---- opening ---- */

static uint64_t choose_segment_bytes(uint64_t device_bytes) {
    uint64_t bytes = 16ull << 20, most = 1ull << 30;
    while (bytes < most && bytes < device_bytes / 64) bytes *= 2;
    while (bytes > DISK_SEGMENT_BYTES_MIN && bytes > device_bytes / (2 * DISK_SEGMENTS_MIN))
        bytes /= 2;
    return bytes;
}

static const char *fill_settings(disk_settings *settings, uint32_t count) {
    if (count < 1 || count > DISK_DEVICES_MAX) return "name 1 to 16 folders";
    uint64_t device_bytes = settings->size_bytes / count;
    if (!settings->segment_bytes) settings->segment_bytes = choose_segment_bytes(device_bytes);
    if (settings->segment_bytes < DISK_SEGMENT_BYTES_MIN ||
        settings->segment_bytes % DISK_UNIT_BYTES || settings->segment_bytes > 2ull << 30)
        return "a segment has 64 KiB to 2 GiB, in steps of 4 KiB";
    if (device_bytes / settings->segment_bytes < DISK_SEGMENTS_MIN)
        return "the size holds fewer than 4 segments a folder; raise it";
    if (device_bytes / settings->segment_bytes > DISK_SEGMENTS_MAX / count)
        return "the size holds more than 16384 segments; make segments larger";
    if (settings->entries < 1 || settings->entries > 1u << 30)
        return "the index has 1 to 2^30 entries";
    if (settings->depth < 1 || settings->depth > DISK_DEPTH_MAX) return "the depth is 1 to 256";
    if (!settings->deadline_ms) settings->deadline_ms = 10000;
    if (!settings->sync_ms) settings->sync_ms = 1000;
    return NULL;
}

static int make_books(disk_store *store, const uint64_t *seed) {
    store->segments = calloc(DISK_SEGMENTS_MAX, sizeof *store->segments);
    store->operations = calloc(DISK_OPERATIONS_MAX, sizeof *store->operations);
    store->heads = aligned_alloc(DISK_UNIT_BYTES, (size_t)DISK_OPERATIONS_MAX * DISK_UNIT_BYTES);
    store->completions = calloc(COMPLETIONS_MAX, sizeof *store->completions);
    store->events = calloc(DISK_EVENTS_MAX, sizeof *store->events);
    store->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!store->segments || !store->operations || !store->heads || !store->completions ||
        !store->events || store->bell < 0 ||
        !disk_index_make(&store->index, store->settings.entries, DISK_SEGMENTS_MAX, seed))
        return 0;
    for (uint32_t i = 0; i < DISK_OPERATIONS_MAX; i++)
        store->operations[i].next_free = i + 1 < DISK_OPERATIONS_MAX ? i + 1 : DISK_NONE;
    return 1;
}

static int start_device(disk_store *store, uint32_t number, const char *path) {
    disk_device *device = &store->devices[number];
    snprintf(device->path, sizeof device->path, "%s", path);
    device->lock_file = -1;
    device->active = device->ready = device->victim = DISK_NO_SEGMENT;
    snprintf(device->reason, sizeof device->reason, "it is being loaded");
    device->queue = disk_queue_start(store->io, store->engine == DISK_ENGINE_INLINE, store->bell);
    return device->queue != NULL;
}

static void destroy(disk_store *store) {
    for (uint32_t i = 0; i < DISK_DEVICES_MAX; i++) {
        if (store->devices[i].queue) disk_queue_free(store->devices[i].queue);
        free(store->devices[i].loaded_ids);
        free(store->move_buffers[i]);
    }
    disk_index_free(&store->index);
    free(store->segments);
    free(store->operations);
    free(store->heads);
    free(store->completions);
    free(store->events);
    if (store->bell >= 0) close(store->bell);
    free(store);
}

disk_store *disk_open_over(const disk_io *io, uint32_t engine, const disk_settings *settings,
                           const char *const *paths, uint32_t count, const uint64_t *seed,
                           char *error, uint64_t error_bytes) {
    disk_settings filled = *settings;
    const char *wrong = fill_settings(&filled, count);
    for (uint32_t i = 0; !wrong && i < count; i++) {
        if (paths[i][0] != '/' || strlen(paths[i]) >= DISK_PATH_BYTES)
            wrong = "a path is absolute and shorter than 512 bytes";
        for (uint32_t j = 0; j < i; j++)
            if (strcmp(paths[i], paths[j]) == 0) wrong = "a path is named twice";
    }
    disk_store *store = wrong ? NULL : calloc(1, sizeof *store);
    if (!store) {
        snprintf(error, error_bytes, "%s", wrong ? wrong : "not enough memory");
        return NULL;
    }
    store->io = io;
    store->engine = engine;
    store->settings = filled;
    int is_made = make_books(store, seed);
    for (uint32_t i = 0; is_made && i < count; i++) is_made = start_device(store, i, paths[i]);
    store->device_count = count;
    if (is_made) return store;
    for (uint32_t i = 0; i < count; i++)
        if (store->devices[i].queue) disk_queue_stop(store->devices[i].queue, 1000);
    destroy(store);
    snprintf(error, error_bytes, "not enough memory, descriptors or threads for the disk tier");
    return NULL;
}

disk_store *disk_open(const disk_settings *settings, const char *const *paths, uint32_t count,
                      const uint64_t *seed, char *error, uint64_t error_bytes) {
    return disk_open_over(disk_io_system(), 0, settings, paths, count, seed, error, error_bytes);
}

/* ---- driving ---- */

static int is_busy(const disk_store *store) {
    int is_busy = store->live_operations > 0;
    for (uint32_t i = 0; i < store->device_count; i++) is_busy |= store->devices[i].jobs != NULL;
    return is_busy;
}

static void take_in(disk_store *store, uint32_t number) {
    disk_request *request = disk_queue_take(store->devices[number].queue);
    while (request) {
        disk_request *next = request->next;
        if (request->kind == DISK_REQUEST_JOB)
            disk_device_end_job(store, number, (disk_job *)request);
        else
            disk_transfer_ended(store, request->owner);
        request = next;
    }
}

static void sweep_expired(disk_store *store) {
    for (uint32_t i = 0; i < DISK_SWEEP_ENTRIES && i < store->index.capacity; i++) {
        store->sweep = (store->sweep + 1) % store->index.capacity;
        const disk_entry *entry = &store->index.entries[store->sweep];
        if (entry->state != DISK_ENTRY_READY || !entry->expires_s ||
            entry->expires_s > store->now_s)
            continue;
        store->stats.expired_total++;
        disk_remove_entry(store, store->sweep);
    }
}

void disk_poll(disk_store *store, uint64_t now_ns, uint32_t now_s) {
    uint64_t rings;
    if (read(store->bell, &rings, sizeof rings) < 0) {
        /* It did not ring: the caller polls for the time's sake. */
    }
    store->now_ns = now_ns;
    store->now_s = now_s;
    if (store->day != now_s / SECONDS_OF_A_DAY) {
        store->day = now_s / SECONDS_OF_A_DAY;
        store->stats.day_bytes = 0;
    }
    int rounds = store->engine == DISK_ENGINE_INLINE ? INLINE_ROUNDS : 1;
    for (int goes_on = 1; goes_on && rounds > 0; rounds--) {
        for (uint32_t i = 0; i < store->device_count; i++) take_in(store, i);
        disk_apply_deadlines(store);
        for (uint32_t i = 0; i < store->device_count; i++) disk_device_poll(store, i);
        goes_on = is_busy(store);
        for (uint32_t i = 0; i < store->device_count; i++)
            goes_on |= store->devices[i].loaded != NULL;
    }
    sweep_expired(store);
    /* What is left to take in does not ring again by itself. */
    const uint64_t one = 1;
    for (uint32_t i = 0; i < store->device_count; i++)
        if (store->devices[i].loaded && write(store->bell, &one, sizeof one) < 0) return;
}

int32_t disk_descriptor(const disk_store *store) {
    return store->bell;
}

int disk_is_loaded(const disk_store *store) {
    for (uint32_t i = 0; i < store->device_count; i++)
        if (store->devices[i].state == DISK_STARTING) return 0;
    return 1;
}

/* ---- closing ---- */

static uint64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

/* Takes in what comes back, without beginning anything new, until nothing is under way. */
static void drain(disk_store *store, uint64_t end_ns) {
    while (is_busy(store)) {
        uint64_t now_ns = monotonic_ns();
        if (now_ns >= end_ns) return;
        struct pollfd bell = {.fd = store->bell, .events = POLLIN};
        if (store->engine != DISK_ENGINE_INLINE)
            poll(&bell, 1, (int)((end_ns - now_ns) / NS_PER_MS) + 1);
        uint64_t rings;
        if (read(store->bell, &rings, sizeof rings) < 0) {
            /* Not yet. */
        }
        for (uint32_t i = 0; i < store->device_count; i++) take_in(store, i);
    }
}

static void save_device(disk_store *store, uint32_t number) {
    disk_device *device = &store->devices[number];
    if (device->state != DISK_ON) return;
    disk_device_write_marks(store, number);
    if (device->active == DISK_NO_SEGMENT) return;
    disk_job *job = disk_job_make(store, number, JOB_SYNC);
    int *files = malloc(sizeof *files);
    if (!job || !files) {
        free(job);
        free(files);
        return;
    }
    files[0] = store->segments[device->active].file;
    job->files = files;
    job->file_count = 1;
    job->segment = device->active;
    disk_job_submit(store, number, job);
}

static void close_files(disk_store *store) {
    for (uint32_t i = 0; i < store->segments_end; i++)
        if (store->segments[i].state != SEGMENT_NONE && store->segments[i].file >= 0)
            store->io->close(store->io->self, store->segments[i].file);
    for (uint32_t i = 0; i < store->device_count; i++) {
        disk_device *device = &store->devices[i];
        if (device->loaded) {
            if (device->loaded_ids) device->loaded->lock_file = -1; /* taken over already */
            disk_loaded_free(store->io, device->loaded, 1);
        }
        if (device->lock_file >= 0) store->io->close(store->io->self, device->lock_file);
    }
}

int disk_close(disk_store *store, uint32_t timeout_ms) {
    uint64_t end_ns = monotonic_ns() + timeout_ms * NS_PER_MS;
    drain(store, end_ns);
    for (uint32_t i = 0; i < store->device_count; i++) save_device(store, i);
    drain(store, end_ns);
    int have_ended = 1;
    for (uint32_t i = 0; i < store->device_count; i++) {
        uint64_t now_ns = monotonic_ns();
        uint32_t left_ms = now_ns < end_ns ? (uint32_t)((end_ns - now_ns) / NS_PER_MS) : 0;
        have_ended &= disk_queue_stop(store->devices[i].queue, left_ms);
    }
    if (!have_ended) return 0;
    for (uint32_t i = 0; i < store->device_count; i++) take_in(store, i);
    close_files(store);
    destroy(store);
    return 1;
}

/* ---- books ---- */

uint64_t disk_full_mask(const disk_store *store, uint32_t class_id) {
    uint32_t shards = store->classes[class_id].shard_count;
    return shards == 64 ? ~0ull : (1ull << shards) - 1;
}

void disk_complete(disk_store *store, const disk_operation *operation, uint32_t status) {
    uint64_t at = (store->completions_head + store->completions_count++) % COMPLETIONS_MAX;
    store->completions[at] = (disk_completion){.token = operation->token,
                                               .is_put = operation->kind == OPERATION_PUT,
                                               .status = status,
                                               .object = operation->object};
}

uint64_t disk_take_completions(disk_store *store, disk_completion *completions, uint64_t max) {
    uint64_t count = 0;
    while (count < max && store->completions_count) {
        completions[count++] = store->completions[store->completions_head];
        store->completions_head = (store->completions_head + 1) % COMPLETIONS_MAX;
        store->completions_count--;
    }
    return count;
}

void disk_announce(disk_store *store, uint32_t class_id, const uint64_t key[2], int is_removed) {
    if (store->events_count == DISK_EVENTS_MAX) {
        store->events_overflowed = 1;
        store->stats.events_lost_total += store->events_count;
        store->events_count = 0;
    }
    if (store->events_overflowed) return; /* a snapshot will be taken */
    uint64_t at = (store->events_head + store->events_count++) % DISK_EVENTS_MAX;
    store->events[at] = (disk_event){.class_id = class_id, .is_removed = (uint32_t)is_removed};
    memcpy(store->events[at].key, key, sizeof store->events[at].key);
}

uint64_t disk_take_events(disk_store *store, disk_event *events, uint64_t max, int *lost) {
    *lost = store->events_overflowed;
    if (store->events_overflowed) store->events_count = 0;
    store->events_overflowed = 0;
    uint64_t count = 0;
    while (count < max && store->events_count) {
        events[count++] = store->events[store->events_head];
        store->events_head = (store->events_head + 1) % DISK_EVENTS_MAX;
        store->events_count--;
    }
    return count;
}

static int is_readable(const disk_store *store, const disk_entry *entry) {
    return disk_device_is_readable(&store->devices[store->segments[entry->segment].device]);
}

void disk_entry_ready(disk_store *store, uint32_t at) {
    disk_entry *entry = &store->index.entries[at];
    entry->state = DISK_ENTRY_READY;
    uint64_t mask = disk_index_mask(&store->index, entry->class_id, (uint8_t *)entry->key, 0);
    if (mask == disk_full_mask(store, entry->class_id) && is_readable(store, entry))
        disk_announce(store, entry->class_id, entry->key, 0);
}

void disk_remove_entry(disk_store *store, uint32_t at) {
    const disk_entry *entry = &store->index.entries[at];
    disk_class_book *kind = &store->classes[entry->class_id];
    uint64_t mask = disk_index_mask(&store->index, entry->class_id, (const uint8_t *)entry->key, 0);
    if (mask == disk_full_mask(store, entry->class_id))
        disk_announce(store, entry->class_id, entry->key, 1);
    kind->objects--;
    kind->bytes -= entry->length_bytes;
    disk_index_remove(&store->index, at);
}

int disk_class(disk_store *store, const uint8_t *name_space, uint32_t group, uint32_t shard_count,
               const char *model) {
    int free_class = -1;
    if (shard_count < 1 || shard_count > DISK_SHARDS_MAX) return -1;
    for (int i = 0; i < DISK_CLASSES_MAX; i++) {
        disk_class_book *kind = &store->classes[i];
        if (!kind->shard_count) {
            if (free_class < 0) free_class = i;
        } else if (kind->group == group && memcmp(kind->name_space, name_space, 16) == 0) {
            return kind->shard_count == shard_count ? i : -1;
        }
    }
    if (free_class < 0) return -1;
    disk_class_book *kind = &store->classes[free_class];
    *kind = (disk_class_book){.group = group, .shard_count = shard_count};
    memcpy(kind->name_space, name_space, sizeof kind->name_space);
    snprintf(kind->model, sizeof kind->model, "%s", model);
    store->class_count++;
    return free_class;
}

int disk_class_read(const disk_store *store, uint32_t class_id, disk_class_facts *facts) {
    if (class_id >= DISK_CLASSES_MAX || !store->classes[class_id].shard_count) return 0;
    const disk_class_book *kind = &store->classes[class_id];
    *facts = (disk_class_facts){.group = kind->group,
                                .shard_count = kind->shard_count,
                                .objects = kind->objects,
                                .object_bytes = kind->bytes};
    memcpy(facts->name_space, kind->name_space, sizeof facts->name_space);
    memcpy(facts->model, kind->model, sizeof facts->model);
    return 1;
}

static int is_present(const disk_store *store, uint32_t class_id, const uint8_t *key) {
    if (disk_index_mask(&store->index, class_id, key, store->now_s) !=
        disk_full_mask(store, class_id))
        return 0;
    for (uint32_t shard = 0; shard < store->classes[class_id].shard_count; shard++) {
        uint32_t at = disk_index_find(&store->index, class_id, key, shard);
        if (!is_readable(store, &store->index.entries[at])) return 0;
    }
    return 1;
}

uint64_t disk_find_run(const disk_store *store, uint32_t class_id, const uint8_t *keys,
                       uint64_t n) {
    uint64_t found = 0;
    if (class_id >= DISK_CLASSES_MAX || !store->classes[class_id].shard_count) return 0;
    while (found < n && is_present(store, class_id, keys + 16 * found)) found++;
    return found;
}

uint64_t disk_length(const disk_store *store, uint32_t class_id, const uint8_t *key,
                     uint32_t shard) {
    uint32_t at = disk_index_find(&store->index, class_id, key, shard);
    if (at == DISK_NONE || store->index.entries[at].state != DISK_ENTRY_READY) return 0;
    return store->index.entries[at].length_bytes;
}

static void note_drop(disk_device *device, const disk_class_book *kind) {
    uint32_t row = 0;
    for (; row < device->drop_count; row++)
        if (device->drops[row].group == kind->group &&
            memcmp(device->drops[row].name_space, kind->name_space, 16) == 0)
            break;
    if (row == DISK_DROPS_MAX) { /* the oldest one: most of what it was about is gone by now */
        memmove(device->drops, device->drops + 1, (DISK_DROPS_MAX - 1) * sizeof *device->drops);
        row--;
    } else if (row == device->drop_count) {
        device->drop_count++;
    }
    device->drops[row] =
        (disk_drop_row){.group = kind->group, .before_sequence = device->sequence + 1};
    memcpy(device->drops[row].name_space, kind->name_space, sizeof kind->name_space);
    device->marks_are_dirty = 1;
}

uint64_t disk_drop_class(disk_store *store, uint32_t class_id) {
    if (class_id >= DISK_CLASSES_MAX || !store->classes[class_id].shard_count) return 0;
    uint64_t count = 0;
    for (uint32_t at = 0; at < store->index.capacity; at++) {
        const disk_entry *entry = &store->index.entries[at];
        if (entry->state == DISK_ENTRY_FREE || entry->class_id != class_id) continue;
        disk_remove_entry(store, at);
        count++;
    }
    for (uint32_t i = 0; i < store->device_count; i++)
        note_drop(&store->devices[i], &store->classes[class_id]);
    store->stats.dropped_total += count;
    return count;
}

uint64_t disk_snapshot(const disk_store *store, uint64_t *cursor, disk_event *events,
                       uint64_t max) {
    uint64_t count = 0;
    for (; *cursor < store->index.capacity && count < max; (*cursor)++) {
        const disk_entry *entry = &store->index.entries[*cursor];
        if (entry->state != DISK_ENTRY_READY || entry->shard != 0 ||
            !is_present(store, entry->class_id, (const uint8_t *)entry->key))
            continue;
        events[count] = (disk_event){.class_id = entry->class_id};
        memcpy(events[count++].key, entry->key, sizeof entry->key);
    }
    return count;
}

void disk_read_stats(const disk_store *store, disk_stats *stats) {
    *stats = store->stats;
    stats->objects = store->index.count;
    stats->entry_capacity = store->index.capacity;
    stats->classes = store->class_count;
    stats->operations = store->live_operations;
    for (uint32_t i = 0; i < DISK_CLASSES_MAX; i++) stats->object_bytes += store->classes[i].bytes;
    for (uint32_t i = 0; i < store->segments_end; i++)
        stats->segments_free += store->segments[i].state == SEGMENT_FREE;
    for (uint32_t i = 0; i < store->device_count; i++) {
        const disk_device *device = &store->devices[i];
        stats->segments += device->segment_count;
        stats->segment_capacity += device->segments_allowed;
        stats->allocated_bytes += device->segment_count * device->segment_bytes;
    }
}

uint32_t disk_device_count(const disk_store *store) {
    return store->device_count;
}

void disk_read_device(const disk_store *store, uint32_t number, disk_device_facts *facts) {
    memset(facts, 0, sizeof *facts);
    if (number >= store->device_count) return;
    const disk_device *device = &store->devices[number];
    memcpy(facts->path, device->path, sizeof facts->path);
    memcpy(facts->reason, device->reason, sizeof facts->reason);
    memcpy(facts->way, device->way, sizeof facts->way);
    memcpy(facts->store_id, device->store_id, sizeof facts->store_id);
    facts->state = device->state;
    facts->segments = device->segment_count;
    facts->segment_bytes = device->segment_bytes;
    facts->free_bytes = device->free_bytes;
}

const char *disk_audit(const disk_store *store) {
    uint64_t entries = 0, bytes = 0, class_bytes = 0, operations = 0, readers = 0, writers = 0;
    for (uint32_t i = 0; i < store->segments_end; i++) {
        const disk_segment *segment = &store->segments[i];
        uint32_t at = store->index.segment_heads[i], previous = DISK_NONE;
        readers += segment->readers;
        writers += segment->writers;
        if (at != DISK_NONE && (segment->state == SEGMENT_NONE || segment->state == SEGMENT_FREE ||
                                segment->state == SEGMENT_REMOVING))
            return "a segment that is free has entries";
        for (; at != DISK_NONE; at = store->index.entries[at].next_of_segment) {
            const disk_entry *entry = &store->index.entries[at];
            if (entry->state == DISK_ENTRY_FREE || entry->segment != i ||
                entry->previous_of_segment != previous)
                return "a segment's list is broken";
            if (disk_index_find(&store->index, entry->class_id, (const uint8_t *)entry->key,
                                entry->shard) != at)
                return "an entry is not found by its key";
            if (entry->start_unit + disk_record_units(entry->length_bytes) >
                store->devices[segment->device].segment_units)
                return "an entry leads outside of its segment";
            previous = at;
            entries++;
            bytes += entry->length_bytes;
        }
    }
    if (entries != store->index.count) return "the index counts other entries than are listed";
    for (uint32_t i = 0; i < DISK_CLASSES_MAX; i++) class_bytes += store->classes[i].bytes;
    if (bytes != class_bytes) return "classes count other bytes than are listed";
    for (uint32_t i = 0; i < DISK_OPERATIONS_MAX; i++)
        operations += store->operations[i].state != OPERATION_FREE;
    if (operations != store->live_operations || readers + writers != operations)
        return "operations under way are counted wrongly";
    return NULL;
}
