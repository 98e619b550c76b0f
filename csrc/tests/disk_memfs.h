/* A file system in memory, for tests of the disk store: it loses power and fails on demand. */
#ifndef INFERA_DISK_MEMFS_H
#define INFERA_DISK_MEMFS_H

#include "../disk_io.h"

typedef struct memfs memfs;

memfs *memfs_make(void);
void memfs_free(memfs *self);
const disk_io *memfs_io(memfs *self);

/* Steps are writes, syncs, allocations, renames, removals. At the step with this number (from 1)
 * the machine stops: that step and all calls after it fail, and a write may have got half its way.
 * 0: never. */
void memfs_stop_at(memfs *self, uint64_t step, int is_half_done);
uint64_t memfs_steps(const memfs *self);
int memfs_has_stopped(const memfs *self);

/* The process is gone and another may begin; every completed call stays. */
void memfs_kill(memfs *self);
/* Power is gone: of what was not synced, each 4 KiB piece stays or is lost by itself, and of the
 * names not synced only the first few, as the seed says. */
void memfs_lose_power(memfs *self, uint64_t seed);

/* From now on: errno for every write (and allocation), for every read; 0: none. */
void memfs_fail_writes(memfs *self, int error);
void memfs_fail_reads(memfs *self, int error);
void memfs_fail_allocations(memfs *self, int error);
/* Transfers move at most this many bytes a call; 0: all. */
void memfs_cut_transfers(memfs *self, uint64_t bytes);
/* Transfers block until this is called with 0. */
void memfs_hang(memfs *self, int is_hanging);
void memfs_set_free_bytes(memfs *self, uint64_t bytes);

/* Direct looks and edits: the current bytes of a file, NULL when there is none. */
uint8_t *memfs_bytes(memfs *self, const char *path, uint64_t *size);
void memfs_truncate(memfs *self, const char *path, uint64_t size);
void memfs_swap(memfs *self, const char *left, const char *right);
/* Everything loses its name, as when somebody removes the folder. */
void memfs_unlink_all(memfs *self);
/* A copy of all that is there, nothing pending. */
memfs *memfs_copy(const memfs *self);

#endif
