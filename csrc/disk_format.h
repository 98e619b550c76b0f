/* The disk tier's files: what stands in them, byte for byte. Described in docs/kvd-store.md.
 *
 * A store folder holds `format` (written once), `marks` (replaced at each start and drop), `lock`,
 * and segments `NNNNNNNN.segment` of one size.  A segment is a header block, records one behind the
 * other, and, once it is full, a table of its records and a trailer in its last block.  Everything
 * starts at a multiple of 4 KiB, and every block that is believed carries a check word, the store's
 * id, and the generation its segment had: what a segment held before it was used again has another.
 */
#ifndef INFERA_DISK_FORMAT_H
#define INFERA_DISK_FORMAT_H

#include <stddef.h>
#include <stdint.h>

/* cffi: begin */
enum {
    DISK_FORMAT_VERSION = 1,
    DISK_UNIT_BYTES = 4096,
    DISK_MODEL_BYTES = 128,
    DISK_SHARDS_MAX = 64,
    DISK_SUM_LEAVES = 1, /* the arena's checksum: CRC32C of 16 KiB leaves, mixed and added */
    DISK_KIND_OBJECT = 1,
    DISK_KIND_VOID = 2, /* takes its place in the segment, and is nothing any more */
    DISK_DROPS_MAX = 256,
    DISK_SEQUENCE_BITS = 40, /* of a sequence number; the start it was given at is above */
};

/* `format`, and the first bytes of every other file's blocks are alike: magic, version. */
typedef struct {
    uint64_t magic;
    uint32_t version;
    uint32_t reserved;
    uint8_t store_id[16]; /* random */
    uint64_t segment_bytes;
    uint64_t created_s;
    uint32_t padding;
    uint32_t check; /* crc32c of the bytes before it, as in every struct here */
} disk_format_block;

/* `marks`: this, then drop_count rows. */
typedef struct {
    uint64_t magic;
    uint32_t version;
    uint32_t drop_count;
    uint8_t store_id[16];
    uint64_t epoch;      /* how often the store was opened for writing */
    uint32_t rows_check; /* crc32c of the rows */
    uint32_t check;
} disk_marks_block;

/* Records of a (namespace, group) with an older sequence number are no longer there. */
typedef struct {
    uint8_t name_space[16];
    uint32_t group;
    uint32_t reserved;
    uint64_t before_sequence;
} disk_drop_row;

typedef struct {
    uint64_t magic;
    uint32_t version;
    uint32_t number; /* as in the file's name */
    uint8_t store_id[16];
    uint64_t generation; /* the sequence number it was begun at */
    uint64_t segment_bytes;
    uint64_t opened_s;
    uint64_t day;       /* days since 1970 */
    uint64_t day_bytes; /* written to this folder in that day so far */
    uint32_t padding;
    uint32_t check;
} disk_segment_block;

/* Head of a record, padded to a unit; the object's bytes follow, padded to a unit too. */
typedef struct {
    uint64_t magic;
    uint32_t version;
    uint32_t kind;
    uint8_t store_id[16];
    uint64_t generation; /* of its segment */
    uint64_t sequence;
    uint32_t segment;
    uint32_t start_unit; /* where this block is in its segment */
    uint8_t name_space[16];
    uint8_t key[16];
    uint32_t group;
    uint16_t shard;
    uint16_t shard_count;
    uint64_t length_bytes;
    uint64_t sum; /* of the object's bytes */
    uint32_t sum_kind;
    uint32_t retention;
    uint32_t expires_s; /* seconds since 1970; 0: never */
    uint32_t depth_grains;
    uint64_t tenant_tag;
    uint64_t stored_s;
    char model[DISK_MODEL_BYTES];
    uint32_t padding;
    uint32_t check;
} disk_record_block;

/* The table at the end of a segment: class rows, then record rows; its place is in the trailer. */
typedef struct {
    uint8_t name_space[16];
    uint32_t group;
    uint32_t shard_count;
    char model[DISK_MODEL_BYTES];
} disk_class_row;

typedef struct {
    uint8_t key[16];
    uint64_t sequence;
    uint64_t length_bytes;
    uint32_t start_unit;
    uint32_t expires_s;
    uint16_t class_row;
    uint8_t shard;
    uint8_t retention;
    uint32_t reserved;
} disk_record_row;

typedef struct {
    uint64_t magic;
    uint32_t version;
    uint32_t number;
    uint8_t store_id[16];
    uint64_t generation;
    uint64_t table_offset;
    uint32_t class_count;
    uint32_t record_count;
    uint32_t table_check; /* crc32c of the table's bytes, without padding */
    uint32_t check;
} disk_trailer_block;
/* cffi: end */

#define DISK_MAGIC_FORMAT  0x31544d46444b4649ull /* "IFKDFMT1" */
#define DISK_MAGIC_MARKS   0x314b524d444b4649ull /* "IFKDMRK1" */
#define DISK_MAGIC_SEGMENT 0x31474553444b4649ull /* "IFKDSEG1" */
#define DISK_MAGIC_RECORD  0x31434552444b4649ull /* "IFKDREC1" */
#define DISK_MAGIC_TRAILER 0x314d5553444b4649ull /* "IFKDSUM1" */

/* Sets the check word at the end of a struct of `bytes`, or compares it. */
void disk_seal(void *block, size_t bytes);
int disk_is_sealed(const void *block, size_t bytes);
#define DISK_SEAL(block)      disk_seal(block, sizeof *(block))
#define DISK_IS_SEALED(block) disk_is_sealed(block, sizeof *(block))

static inline uint64_t disk_units(uint64_t bytes) {
    return (bytes + DISK_UNIT_BYTES - 1) / DISK_UNIT_BYTES;
}
/* Units a record takes, head included. */
static inline uint64_t disk_record_units(uint64_t length_bytes) {
    return 1 + disk_units(length_bytes);
}
static inline uint64_t disk_table_units(uint64_t classes, uint64_t records) {
    return disk_units(classes * sizeof(disk_class_row) + records * sizeof(disk_record_row));
}

/* What everything in one segment has in common. */
typedef struct {
    uint8_t store_id[16];
    uint64_t generation;
    uint64_t segment_bytes;
    uint32_t number;
} disk_segment_name;

/* A record head that belongs at `start_unit` of a segment, as it was used last, and fits there. */
int disk_is_record(const disk_record_block *block, const disk_segment_name *name,
                   uint32_t start_unit);
/* A segment header that belongs to its file. */
int disk_is_segment(const disk_segment_block *block, const uint8_t *store_id, uint32_t number,
                    uint64_t segment_bytes);
/* A trailer of the segment as it was used last, whose table lies within it. */
int disk_is_trailer(const disk_trailer_block *block, const disk_segment_name *name);

#endif
