/* Allocator of the data file: extents of exact sizes, counted in 4 KiB units. */
#ifndef INFERA_EXTENTS_H
#define INFERA_EXTENTS_H

#include <stdint.h>

#define EXTENTS_SIZES_MAX 64
#define EXTENTS_NONE      UINT32_MAX

typedef struct extents extents;

/* Manages `total_units` units. NULL when memory is short. */
extents *extents_create(uint32_t total_units);
void extents_destroy(extents *pool);

/* Whether an empty pool has room for one extent of `units`. */
int extents_fits(const extents *pool, uint32_t units);

/* Index of the size class for extents of `units`, or EXTENTS_NONE when 64 sizes exist already or
 * one extent would not fit the pool. */
uint32_t extents_size_class(extents *pool, uint32_t units);

/* Start unit of a fresh extent owned by `owner` (any number but EXTENTS_NONE), or EXTENTS_NONE
 * when there is no room without eviction. */
uint32_t extents_take(extents *pool, uint32_t size_class, uint32_t owner);
void extents_give(extents *pool, uint32_t start_unit);
void extents_set_owner(extents *pool, uint32_t start_unit, uint32_t owner);

/* Owners of the extents that share the run holding `start_unit`, at most `max` of them; emptying
 * a run returns its space to all sizes. */
uint32_t extents_run_owners(const extents *pool, uint32_t start_unit, uint32_t *owners,
                            uint32_t max);
uint32_t extents_run_capacity(const extents *pool, uint32_t start_unit);

uint32_t extents_used_units(const extents *pool);

#endif
