/* Rings and stock, the daemon's side. Everything here runs with the loop's mutex held. */
#include <string.h>

#include "loop_private.h"

/* Of one ring in a go: twice its size, so that nobody is starved. */
#define DRAIN_ENTRIES_MAX 8192
#define IDLE_STOCK_NS     10000000000ull

static void apply(loop *self, uint32_t client, const arena_ring_entry *entry) {
    switch (entry->kind) {
    case RING_COMMIT: {
        store_late_wish wish = {.retention = entry->flags,
                                .ttl_s = entry->ttl_s,
                                .tenant_tag = entry->tenant_tag,
                                .sum = entry->sum};
        memcpy(wish.wish.key, entry->key, sizeof wish.wish.key);
        wish.wish.depth_grains = entry->depth_grains;
        store_commit_stock(self->state, client, entry->reservation, &wish, loop_now_ns());
        break;
    }
    case RING_GIVE_UP:
        store_give_up(self->state, client, &entry->reservation, 1);
        break;
    case RING_TOUCH:
        store_touch(self->state, entry->class_id, entry->key, 1);
        break;
    default:
        self->stats.ring_broken_total++;
    }
}

/* Takes in one client's ring; whether there was anything. */
static int take_entries(loop *self, uint32_t client) {
    arena_ledger_header *ledger = store_ledger(self->state, client);
    arena_ring_entry entry;
    int taken = 0, got = 0;
    for (; ledger && taken < DRAIN_ENTRIES_MAX; taken++) {
        got = ring_peek(ledger, &entry);
        if (got <= 0) break;
        apply(self, client, &entry);
        ring_advance(ledger);
    }
    if (got < 0) self->stats.ring_broken_total++;
    self->stats.ring_entries_total += (uint64_t)taken;
    return taken > 0;
}

void loop_drain(loop *self, uint32_t client) {
    if (!take_entries(self, client)) return;
    self->stock[client].last_taken_ns = loop_now_ns();
    loop_refill_stock(self, client);
}

void loop_drain_client(loop *self, uint32_t client) {
    take_entries(self, client);
    memset(&self->stock[client], 0, sizeof self->stock[client]);
}

void loop_drain_all(loop *self) {
    uint32_t end = store_clients_end(self->state);
    for (uint32_t client = 0; client < end; client++) loop_drain(self, client);
}

int loop_any_ring_has_entries(const loop *self) {
    uint32_t end = store_clients_end(self->state);
    for (uint32_t client = 0; client < end; client++) {
        const arena_ledger_header *ledger = store_ledger(self->state, client);
        if (ledger && ring_has_entries(ledger)) return 1;
    }
    return 0;
}

int loop_want_stock(loop *self, uint32_t client, uint32_t class_id, uint32_t shard,
                    uint32_t count) {
    client_stock *stock = &self->stock[client];
    stock_wish *place = NULL;
    for (uint32_t i = 0; i < LOOP_STOCK_WISHES_MAX; i++) {
        stock_wish *wish = &stock->wishes[i];
        int is_same = wish->count && wish->class_id == class_id && wish->shard == shard;
        if (is_same || (!wish->count && !place)) place = wish;
        if (is_same) break;
    }
    if (!place) {
        self->stats.stock_wishes_refused_total++;
        return 0;
    }
    uint32_t share =
        ARENA_STOCK_MAX / LOOP_STOCK_WISHES_MAX; /* so that every kind has its entries */
    *place = (stock_wish){class_id, shard, count < share * 4 ? count : share * 4};
    stock->last_taken_ns = loop_now_ns();
    loop_refill_stock(self, client);
    return 1;
}

/* How many entries offer a kind now, and which entries are empty. */
static uint32_t survey(arena_ledger_header *ledger, const stock_wish *wish, uint8_t *empty) {
    uint32_t ready = 0;
    for (uint32_t i = 0; i < ARENA_STOCK_MAX; i++) {
        int kind = ring_stock_peek(ledger, i, wish->class_id, wish->shard);
        ready += kind == STOCK_READY;
        empty[i] = kind == STOCK_EMPTY;
    }
    return ready;
}

void loop_refill_stock(loop *self, uint32_t client) {
    arena_ledger_header *ledger = store_ledger(self->state, client);
    uint8_t empty[ARENA_STOCK_MAX];
    self->stock[client].is_low = 0;
    for (uint32_t i = 0; ledger && i < LOOP_STOCK_WISHES_MAX; i++) {
        const stock_wish *wish = &self->stock[client].wishes[i];
        if (!wish->count) continue;
        uint32_t ready = survey(ledger, wish, empty);
        for (uint32_t at = 0; at < ARENA_STOCK_MAX && ready < wish->count; at++) {
            store_grant grant;
            if (!empty[at]) continue;
            if (store_stock(self->state, client, wish->class_id, wish->shard, &grant) != STORE_OK)
                break;
            if (ring_stock_offer(ledger, at, wish->class_id, wish->shard, grant.reservation,
                                 grant.offset_bytes))
                ready++;
            else
                store_give_up(self->state, client, &grant.reservation, 1);
        }
    }
}

/* Makes some room ahead, when the answers are out; whether there is more to make. */
int loop_prepare_room(loop *self) {
    uint32_t end = store_clients_end(self->state);
    for (uint32_t i = 0; i < end; i++) {
        uint32_t client = (self->prepare_next + i) % end;
        stock_wish *ahead = &self->stock[client].ahead;
        if (!ahead->count) continue;
        self->prepare_next = client;
        if (store_prepare_room(self->state, ahead->class_id, ahead->shard, ahead->count)) return 1;
        ahead->count = 0;
    }
    return 0;
}

/* Stock that nobody has taken from for a while goes back; the next save asks over the socket, and
 * that fills it again. */
void loop_return_idle_stock(loop *self, uint64_t now_ns) {
    uint32_t end = store_clients_end(self->state);
    for (uint32_t client = 0; client < end; client++) {
        arena_ledger_header *ledger = store_ledger(self->state, client);
        if (!ledger || self->stock[client].last_taken_ns + IDLE_STOCK_NS > now_ns) continue;
        for (uint32_t at = 0; at < ARENA_STOCK_MAX; at++) {
            uint64_t reservation;
            if (ring_stock_revoke(ledger, at, &reservation))
                store_give_up(self->state, client, &reservation, 1);
        }
    }
}
