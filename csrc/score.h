/* Predicted cost of sending one request to each of several places. */
#ifndef INFERA_SCORE_H
#define INFERA_SCORE_H

#include <stddef.h>

/* The learned factor of one worker stays within these, whatever was measured. */
#define SCORE_FACTOR_MIN 0.5
#define SCORE_FACTOR_MAX 2.0
/* A place is never taken for busier than this, else nothing would ever be sent there again. */
#define SCORE_BUSY_MAX 0.8

/* cffi: begin */
/* One place. Tokens are counts, *_s_per_token seconds. What is negative or no number counts as 0.
 */
typedef struct {
    double prompt_tokens;
    double hbm_tokens; /* of the prompt, usable there as they lie */
    double ram_tokens; /* of the prompt, usable after a load from each of these */
    double disk_tokens;
    double peer_tokens;
    double queued_prefill_tokens; /* this router's own, sent and not yet computed */
    double other_prefill_tokens;  /* of everybody else, as far as they or the engine tell */
    double active_requests;       /* decoding, or about to */
    double context_tokens;        /* of the requests under way that routers tell of */
    double busy_share;            /* of time, lately, spent on prompts; 0 to about 1 */
    double kv_used_tokens;
    double kv_capacity_tokens;  /* 0: unknown */
    double prefill_s_per_token; /* the prior of its model, engine and hardware */
    double factor;              /* learned, of this worker; clamped to 0.5..2; 0: none */
    double ram_s_per_token;
    double disk_s_per_token;
    double peer_s_per_token;
} infera_score_candidate;

/* How the parts count. Pressure is in tokens of prefill, so one scale fits slow and fast engines.
 */
typedef struct {
    double overlap; /* 0: what a place holds does not matter; above 1: it matters more */
    double queue;
    double decode;
    double pressure_tokens_per_request;
    double pressure_tokens_per_context_token;
    double pressure_tokens_at_full_memory;
} infera_score_weights;

/* The parts in seconds before weighing; total_s is the predicted time to the first token, the sum
 * of the first four; cost_s, the weighed sum of all five, decides. */
typedef struct {
    double queue_s;
    double prefill_s;
    double load_s;
    double decode_s;
    double delay_s;
    double total_s;
    double cost_s;
} infera_score_cost;

/* Writes the cost of each of `count` candidates to `out`. Touches nothing else, keeps no state. */
void infera_score(const infera_score_weights *weights, const infera_score_candidate *candidates,
                  size_t count, infera_score_cost *out);
/* cffi: end */

#endif
