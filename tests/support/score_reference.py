"""The scoring function written again from its description in `csrc/score.c`, to check the C against."""

from __future__ import annotations

import math

from infera.router.scoring import Cost, Row, Weights

LARGEST = 1e30


def usable(value: float) -> float:
    """What is negative or no number counts as 0."""
    return 0.0 if math.isnan(value) or value <= 0 else min(value, LARGEST)


def score_reference(weights: Weights, row: Row) -> Cost:
    """The cost of one place."""
    row = Row(*map(usable, row))
    factor = min(2.0, max(0.5, row.factor)) if row.factor else 1.0
    each_s = row.prefill_s_per_token * factor
    new_tokens = usable(row.prompt_tokens - (row.hbm_tokens + row.ram_tokens + row.disk_tokens + row.peer_tokens))
    queue_s = (row.queued_prefill_tokens + row.other_prefill_tokens) * each_s
    prefill_s = new_tokens * each_s
    load_s = (
        row.ram_tokens * min(row.ram_s_per_token, each_s)
        + row.disk_tokens * min(row.disk_s_per_token, each_s)
        + row.peer_tokens * min(row.peer_s_per_token, each_s)
    )
    fill = min(1.0, (row.kv_used_tokens + new_tokens) / row.kv_capacity_tokens) if row.kv_capacity_tokens else 0.0
    pressure = (
        row.active_requests * usable(weights.pressure_tokens_per_request)
        + row.context_tokens * usable(weights.pressure_tokens_per_context_token)
        + fill**2 * usable(weights.pressure_tokens_at_full_memory)
    )
    busy = min(0.8, row.busy_share)
    decode_s, delay_s = pressure * each_s, prefill_s * busy / (1 - busy)
    cost_s = (
        usable(weights.queue) * queue_s
        + usable(weights.overlap) * (prefill_s + load_s + delay_s)
        + usable(weights.decode) * decode_s
    )
    return Cost(queue_s, prefill_s, load_s, decode_s, delay_s, queue_s + prefill_s + load_s + decode_s, cost_s)
