/* Scoring.
 *
 * A place is judged by the time it would take until the request's first token, in seconds:
 *
 *   queue    what is computed there before it: (own + others' queued tokens) x time per token
 *   prefill  tokens that nobody holds for it x time per token
 *   load     tokens that lie in ram, on disk or at a peer x time per token of that tier, and never
 *            more than computing them would take: engines do not load at a loss
 *   decode   what its decoding requests slow down, and how full its memory is (squared: an almost
 *            full memory preempts, a half full one does not), expressed in tokens of prefill
 *
 * and by what it would cost others: prompts that arrive while it is computed wait for it. At a
 * place that is busy for a share b of the time, computing for a second delays later ones by about
 * b / (1 - b) seconds in all (the mean queue of work that arrives at random, served in order). At
 * an idle place it delays nobody.
 *
 * Time per token is the prior of the worker's kind times its own learned factor, clamped, so that
 * one odd measurement neither floods nor starves a worker. The weights bias the sum without
 * changing the predicted time that is shown. A pure function of its arguments: the server, the
 * simulator and routers in other languages get the same numbers from it. No input can make a NaN:
 * each is brought into [0, LARGEST] first, and the sums of products of a few such stay finite.
 */
#include "score.h"

#define LARGEST 1e30

static double usable(double value) {
    if (!(value > 0.0)) return 0.0;
    return value < LARGEST ? value : LARGEST;
}

static double smaller(double one, double other) {
    return one < other ? one : other;
}

static double s_per_token(const infera_score_candidate *candidate) {
    double factor = usable(candidate->factor);
    if (factor == 0.0) factor = 1.0;
    if (factor < SCORE_FACTOR_MIN) factor = SCORE_FACTOR_MIN;
    if (factor > SCORE_FACTOR_MAX) factor = SCORE_FACTOR_MAX;
    return usable(candidate->prefill_s_per_token) * factor;
}

static double load_s(double tokens, double tier_s_per_token, double compute_s_per_token) {
    return usable(tokens) * smaller(usable(tier_s_per_token), compute_s_per_token);
}

static double uncached_tokens(const infera_score_candidate *candidate) {
    double held = usable(candidate->hbm_tokens) + usable(candidate->ram_tokens) +
                  usable(candidate->disk_tokens) + usable(candidate->peer_tokens);
    return usable(usable(candidate->prompt_tokens) - held);
}

static double delay_of_others(const infera_score_candidate *candidate) {
    double busy = smaller(usable(candidate->busy_share), SCORE_BUSY_MAX);
    return busy / (1.0 - busy);
}

static double pressure_tokens(const infera_score_weights *weights,
                              const infera_score_candidate *candidate, double new_tokens) {
    double capacity = usable(candidate->kv_capacity_tokens);
    double fill = 0.0;
    if (capacity > 0.0)
        fill = smaller((usable(candidate->kv_used_tokens) + new_tokens) / capacity, 1.0);
    return usable(candidate->active_requests) * usable(weights->pressure_tokens_per_request) +
           usable(candidate->context_tokens) * usable(weights->pressure_tokens_per_context_token) +
           fill * fill * usable(weights->pressure_tokens_at_full_memory);
}

static void score_one(const infera_score_weights *weights, const infera_score_candidate *candidate,
                      infera_score_cost *out) {
    double each_s = s_per_token(candidate);
    double new_tokens = uncached_tokens(candidate);
    double queued =
        usable(candidate->queued_prefill_tokens) + usable(candidate->other_prefill_tokens);
    out->queue_s = queued * each_s;
    out->prefill_s = new_tokens * each_s;
    out->load_s = load_s(candidate->ram_tokens, candidate->ram_s_per_token, each_s) +
                  load_s(candidate->disk_tokens, candidate->disk_s_per_token, each_s) +
                  load_s(candidate->peer_tokens, candidate->peer_s_per_token, each_s);
    out->decode_s = pressure_tokens(weights, candidate, new_tokens) * each_s;
    out->delay_s = out->prefill_s * delay_of_others(candidate);
    out->total_s = out->queue_s + out->prefill_s + out->load_s + out->decode_s;
    out->cost_s = usable(weights->queue) * out->queue_s +
                  usable(weights->overlap) * (out->prefill_s + out->load_s + out->delay_s) +
                  usable(weights->decode) * out->decode_s;
}

void infera_score(const infera_score_weights *weights, const infera_score_candidate *candidates,
                  size_t count, infera_score_cost *out) {
    for (size_t i = 0; i < count; i++) score_one(weights, &candidates[i], &out[i]);
}
