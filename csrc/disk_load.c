/* Loading a folder, on its device's thread: tables of full segments and the tail, not the data.
 *
 * A segment with a right header and trailer is known from its table alone.  One without a trailer
 * is a tail: its record heads are walked from the front, each telling where the next one is, until
 * one is not right or is older than the one before it.  Heads left over from an earlier life of the
 * segment carry another generation; heads from before an earlier crash, behind a hole it left,
 * carry smaller sequence numbers than what was written after it.  Bytes are not looked at here:
 * whoever reads a record verifies it.
 *
 * Nothing in the files is believed without its check word, and whatever is not right is counted and
 * left out.  A folder of another format version, or one that holds other people's files, is refused
 * and not touched.
 */
#define _GNU_SOURCE /* O_DIRECT */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "checksum.h"
#include "disk_private.h"

#define NAMES_MAX   DISK_SEGMENTS_MAX
#define PIECE_UNITS 64

typedef struct {
    uint32_t *numbers;
    uint32_t count;
    int is_full, has_format;
    char foreign[64]; /* a name that is not ours */
} listing;

typedef struct {
    disk_job *job;
    const disk_io *io;
    disk_loaded *found;
    listing names;
    uint8_t *unit;  /* an aligned block */
    uint8_t *piece; /* PIECE_UNITS of them, from piece_start on */
    uint64_t piece_start, piece_units;
    int direct_flag;
} loader;

static int refuse(loader *self, int result, const char *text) {
    snprintf(self->found->reason, sizeof self->found->reason, "%s", text);
    return result;
}

static int refuse_error(loader *self, int result, const char *what, const char *cure) {
    snprintf(self->found->reason, sizeof self->found->reason, "cannot %s (%s); %s", what,
             strerror(-result), cure);
    return result;
}

static void path_of(const loader *self, char *path, const char *name) {
    snprintf(path, DISK_FILE_PATH_BYTES, "%s/%s", self->job->folder, name);
}

static void visit(void *context, const char *name) {
    static const char *const ours[] = {".",     "..",        "format", "format.new",
                                       "marks", "marks.new", "lock",   "probe"};
    listing *names = context;
    names->has_format |= strcmp(name, "format") == 0;
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
        if (strcmp(name, ours[i]) == 0) return;
    uint32_t number;
    int end = 0;
    if (strlen(name) == 16 && sscanf(name, "%8u.segment%n", &number, &end) == 1 && end == 16) {
        if (names->count == NAMES_MAX)
            names->is_full = 1;
        else
            names->numbers[names->count++] = number;
    } else if (!names->foreign[0]) {
        snprintf(names->foreign, sizeof names->foreign, "%s", name);
    }
}

static int open_folder(loader *self) {
    const disk_io *io = self->io;
    char path[DISK_FILE_PATH_BYTES];
    int result = io->make_folder(io->self, self->job->folder);
    if (result && result != -EROFS)
        return refuse_error(self, result, "make the folder",
                            "make it, or choose another --disk-path");
    path_of(self, path, "lock");
    result = io->list(io->self, self->job->folder, visit, &self->names);
    if (result) return refuse_error(self, result, "list the folder", "mend it, or choose another");
    if (!self->names.has_format && (self->names.foreign[0] || self->names.count)) {
        snprintf(self->found->reason, sizeof self->found->reason,
                 "the folder has no `format`, but holds %s; name a folder of its own",
                 self->names.foreign[0] ? self->names.foreign : "segments");
        return -EEXIST;
    }
    int file = io->open(io->self, path, O_RDWR | O_CREAT);
    if (file == -EROFS) {
        self->found->is_read_only = 1;
        file = io->open(io->self, path, O_RDONLY);
    }
    if (file < 0)
        return refuse_error(self, file, "open `lock`", "give its user the right to write");
    self->found->lock_file = file;
    result = io->lock(io->self, file);
    if (result == -EWOULDBLOCK)
        return refuse(self, result,
                      "another infera-kvd owns the folder; stop it or choose another");
    return result ? refuse_error(self, result, "lock the folder", "choose another file system") : 0;
}

/* Reads a small file whole; returns its bytes or an errno as a negative number. */
static int64_t read_small(const loader *self, const char *name, void *bytes, uint64_t max) {
    char path[DISK_FILE_PATH_BYTES];
    path_of(self, path, name);
    int file = self->io->open(self->io->self, path, O_RDONLY);
    if (file < 0) return file;
    int64_t size = self->io->size(self->io->self, file);
    if (size > (int64_t)max) size = (int64_t)max;
    if (size > 0) {
        int result = disk_io_read_all(self->io, file, bytes, (uint64_t)size, 0);
        if (result) size = result;
    }
    self->io->close(self->io->self, file);
    return size;
}

static int begin_store(loader *self) {
    const disk_io *io = self->io;
    disk_format_block block = {.magic = DISK_MAGIC_FORMAT,
                               .version = DISK_FORMAT_VERSION,
                               .segment_bytes = self->job->name.segment_bytes,
                               .created_s = self->job->now_s};
    if (getrandom(block.store_id, sizeof block.store_id, 0) != sizeof block.store_id)
        return refuse(self, -EIO, "the system gives no random numbers");
    DISK_SEAL(&block);
    char draft[DISK_FILE_PATH_BYTES], path[DISK_FILE_PATH_BYTES];
    path_of(self, draft, "format.new");
    path_of(self, path, "format");
    int file = io->open(io->self, draft, O_RDWR | O_CREAT | O_TRUNC);
    int result = file < 0 ? file : disk_io_write_all(io, file, &block, sizeof block, 0);
    if (!result) result = io->sync(io->self, file);
    if (file >= 0) io->close(io->self, file);
    if (!result) result = io->rename(io->self, draft, path);
    if (!result) result = io->sync_folder(io->self, self->job->folder);
    if (result) return refuse_error(self, result, "write `format`", "make room or mend the device");
    memcpy(self->found->store_id, block.store_id, sizeof block.store_id);
    self->found->segment_bytes = block.segment_bytes;
    return 0;
}

static int read_format(loader *self) {
    disk_format_block block = {0};
    int64_t size = read_small(self, "format", &block, sizeof block);
    if (size == -ENOENT) return begin_store(self);
    if (size < 0) return refuse_error(self, (int)size, "read `format`", "mend the device");
    if (size >= 12 && block.magic == DISK_MAGIC_FORMAT && block.version != DISK_FORMAT_VERSION) {
        snprintf(
            self->found->reason, sizeof self->found->reason,
            "a store of format version %u; this infera-kvd knows %d: remove the folder, or name "
            "another",
            block.version, DISK_FORMAT_VERSION);
        return -EPROTO;
    }
    if (size != sizeof block || block.magic != DISK_MAGIC_FORMAT || !DISK_IS_SEALED(&block) ||
        block.segment_bytes < DISK_SEGMENT_BYTES_MIN || block.segment_bytes % DISK_UNIT_BYTES ||
        block.segment_bytes > UINT32_MAX)
        return refuse(self, -EBADMSG, "`format` is damaged; remove the folder to begin anew");
    memcpy(self->found->store_id, block.store_id, sizeof block.store_id);
    self->found->segment_bytes = block.segment_bytes;
    return 0;
}

/* Without right marks, dropped records come back, and numbers go on after the largest seen. */
static void read_marks(loader *self) {
    struct {
        disk_marks_block head;
        disk_drop_row rows[DISK_DROPS_MAX];
    } marks;
    memset(&marks, 0, sizeof marks);
    disk_loaded *found = self->found;
    int64_t size = read_small(self, "marks", &marks, sizeof marks);
    found->may_resume = 1;
    if (size == -ENOENT && !self->names.count) return;
    uint64_t rows_bytes = (uint64_t)marks.head.drop_count * sizeof *marks.rows;
    if (size < (int64_t)sizeof marks.head || marks.head.magic != DISK_MAGIC_MARKS ||
        marks.head.version != DISK_FORMAT_VERSION || !DISK_IS_SEALED(&marks.head) ||
        memcmp(marks.head.store_id, found->store_id, 16) != 0 ||
        marks.head.drop_count > DISK_DROPS_MAX ||
        size != (int64_t)(sizeof marks.head + rows_bytes) ||
        checksum_crc32c(0, marks.rows, rows_bytes) != marks.head.rows_check) {
        found->marks_damaged = 1;
        found->may_resume = 0;
        return;
    }
    found->epoch = marks.head.epoch;
    found->drop_count = marks.head.drop_count;
    memcpy(found->drops, marks.rows, rows_bytes);
}

/* How files of this folder can be read and written: tried out on the file `probe`. */
static int probe_way(loader *self) {
    disk_loaded *found = self->found;
    const disk_settings *wanted = self->job->settings;
    char path[DISK_FILE_PATH_BYTES];
    path_of(self, path, "probe");
    const char *direct_text = "O_DIRECT", *ring_text = "io_uring";
    int flags = found->is_read_only ? O_RDONLY : O_RDWR | O_CREAT;
    memset(self->unit, 0x5A, DISK_UNIT_BYTES);
    found->uses_direct = wanted->direct != DISK_WAY_NO;
    int file = -EINVAL, result = -EINVAL;
    for (; result; found->uses_direct = 0) {
        file = self->io->open(self->io->self, path, flags | (found->uses_direct ? O_DIRECT : 0));
        result = file < 0 ? file : 0;
        if (!result && !found->is_read_only)
            result = disk_io_write_all(self->io, file, self->unit, DISK_UNIT_BYTES, 0);
        if (!result && !found->is_read_only)
            result = disk_io_read_all(self->io, file, self->unit, DISK_UNIT_BYTES, 0);
        if (result == 0 || !found->uses_direct || result != -EINVAL) break;
        if (file >= 0) self->io->close(self->io->self, file);
        direct_text = "page cache (the file system refuses O_DIRECT)";
    }
    if (wanted->direct == DISK_WAY_NO) direct_text = "page cache (as asked)";
    found->uses_ring = 0;
    if (!self->io->has_descriptors || wanted->ring == DISK_WAY_NO) {
        ring_text = "thread pool (as asked)";
    } else if (!result || found->is_read_only) {
        int refused = disk_ring_probe(result ? -1 : file);
        found->uses_ring = !refused;
        if (refused) ring_text = "thread pool (io_uring is not allowed here, or does not work)";
    }
    if (file >= 0) self->io->close(self->io->self, file);
    snprintf(found->way, sizeof found->way, "%s, %s", ring_text, direct_text);
    if (result && !found->is_read_only)
        return refuse_error(self, result, "write to the folder", "make room or mend the device");
    self->direct_flag = found->uses_direct ? O_DIRECT : 0;
    return 0;
}

/* ---- segments ---- */

static int is_empty_block(const uint8_t *unit) {
    for (size_t i = 0; i < DISK_UNIT_BYTES; i++)
        if (unit[i]) return 0;
    return 1;
}

static int is_good_row(const disk_record_row *row, const disk_loaded_segment *segment,
                       uint64_t segment_bytes) {
    uint64_t units = segment_bytes / DISK_UNIT_BYTES;
    return row->class_row < segment->class_count &&
           row->shard < segment->classes[row->class_row].shard_count && row->start_unit >= 1 &&
           row->start_unit < units && row->length_bytes > 0 && row->length_bytes <= UINT32_MAX &&
           disk_record_units(row->length_bytes) <= units - row->start_unit;
}

static int is_good_class(const disk_class_row *row) {
    return row->shard_count >= 1 && row->shard_count <= DISK_SHARDS_MAX;
}

/* The table a right trailer speaks of: 1 when it was read and is right. */
static int read_table(loader *self, const disk_segment_name *name,
                      const disk_trailer_block *trailer, disk_loaded_segment *segment) {
    uint64_t classes_bytes = trailer->class_count * sizeof(disk_class_row);
    uint64_t rows_bytes = trailer->record_count * sizeof(disk_record_row);
    uint64_t bytes =
        disk_table_units(trailer->class_count, trailer->record_count) * DISK_UNIT_BYTES;
    if (bytes == 0) return 1;
    uint8_t *table = aligned_alloc(DISK_UNIT_BYTES, bytes);
    segment->classes = malloc(classes_bytes + 1);
    segment->records = malloc(rows_bytes + 1);
    int is_right =
        table && segment->classes && segment->records &&
        disk_io_read_all(self->io, segment->file, table, bytes, trailer->table_offset) == 0 &&
        checksum_crc32c(0, table, classes_bytes + rows_bytes) == trailer->table_check;
    if (is_right) {
        memcpy(segment->classes, table, classes_bytes);
        segment->class_count = trailer->class_count;
        for (uint32_t i = 0; i < segment->class_count; i++)
            is_right = is_right && is_good_class(&segment->classes[i]);
    }
    for (uint32_t i = 0; is_right && i < trailer->record_count; i++) {
        disk_record_row row;
        memcpy(&row, table + classes_bytes + i * sizeof row, sizeof row);
        is_right = is_good_row(&row, segment, name->segment_bytes);
        if (is_right) segment->records[segment->record_count++] = row;
    }
    free(table);
    return is_right;
}

static void forget_table(disk_loaded_segment *segment) {
    free(segment->classes);
    free(segment->records);
    segment->classes = NULL;
    segment->records = NULL;
    segment->class_count = segment->record_count = 0;
}

static int class_row_of(disk_loaded_segment *segment, const disk_record_block *head) {
    for (uint32_t i = 0; i < segment->class_count; i++) {
        const disk_class_row *row = &segment->classes[i];
        if (row->group == head->group && row->shard_count == head->shard_count &&
            memcmp(row->name_space, head->name_space, 16) == 0)
            return (int)i;
    }
    if (segment->class_count == DISK_CLASSES_MAX) return -1;
    disk_class_row *row = &segment->classes[segment->class_count];
    *row = (disk_class_row){.group = head->group, .shard_count = head->shard_count};
    memcpy(row->name_space, head->name_space, 16);
    memcpy(row->model, head->model, sizeof row->model);
    return (int)segment->class_count++;
}

static int add_tail_record(disk_loaded_segment *segment, const disk_record_block *head) {
    if (segment->record_count % 1024 == 0) {
        size_t bytes = (segment->record_count + 1024) * sizeof *segment->records;
        disk_record_row *grown = realloc(segment->records, bytes);
        if (!grown) return 0;
        segment->records = grown;
    }
    int class_row = class_row_of(segment, head);
    if (class_row < 0) return 1;
    disk_record_row *row = &segment->records[segment->record_count++];
    *row = (disk_record_row){.sequence = head->sequence,
                             .length_bytes = head->length_bytes,
                             .start_unit = head->start_unit,
                             .expires_s = head->expires_s,
                             .class_row = (uint16_t)class_row,
                             .shard = (uint8_t)head->shard,
                             .retention = (uint8_t)head->retention};
    memcpy(row->key, head->key, sizeof row->key);
    return 1;
}

/* The unit at `at`, from a piece of the file that is read anew when it holds that unit no more.
 * Small records have several heads in a piece; behind a large one a single unit is enough. NULL
 * when it cannot be read. */
static const disk_record_block *head_at(loader *self, const disk_loaded_segment *segment,
                                        uint64_t at, uint64_t units) {
    if (at < self->piece_start || at >= self->piece_start + self->piece_units) {
        int is_far = self->piece_units && at >= self->piece_start + self->piece_units + PIECE_UNITS;
        uint64_t count = is_far ? 1 : PIECE_UNITS;
        if (count > units - at) count = units - at;
        self->piece_start = at;
        self->piece_units = 0;
        if (disk_io_read_all(self->io, segment->file, self->piece, count * DISK_UNIT_BYTES,
                             at * DISK_UNIT_BYTES))
            return NULL;
        self->piece_units = count;
    }
    return (const disk_record_block *)(self->piece + (at - self->piece_start) * DISK_UNIT_BYTES);
}

/* Walks the record heads of a segment without a (right) table. */
static int walk_tail(loader *self, const disk_segment_name *name, disk_loaded_segment *segment) {
    segment->classes = malloc(DISK_CLASSES_MAX * sizeof *segment->classes);
    if (!segment->classes) return -ENOMEM;
    uint64_t last_sequence = segment->generation;
    uint64_t units = name->segment_bytes / DISK_UNIT_BYTES;
    uint64_t at = 1;
    self->piece_start = self->piece_units = 0;
    while (at < units) {
        const disk_record_block *head = head_at(self, segment, at, units);
        if (!head || !disk_is_record(head, name, (uint32_t)at) || head->sequence <= last_sequence)
            break;
        uint64_t end = at + disk_record_units(head->length_bytes);
        if (end >= units) break; /* where the trailer goes */
        last_sequence = head->sequence;
        if (head->kind == DISK_KIND_OBJECT && !add_tail_record(segment, head)) return -ENOMEM;
        segment->appended++;
        at = end;
    }
    segment->used_units = (uint32_t)at;
    self->found->tail_records += segment->record_count;
    return 0;
}

static int load_records(loader *self, disk_loaded_segment *segment) {
    disk_loaded *found = self->found;
    disk_segment_name name = {.generation = segment->generation,
                              .segment_bytes = found->segment_bytes,
                              .number = segment->number};
    memcpy(name.store_id, found->store_id, sizeof name.store_id);
    int result = disk_io_read_all(self->io, segment->file, self->unit, DISK_UNIT_BYTES,
                                  found->segment_bytes - DISK_UNIT_BYTES);
    disk_trailer_block trailer;
    memcpy(&trailer, self->unit, sizeof trailer);
    /* One of an earlier use is right in itself; what is not was once one of this use, perhaps. */
    if (result || (!is_empty_block(self->unit) && !DISK_IS_SEALED(&trailer)))
        found->tables_damaged++;
    if (!result && disk_is_trailer(&trailer, &name)) {
        segment->is_sealed = 1;
        segment->used_units = (uint32_t)(trailer.table_offset / DISK_UNIT_BYTES);
        if (read_table(self, &name, &trailer, segment)) return 0;
        found->tables_damaged++;
        forget_table(segment);
    }
    return walk_tail(self, &name, segment);
}

static int load_segment(loader *self, uint32_t number) {
    disk_loaded *found = self->found;
    disk_loaded_segment *segment = &found->segments[found->segment_count];
    *segment = (disk_loaded_segment){.number = number};
    char path[DISK_FILE_PATH_BYTES];
    disk_segment_path(path, self->job->folder, number);
    int flags = (found->is_read_only ? O_RDONLY : O_RDWR) | self->direct_flag;
    segment->file = self->io->open(self->io->self, path, flags);
    if (segment->file == -EMFILE || segment->file == -ENFILE)
        return refuse(self, segment->file,
                      "too many open files for its segments; raise the limit (ulimit -n)");
    if (segment->file < 0) {
        found->segments_damaged++;
        return 0;
    }
    if (self->io->size(self->io->self, segment->file) != (int64_t)found->segment_bytes) {
        /* Cut off, or never finished: its blocks are not all there, so it is made anew. */
        found->segments_damaged++;
        self->io->close(self->io->self, segment->file);
        if (!found->is_read_only) self->io->remove(self->io->self, path);
        return 0;
    }
    found->segment_count++;
    const disk_segment_block *block = (const disk_segment_block *)self->unit;
    int result = disk_io_read_all(self->io, segment->file, self->unit, DISK_UNIT_BYTES, 0);
    if (result || !disk_is_segment(block, found->store_id, number, found->segment_bytes)) {
        found->segments_damaged += result || !is_empty_block(self->unit);
        return 0;
    }
    segment->generation = block->generation;
    segment->day = block->day;
    segment->day_bytes = block->day_bytes;
    return load_records(self, segment);
}

static int newest_first(const void *left, const void *right) {
    const disk_loaded_segment *a = left, *b = right;
    return a->generation < b->generation ? 1 : a->generation > b->generation ? -1 : 0;
}

static uint64_t largest_epoch(const disk_loaded *found) {
    uint64_t largest = found->epoch;
    for (uint32_t i = 0; i < found->segment_count; i++) {
        const disk_loaded_segment *segment = &found->segments[i];
        uint64_t epoch = segment->generation >> DISK_SEQUENCE_BITS;
        if (epoch > largest) largest = epoch;
        for (uint32_t r = 0; r < segment->record_count; r++) {
            epoch = segment->records[r].sequence >> DISK_SEQUENCE_BITS;
            if (epoch > largest) largest = epoch;
        }
    }
    return largest;
}

/* The size is smaller than it was: the oldest segments go. */
static void shrink(loader *self, uint64_t allowed) {
    disk_loaded *found = self->found;
    while (found->segment_count > allowed) {
        disk_loaded_segment *oldest = &found->segments[--found->segment_count];
        char path[DISK_FILE_PATH_BYTES];
        disk_segment_path(path, self->job->folder, oldest->number);
        self->io->close(self->io->self, oldest->file);
        self->io->remove(self->io->self, path);
        forget_table(oldest);
        found->shrunk++;
    }
}

static int load_all(loader *self) {
    disk_loaded *found = self->found;
    int result = open_folder(self);
    if (!result) result = read_format(self);
    if (result) return result;
    if (self->names.is_full)
        return refuse(self, -EOVERFLOW, "too many segments; remove the folder");
    uint64_t allowed =
        self->job->settings->size_bytes / self->job->device_count / found->segment_bytes;
    if (allowed < DISK_SEGMENTS_MIN)
        return refuse(
            self, -EINVAL,
            "the size holds fewer than 4 of the segments of this store; raise --disk-size, or "
            "remove the folder");
    read_marks(self);
    result = probe_way(self);
    if (result) return result;
    found->segments = calloc(self->names.count + 1, sizeof *found->segments);
    if (!found->segments) return -ENOMEM;
    for (uint32_t i = 0; i < self->names.count; i++) {
        result = load_segment(self, self->names.numbers[i]);
        if (result) return result;
    }
    qsort(found->segments, found->segment_count, sizeof *found->segments, newest_first);
    if (!found->is_read_only) shrink(self, allowed);
    found->epoch = largest_epoch(found) + 1;
    if (!found->is_read_only) {
        result = disk_write_marks(self->io, self->job->folder, found->store_id, found->epoch,
                                  found->drops, found->drop_count);
        if (result)
            return refuse_error(self, result, "write `marks`", "make room or mend the device");
    }
    self->io->free_bytes(self->io->self, self->job->folder, &found->free_bytes);
    return 0;
}

void disk_loaded_free(const disk_io *io, disk_loaded *loaded, int with_files) {
    for (uint32_t i = 0; i < loaded->segment_count; i++) {
        forget_table(&loaded->segments[i]);
        if (with_files && loaded->segments[i].file >= 0)
            io->close(io->self, loaded->segments[i].file);
    }
    if (with_files && loaded->lock_file >= 0) io->close(io->self, loaded->lock_file);
    free(loaded->segments);
    free(loaded);
}

int disk_load(disk_job *job) {
    loader self = {.job = job, .io = job->io};
    self.found = job->loaded = calloc(1, sizeof *job->loaded);
    self.names.numbers = malloc(NAMES_MAX * sizeof *self.names.numbers);
    self.unit = aligned_alloc(DISK_UNIT_BYTES, DISK_UNIT_BYTES);
    self.piece = aligned_alloc(DISK_UNIT_BYTES, PIECE_UNITS * DISK_UNIT_BYTES);
    int result = -ENOMEM;
    if (self.found && self.names.numbers && self.unit && self.piece) {
        self.found->lock_file = -1;
        result = load_all(&self);
        if (result && !self.found->reason[0])
            snprintf(self.found->reason, sizeof self.found->reason, "cannot load it (%s)",
                     strerror(-result));
    }
    free(self.names.numbers);
    free(self.unit);
    free(self.piece);
    return result;
}
