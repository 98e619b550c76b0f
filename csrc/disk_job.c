/* What a device's own thread does besides transfers: all that makes, syncs and removes files.
 *
 * A job reads nothing but its own fields, because the store goes on meanwhile.  The order of writes
 * and syncs here is what recovery relies on:
 *
 * - Before a segment is begun anew, whatever was moved out of it is synced where it went.
 * - Its new header is synced before any record is written behind it, so that a record of its
 * earlier life is never mistaken for one of the new.
 * - `marks` and `format` are written under another name, synced, renamed, and the folder is synced.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checksum.h"
#include "disk_private.h"

void disk_segment_path(char *path, const char *folder, uint32_t number) {
    snprintf(path, DISK_FILE_PATH_BYTES, "%s/%08u.segment", folder, number);
}

static void path_in(char *path, const char *folder, const char *name) {
    snprintf(path, DISK_FILE_PATH_BYTES, "%s/%s", folder, name);
}

int disk_write_marks(const disk_io *io, const char *folder, const uint8_t *store_id, uint64_t epoch,
                     const disk_drop_row *drops, uint32_t count) {
    char draft[DISK_FILE_PATH_BYTES], path[DISK_FILE_PATH_BYTES];
    path_in(draft, folder, "marks.new");
    path_in(path, folder, "marks");
    disk_marks_block block = {.magic = DISK_MAGIC_MARKS,
                              .version = DISK_FORMAT_VERSION,
                              .drop_count = count,
                              .epoch = epoch,
                              .rows_check = checksum_crc32c(0, drops, count * sizeof *drops)};
    memcpy(block.store_id, store_id, sizeof block.store_id);
    DISK_SEAL(&block);
    int file = io->open(io->self, draft, O_RDWR | O_CREAT | O_TRUNC);
    if (file < 0) return file;
    int result = disk_io_write_all(io, file, &block, sizeof block, 0);
    if (!result) result = disk_io_write_all(io, file, drops, count * sizeof *drops, sizeof block);
    if (!result) result = io->sync(io->self, file);
    io->close(io->self, file);
    if (!result) result = io->rename(io->self, draft, path);
    if (!result) result = io->sync_folder(io->self, folder);
    return result;
}

static int make_file(disk_job *job) {
    const disk_io *io = job->io;
    uint64_t free_bytes, bytes = job->name.segment_bytes;
    int result = io->free_bytes(io->self, job->folder, &free_bytes);
    if (result) return result;
    if (free_bytes < bytes || free_bytes - bytes < job->settings->free_floor_bytes) return -ENOSPC;
    char path[DISK_FILE_PATH_BYTES];
    disk_segment_path(path, job->folder, job->number);
    int file = io->open(io->self, path, job->open_flags | O_CREAT | O_EXCL);
    if (file < 0) return file;
    result = io->allocate(io->self, file, bytes);
    if (result) {
        io->close(io->self, file);
        io->remove(io->self, path);
        return result;
    }
    job->file = file;
    return io->sync_folder(io->self, job->folder);
}

static int prepare(disk_job *job) {
    const disk_io *io = job->io;
    for (uint32_t i = 0; i < job->file_count; i++) {
        int result = io->sync(io->self, job->files[i]);
        if (result) return result;
    }
    if (job->must_create) {
        int result = make_file(job);
        if (result) return result;
    }
    disk_segment_block *block = (disk_segment_block *)job->bytes;
    *block = (disk_segment_block){.magic = DISK_MAGIC_SEGMENT,
                                  .version = DISK_FORMAT_VERSION,
                                  .number = job->number,
                                  .generation = job->name.generation,
                                  .segment_bytes = job->name.segment_bytes,
                                  .opened_s = job->now_s,
                                  .day = job->day,
                                  .day_bytes = job->day_bytes};
    memcpy(block->store_id, job->name.store_id, sizeof block->store_id);
    DISK_SEAL(block);
    int result = disk_io_write_all(io, job->file, job->bytes, DISK_UNIT_BYTES, 0);
    return result ? result : io->sync(io->self, job->file);
}

/* `bytes` is the table, padded to units, and the trailer's unit. */
static int seal(disk_job *job) {
    const disk_io *io = job->io;
    uint64_t table_bytes = job->byte_count - DISK_UNIT_BYTES;
    int result = disk_io_write_all(io, job->file, job->bytes, table_bytes, job->offset);
    if (!result)
        result = disk_io_write_all(io, job->file, job->bytes + table_bytes, DISK_UNIT_BYTES,
                                   job->name.segment_bytes - DISK_UNIT_BYTES);
    return result ? result : io->sync(io->self, job->file);
}

/* Writes a unit to the file `probe` and reads it back. */
static int try_writing(disk_job *job) {
    const disk_io *io = job->io;
    char path[DISK_FILE_PATH_BYTES];
    path_in(path, job->folder, "probe");
    uint8_t *units = aligned_alloc(DISK_UNIT_BYTES, 2 * DISK_UNIT_BYTES);
    if (!units) return -ENOMEM;
    memset(units, (int)(job->now_s & 0xFF), DISK_UNIT_BYTES);
    memset(units + DISK_UNIT_BYTES, ~(int)job->now_s & 0xFF, DISK_UNIT_BYTES);
    int file = io->open(io->self, path, job->open_flags | O_CREAT);
    int result = file < 0 ? file : disk_io_write_all(io, file, units, DISK_UNIT_BYTES, 0);
    if (!result) result = io->sync(io->self, file);
    if (!result) result = disk_io_read_all(io, file, units + DISK_UNIT_BYTES, DISK_UNIT_BYTES, 0);
    if (!result && memcmp(units, units + DISK_UNIT_BYTES, DISK_UNIT_BYTES) != 0) result = -EIO;
    if (file >= 0) io->close(io->self, file);
    free(units);
    return result;
}

static int look(disk_job *job) {
    const disk_io *io = job->io;
    char path[DISK_FILE_PATH_BYTES];
    path_in(path, job->folder, "lock");
    int is_same = io->is_same(io->self, path, job->lock_file);
    if (is_same <= 0) return is_same ? is_same : -ESTALE;
    int result = io->free_bytes(io->self, job->folder, &job->free_bytes);
    if (result) return result;
    uint64_t needed = job->settings->free_floor_bytes + job->name.segment_bytes;
    if (job->must_have_room && job->free_bytes < needed) return -ENOSPC;
    return job->must_probe ? try_writing(job) : 0;
}

static int remove_file(disk_job *job) {
    char path[DISK_FILE_PATH_BYTES];
    disk_segment_path(path, job->folder, job->number);
    if (job->file >= 0) job->io->close(job->io->self, job->file);
    return job->io->remove(job->io->self, path);
}

static int sync_files(disk_job *job) {
    for (uint32_t i = 0; i < job->file_count; i++) {
        int result = job->io->sync(job->io->self, job->files[i]);
        if (result) return result;
    }
    return 0;
}

static int close_files(disk_job *job) {
    for (uint32_t i = 0; i < job->file_count; i++)
        if (job->files[i] >= 0) job->io->close(job->io->self, job->files[i]);
    return 0;
}

int disk_job_run(disk_request *request) {
    disk_job *job = (disk_job *)request;
    switch (job->kind) {
    case JOB_LOAD:
        return disk_load(job);
    case JOB_PREPARE:
        return prepare(job);
    case JOB_SEAL:
        return seal(job);
    case JOB_SYNC:
        return sync_files(job);
    case JOB_LOOK:
        return look(job);
    case JOB_REMOVE:
        return remove_file(job);
    case JOB_MARKS:
        return disk_write_marks(job->io, job->folder, job->name.store_id, job->epoch,
                                (const disk_drop_row *)job->bytes, job->file_count);
    default:
        return close_files(job);
    }
}
