/* The disk tier's store: objects by (namespace, group, key, shard), kept over restarts. */
#ifndef INFERA_DISK_STORE_H
#define INFERA_DISK_STORE_H

#include <stddef.h>
#include <stdint.h>

/* cffi: begin */
enum {
    DISK_DEVICES_MAX = 16,
    DISK_SEGMENTS_MAX = 16384, /* of all devices together */
    DISK_SEGMENTS_MIN = 4,     /* of one device: one is written, one made ready, two hold */
    DISK_SEGMENT_BYTES_MIN = 65536,
    DISK_CLASSES_MAX = 256,
    DISK_OPERATIONS_MAX = 1024, /* puts, gets and moves not over yet */
    DISK_EVENTS_MAX = 65536,
    DISK_PATH_BYTES = 512,
    DISK_REASON_BYTES = 256,
    DISK_MOVE_PERCENT = 30, /* of the bytes put, that heads, tables and moves may add */
};

enum disk_status {
    DISK_OK = 0,
    DISK_ABSENT = 1,
    DISK_EXISTS = 2,      /* it is stored, or being stored */
    DISK_BUSY = 3,        /* no room to write to yet, or too much is under way: try again */
    DISK_NOT_WANTED = 4,  /* its retention class is "none", or it has expired */
    DISK_TOO_LARGE = 5,   /* more than a segment holds */
    DISK_INDEX_FULL = 6,  /* until the oldest segment has been given up */
    DISK_OVER_QUOTA = 7,  /* its namespace has its share */
    DISK_OVER_BUDGET = 8, /* today's bytes have been written */
    DISK_UNAVAILABLE = 9, /* no device takes writes, or the one that has it is off */
    DISK_CLASSES_FULL = 10,
    DISK_BAD_REQUEST = 11, /* shard, length or alignment out of range */
    DISK_DAMAGED = 12,     /* what was read is not what was written; it is forgotten */
    DISK_FAILED = 13,      /* the device reported an error */
    DISK_LATE = 14,        /* past the deadline; the memory is not free until it is said so */
    DISK_RELEASED = 15,    /* said after DISK_LATE: the memory is free again */
};

enum disk_state {
    DISK_STARTING = 0,
    DISK_ON = 1,
    DISK_READ_ONLY = 2, /* reads are served, nothing is written until probing succeeds */
    DISK_OFF = 3,       /* everything is a miss until probing succeeds */
};

/* How files are used; 0: find out. */
enum disk_way { DISK_WAY_PROBE = 0, DISK_WAY_YES = 1, DISK_WAY_NO = 2 };

typedef struct {
    uint64_t size_bytes;       /* of all devices together, each has an equal part */
    uint64_t segment_bytes;    /* of new stores; 0: chosen from the size */
    uint64_t free_floor_bytes; /* left free on each file system */
    uint64_t day_bytes;        /* write budget of a day (UTC); 0: none */
    uint64_t namespace_bytes;  /* quota of a namespace; 0: none */
    uint32_t entries;          /* bound of the index */
    uint32_t depth;            /* transfers a device does at once */
    uint32_t deadline_ms;      /* of a transfer, and of a job; 0: 10 s */
    uint32_t sync_ms;          /* how long written bytes may stay unsynced; 0: 1 s */
    uint32_t ring;             /* enum disk_way: io_uring, or a pool of threads */
    uint32_t direct;           /* enum disk_way: O_DIRECT, or through the page cache */
} disk_settings;

typedef struct {
    uint64_t segments, segments_free, segment_capacity; /* capacity: what the size allows */
    uint64_t allocated_bytes, objects, object_bytes, entry_capacity, classes, operations;
    uint64_t put_total, put_bytes_total;          /* objects accepted and written */
    uint64_t written_bytes_total;                 /* with heads, tables, moves */
    uint64_t moved_total, moved_bytes_total;      /* kept when their segment was given up */
    uint64_t get_total, get_bytes_total;          /* objects read and found right */
    uint64_t put_us_total, get_us_total;          /* time all of these took, together */
    uint64_t write_queue_bytes, read_queue_bytes; /* under way now */
    uint64_t refused_exists_total, refused_busy_total, refused_not_wanted_total,
        refused_too_large_total, refused_index_full_total, refused_over_quota_total,
        refused_over_budget_total, refused_unavailable_total, refused_bad_total;
    uint64_t absent_total, damaged_total, read_failed_total, write_failed_total, late_total;
    uint64_t reclaimed_segments_total, reclaimed_objects_total, reclaimed_long_total,
        floor_segments_total, shrunk_segments_total, expired_total, dropped_total;
    uint64_t loaded_total, load_segments_damaged_total, load_tables_damaged_total, load_tail_total,
        load_expired_total, load_dropped_total, load_twice_total, load_no_room_total,
        load_marks_damaged_total;
    uint64_t day_bytes, syncs_total, failures_total, heals_total, events_lost_total;
} disk_stats;

typedef struct {
    char path[DISK_PATH_BYTES];
    char reason[DISK_REASON_BYTES]; /* why it is not on, and what helps; empty when it is */
    char way[DISK_REASON_BYTES];    /* how transfers are done, and why not better */
    uint32_t state;                 /* enum disk_state */
    uint32_t segments;
    uint64_t segment_bytes, free_bytes;
    uint8_t store_id[16];
} disk_device_facts;

typedef struct {
    uint8_t name_space[16];
    char model[128];
    uint32_t group;
    uint32_t shard_count;
    uint64_t objects, object_bytes;
} disk_class_facts;

typedef struct {
    uint8_t key[16];
    uint32_t class_id;
    uint32_t shard;
    uint32_t retention; /* enum store_retention */
    uint32_t expires_s; /* seconds since 1970; 0: never */
    uint32_t depth_grains;
    uint32_t reserved;
    uint64_t tenant_tag;
    uint64_t length_bytes;
    uint64_t sum;
} disk_object;

typedef struct {
    uint64_t token;  /* the caller's */
    uint32_t is_put; /* 0: a get */
    uint32_t status;
    disk_object object; /* of a get that is DISK_OK: what its head says */
} disk_completion;

typedef struct {
    uint8_t key[16];
    uint32_t class_id;
    uint32_t is_removed; /* 0: all shards of the record are on disk now; 1: they are not any more */
} disk_event;

typedef struct disk_store disk_store;

/* Starts the threads of each path's device and begins to load what is there; disk_poll goes on with
 * it. NULL with a text when the settings or paths make no sense or memory is short; what is wrong
 * with a path itself is its device's state. One thread at a time may call any function. */
disk_store *disk_open(const disk_settings *settings, const char *const *paths, uint32_t count,
                      const uint64_t *seed, char *error, uint64_t error_bytes);
/* Syncs and closes. Memory given to puts and gets is free afterwards when it returns 1. 0: a device
 * hangs, and its threads and memory, the caller's included, are left as they are. */
int disk_close(disk_store *store, uint32_t timeout_ms);

/* Takes in what is over, applies deadlines, goes on with everything that waits. `now_ns` must not
 * decrease, `now_s` is the wall clock. Never waits for a device. Call it when the descriptor is
 * readable and a few times a second. */
void disk_poll(disk_store *store, uint64_t now_ns, uint32_t now_s);
int32_t disk_descriptor(const disk_store *store);
/* 1 once no device is starting any more. */
int disk_is_loaded(const disk_store *store);

/* Finds or makes the class of a (namespace, group); returns its number or -1 (all are taken, or the
 * shard count is another). */
int disk_class(disk_store *store, const uint8_t *name_space, uint32_t group, uint32_t shard_count,
               const char *model);
/* 0 when there is no such class. */
int disk_class_read(const disk_store *store, uint32_t class_id, disk_class_facts *facts);

/* Begins to write an object; enum disk_status. With DISK_OK a completion follows, and `bytes`, at a
 * multiple of 4 KiB and readable to the next one, must stay as they are until then. */
int disk_put(disk_store *store, const disk_object *object, const void *bytes, uint64_t token);
/* Begins to read one into `target`, at a multiple of 4 KiB; `capacity` is too, and at least the
 * object's length rounded up. With DISK_OK a completion follows within `deadline_ms`; what is there
 * is right if it says DISK_OK. */
int disk_get(disk_store *store, uint32_t class_id, const uint8_t *key, uint32_t shard, void *target,
             uint64_t capacity, uint32_t deadline_ms, uint64_t token);
/* Moves completions out, oldest first. */
uint64_t disk_take_completions(disk_store *store, disk_completion *completions, uint64_t max);

/* Of the leading keys: those with all shards on disk. */
uint64_t disk_find_run(const disk_store *store, uint32_t class_id, const uint8_t *keys, uint64_t n);
/* Length of a shard on disk; 0: it is not. */
uint64_t disk_length(const disk_store *store, uint32_t class_id, const uint8_t *key,
                     uint32_t shard);
/* Forgets all records of a class, for good; returns how many shards those were. */
uint64_t disk_drop_class(disk_store *store, uint32_t class_id);

/* As store_take_events. */
uint64_t disk_take_events(disk_store *store, disk_event *events, uint64_t max, int *lost);
/* All present records as events, from *cursor (start with 0) on; 0 when the end is reached. */
uint64_t disk_snapshot(const disk_store *store, uint64_t *cursor, disk_event *events, uint64_t max);

void disk_read_stats(const disk_store *store, disk_stats *stats);
uint32_t disk_device_count(const disk_store *store);
void disk_read_device(const disk_store *store, uint32_t device, disk_device_facts *facts);
/* Walks everything and compares with the books: NULL when they add up, else what does not. */
const char *disk_audit(const disk_store *store);
/* cffi: end */

struct disk_io;
/* disk_open over another table of calls; `engine` (enum disk_engine) 0: found out. */
disk_store *disk_open_over(const struct disk_io *io, uint32_t engine, const disk_settings *settings,
                           const char *const *paths, uint32_t count, const uint64_t *seed,
                           char *error, uint64_t error_bytes);

#endif
