/* Bytes to frames, frames to store calls. The wire format is in docs/kvd-protocol.md; everything
 * read here is bounded before it is used. Runs with the loop's mutex held. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "loop_private.h"

#define MAGIC        0x44564b49u /* "IKVD" */
#define HEADER_BYTES 16
#define BATCH_MAX    16384

enum message { MESSAGE_RESERVE = 3, MESSAGE_COMMIT = 4, MESSAGE_GIVE_UP = 5, MESSAGE_TOUCH = 6 };
enum frame_kind { KIND_REQUEST = 0, KIND_ANSWER = 1, KIND_ERROR = 2 };

typedef struct {
    uint32_t payload_bytes;
    uint16_t message;
    uint16_t kind;
    uint32_t request_id;
    uint32_t magic;
} frame_header;

typedef struct {
    uint32_t class_id;
    uint16_t shard;
    uint16_t retention;
    uint64_t tenant_tag;
    uint32_t ttl_s;
    uint32_t reserved;
} reserve_head;

static void send_frame(loop *self, uint32_t index, const frame_header *request, uint16_t kind,
                       const uint8_t *payload, uint32_t payload_bytes) {
    frame_header header = {payload_bytes, request->message, kind, request->request_id, MAGIC};
    uint8_t head[HEADER_BYTES];
    memcpy(head, &header, sizeof head);
    loop_queue_output(self, index, head, sizeof head);
    if (self->connections[index].descriptor >= 0 && payload_bytes)
        loop_queue_output(self, index, payload, payload_bytes);
}

static void send_error(loop *self, uint32_t index, const frame_header *request, const char *text) {
    send_frame(self, index, request, KIND_ERROR, (const uint8_t *)text, (uint32_t)strlen(text));
}

/* Number of entries in a payload after its head, or 0 when that is not a batch. */
static uint64_t batch_of(uint32_t payload_bytes, uint64_t head_bytes, uint64_t entry_bytes) {
    if (payload_bytes <= head_bytes || (payload_bytes - head_bytes) % entry_bytes) return 0;
    uint64_t count = (payload_bytes - head_bytes) / entry_bytes;
    return count <= BATCH_MAX ? count : 0;
}

/* Answers RESERVE into the scratch; bytes of the answer, 0 when it is malformed. Payloads are not
 * aligned, so arrays are used through copies the compiler may make of them. */
static uint32_t do_reserve(loop *self, uint32_t client, const uint8_t *payload, uint32_t bytes) {
    uint64_t count = batch_of(bytes, sizeof(reserve_head), sizeof(store_wish));
    if (!count) return 0;
    reserve_head head;
    memcpy(&head, payload, sizeof head);
    const store_terms terms = {head.retention, head.ttl_s, head.tenant_tag};
    store_grant *grants = (store_grant *)self->scratch;
    uint64_t now_ns = loop_now_ns();
    for (uint64_t i = 0; i < count; i++) {
        store_wish wish;
        memcpy(&wish, payload + sizeof head + i * sizeof wish, sizeof wish);
        store_reserve(self->state, client, head.class_id, head.shard, &terms, &wish, 1, now_ns,
                      now_ns + self->reservation_ns, &grants[i]);
    }
    self->stock[client].last_taken_ns = now_ns;
    self->stock[client].is_low = 1; /* it saves: have stock ready for the next time */
    if (grants[0].status != STORE_BAD_REQUEST)
        self->stock[client].ahead = (stock_wish){head.class_id, head.shard, (uint32_t)count};
    return (uint32_t)(count * sizeof *grants);
}

static uint32_t do_commit(loop *self, uint32_t client, const uint8_t *payload, uint32_t bytes) {
    uint64_t count = batch_of(bytes, 0, sizeof(store_commitment));
    uint32_t *statuses = (uint32_t *)self->scratch;
    for (uint64_t i = 0; i < count; i++) {
        store_commitment commitment;
        memcpy(&commitment, payload + i * sizeof commitment, sizeof commitment);
        store_commit(self->state, client, &commitment, 1, &statuses[i]);
    }
    return (uint32_t)(count * sizeof *statuses);
}

static int do_give_up(loop *self, uint32_t client, const uint8_t *payload, uint32_t bytes) {
    uint64_t count = batch_of(bytes, 0, sizeof(uint64_t));
    for (uint64_t i = 0; i < count; i++) {
        uint64_t reservation;
        memcpy(&reservation, payload + i * sizeof reservation, sizeof reservation);
        store_give_up(self->state, client, &reservation, 1);
    }
    return count > 0;
}

static int do_touch(loop *self, const uint8_t *payload, uint32_t bytes) {
    uint32_t class_id;
    uint64_t count = batch_of(bytes, sizeof class_id, ARENA_KEY_BYTES);
    if (!count) return 0;
    memcpy(&class_id, payload, sizeof class_id);
    store_touch(self->state, class_id, payload + sizeof class_id, count);
    return 1;
}

static void pass_to_python(loop *self, uint32_t index, const frame_header *header,
                           const uint8_t *payload) {
    if (header->payload_bytes > LOOP_CONTROL_BYTES_MAX) {
        send_error(self, index, header, "this message is larger than 64 KiB");
        return;
    }
    if (self->notices_count >= LOOP_REQUESTS_MAX) { /* the other places are kept for CLOSED */
        send_error(self, index, header, "infera-kvd is busy with control requests; try again");
        return;
    }
    loop_notice notice = {.kind = LOOP_REQUEST,
                          .message = header->message,
                          .request_id = header->request_id,
                          .payload_bytes = header->payload_bytes,
                          .connection =
                              (uint64_t)self->connections[index].generation << 32 | index};
    loop_push_notice(self, &notice, payload);
}

static void answer(loop *self, uint32_t index, const frame_header *header, const uint8_t *payload) {
    uint32_t client = self->connections[index].client, bytes = header->payload_bytes, out = 0;
    int is_sound;
    self->stats.frames_total++;
    switch (header->message) {
    case MESSAGE_RESERVE:
        out = do_reserve(self, client, payload, bytes);
        is_sound = out > 0;
        break;
    case MESSAGE_COMMIT:
        out = do_commit(self, client, payload, bytes);
        is_sound = out > 0;
        break;
    case MESSAGE_GIVE_UP:
        is_sound = do_give_up(self, client, payload, bytes);
        break;
    case MESSAGE_TOUCH:
        is_sound = do_touch(self, payload, bytes);
        break;
    default:
        pass_to_python(self, index, header, payload);
        return;
    }
    if (is_sound)
        send_frame(self, index, header, KIND_ANSWER, self->scratch, out);
    else
        send_error(self, index, header, "malformed batch: 1 to 16384 whole entries are expected");
}

/* Says why and closes: after a bad header there is no telling where the next frame begins. */
static void refuse_bytes(loop *self, uint32_t index, const char *why) {
    frame_header none = {0};
    send_error(self, index, &none, why);
    if (self->connections[index].descriptor >= 0) loop_flush_output(self, index);
    if (self->connections[index].descriptor >= 0) loop_drop_connection(self, index, LOOP_MALFORMED);
}

/* Handles all whole frames at the start of the input, and moves the rest to its front. */
static void take_frames(loop *self, uint32_t index) {
    connection *from = &self->connections[index];
    uint64_t at = 0;
    while (from->descriptor >= 0 && from->input_bytes - at >= HEADER_BYTES) {
        frame_header header;
        memcpy(&header, from->input + at, sizeof header);
        if (header.magic != MAGIC) {
            refuse_bytes(self, index, "not the kvd protocol (wrong magic number)");
            return;
        }
        if (header.payload_bytes > LOOP_FRAME_BYTES_MAX) {
            refuse_bytes(self, index, "frame larger than a frame may be (1 MiB)");
            return;
        }
        if (header.kind != KIND_REQUEST) {
            refuse_bytes(self, index, "a client sends requests only");
            return;
        }
        if (from->input_bytes - at < HEADER_BYTES + (uint64_t)header.payload_bytes) break;
        answer(self, index, &header, from->input + at + HEADER_BYTES);
        at += HEADER_BYTES + header.payload_bytes;
    }
    if (from->descriptor < 0 || at == 0) return;
    memmove(from->input, from->input + at, from->input_bytes - at);
    from->input_bytes -= at;
}

void loop_take_input(loop *self, uint32_t index) {
    connection *from = &self->connections[index];
    if (from->input_bytes) { /* handed over with the connection */
        loop_drain(self, from->client);
        take_frames(self, index);
        if (from->descriptor < 0) return;
    }
    ssize_t got = recv(from->descriptor, from->input + from->input_bytes,
                       LOOP_INPUT_BYTES - from->input_bytes, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    if (got <= 0) {
        loop_drop_connection(self, index, LOOP_CLOSED);
        return;
    }
    from->input_bytes += (uint64_t)got;
    loop_drain(self, from->client); /* what it left in its ring came before these bytes */
    take_frames(self, index);
    uint32_t client = from->client;
    if (from->descriptor >= 0 && from->output_bytes) loop_flush_output(self, index);
    if (self->stock[client].is_low) loop_refill_stock(self, client); /* after the answer has gone */
}

static void watch_output(loop *self, uint32_t index, int waits_for_room) {
    connection *to = &self->connections[index];
    if (to->waits_for_room == waits_for_room) return;
    to->waits_for_room = waits_for_room;
    struct epoll_event interest = {.events = EPOLLIN | (waits_for_room ? EPOLLOUT : 0),
                                   .data.u64 = (uint64_t)to->generation << 32 | index};
    epoll_ctl(self->epoll, EPOLL_CTL_MOD, to->descriptor, &interest);
}

void loop_flush_output(loop *self, uint32_t index) {
    connection *to = &self->connections[index];
    uint64_t sent = 0;
    while (sent < to->output_bytes) {
        ssize_t got = send(to->descriptor, to->output + sent, to->output_bytes - sent,
                           MSG_DONTWAIT | MSG_NOSIGNAL);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
        if (got < 0) {
            loop_drop_connection(self, index, LOOP_CLOSED);
            return;
        }
        sent += (uint64_t)got;
    }
    if (sent) memmove(to->output, to->output + sent, to->output_bytes - sent);
    to->output_bytes -= sent;
    watch_output(self, index, to->output_bytes > 0);
}

/* Appends to what is unsent; 0 when memory or the limit ends it. */
static int keep_output(connection *to, const uint8_t *bytes, uint64_t count) {
    uint64_t needed = to->output_bytes + count;
    if (needed > LOOP_UNSENT_BYTES_MAX) return 0;
    if (needed > to->output_capacity) {
        uint64_t capacity = to->output_capacity ? to->output_capacity : 4096;
        while (capacity < needed) capacity *= 2;
        uint8_t *grown = realloc(to->output, capacity);
        if (!grown) return 0;
        to->output = grown;
        to->output_capacity = capacity;
    }
    memcpy(to->output + to->output_bytes, bytes, count);
    to->output_bytes = needed;
    return 1;
}

void loop_queue_output(loop *self, uint32_t index, const uint8_t *bytes, uint64_t count) {
    if (!keep_output(&self->connections[index], bytes, count))
        loop_drop_connection(self, index, LOOP_CLOSED);
}
