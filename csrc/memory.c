/* Prefaulting and locking. MADV_POPULATE_WRITE (Linux 5.14) does not change contents; where the
 * kernel lacks it, an atomic add of zero to each page has the same effect on a live mapping. */
#include "memory.h"

#include <errno.h>
#include <stdatomic.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_READ  22
#define MADV_POPULATE_WRITE 23
#endif
#define PAGE_BYTES 4096

int memory_prefault(void *start, uint64_t bytes) {
    if (madvise(start, bytes, MADV_POPULATE_WRITE) == 0) return 0;
    if (errno != EINVAL) return errno;
    for (uint64_t offset = 0; offset < bytes; offset += PAGE_BYTES)
        atomic_fetch_add_explicit((_Atomic uint8_t *)start + offset, 0, memory_order_relaxed);
    return 0;
}

int memory_populate(void *start, uint64_t bytes, int is_writable) {
    int advice = is_writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
    return madvise(start, bytes, advice) == 0 ? 0 : errno;
}

int memory_lock(void *start, uint64_t bytes) {
    return mlock(start, bytes) == 0 ? 0 : errno;
}
