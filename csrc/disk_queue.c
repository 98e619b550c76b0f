/* Threads between the store and the file system.
 *
 * The store must never wait for a file system that may hang, so it only hands requests over and
 * takes back those that are over; whether one is late is for the store to see by its own clock.
 * Transfers are served by one thread with an io_uring (disk_ring.c) or by a pool of threads; jobs,
 * such as making or syncing files, by one more thread, in order.  A thread that hangs in the system
 * cannot be ended, so stopping gives up on it after a while and leaks what it may touch.
 */
#include "disk_queue.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    disk_request *first, *last;
} request_list;

struct disk_queue {
    const disk_io *io;
    int is_inline;
    int bell;
    pthread_mutex_t lock;
    pthread_cond_t has_transfer, has_job, has_ended;
    request_list transfers, jobs, done;
    int is_stopping;
    uint32_t running; /* threads that have not ended */
    pthread_t threads[DISK_POOL_THREADS_MAX + 1];
    uint32_t thread_count;
    disk_ring *ring;
};

static void append(request_list *list, disk_request *request) {
    request->next = NULL;
    if (list->last)
        list->last->next = request;
    else
        list->first = request;
    list->last = request;
}

static disk_request *take_first(request_list *list) {
    disk_request *request = list->first;
    if (!request) return NULL;
    list->first = request->next;
    if (!list->first) list->last = NULL;
    return request;
}

void disk_request_end(disk_request *request, int result) {
    if (result == 0 && request->work) result = request->work(request);
    request->result = result;
}

static int transfer(const disk_io *io, disk_request *request) {
    uint64_t left = 0;
    for (int i = 0; i < request->part_count; i++) left += request->parts[i].iov_len;
    while (left) {
        int is_read = request->kind == DISK_REQUEST_READ;
        int64_t moved = (is_read ? io->read : io->write)(
            io->self, request->descriptor, request->parts, request->part_count, request->offset);
        if (moved == -EINTR) continue;
        if (moved <= 0) return moved ? (int)moved : is_read ? -ENODATA : -ENOSPC;
        disk_io_advance(request->parts, request->part_count, (uint64_t)moved);
        request->offset += (uint64_t)moved;
        left -= (uint64_t)moved;
    }
    return 0;
}

void disk_request_run(const disk_io *io, disk_request *request) {
    disk_request_end(request, request->kind == DISK_REQUEST_JOB ? 0 : transfer(io, request));
}

void disk_queue_finish(disk_queue *queue, disk_request *request) {
    pthread_mutex_lock(&queue->lock);
    int was_empty = queue->done.first == NULL;
    append(&queue->done, request);
    pthread_mutex_unlock(&queue->lock);
    const uint64_t one = 1;
    if (was_empty && queue->bell >= 0 && write(queue->bell, &one, sizeof one) < 0) {
        /* Only when it already rings 2^64 - 2 times. */
    }
}

disk_request *disk_queue_next(disk_queue *queue, int *is_stopping) {
    pthread_mutex_lock(&queue->lock);
    disk_request *request = queue->is_stopping ? NULL : take_first(&queue->transfers);
    *is_stopping = queue->is_stopping;
    pthread_mutex_unlock(&queue->lock);
    return request;
}

static void thread_ends(disk_queue *queue) {
    pthread_mutex_lock(&queue->lock);
    queue->running--;
    pthread_cond_signal(&queue->has_ended);
    pthread_mutex_unlock(&queue->lock);
}

static void serve(disk_queue *queue, request_list *list, pthread_cond_t *has_more) {
    pthread_mutex_lock(&queue->lock);
    for (;;) {
        while (!list->first && !queue->is_stopping) pthread_cond_wait(has_more, &queue->lock);
        if (queue->is_stopping) break;
        disk_request *request = take_first(list);
        pthread_mutex_unlock(&queue->lock);
        disk_request_run(queue->io, request);
        disk_queue_finish(queue, request);
        pthread_mutex_lock(&queue->lock);
    }
    pthread_mutex_unlock(&queue->lock);
}

static void *serve_jobs(void *argument) {
    disk_queue *queue = argument;
    serve(queue, &queue->jobs, &queue->has_job);
    thread_ends(queue);
    return NULL;
}

static void *serve_transfers(void *argument) {
    disk_queue *queue = argument;
    if (queue->ring)
        disk_ring_serve(queue->ring, queue);
    else
        serve(queue, &queue->transfers, &queue->has_transfer);
    thread_ends(queue);
    return NULL;
}

static int start_thread(disk_queue *queue, void *(*body)(void *)) {
    pthread_mutex_lock(&queue->lock);
    int failed = pthread_create(&queue->threads[queue->thread_count], NULL, body, queue);
    if (!failed) {
        queue->thread_count++;
        queue->running++;
    }
    pthread_mutex_unlock(&queue->lock);
    return !failed;
}

int disk_queue_serve(disk_queue *queue, uint32_t engine, uint32_t depth) {
    if (queue->is_inline) return 1;
    if (engine == DISK_ENGINE_RING) {
        queue->ring = disk_ring_make(depth);
        return queue->ring && start_thread(queue, serve_transfers);
    }
    for (uint32_t i = 0; i < depth && i < DISK_POOL_THREADS_MAX; i++)
        if (!start_thread(queue, serve_transfers)) return i > 0;
    return 1;
}

disk_queue *disk_queue_start(const disk_io *io, int is_inline, int bell) {
    disk_queue *queue = calloc(1, sizeof *queue);
    if (!queue) return NULL;
    queue->io = io;
    queue->is_inline = is_inline;
    queue->bell = bell;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->has_transfer, NULL);
    pthread_cond_init(&queue->has_job, NULL);
    pthread_cond_init(&queue->has_ended, &monotonic);
    pthread_condattr_destroy(&monotonic);
    if (is_inline || start_thread(queue, serve_jobs)) return queue;
    disk_queue_free(queue);
    return NULL;
}

void disk_queue_submit(disk_queue *queue, disk_request *request) {
    if (queue->is_inline) {
        disk_request_run(queue->io, request);
        disk_queue_finish(queue, request);
        return;
    }
    int is_job = request->kind == DISK_REQUEST_JOB;
    pthread_mutex_lock(&queue->lock);
    append(is_job ? &queue->jobs : &queue->transfers, request);
    pthread_cond_signal(is_job ? &queue->has_job : &queue->has_transfer);
    pthread_mutex_unlock(&queue->lock);
    if (!is_job && queue->ring) disk_ring_feed(queue->ring);
}

disk_request *disk_queue_take(disk_queue *queue) {
    pthread_mutex_lock(&queue->lock);
    disk_request *requests = queue->done.first;
    queue->done = (request_list){NULL, NULL};
    pthread_mutex_unlock(&queue->lock);
    return requests;
}

static struct timespec time_in(uint32_t timeout_ms) {
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += timeout_ms / 1000;
    end.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (end.tv_nsec >= 1000000000) {
        end.tv_sec++;
        end.tv_nsec -= 1000000000;
    }
    return end;
}

static void cancel(disk_queue *queue, request_list *list) {
    disk_request *request;
    while ((request = take_first(list))) {
        request->result = -ECANCELED;
        append(&queue->done, request);
    }
}

int disk_queue_stop(disk_queue *queue, uint32_t timeout_ms) {
    struct timespec end = time_in(timeout_ms);
    pthread_mutex_lock(&queue->lock);
    queue->is_stopping = 1;
    cancel(queue, &queue->transfers);
    cancel(queue, &queue->jobs);
    pthread_cond_broadcast(&queue->has_transfer);
    pthread_cond_broadcast(&queue->has_job);
    if (queue->ring) disk_ring_wake(queue->ring);
    int waited = 0;
    while (queue->running && !waited)
        waited = pthread_cond_timedwait(&queue->has_ended, &queue->lock, &end);
    int has_ended = queue->running == 0;
    pthread_mutex_unlock(&queue->lock);
    for (uint32_t i = 0; i < queue->thread_count; i++) {
        if (has_ended)
            pthread_join(queue->threads[i], NULL);
        else
            pthread_detach(queue->threads[i]);
    }
    return has_ended;
}

void disk_queue_free(disk_queue *queue) {
    if (queue->ring) disk_ring_free(queue->ring);
    pthread_cond_destroy(&queue->has_transfer);
    pthread_cond_destroy(&queue->has_job);
    pthread_cond_destroy(&queue->has_ended);
    pthread_mutex_destroy(&queue->lock);
    free(queue);
}
