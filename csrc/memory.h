/* Bringing an arena's pages into memory before anybody needs them. */
#ifndef INFERA_MEMORY_H
#define INFERA_MEMORY_H

#include <stdint.h>

/* cffi: begin */
/* Makes every page of a writable shared mapping present; returns 0 or an errno value. First touch
 * of fresh memory can be fifty times slower than copying, so it must not happen in an engine. */
int memory_prefault(void *start, uint64_t bytes);
/* Keeps a mapping from being swapped out; returns 0 or an errno value (EPERM, ENOMEM: the limit on
 * locked memory is too low). */
int memory_lock(void *start, uint64_t bytes);
/* cffi: end */

#endif
