/* What the router processes of one host have under way at each place, in memory they all map. */
#ifndef INFERA_LOADTABLE_H
#define INFERA_LOADTABLE_H

#include <stddef.h>
#include <stdint.h>

/* cffi: begin */
enum {
    LOADTABLE_LANES_MAX = 64,
    LOADTABLE_ROWS_MAX = 4096, /* of one lane; a power of two */
    LOADTABLE_PROBES_MAX = 64,
};

enum loadtable_status {
    LOADTABLE_OK = 0,
    LOADTABLE_FULL = 1,
    LOADTABLE_BAD_MEMORY = 2, /* too short, or not a load table of this version */
    LOADTABLE_BAD_LANE = 3,
};

/* Of one place: prompt tokens still to be computed, requests, and tokens in their contexts. */
typedef struct {
    double queued_tokens;
    double requests;
    double context_tokens;
} loadtable_load;

uint64_t loadtable_bytes(void);
/* Formats zeroed memory of loadtable_bytes(), aligned to 64 bytes. */
int loadtable_create(void *memory, uint64_t bytes);
int loadtable_check(const void *memory, uint64_t bytes);

/* Takes a lane for one writer and returns its number, or -1 when all are taken. Only the process
 * that made the table claims and releases. */
int loadtable_claim(void *memory);
/* Empties a lane whose writer is gone. */
void loadtable_release(void *memory, int lane);

/* The writer says what it has at a place, as of `now_s`; all zeros when nothing. Of the queued
 * tokens only `drainable_tokens` may be taken to be worked off by the mere passing of time: the
 * writer knows that what comes after has not begun. Only from the one thread that owns the lane.
 * LOADTABLE_FULL: the place is not shared, for want of room. */
int loadtable_put(void *memory, int lane, uint64_t place, const loadtable_load *load,
                  double drainable_tokens, double now_s);
/* The writer is alive. What a lane says counts for a limited time after its last beat. */
int loadtable_beat(void *memory, int lane, double now_s);

/* Adds up what all lanes but `own_lane` (-1: all) have at each place. Queued tokens are taken to be
 * worked off at `s_per_token[i]` since they were put. Lanes whose last beat is older than `life_s`
 * do not count. */
void loadtable_sum(const void *memory, int own_lane, const uint64_t *places,
                   const double *s_per_token, uint64_t n, double now_s, double life_s,
                   loadtable_load *loads);
/* Lanes that count. */
int loadtable_live(const void *memory, double now_s, double life_s);
/* cffi: end */

#endif
