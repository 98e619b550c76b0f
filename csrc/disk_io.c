/* The system's calls, with errno as their result. */
#include "disk_io.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static int result_of(int returned) {
    return returned < 0 ? -errno : returned;
}

static int system_open(void *self, const char *path, int flags) {
    (void)self;
    return result_of(open(path, flags | O_CLOEXEC | O_NOFOLLOW, 0600));
}

static void system_close(void *self, int descriptor) {
    (void)self;
    close(descriptor);
}

static int64_t system_read(void *self, int descriptor, const struct iovec *parts, int count,
                           uint64_t offset) {
    (void)self;
    ssize_t moved = preadv(descriptor, parts, count, (off_t)offset);
    return moved < 0 ? -errno : moved;
}

static int64_t system_write(void *self, int descriptor, const struct iovec *parts, int count,
                            uint64_t offset) {
    (void)self;
    ssize_t moved = pwritev(descriptor, parts, count, (off_t)offset);
    return moved < 0 ? -errno : moved;
}

static int system_sync(void *self, int descriptor) {
    (void)self;
    return result_of(fdatasync(descriptor));
}

static int system_sync_folder(void *self, const char *path) {
    (void)self;
    int descriptor = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) return -errno;
    int result = result_of(fsync(descriptor));
    close(descriptor);
    return result;
}

static int system_allocate(void *self, int descriptor, uint64_t bytes) {
    (void)self;
    return -posix_fallocate(descriptor, 0, (off_t)bytes);
}

static int64_t system_size(void *self, int descriptor) {
    (void)self;
    struct stat facts;
    return fstat(descriptor, &facts) < 0 ? -errno : facts.st_size;
}

static int system_lock(void *self, int descriptor) {
    (void)self;
    return result_of(flock(descriptor, LOCK_EX | LOCK_NB));
}

static int system_make_folder(void *self, const char *path) {
    (void)self;
    int result = result_of(mkdir(path, 0700));
    return result == -EEXIST ? 0 : result;
}

static int system_list(void *self, const char *path, void (*visit)(void *context, const char *name),
                       void *context) {
    (void)self;
    DIR *folder = opendir(path);
    if (!folder) return -errno;
    struct dirent *entry;
    errno = 0;
    while ((entry = readdir(folder))) {
        visit(context, entry->d_name);
        errno = 0;
    }
    int result = -errno;
    closedir(folder);
    return result;
}

static int system_rename(void *self, const char *from, const char *to) {
    (void)self;
    return result_of(rename(from, to));
}

static int system_remove(void *self, const char *path) {
    (void)self;
    return result_of(unlink(path));
}

static int system_free_bytes(void *self, const char *path, uint64_t *bytes) {
    (void)self;
    struct statvfs facts;
    if (statvfs(path, &facts) < 0) return -errno;
    *bytes = (uint64_t)facts.f_bavail * facts.f_frsize;
    return 0;
}

static int system_is_same(void *self, const char *path, int descriptor) {
    (void)self;
    struct stat named, opened;
    if (fstat(descriptor, &opened) < 0) return -errno;
    if (stat(path, &named) < 0) return errno == ENOENT || errno == ENOTDIR ? 0 : -errno;
    return named.st_dev == opened.st_dev && named.st_ino == opened.st_ino;
}

static const disk_io the_system = {
    .open = system_open,
    .close = system_close,
    .read = system_read,
    .write = system_write,
    .sync = system_sync,
    .sync_folder = system_sync_folder,
    .allocate = system_allocate,
    .size = system_size,
    .lock = system_lock,
    .make_folder = system_make_folder,
    .list = system_list,
    .rename = system_rename,
    .remove = system_remove,
    .free_bytes = system_free_bytes,
    .is_same = system_is_same,
    .has_descriptors = 1,
};

const disk_io *disk_io_system(void) {
    return &the_system;
}

void disk_io_advance(struct iovec *parts, int count, uint64_t moved) {
    for (int i = 0; i < count && moved; i++) {
        uint64_t step = moved < parts[i].iov_len ? moved : parts[i].iov_len;
        parts[i].iov_base = (uint8_t *)parts[i].iov_base + step;
        parts[i].iov_len -= step;
        moved -= step;
    }
}

int disk_io_read_all(const disk_io *io, int descriptor, void *bytes, uint64_t count,
                     uint64_t offset) {
    while (count) {
        struct iovec part = {bytes, count};
        int64_t moved = io->read(io->self, descriptor, &part, 1, offset);
        if (moved == -EINTR) continue;
        if (moved <= 0) return moved ? (int)moved : -ENODATA;
        bytes = (uint8_t *)bytes + moved;
        offset += (uint64_t)moved;
        count -= (uint64_t)moved;
    }
    return 0;
}

int disk_io_write_all(const disk_io *io, int descriptor, const void *bytes, uint64_t count,
                      uint64_t offset) {
    while (count) {
        struct iovec part = {(void *)(uintptr_t)bytes, count};
        int64_t moved = io->write(io->self, descriptor, &part, 1, offset);
        if (moved == -EINTR) continue;
        if (moved <= 0) return moved ? (int)moved : -ENOSPC;
        bytes = (const uint8_t *)bytes + moved;
        offset += (uint64_t)moved;
        count -= (uint64_t)moved;
    }
    return 0;
}
