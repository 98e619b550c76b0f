/* Shared between loop.c and its parts. */
#ifndef INFERA_LOOP_PRIVATE_H
#define INFERA_LOOP_PRIVATE_H

#include <pthread.h>

#include "loop.h"
#include "ring.h"

typedef struct {
    uint32_t class_id, shard;
    uint32_t count; /* extents to keep ready; 0: this entry is unused */
} stock_wish;

typedef struct {
    stock_wish wishes[LOOP_STOCK_WISHES_MAX];
    uint64_t last_taken_ns; /* idle stock goes back */
    int is_low;             /* fill it once the answers are out */
    stock_wish ahead;       /* what it last reserved; room is made for as much when there is time */
} client_stock;

typedef struct {
    int descriptor; /* -1: free */
    uint32_t generation;
    uint32_t client;
    uint8_t *input; /* one header and one largest frame, allocated with the first byte */
    uint64_t input_bytes;
    uint8_t *output;
    uint64_t output_bytes, output_capacity;
    int waits_for_room; /* EPOLLOUT is watched */
} connection;

typedef struct {
    loop_notice notice;
    uint8_t *payload;
} queued_notice;

struct loop {
    store *state;
    pthread_t thread;
    pthread_mutex_t mutex;
    int epoll, doorbell, notices_ready, events_ready;
    int stopping;
    int events_announced; /* Python has been told that events wait */
    uint64_t reservation_ns, incomplete_ns, next_expiry_ns;
    connection connections[LOOP_CONNECTIONS_MAX];
    client_stock stock[STORE_CLIENTS_MAX];
    queued_notice notices[LOOP_NOTICES_MAX];
    uint64_t notices_head, notices_count;
    uint32_t prepare_next; /* the client whose turn it is to have room made for */
    uint8_t *scratch;      /* answers are made here: one largest frame */
    loop_stats stats;
};

uint64_t loop_now_ns(void);

/* loop_ring.c */
void loop_drain(loop *self, uint32_t client);
void loop_drain_all(loop *self);
int loop_any_ring_has_entries(const loop *self);
void loop_refill_stock(loop *self, uint32_t client);
void loop_return_idle_stock(loop *self, uint64_t now_ns);
int loop_prepare_room(loop *self);

/* loop_frames.c */
#define LOOP_INPUT_BYTES (LOOP_FRAME_BYTES_MAX + 64) /* a largest frame with its header */
void loop_take_input(loop *self, uint32_t index);
void loop_queue_output(loop *self, uint32_t index, const uint8_t *bytes, uint64_t count);
void loop_flush_output(loop *self, uint32_t index);
void loop_drop_connection(loop *self, uint32_t index, uint32_t why);
void loop_push_notice(loop *self, const loop_notice *notice, const uint8_t *payload);

#endif
