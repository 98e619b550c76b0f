/* Extents of exact sizes.
 *
 * The file is cut into slabs.  A *run* is a few adjacent slabs given to one size; the number of
 * slabs is the smallest that wastes at most 5%.  A run hands out equal extents, keeps the freed
 * ones in a list threaded through `next_free`, and goes back to the pool of slabs when its last
 * extent is freed.  Space moves between sizes only that way: by emptying runs through eviction,
 * never by moving bytes, because clients hold offsets.
 *
 * `owner` names, for the first unit of each extent in use, the record or reservation that has it,
 * which is what lets a run be emptied.  The slab table in the index says what each run is cut into,
 * so that a daemon that adopts the file finds the same runs.  All memory is taken at creation.
 */
#include "extents.h"

#include <stdlib.h>
#include <string.h>

#define RUN_SLABS_MAX 64
#define WASTE_DIVISOR 20 /* one twentieth: 5% */

typedef struct {
    uint32_t first_slab;
    uint32_t slabs; /* 0: this entry is unused */
    uint32_t size_class;
    uint32_t capacity;
    uint32_t used;
    uint32_t untouched;      /* extents never handed out yet start here */
    uint32_t free_head;      /* start unit of a freed extent */
    uint32_t previous, next; /* in the list of runs with room of its size */
} run;

typedef struct {
    uint32_t units;
    uint32_t slabs_per_run;
    uint32_t runs_with_room;
    uint32_t free_extents; /* in its runs */
} size_class;

struct extents {
    arena_slab *slabs; /* in the index, for whoever adopts the file */
    uint32_t slab_units, slab_count, free_slabs, scan_from, used_units;
    uint32_t size_count;
    size_class sizes[EXTENTS_SIZES_MAX];
    run *runs;             /* one per slab at most, indexed by first slab */
    uint32_t *run_of_slab; /* EXTENTS_NONE: free */
    uint32_t *next_free;   /* per unit */
    uint32_t *owner;       /* per unit */
};

extents *extents_create(const arena_header *header, arena_slab *slabs) {
    extents *pool = calloc(1, sizeof *pool);
    if (!pool || header->slab_count == 0) {
        free(pool);
        return NULL;
    }
    uint64_t total_units = header->data_bytes / ARENA_UNIT_BYTES;
    pool->slabs = slabs;
    pool->slab_units = header->slab_units;
    pool->slab_count = pool->free_slabs = header->slab_count;
    pool->runs = calloc(pool->slab_count, sizeof *pool->runs);
    pool->run_of_slab = malloc(pool->slab_count * sizeof(uint32_t));
    pool->next_free = malloc(total_units * sizeof(uint32_t));
    pool->owner = malloc(total_units * sizeof(uint32_t));
    if (!pool->runs || !pool->run_of_slab || !pool->next_free || !pool->owner) {
        extents_destroy(pool);
        return NULL;
    }
    memset(pool->run_of_slab, 0xFF, pool->slab_count * sizeof(uint32_t));
    memset(pool->owner, 0xFF, total_units * sizeof(uint32_t));
    return pool;
}

void extents_destroy(extents *pool) {
    if (!pool) return;
    free(pool->runs);
    free(pool->run_of_slab);
    free(pool->next_free);
    free(pool->owner);
    free(pool);
}

/* Fewest slabs whose run wastes at most 5%; the least wasteful where none does; 0: too large. */
static uint32_t slabs_for(const extents *pool, uint32_t units) {
    uint32_t best = 0, limit = pool->slab_count < RUN_SLABS_MAX ? pool->slab_count : RUN_SLABS_MAX;
    double best_waste = 1.0;
    uint64_t least = ((uint64_t)units + pool->slab_units - 1) / pool->slab_units;
    if (least > pool->slab_count) return 0;
    if (least > limit) return (uint32_t)least; /* one huge extent a run */
    for (uint32_t slabs = (uint32_t)least; slabs <= limit; slabs++) {
        uint32_t run_units = slabs * pool->slab_units;
        uint32_t waste = run_units % units;
        if (waste <= run_units / WASTE_DIVISOR) return slabs;
        if ((double)waste / run_units < best_waste) {
            best_waste = (double)waste / run_units;
            best = slabs;
        }
    }
    return best;
}

int extents_fits(const extents *pool, uint32_t units) {
    return units && slabs_for(pool, units) != 0;
}

uint32_t extents_size_class(extents *pool, uint32_t units) {
    for (uint32_t i = 0; i < pool->size_count; i++)
        if (pool->sizes[i].units == units) return i;
    uint32_t slabs = units ? slabs_for(pool, units) : 0;
    if (!slabs || pool->size_count == EXTENTS_SIZES_MAX) return EXTENTS_NONE;
    pool->sizes[pool->size_count] = (size_class){units, slabs, EXTENTS_NONE, 0};
    return pool->size_count++;
}

static void link_run(extents *pool, uint32_t index) {
    size_class *size = &pool->sizes[pool->runs[index].size_class];
    pool->runs[index].previous = EXTENTS_NONE;
    pool->runs[index].next = size->runs_with_room;
    if (size->runs_with_room != EXTENTS_NONE) pool->runs[size->runs_with_room].previous = index;
    size->runs_with_room = index;
}

static void unlink_run(extents *pool, uint32_t index) {
    run *gone = &pool->runs[index];
    if (gone->previous != EXTENTS_NONE)
        pool->runs[gone->previous].next = gone->next;
    else
        pool->sizes[gone->size_class].runs_with_room = gone->next;
    if (gone->next != EXTENTS_NONE) pool->runs[gone->next].previous = gone->previous;
}

/* First of `slabs` adjacent free slabs, looked for from where the last search ended. */
static uint32_t find_free_slabs(extents *pool, uint32_t slabs) {
    if (pool->free_slabs < slabs) return EXTENTS_NONE;
    uint32_t length = 0;
    for (uint32_t step = 0; step < pool->slab_count + slabs; step++) {
        uint32_t slab = (pool->scan_from + step) % pool->slab_count;
        if (slab == 0) length = 0; /* a run does not wrap around */
        length = pool->run_of_slab[slab] == EXTENTS_NONE ? length + 1 : 0;
        if (length == slabs) {
            pool->scan_from = (slab + 1) % pool->slab_count;
            return slab + 1 - slabs;
        }
    }
    return EXTENTS_NONE;
}

/* Makes an empty run of free slabs; the caller links it. */
static run *lay_run(extents *pool, uint32_t first, uint32_t size_index) {
    size_class *size = &pool->sizes[size_index];
    for (uint32_t i = 0; i < size->slabs_per_run; i++) {
        pool->run_of_slab[first + i] = first;
        pool->slabs[first + i] = (arena_slab){first, size->units};
    }
    pool->free_slabs -= size->slabs_per_run;
    run *fresh = &pool->runs[first];
    *fresh = (run){.first_slab = first, .slabs = size->slabs_per_run, .size_class = size_index};
    fresh->capacity = size->slabs_per_run * pool->slab_units / size->units;
    fresh->free_head = EXTENTS_NONE;
    size->free_extents += fresh->capacity;
    return fresh;
}

static uint32_t start_run(extents *pool, uint32_t size_index) {
    uint32_t first = find_free_slabs(pool, pool->sizes[size_index].slabs_per_run);
    if (first == EXTENTS_NONE) return EXTENTS_NONE;
    lay_run(pool, first, size_index);
    link_run(pool, first);
    return first;
}

uint32_t extents_take(extents *pool, uint32_t size_index, uint32_t owner) {
    size_class *size = &pool->sizes[size_index];
    uint32_t index = size->runs_with_room;
    if (index == EXTENTS_NONE) index = start_run(pool, size_index);
    if (index == EXTENTS_NONE) return EXTENTS_NONE;
    run *source = &pool->runs[index];
    uint32_t start = source->free_head;
    if (start != EXTENTS_NONE)
        source->free_head = pool->next_free[start];
    else
        start = source->first_slab * pool->slab_units + source->untouched++ * size->units;
    if (++source->used == source->capacity) unlink_run(pool, index);
    size->free_extents--;
    pool->owner[start] = owner;
    pool->used_units += size->units;
    return start;
}

static run *run_at(const extents *pool, uint32_t start_unit) {
    return &pool->runs[pool->run_of_slab[start_unit / pool->slab_units]];
}

/* Makes the slabs of a run that is in no list free. */
static void release_slabs(extents *pool, run *empty) {
    uint32_t index = empty->first_slab;
    for (uint32_t i = 0; i < empty->slabs; i++) {
        pool->run_of_slab[index + i] = EXTENTS_NONE;
        pool->slabs[index + i] = (arena_slab){0, 0};
    }
    pool->free_slabs += empty->slabs;
    pool->sizes[empty->size_class].free_extents -= empty->capacity;
    empty->slabs = 0;
}

static void end_run(extents *pool, run *empty) {
    unlink_run(pool, empty->first_slab);
    release_slabs(pool, empty);
}

void extents_give(extents *pool, uint32_t start_unit) {
    run *home = run_at(pool, start_unit);
    pool->owner[start_unit] = EXTENTS_NONE;
    pool->used_units -= pool->sizes[home->size_class].units;
    pool->sizes[home->size_class].free_extents++;
    pool->next_free[start_unit] = home->free_head;
    home->free_head = start_unit;
    if (home->used-- == home->capacity) link_run(pool, home->first_slab);
    if (home->used == 0) end_run(pool, home);
}

void extents_set_owner(extents *pool, uint32_t start_unit, uint32_t owner) {
    pool->owner[start_unit] = owner;
}

uint32_t extents_units(const extents *pool, uint32_t size_class) {
    return pool->sizes[size_class].units;
}

uint32_t extents_run_owners(const extents *pool, uint32_t start_unit, uint32_t *owners,
                            uint32_t max) {
    const run *home = run_at(pool, start_unit);
    uint32_t units = pool->sizes[home->size_class].units;
    uint32_t unit = home->first_slab * pool->slab_units, found = 0;
    for (uint32_t i = 0; i < home->untouched && found < max; i++, unit += units)
        if (pool->owner[unit] != EXTENTS_NONE) owners[found++] = pool->owner[unit];
    return found;
}

uint32_t extents_used_units(const extents *pool) {
    return pool->used_units;
}

int extents_has_room(const extents *pool, uint32_t size_index, uint32_t count) {
    const size_class *size = &pool->sizes[size_index];
    return size->free_extents >= count || pool->free_slabs >= size->slabs_per_run;
}

/* ---- adoption ---- */

static uint32_t known_size(const extents *pool, uint32_t units) {
    for (uint32_t i = 0; i < pool->size_count; i++)
        if (pool->sizes[i].units == units) return i;
    return EXTENTS_NONE;
}

static int is_whole_run(const extents *pool, uint32_t first, uint32_t size_index) {
    const size_class *size = &pool->sizes[size_index];
    if (size->slabs_per_run > pool->slab_count - first) return 0;
    for (uint32_t i = 0; i < size->slabs_per_run; i++) {
        const arena_slab *slab = &pool->slabs[first + i];
        if (slab->first_slab != first || slab->units != size->units) return 0;
    }
    return 1;
}

uint32_t extents_adopt_runs(extents *pool) {
    uint32_t cleared = 0;
    for (uint32_t first = 0; first < pool->slab_count;) {
        arena_slab slab = pool->slabs[first];
        uint32_t size = slab.units ? known_size(pool, slab.units) : EXTENTS_NONE;
        if (size != EXTENTS_NONE && is_whole_run(pool, first, size)) {
            first += lay_run(pool, first, size)->slabs;
            continue;
        }
        cleared += slab.units || slab.first_slab;
        pool->slabs[first++] = (arena_slab){0, 0};
    }
    return cleared;
}

/* The run in which an extent of `units` starts at this unit, or null. */
static run *run_with_extent(const extents *pool, uint32_t start_unit, uint32_t units) {
    uint32_t slab = start_unit / pool->slab_units;
    if (slab >= pool->slab_count || pool->run_of_slab[slab] == EXTENTS_NONE) return NULL;
    run *home = &pool->runs[pool->run_of_slab[slab]];
    if (!home->slabs || pool->sizes[home->size_class].units != units) return NULL;
    uint32_t distance = start_unit - home->first_slab * pool->slab_units;
    return distance % units == 0 && distance / units < home->capacity ? home : NULL;
}

int extents_claim(extents *pool, uint32_t start_unit, uint32_t units, uint32_t owner) {
    run *home = units ? run_with_extent(pool, start_unit, units) : NULL;
    if (!home || pool->owner[start_unit] != EXTENTS_NONE) return 0;
    pool->owner[start_unit] = owner;
    pool->used_units += units;
    pool->sizes[home->size_class].free_extents--;
    home->used++;
    return 1;
}

void extents_prefetch(const extents *pool, uint32_t start_unit) {
    if (start_unit / pool->slab_units < pool->slab_count)
        __builtin_prefetch(&pool->owner[start_unit], 1);
}

void extents_unclaim(extents *pool, uint32_t start_unit) {
    run *home = run_at(pool, start_unit);
    pool->owner[start_unit] = EXTENTS_NONE;
    pool->used_units -= pool->sizes[home->size_class].units;
    pool->sizes[home->size_class].free_extents++;
    home->used--;
}

uint32_t extents_owner(const extents *pool, uint32_t start_unit) {
    uint32_t slab = start_unit / pool->slab_units;
    return slab < pool->slab_count ? pool->owner[start_unit] : EXTENTS_NONE;
}

void extents_set_aside(extents *pool, uint32_t start_unit, uint32_t units) {
    uint64_t end = ((uint64_t)start_unit + units + pool->slab_units - 1) / pool->slab_units;
    if (end > pool->slab_count) end = pool->slab_count;
    for (uint32_t slab = start_unit / pool->slab_units; slab < end; slab++) {
        if (pool->run_of_slab[slab] != EXTENTS_NONE) continue;
        pool->run_of_slab[slab] = slab; /* of a run without slabs, so nothing is found in it */
        pool->free_slabs--;
    }
}

/* Threads the free extents of an adopted run; those behind the last one in use stay untouched. */
static void find_room(extents *pool, run *home) {
    uint32_t units = pool->sizes[home->size_class].units;
    uint32_t base = home->first_slab * pool->slab_units;
    home->untouched = home->capacity;
    for (uint32_t i = home->capacity; i-- > 0;) {
        uint32_t unit = base + i * units;
        if (pool->owner[unit] != EXTENTS_NONE) continue;
        if (i + 1 == home->untouched) {
            home->untouched = i;
            continue;
        }
        pool->next_free[unit] = home->free_head;
        home->free_head = unit;
    }
}

void extents_end_adoption(extents *pool) {
    for (uint32_t first = 0; first < pool->slab_count; first++) {
        run *home = &pool->runs[first];
        if (!home->slabs) continue;
        if (home->used == 0) {
            release_slabs(pool, home);
            continue;
        }
        find_room(pool, home);
        if (home->used < home->capacity) link_run(pool, first);
    }
}
