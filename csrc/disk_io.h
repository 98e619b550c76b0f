/* Every system call the disk tier makes, as a table, so that tests put another world under it. */
#ifndef INFERA_DISK_IO_H
#define INFERA_DISK_IO_H

#include <stdint.h>
#include <sys/uio.h>

/* Results are 0 or more, or an errno as a negative number. Paths are absolute. Any of these may be
 * called from several threads at once, and may take for ever. */
typedef struct disk_io {
    void *self;
    int (*open)(void *self, const char *path, int flags); /* flags as of open(2); mode 0600 */
    void (*close)(void *self, int descriptor);
    int64_t (*read)(void *self, int descriptor, const struct iovec *parts, int count,
                    uint64_t offset);
    int64_t (*write)(void *self, int descriptor, const struct iovec *parts, int count,
                     uint64_t offset);
    int (*sync)(void *self, int descriptor); /* data and length are on the device */
    int (*sync_folder)(void *self, const char *path);
    int (*allocate)(void *self, int descriptor, uint64_t bytes); /* blocks for the whole file */
    int64_t (*size)(void *self, int descriptor);
    int (*lock)(void *self, int descriptor); /* -EWOULDBLOCK: another process has it */
    int (*make_folder)(void *self, const char *path);
    int (*list)(void *self, const char *path, void (*visit)(void *context, const char *name),
                void *context);
    int (*rename)(void *self, const char *from, const char *to);
    int (*remove)(void *self, const char *path);
    int (*free_bytes)(void *self, const char *path, uint64_t *bytes);
    /* 1 when the path still names the file that is open, 0 when it is gone or another. */
    int (*is_same)(void *self, const char *path, int descriptor);
    int has_descriptors; /* descriptors are the kernel's, so a ring may use them */
} disk_io;

/* The machine's own. */
const disk_io *disk_io_system(void);

/* Reads or writes all of one buffer: 0, or an errno as a negative number (-ENODATA: the file ends
 * before). */
int disk_io_read_all(const disk_io *io, int descriptor, void *bytes, uint64_t count,
                     uint64_t offset);
int disk_io_write_all(const disk_io *io, int descriptor, const void *bytes, uint64_t count,
                      uint64_t offset);
/* Goes on from where a transfer of `count` parts stopped after `moved` bytes. */
void disk_io_advance(struct iovec *parts, int count, uint64_t moved);

#endif
