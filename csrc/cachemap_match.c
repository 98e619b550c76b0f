/* Reading the cache map: the longest match of one prompt for all targets, in one walk.
 *
 * Targets of one block size share a *lane*.  In a lane every target is a bit, at the place its own
 * holder's slot has among 64 neighbours, so that the chunk of a key (or its few places) is ANDed
 * with all of them at once.  A target is `fast` as long as its engine's own memory has every block.
 * What it loses then goes on `low`: own lower tiers and the holders it shares, each block from the
 * fastest tier that has it, up to the first block nobody has.  Which tier serves which target
 * changes rarely along a prompt, so lengths are added per run, not per block.
 *
 * Finding.  Blocks that were stored one after the other have nodes one after the other, so the next
 * key is first looked for in the node after the last one: one comparison, no hashing, and memory in
 * order.  Where that fails twice in a row keys are hashed with buckets and nodes fetched ahead,
 * until nodes are in order again.
 *
 * Hybrid models.  A rank's further groups are holders of their own, linked from its first.  For
 * such a target the walk notes who holds each key, and afterwards the longest prefix is sought at
 * which every group has what its rule wants.  Lower tiers are not counted for these: no daemon
 * keeps all groups.
 *
 * Targets that a walk has no room for (many block sizes, many kvds, one holder named twice) are
 * taken in another one.
 */
#include <stdlib.h>
#include <string.h>

#include "cachemap_private.h"
#include "checksum.h"
#include "content_key.h"

#define LANES_MAX    4
#define WORDS_MAX    SLOT_GROUPS
#define KVDS_MAX     16
#define READ_TRIES   64 /* of a set that keeps changing shape before it counts as a miss */
#define DISORDER     2  /* nodes not in order before keys are hashed ahead */
#define ORDER        8  /* nodes in order before that ends */
#define FAR          16 /* keys ahead at which buckets are fetched */
#define NEAR         8  /* keys ahead at which buckets are there and nodes are fetched */
#define IN_ORDER     12 /* nodes and chunks ahead that are fetched while they are in order */
#define RING         32 /* a power of two above FAR */
#define NO_WORD      0xFF
#define LOWER        3 /* tiers below HBM */
#define GRAIN_TOKENS CONTENT_KEY_GRAIN_TOKENS

typedef struct {
    uint32_t stride, blocks; /* blocks seen so far */
    uint64_t next;           /* grains at which the next block ends */
    uint64_t alive;          /* whether any target is still fast or low */
    uint32_t stamp;          /* of the presence that was taken in last */
    uint64_t fast[WORDS_MAX], low[WORDS_MAX];
    uint64_t endless[WORDS_MAX];    /* whose first group does not need every block */
    uint64_t run[LOWER][WORDS_MAX]; /* who has been served by which tier since run_start */
    uint32_t run_start[WORDS_MAX];
    uint64_t kvd_readers[KVDS_MAX][WORDS_MAX];
    uint16_t target[WORDS_MAX][64];
} lane;

typedef struct {
    uint64_t hbm[WORDS_MAX], low[LOWER][WORDS_MAX];
    uint32_t kvd_tiers[KVDS_MAX]; /* bit a tier */
    int has_low, has_kvd;
    /* Neighbouring blocks mostly have the same holders: what was noted last, and a number that is
     * another one whenever something else was noted. */
    enum { NOTED_OTHER, NOTED_FEW, NOTED_CHUNK } noted;
    uint64_t noted_word; /* the set, or the bits of its only chunk */
    uint32_t noted_place, stamp;
} presence;

typedef struct {
    const cachemap_view *view;
    cachemap_match *matches;
    uint32_t lanes, words, kvds;
    uint8_t word_of[SLOT_GROUPS];
    uint16_t kvd_slots[KVDS_MAX];
    uint64_t kvd_bits[SLOT_GROUPS]; /* which slots of a group are kvds */
    uint64_t *rows; /* hbm words of every grain read, when a target is a hybrid model's */
    uint32_t hybrids;
    uint16_t hybrid[CACHEMAP_TARGETS_MAX]; /* targets of this walk to which rules apply */
    uint16_t slots[CACHEMAP_TARGETS_MAX];  /* of every target's own holder, as it was found */
    lane lane[LANES_MAX];
} walk;

/* ---- reading one key ---- */

typedef struct {
    uint64_t key[2], hash;
    uint32_t node; /* likely, 0: not known */
} ahead;

static const cachemap_bucket *bucket_at(const cachemap_view *view, uint32_t home, uint32_t step) {
    uint32_t index = home + step;
    return &view->buckets[index < view->bucket_count ? index : index - view->bucket_count];
}

/* The set of a node if it is the key's now: key, set, and the key again, because the node may be
 * freed and used for another key in between. */
static inline int read_node(const cachemap_view *view, uint32_t node, const uint64_t key[2],
                            uint64_t *set) {
    if (!node || node >= view->nodes_max) return 0;
    const cachemap_node *found = &view->nodes[node];
    const _Atomic uint64_t *words = (const _Atomic uint64_t *)found->key;
    if (atomic_load_explicit(&words[0], memory_order_relaxed) != key[0] ||
        atomic_load_explicit(&words[1], memory_order_relaxed) != key[1])
        return 0;
    *set = atomic_load_explicit(&found->set, memory_order_acquire);
    if (!*set) return 0; /* free: its key is a link, which may look like the one wanted */
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&words[0], memory_order_relaxed) == key[0] &&
           atomic_load_explicit(&words[1], memory_order_relaxed) == key[1];
}

static uint32_t find(const cachemap_view *view, const uint64_t key[2], uint64_t *set) {
    uint64_t hash = cachemap_hash(view->seed, key);
    uint32_t home = cachemap_home(hash, view->bucket_count);
    uint32_t reach = atomic_load_explicit(&view->buckets[home].reach, memory_order_acquire);
    if (reach >= BUCKET_WINDOW) reach = BUCKET_WINDOW - 1;
    for (uint32_t step = 0; step <= reach; step++) {
        const cachemap_bucket *bucket = bucket_at(view, home, step);
        for (uint32_t left = cachemap_lanes(bucket, cachemap_tag(hash)); left; left &= left - 1) {
            uint32_t node =
                atomic_load_explicit(&bucket->nodes[__builtin_ctz(left)], memory_order_relaxed);
            if (read_node(view, node, key, set)) return node;
        }
    }
    return 0;
}

static void guess_node(const cachemap_view *view, ahead *wanted) {
    const cachemap_bucket *bucket = &view->buckets[cachemap_home(wanted->hash, view->bucket_count)];
    uint32_t lanes = cachemap_lanes(bucket, cachemap_tag(wanted->hash));
    wanted->node = 0;
    if (!lanes) return;
    uint32_t node =
        atomic_load_explicit(&bucket->nodes[__builtin_ctz(lanes)], memory_order_relaxed);
    if (node >= view->nodes_max) return;
    wanted->node = node;
    __builtin_prefetch(&view->nodes[node]);
}

static void note_places(const walk *self, presence *seen, uint32_t place, uint64_t bits) {
    uint32_t tier = place & 7, group = place >> 3;
    if (group >= SLOT_GROUPS || tier >= CACHEMAP_TIERS) return;
    uint8_t word = self->word_of[group];
    if (tier == CACHEMAP_HBM || tier == CACHEMAP_PREDICTED) {
        if (word != NO_WORD) seen->hbm[word] |= bits;
        return;
    }
    if (word != NO_WORD) {
        seen->low[tier - 1][word] |= bits;
        seen->has_low = 1;
    }
    if (!(bits & self->kvd_bits[group])) return;
    for (uint32_t kvd = 0; kvd < self->kvds; kvd++) {
        uint32_t slot = self->kvd_slots[kvd];
        if (slot >> 6 == group && (bits >> (slot & 63) & 1)) {
            seen->kvd_tiers[kvd] |= 1u << tier;
            seen->has_kvd = 1;
        }
    }
}

static void forget(const walk *self, presence *seen) {
    for (uint32_t word = 0; word < self->words; word++) seen->hbm[word] = 0;
    if (seen->has_low)
        for (uint32_t tier = 0; tier < LOWER; tier++)
            for (uint32_t word = 0; word < self->words; word++) seen->low[tier][word] = 0;
    if (seen->has_kvd) memset(seen->kvd_tiers, 0, sizeof seen->kvd_tiers);
    seen->has_low = seen->has_kvd = 0;
    seen->noted = NOTED_OTHER;
    seen->stamp++;
}

/* Walks a chain; 0 when it makes no sense, because it changed under way or the map is damaged. */
static int note_chain(const walk *self, presence *seen, uint64_t set) {
    const cachemap_view *view = self->view;
    uint32_t index = (uint32_t)set, limit = SLOT_GROUPS * CACHEMAP_TIERS;
    while (index) {
        if (index >= view->chunks_max || !limit--) return 0;
        const cachemap_chunk *chunk = &view->chunks[index];
        __builtin_prefetch(chunk + IN_ORDER);
        note_places(self, seen, atomic_load_explicit(&chunk->place, memory_order_relaxed),
                    atomic_load_explicit(&chunk->bits, memory_order_relaxed));
        index = atomic_load_explicit(&chunk->next, memory_order_relaxed);
    }
    return 1;
}

static void note_few(const walk *self, presence *seen, uint64_t set) {
    if (seen->noted == NOTED_FEW && seen->noted_word == set) return;
    forget(self, seen);
    for (uint64_t left = set; left; left >>= SET_PLACE_BITS) {
        uint32_t at = (uint32_t)(left & SET_PLACE_MASK);
        if (at) note_places(self, seen, GROUP_PLACE(at >> 3, at & 7), 1ull << (at >> 3 & 63));
    }
    seen->noted = NOTED_FEW;
    seen->noted_word = set;
}

/* Notes a set that is one chunk; 0 when it is more. */
static inline int note_chunk(const walk *self, presence *seen, uint64_t set) {
    uint32_t index = (uint32_t)set;
    if (index >= self->view->chunks_max) return 0;
    const cachemap_chunk *chunk = &self->view->chunks[index];
    __builtin_prefetch(chunk + IN_ORDER);
    if (atomic_load_explicit(&chunk->next, memory_order_relaxed)) return 0;
    uint64_t bits = atomic_load_explicit(&chunk->bits, memory_order_relaxed);
    uint32_t place = atomic_load_explicit(&chunk->place, memory_order_relaxed);
    if (seen->noted == NOTED_CHUNK && seen->noted_word == bits && seen->noted_place == place)
        return 1;
    forget(self, seen);
    note_places(self, seen, place, bits);
    seen->noted = NOTED_CHUNK;
    seen->noted_word = bits;
    seen->noted_place = place;
    return 1;
}

/* Who holds a key, as far as this walk wants to know; `node` is where it may be. Returns the node,
 * or 0 when nobody holds the key. */
static inline __attribute__((always_inline)) uint32_t look_up(const walk *self,
                                                              const uint64_t key[2], uint32_t node,
                                                              presence *seen) {
    const cachemap_view *view = self->view;
    uint64_t set = 0, again = 0;
    for (int attempt = 0; attempt < READ_TRIES; attempt++) {
        if (!read_node(view, node, key, &set)) {
            node = find(view, key, &set);
            if (!node) break;
        }
        if (!(set & SET_IS_CHAIN)) {
            note_few(self, seen, set);
            return set ? node : 0;
        }
        int is_whole = note_chunk(self, seen, set);
        if (!is_whole) {
            forget(self, seen);
            is_whole = note_chain(self, seen, set);
        }
        atomic_thread_fence(memory_order_acquire);
        if (is_whole && read_node(view, node, key, &again) && again == set) return node;
    }
    forget(self, seen); /* nobody, or changing all the time: a miss */
    return 0;
}

/* ---- the targets of one block size ---- */

static void add_run(walk *self, lane *own, uint32_t word, uint32_t until) {
    uint32_t grains = (until - own->run_start[word]) * own->stride;
    own->run_start[word] = until;
    if (!grains) return;
    for (uint32_t tier = 0; tier < LOWER; tier++)
        for (uint64_t left = own->run[tier][word]; left; left &= left - 1)
            self->matches[own->target[word][__builtin_ctzll(left)]].grains[tier + 1] += grains;
}

static void lose_fast(walk *self, lane *own, uint32_t word, uint64_t lost) {
    own->fast[word] &= ~lost;
    own->low[word] |= lost;
    for (; lost; lost &= lost - 1)
        self->matches[own->target[word][__builtin_ctzll(lost)]].grains[CACHEMAP_HBM] =
            own->blocks * own->stride;
}

static void step_low(walk *self, lane *own, uint32_t word, const presence *seen) {
    uint64_t served[LOWER] = {0}, left = own->low[word];
    for (uint32_t tier = 0; tier < LOWER && left; tier++) {
        uint64_t has = seen->has_low ? seen->low[tier][word] : 0;
        for (uint32_t kvd = 0; seen->has_kvd && kvd < self->kvds; kvd++)
            if (seen->kvd_tiers[kvd] >> (tier + 1) & 1) has |= own->kvd_readers[kvd][word];
        served[tier] = has & left;
        left &= ~has;
    }
    int is_same = 1;
    for (uint32_t tier = 0; tier < LOWER; tier++) is_same &= served[tier] == own->run[tier][word];
    if (!is_same) {
        add_run(self, own, word, own->blocks);
        for (uint32_t tier = 0; tier < LOWER; tier++) own->run[tier][word] = served[tier];
    }
    own->low[word] = served[0] | served[1] | served[2];
}

static void step(walk *self, lane *own, const presence *seen) {
    own->blocks++;
    own->next += own->stride;
    if (own->stamp == seen->stamp) return; /* the same again changes nothing */
    own->stamp = seen->stamp;
    own->blocks--;
    own->alive = 0;
    for (uint32_t word = 0; word < self->words; word++) {
        uint64_t lost = own->fast[word] & ~(seen->hbm[word] | own->endless[word]);
        if (lost) lose_fast(self, own, word, lost);
        if (own->low[word]) step_low(self, own, word, seen);
        own->alive |= own->fast[word] | own->low[word];
    }
    own->blocks++;
}

static void finish(walk *self, lane *own) {
    for (uint32_t word = 0; word < self->words; word++) {
        lose_fast(self, own, word, own->fast[word]);
        add_run(self, own, word, own->blocks);
    }
}

/* ---- laying out a walk ---- */

/* A holder's slot; 0 when the handle is void. */
static uint32_t slot_of(const cachemap_view *view, uint64_t handle) {
    uint64_t index = handle & 0xFFFF;
    if (!handle || index > CACHEMAP_HOLDERS_MAX) return 0;
    const cachemap_holder *holder = &view->holders[index];
    uint32_t slot = atomic_load_explicit(&holder->slot, memory_order_acquire);
    if (atomic_load_explicit(&holder->handle, memory_order_acquire) != handle) return 0;
    return slot < SLOTS ? slot : 0;
}

static uint32_t next_group(const cachemap_view *view, uint32_t index) {
    uint32_t next = atomic_load_explicit(&view->holders[index].next_group, memory_order_acquire);
    return next <= CACHEMAP_HOLDERS_MAX ? next : 0;
}

static uint8_t need_word(walk *self, uint32_t group) {
    if (self->word_of[group] == NO_WORD) {
        self->word_of[group] = (uint8_t)self->words++;
    }
    return self->word_of[group];
}

static lane *need_lane(walk *self, uint32_t stride) {
    for (uint32_t i = 0; i < self->lanes; i++)
        if (self->lane[i].stride == stride) return &self->lane[i];
    if (self->lanes == LANES_MAX) return NULL;
    lane *made = &self->lane[self->lanes++];
    made->stride = stride;
    made->blocks = 0;
    made->next = stride;
    made->alive = 0;
    made->stamp = 0;
    return made;
}

/* Number of a shared holder in this walk, or -1 when there is no room. */
static int need_kvd(walk *self, uint32_t slot) {
    for (uint32_t i = 0; i < self->kvds; i++)
        if (self->kvd_slots[i] == slot) return (int)i;
    if (self->kvds == KVDS_MAX) return -1;
    self->kvd_slots[self->kvds] = (uint16_t)slot;
    self->kvd_bits[slot >> 6] |= 1ull << (slot & 63);
    return (int)self->kvds++;
}

static void clear_lanes(walk *self) {
    for (uint32_t i = 0; i < self->lanes; i++) {
        lane *own = &self->lane[i];
        for (uint32_t word = 0; word < self->words; word++) {
            own->fast[word] = own->low[word] = own->endless[word] = 0;
            own->run[0][word] = own->run[1][word] = own->run[2][word] = 0;
            own->run_start[word] = 0;
            for (uint32_t kvd = 0; kvd < self->kvds; kvd++) own->kvd_readers[kvd][word] = 0;
        }
    }
}

/* Reserves words, lanes and kvds; returns 0 when this walk has no room for the target. */
static int reserve(walk *self, const cachemap_target *target, uint32_t slot, uint32_t *spare) {
    if (!need_lane(self, target->stride_grains)) return 0;
    for (int i = 0; i < CACHEMAP_SHARED_MAX && target->shared[i]; i++) {
        uint32_t shared = slot_of(self->view, target->shared[i]);
        if (shared && need_kvd(self, shared) < 0) return 0;
    }
    if (slot)
        need_word(self, slot >> 6);
    else
        ++*spare;
    return 1;
}

static uint32_t rule_of(const cachemap_view *view, uint64_t handle) {
    return atomic_load_explicit(&view->holders[handle & 0xFFFF].rule, memory_order_relaxed);
}

/* Whether more than "every block" is asked of a holder that is there. */
static int has_rules(const cachemap_view *view, uint64_t handle) {
    return next_group(view, (uint32_t)(handle & 0xFFFF)) != 0 ||
           rule_of(view, handle) != CACHEMAP_RULE_FULL;
}

/* Gives a target its bit; 0 when the bit is taken by another one. */
static int take_seat(walk *self, const cachemap_target *target, uint32_t number, uint32_t slot,
                     uint32_t word, uint32_t bit) {
    lane *own = need_lane(self, target->stride_grains);
    uint64_t mask = 1ull << bit;
    if (!own || ((own->fast[word] | own->low[word]) & mask)) return 0;
    *(slot ? &own->fast[word] : &own->low[word]) |= mask;
    own->target[word][bit] = (uint16_t)number;
    own->alive = 1;
    if (slot && has_rules(self->view, target->own)) {
        self->hybrid[self->hybrids++] = (uint16_t)number;
        if (rule_of(self->view, target->own) != CACHEMAP_RULE_FULL) own->endless[word] |= mask;
    }
    for (int i = 0; i < CACHEMAP_SHARED_MAX && target->shared[i]; i++) {
        uint32_t shared = slot_of(self->view, target->shared[i]);
        int kvd = shared ? need_kvd(self, shared) : -1;
        if (kvd >= 0) own->kvd_readers[kvd][word] |= mask;
    }
    return 1;
}

static int has_nothing(const walk *self, const cachemap_target *target) {
    for (int i = 0; i < CACHEMAP_SHARED_MAX && target->shared[i]; i++)
        if (slot_of(self->view, target->shared[i])) return 0;
    return 1;
}

/* Words for the further groups of a target's holder. */
static void reserve_groups(walk *self, uint64_t handle) {
    uint32_t index = (uint32_t)(handle & 0xFFFF);
    for (uint32_t hops = 1; hops < CACHEMAP_GROUPS_MAX; hops++) {
        index = next_group(self->view, index);
        if (!index) return;
        uint32_t slot =
            atomic_load_explicit(&self->view->holders[index].slot, memory_order_acquire);
        if (slot && slot < SLOTS) need_word(self, slot >> 6);
    }
}

#define NO_ROOM 0x8000u

/* Finds out what the waiting targets need; marks those this walk has no room for. Returns how many
 * of the others have no holder of their own. */
static uint32_t reserve_all(walk *self, const cachemap_target *targets, uint16_t *waiting,
                            uint32_t *n) {
    uint32_t spare = 0, kept = 0;
    for (uint32_t i = 0; i < *n; i++) {
        uint16_t number = waiting[i];
        const cachemap_target *target = &targets[number];
        uint32_t slot = slot_of(self->view, target->own);
        self->slots[number] = (uint16_t)slot;
        if (!target->stride_grains || (!slot && has_nothing(self, target))) continue;
        waiting[kept++] = number;
        if (slot) reserve_groups(self, target->own);
        if (!reserve(self, target, slot, &spare)) self->slots[number] |= NO_ROOM;
    }
    *n = kept;
    return spare;
}

/* Seats as many targets as there is room for; the numbers of the others stay in `waiting`. Returns
 * how many those are. */
static uint32_t seat_targets(walk *self, const cachemap_target *targets, uint16_t *waiting,
                             uint32_t n) {
    memset(self->word_of, NO_WORD, sizeof self->word_of);
    memset(self->kvd_bits, 0, sizeof self->kvd_bits);
    self->lanes = self->words = self->kvds = self->hybrids = 0;
    uint32_t spare = reserve_all(self, targets, waiting, &n), left = 0, spare_at = 0;
    /* Targets without a holder sit in words of their own. */
    uint32_t first_spare = self->words;
    while (self->words < WORDS_MAX && (self->words - first_spare) * 64 < spare) self->words++;
    clear_lanes(self);
    for (uint32_t i = 0; i < n; i++) {
        uint16_t number = waiting[i];
        uint32_t slot = self->slots[number] & (SLOTS - 1);
        int is_seated = 0;
        if (!(self->slots[number] & NO_ROOM)) {
            uint32_t word = slot ? self->word_of[slot >> 6] : first_spare + spare_at / 64;
            uint32_t bit = slot ? slot & 63 : spare_at % 64;
            if (word < self->words)
                is_seated = take_seat(self, &targets[number], number, slot, word, bit);
            spare_at += !slot;
        }
        if (!is_seated) waiting[left++] = number;
    }
    return left;
}

/* ---- the walk ---- */

static void look_ahead(const walk *self, const uint8_t *keys, uint64_t at, ahead *wanted) {
    cachemap_load_key(keys + at * KEY_BYTES, wanted->key);
    wanted->hash = cachemap_hash(self->view->seed, wanted->key);
    __builtin_prefetch(&self->view->buckets[cachemap_home(wanted->hash, self->view->bucket_count)]);
}

/* Whether a block of any lane that still goes on ends with grain `at`; bit a lane. */
static inline uint32_t lanes_ending(const walk *self, uint64_t at) {
    uint32_t ending = 0;
    if (self->lanes == 1 && self->lane[0].stride == 1) return 1;
    for (uint32_t i = 0; i < self->lanes; i++) {
        const lane *own = &self->lane[i];
        if (own->alive && own->next == at + 1) ending |= 1u << i;
    }
    return ending;
}

static int any_alive(const walk *self) {
    for (uint32_t i = 0; i < self->lanes; i++)
        if (self->lane[i].alive) return 1;
    return 0;
}

/* Gives a grain's holders to the lanes that end there. Returns 0 when no lane goes on. */
static inline int take_grain(walk *self, uint64_t at, uint32_t ending, const presence *seen) {
    int lost_one = 0;
    if (self->rows) memcpy(&self->rows[at * self->words], seen->hbm, self->words * 8);
    for (; ending; ending &= ending - 1) {
        lane *own = &self->lane[__builtin_ctz(ending)];
        step(self, own, seen);
        lost_one |= !own->alive;
    }
    return !lost_one || any_alive(self);
}

/* Where the walk is. */
typedef struct {
    uint64_t at;
    uint32_t node; /* of the last key that was found */
    int is_over;
} progress;

/* Looks for each key in the node after the last one's, until that fails too often. */
static void run_in_order(walk *self, const uint8_t *keys, uint64_t grains, presence *seen,
                         progress *now) {
    uint64_t key[2];
    uint32_t strays = 0;
    for (; now->at < grains && strays < DISORDER; now->at++) {
        uint32_t ending = lanes_ending(self, now->at);
        if (!ending) continue;
        cachemap_load_key(keys + now->at * KEY_BYTES, key);
        __builtin_prefetch(&self->view->nodes[now->node + 1 + IN_ORDER]);
        uint32_t found = look_up(self, key, now->node + 1, seen);
        strays = found == now->node + 1 ? 0 : strays + 1;
        now->node = found;
        if (!take_grain(self, now->at, ending, seen)) {
            now->is_over = 1;
            return;
        }
    }
}

/* Hashes keys ahead and fetches what they need, until nodes are in order again. */
static void run_by_hash(walk *self, const uint8_t *keys, uint64_t grains, presence *seen,
                        progress *now) {
    ahead ring[RING];
    uint64_t far = now->at, near = now->at;
    uint32_t in_order = 0;
    for (; now->at < grains && in_order < ORDER; now->at++) {
        for (; far < grains && far < now->at + FAR; far++)
            look_ahead(self, keys, far, &ring[far % RING]);
        for (; near < grains && near < now->at + NEAR; near++)
            guess_node(self->view, &ring[near % RING]);
        uint32_t ending = lanes_ending(self, now->at);
        if (!ending) continue;
        const ahead *wanted = &ring[now->at % RING];
        uint32_t found = look_up(self, wanted->key, wanted->node, seen);
        in_order = found && found == now->node + 1 ? in_order + 1 : 0;
        now->node = found;
        if (!take_grain(self, now->at, ending, seen)) {
            now->is_over = 1;
            return;
        }
    }
}

static void run(walk *self, const uint8_t *keys, uint64_t grains) {
    presence seen;
    progress now = {.is_over = !any_alive(self)};
    seen.stamp = 0;
    seen.has_low = seen.has_kvd = 1; /* so that all of it is cleared before the first use */
    forget(self, &seen);
    while (!now.is_over && now.at < grains) {
        run_in_order(self, keys, grains, &seen, &now);
        if (!now.is_over) run_by_hash(self, keys, grains, &seen, &now);
    }
    for (uint32_t i = 0; i < self->lanes; i++) finish(self, &self->lane[i]);
}

/* ---- hybrid models ---- */

typedef struct {
    uint32_t word, bit, stride, need; /* need: blocks at the end of the prefix; 0: all of them */
} group_rule;

static uint32_t read_groups(const walk *self, const cachemap_target *target,
                            group_rule rules[CACHEMAP_GROUPS_MAX]) {
    uint32_t count = 0, index = (uint32_t)(target->own & 0xFFFF);
    for (; index && count < CACHEMAP_GROUPS_MAX; index = next_group(self->view, index)) {
        const cachemap_holder *holder = &self->view->holders[index];
        uint32_t slot = atomic_load_explicit(&holder->slot, memory_order_acquire);
        uint32_t tokens = atomic_load_explicit(&holder->block_size_tokens, memory_order_relaxed);
        uint32_t rule = atomic_load_explicit(&holder->rule, memory_order_relaxed);
        uint32_t window = atomic_load_explicit(&holder->window_tokens, memory_order_relaxed);
        group_rule *made = &rules[count++];
        *made = (group_rule){NO_WORD, slot & 63, tokens / GRAIN_TOKENS, 0};
        if (!made->stride) made->stride = target->stride_grains;
        if (slot && slot < SLOTS) made->word = self->word_of[slot >> 6];
        if (rule == CACHEMAP_RULE_STATE) made->need = 1;
        if (rule == CACHEMAP_RULE_WINDOW && window > 1)
            made->need =
                (window - 1 + made->stride * GRAIN_TOKENS - 1) / (made->stride * GRAIN_TOKENS);
    }
    return count;
}

static int holds(const walk *self, const group_rule *rule, uint64_t end) {
    return self->rows[(end - 1) * self->words + rule->word] >> rule->bit & 1;
}

/* Grains up to which a group that needs every block has them all. */
static uint64_t whole_run(const walk *self, const group_rule *rule, uint64_t grains) {
    uint64_t end = 0;
    while (end + rule->stride <= grains && holds(self, rule, end + rule->stride))
        end += rule->stride;
    return end;
}

/* Longest prefix of at most `grains` at which a group that needs its last blocks has them. A block
 * that is missing rules out every prefix whose window it is in. */
static uint64_t windowed(const walk *self, const group_rule *rule, uint64_t grains) {
    uint64_t end = grains - grains % rule->stride;
    while (end) {
        uint64_t blocks = end / rule->stride, seen = 0;
        uint64_t need = rule->need < blocks ? rule->need : blocks;
        while (seen < need && holds(self, rule, end - seen * rule->stride)) seen++;
        if (seen == need) return end;
        end -= (seen + 1) * rule->stride;
    }
    return 0;
}

/* Shortens the prefix until every group can use it. Each round but the last shortens it. */
static void apply_rules(const walk *self, const cachemap_target *target, uint64_t grains,
                        cachemap_match *match) {
    group_rule rules[CACHEMAP_GROUPS_MAX];
    uint32_t count = read_groups(self, target, rules);
    uint64_t length = grains, before;
    memset(match, 0, sizeof *match);
    do {
        before = length;
        for (uint32_t i = 0; i < count; i++) {
            if (rules[i].word == NO_WORD) return;
            length = rules[i].need ? windowed(self, &rules[i], length)
                                   : whole_run(self, &rules[i], length);
            length -= length % target->stride_grains;
        }
    } while (length != before);
    match->grains[CACHEMAP_HBM] = (uint32_t)length;
}

/* ---- the entrance ---- */

/* A holder cleared or dropped under way gave up its slot: what was read of it is void. */
static void check_slots(const walk *self, const cachemap_target *targets, uint32_t n,
                        cachemap_match *matches) {
    for (uint32_t i = 0; i < n; i++)
        if (targets[i].own && slot_of(self->view, targets[i].own) != (self->slots[i] & (SLOTS - 1)))
            memset(&matches[i], 0, sizeof matches[i]);
}

int cachemap_match_all(const cachemap_view *view, const uint8_t *keys, uint64_t grains,
                       const cachemap_target *targets, uint32_t n, cachemap_match *matches) {
    if (n > CACHEMAP_TARGETS_MAX || grains > UINT32_MAX / 2) return CACHEMAP_FULL;
    uint16_t waiting[CACHEMAP_TARGETS_MAX];
    walk self;
    self.view = view;
    self.matches = matches;
    memset(matches, 0, n * sizeof *matches);
    for (uint32_t i = 0; i < n; i++) waiting[i] = (uint16_t)i;
    for (uint32_t left = n, before = n + 1; left && left < before;) {
        before = left;
        left = seat_targets(&self, targets, waiting, left);
        self.rows = self.hybrids && grains ? calloc(grains, self.words * sizeof(uint64_t)) : NULL;
        if (self.hybrids && grains && !self.rows) return CACHEMAP_NO_MEMORY;
        run(&self, keys, grains);
        for (uint32_t i = 0; i < self.hybrids; i++)
            apply_rules(&self, &targets[self.hybrid[i]], grains, &matches[self.hybrid[i]]);
        free(self.rows);
    }
    check_slots(&self, targets, n, matches);
    return CACHEMAP_OK;
}

int cachemap_match_tokens(const cachemap_view *view, const uint8_t *root, const uint32_t *tokens,
                          uint64_t count, uint8_t *keys, const cachemap_target *targets, uint32_t n,
                          cachemap_match *matches) {
    uint64_t grains = infera_key_chain(root, tokens, count, keys);
    return cachemap_match_all(view, keys, grains, targets, n, matches);
}
