"""What an engine says it is doing, read from its Prometheus page.

Names: vLLM's `vllm:num_requests_running`, `vllm:num_requests_waiting`, `vllm:kv_cache_usage_perc` (a share despite its
name) and `vllm:prompt_tokens_by_source_total` (of the source `local_compute`), with the data-parallel rank in the
label `engine`; SGLang's `sglang:num_running_reqs`,
`sglang:num_queue_reqs`, `sglang:token_usage`, with the rank in `dp_rank`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from infera.discovery.record import DP_RANKS_MAX, RankLoad

_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_USAGE = ("vllm:kv_cache_usage_perc", "sglang:token_usage")
_COMPUTED = ("vllm:prompt_tokens_by_source_total",)
_NAMES = "|".join((*_RUNNING, *_WAITING, *_USAGE, *_COMPUTED))
_LINE = re.compile(rf"^({_NAMES})(?:\{{([^\n]*)\}})? ([^\s]+)", re.M)
_KINDS = {
    **dict.fromkeys(_RUNNING, "running"),
    **dict.fromkeys(_WAITING, "waiting"),
    **dict.fromkeys(_USAGE, "usage"),
    **dict.fromkeys(_COMPUTED, "computed"),
}
_RANK = re.compile(r'(?:^|,)(?:engine|dp_rank)="([0-9]{1,6})"')


def parse_load(page: str) -> tuple[RankLoad, ...]:
    """The load of each rank, in order of ranks; empty when the page says nothing of it."""
    ranks: dict[int, dict[str, float]] = {}
    for name, rank, value in _samples(page):
        if len(ranks) >= DP_RANKS_MAX and rank not in ranks:
            continue
        found = ranks.setdefault(rank, {})
        # The tensor-parallel ranks of one scheduler may each report; they report the same.
        found[name] = max(value, found.get(name, 0.0))
    return tuple(
        RankLoad(
            dp_rank=rank,
            running_requests=int(found.get("running", 0)),
            waiting_requests=int(found.get("waiting", 0)),
            kv_usage=min(1.0, found["usage"]) if "usage" in found else None,
            computed_tokens=int(found["computed"]) if "computed" in found else None,
        )
        for rank, found in sorted(ranks.items())
    )


def _samples(page: str) -> Iterator[tuple[str, int, float]]:
    for metric, labels, text in _LINE.findall(page):
        try:
            value = float(text)
        except ValueError:
            continue
        if not math.isfinite(value) or value < 0:
            continue
        rank = _RANK.search(labels or "")
        if metric in _COMPUTED and 'source="local_compute"' not in labels:
            continue
        yield _KINDS[metric], int(rank.group(1)) if rank else 0, value
