/* Fuzz target: the daemon's socket, fed by a client that sends anything.
 *
 * The first byte cuts the rest into pieces, as reads from a socket would.  With its lowest bit the
 * bytes go out as they are; without, they are taken as a list of frames (message, size, content)
 * and sent under sound headers, so that the search goes past the magic number into the messages.
 * The loop's own thread is kept out by its mutex.  Afterwards the store's books must add up.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../loop_private.h"

enum { RECORDS = 64, DATA_BYTES = 256 * 4096, BYTES_MAX = 4096, HEADER = 16, AUDIT_EVERY = 64 };

static store *state;
static loop *running;
static uint32_t client;

static void require(int condition) {
    if (!condition) abort();
}

static void start(void) {
    const uint8_t instance[16] = "fuzzed instance", name_space[16] = "fuzzed namespace";
    const uint64_t seed[2] = {11, 13}, shard_bytes[2] = {4096, 5000};
    uint32_t class_id;
    void *index = calloc(1, arena_index_bytes(RECORDS, 2, DATA_BYTES));
    void *ledger = calloc(1, arena_ledger_bytes(RECORDS));
    require(index && ledger);
    state = store_create(index, instance, 1, RECORDS, 2, DATA_BYTES, seed);
    require(state != NULL);
    client = (uint32_t)store_client_attach(state, ledger, 5);
    require(store_class_open(state, name_space, 0, 2, shard_bytes, "m", &class_id) == STORE_OK);
    running = loop_start(state, 1000000000ull, 1000000000ull);
    require(running != NULL);
}

/* Frames with sound headers made of `input`; bytes written to `wire`. */
static size_t frame(const uint8_t *input, size_t size, uint8_t *wire) {
    size_t out = 0;
    for (size_t at = 0; at + 2 <= size;) {
        uint32_t magic = 0x44564b49u, id = (uint32_t)at;
        uint16_t message = input[at] % 14, kind = 0;
        uint32_t payload = input[at + 1];
        at += 2;
        if (payload > size - at) payload = (uint32_t)(size - at);
        if (out + HEADER + payload > 2 * BYTES_MAX) break;
        memcpy(wire + out, &payload, 4);
        memcpy(wire + out + 4, &message, 2);
        memcpy(wire + out + 6, &kind, 2);
        memcpy(wire + out + 8, &id, 4);
        memcpy(wire + out + 12, &magic, 4);
        memcpy(wire + out + HEADER, input + at, payload);
        out += HEADER + payload;
        at += payload;
    }
    return out;
}

/* Sends in pieces and lets the loop take each, reading what it answers. */
static void converse(int peer, uint32_t index, const uint8_t *wire, size_t size, size_t piece) {
    uint8_t answers[65536];
    loop_lock(running);
    for (size_t at = 0; at < size && running->connections[index].descriptor >= 0; at += piece) {
        size_t count = size - at < piece ? size - at : piece;
        if (send(peer, wire + at, count, MSG_NOSIGNAL) != (ssize_t)count) break;
        loop_take_input(running, index);
        while (recv(peer, answers, sizeof answers, MSG_DONTWAIT) > 0) continue;
    }
    loop_unlock(running);
}

static void take_notices(void) {
    static uint8_t payload[LOOP_CONTROL_BYTES_MAX];
    loop_notice notice;
    do {
        loop_next(running, &notice, payload);
        require(notice.payload_bytes <= LOOP_CONTROL_BYTES_MAX);
    } while (notice.kind != LOOP_NOTHING);
}

static void check_books(void) {
    static unsigned executions;
    if (++executions % AUDIT_EVERY) return;
    loop_lock(running);
    require(store_audit(state) == NULL);
    loop_unlock(running);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    static uint8_t wire[2 * BYTES_MAX];
    if (!state) start();
    if (size < 2) return 0;
    size_t given = size - 1 < BYTES_MAX ? size - 1 : BYTES_MAX, count = given;
    if (input[0] & 1)
        memcpy(wire, input + 1, given);
    else
        count = frame(input + 1, given, wire);
    int pair[2];
    require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    size_t handed_over = input[0] & 2 ? count / 2 : 0; /* read before the loop got the socket */
    uint64_t name = loop_add(running, pair[0], client, wire, handed_over);
    require(name != 0);
    converse(pair[1], (uint32_t)name, wire + handed_over, count - handed_over, 1 + (input[0] >> 2));
    loop_close(running, name);
    close(pair[1]);
    take_notices();
    check_books();
    return 0;
}
