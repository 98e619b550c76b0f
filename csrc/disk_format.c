/* Check words, and which blocks are believed.
 *
 * A block is believed when its check word is right and it says of itself what its place implies.
 * Sizes are compared by dividing what is there, never by adding what a file says: nothing in a file
 * may lead outside of its segment.
 */
#include "disk_format.h"

#include <string.h>

#include "checksum.h"

_Static_assert(sizeof(disk_format_block) == 56, "no padding in files");
_Static_assert(sizeof(disk_marks_block) == 48, "no padding in files");
_Static_assert(sizeof(disk_drop_row) == 32, "no padding in files");
_Static_assert(sizeof(disk_segment_block) == 80, "no padding in files");
_Static_assert(sizeof(disk_record_block) == 280, "no padding in files");
_Static_assert(sizeof(disk_class_row) == 152, "no padding in files");
_Static_assert(sizeof(disk_record_row) == 48, "no padding in files");
_Static_assert(sizeof(disk_trailer_block) == 64, "no padding in files");

static uint32_t check_of(const void *block, size_t bytes) {
    return checksum_crc32c(0, block, bytes - sizeof(uint32_t));
}

void disk_seal(void *block, size_t bytes) {
    uint32_t check = check_of(block, bytes);
    memcpy((uint8_t *)block + bytes - sizeof check, &check, sizeof check);
}

int disk_is_sealed(const void *block, size_t bytes) {
    uint32_t check;
    memcpy(&check, (const uint8_t *)block + bytes - sizeof check, sizeof check);
    return check == check_of(block, bytes);
}

int disk_is_segment(const disk_segment_block *block, const uint8_t *store_id, uint32_t number,
                    uint64_t segment_bytes) {
    return block->magic == DISK_MAGIC_SEGMENT && block->version == DISK_FORMAT_VERSION &&
           DISK_IS_SEALED(block) && memcmp(block->store_id, store_id, 16) == 0 &&
           block->number == number && block->segment_bytes == segment_bytes &&
           block->generation != 0;
}

int disk_is_record(const disk_record_block *block, const disk_segment_name *name,
                   uint32_t start_unit) {
    uint64_t units = name->segment_bytes / DISK_UNIT_BYTES;
    return block->magic == DISK_MAGIC_RECORD && block->version == DISK_FORMAT_VERSION &&
           DISK_IS_SEALED(block) && memcmp(block->store_id, name->store_id, 16) == 0 &&
           block->generation == name->generation && block->segment == name->number &&
           block->start_unit == start_unit && start_unit >= 1 && start_unit < units &&
           block->length_bytes > 0 && block->length_bytes <= UINT32_MAX &&
           disk_record_units(block->length_bytes) <= units - start_unit &&
           block->shard_count >= 1 && block->shard_count <= DISK_SHARDS_MAX &&
           block->shard < block->shard_count;
}

int disk_is_trailer(const disk_trailer_block *block, const disk_segment_name *name) {
    uint64_t units = name->segment_bytes / DISK_UNIT_BYTES;
    if (block->magic != DISK_MAGIC_TRAILER || block->version != DISK_FORMAT_VERSION ||
        !DISK_IS_SEALED(block) || memcmp(block->store_id, name->store_id, 16) != 0 ||
        block->generation != name->generation || block->number != name->number ||
        block->table_offset % DISK_UNIT_BYTES)
        return 0;
    uint64_t start = block->table_offset / DISK_UNIT_BYTES;
    return start >= 1 && start < units &&
           disk_table_units(block->class_count, block->record_count) <= units - 1 - start;
}
