/* Bringing an arena's pages into memory before anybody needs them. */
#ifndef INFERA_MEMORY_H
#define INFERA_MEMORY_H

#include <stdint.h>

/* cffi: begin */
/* Makes every page of a writable shared mapping present; returns 0 or an errno value. First touch
 * of fresh memory can be fifty times slower than copying, so it must not happen in an engine. */
int memory_prefault(void *start, uint64_t bytes);
/* Makes the pages of a mapping of a file whose pages exist already known to this process, for
 * reading or (is_writable) for writing; returns 0 or an errno value (EINVAL before Linux 5.14). */
int memory_populate(void *start, uint64_t bytes, int is_writable);
/* Keeps a mapping from being swapped out; returns 0 or an errno value (EPERM, ENOMEM: the limit on
 * locked memory is too low). */
int memory_lock(void *start, uint64_t bytes);
/* cffi: end */

#endif
