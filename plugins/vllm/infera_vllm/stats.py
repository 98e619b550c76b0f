"""What the connector counts, as vLLM collects it from scheduler and workers and shows it at /metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import Counter as PromCounter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

PREFIX: Final = "infera_kvd_engine_"

COUNTERS: Final = {
    "hit_tokens": ("Prompt tokens loaded from infera-kvd, by the tier they were in.", ("tier",)),
    "loads": ("Loads of requests, by how they ended.", ("outcome",)),
    "loaded_blocks": ("Blocks copied from infera-kvd and verified.", ()),
    "loaded_bytes": ("Bytes copied from infera-kvd and verified.", ()),
    "damaged_blocks": ("Blocks whose bytes did not match their checksum.", ()),
    "hits_unused": ("Hits that were not loaded, by reason.", ("reason",)),
    "saved_blocks": ("Blocks saved to infera-kvd.", ()),
    "saved_bytes": ("Bytes saved to infera-kvd.", ()),
    "saves_dropped_blocks": ("Blocks that were to be saved and were not, by reason.", ("reason",)),
    "uncacheable_requests": ("Requests whose blocks are not kept, by reason.", ("reason",)),
    "scheduler_seconds": ("Time the connector took in the scheduler.", ()),
    "scheduler_steps": ("Steps of the scheduler with the connector.", ()),
    "worker_seconds": ("Time the connector took in workers' steps, not in its own threads.", ()),
    "worker_steps": ("Steps of workers with the connector.", ()),
    "worker_step_seconds": ("Time workers' steps took in all, the connector's included.", ()),
}
"""Name -> help, and the label that tells kinds apart. In `data` a kind follows its name after a colon."""


@dataclass
class InferaStats(KVConnectorStats):
    """Sums since the last time they were taken. Belongs to one thread, or is guarded by its owner."""

    data: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, amount: float = 1, kind: str = "") -> None:
        """Count something; `name` is one of COUNTERS."""
        if not amount:
            return
        key = f"{name}:{kind}" if kind else name
        self.data[key] = self.data.get(key, 0) + amount

    def take(self) -> InferaStats | None:
        """What was counted, which begins anew; None for nothing."""
        if not self.data:
            return None
        taken, self.data = self.data, {}
        return InferaStats(taken)

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Both as one."""
        return InferaStats(dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: what a reader of logs asks first."""
        data = self.data
        failed = sum(value for key, value in data.items() if key.startswith("loads:") and key != "loads:loaded")
        return {
            "infera-kvd hit tokens": int(sum(v for key, v in data.items() if key.startswith("hit_tokens:"))),
            "loaded blocks": int(data.get("loaded_blocks", 0)),
            "failed loads": int(failed),
            "saved blocks": int(data.get("saved_blocks", 0)),
        }

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


_registered: dict[tuple[type, str], Any] = {}
"""Counters of this process: a second engine in it uses the same, since a name can be registered once only."""


class InferaPromMetrics(KVConnectorPromMetrics):
    """The counters at /metrics, each with the engine's labels."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[Any]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        counter_class = metric_types[PromCounter]
        for name, (text, labels) in COUNTERS.items():
            full_name = PREFIX + name
            if (counter_class, full_name) not in _registered:
                _registered[counter_class, full_name] = counter_class(
                    name=full_name, documentation=text, labelnames=[*labelnames, *labels]
                )
            self._counters[name] = _registered[counter_class, full_name]

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add what one interval brought."""
        values = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.items():
            name, _, kind = key.partition(":")
            self._counters[name].labels(*values, *([kind] if COUNTERS[name][1] else [])).inc(amount)
