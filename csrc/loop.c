/* The daemon's hot thread.
 *
 * Python accepts connections, checks the peer and does the handshake; then the socket is handed
 * over to this thread, which answers the hot messages (RESERVE, COMMIT, GIVE_UP, TOUCH) itself and
 * passes all others to Python as notices.  It also drains the clients' rings, keeps their stock
 * filled, and applies deadlines.  Without it every save would wait for Python's one thread.
 *
 *   loop.c         the thread, connections, the border to Python
 *   loop_frames.c  bytes to frames, frames to store calls
 *   loop_ring.c    rings and stock
 *
 * One mutex guards everything, the store included.  The thread holds it while it works and not
 * while it sleeps; Python takes it for a control request.  Nothing that can block is called with it
 * held: sockets are non-blocking, and output that does not fit is kept, up to a limit.
 *
 * A client's ring is drained before its socket messages are looked at and before its death is
 * handled, so that what it left in order is seen in order.
 */
#define _GNU_SOURCE /* epoll_pwait2 */

#include "loop.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "loop_private.h"
#include "store_policy.h"

#define POLL_EVENTS_MAX    64
#define EXPIRY_INTERVAL_NS 500000000ull
#define LINGER_NS          200000ull
#define TAG_DOORBELL       UINT64_MAX

uint64_t loop_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static void empty_eventfd(int descriptor) {
    uint64_t count;
    ssize_t got = read(descriptor, &count, sizeof count);
    (void)got; /* nothing there: somebody else was quicker */
}

static void ring_eventfd(int descriptor) {
    uint64_t one = 1;
    ssize_t written = write(descriptor, &one, sizeof one);
    (void)written; /* full: it is ringing already */
}

static void handle_ready(loop *self, const struct epoll_event *ready) {
    if (ready->data.u64 == TAG_DOORBELL) {
        empty_eventfd(self->doorbell);
        return;
    }
    uint32_t index = (uint32_t)ready->data.u64;
    connection *from = &self->connections[index];
    if (from->descriptor < 0 || from->generation != (uint32_t)(ready->data.u64 >> 32)) return;
    if (ready->events & EPOLLOUT) loop_flush_output(self, index);
    if (from->descriptor >= 0 && ready->events & (EPOLLIN | EPOLLHUP | EPOLLERR))
        loop_take_input(self, index);
}

static void expire(loop *self) {
    uint64_t now_ns = loop_now_ns();
    if (now_ns < self->next_expiry_ns) return;
    self->next_expiry_ns = now_ns + EXPIRY_INTERVAL_NS;
    store_set_clock(self->state, (uint32_t)time(NULL));
    store_expire(self->state, now_ns, self->incomplete_ns);
    loop_return_idle_stock(self, now_ns);
}

static void announce_events(loop *self) {
    if (self->events_announced || !store_has_events(self->state)) return;
    self->events_announced = 1;
    ring_eventfd(self->events_ready);
}

/* Nanoseconds to sleep.  After work the thread lingers: it naps briefly without saying that it
 * sleeps, so that a client that goes on saving need not ring for each block.  Otherwise it sleeps
 * until the next deadline, but not at all when a ring has filled since it was drained. */
static uint64_t sleep_ns(loop *self, int was_busy) {
    if (was_busy) return LINGER_NS;
    store_set_sleeping(self->state, 1); /* fences: see ring.c */
    if (loop_any_ring_has_entries(self)) return 0;
    uint64_t now_ns = loop_now_ns();
    return now_ns >= self->next_expiry_ns ? 0 : self->next_expiry_ns - now_ns;
}

static int wait_ready(const loop *self, struct epoll_event *ready, uint64_t timeout_ns) {
    struct timespec timeout = {(time_t)(timeout_ns / 1000000000ull),
                               (long)(timeout_ns % 1000000000ull)};
    int count = epoll_pwait2(self->epoll, ready, POLL_EVENTS_MAX, &timeout, NULL);
    /* Before Linux 5.11; or a container's filter that does not know it refuses it. */
    if (count < 0 && (errno == ENOSYS || errno == EPERM))
        count = epoll_wait(self->epoll, ready, POLL_EVENTS_MAX, (int)(timeout_ns / 1000000) + 1);
    return count;
}

static uint64_t work_done(const loop *self) {
    return self->stats.frames_total + self->stats.ring_entries_total;
}

static void *run(void *argument) {
    loop *self = argument;
    struct epoll_event ready[POLL_EVENTS_MAX];
    int was_busy = 0, has_spare_work = 0;
    pthread_mutex_lock(&self->mutex);
    while (!self->stopping) {
        uint64_t timeout_ns = has_spare_work ? 0 : sleep_ns(self, was_busy);
        uint64_t before = work_done(self);
        pthread_mutex_unlock(&self->mutex);
        int count = wait_ready(self, ready, timeout_ns);
        pthread_mutex_lock(&self->mutex);
        store_set_sleeping(self->state, 0);
        self->stats.wakeups_total++;
        loop_drain_all(self);
        for (int i = 0; i < count; i++) handle_ready(self, &ready[i]);
        expire(self);
        announce_events(self);
        was_busy = has_spare_work || work_done(self) != before;
        has_spare_work = loop_prepare_room(self);
    }
    pthread_mutex_unlock(&self->mutex);
    return NULL;
}

static int open_descriptors(loop *self) {
    self->epoll = epoll_create1(EPOLL_CLOEXEC);
    self->doorbell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    self->notices_ready = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    self->events_ready = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (self->epoll < 0 || self->doorbell < 0 || self->notices_ready < 0 || self->events_ready < 0)
        return 0;
    struct epoll_event interest = {.events = EPOLLIN, .data.u64 = TAG_DOORBELL};
    return epoll_ctl(self->epoll, EPOLL_CTL_ADD, self->doorbell, &interest) == 0;
}

static void free_loop(loop *self) {
    int descriptors[] = {self->epoll, self->doorbell, self->notices_ready, self->events_ready};
    for (int i = 0; i < 4; i++)
        if (descriptors[i] >= 0) close(descriptors[i]);
    for (uint32_t i = 0; i < LOOP_NOTICES_MAX; i++) free(self->notices[i].payload);
    free(self->scratch);
    free(self);
}

loop *loop_start(store *state, uint64_t reservation_ns, uint64_t incomplete_ns) {
    loop *self = calloc(1, sizeof *self);
    if (!self) return NULL;
    self->state = state;
    self->reservation_ns = reservation_ns;
    self->incomplete_ns = incomplete_ns;
    self->epoll = self->doorbell = self->notices_ready = self->events_ready = -1;
    for (uint32_t i = 0; i < LOOP_CONNECTIONS_MAX; i++) self->connections[i].descriptor = -1;
    self->scratch = malloc(LOOP_FRAME_BYTES_MAX);
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE); /* Python nests its calls */
    pthread_mutex_init(&self->mutex, &attributes);
    if (!self->scratch || !open_descriptors(self) ||
        pthread_create(&self->thread, NULL, run, self) != 0) {
        free_loop(self);
        return NULL;
    }
    return self;
}

void loop_stop(loop *self) {
    if (!self) return;
    pthread_mutex_lock(&self->mutex);
    self->stopping = 1;
    pthread_mutex_unlock(&self->mutex);
    ring_eventfd(self->doorbell);
    pthread_join(self->thread, NULL);
    store_set_sleeping(self->state, 0);
    for (uint32_t i = 0; i < LOOP_CONNECTIONS_MAX; i++)
        if (self->connections[i].descriptor >= 0) loop_drop_connection(self, i, LOOP_NOTHING);
    free_loop(self);
}

void loop_lock(loop *self) {
    pthread_mutex_lock(&self->mutex);
}

void loop_unlock(loop *self) {
    announce_events(self);
    pthread_mutex_unlock(&self->mutex);
}

static uint64_t name_of(const loop *self, uint32_t index) {
    return (uint64_t)self->connections[index].generation << 32 | index;
}

/* Index of a connection by name, or LOOP_CONNECTIONS_MAX. */
static uint32_t lookup(const loop *self, uint64_t name) {
    uint32_t index = (uint32_t)name;
    int matches = index < LOOP_CONNECTIONS_MAX && self->connections[index].descriptor >= 0 &&
                  self->connections[index].generation == (uint32_t)(name >> 32);
    return matches ? index : LOOP_CONNECTIONS_MAX;
}

/* A free entry with its input buffer, or LOOP_CONNECTIONS_MAX. */
static uint32_t free_connection(loop *self) {
    for (uint32_t i = 0; i < LOOP_CONNECTIONS_MAX; i++)
        if (self->connections[i].descriptor < 0) return i;
    return LOOP_CONNECTIONS_MAX;
}

uint64_t loop_add(loop *self, int32_t descriptor, uint32_t client, const uint8_t *received,
                  uint64_t received_bytes) {
    loop_lock(self);
    uint32_t index = free_connection(self);
    uint8_t *input = malloc(LOOP_INPUT_BYTES);
    uint64_t name = 0;
    if (index < LOOP_CONNECTIONS_MAX && input && received_bytes <= LOOP_FRAME_BYTES_MAX) {
        connection *fresh = &self->connections[index];
        *fresh = (connection){.descriptor = descriptor,
                              .generation = fresh->generation + 1,
                              .client = client,
                              .input = input};
        name = name_of(self, index);
        struct epoll_event interest = {.events = EPOLLIN, .data.u64 = name};
        memcpy(input, received, received_bytes);
        fresh->input_bytes = received_bytes;
        if (epoll_ctl(self->epoll, EPOLL_CTL_ADD, descriptor, &interest) != 0) {
            loop_drop_connection(self, index, LOOP_NOTHING);
            name = 0;
        } else if (received_bytes) {
            loop_take_input(self, index);
        }
    } else {
        free(input);
        close(descriptor);
    }
    loop_unlock(self);
    return name;
}

void loop_send(loop *self, uint64_t name, const uint8_t *bytes, uint64_t count) {
    loop_lock(self);
    uint32_t index = lookup(self, name);
    if (index < LOOP_CONNECTIONS_MAX) {
        loop_queue_output(self, index, bytes, count);
        if (self->connections[index].descriptor >= 0) loop_flush_output(self, index);
    }
    loop_unlock(self);
}

void loop_close(loop *self, uint64_t name) {
    loop_lock(self);
    uint32_t index = lookup(self, name);
    if (index < LOOP_CONNECTIONS_MAX) loop_drop_connection(self, index, LOOP_NOTHING);
    loop_unlock(self);
}

void loop_drop_connection(loop *self, uint32_t index, uint32_t why) {
    connection *gone = &self->connections[index];
    loop_notice notice = {.kind = why, .connection = name_of(self, index)};
    close(gone->descriptor); /* takes it out of epoll */
    free(gone->input);
    free(gone->output);
    *gone = (connection){.descriptor = -1, .generation = gone->generation};
    if (why != LOOP_NOTHING) loop_push_notice(self, &notice, NULL);
}

/* Requests at the limit are refused by the caller. A CLOSED is never lost: there is a place for
 * each connection that Python knows of. */
void loop_push_notice(loop *self, const loop_notice *notice, const uint8_t *payload) {
    if (self->notices_count == LOOP_NOTICES_MAX) {
        self->stats.notices_lost_total++;
        return;
    }
    uint64_t at = (self->notices_head + self->notices_count) % LOOP_NOTICES_MAX;
    queued_notice *queued = &self->notices[at];
    queued->notice = *notice;
    queued->payload = notice->payload_bytes ? malloc(notice->payload_bytes) : NULL;
    if (notice->payload_bytes && !queued->payload) {
        self->stats.notices_lost_total++;
        return;
    }
    if (queued->payload) memcpy(queued->payload, payload, notice->payload_bytes);
    self->notices_count++;
    ring_eventfd(self->notices_ready);
}

void loop_next(loop *self, loop_notice *notice, uint8_t *payload) {
    pthread_mutex_lock(&self->mutex);
    if (self->notices_count == 0) {
        empty_eventfd(self->notices_ready);
        *notice = (loop_notice){.kind = LOOP_NOTHING};
    } else {
        queued_notice *queued = &self->notices[self->notices_head];
        *notice = queued->notice;
        if (queued->payload) memcpy(payload, queued->payload, notice->payload_bytes);
        free(queued->payload);
        queued->payload = NULL;
        self->notices_head = (self->notices_head + 1) % LOOP_NOTICES_MAX;
        self->notices_count--;
    }
    pthread_mutex_unlock(&self->mutex);
}

void loop_read_stats(loop *self, loop_stats *stats) {
    pthread_mutex_lock(&self->mutex);
    *stats = self->stats;
    pthread_mutex_unlock(&self->mutex);
}

int32_t loop_notice_descriptor(const loop *self) {
    return self->notices_ready;
}

int32_t loop_events_descriptor(const loop *self) {
    return self->events_ready;
}

void loop_events_taken(loop *self) {
    pthread_mutex_lock(&self->mutex);
    empty_eventfd(self->events_ready);
    self->events_announced = 0;
    pthread_mutex_unlock(&self->mutex);
}

int32_t loop_doorbell(const loop *self) {
    return self->doorbell;
}
