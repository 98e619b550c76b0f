/* A device's states, and the jobs that change them.
 *
 *     STARTING --loaded--> ON --writing fails--> READ_ONLY --probe works--> ON
 *        |                  \--reading fails, or no answer--> OFF --probe works--> ON
 *        \--refused, or cannot be read--> OFF --loading works--> ON
 *
 * READ_ONLY and OFF carry a reason and are looked after again and again, at growing distances: the
 * job LOOK sees whether the folder is still the one that was locked, how much room its file system
 * has, and, when something was wrong, whether a block can be written, synced and read back.  A
 * folder that is gone is closed and begun anew.  A device that does not answer gets no new work
 * until what it owes has come back.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "disk_private.h"

#define LOOK_NS        2000000000ull
#define BACKOFF_MIN_NS 1000000000ull
#define BACKOFF_MAX_NS 30000000000ull
#define JOB_PATIENCE   6 /* deadlines that a job may take: it does more than one transfer */

int disk_device_is_readable(const disk_device *device) {
    return device->state == DISK_ON || device->state == DISK_READ_ONLY;
}

static const char *cure_of(int error) {
    switch (error) {
    case ENOSPC:
    case EDQUOT:
        return "free some space there, or lower --disk-size";
    case EROFS:
        return "mount it writable again";
    case EACCES:
    case EPERM:
        return "give its user the right to write";
    case ETIMEDOUT:
        return "see what the device or the server does (dmesg)";
    case ESTALE:
        return "the folder was removed or replaced under it";
    default:
        return "see what the system says about the device (dmesg)";
    }
}

static void set_state(disk_store *store, disk_device *device, uint32_t state) {
    int was_readable = disk_device_is_readable(device);
    device->state = state;
    /* What is present changed at once; who follows takes a snapshot. */
    if (was_readable != disk_device_is_readable(device) && store->index.count)
        store->events_overflowed = 1;
}

void disk_device_fail(disk_store *store, uint32_t number, uint32_t state, const char *what,
                      int error) {
    disk_device *device = &store->devices[number];
    if (device->state == DISK_OFF && state == DISK_READ_ONLY) return;
    if (device->state != state) {
        store->stats.failures_total++;
        device->backoff_ns = device->backoff_ns ? device->backoff_ns : BACKOFF_MIN_NS;
        device->look_ns = store->now_ns + device->backoff_ns;
    }
    device->failed_errno = error;
    snprintf(device->reason, sizeof device->reason, "%s (%s); %s", what, strerror(error),
             cure_of(error));
    set_state(store, device, state);
}

static void back_off(const disk_store *store, disk_device *device) {
    device->look_ns = store->now_ns + device->backoff_ns;
    device->backoff_ns *= 2;
    if (device->backoff_ns > BACKOFF_MAX_NS) device->backoff_ns = BACKOFF_MAX_NS;
}

static void heal(disk_store *store, disk_device *device) {
    device->reason[0] = 0;
    device->failed_errno = 0;
    device->read_failures = 0;
    store->stats.heals_total++;
    set_state(store, device, DISK_ON);
}

disk_job *disk_job_make(disk_store *store, uint32_t number, uint32_t kind) {
    const disk_device *device = &store->devices[number];
    disk_job *job = calloc(1, sizeof *job);
    if (!job) return NULL;
    job->request.kind = DISK_REQUEST_JOB;
    job->request.work = disk_job_run;
    job->io = store->io;
    job->kind = kind;
    job->segment = DISK_NO_SEGMENT;
    job->settings = &store->settings;
    job->device_count = store->device_count;
    job->open_flags = O_RDWR | device->direct_flag;
    job->file = -1;
    job->lock_file = device->lock_file;
    job->now_s = store->now_s;
    job->epoch = device->epoch;
    job->name.segment_bytes = device->segment_bytes;
    memcpy(job->name.store_id, device->store_id, sizeof job->name.store_id);
    memcpy(job->folder, device->path, sizeof job->folder);
    return job;
}

void disk_job_submit(disk_store *store, uint32_t number, disk_job *job) {
    disk_device *device = &store->devices[number];
    job->deadline_ns = store->now_ns + JOB_PATIENCE * store->settings.deadline_ms * NS_PER_MS;
    job->next = device->jobs;
    device->jobs = job;
    device->kinds_under_way |= 1u << job->kind;
    disk_queue_submit(device->queue, &job->request);
}

static void leave_list(disk_device *device, const disk_job *gone) {
    device->kinds_under_way = 0;
    for (disk_job **link = &device->jobs; *link;) {
        if (*link == gone) {
            *link = gone->next;
            continue;
        }
        device->kinds_under_way |= 1u << (*link)->kind;
        link = &(*link)->next;
    }
}

uint16_t disk_segment_add(disk_store *store, uint32_t number, uint32_t file_number, int file) {
    for (uint32_t i = 0; i < DISK_SEGMENTS_MAX; i++) {
        if (store->segments[i].state != SEGMENT_NONE) continue;
        if (i >= store->segments_end) store->segments_end = i + 1;
        store->segments[i] = (disk_segment){
            .file = file, .number = file_number, .device = (uint16_t)number, .state = SEGMENT_FREE};
        store->devices[number].segment_count++;
        return (uint16_t)i;
    }
    return DISK_NO_SEGMENT;
}

static void forget_segment(disk_store *store, uint16_t number) {
    store->devices[store->segments[number].device].segment_count--;
    store->segments[number] = (disk_segment){.file = -1};
}

/* ---- what jobs found ---- */

static void end_load(disk_store *store, uint32_t number, disk_job *job) {
    disk_device *device = &store->devices[number];
    disk_loaded *found = job->loaded;
    job->loaded = NULL;
    if (job->request.result == 0) {
        device->loaded = found;
        return;
    }
    disk_device_fail(store, number, DISK_OFF, "cannot load it", -job->request.result);
    back_off(store, device);
    if (found) {
        snprintf(device->reason, sizeof device->reason, "%s", found->reason);
        disk_loaded_free(store->io, found, 1);
    }
}

static void end_prepare(disk_store *store, uint32_t number, const disk_job *job) {
    disk_device *device = &store->devices[number];
    disk_segment *segment = &store->segments[job->segment];
    int result = job->request.result;
    segment->file = job->file;
    if (result == 0) {
        segment->state = SEGMENT_READY;
        segment->is_dirty = 0;
        device->ready = job->segment;
        device->backoff_ns = BACKOFF_MIN_NS;
        return;
    }
    device->has_unsynced_moves = 1;
    if (segment->file < 0)
        forget_segment(store, job->segment);
    else
        segment->state = SEGMENT_FREE;
    if (result == -ECANCELED) return;
    int is_full = result == -ENOSPC || result == -EDQUOT;
    if (job->must_create && is_full) device->has_no_room = 1;
    /* With segments of its own to write over it needs no more room. */
    if (!is_full || !job->must_create || device->segment_count < 2)
        disk_device_fail(store, number, DISK_READ_ONLY,
                         is_full ? "no room for a segment" : "cannot begin a segment", -result);
}

static void end_seal(disk_store *store, uint32_t number, const disk_job *job) {
    disk_segment *segment = &store->segments[job->segment];
    segment->is_job_under_way = 0;
    if (job->request.result == 0) {
        segment->state = SEGMENT_SEALED;
        segment->is_dirty = 0;
        store->devices[number].sealing_count--;
        store->stats.syncs_total++;
    } else if (job->request.result != -ECANCELED) {
        disk_device_fail(store, number, DISK_READ_ONLY, "cannot write a table",
                         -job->request.result);
    }
}

static void end_sync(disk_store *store, uint32_t number, const disk_job *job) {
    store->stats.syncs_total++;
    if (job->request.result == 0 || job->request.result == -ECANCELED) return;
    store->segments[job->segment].is_dirty = 1;
    disk_device_fail(store, number, DISK_READ_ONLY, "syncing failed", -job->request.result);
}

static void end_look(disk_store *store, uint32_t number, const disk_job *job) {
    disk_device *device = &store->devices[number];
    int result = job->request.result;
    device->look_ns = store->now_ns + LOOK_NS;
    if (result == -ECANCELED) return;
    if (result == -ESTALE) {
        disk_device_fail(store, number, DISK_OFF, "the folder is gone", ESTALE);
        device->wants_reset = 1;
        return;
    }
    if (result == 0 || job->free_bytes) device->free_bytes = job->free_bytes;
    if (device->free_bytes >= store->settings.free_floor_bytes + device->segment_bytes)
        device->has_no_room = 0;
    if (device->state == DISK_ON) {
        if (result) disk_device_fail(store, number, DISK_OFF, "cannot look at it", -result);
        return;
    }
    if (result == 0 && job->must_probe && !device->late_count && !device->is_hanging) {
        if (device->is_read_only)
            device->wants_reset = 1; /* its files are open for reading only */
        else
            heal(store, device);
        return;
    }
    back_off(store, device);
}

void disk_device_end_job(disk_store *store, uint32_t number, disk_job *job) {
    disk_device *device = &store->devices[number];
    leave_list(device, job);
    switch (job->kind) {
    case JOB_LOAD:
        end_load(store, number, job);
        break;
    case JOB_PREPARE:
        end_prepare(store, number, job);
        break;
    case JOB_SEAL:
        end_seal(store, number, job);
        break;
    case JOB_SYNC:
        end_sync(store, number, job);
        break;
    case JOB_LOOK:
        end_look(store, number, job);
        break;
    case JOB_REMOVE:
        forget_segment(store, job->segment);
        break;
    case JOB_MARKS:
        if (job->request.result && job->request.result != -ECANCELED) {
            device->marks_are_dirty = 1;
            disk_device_fail(store, number, DISK_READ_ONLY, "cannot write `marks`",
                             -job->request.result);
        }
        break;
    default:
        set_state(store, device, DISK_STARTING); /* all files are closed: load again */
        break;
    }
    free(job->bytes);
    free(job->files);
    free(job);
}

/* ---- what to do next ---- */

static void begin_load(disk_store *store, uint32_t number) {
    disk_device *device = &store->devices[number];
    if (device->kinds_under_way || device->loaded || device->lock_file >= 0) return;
    disk_job *job = disk_job_make(store, number, JOB_LOAD);
    if (!job) return;
    job->name.segment_bytes = store->settings.segment_bytes;
    disk_job_submit(store, number, job);
}

static int is_quiet(const disk_store *store, uint32_t number) {
    const disk_device *device = &store->devices[number];
    if (device->jobs || device->in_flight_bytes || device->moves_under_way) return 0;
    for (uint32_t i = 0; i < store->segments_end; i++)
        if (store->segments[i].device == number &&
            (store->segments[i].readers || store->segments[i].writers))
            return 0;
    return 1;
}

/* Forgets all there was, once nothing is under way, and closes the files. */
static void reset(disk_store *store, uint32_t number) {
    disk_device *device = &store->devices[number];
    if (!is_quiet(store, number)) return;
    disk_job *job = disk_job_make(store, number, JOB_CLOSE);
    if (!job) return;
    job->files = malloc((device->segment_count + 1) * sizeof *job->files);
    if (!job->files) {
        free(job);
        return;
    }
    for (uint32_t i = 0; i < store->segments_end; i++) {
        if (store->segments[i].state == SEGMENT_NONE || store->segments[i].device != number)
            continue;
        while (store->index.segment_heads[i] != DISK_NONE)
            disk_remove_entry(store, store->index.segment_heads[i]);
        job->files[job->file_count++] = store->segments[i].file;
        forget_segment(store, (uint16_t)i);
    }
    job->files[job->file_count++] = device->lock_file;
    device->lock_file = -1;
    device->active = device->ready = device->victim = DISK_NO_SEGMENT;
    device->sealing_count = 0;
    device->drop_count = 0;
    device->marks_are_dirty = 0;
    device->has_no_room = 0;
    device->wants_reset = 0;
    device->next_number = 0;
    disk_job_submit(store, number, job);
}

static void look(disk_store *store, uint32_t number) {
    disk_device *device = &store->devices[number];
    if (store->now_ns < device->look_ns || device->kinds_under_way >> JOB_LOOK & 1) return;
    if (device->lock_file < 0) {
        if (device->state == DISK_OFF) begin_load(store, number);
        return;
    }
    disk_job *job = disk_job_make(store, number, JOB_LOOK);
    if (!job) return;
    job->must_probe = device->state != DISK_ON;
    job->must_have_room = device->failed_errno == ENOSPC && device->segment_count < 2;
    disk_job_submit(store, number, job);
}

void disk_device_write_marks(disk_store *store, uint32_t number) {
    disk_device *device = &store->devices[number];
    if (!device->marks_are_dirty || device->kinds_under_way >> JOB_MARKS & 1) return;
    disk_job *job = disk_job_make(store, number, JOB_MARKS);
    if (!job) return;
    job->bytes = malloc(sizeof device->drops);
    if (!job->bytes) {
        free(job);
        return;
    }
    memcpy(job->bytes, device->drops, sizeof device->drops);
    job->file_count = device->drop_count;
    device->marks_are_dirty = 0;
    disk_job_submit(store, number, job);
}

static void keep_to_limits(disk_store *store, uint32_t number) {
    disk_device *device = &store->devices[number];
    if (device->kinds_under_way >> JOB_REMOVE & 1 || device->victim != DISK_NO_SEGMENT) return;
    if (device->free_bytes < store->settings.free_floor_bytes &&
        device->segment_count > DISK_SEGMENTS_MIN) {
        store->stats.floor_segments_total++;
        device->has_no_room = 1;
        device->free_bytes += device->segment_bytes; /* until it is looked at again */
        disk_give_back(store, number);
    }
}

static void see_whether_it_answers(disk_store *store, uint32_t number) {
    disk_device *device = &store->devices[number];
    int is_overdue = 0;
    for (const disk_job *job = device->jobs; job; job = job->next)
        is_overdue |= store->now_ns >= job->deadline_ns;
    if (is_overdue && !device->is_hanging) {
        disk_device_fail(store, number, DISK_OFF, "it does not answer", ETIMEDOUT);
        device->is_hanging = 1;
    } else if (device->is_hanging && !is_overdue && !device->late_count) {
        device->is_hanging = 0;
        device->look_ns = store->now_ns;
    }
}

void disk_device_poll(disk_store *store, uint32_t number) {
    disk_device *device = &store->devices[number];
    see_whether_it_answers(store, number);
    if (device->wants_reset) reset(store, number);
    if (device->state == DISK_STARTING) begin_load(store, number);
    if (device->loaded) disk_merge(store, number);
    if (device->is_hanging || device->wants_reset || device->loaded ||
        device->state == DISK_STARTING)
        return;
    look(store, number);
    disk_reclaim_poll(store, number);
    if (device->state != DISK_ON) return;
    disk_device_write_marks(store, number);
    disk_append_poll(store, number);
    keep_to_limits(store, number);
}
