/* Shared between the parts of the disk store; nobody else includes this.
 *
 * Everything here belongs to the thread that calls the store, but for what a request in a queue
 * points at: that belongs to the queue's threads until the request comes back.
 */
#ifndef INFERA_DISK_PRIVATE_H
#define INFERA_DISK_PRIVATE_H

#include "disk_format.h"
#include "disk_index.h"
#include "disk_queue.h"
#include "disk_store.h"

#define DISK_NO_SEGMENT      0xFFFFu
#define DISK_FILE_PATH_BYTES (DISK_PATH_BYTES + 32)
#define DISK_MERGE_ROWS      32768 /* rows of tables that one disk_poll takes in */
#define DISK_SWEEP_ENTRIES   1024  /* entries that one disk_poll looks at for their expiry */
#define SYNC_FILES_MAX       8
#define NS_PER_MS            1000000ull

enum segment_state {
    SEGMENT_NONE,       /* no file */
    SEGMENT_FREE,       /* its records are gone, it may be begun anew */
    SEGMENT_PREPARING,  /* its header is being written, its file perhaps made */
    SEGMENT_READY,      /* the next to be written to */
    SEGMENT_ACTIVE,     /* being written to */
    SEGMENT_SEALING,    /* full: its table is written once no write to it is under way */
    SEGMENT_SEALED,     /* only read */
    SEGMENT_RECLAIMING, /* being given up: what is worth it moves */
    SEGMENT_REMOVING,   /* its file is being removed */
};

typedef struct {
    int file;
    uint32_t number; /* of the file's name */
    uint64_t generation;
    uint32_t used_units;
    uint32_t appended;         /* records its table must have room for */
    uint32_t readers, writers; /* transfers under way */
    uint16_t device;
    uint8_t state;
    uint8_t is_job_under_way; /* its table is being written, or its header */
    uint8_t is_dirty;         /* written to since it was last synced */
    uint8_t must_go;          /* its file is removed once it is empty */
} disk_segment;

/* What loading found, made on the device's thread. */
typedef struct {
    int file;
    uint32_t number;
    uint64_t generation; /* 0: nothing is in it */
    uint32_t used_units;
    uint32_t appended;
    int is_sealed;
    uint64_t day, day_bytes;
    disk_class_row *classes;
    disk_record_row *records;
    uint32_t class_count, record_count;
} disk_loaded_segment;

typedef struct {
    int is_read_only;
    int result; /* 0, or an errno as a negative number; then `reason` says what and why */
    int lock_file;
    int uses_ring, uses_direct;
    int may_resume; /* the marks were right, so numbers given from now on are larger than all before
                     */
    uint8_t store_id[16];
    uint64_t segment_bytes;
    uint64_t epoch;
    uint64_t free_bytes;
    disk_drop_row drops[DISK_DROPS_MAX];
    uint32_t drop_count;
    disk_loaded_segment *segments; /* newest generation first */
    uint32_t segment_count;
    uint32_t segments_damaged, tables_damaged, tail_records, marks_damaged, shrunk;
    char reason[DISK_REASON_BYTES];
    char way[DISK_REASON_BYTES];
} disk_loaded;

enum job_kind {
    JOB_LOAD,    /* everything that is there */
    JOB_PREPARE, /* make a segment's file if need be, and write its header */
    JOB_SEAL,    /* write a segment's table and trailer, and sync */
    JOB_SYNC,
    JOB_LOOK,   /* is the folder still there, has it room, does it take writes? */
    JOB_REMOVE, /* close and remove a segment's file */
    JOB_MARKS,
    JOB_CLOSE, /* close all files of a folder that is gone */
};

typedef struct disk_device disk_device;

typedef struct disk_job disk_job;
struct disk_job {
    disk_request request; /* first: a job is found by its request */
    const disk_io *io;
    uint32_t kind;
    uint16_t segment; /* the store's number of it */
    uint64_t deadline_ns;
    disk_job *next; /* of those of the device that are under way */
    int32_t detail; /* errno of what failed, or what LOOK found */
    /* What to work on, copied or owned. */
    char folder[DISK_PATH_BYTES];
    const disk_settings *settings; /* constant while the store lives */
    uint32_t device_count;
    int open_flags;
    int file;
    int lock_file;
    uint32_t number;
    disk_segment_name name;
    uint64_t day, day_bytes, now_s, epoch;
    int must_create, must_probe, must_have_room;
    uint8_t *bytes; /* table and trailer, or marks; aligned */
    uint64_t byte_count, offset;
    int *files;
    uint32_t file_count;
    uint64_t free_bytes;
    disk_loaded *loaded;
};

struct disk_device {
    char path[DISK_PATH_BYTES];
    char reason[DISK_REASON_BYTES], way[DISK_REASON_BYTES];
    disk_queue *queue;
    uint32_t state;
    int serves_transfers; /* the queue's transfer threads run */
    int direct_flag;      /* O_DIRECT, or 0 */
    int lock_file;        /* -1: not loaded */
    uint8_t store_id[16];
    uint64_t segment_bytes;
    uint32_t segment_units;
    uint32_t segments_allowed, segment_count;
    uint32_t next_number; /* of a new file */
    uint64_t sequence;    /* the last one given out */
    uint64_t epoch;
    uint16_t active, ready, victim; /* DISK_NO_SEGMENT: none */
    uint32_t moves_under_way;
    int has_unsynced_moves;    /* to be synced before the place they came from is written over */
    uint32_t sealing_count;    /* segments that wait for their table */
    int is_read_only;          /* its files are open for reading only */
    int has_no_room;           /* the last try to make a file found none; see look_ns */
    int failed_errno;          /* why it is not ON */
    int64_t move_credit_bytes; /* that moves may add to what is written */
    uint64_t in_flight_bytes;
    disk_drop_row drops[DISK_DROPS_MAX];
    uint32_t drop_count;
    int marks_are_dirty;
    disk_job *jobs;           /* under way */
    uint32_t kinds_under_way; /* bit k: a job of kind k */
    uint32_t late_count;      /* transfers past their deadline that have not come back */
    int is_hanging;
    int wants_reset;        /* the folder is gone: begin anew once nothing is under way */
    uint32_t read_failures; /* in a row */
    uint64_t look_ns;       /* when to look after it next */
    uint64_t backoff_ns;
    uint64_t sync_ns;
    uint64_t free_bytes;
    disk_loaded *loaded; /* being taken in */
    uint32_t loaded_segment, loaded_record;
    uint16_t *loaded_ids; /* the store's numbers of the loaded segments */
    uint16_t loaded_classes[DISK_CLASSES_MAX];
};

enum operation_kind { OPERATION_PUT, OPERATION_GET, OPERATION_MOVE_READ, OPERATION_MOVE_WRITE };
enum operation_state { OPERATION_FREE, OPERATION_LIVE, OPERATION_LATE };

typedef struct {
    disk_request request; /* first */
    uint32_t kind, state;
    uint16_t segment;
    uint32_t start_unit;
    uint64_t sequence;
    disk_segment_name name;
    uint8_t name_space[16];
    uint32_t group;
    disk_record_block *head; /* a unit */
    void *bytes;
    disk_object object;
    uint64_t from_sequence; /* of a move: what was read */
    uint64_t token, begun_ns, deadline_ns, transfer_bytes;
    uint32_t next_free;
} disk_operation;

typedef struct {
    uint8_t name_space[16];
    char model[DISK_MODEL_BYTES];
    uint32_t group;
    uint32_t shard_count; /* 0: free */
    uint64_t objects, bytes;
} disk_class_book;

struct disk_store {
    const disk_io *io;
    uint32_t engine; /* 0: found out by each device */
    disk_settings settings;
    int bell;
    uint64_t now_ns;
    uint32_t now_s;
    uint64_t day;
    disk_index index;
    disk_device devices[DISK_DEVICES_MAX];
    uint32_t device_count;
    uint32_t turn; /* which device writes next, when they are equally busy */
    disk_segment *segments;
    uint32_t segments_end; /* segments above this number were never used */
    disk_class_book classes[DISK_CLASSES_MAX];
    uint32_t class_count;
    disk_operation *operations;
    uint8_t *heads; /* a unit for each operation */
    uint32_t sweep; /* the next entry to look at */
    uint32_t free_operation;
    uint32_t live_operations;
    disk_completion *completions; /* a ring */
    uint64_t completions_head, completions_count;
    disk_event *events; /* a ring */
    uint64_t events_head, events_count;
    int events_overflowed;
    uint8_t *move_buffers[DISK_DEVICES_MAX];
    uint64_t move_buffer_bytes[DISK_DEVICES_MAX];
    disk_stats stats;
};

/* disk_store.c */
void disk_remove_entry(disk_store *store, uint32_t entry);
void disk_entry_ready(disk_store *store, uint32_t entry);
void disk_announce(disk_store *store, uint32_t class_id, const uint64_t key[2], int is_removed);
uint64_t disk_full_mask(const disk_store *store, uint32_t class_id);
void disk_complete(disk_store *store, const disk_operation *operation, uint32_t status);

/* disk_device.c: states and jobs of a device */
void disk_device_fail(disk_store *store, uint32_t device, uint32_t state, const char *what,
                      int error);
disk_job *disk_job_make(disk_store *store, uint32_t device, uint32_t kind);
void disk_job_submit(disk_store *store, uint32_t device, disk_job *job);
void disk_device_poll(disk_store *store, uint32_t device);
void disk_device_write_marks(disk_store *store, uint32_t device);
void disk_device_end_job(disk_store *store, uint32_t device, disk_job *job);
int disk_device_is_readable(const disk_device *device);
uint16_t disk_segment_add(disk_store *store, uint32_t device, uint32_t number, int file);

/* disk_job.c and disk_load.c: what runs on a device's thread */
int disk_job_run(disk_request *request);
int disk_load(disk_job *job);
void disk_loaded_free(const disk_io *io, disk_loaded *loaded, int with_files);
void disk_segment_path(char *path, const char *folder, uint32_t number);
int disk_write_marks(const disk_io *io, const char *folder, const uint8_t *store_id, uint64_t epoch,
                     const disk_drop_row *drops, uint32_t count);

/* disk_merge.c: taking in what was loaded, a bounded piece a call */
void disk_merge(disk_store *store, uint32_t device);

/* disk_append.c: writing */
void disk_append_poll(disk_store *store, uint32_t device);
uint16_t disk_append_place(disk_store *store, uint32_t device, uint64_t length_bytes, int is_move,
                           uint32_t *start_unit);
void disk_write_record(disk_store *store, disk_operation *operation, uint16_t segment,
                       uint32_t start_unit);
void disk_seal_segment(disk_store *store, uint16_t segment);
void disk_activate(disk_store *store, uint32_t device);

/* disk_reclaim.c: giving segments up */
void disk_reclaim_begin(disk_store *store, uint16_t segment, int is_dropped);
void disk_reclaim_poll(disk_store *store, uint32_t device);
void disk_move_ended(disk_store *store, disk_operation *operation);
int disk_reclaim_oldest(disk_store *store, uint32_t device, int is_dropped);
void disk_give_back(disk_store *store, uint32_t device);

/* disk_transfer.c: puts, gets and what ends them */
disk_operation *disk_operation_take(disk_store *store);
void disk_operation_free(disk_store *store, disk_operation *operation);
void disk_read_record(disk_store *store, disk_operation *operation, uint32_t entry, void *target);
void disk_transfer_ended(disk_store *store, disk_operation *operation);
void disk_apply_deadlines(disk_store *store);

#endif
