/* The load table.
 *
 * Each router process owns one lane and is the only one that writes it; everybody reads all lanes.
 * Nobody locks and nobody waits: a pick must not depend on another process being scheduled.
 *
 * A lane is a small hash table from place (a 64-bit name) to a row. A row is guarded by a sequence
 * number, odd while it is written: a reader that meets an odd or changed one tries a few times and
 * then leaves the row out, which understates a load by one process's share for one pick. Rows are
 * found by linear probing within a fixed distance. A row whose load is zero keeps its name until
 * another place needs it, so that a place seen again is found again; since a probe passes over it,
 * nothing behind it is lost.
 *
 * A process that is stopped or killed leaves its rows behind. So each lane has a beat, and counts
 * only for a while after the last one; the owner of the table empties it when the process's
 * connection ends.
 *
 * All words are atomic. Data words are relaxed between the two sequence updates, which carry the
 * ordering (a sequence lock with fences, as in Boehm, "Can seqlocks get along with programming
 * language memory models?", 2012).
 */
#include "loadtable.h"

#include <stdatomic.h>
#include <string.h>

#define MAGIC 0x3144414F4C464E49ull /* "INFLOAD1" */

enum { READ_TRIES_MAX = 16 };

typedef struct {
    _Atomic uint64_t sequence;
    _Atomic uint64_t place; /* 0: never used */
    _Atomic uint64_t queued_tokens;
    _Atomic uint64_t drainable_tokens;
    _Atomic uint64_t requests;
    _Atomic uint64_t context_tokens;
    _Atomic uint64_t as_of_s;
    uint64_t unused;
} row;

/* What every pick reads of every lane lies together. */
typedef struct {
    _Atomic uint64_t magic;
    uint64_t unused[7];
    _Atomic uint64_t is_taken[LOADTABLE_LANES_MAX];
    _Atomic uint64_t beat_s[LOADTABLE_LANES_MAX]; /* seconds, as the bits of a double */
    row rows[LOADTABLE_LANES_MAX][LOADTABLE_ROWS_MAX];
} table_memory;

_Static_assert(sizeof(row) == 64, "a row is a cache line");
_Static_assert((LOADTABLE_ROWS_MAX & (LOADTABLE_ROWS_MAX - 1)) == 0, "rows are masked");

static uint64_t bits_of(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static double value_of(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint64_t get(const _Atomic uint64_t *word) {
    return atomic_load_explicit(word, memory_order_relaxed);
}

static void set(_Atomic uint64_t *word, uint64_t value) {
    atomic_store_explicit(word, value, memory_order_relaxed);
}

static double at_least_zero(double value) {
    return value > 0.0 ? value : 0.0;
}

static uint64_t row_number(uint64_t place, uint64_t probe) {
    return (((place * 0x9E3779B97F4A7C15ull) >> 32) + probe) & (LOADTABLE_ROWS_MAX - 1);
}

static int is_lane(int lane) {
    return lane >= 0 && lane < LOADTABLE_LANES_MAX;
}

uint64_t loadtable_bytes(void) {
    return sizeof(table_memory);
}

int loadtable_create(void *memory, uint64_t bytes) {
    if (bytes < sizeof(table_memory)) return LOADTABLE_BAD_MEMORY;
    atomic_store(&((table_memory *)memory)->magic, MAGIC);
    return LOADTABLE_OK;
}

int loadtable_check(const void *memory, uint64_t bytes) {
    if (bytes < sizeof(table_memory)) return LOADTABLE_BAD_MEMORY;
    return atomic_load(&((const table_memory *)memory)->magic) == MAGIC ? LOADTABLE_OK
                                                                        : LOADTABLE_BAD_MEMORY;
}

int loadtable_claim(void *memory) {
    table_memory *table = memory;
    for (int lane = 0; lane < LOADTABLE_LANES_MAX; lane++) {
        if (atomic_load(&table->is_taken[lane])) continue;
        atomic_store(&table->is_taken[lane], 1);
        return lane;
    }
    return -1;
}

static void write_row(row *target, uint64_t place, const loadtable_load *load,
                      double drainable_tokens, double now_s) {
    uint64_t sequence = get(&target->sequence);
    set(&target->sequence, sequence + 1);
    atomic_thread_fence(memory_order_release);
    set(&target->place, place);
    set(&target->queued_tokens, bits_of(load->queued_tokens));
    set(&target->drainable_tokens, bits_of(drainable_tokens));
    set(&target->requests, bits_of(load->requests));
    set(&target->context_tokens, bits_of(load->context_tokens));
    set(&target->as_of_s, bits_of(now_s));
    atomic_store_explicit(&target->sequence, sequence + 2, memory_order_release);
}

void loadtable_release(void *memory, int lane) {
    table_memory *table = memory;
    if (!is_lane(lane)) return;
    const loadtable_load nothing = {0};
    for (int i = 0; i < LOADTABLE_ROWS_MAX; i++) {
        row *target = &table->rows[lane][i];
        uint64_t sequence = get(&target->sequence);
        if (!sequence) continue;
        if (sequence & 1) set(&target->sequence, sequence + 1); /* its writer died within it */
        write_row(target, 0, &nothing, 0, 0);
    }
    atomic_store(&table->is_taken[lane], 0);
}

static int is_idle(const row *target) {
    return value_of(get(&target->requests)) == 0.0 && value_of(get(&target->queued_tokens)) == 0.0;
}

/* The place's row, else one that may become it, else NULL. */
static row *row_for(row *rows, uint64_t place) {
    row *usable = NULL;
    for (uint64_t probe = 0; probe < LOADTABLE_PROBES_MAX; probe++) {
        row *seen = &rows[row_number(place, probe)];
        uint64_t name = get(&seen->place);
        if (name == place) return seen;
        if (!usable && (!name || is_idle(seen))) usable = seen;
        if (!name) break;
    }
    return usable;
}

int loadtable_put(void *memory, int lane, uint64_t place, const loadtable_load *load,
                  double drainable_tokens, double now_s) {
    table_memory *table = memory;
    if (!is_lane(lane) || !place) return LOADTABLE_BAD_LANE;
    row *target = row_for(table->rows[lane], place);
    if (!target) return LOADTABLE_FULL;
    write_row(target, place, load, drainable_tokens, now_s);
    return LOADTABLE_OK;
}

int loadtable_beat(void *memory, int lane, double now_s) {
    table_memory *table = memory;
    if (!is_lane(lane)) return LOADTABLE_BAD_LANE;
    set(&table->beat_s[lane], bits_of(now_s));
    return LOADTABLE_OK;
}

static int is_live(const table_memory *table, int lane, double now_s, double life_s) {
    if (!atomic_load_explicit(&table->is_taken[lane], memory_order_acquire)) return 0;
    return now_s - value_of(get(&table->beat_s[lane])) <= life_s;
}

/* Reads what a place's row says of `now_s`; 0 when it is another place's by now, or never at rest.
 */
static int read_row(const row *source, uint64_t place, double s_per_token, double now_s,
                    loadtable_load *load) {
    for (int tries = 0; tries < READ_TRIES_MAX; tries++) {
        uint64_t before = atomic_load_explicit(&source->sequence, memory_order_acquire);
        if (before & 1) continue;
        uint64_t name = get(&source->place);
        double drainable = value_of(get(&source->drainable_tokens));
        double age_s = now_s - value_of(get(&source->as_of_s));
        load->queued_tokens = value_of(get(&source->queued_tokens));
        load->requests = value_of(get(&source->requests));
        load->context_tokens = value_of(get(&source->context_tokens));
        atomic_thread_fence(memory_order_acquire);
        if (get(&source->sequence) != before) continue;
        double drained = s_per_token > 0 ? at_least_zero(age_s) / s_per_token : 0.0;
        if (drained > drainable) drained = drainable;
        load->queued_tokens = at_least_zero(load->queued_tokens - drained);
        return name == place;
    }
    return 0;
}

static void add_row(const row *rows, uint64_t place, double s_per_token, double now_s,
                    loadtable_load *sum) {
    for (uint64_t probe = 0; probe < LOADTABLE_PROBES_MAX; probe++) {
        const row *seen = &rows[row_number(place, probe)];
        uint64_t name = get(&seen->place);
        if (!name && !get(&seen->sequence)) return; /* never used: nothing lies behind it */
        if (name != place) continue;
        loadtable_load load;
        if (!read_row(seen, place, s_per_token, now_s, &load)) return;
        sum->queued_tokens += load.queued_tokens;
        sum->requests += load.requests;
        sum->context_tokens += load.context_tokens;
        return;
    }
}

void loadtable_sum(const void *memory, int own_lane, const uint64_t *places,
                   const double *s_per_token, uint64_t n, double now_s, double life_s,
                   loadtable_load *loads) {
    const table_memory *table = memory;
    memset(loads, 0, n * sizeof *loads);
    for (int lane = 0; lane < LOADTABLE_LANES_MAX; lane++) {
        if (lane == own_lane || !is_live(table, lane, now_s, life_s)) continue;
        for (uint64_t i = 0; i < n; i++)
            add_row(table->rows[lane], places[i], s_per_token[i], now_s, &loads[i]);
    }
}

int loadtable_live(const void *memory, double now_s, double life_s) {
    int count = 0;
    for (int lane = 0; lane < LOADTABLE_LANES_MAX; lane++)
        count += is_live(memory, lane, now_s, life_s);
    return count;
}
