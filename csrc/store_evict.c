/* Making room.
 *
 * Present records stand, for each extent size, in one of five queues:
 *
 *   ephemeral   goes first, in order of age
 *   small       normal records that are new (S3-FIFO): about a tenth of the normal ones
 *   main        normal records that were used while they were in small, or came back soon after
 *   long        goes last, but first when all long records hold more than their share
 *   pinned      never goes
 *
 * S3-FIFO (Yang et al., SOSP 2023): a use only counts, it moves nothing.  At the old end of small,
 * what was used goes to main and what was not is evicted, leaving a fingerprint; who returns while
 * its fingerprint is there enters main at once.  At the old end of main, what was used goes round
 * again.  So a scan passes through small and leaves main alone, where plain LRU would lose all.
 *
 * Chains.  A record is of use only together with those before it in its prompt, so the deepest must
 * go first.  A new record is put on the older side of its parent, if that is new too: what arrives
 * head first then stands, and goes, tail first, also when it goes round.  The parent is known from
 * the order in which a client asks (one step deeper than what it asked for just before), so now and
 * then a stranger is taken for one; that costs order, never bytes.  When a record goes before its
 * child does, the child is orphaned: it moves to the old end of its queue and its uses are
 * forgotten.
 *
 * Sizes.  Space follows demand: the turn is that of the size whose next records have not been used
 * for longest.  If it is the wanted size one record goes, else the whole run it lies in is emptied,
 * provided that everything in the run may go; if not, the run is passed over and its records count
 * as used.  Every loop has a limit; at the limit the caller is told there is no space, and the
 * engine goes on without saving.
 */
#include <string.h>

#include "store_private.h"

#define STEPS_MAX      64   /* records looked at for one eviction */
#define ROOM_TRIES_MAX 32   /* records or runs given up for one new extent */
#define BLOCKED_MAX    2    /* runs passed over before a more valuable kind has to give */
#define RUN_OWNERS_MAX 4096 /* extents of one run emptied in a go */
#define USES_MAX       3
#define SMALL_SHARE    10   /* small is the normal records divided by this */
#define CHAIN_WINDOW   4096 /* a parent begun so many records ago is not new any more */
#define GHOST_WAYS     4
#define INDEX_SPARE_SHARE                                                                          \
    16                /* slots kept free, of all: two buckets of eight are then rarely full */
#define AHEAD_CHUNK 8 /* evictions ahead in a go: a request that comes meanwhile waits for them */

/* Who has to give: each level only when the ones before it have nothing. */
enum level { LEVEL_EPHEMERAL, LEVEL_LONG_OVER_SHARE, LEVEL_NORMAL, LEVEL_LONG, LEVELS };

/* ---- lists ---- */

static slot_links *links_of(const store *state, enum slot_link kind, uint32_t slot) {
    return &state->books[slot].links[kind];
}

/* Puts a slot on the older side of `before`, or at the young end (ARENA_NONE). */
void store_list_insert(store *state, enum slot_link kind, slot_list *list, uint32_t slot,
                       uint32_t before) {
    slot_links *own = links_of(state, kind, slot);
    own->next = before;
    own->previous = before == ARENA_NONE ? list->tail : links_of(state, kind, before)->previous;
    if (own->previous != ARENA_NONE)
        links_of(state, kind, own->previous)->next = slot;
    else
        list->head = slot;
    if (before != ARENA_NONE)
        links_of(state, kind, before)->previous = slot;
    else
        list->tail = slot;
    list->length++;
}

void store_list_append(store *state, enum slot_link kind, slot_list *list, uint32_t slot) {
    store_list_insert(state, kind, list, slot, ARENA_NONE);
}

void store_list_remove(store *state, enum slot_link kind, slot_list *list, uint32_t slot) {
    slot_links own = *links_of(state, kind, slot);
    if (own.previous != ARENA_NONE)
        links_of(state, kind, own.previous)->next = own.next;
    else
        list->head = own.next;
    if (own.next != ARENA_NONE)
        links_of(state, kind, own.next)->previous = own.previous;
    else
        list->tail = own.previous;
    list->length--;
}

/* ---- ghosts ---- */

static ghost *ghost_bucket(const store *state, uint32_t slot, uint32_t *fingerprint) {
    const arena_record *record = store_record(state, slot);
    uint64_t hash = mix_words(record->key[0] ^ state->header->seed[1], record->key[1]);
    hash = mix_words(hash ^ record->class_id, 0x9E3779B97F4A7C15ull);
    *fingerprint = (uint32_t)(hash >> 32) | 1; /* 0: empty */
    return &state->ghosts[hash & state->ghosts_mask & ~(uint64_t)(GHOST_WAYS - 1)];
}

/* A fingerprint counts as long as fewer have been left since than records are present. */
static uint32_t ghost_age(const store *state, const ghost *entry) {
    return state->ghost_serial - entry->serial;
}

static void leave_ghost(store *state, uint32_t slot) {
    uint32_t fingerprint;
    ghost *bucket = ghost_bucket(state, slot, &fingerprint), *oldest = bucket;
    for (uint32_t i = 0; i < GHOST_WAYS; i++) {
        if (bucket[i].fingerprint == 0) {
            oldest = &bucket[i];
            break;
        }
        if (ghost_age(state, &bucket[i]) > ghost_age(state, oldest)) oldest = &bucket[i];
    }
    *oldest = (ghost){fingerprint, state->ghost_serial++};
}

/* Whether the record left a fingerprint not long ago; it is used up. */
static int take_ghost(store *state, uint32_t slot) {
    uint32_t fingerprint;
    ghost *bucket = ghost_bucket(state, slot, &fingerprint);
    for (uint32_t i = 0; i < GHOST_WAYS; i++) {
        if (bucket[i].fingerprint != fingerprint) continue;
        bucket[i].fingerprint = 0;
        if (ghost_age(state, &bucket[i]) > state->stats.records_present) continue;
        state->stats.ghost_hits_total++;
        return 1;
    }
    return 0;
}

/* ---- chains ---- */

/* Takes a record just begun for the child of what its client asked for before. */
void store_link_chain(store *state, uint32_t client, uint32_t slot) {
    client_book *asker = &state->clients[client];
    slot_book *book = &state->books[slot];
    const arena_record *record = store_record(state, slot);
    uint32_t before = asker->last_slot;
    int is_known = before < state->slots && before != slot && store_is_used(state, before) &&
                   state->books[before].serial == asker->last_serial;
    asker->last_slot = slot;
    asker->last_serial = book->serial;
    if (!is_known || book->parent != ARENA_NONE) return;
    const arena_record *parent = store_record(state, before);
    if (parent->class_id != record->class_id || parent->depth_grains >= record->depth_grains)
        return;
    uint32_t deeper = record->depth_grains - parent->depth_grains;
    uint32_t *step = &state->class_steps[record->class_id];
    if (*step == 0 || deeper < *step) *step = deeper;
    if (deeper != *step) return;
    uint32_t sibling = state->books[before].child;
    if (sibling == slot) return;
    if (sibling != ARENA_NONE) state->books[sibling].parent = ARENA_NONE;
    state->books[before].child = slot;
    book->parent = before;
}

static slot_list *queue_of(store *state, uint32_t slot) {
    const slot_book *book = &state->books[slot];
    return &state->queues[book->size_class][book->queue];
}

/* What lost its parent goes next of its queue, whatever it was used for before. */
static void orphan(store *state, uint32_t slot) {
    slot_book *book = &state->books[slot];
    book->parent = ARENA_NONE;
    if (!store_is_present(state, slot)) return;
    slot_list *queue = queue_of(state, slot);
    book->uses = 0;
    store_list_remove(state, LINK_QUEUE, queue, slot);
    store_list_insert(state, LINK_QUEUE, queue, slot, queue->head);
    state->stats.orphaned_total++;
}

/* A record goes. */
void store_unlink_chain(store *state, uint32_t slot) {
    slot_book *book = &state->books[slot];
    if (book->parent != ARENA_NONE) state->books[book->parent].child = ARENA_NONE;
    if (book->child != ARENA_NONE) orphan(state, book->child);
    book->parent = book->child = ARENA_NONE;
}

/* Whom to stand before in a list of a kind: a parent that is new and there too, or ARENA_NONE. */
uint32_t store_place_in_chain(const store *state, uint32_t slot) {
    const slot_book *book = &state->books[slot];
    uint32_t parent = book->parent;
    if (parent == ARENA_NONE || !store_is_present(state, parent)) return ARENA_NONE;
    return state->record_serial - state->books[parent].serial < CHAIN_WINDOW ? parent : ARENA_NONE;
}

/* ---- queues ---- */

static enum slot_queue queue_for(store *state, uint32_t slot, int is_adopted) {
    switch (store_retention(store_record(state, slot))) {
    case STORE_RETAIN_EPHEMERAL:
        return QUEUE_EPHEMERAL;
    case STORE_RETAIN_LONG:
        return QUEUE_LONG;
    case STORE_RETAIN_PINNED:
        return QUEUE_PINNED;
    default:
        return is_adopted || take_ghost(state, slot) ? QUEUE_MAIN : QUEUE_SMALL;
    }
}

/* Puts a present record into its queue: one just stored, or one known from before. */
void store_queue(store *state, uint32_t slot, int is_adopted) {
    slot_book *book = &state->books[slot];
    if (!is_adopted) book->uses = 0;
    book->queue = (uint8_t)queue_for(state, slot, is_adopted);
    book->stamp = ++state->use_counter;
    if (book->size_class >= state->sizes_end) state->sizes_end = book->size_class + 1;
    uint32_t before = is_adopted ? ARENA_NONE : store_place_in_chain(state, slot);
    if (before != ARENA_NONE && queue_of(state, before) != queue_of(state, slot))
        before = ARENA_NONE;
    store_list_insert(state, LINK_QUEUE, queue_of(state, slot), slot, before);
}

void store_unqueue(store *state, uint32_t slot) {
    store_list_remove(state, LINK_QUEUE, queue_of(state, slot), slot);
}

/* Moves a record to the young end of a queue of its size. */
static void requeue(store *state, uint32_t slot, enum slot_queue queue) {
    store_unqueue(state, slot);
    state->books[slot].queue = (uint8_t)queue;
    store_list_append(state, LINK_QUEUE, queue_of(state, slot), slot);
}

/* Counts a use. */
void store_mark_used(store *state, uint32_t slot) {
    slot_book *book = &state->books[slot];
    book->uses += book->uses < USES_MAX;
    book->stamp = ++state->use_counter;
}

/* Passes over a record that may not go now. */
static void pass_over(store *state, uint32_t slot) {
    int is_small = state->books[slot].queue == QUEUE_SMALL;
    state->books[slot].stamp = ++state->use_counter;
    requeue(state, slot, is_small ? QUEUE_MAIN : (enum slot_queue)state->books[slot].queue);
}

/* ---- evicting ---- */

void store_give_extents(store *state, uint32_t slot, uint64_t shard_mask) {
    for (uint64_t left = shard_mask; left; left &= left - 1)
        extents_give(state->pool,
                     store_shard(state, slot, (uint32_t)__builtin_ctzll(left))->extent_start);
}

/* Evicts one present record with all its shards; 0 when a client has pinned it. */
int store_evict(store *state, uint32_t slot) {
    arena_record gone = *store_record(state, slot);
    if (!store_remove_record(state, slot, 0)) return 0;
    store_unqueue(state, slot);
    store_unlink_chain(state, slot);
    store_leave_owners(state, slot, &gone);
    store_unaccount(state, slot, &gone);
    state->stats.records_present--;
    state->stats.present_bytes -= store_record_bytes(state, gone.class_id);
    state->class_records[gone.class_id]--;
    store_give_extents(state, slot, gone.shard_mask);
    store_event event = {.class_id = gone.class_id, .is_removed = 1};
    memcpy(event.key, gone.key, sizeof event.key);
    store_announce_event(state, &event);
    return 1;
}

/* Evicts what is present because room is needed; in small, a fingerprint stays. */
static int give_way(store *state, uint32_t slot) {
    if (state->books[slot].queue == QUEUE_SMALL) leave_ghost(state, slot);
    if (!store_evict(state, slot)) {
        pass_over(state, slot);
        return 0;
    }
    state->stats.evicted_total++;
    return 1;
}

static int is_long_over_share(const store *state) {
    return state->retained_bytes[STORE_RETAIN_LONG] > state->header->data_bytes / STORE_LONG_SHARE;
}

/* The queue of a size that has to give at a level, or null. */
static slot_list *queue_at(store *state, uint32_t size, enum level level) {
    slot_list *queues = state->queues[size];
    slot_list *found = NULL;
    switch (level) {
    case LEVEL_EPHEMERAL:
        found = &queues[QUEUE_EPHEMERAL];
        break;
    case LEVEL_LONG_OVER_SHARE:
        if (is_long_over_share(state)) found = &queues[QUEUE_LONG];
        break;
    case LEVEL_LONG:
        found = &queues[QUEUE_LONG];
        break;
    default: {
        uint32_t small = queues[QUEUE_SMALL].length, main = queues[QUEUE_MAIN].length;
        int is_small_full = (uint64_t)small * SMALL_SHARE > (uint64_t)small + main;
        found = &queues[is_small_full || main == 0 ? QUEUE_SMALL : QUEUE_MAIN];
    }
    }
    return found && found->length ? found : NULL;
}

/* When the next records of a size to go at a level were last used. */
static uint64_t age_at(store *state, uint32_t size, enum level level) {
    const slot_list *queue = queue_at(state, size, level);
    if (!queue) return UINT64_MAX;
    uint64_t stamp = state->books[queue->head].stamp;
    uint32_t main = state->queues[size][QUEUE_MAIN].head;
    if (level == LEVEL_NORMAL && main != ARENA_NONE && state->books[main].stamp < stamp)
        stamp = state->books[main].stamp;
    return stamp;
}

/* The size whose turn it is at a level, or EXTENTS_NONE. */
static uint32_t oldest_size(store *state, enum level level) {
    uint32_t best = EXTENTS_NONE;
    uint64_t best_stamp = UINT64_MAX;
    for (uint32_t size = 0; size < state->sizes_end; size++) {
        uint64_t stamp = age_at(state, size, level);
        if (stamp >= best_stamp) continue;
        best_stamp = stamp;
        best = size;
    }
    return best;
}

/* Evicts one record of a size at a level; 0 when all looked at are in use. */
static int evict_at(store *state, uint32_t size, enum level level, uint32_t *steps) {
    for (int step = 0; step < STEPS_MAX; step++) {
        int is_late = step >= STEPS_MAX / 2;
        slot_list *queue = queue_at(state, size, level), *main = &state->queues[size][QUEUE_MAIN];
        if (!queue) return 0;
        /* Much of small was used: what came to main first, which is deepest in its chain, gives
         * way. */
        if (is_late && level == LEVEL_NORMAL && main->length) queue = main;
        uint32_t slot = queue->head;
        slot_book *book = &state->books[slot];
        (*steps)++;
        int is_spared = book->uses && level != LEVEL_EPHEMERAL && !is_late;
        if (!is_spared) {
            if (give_way(state, slot)) return 1;
        } else if (book->queue == QUEUE_SMALL) {
            book->uses = 0;
            requeue(state, slot, QUEUE_MAIN);
        } else {
            book->uses--;
            requeue(state, slot, (enum slot_queue)book->queue);
        }
    }
    return 0;
}

/* The level at which a slot has to give. */
static enum level level_of(const store *state, uint32_t slot) {
    switch (state->books[slot].queue) {
    case QUEUE_EPHEMERAL:
        return LEVEL_EPHEMERAL;
    case QUEUE_LONG:
        return is_long_over_share(state) ? LEVEL_LONG_OVER_SHARE : LEVEL_LONG;
    case QUEUE_PINNED:
        return LEVELS;
    default:
        return LEVEL_NORMAL;
    }
}

/* Whether an owner of an extent may go at a level. A client's pin is seen when it comes to it. */
static int may_go(const store *state, uint32_t owner, enum level level) {
    if (owner & OWNER_RESERVATION || !store_is_present(state, owner)) return 0;
    return level_of(state, owner) <= level && !store_is_pinned(state, owner);
}

/* Empties the run in which the next record of `size` to go lies, if all of it may go. */
static int empty_run(store *state, uint32_t size, enum level level, uint32_t *steps) {
    uint32_t victim = queue_at(state, size, level)->head;
    uint32_t start = store_shard(state, victim, 0)->extent_start, blocked = 0;
    uint32_t *owners = state->run_scratch;
    uint32_t count = extents_run_owners(state->pool, start, owners, RUN_OWNERS_MAX);
    for (uint32_t i = 0; i < count; i++) blocked += !may_go(state, owners[i], level);
    *steps += count;
    for (uint32_t i = 0; i < count; i++) {
        /* An owner may have gone with another of its shards in the same run. */
        if (owners[i] & OWNER_RESERVATION || !store_is_present(state, owners[i])) continue;
        if (!blocked)
            give_way(state, owners[i]);
        else
            pass_over(state, owners[i]);
    }
    return blocked == 0;
}

/* The lowest level from `*level` on at which somebody has to give, and its size. */
static uint32_t next_to_give(store *state, enum level *level) {
    for (; *level < LEVELS; (*level)++) {
        uint32_t size = oldest_size(state, *level);
        if (size != EXTENTS_NONE) return size;
    }
    return EXTENTS_NONE;
}

/* Gives up one record of a size, the least valuable that is not in use. */
static int evict_own_size(store *state, uint32_t size, uint32_t *steps) {
    for (enum level level = 0; level < LEVELS; level++)
        if (evict_at(state, size, level, steps)) return 1;
    return 0;
}

/* How far a search for room has come. */
typedef struct {
    enum level level;
    uint32_t blocked, steps;
} search;

/* Has the record or run whose turn it is give way for an extent of `size`; 0 when nobody can. */
static int make_some_room(store *state, uint32_t size, search *so_far) {
    uint32_t oldest = next_to_give(state, &so_far->level);
    if (oldest == EXTENTS_NONE) return 0;
    int went = oldest == size ? evict_at(state, size, so_far->level, &so_far->steps)
                              : empty_run(state, oldest, so_far->level, &so_far->steps);
    if (!went && (oldest == size || ++so_far->blocked % BLOCKED_MAX == 0)) so_far->level++;
    return 1;
}

static uint32_t search_room(store *state, uint32_t size, uint32_t owner, uint32_t *steps) {
    search so_far = {0, 0, 0};
    for (int attempt = 0; attempt < ROOM_TRIES_MAX; attempt++) {
        uint32_t start = extents_take(state->pool, size, owner);
        if (start != EXTENTS_NONE) return start;
        if (!make_some_room(state, size, &so_far)) break;
    }
    *steps += so_far.steps;
    /* Runs freed so far did not lie together; the wanted size gives up one of its own. */
    return evict_own_size(state, size, steps) ? extents_take(state->pool, size, owner)
                                              : EXTENTS_NONE;
}

/* Start of a free extent of a size, evicting as needed; EXTENTS_NONE when nothing may go. */
uint32_t store_make_room(store *state, uint32_t size, uint32_t owner) {
    uint32_t steps = 0;
    uint32_t start = search_room(state, size, owner, &steps);
    state->stats.evict_steps_total += steps;
    if (steps > state->stats.evict_steps_most) state->stats.evict_steps_most = steps;
    return start;
}

/* Room for `count` more: extents, and index slots without emptying buckets by force, which takes
 * whom it finds there instead of those whose turn it is. */
static int is_prepared(const store *state, uint32_t size, uint32_t count) {
    uint64_t records = state->stats.records_present + state->stats.records_incomplete;
    return extents_has_room(state->pool, size, count) &&
           records + count <= state->slots - state->slots / INDEX_SPARE_SHARE;
}

int store_prepare_room(store *state, uint32_t class_id, uint32_t shard, uint32_t count) {
    uint64_t limit = state->header->data_bytes / STORE_AHEAD_SHARE;
    uint64_t evicted_before = state->stats.evicted_total;
    uint32_t size = state->class_sizes[class_id][shard];
    uint64_t fit = limit / ((uint64_t)extents_units(state->pool, size) * ARENA_UNIT_BYTES);
    if (count > fit) count = (uint32_t)fit;
    search so_far = {0, 0, 0};
    for (int attempt = 0; attempt < AHEAD_CHUNK; attempt++)
        if (is_prepared(state, size, count) || !make_some_room(state, size, &so_far)) return 0;
    /* Where nobody may go there is no use in trying on. */
    return state->stats.evicted_total != evicted_before && !is_prepared(state, size, count);
}

/* Which of two records should rather go. */
static int goes_before(const store *state, uint32_t slot, uint32_t other) {
    enum level own = level_of(state, slot), its = level_of(state, other);
    return own != its ? own < its : state->books[slot].stamp < state->books[other].stamp;
}

/* A free index slot for a key, evicting the least valuable of its two buckets when both are full;
 * ARENA_NONE when all sixteen are in use. */
uint32_t store_make_slot(store *state, uint32_t class_id, const uint8_t *key) {
    uint32_t candidates[2 * ARENA_BUCKET_SLOTS], count;
    uint32_t slot = store_empty_slot(state, class_id, key, candidates, &count);
    for (uint32_t tries = 0; slot == ARENA_NONE && tries < count; tries++) {
        uint32_t victim = ARENA_NONE;
        for (uint32_t i = 0; i < count; i++) {
            uint32_t other = candidates[i];
            if (!store_is_present(state, other) || level_of(state, other) == LEVELS) continue;
            if (victim == ARENA_NONE || goes_before(state, other, victim)) victim = other;
        }
        if (victim == ARENA_NONE) return ARENA_NONE;
        if (give_way(state, victim)) return victim;
    }
    return slot;
}
