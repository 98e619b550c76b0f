/* What the memory tier is compared with: plain copies, and a socket that only answers. */
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

void bare_copy(const uint64_t *targets, const uint64_t *sources, uint64_t n, uint64_t bytes) {
    for (uint64_t i = 0; i < n; i++)
        memcpy((void *)(uintptr_t)targets[i], (const void *)(uintptr_t)sources[i], bytes);
}

static int send_all(int descriptor, const uint8_t *bytes, uint64_t count) {
    while (count) {
        ssize_t sent = send(descriptor, bytes, count, MSG_NOSIGNAL);
        if (sent <= 0) return 0;
        bytes += sent;
        count -= (uint64_t)sent;
    }
    return 1;
}

/* Answers alternating requests of two sizes with answers of two sizes, as a daemon does: waiting in
 * epoll, then reading what is there. Returns when the peer is gone. */
void bare_serve(int descriptor, const uint64_t *request_bytes, const uint64_t *answer_bytes) {
    static uint8_t buffer[1 << 20];
    int poller = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event interest = {.events = EPOLLIN}, ready;
    epoll_ctl(poller, EPOLL_CTL_ADD, descriptor, &interest);
    uint64_t received = 0;
    for (int turn = 0;;) {
        if (epoll_wait(poller, &ready, 1, -1) < 0 && errno != EINTR) return;
        ssize_t got = recv(descriptor, buffer, sizeof buffer, MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return;
        if (got < 0) continue;
        received += (uint64_t)got;
        if (received < request_bytes[turn]) continue;
        received -= request_bytes[turn];
        if (!send_all(descriptor, buffer, answer_bytes[turn])) return;
        turn = !turn;
    }
}
