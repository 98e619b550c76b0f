/* Stock and ring.
 *
 * A put must not wait for the daemon.  So the daemon reserves some extents ahead for each client
 * and lays them out in the client's own file (`stock`); the client takes one with a
 * compare-and-swap, copies its bytes, and leaves the commit in a ring of 4,096 entries in the same
 * file.  The daemon drains the ring, makes records of the commits, and refills the stock.
 *
 * Ring.  One consumer (the daemon); producers are the client's threads, under the view's mutex.
 * `ring_head` and `ring_tail` only grow; an entry is written before head is released and read
 * before tail is.  A full ring is not waited for: the caller falls back to the socket.
 *
 * Doorbell.  The daemon sets `sleeping` in the index header, fences, looks at all rings once more,
 * and sleeps; the client releases its head, fences, and rings the eventfd only when it reads
 * `sleeping`.  With both fences at least one side sees the other (the same argument as for pins).
 *
 * What stands in the file is a client's word.  The daemon looks reservations up by client and
 * generation, and bounds every index; a stray write costs that client its own stock.
 */
#include "ring.h"

#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "arena_private.h"
#include "checksum.h"

static arena_stock_entry *stock_of(const arena_ledger_header *ledger) {
    return (arena_stock_entry *)((char *)ledger + ARENA_LEDGER_STOCK_OFFSET);
}

static arena_ring_entry *entries_of(const arena_ledger_header *ledger) {
    return (arena_ring_entry *)((char *)ledger + ARENA_LEDGER_RING_OFFSET);
}

static uint32_t state_of(uint64_t word) {
    return (uint32_t)word;
}

static uint64_t with_state(uint64_t word, uint32_t state) {
    return (word >> 32 << 32) | state;
}

static uint64_t kind_of(uint32_t class_id, uint32_t shard) {
    return (uint64_t)shard << 32 | class_id;
}

/* Read before the entry is taken, so it may change meanwhile; then the taking fails. */
static int is_of_kind(const arena_stock_entry *entry, uint32_t class_id, uint32_t shard) {
    return atomic_load_explicit(&entry->kind, memory_order_relaxed) == kind_of(class_id, shard);
}

int ring_stock_take(const arena_view *view, uint32_t class_id, uint32_t shard,
                    ring_stock_item *item) {
    arena_stock_entry *stock = stock_of(view->ledger);
    for (uint32_t step = 0; step < ARENA_STOCK_MAX; step++) {
        uint32_t at = (view->producer->stock_hint + step) % ARENA_STOCK_MAX;
        arena_stock_entry *entry = &stock[at];
        uint64_t word = atomic_load_explicit(&entry->state, memory_order_acquire);
        if (state_of(word) != STOCK_READY) continue;
        if (!is_of_kind(entry, class_id, shard)) continue;
        if (!atomic_compare_exchange_strong_explicit(&entry->state, &word,
                                                     with_state(word, STOCK_TAKEN),
                                                     memory_order_acq_rel, memory_order_relaxed))
            continue; /* the daemon has just taken it back */
        *item = (ring_stock_item){entry->reservation, entry->offset_bytes};
        atomic_store_explicit(&entry->state, with_state(word, STOCK_EMPTY), memory_order_release);
        view->producer->stock_hint = (at + 1) % ARENA_STOCK_MAX;
        return 1;
    }
    return 0;
}

/* Entries the ring has room for. */
static uint64_t ring_room(const arena_ledger_header *ledger) {
    uint64_t head = atomic_load_explicit(&ledger->ring_head, memory_order_relaxed);
    uint64_t tail = atomic_load_explicit(&ledger->ring_tail, memory_order_acquire);
    return head - tail < ARENA_RING_MAX ? ARENA_RING_MAX - (head - tail) : 0;
}

/* The caller holds the mutex and has seen that there is room. */
static void push(arena_ledger_header *ledger, const arena_ring_entry *entry) {
    uint64_t head = atomic_load_explicit(&ledger->ring_head, memory_order_relaxed);
    entries_of(ledger)[head % ARENA_RING_MAX] = *entry;
    atomic_store_explicit(&ledger->ring_head, head + 1, memory_order_release);
}

static void wake_daemon(const arena_view *view, int32_t doorbell) {
    atomic_thread_fence(memory_order_seq_cst);
    if (doorbell < 0 || !atomic_load_explicit(&view->header->daemon_sleeping, memory_order_relaxed))
        return;
    uint64_t one = 1;
    ssize_t written = write(doorbell, &one, sizeof one);
    (void)written; /* a full counter means that the bell is ringing already */
}

/* Saves one block; 0 when there is no stock for it. Copying is done without the mutex. */
static int put_one(const arena_view *view, const ring_put_facts *facts, const uint8_t *key,
                   uint32_t depth_grains, const uint64_t *segment_base,
                   const uint64_t *segment_stride, const uint64_t *segment_bytes,
                   uint64_t n_segments, uint64_t block_id) {
    ring_stock_item item;
    pthread_mutex_lock(&view->producer->mutex);
    int has_room = ring_room(view->ledger) > view->producer->promised;
    int taken = has_room && ring_stock_take(view, facts->class_id, facts->shard, &item);
    view->producer->promised += (uint64_t)taken; /* room for its commit */
    pthread_mutex_unlock(&view->producer->mutex);
    if (!taken) return 0;
    uint64_t total = 0;
    for (uint64_t s = 0; s < n_segments; s++) total += segment_bytes[s];
    arena_ring_entry entry = {.kind = RING_GIVE_UP, .reservation = item.reservation};
    int sound = item.offset_bytes % ARENA_UNIT_BYTES == 0 && total <= view->data_bytes &&
                item.offset_bytes <= view->data_bytes - total;
    if (sound) {
        uint64_t address = (uint64_t)(uintptr_t)view->data + item.offset_bytes;
        copy_blocks_gather(segment_base, segment_stride, segment_bytes, n_segments, &block_id,
                           &address, 1, &entry.sum);
        entry.kind = RING_COMMIT;
        entry.class_id = facts->class_id;
        memcpy(entry.key, key, ARENA_KEY_BYTES);
        entry.depth_grains = depth_grains;
        entry.flags = facts->flags;
        entry.ttl_s = facts->ttl_s;
        entry.tenant_tag = facts->tenant_tag;
    }
    pthread_mutex_lock(&view->producer->mutex);
    push(view->ledger, &entry);
    view->producer->promised--;
    pthread_mutex_unlock(&view->producer->mutex);
    return sound;
}

uint64_t ring_put(const arena_view *view, const ring_put_facts *facts, const uint8_t *keys,
                  const uint32_t *depths_grains, const uint64_t *segment_base,
                  const uint64_t *segment_stride, const uint64_t *segment_bytes,
                  uint64_t n_segments, const uint64_t *block_ids, uint64_t n) {
    uint64_t done = 0;
    if (!view->ledger || !view->data) return 0;
    for (; done < n; done++) {
        if (!put_one(view, facts, keys + done * ARENA_KEY_BYTES, depths_grains[done], segment_base,
                     segment_stride, segment_bytes, n_segments, block_ids[done]))
            break;
        wake_daemon(view, facts->doorbell);
    }
    return done;
}

/* Touches the ring has room for beside what commits may need. The caller holds the mutex. */
static uint64_t touch_room(const arena_view *view) {
    uint64_t room = ring_room(view->ledger), kept = ARENA_RING_MAX / 2 + view->producer->promised;
    return room > kept ? room - kept : 0;
}

uint64_t ring_touch(const arena_view *view, uint32_t class_id, int32_t doorbell,
                    const uint8_t *keys, uint64_t n, uint64_t most) {
    if (!view->ledger || n == 0 || pthread_mutex_trylock(&view->producer->mutex) != 0) return 0;
    uint64_t room = touch_room(view), left = 0;
    if (most > room) most = room;
    if (most) {
        uint64_t step = (n + most - 1) / most, first = view->producer->touch_turn++ % step;
        uint64_t count = first < n ? (n - first + step - 1) / step : 0;
        for (uint64_t i = count; i-- > 0;
             left++) { /* the deepest first: the head is touched last */
            arena_ring_entry entry = {.kind = RING_TOUCH, .class_id = class_id};
            memcpy(entry.key, keys + (first + i * step) * ARENA_KEY_BYTES, ARENA_KEY_BYTES);
            push(view->ledger, &entry);
        }
    }
    pthread_mutex_unlock(&view->producer->mutex);
    if (left) wake_daemon(view, doorbell);
    return left;
}

int ring_stock_offer(arena_ledger_header *ledger, uint32_t at, uint32_t class_id, uint32_t shard,
                     uint64_t reservation, uint64_t offset_bytes) {
    arena_stock_entry *entry = &stock_of(ledger)[at];
    uint64_t word = atomic_load_explicit(&entry->state, memory_order_acquire);
    if (state_of(word) != STOCK_EMPTY) return 0;
    entry->reservation = reservation;
    entry->offset_bytes = offset_bytes;
    atomic_store_explicit(&entry->kind, kind_of(class_id, shard), memory_order_relaxed);
    uint64_t filled = (((word >> 32) + 1) << 32) | STOCK_READY;
    atomic_store_explicit(&entry->state, filled, memory_order_release);
    return 1;
}

int ring_stock_revoke(arena_ledger_header *ledger, uint32_t at, uint64_t *reservation) {
    arena_stock_entry *entry = &stock_of(ledger)[at];
    uint64_t word = atomic_load_explicit(&entry->state, memory_order_acquire);
    if (state_of(word) != STOCK_READY) return 0;
    *reservation = entry->reservation;
    return atomic_compare_exchange_strong_explicit(&entry->state, &word,
                                                   with_state(word, STOCK_EMPTY),
                                                   memory_order_acq_rel, memory_order_relaxed);
}

int ring_stock_peek(const arena_ledger_header *ledger, uint32_t at, uint32_t class_id,
                    uint32_t shard) {
    const arena_stock_entry *entry = &stock_of(ledger)[at];
    uint64_t word = atomic_load_explicit(&entry->state, memory_order_acquire);
    if (state_of(word) == STOCK_EMPTY) return STOCK_EMPTY;
    int matches = state_of(word) == STOCK_READY && is_of_kind(entry, class_id, shard);
    return matches ? STOCK_READY : STOCK_OTHER;
}

int ring_stock_offers(const arena_ledger_header *ledger, uint64_t reservation) {
    const arena_stock_entry *stock = stock_of(ledger);
    for (uint32_t at = 0; at < ARENA_STOCK_MAX; at++) {
        uint64_t word = atomic_load_explicit(&stock[at].state, memory_order_acquire);
        if (state_of(word) == STOCK_READY && stock[at].reservation == reservation) return 1;
    }
    return 0;
}

int ring_has_entries(const arena_ledger_header *ledger) {
    return atomic_load_explicit(&ledger->ring_head, memory_order_acquire) !=
           atomic_load_explicit(&ledger->ring_tail, memory_order_relaxed);
}

int ring_peek(arena_ledger_header *ledger, arena_ring_entry *entry) {
    uint64_t head = atomic_load_explicit(&ledger->ring_head, memory_order_acquire);
    uint64_t tail = atomic_load_explicit(&ledger->ring_tail, memory_order_relaxed);
    if (head == tail) return 0;
    if (head - tail > ARENA_RING_MAX) {
        atomic_store_explicit(&ledger->ring_tail, head, memory_order_release);
        return -1;
    }
    arena_copy_once(entry, &entries_of(ledger)[tail % ARENA_RING_MAX], sizeof *entry);
    return 1;
}

void ring_advance(arena_ledger_header *ledger) {
    uint64_t tail = atomic_load_explicit(&ledger->ring_tail, memory_order_relaxed);
    atomic_store_explicit(&ledger->ring_tail, tail + 1, memory_order_release);
}
