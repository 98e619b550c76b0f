/* Who may keep what, and for how long.
 *
 * Retention.  A class of worth comes with each record.  Two of them are privileges, so each has a
 * share of the arena: above a quarter *pinned* is refused; above a half the oldest *long* goes
 * before anything normal.  Saving again what is there already raises its class and its time to
 * live, and never lowers them.
 *
 * Time to live.  A record has a second of the wall clock after which it may not be used.  Readers
 * compare it with a clock in the index header, so it is a miss at once; a wheel of 4096 lists, one
 * a second, finds it for removal.  A record that expires in a later turn of the wheel is passed by.
 *
 * Quotas.  Bytes are counted for a namespace and a tenant from the moment a record is begun, so
 * that no number of saves at once can exceed a quota.  Who would, gives up its own oldest records,
 * here too with a second chance for what was used.  When a thousand tenants have records, those
 * that come next share one entry, and its quota, until an entry is free.
 */
#include "store_policy.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "store_private.h"

#define OWN_STEPS_MAX 64  /* records of its own looked at for one eviction */
#define OWN_TRIES_MAX 256 /* records of its own given up for one new one */

int store_policy_create(store *state) {
    state->tenants = calloc(STORE_TENANTS_MAX, sizeof *state->tenants);
    state->tenant_heads = malloc(STORE_TENANTS_MAX * sizeof *state->tenant_heads);
    state->wheel = malloc(WHEEL_SECONDS * sizeof *state->wheel);
    if (!state->tenants || !state->tenant_heads || !state->wheel) return 0;
    const slot_list empty = {ARENA_NONE, ARENA_NONE, 0};
    for (uint32_t i = 0; i < STORE_TENANTS_MAX; i++) {
        state->tenant_heads[i] = ARENA_NONE;
        state->tenants[i].evictable = empty;
        state->tenants[i].next_of_tag = i + 1 < STORE_TENANTS_MAX ? i + 1 : ARENA_NONE;
    }
    state->free_tenant = TENANTS_OVERFLOW + 1;
    for (uint32_t i = 0; i < ARENA_CLASSES_MAX; i++) state->spaces[i].evictable = empty;
    for (uint32_t i = 0; i < WHEEL_SECONDS; i++) state->wheel[i] = empty;
    return 1;
}

void store_policy_destroy(store *state) {
    free(state->tenants);
    free(state->tenant_heads);
    free(state->wheel);
}

/* Notes which namespace a new class belongs to. */
void store_class_opened(store *state, uint32_t class_id) {
    uint32_t first = 0;
    while (first < class_id &&
           (state->classes[first].shard_count == 0 ||
            memcmp(state->classes[first].name_space, state->classes[class_id].name_space, 16) != 0))
        first++;
    state->class_spaces[class_id] = first;
}

uint32_t store_retention(const arena_record *record) {
    uint32_t retention = record->flags & 7;
    int is_known = retention != STORE_RETAIN_NONE && retention < STORE_RETENTIONS;
    return is_known ? retention : STORE_RETAIN_SHORT;
}

uint64_t store_record_bytes(const store *state, uint32_t class_id) {
    uint64_t units = 0;
    for (uint32_t i = 0; i < state->classes[class_id].shard_count; i++)
        units += extents_units(state->pool, state->class_sizes[class_id][i]);
    return units * ARENA_UNIT_BYTES;
}

static owner_book *space_of(store *state, uint32_t class_id) {
    return &state->spaces[state->class_spaces[class_id]];
}

/* ---- tenants ---- */

static uint32_t *tenant_chain(const store *state, uint64_t tag) {
    uint64_t hash = mix_words(tag ^ state->header->seed[0], 0x9E3779B97F4A7C15ull);
    return &state->tenant_heads[hash % STORE_TENANTS_MAX];
}

/* Entry of a tenant, the shared one when the table is full; ARENA_NONE when it has none yet. */
static uint32_t find_tenant(const store *state, uint64_t tag) {
    if (tag == 0) return TENANTS_UNTAGGED;
    uint32_t entry = *tenant_chain(state, tag);
    while (entry != ARENA_NONE && state->tenants[entry].tag != tag)
        entry = state->tenants[entry].next_of_tag;
    return entry == ARENA_NONE && state->free_tenant == ARENA_NONE ? TENANTS_OVERFLOW : entry;
}

static uint32_t open_tenant(store *state, uint64_t tag) {
    uint32_t entry = find_tenant(state, tag);
    if (entry != ARENA_NONE) return entry;
    entry = state->free_tenant;
    state->free_tenant = state->tenants[entry].next_of_tag;
    uint32_t *head = tenant_chain(state, tag);
    state->tenants[entry].tag = tag;
    state->tenants[entry].next_of_tag = *head;
    *head = entry;
    return entry;
}

static void close_tenant(store *state, uint32_t entry) {
    if (entry <= TENANTS_OVERFLOW || state->tenants[entry].records) return;
    uint32_t *link = tenant_chain(state, state->tenants[entry].tag);
    while (*link != entry) link = &state->tenants[*link].next_of_tag;
    *link = state->tenants[entry].next_of_tag;
    state->tenants[entry].next_of_tag = state->free_tenant;
    state->free_tenant = entry;
}

uint64_t store_tenants(const store *state, uint64_t *cursor, store_tenant_usage *usages,
                       uint64_t max) {
    uint64_t filled = 0;
    for (; *cursor < STORE_TENANTS_MAX && filled < max; (*cursor)++) {
        const owner_book *owner = &state->tenants[*cursor];
        if (owner->records == 0) continue;
        usages[filled++] = (store_tenant_usage){owner->tag, owner->bytes, owner->records,
                                                *cursor == TENANTS_OVERFLOW};
    }
    return filled;
}

uint64_t store_namespace_bytes(const store *state, uint32_t class_id) {
    if (class_id >= ARENA_CLASSES_MAX || state->classes[class_id].shard_count == 0) return 0;
    return state->spaces[state->class_spaces[class_id]].bytes;
}

uint64_t store_count_tenants(const store *state) {
    uint64_t count = 0;
    for (uint32_t i = TENANTS_OVERFLOW; i < STORE_TENANTS_MAX; i++)
        count += state->tenants[i].records > 0;
    return count;
}

/* ---- accounts ---- */

/* Counts a record just begun (or adopted) for its class of worth, namespace and tenant. */
void store_account(store *state, uint32_t slot) {
    const arena_record *record = store_record(state, slot);
    uint64_t bytes = store_record_bytes(state, record->class_id);
    uint32_t retention = store_retention(record), entry = open_tenant(state, record->tenant_tag);
    owner_book *space = space_of(state, record->class_id);
    state->books[slot].tenant = (uint16_t)entry;
    state->tenants[entry].bytes += bytes;
    state->tenants[entry].records++;
    space->bytes += bytes;
    space->records++;
    state->retained_bytes[retention] += bytes;
    state->retained_records[retention]++;
}

void store_unaccount(store *state, uint32_t slot, const arena_record *gone) {
    uint64_t bytes = store_record_bytes(state, gone->class_id);
    uint32_t retention = store_retention(gone), entry = state->books[slot].tenant;
    owner_book *space = space_of(state, gone->class_id);
    state->tenants[entry].bytes -= bytes;
    state->tenants[entry].records--;
    space->bytes -= bytes;
    space->records--;
    state->retained_bytes[retention] -= bytes;
    state->retained_records[retention]--;
    close_tenant(state, entry);
}

static slot_list *wheel_at(store *state, uint32_t second) {
    return &state->wheel[second % WHEEL_SECONDS];
}

/* Puts a record into the list of the second it expires in, or of the next one still to come. */
static void enter_wheel(store *state, uint32_t slot, uint32_t second) {
    if (second <= state->wheel_second) second = state->wheel_second + 1;
    state->books[slot].wheel_place = (uint16_t)(second % WHEEL_SECONDS);
    store_list_append(state, LINK_EXPIRY, wheel_at(state, second), slot);
}

static void leave_wheel(store *state, uint32_t slot) {
    store_list_remove(state, LINK_EXPIRY, &state->wheel[state->books[slot].wheel_place], slot);
}

/* The new parent on whose older side a record stands, so that a tail goes before its head. */
static uint32_t place_of_parent(const store *state, uint32_t slot) {
    uint32_t parent = store_place_in_chain(state, slot);
    int is_pinned =
        parent != ARENA_NONE && store_retention(store_record(state, parent)) == STORE_RETAIN_PINNED;
    return is_pinned ? ARENA_NONE : parent;
}

/* Enters a present record where its owners and the clock will find it. */
void store_enter_owners(store *state, uint32_t slot) {
    const arena_record *record = store_record(state, slot);
    if (record->expires_s) enter_wheel(state, slot, record->expires_s);
    if (store_retention(record) == STORE_RETAIN_PINNED) return;
    owner_book *tenant = &state->tenants[state->books[slot].tenant];
    owner_book *space = space_of(state, record->class_id);
    uint32_t parent = place_of_parent(state, slot), before = parent;
    if (parent != ARENA_NONE && state->books[parent].tenant != state->books[slot].tenant)
        before = ARENA_NONE;
    store_list_insert(state, LINK_TENANT, &tenant->evictable, slot, before);
    store_list_insert(state, LINK_SPACE, &space->evictable, slot, parent);
}

void store_leave_owners(store *state, uint32_t slot, const arena_record *gone) {
    if (gone->expires_s) leave_wheel(state, slot);
    if (store_retention(gone) == STORE_RETAIN_PINNED) return;
    owner_book *tenant = &state->tenants[state->books[slot].tenant];
    store_list_remove(state, LINK_TENANT, &tenant->evictable, slot);
    store_list_remove(state, LINK_SPACE, &space_of(state, gone->class_id)->evictable, slot);
}

/* ---- admission ---- */

void store_set_quotas(store *state, uint64_t namespace_bytes, uint64_t tenant_bytes) {
    state->quota_space_bytes = namespace_bytes;
    state->quota_tenant_bytes = tenant_bytes;
}

/* Evicts the oldest record of an owner that is not in use. */
static int evict_own(store *state, enum slot_link kind, slot_list *list) {
    for (uint32_t step = 0; step < OWN_STEPS_MAX && list->head != ARENA_NONE; step++) {
        uint32_t slot = list->head;
        slot_book *book = &state->books[slot];
        int is_spared = book->uses && step < OWN_STEPS_MAX / 2;
        if (!is_spared && store_evict(state, slot)) {
            state->stats.evicted_total++;
            state->stats.evicted_quota_total++;
            return 1;
        }
        book->uses -= book->uses > 0;
        store_list_remove(state, kind, list, slot);
        store_list_append(state, kind, list, slot);
    }
    return 0;
}

static int fits_quota(store *state, enum slot_link kind, owner_book *owner, uint64_t bytes,
                      uint64_t quota) {
    if (quota == 0) return 1;
    if (bytes > quota) return 0;
    for (uint32_t tries = 0; owner->bytes + bytes > quota; tries++)
        if (tries == OWN_TRIES_MAX || !evict_own(state, kind, &owner->evictable)) return 0;
    return 1;
}

static int fits_pinned_share(const store *state, uint64_t bytes) {
    return state->retained_bytes[STORE_RETAIN_PINNED] + bytes <=
           state->header->data_bytes / STORE_PINNED_SHARE;
}

/* Whether a new record may be begun, after what its owners gave up for it. */
uint32_t store_admit(store *state, uint32_t class_id, uint32_t retention, uint64_t tenant_tag) {
    if (retention == STORE_RETAIN_NONE) return STORE_UNWANTED;
    if (retention >= STORE_RETENTIONS) return STORE_BAD_REQUEST;
    uint64_t bytes = store_record_bytes(state, class_id), quota = state->quota_tenant_bytes;
    if (retention == STORE_RETAIN_PINNED && !fits_pinned_share(state, bytes))
        return STORE_PINNED_FULL;
    owner_book *space = space_of(state, class_id);
    if (!fits_quota(state, LINK_SPACE, space, bytes, state->quota_space_bytes))
        return STORE_OVER_QUOTA;
    uint32_t entry = find_tenant(state, tenant_tag);
    if (entry == TENANTS_UNTAGGED) return STORE_OK;
    if (entry == ARENA_NONE) return quota && bytes > quota ? STORE_OVER_QUOTA : STORE_OK;
    int fits = fits_quota(state, LINK_TENANT, &state->tenants[entry], bytes, quota);
    return fits ? STORE_OK : STORE_OVER_QUOTA;
}

/* ---- retention ---- */

/* Changes what is said of a present record; everything that depends on it follows. */
static void change(store *state, uint32_t slot, uint32_t retention, uint32_t expires_s) {
    arena_record record = *store_record(state, slot);
    store_leave_owners(state, slot, &record);
    store_unqueue(state, slot);
    store_unaccount(state, slot, &record);
    record.flags = (record.flags & ~7u) | retention;
    record.expires_s = expires_s;
    store_write_record(state, slot, &record);
    store_account(state, slot);
    store_queue(state, slot, 1);
    store_enter_owners(state, slot);
}

/* Whether a present record has the class now. */
static int retain(store *state, uint32_t slot, uint32_t retention) {
    const arena_record *record = store_record(state, slot);
    if (store_retention(record) == retention) return 1;
    if (retention == STORE_RETAIN_PINNED &&
        !fits_pinned_share(state, store_record_bytes(state, record->class_id))) {
        state->stats.pinned_refused_total++;
        return 0;
    }
    change(state, slot, retention, record->expires_s);
    return 1;
}

uint64_t store_set_retention(store *state, uint32_t class_id, const uint8_t *key,
                             uint32_t retention) {
    if (class_id >= ARENA_CLASSES_MAX || retention == STORE_RETAIN_NONE ||
        retention >= STORE_RETENTIONS)
        return 0;
    if (key) {
        uint32_t slot = store_find_fresh(state, class_id, key);
        return slot != ARENA_NONE && store_is_present(state, slot) &&
               retain(state, slot, retention);
    }
    uint64_t changed = 0;
    for (uint32_t slot = 0; slot < state->slots; slot++)
        if (store_is_present(state, slot) && store_record(state, slot)->class_id == class_id)
            changed += (uint64_t)retain(state, slot, retention);
    return changed;
}

/* Somebody saves what is present already: it is kept as long as whoever wants it longest says. */
void store_raise(store *state, uint32_t slot, uint32_t retention, uint32_t ttl_s) {
    const arena_record *record = store_record(state, slot);
    uint32_t expires_s = store_expiry(state, ttl_s), now = store_retention(record);
    int is_longer = record->expires_s && (expires_s == 0 || expires_s > record->expires_s);
    if (retention == STORE_RETAIN_NONE || retention >= STORE_RETENTIONS) return;
    if (retention > now && !retain(state, slot, retention)) return;
    if (is_longer) change(state, slot, store_retention(record), expires_s);
}

/* ---- time to live ---- */

static uint32_t clock_of(const store *state) {
    return atomic_load_explicit(&state->header->now_s, memory_order_relaxed);
}

void store_set_clock(store *state, uint32_t now_s) {
    atomic_store_explicit(&state->header->now_s, now_s, memory_order_relaxed);
}

/* When something that may live `ttl_s` more seconds expires; 0: never. */
uint32_t store_expiry(const store *state, uint32_t ttl_s) {
    uint64_t expires_s = (uint64_t)clock_of(state) + ttl_s;
    return ttl_s == 0 || expires_s > UINT32_MAX ? 0 : (uint32_t)expires_s;
}

static int is_expired(const store *state, uint32_t slot) {
    uint32_t expires_s = store_record(state, slot)->expires_s;
    return expires_s != 0 && expires_s <= clock_of(state);
}

/* As store_find, but what has expired is gone, unless somebody still reads it. */
uint32_t store_find_fresh(store *state, uint32_t class_id, const uint8_t *key) {
    uint32_t slot = store_find(state, class_id, key);
    if (slot == ARENA_NONE || !store_is_present(state, slot) || !is_expired(state, slot))
        return slot;
    if (!store_evict(state, slot)) return slot;
    state->stats.ttl_expired_total++;
    return ARENA_NONE;
}

/* Looks at the first record of the wheel's present list. */
static void turn_one(store *state, uint32_t slot) {
    if (is_expired(state, slot) && store_evict(state, slot)) {
        state->stats.ttl_expired_total++;
        return;
    }
    uint32_t expires_s = store_record(state, slot)->expires_s;
    leave_wheel(state, slot); /* one that a client reads is looked at again in the next second */
    enter_wheel(state, slot, expires_s);
}

/* Removes what has expired, in a bounded number of steps; the next call goes on. */
void store_expire_records(store *state) {
    uint32_t now = clock_of(state);
    uint32_t span = now < WHEEL_SECONDS ? now : WHEEL_SECONDS;
    /* At the start and after a jump of the clock: one full turn finds everything. */
    if (state->wheel_second > now || now - state->wheel_second > span) {
        state->wheel_second = now - span;
        state->wheel_left = 0;
    }
    for (uint32_t records = 0, seconds = 0;
         records < STORE_EXPIRE_STEPS && seconds <= WHEEL_SECONDS;) {
        const slot_list *list = wheel_at(state, state->wheel_second);
        if (state->wheel_left && list->length) {
            state->wheel_left--;
            records++;
            turn_one(state, list->head);
            continue;
        }
        if (state->wheel_second == now) return;
        seconds++;
        state->wheel_left = wheel_at(state, ++state->wheel_second)->length;
    }
}

/* ---- audit ---- */

typedef struct {
    uint64_t tenants[STORE_TENANTS_MAX];
    uint64_t spaces[ARENA_CLASSES_MAX];
    uint64_t retained[STORE_RETENTIONS];
    uint64_t evictable, expiring;
} accounts;

static void sum_up(const store *state, accounts *found) {
    for (uint32_t slot = 0; slot < state->slots; slot++) {
        if (!store_is_used(state, slot)) continue;
        const arena_record *record = store_record(state, slot);
        uint64_t bytes = store_record_bytes(state, record->class_id);
        uint32_t retention = store_retention(record);
        found->tenants[state->books[slot].tenant] += bytes;
        found->spaces[state->class_spaces[record->class_id]] += bytes;
        found->retained[retention] += bytes;
        if (!store_is_present(state, slot)) continue;
        found->evictable += retention != STORE_RETAIN_PINNED;
        found->expiring += record->expires_s != 0;
    }
}

const char *store_audit_policy(const store *state) {
    accounts found = {0};
    uint64_t of_tenants = 0, of_spaces = 0, expiring = 0;
    sum_up(state, &found);
    for (uint32_t i = 0; i < STORE_TENANTS_MAX; i++) {
        if (found.tenants[i] != state->tenants[i].bytes) return "bytes of a tenant do not add up";
        of_tenants += state->tenants[i].evictable.length;
    }
    for (uint32_t i = 0; i < ARENA_CLASSES_MAX; i++) {
        if (found.spaces[i] != state->spaces[i].bytes) return "bytes of a namespace do not add up";
        of_spaces += state->spaces[i].evictable.length;
    }
    for (uint32_t i = 0; i < STORE_RETENTIONS; i++)
        if (found.retained[i] != state->retained_bytes[i])
            return "bytes of a retention class do not add up";
    for (uint32_t i = 0; i < WHEEL_SECONDS; i++) expiring += state->wheel[i].length;
    if (of_tenants != found.evictable || of_spaces != found.evictable)
        return "records of tenants or namespaces do not add up";
    return expiring == found.expiring ? NULL : "records with a time to live do not add up";
}
