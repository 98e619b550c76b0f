/* Transfers through an io_uring, without a library: two shared rings and one system call.
 *
 * One thread owns the ring.  Requests come from the queue; an eventfd that the ring itself polls
 * wakes the thread when there are more, so that it sleeps in one place only.  The submission entry
 * points at the request's own iovecs, which therefore live until it completes.  A transfer that
 * moved fewer bytes goes on with the rest.
 */
#include <errno.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "disk_queue.h"

struct disk_ring {
    int ring, bell;
    uint32_t depth, in_flight, unsubmitted;
    int has_poll;          /* the ring is watching the bell */
    _Atomic int is_hungry; /* fewer are in flight than may be, so whoever submits must ring */
    void *rings, *entries;
    size_t rings_bytes, entries_bytes;
    _Atomic uint32_t *sq_head, *sq_tail, *cq_head, *cq_tail;
    uint32_t *sq_mask, *sq_array, *cq_mask;
    struct io_uring_cqe *completions;
    disk_request *over[DISK_DEPTH_MAX]; /* moved, and not finished */
    uint32_t over_count;
};

static int setup(uint32_t entries, struct io_uring_params *facts) {
    /* COOP_TASKRUN spares an interrupt for each completion; older kernels do not know it. */
    *facts = (struct io_uring_params){.flags = IORING_SETUP_COOP_TASKRUN};
    int ring = (int)syscall(__NR_io_uring_setup, entries, facts);
    if (ring >= 0 || errno != EINVAL) return ring;
    *facts = (struct io_uring_params){0};
    return (int)syscall(__NR_io_uring_setup, entries, facts);
}

static int map_rings(disk_ring *ring, const struct io_uring_params *facts) {
    size_t sq_bytes = facts->sq_off.array + facts->sq_entries * sizeof(uint32_t);
    size_t cq_bytes = facts->cq_off.cqes + facts->cq_entries * sizeof(struct io_uring_cqe);
    ring->rings_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    ring->entries_bytes = facts->sq_entries * sizeof(struct io_uring_sqe);
    ring->rings = mmap(NULL, ring->rings_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                       ring->ring, IORING_OFF_SQ_RING);
    ring->entries = mmap(NULL, ring->entries_bytes, PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_POPULATE, ring->ring, IORING_OFF_SQES);
    if (ring->rings == MAP_FAILED || ring->entries == MAP_FAILED) return 0;
    uint8_t *base = ring->rings;
    ring->sq_head = (_Atomic uint32_t *)(base + facts->sq_off.head);
    ring->sq_tail = (_Atomic uint32_t *)(base + facts->sq_off.tail);
    ring->sq_mask = (uint32_t *)(base + facts->sq_off.ring_mask);
    ring->sq_array = (uint32_t *)(base + facts->sq_off.array);
    ring->cq_head = (_Atomic uint32_t *)(base + facts->cq_off.head);
    ring->cq_tail = (_Atomic uint32_t *)(base + facts->cq_off.tail);
    ring->cq_mask = (uint32_t *)(base + facts->cq_off.ring_mask);
    ring->completions = (struct io_uring_cqe *)(base + facts->cq_off.cqes);
    return 1;
}

disk_ring *disk_ring_make(uint32_t depth) {
    disk_ring *ring = calloc(1, sizeof *ring);
    if (!ring) return NULL;
    struct io_uring_params facts;
    ring->depth = depth;
    ring->rings = ring->entries = MAP_FAILED;
    ring->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    ring->ring = setup(depth + 2, &facts); /* one more for the bell */
    if (ring->bell >= 0 && ring->ring >= 0 && facts.features & IORING_FEAT_SINGLE_MMAP &&
        map_rings(ring, &facts))
        return ring;
    disk_ring_free(ring);
    return NULL;
}

void disk_ring_free(disk_ring *ring) {
    if (ring->entries != MAP_FAILED) munmap(ring->entries, ring->entries_bytes);
    if (ring->rings != MAP_FAILED) munmap(ring->rings, ring->rings_bytes);
    if (ring->ring >= 0) close(ring->ring);
    if (ring->bell >= 0) close(ring->bell);
    free(ring);
}

void disk_ring_feed(disk_ring *ring) {
    if (atomic_exchange(&ring->is_hungry, 0)) disk_ring_wake(ring);
}

void disk_ring_wake(disk_ring *ring) {
    const uint64_t one = 1;
    if (write(ring->bell, &one, sizeof one) < 0) {
        /* It rings already. */
    }
}

/* The ring is larger than what is ever in flight, so there is always a free entry. */
static struct io_uring_sqe *next_entry(disk_ring *ring) {
    uint32_t tail = atomic_load_explicit(ring->sq_tail, memory_order_relaxed);
    uint32_t index = (tail + ring->unsubmitted) & *ring->sq_mask;
    struct io_uring_sqe *entry = (struct io_uring_sqe *)ring->entries + index;
    memset(entry, 0, sizeof *entry);
    ring->sq_array[index] = index;
    ring->unsubmitted++;
    return entry;
}

static void begin(disk_ring *ring, disk_request *request) {
    struct io_uring_sqe *entry = next_entry(ring);
    entry->opcode = request->kind == DISK_REQUEST_READ ? IORING_OP_READV : IORING_OP_WRITEV;
    entry->fd = request->descriptor;
    entry->off = request->offset;
    entry->addr = (uintptr_t)request->parts;
    entry->len = (uint32_t)request->part_count;
    entry->user_data = (uintptr_t)request;
    ring->in_flight++;
}

static void watch_bell(disk_ring *ring) {
    if (ring->has_poll) return;
    struct io_uring_sqe *entry = next_entry(ring);
    entry->opcode = IORING_OP_POLL_ADD;
    entry->fd = ring->bell;
    entry->poll32_events = POLLIN;
    entry->user_data = 0;
    ring->has_poll = 1;
}

/* Skips the parts that are done: the kernel stops at an empty one. */
static int is_over(disk_request *request, int32_t moved) {
    disk_io_advance(request->parts, request->part_count, (uint64_t)moved);
    request->offset += (uint64_t)moved;
    while (request->part_count && request->parts[0].iov_len == 0) {
        request->parts[0] = request->parts[1];
        request->part_count--;
    }
    return request->part_count == 0;
}

/* Sets a transfer aside that is over, or goes on with its rest. */
static void complete(disk_ring *ring, disk_request *request, int32_t moved) {
    ring->in_flight--;
    if (moved == -EINTR || (moved > 0 && !is_over(request, moved))) {
        begin(ring, request);
        return;
    }
    request->result = moved > 0 ? 0 : moved;
    if (moved == 0) request->result = request->kind == DISK_REQUEST_READ ? -ENODATA : -ENOSPC;
    ring->over[ring->over_count++] = request;
}

static void reap(disk_ring *ring) {
    uint32_t head = atomic_load_explicit(ring->cq_head, memory_order_relaxed);
    while (head != atomic_load_explicit(ring->cq_tail, memory_order_acquire)) {
        struct io_uring_cqe done = ring->completions[head & *ring->cq_mask];
        atomic_store_explicit(ring->cq_head, ++head, memory_order_release);
        if (done.user_data) {
            complete(ring, (disk_request *)(uintptr_t)done.user_data, done.res);
            continue;
        }
        uint64_t rings;
        ring->has_poll = 0;
        if (read(ring->bell, &rings, sizeof rings) < 0) {
            /* Nothing to read: the poll ended for another reason and is begun again. */
        }
    }
}

/* What is to be done with those that are over, such as verifying: while others are under way. */
static void finish(disk_ring *ring, disk_queue *queue) {
    for (uint32_t i = 0; i < ring->over_count; i++) {
        disk_request_end(ring->over[i], ring->over[i]->result);
        disk_queue_finish(queue, ring->over[i]);
    }
    ring->over_count = 0;
}

/* Publishes the prepared entries and waits for so many completions, 0 or 1. What the kernel did not
 * take the first time is offered again. */
static int enter(disk_ring *ring, uint32_t wanted) {
    uint32_t tail = atomic_load_explicit(ring->sq_tail, memory_order_relaxed) + ring->unsubmitted;
    atomic_store_explicit(ring->sq_tail, tail, memory_order_release);
    ring->unsubmitted = 0;
    for (;;) {
        uint32_t count = tail - atomic_load_explicit(ring->sq_head, memory_order_acquire);
        if (count == 0 && wanted == 0) return 1;
        if (syscall(__NR_io_uring_enter, ring->ring, count, wanted, IORING_ENTER_GETEVENTS, NULL,
                    0) >= 0)
            return 1;
        if (errno != EINTR && errno != EAGAIN && errno != EBUSY) return 0;
    }
}

int disk_ring_probe(int file) {
    disk_ring *ring = disk_ring_make(1);
    if (!ring) return -ENOSYS;
    int result = 0;
    void *unit = aligned_alloc(4096, 4096);
    if (file >= 0 && unit) {
        disk_request request = {.kind = DISK_REQUEST_READ,
                                .descriptor = file,
                                .parts = {{unit, 4096}},
                                .part_count = 1};
        begin(ring, &request);
        if (!enter(ring, 1)) abort();
        uint32_t head = atomic_load_explicit(ring->cq_head, memory_order_relaxed);
        int32_t moved = ring->completions[head & *ring->cq_mask].res;
        result = moved < 0 ? moved : moved == 4096 ? 0 : -EIO;
    }
    disk_ring_free(ring);
    free(unit);
    return result;
}

/* Begins as many as may be in flight; whether the queue is stopping. */
static int fill(disk_ring *ring, disk_queue *queue) {
    int is_stopping = 0;
    while (ring->in_flight < ring->depth) {
        disk_request *request = disk_queue_next(queue, &is_stopping);
        if (!request) break;
        begin(ring, request);
    }
    return is_stopping;
}

void disk_ring_serve(disk_ring *ring, disk_queue *queue) {
    for (;;) {
        int is_stopping = fill(ring, queue);
        if (ring->in_flight < ring->depth) {
            /* Who submits from here on rings; what came before that is taken now. */
            atomic_store(&ring->is_hungry, 1);
            is_stopping = fill(ring, queue);
        }
        if (is_stopping && ring->in_flight == 0 && ring->over_count == 0) return;
        watch_bell(ring);
        /* The device has its next requests before this thread turns to those that are over. */
        if (!enter(ring, ring->over_count == 0))
            abort(); /* wrong arguments: a fault of this file */
        finish(ring, queue);
        reap(ring);
    }
}
