"""The scoring function of the C core, and the table of numbers it reads: one row for each place.

The formula and the meaning of every column are in `csrc/score.h` and `csrc/score.c`. Tokens are counts, times
seconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

from infera_core._native import ffi, lib


class Row(NamedTuple):
    """What is known of one place, in the order of `infera_score_candidate`."""

    prompt_tokens: float
    hbm_tokens: float = 0.0
    ram_tokens: float = 0.0
    disk_tokens: float = 0.0
    peer_tokens: float = 0.0
    queued_prefill_tokens: float = 0.0
    other_prefill_tokens: float = 0.0
    active_requests: float = 0.0
    context_tokens: float = 0.0
    busy_share: float = 0.0
    kv_used_tokens: float = 0.0
    kv_capacity_tokens: float = 0.0
    prefill_s_per_token: float = 0.0
    factor: float = 1.0
    ram_s_per_token: float = 0.0
    disk_s_per_token: float = 0.0
    peer_s_per_token: float = 0.0

    @property
    def cached_tokens(self) -> float:
        """Prompt tokens that need not be computed there."""
        return self.hbm_tokens + self.ram_tokens + self.disk_tokens + self.peer_tokens

    @property
    def uncached_tokens(self) -> float:
        """Prompt tokens that have to be computed there."""
        return max(0.0, self.prompt_tokens - self.cached_tokens)


class Cost(NamedTuple):
    """One place's prediction in the order of `infera_score_cost`; ``cost_s`` is the weighed sum that decides."""

    queue_s: float
    prefill_s: float
    load_s: float
    decode_s: float
    delay_s: float
    total_s: float
    cost_s: float


@dataclass(frozen=True, slots=True)
class Weights:
    """How the parts count, in the order of `infera_score_weights`; pressure is in tokens of prefill."""

    overlap: float = 1.0
    queue: float = 1.0
    decode: float = 1.0
    pressure_tokens_per_request: float = 10.0
    pressure_tokens_per_context_token: float = 0.01
    pressure_tokens_at_full_memory: float = 2_500.0


ROW_COLUMNS: Final = len(Row._fields)
COST_COLUMNS: Final = len(Cost._fields)
_DOUBLE_BYTES: Final = 8
assert ffi.sizeof("infera_score_candidate") == ROW_COLUMNS * _DOUBLE_BYTES
assert ffi.sizeof("infera_score_cost") == COST_COLUMNS * _DOUBLE_BYTES
assert ffi.sizeof("infera_score_weights") == len(fields(Weights)) * _DOUBLE_BYTES


class CostTable:
    """The costs of all places of one pick."""

    __slots__ = ("_values",)

    def __init__(self, values: array[float]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values) // COST_COLUMNS

    def __getitem__(self, index: int) -> Cost:
        start = index * COST_COLUMNS
        return Cost(*self._values[start : start + COST_COLUMNS])

    @property
    def queue_s(self) -> Sequence[float]:
        """Predicted time in queue of every place."""
        return self._values[0::COST_COLUMNS]

    @property
    def cost_s(self) -> Sequence[float]:
        """The sum that decides, of every place."""
        return self._values[COST_COLUMNS - 1 :: COST_COLUMNS]


def score(weights: Weights, rows: array[float]) -> CostTable:
    """The costs of every row of ``rows`` (ROW_COLUMNS doubles each, rows one after the other).

    Raises ValueError when the length is not a whole number of rows.
    """
    count, rest = divmod(len(rows), ROW_COLUMNS)
    if rest:
        raise ValueError(f"{len(rows)} numbers are no whole number of rows of {ROW_COLUMNS}")
    out = array("d", bytes(count * COST_COLUMNS * _DOUBLE_BYTES))
    if count:
        lib.infera_score(_native(weights), _view("candidate", rows), count, _view("cost", out))
    return CostTable(out)


def _view(kind: str, values: array[float]) -> Any:
    return ffi.from_buffer(f"infera_score_{kind}[]", values)


def _native(weights: Weights) -> Any:
    found = _NATIVE_WEIGHTS.get(weights)
    if found is None:
        if len(_NATIVE_WEIGHTS) >= _NATIVE_WEIGHTS_MAX:
            _NATIVE_WEIGHTS.clear()
        found = ffi.new("infera_score_weights *", [getattr(weights, field.name) for field in fields(Weights)])
        _NATIVE_WEIGHTS[weights] = found
    return found


_NATIVE_WEIGHTS_MAX: Final = 64
_NATIVE_WEIGHTS: Final[dict[Weights, Any]] = {}
