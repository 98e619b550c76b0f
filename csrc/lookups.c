/* Questions that are asked at every step.
 *
 * A scheduler asks for each waiting request how much of its prompt is cached, at every step, and
 * hardly anything has changed since.  An answer is a run: so many leading keys are there, the next
 * is not.  As long as nothing was removed only that next key is of interest.  After removals the
 * last key of a run is asked for as well, because chains are evicted from their end; when it is
 * gone, the end of the run is found by bisection.  A gap in the middle of a run is possible (a
 * record dropped by hand, one whose time had passed) and found by going round and looking at some
 * runs whole.  Nothing depends on it: whoever relies on an answer pins the run, key by key.
 *
 * Look-ups are cache misses, so the lines of the next questions are fetched while one is answered.
 */
#include "arena_private.h"

#define QUESTIONS_AHEAD 12

static const uint8_t *key_at(const arena_question *question, uint32_t at) {
    return question->keys + (uint64_t)at * ARENA_KEY_BYTES;
}

static int has(const arena_view *view, const arena_question *question, uint32_t at) {
    return arena_has(view, question->class_id, question->full_mask, key_at(question, at));
}

static void fetch(const arena_view *view, const arena_question *question, int were_removed) {
    if (question->found < question->n)
        arena_prefetch(view, question->class_id, key_at(question, question->found));
    if (were_removed && question->found)
        arena_prefetch(view, question->class_id, key_at(question, question->found - 1));
}

/* Leading keys from `start` on that are there. */
static uint32_t run_from(const arena_view *view, const arena_question *question, uint32_t start) {
    return (uint32_t)arena_probe_run(view, question->class_id, question->full_mask,
                                     key_at(question, start), question->n - start, NULL);
}

/* Length of a run that was `end` keys and whose last key is gone, taking it that all before a key
 * that is there are there too. */
static uint32_t shortened(const arena_view *view, const arena_question *question, uint32_t end) {
    uint32_t start = 0;
    while (start < end) {
        uint32_t middle = start + (end - start) / 2;
        if (has(view, question, middle))
            start = middle + 1;
        else
            end = middle;
    }
    return start;
}

static void ask(const arena_view *view, arena_question *question, int were_removed) {
    uint32_t found = question->found;
    if (were_removed && found && !has(view, question, found - 1)) {
        question->found = shortened(view, question, found - 1);
        return;
    }
    if (found < question->n && has(view, question, found))
        question->found = found + 1 + run_from(view, question, found + 1);
}

/* Looks at some runs whole, from *turn on. */
static void go_round(const arena_view *view, arena_question *questions, uint32_t n,
                     uint32_t keys_max, uint32_t *turn) {
    uint64_t looked_up = 0;
    for (uint32_t i = 0; i < n && looked_up < keys_max; i++) {
        arena_question *question = &questions[*turn % n];
        *turn = (*turn + 1) % n;
        looked_up += question->found + 1;
        question->found = run_from(view, question, 0);
    }
}

void arena_ask_again(const arena_view *view, arena_question *questions, uint32_t n,
                     int were_removed, uint32_t whole_keys_max, uint32_t *turn) {
    for (uint32_t i = 0; i < n && i < QUESTIONS_AHEAD; i++)
        fetch(view, &questions[i], were_removed);
    for (uint32_t i = 0; i < n; i++) {
        if (i + QUESTIONS_AHEAD < n) fetch(view, &questions[i + QUESTIONS_AHEAD], were_removed);
        ask(view, &questions[i], were_removed);
    }
    if (were_removed) go_round(view, questions, n, whole_keys_max, turn);
}
