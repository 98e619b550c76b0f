/* One device's I/O, on threads of its own: requests go in, and come back when they are over. */
#ifndef INFERA_DISK_QUEUE_H
#define INFERA_DISK_QUEUE_H

#include "disk_io.h"

enum {
    DISK_DEPTH_MAX = 256,       /* requests the device has at once */
    DISK_POOL_THREADS_MAX = 16, /* more of them than cores only wait */
};

enum disk_request_kind { DISK_REQUEST_READ, DISK_REQUEST_WRITE, DISK_REQUEST_JOB };

typedef struct disk_request disk_request;
struct disk_request {
    uint32_t kind;
    int descriptor;
    uint64_t offset;
    struct iovec parts[2]; /* spent while it runs */
    int part_count;
    /* Of a job: what to do. Of a transfer: what to do after all bytes were moved, may be null. On
     * the queue's thread; returns 0 or an errno as a negative number. */
    int (*work)(disk_request *request);
    void *owner;
    int32_t result; /* 0: all bytes were moved and the work done; else an errno, negative */
    disk_request *next;
};

/* How transfers are done. */
enum disk_engine {
    DISK_ENGINE_RING = 1,
    DISK_ENGINE_THREADS = 2,
    DISK_ENGINE_INLINE = 3, /* by whoever submits, for tools and tests */
};

typedef struct disk_queue disk_queue;

/* Starts the thread for jobs, or none with DISK_ENGINE_INLINE. Requests that come back are
 * announced by writing to `bell`, an eventfd, if it is not negative. NULL when the system refuses.
 */
disk_queue *disk_queue_start(const disk_io *io, int is_inline, int bell);
/* Starts those for transfers, which wait until then. 0 when the system refuses. */
int disk_queue_serve(disk_queue *queue, uint32_t engine, uint32_t depth);
/* Hands a request over. Jobs are done one at a time in order; transfers in any order. Never waits
 * for I/O, except inline. */
void disk_queue_submit(disk_queue *queue, disk_request *request);
/* Those that are over, oldest first. */
disk_request *disk_queue_take(disk_queue *queue);
/* Lets what was submitted end and stops; what has not begun comes back with -ECANCELED. Returns 0
 * when a thread hangs in the system for longer than `timeout_ms`: then nothing it may touch, the
 * queue included, may ever be freed. Afterwards take the last requests and call disk_queue_free. */
int disk_queue_stop(disk_queue *queue, uint32_t timeout_ms);
void disk_queue_free(disk_queue *queue);

/* Does one transfer or job here and now. */
void disk_request_run(const disk_io *io, disk_request *request);

/* ---- for disk_ring.c ---- */

/* The next transfer to begin, or NULL when there is none now; sets *is_stopping. */
disk_request *disk_queue_next(disk_queue *queue, int *is_stopping);
void disk_queue_finish(disk_queue *queue, disk_request *request);
void disk_request_end(disk_request *request, int result);

typedef struct disk_ring disk_ring;
disk_ring *disk_ring_make(uint32_t depth);
/* Serves a queue until it is stopped. */
void disk_ring_serve(disk_ring *ring, disk_queue *queue);
/* Says that there is a request, if the ring waits for one; wakes it in any case. */
void disk_ring_feed(disk_ring *ring);
void disk_ring_wake(disk_ring *ring);
void disk_ring_free(disk_ring *ring);
/* Makes a ring and reads the first unit of a file through it (-1: only makes it): 0, or an errno as
 * a negative number. */
int disk_ring_probe(int file);

#endif
