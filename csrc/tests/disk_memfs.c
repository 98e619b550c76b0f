/* A file system in memory.
 *
 * A file has its current bytes and the bytes that would be there after a loss of power; what was
 * written since the last sync is a list of pieces.  Names are treated alike: a list of changes that
 * a sync of the folder makes lasting, of which a loss of power keeps a beginning, as a journal
 * does. There is one folder level; folders themselves need not exist.
 */
#include "disk_memfs.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FILES_MAX = 512, NAMES_MAX = 256, OPEN_MAX = 512, NAME_BYTES = 600, PIECE_BYTES = 4096 };

typedef struct piece {
    uint64_t offset, count;
    struct piece *next;
    uint8_t bytes[];
} piece;

typedef struct {
    int is_used;
    uint8_t *bytes, *durable;
    uint64_t size, durable_size;
    piece *first, *last;
    int locked_by; /* descriptor + 1 */
} file;

typedef struct {
    char name[NAME_BYTES];
    int number; /* -1: free */
} entry;

typedef struct change {
    struct change *next;
    entry names[NAMES_MAX]; /* after it */
} change;

struct memfs {
    disk_io io;
    pthread_mutex_t lock;
    pthread_cond_t goes_on;
    file files[FILES_MAX];
    entry names[NAMES_MAX], durable_names[NAMES_MAX];
    change *changes, *last_change;
    int open[OPEN_MAX]; /* file number + 1 */
    uint64_t steps, stop_at, cut_bytes, free_bytes;
    int is_half_done, has_stopped, write_error, read_error, allocate_error, is_hanging;
};

static uint64_t mixed(uint64_t value) {
    value += 0x9E3779B97F4A7C15ull;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
    return value ^ (value >> 31);
}

static void *need(void *memory) {
    if (!memory) abort();
    return memory;
}

/* Whether the machine still runs; counts a step. */
static int step(memfs *self) {
    if (!self->has_stopped && ++self->steps == self->stop_at) self->has_stopped = 1;
    return !self->has_stopped;
}

static entry *find(memfs *self, const char *name) {
    for (int i = 0; i < NAMES_MAX; i++)
        if (self->names[i].number >= 0 && strcmp(self->names[i].name, name) == 0)
            return &self->names[i];
    return NULL;
}

static void note_names(memfs *self) {
    change *fresh = need(malloc(sizeof *fresh));
    fresh->next = NULL;
    memcpy(fresh->names, self->names, sizeof fresh->names);
    if (self->last_change)
        self->last_change->next = fresh;
    else
        self->changes = fresh;
    self->last_change = fresh;
}

static void forget_changes(memfs *self) {
    while (self->changes) {
        change *next = self->changes->next;
        free(self->changes);
        self->changes = next;
    }
    self->last_change = NULL;
}

static void forget_pieces(file *of) {
    while (of->first) {
        piece *next = of->first->next;
        free(of->first);
        of->first = next;
    }
    of->last = NULL;
}

static file *opened(memfs *self, int descriptor) {
    if (descriptor < 0 || descriptor >= OPEN_MAX || !self->open[descriptor]) abort();
    return &self->files[self->open[descriptor] - 1];
}

static void resize(uint8_t **bytes, uint64_t *size, uint64_t wanted) {
    *bytes = need(realloc(*bytes, wanted + 1));
    if (wanted > *size) memset(*bytes + *size, 0, wanted - *size);
    *size = wanted;
}

static int make(memfs *self, const char *path) {
    int number = 0, name = 0;
    while (number < FILES_MAX && self->files[number].is_used) number++;
    while (name < NAMES_MAX && self->names[name].number >= 0) name++;
    if (number == FILES_MAX || name == NAMES_MAX) abort();
    self->files[number] = (file){.is_used = 1};
    snprintf(self->names[name].name, NAME_BYTES, "%s", path);
    self->names[name].number = number;
    note_names(self);
    return number;
}

static int fs_open(void *context, const char *path, int flags) {
    memfs *self = context;
    pthread_mutex_lock(&self->lock);
    entry *found = find(self, path);
    int result = self->has_stopped                                               ? -EIO
                 : !found && !(flags & O_CREAT)                                  ? -ENOENT
                 : found && (flags & O_CREAT) && (flags & O_EXCL)                ? -EEXIST
                 : self->write_error == EROFS && (flags & O_ACCMODE) != O_RDONLY ? -EROFS
                                                                                 : 0;
    if (!result) {
        int number = found ? found->number : make(self, path);
        if (flags & O_TRUNC) {
            forget_pieces(&self->files[number]);
            resize(&self->files[number].bytes, &self->files[number].size, 0);
        }
        while (result < OPEN_MAX && self->open[result]) result++;
        if (result == OPEN_MAX) abort();
        self->open[result] = number + 1;
    }
    pthread_mutex_unlock(&self->lock);
    return result;
}

static void fs_close(void *context, int descriptor) {
    memfs *self = context;
    pthread_mutex_lock(&self->lock);
    file *of = opened(self, descriptor);
    if (of->locked_by == descriptor + 1) of->locked_by = 0;
    self->open[descriptor] = 0;
    pthread_mutex_unlock(&self->lock);
}

static void wait_while_hanging(memfs *self) {
    while (self->is_hanging) pthread_cond_wait(&self->goes_on, &self->lock);
}

static uint64_t total_of(const memfs *self, const struct iovec *parts, int count) {
    uint64_t total = 0;
    for (int i = 0; i < count; i++) total += parts[i].iov_len;
    return self->cut_bytes && total > self->cut_bytes ? self->cut_bytes : total;
}

static int64_t fs_read(void *context, int descriptor, const struct iovec *parts, int count,
                       uint64_t offset) {
    memfs *self = context;
    pthread_mutex_lock(&self->lock);
    wait_while_hanging(self);
    const file *of = opened(self, descriptor);
    int64_t result = self->has_stopped ? -EIO : -self->read_error;
    if (!result && offset < of->size) {
        uint64_t left = total_of(self, parts, count);
        if (left > of->size - offset) left = of->size - offset;
        for (int i = 0; i < count && left; i++) {
            uint64_t take = parts[i].iov_len < left ? parts[i].iov_len : left;
            memcpy(parts[i].iov_base, of->bytes + offset, take);
            offset += take;
            left -= take;
            result += (int64_t)take;
        }
    }
    pthread_mutex_unlock(&self->lock);
    return result;
}

static void put(file *of, uint64_t offset, const uint8_t *bytes, uint64_t count) {
    if (offset + count > of->size) resize(&of->bytes, &of->size, offset + count);
    memcpy(of->bytes + offset, bytes, count);
    piece *fresh = need(malloc(sizeof *fresh + count));
    *fresh = (piece){.offset = offset, .count = count};
    memcpy(fresh->bytes, bytes, count);
    if (of->last)
        of->last->next = fresh;
    else
        of->first = fresh;
    of->last = fresh;
}

static int64_t fs_write(void *context, int descriptor, const struct iovec *parts, int count,
                        uint64_t offset) {
    memfs *self = context;
    pthread_mutex_lock(&self->lock);
    wait_while_hanging(self);
    file *of = opened(self, descriptor);
    int had_stopped = self->has_stopped;
    int runs = step(self);
    uint64_t left = total_of(self, parts, count);
    int64_t result = -self->write_error;
    if (!runs) left = had_stopped || !self->is_half_done ? 0 : left / 2 / 512 * 512;
    if (result == 0) {
        for (int i = 0; i < count && left; i++) {
            uint64_t take = parts[i].iov_len < left ? parts[i].iov_len : left;
            put(of, offset, parts[i].iov_base, take);
            offset += take;
            left -= take;
            result += (int64_t)take;
        }
    }
    if (!runs) result = -EIO;
    pthread_mutex_unlock(&self->lock);
    return result;
}

static int fs_sync(void *context, int descriptor) {
    memfs *self = context;
    pthread_mutex_lock(&self->lock);
    wait_while_hanging(self);
    file *of = opened(self, descriptor);
    int result = !step(self) ? -EIO : -self->write_error;
    if (!result) {
        resize(&of->durable, &of->durable_size, of->size);
        memcpy(of->durable, of->bytes, of->size);
        forget_pieces(of);
    }
    pthread_mutex_unlock(&self->lock);
    return result;
}

static int fs_sync_folder(void *context, const char *path) {
    (void)path;
    memfs *self = context;
    pthread_mutex_lock(&self->lock);
    int result = step(self) ? 0 : -EIO;
    if (!result) {
        memcpy(self->durable_names, self->names, sizeof self->names);
        forget_changes(self);
    }
    pthread_mutex_unlock(&self->lock);
    return result;
}

static int fs_allocate(void *context, int descriptor, uint64_t bytes) {
    memfs *self = context;
    pthread_mutex_lock(&self->lock);
    int result = !step(self)         ? -EIO
                 : self->write_error ? -self->write_error
                                     : -self->allocate_error;
    file *of = opened(self, descriptor);
    if (!result && bytes > of->size) resize(&of->bytes, &of->size, bytes);
    pthread_mutex_unlock(&self->lock);
    return result;
}

static int64_t fs_size(void *context, int descriptor) {
    memfs *self = context;
    pthread_mutex_lock(&self->lock);
    int64_t result = self->has_stopped ? -EIO : (int64_t)opened(self, descriptor)->size;
    pthread_mutex_unlock(&self->lock);
    return result;
}

static int fs_lock(void *context, int descriptor) {
    memfs *self = context;
    pthread_mutex_lock(&self->lock);
    file *of = opened(self, descriptor);
    int result = of->locked_by && of->locked_by != descriptor + 1 ? -EWOULDBLOCK : 0;
    if (!result) of->locked_by = descriptor + 1;
    pthread_mutex_unlock(&self->lock);
    return result;
}

static int fs_make_folder(void *context, const char *path) {
    (void)path;
    return ((memfs *)context)->has_stopped ? -EIO : 0;
}

static int fs_list(void *context, const char *path, void (*visit)(void *context, const char *name),
                   void *visitor) {
    memfs *self = context;
    size_t length = strlen(path);
    for (int i = 0; i < NAMES_MAX; i++) {
        const entry *named = &self->names[i];
        if (named->number >= 0 && strncmp(named->name, path, length) == 0 &&
            named->name[length] == '/')
            visit(visitor, named->name + length + 1);
    }
    return self->has_stopped ? -EIO : 0;
}

static int fs_rename(void *context, const char *from, const char *to) {
    memfs *self = context;
    pthread_mutex_lock(&self->lock);
    entry *source = find(self, from), *target = find(self, to);
    int result = !step(self) ? -EIO : source ? 0 : -ENOENT;
    if (!result) {
        if (target) target->number = -1;
        snprintf(source->name, NAME_BYTES, "%s", to);
        note_names(self);
    }
    pthread_mutex_unlock(&self->lock);
    return result;
}

static int fs_remove(void *context, const char *path) {
    memfs *self = context;
    pthread_mutex_lock(&self->lock);
    entry *found = find(self, path);
    int result = !step(self) ? -EIO : found ? 0 : -ENOENT;
    if (!result) {
        found->number = -1;
        note_names(self);
    }
    pthread_mutex_unlock(&self->lock);
    return result;
}

static int fs_free_bytes(void *context, const char *path, uint64_t *bytes) {
    (void)path;
    memfs *self = context;
    pthread_mutex_lock(&self->lock);
    *bytes = self->free_bytes;
    int result = self->has_stopped ? -EIO : 0;
    pthread_mutex_unlock(&self->lock);
    return result;
}

static int fs_is_same(void *context, const char *path, int descriptor) {
    memfs *self = context;
    pthread_mutex_lock(&self->lock);
    const entry *found = find(self, path);
    int result = self->has_stopped ? -EIO : found && self->open[descriptor] - 1 == found->number;
    pthread_mutex_unlock(&self->lock);
    return result;
}

memfs *memfs_make(void) {
    memfs *self = need(calloc(1, sizeof *self));
    self->io = (disk_io){.self = self,
                         .open = fs_open,
                         .close = fs_close,
                         .read = fs_read,
                         .write = fs_write,
                         .sync = fs_sync,
                         .sync_folder = fs_sync_folder,
                         .allocate = fs_allocate,
                         .size = fs_size,
                         .lock = fs_lock,
                         .make_folder = fs_make_folder,
                         .list = fs_list,
                         .rename = fs_rename,
                         .remove = fs_remove,
                         .free_bytes = fs_free_bytes,
                         .is_same = fs_is_same};
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->goes_on, NULL);
    for (int i = 0; i < NAMES_MAX; i++) self->names[i].number = self->durable_names[i].number = -1;
    self->free_bytes = 1ull << 40;
    return self;
}

void memfs_free(memfs *self) {
    for (int i = 0; i < FILES_MAX; i++) {
        forget_pieces(&self->files[i]);
        free(self->files[i].bytes);
        free(self->files[i].durable);
    }
    forget_changes(self);
    pthread_mutex_destroy(&self->lock);
    pthread_cond_destroy(&self->goes_on);
    free(self);
}

const disk_io *memfs_io(memfs *self) {
    return &self->io;
}

void memfs_stop_at(memfs *self, uint64_t at, int is_half_done) {
    self->stop_at = at;
    self->is_half_done = is_half_done;
    self->steps = 0;
}

uint64_t memfs_steps(const memfs *self) {
    return self->steps;
}

int memfs_has_stopped(const memfs *self) {
    return self->has_stopped;
}

static void restart(memfs *self) {
    for (int i = 0; i < FILES_MAX; i++) self->files[i].locked_by = 0;
    memset(self->open, 0, sizeof self->open);
    self->has_stopped = 0;
    self->stop_at = 0;
}

void memfs_kill(memfs *self) {
    restart(self);
}

static void lose(file *of, uint64_t seed) {
    uint64_t size = of->durable_size;
    if (of->size > size && mixed(seed) & 1) size = of->size;
    resize(&of->durable, &of->durable_size, size);
    uint64_t dice = mixed(seed + 1);
    for (piece *one = of->first; one; one = one->next) {
        for (uint64_t at = 0; at < one->count; at += PIECE_BYTES) {
            uint64_t count = one->count - at < PIECE_BYTES ? one->count - at : PIECE_BYTES;
            dice = mixed(dice);
            if (dice & 1 || one->offset + at + count > size) continue;
            memcpy(of->durable + one->offset + at, one->bytes + at, count);
        }
    }
    forget_pieces(of);
    resize(&of->bytes, &of->size, size);
    memcpy(of->bytes, of->durable, size);
}

void memfs_lose_power(memfs *self, uint64_t seed) {
    uint64_t changes = 0;
    for (change *one = self->changes; one; one = one->next) changes++;
    uint64_t kept = mixed(seed) % (changes + 1);
    memcpy(self->names, self->durable_names, sizeof self->names);
    for (change *one = self->changes; one && kept; one = one->next, kept--)
        memcpy(self->names, one->names, sizeof self->names);
    memcpy(self->durable_names, self->names, sizeof self->names);
    forget_changes(self);
    for (int i = 0; i < FILES_MAX; i++)
        if (self->files[i].is_used) lose(&self->files[i], mixed(seed + (uint64_t)i));
    restart(self);
}

void memfs_fail_writes(memfs *self, int error) {
    pthread_mutex_lock(&self->lock);
    self->write_error = error;
    pthread_mutex_unlock(&self->lock);
}

void memfs_fail_reads(memfs *self, int error) {
    pthread_mutex_lock(&self->lock);
    self->read_error = error;
    pthread_mutex_unlock(&self->lock);
}

void memfs_fail_allocations(memfs *self, int error) {
    pthread_mutex_lock(&self->lock);
    self->allocate_error = error;
    pthread_mutex_unlock(&self->lock);
}

void memfs_cut_transfers(memfs *self, uint64_t bytes) {
    self->cut_bytes = bytes;
}

void memfs_hang(memfs *self, int is_hanging) {
    pthread_mutex_lock(&self->lock);
    self->is_hanging = is_hanging;
    pthread_cond_broadcast(&self->goes_on);
    pthread_mutex_unlock(&self->lock);
}

void memfs_set_free_bytes(memfs *self, uint64_t bytes) {
    pthread_mutex_lock(&self->lock);
    self->free_bytes = bytes;
    pthread_mutex_unlock(&self->lock);
}

uint8_t *memfs_bytes(memfs *self, const char *path, uint64_t *size) {
    const entry *found = find(self, path);
    if (!found) return NULL;
    *size = self->files[found->number].size;
    return self->files[found->number].bytes;
}

void memfs_truncate(memfs *self, const char *path, uint64_t size) {
    const entry *found = find(self, path);
    if (!found) abort();
    file *of = &self->files[found->number];
    forget_pieces(of);
    resize(&of->bytes, &of->size, size);
}

void memfs_swap(memfs *self, const char *left, const char *right) {
    entry *one = find(self, left), *other = find(self, right);
    if (!one || !other) abort();
    int number = one->number;
    one->number = other->number;
    other->number = number;
}

void memfs_unlink_all(memfs *self) {
    pthread_mutex_lock(&self->lock);
    for (int i = 0; i < NAMES_MAX; i++) self->names[i].number = -1;
    forget_changes(self);
    memcpy(self->durable_names, self->names, sizeof self->names);
    pthread_mutex_unlock(&self->lock);
}

memfs *memfs_copy(const memfs *self) {
    memfs *copy = memfs_make();
    memcpy(copy->names, self->names, sizeof copy->names);
    memcpy(copy->durable_names, self->names, sizeof copy->names);
    for (int i = 0; i < FILES_MAX; i++) {
        const file *from = &self->files[i];
        file *to = &copy->files[i];
        to->is_used = from->is_used;
        if (!from->is_used) continue;
        resize(&to->bytes, &to->size, from->size);
        if (from->size) memcpy(to->bytes, from->bytes, from->size);
        resize(&to->durable, &to->durable_size, from->size);
        if (from->size) memcpy(to->durable, from->bytes, from->size);
    }
    return copy;
}
