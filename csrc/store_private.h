/* Shared between store.c and its parts; nobody else includes this. */
#ifndef INFERA_STORE_PRIVATE_H
#define INFERA_STORE_PRIVATE_H

#include "extents.h"
#include "store.h"
#include "store_policy.h"

/* The lists a slot may be in, one of each kind. */
enum slot_link {
    LINK_QUEUE,  /* pending while incomplete, else one of its size's queues */
    LINK_TENANT, /* present records of its tenant that may be evicted */
    LINK_SPACE,  /* likewise of its namespace */
    LINK_EXPIRY, /* records that expire in the same second of the wheel */
    SLOT_LINKS,
};

/* The queues of one size. What each is for: store_evict.c. */
enum slot_queue { QUEUE_EPHEMERAL, QUEUE_SMALL, QUEUE_MAIN, QUEUE_LONG, QUEUE_PINNED, QUEUES };

typedef struct {
    uint32_t previous, next;
} slot_links;

/* Per record slot, private to the daemon. */
typedef struct {
    slot_links links[SLOT_LINKS];
    uint32_t reservations; /* head of the chain of live reservations on it */
    uint32_t size_class;
    uint64_t reserved_mask;
    uint64_t stamp; /* creation time while incomplete, use counter at the last use when present */
    uint32_t parent, child; /* its neighbours in the chain; ARENA_NONE: gone or not known */
    uint32_t serial;        /* which of all records ever begun this is (wraps) */
    uint16_t tenant;        /* its entry in the table of tenants */
    uint16_t wheel_place;   /* the list of the wheel it is in, if any */
    uint8_t queue;          /* enum slot_queue, when present */
    uint8_t uses;           /* since it came to where it is, at most USES_MAX */
} slot_book;

typedef struct {
    uint32_t head, tail; /* head: next to go */
    uint32_t length;
} slot_list;

#define TENANTS_UNTAGGED 0 /* entry of records without a tag: no tenant, no quota */
#define TENANTS_OVERFLOW 1 /* entry that tenants share when the table is full */
#define WHEEL_SECONDS    4096

/* What one tenant or namespace has, records that are being written included. */
typedef struct {
    uint64_t tag; /* of a tenant */
    uint64_t bytes;
    uint32_t records; /* 0: a tenant's entry is free */
    uint32_t next_of_tag;
    slot_list evictable; /* oldest first */
} owner_book;

/* Fingerprint of a record that left the small queue without having been used. */
typedef struct {
    uint32_t fingerprint;
    uint32_t serial;
} ghost;

enum reservation_state {
    RESERVATION_FREE,
    RESERVATION_LIVE,        /* for a shard of the incomplete record in `slot` */
    RESERVATION_QUARANTINED, /* its record is gone, its writer may still write */
    RESERVATION_STOCK,       /* space taken ahead, for no record yet */
};

enum reservation_name {
    NAME_KNOWN,
    NAME_SPOKEN, /* its writer, back on a new connection, has said that it goes on */
    NAME_LOST,   /* adopted, under a name that could not be kept: it ends with its writer */
};

/* Where stock was when it was last looked at. */
enum stock_place {
    STOCK_OFFERED, /* in the client's table, or not looked at yet */
    STOCK_OUT,     /* taken, and neither committed nor given up: once seen */
    STOCK_OVERDUE, /* likewise, a whole period later */
};

/* The right of one client to write one extent. */
typedef struct {
    uint32_t generation;
    uint32_t state;
    uint32_t slot;
    uint32_t client;
    uint32_t class_id;
    uint32_t shard;
    uint32_t extent_start;
    uint32_t extent_units;
    uint32_t next_of_slot;
    uint32_t held;                               /* its entry in the client's file */
    uint32_t name;                               /* enum reservation_name */
    uint32_t stock_place;                        /* enum stock_place */
    uint64_t deadline_ns;                        /* of stock: when it is looked at next */
    uint32_t older, newer;                       /* all live ones, and all stock, by deadline */
    uint32_t previous_of_client, next_of_client; /* also the free list */
} reservation;

typedef struct {
    uint32_t oldest, newest;
} age_list;

typedef struct {
    _Atomic uint8_t *pins; /* null: no such client */
    arena_ledger_header *ledger;
    arena_held *held;    /* in the ledger */
    uint16_t *held_free; /* stack of its free entries, which the client cannot spoil */
    uint32_t held_free_count;
    uint32_t first_reservation;
    uint32_t reservation_count;
    uint32_t overdue_count;          /* stock it took and seems to have forgotten */
    uint32_t last_slot, last_serial; /* the record it last asked for: parent of the next, maybe */
} client_book;

struct store {
    arena_header *header;
    arena_bucket *buckets;
    arena_shard *shards;
    arena_class *classes;
    uint32_t slots;
    uint32_t clients_end; /* clients above this number were never attached */
    slot_book *books;
    extents *pool;
    slot_list pending;
    slot_list queues[EXTENTS_SIZES_MAX][QUEUES];
    uint32_t sizes_end;     /* sizes above this number have no record */
    uint32_t record_serial; /* records ever begun */
    uint64_t use_counter;
    ghost *ghosts; /* ghosts_mask + 1 entries, in buckets of GHOST_WAYS */
    uint64_t ghosts_mask;
    uint32_t ghost_serial;
    owner_book *tenants; /* STORE_TENANTS_MAX, in the order of their entries */
    uint32_t *tenant_heads;
    uint32_t free_tenant;
    owner_book spaces[ARENA_CLASSES_MAX]; /* by the lowest class id of the namespace */
    uint32_t class_spaces[ARENA_CLASSES_MAX];
    uint32_t class_steps[ARENA_CLASSES_MAX]; /* grains from one record of a chain to the next */
    uint64_t retained_bytes[STORE_RETENTIONS];
    uint64_t retained_records[STORE_RETENTIONS];
    uint64_t quota_space_bytes, quota_tenant_bytes; /* 0: none */
    slot_list *wheel;                               /* WHEEL_SECONDS lists */
    uint32_t wheel_second, wheel_left;
    reservation *reservations;
    uint32_t free_reservation;
    age_list live, stock;  /* reservations by deadline */
    uint64_t stock_due_ns; /* when stock given out now is looked at */
    client_book clients[STORE_CLIENTS_MAX];
    uint64_t class_records[ARENA_CLASSES_MAX];
    uint32_t class_sizes[ARENA_CLASSES_MAX][ARENA_SHARDS_MAX]; /* extent size of each shard */
    store_event *events;
    uint64_t events_head, events_count;
    int events_overflowed;
    uint32_t *run_scratch;
    store_stats stats;
};

/* An extent's owner is the slot of its record, or with this bit a reservation. */
#define OWNER_RESERVATION 0x80000000u

/* store_index.c: records in their buckets */
arena_record *store_record(const store *state, uint32_t slot);
uint32_t store_find(const store *state, uint32_t class_id, const uint8_t *key);
uint32_t store_empty_slot(const store *state, uint32_t class_id, const uint8_t *key,
                          uint32_t *candidates, uint32_t *candidate_count);
void store_write_record(store *state, uint32_t slot, const arena_record *fresh);
arena_shard *store_shard(const store *state, uint32_t slot, uint32_t shard);
void store_add_shard(store *state, uint32_t slot, uint32_t shard, const arena_shard *fresh);
int store_remove_record(store *state, uint32_t slot, int even_if_pinned);
int store_is_pinned(const store *state, uint32_t slot);
int store_is_used(const store *state, uint32_t slot);
int store_is_present(const store *state, uint32_t slot);
uint64_t store_full_mask(const store *state, uint32_t class_id);

/* store_evict.c: making room */
void store_list_insert(store *state, enum slot_link kind, slot_list *list, uint32_t slot,
                       uint32_t before);
void store_list_append(store *state, enum slot_link kind, slot_list *list, uint32_t slot);
void store_list_remove(store *state, enum slot_link kind, slot_list *list, uint32_t slot);
void store_queue(store *state, uint32_t slot, int is_adopted);
void store_unqueue(store *state, uint32_t slot);
void store_mark_used(store *state, uint32_t slot);
void store_link_chain(store *state, uint32_t client, uint32_t slot);
void store_unlink_chain(store *state, uint32_t slot);
uint32_t store_place_in_chain(const store *state, uint32_t slot);
int store_evict(store *state, uint32_t slot);
void store_give_extents(store *state, uint32_t slot, uint64_t shard_mask);
uint32_t store_make_room(store *state, uint32_t size_class, uint32_t owner);
uint32_t store_make_slot(store *state, uint32_t class_id, const uint8_t *key);

/* store_reserve.c: reservations and quarantine */
void store_drop_incomplete(store *state, uint32_t slot);
void store_release_client(store *state, uint32_t client);
void store_adopt_held(store *state, uint32_t client);
void store_end_adoption(store *state);

/* store_policy.c: who may keep what, and how long */
int store_policy_create(store *state);
void store_policy_destroy(store *state);
uint32_t store_retention(const arena_record *record);
uint64_t store_record_bytes(const store *state, uint32_t class_id);
uint32_t store_admit(store *state, uint32_t class_id, uint32_t retention, uint64_t tenant_tag);
uint32_t store_expiry(const store *state, uint32_t ttl_s);
void store_account(store *state, uint32_t slot);
void store_unaccount(store *state, uint32_t slot, const arena_record *gone);
void store_enter_owners(store *state, uint32_t slot);
void store_leave_owners(store *state, uint32_t slot, const arena_record *gone);
uint32_t store_find_fresh(store *state, uint32_t class_id, const uint8_t *key);
void store_expire_records(store *state);
void store_raise(store *state, uint32_t slot, uint32_t retention, uint32_t ttl_s);
uint64_t store_count_tenants(const store *state);
const char *store_audit_policy(const store *state);

/* store_class.c */
void store_class_opened(store *state, uint32_t class_id);
uint32_t store_adopt_classes(store *state);

/* store.c */
store *store_over(void *index);
int store_enter_client(store *state, uint32_t number, arena_ledger_header *ledger);
void store_announce_event(store *state, const store_event *event);

#endif
