/* The daemon's hot thread: sockets, rings and deadlines, without Python. */
#ifndef INFERA_LOOP_H
#define INFERA_LOOP_H

#include <stdint.h>

#include "store.h"

/* cffi: begin */
enum {
    LOOP_CONNECTIONS_MAX = 512,
    LOOP_FRAME_BYTES_MAX = 1 << 20,
    LOOP_CONTROL_BYTES_MAX = 64 * 1024, /* payload of a message that Python answers */
    LOOP_REQUESTS_MAX = 128,            /* for Python, not taken yet; more are refused in words */
    LOOP_NOTICES_MAX = LOOP_REQUESTS_MAX + LOOP_CONNECTIONS_MAX, /* so that no end is lost */
    LOOP_UNSENT_BYTES_MAX = 8 << 20, /* a client that lets this much pile up is not reading */
    LOOP_STOCK_WISHES_MAX = 16,      /* kinds of stock one client may ask for */
};

enum loop_notice_kind {
    LOOP_NOTHING = 0,
    LOOP_REQUEST = 1,   /* a message for Python; its payload was copied out */
    LOOP_CLOSED = 2,    /* the connection is gone */
    LOOP_MALFORMED = 3, /* likewise, for bytes that are not the protocol */
};

typedef struct {
    uint32_t kind;
    uint32_t message;
    uint32_t request_id;
    uint32_t payload_bytes;
    uint64_t connection;
} loop_notice;

typedef struct {
    uint64_t frames_total, ring_entries_total, ring_broken_total, wakeups_total, notices_lost_total;
    uint64_t stock_wishes_refused_total;
} loop_stats;

typedef struct loop loop;

/* Starts the thread over a store. `reservation_ns` is how long a reservation may stay uncommitted,
 * `incomplete_ns` how long a record may stay incomplete. NULL when the system refuses. */
loop *loop_start(store *state, uint64_t reservation_ns, uint64_t incomplete_ns);
/* Ends the thread and closes all connections; the store stays. */
void loop_stop(loop *self);

/* Everything that touches the store from outside the thread happens between these. */
void loop_lock(loop *self);
void loop_unlock(loop *self);

/* Hands a connected socket (owned from now on) of a client over, with what was already read from
 * it. Returns the connection's name, or 0 at the limit. Call without the lock, as the next four. */
uint64_t loop_add(loop *self, int32_t descriptor, uint32_t client, const uint8_t *received,
                  uint64_t received_bytes);
/* Sends bytes to a connection; nothing happens when it is gone. */
void loop_send(loop *self, uint64_t connection, const uint8_t *bytes, uint64_t count);
void loop_close(loop *self, uint64_t connection);
/* Takes the oldest notice; `payload` has LOOP_CONTROL_BYTES_MAX bytes. */
void loop_next(loop *self, loop_notice *notice, uint8_t *payload);
void loop_read_stats(loop *self, loop_stats *stats);

/* Becomes readable when there is a notice. */
int32_t loop_notice_descriptor(const loop *self);
/* Becomes readable when events wait in the store; stays so until they are said to be taken, just
 * before they are. Apart, so that events can be gathered for a while and requests need not wait. */
int32_t loop_events_descriptor(const loop *self);
void loop_events_taken(loop *self);
/* What clients ring. */
int32_t loop_doorbell(const loop *self);

/* With the lock held: keep `count` extents of a class and shard ready for a client. Returns 0 when
 * it asks for too many kinds. */
int loop_want_stock(loop *self, uint32_t client, uint32_t class_id, uint32_t shard, uint32_t count);
/* With the lock held, before store_client_detach: take in what a dead client left in its ring. */
void loop_drain_client(loop *self, uint32_t client);
/* cffi: end */

#endif
