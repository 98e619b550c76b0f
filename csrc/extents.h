/* Allocator of the data file: extents of exact sizes, counted in 4 KiB units. */
#ifndef INFERA_EXTENTS_H
#define INFERA_EXTENTS_H

#include <stdint.h>

#include "arena.h"

#define EXTENTS_SIZES_MAX 64
#define EXTENTS_NONE      UINT32_MAX

typedef struct extents extents;

/* Manages the data file of `header`. `slabs` is the slab table in the index, kept current here, so
 * that another daemon can adopt the file; all entries are free. NULL when memory is short. */
extents *extents_create(const arena_header *header, arena_slab *slabs);
void extents_destroy(extents *pool);

/* Whether an empty pool has room for one extent of `units`. */
int extents_fits(const extents *pool, uint32_t units);

/* Index of the size class for extents of `units`, or EXTENTS_NONE when 64 sizes exist already or
 * one extent would not fit the pool. */
uint32_t extents_size_class(extents *pool, uint32_t units);

/* Start unit of a fresh extent owned by `owner` (any number but EXTENTS_NONE), or EXTENTS_NONE
 * when there is no room without eviction. */
uint32_t extents_take(extents *pool, uint32_t size_class, uint32_t owner);
uint32_t extents_units(const extents *pool, uint32_t size_class);
void extents_give(extents *pool, uint32_t start_unit);
void extents_set_owner(extents *pool, uint32_t start_unit, uint32_t owner);

/* Owners of the extents that share the run holding `start_unit`, at most `max` of them; emptying
 * a run returns its space to all sizes. */
uint32_t extents_run_owners(const extents *pool, uint32_t start_unit, uint32_t *owners,
                            uint32_t max);

uint32_t extents_used_units(const extents *pool);
/* Whether `count` extents of a size can be taken without eviction: surely so when 1; a run's worth
 * of free slabs counts as enough. */
int extents_has_room(const extents *pool, uint32_t size_class, uint32_t count);

/* ---- adoption: a fresh pool over a slab table that is in use already, in this order ---- */

/* Finds the runs of known sizes (extents_size_class) in the slab table; what makes no sense there
 * is cleared. Returns how many slabs that were. */
uint32_t extents_adopt_runs(extents *pool);
/* Gives `owner` the extent that lies exactly there; 0 when there is none, or it has an owner. */
int extents_claim(extents *pool, uint32_t start_unit, uint32_t units, uint32_t owner);
/* Fetches what a claim there will touch. Any number may be given. */
void extents_prefetch(const extents *pool, uint32_t start_unit);
/* Takes a claim back. */
void extents_unclaim(extents *pool, uint32_t start_unit);
/* Owner of the extent that starts there, or EXTENTS_NONE. Any number may be asked for. */
uint32_t extents_owner(const extents *pool, uint32_t start_unit);
/* Keeps free slabs from being used as long as this pool lives: somebody may be writing there. */
void extents_set_aside(extents *pool, uint32_t start_unit, uint32_t units);
/* Ends runs without owners and finds the room in the others. */
void extents_end_adoption(extents *pool);

#endif
