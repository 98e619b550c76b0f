"""How fast engines compute prompts, learned from the first tokens this router saw.

A *kind* is a (model, engine, hardware); every worker of a kind is assumed to be alike until it shows otherwise:

- a worker's speed is the lower quartile of its last samples: what disturbs a sample (work of others that nobody told
  of) only makes it slower;
- the kind's prior is the lower median of its workers' speeds, so one slow worker does not move it;
- a worker's factor is its own speed over that prior, clamped to 0.5..2, and decays to 1 when nothing is
  observed: a worker that was slow and gets little work for that reason is tried again.

Only clean samples count (see `measure.py`). Before there are enough, the built-in prior holds.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from statistics import median_low
from typing import Final

from infera.router.cost import PRIOR, CostPrior
from infera.router.place import Key, Kind, Place

FACTOR_MIN: Final = 0.5
FACTOR_MAX: Final = 2.0
SAMPLES_KEPT: Final = 9
SAMPLES_NEEDED: Final = 3
SAMPLE_LIFE_S: Final = 120.0
FACTOR_DECAY_S: Final = 60.0
KINDS_MAX: Final = 256
# A measured kind may be this much slower or faster than the built-in prior; more is a fault of measuring.
KIND_RANGE: Final = 1_000.0


@dataclass(slots=True)
class _Worker:
    kind: Kind
    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    typical_s: float | None = None
    last_s: float = 0.0


@dataclass(slots=True)
class _Kind:
    s_per_token: float
    is_measured: bool = False
    workers: dict[Key, _Worker] = field(default_factory=dict)


class SpeedBook:
    """Seconds per prompt token by kind, and each worker's factor to it."""

    def __init__(self, prior: CostPrior = PRIOR) -> None:
        self._prior_s = prior.prefill_s_per_token
        self._kinds: OrderedDict[Kind, _Kind] = OrderedDict()
        self._workers: dict[Key, _Worker] = {}

    def prior_s_per_token(self, kind: Kind) -> float:
        """What is expected of any worker of a kind."""
        found = self._kinds.get(kind)
        return found.s_per_token if found is not None else self._prior_s

    def is_measured(self, kind: Kind) -> bool:
        """Whether any worker of the kind was ever seen at work for long enough."""
        found = self._kinds.get(kind)
        return found is not None and found.is_measured

    def factor(self, key: Key, now_s: float) -> float:
        """How much slower (above 1) or faster this worker is than its kind."""
        worker = self._workers.get(key)
        if worker is None or worker.typical_s is None:
            return 1.0
        ratio = worker.typical_s / self._kinds[worker.kind].s_per_token
        clamped = min(FACTOR_MAX, max(FACTOR_MIN, ratio))
        return float(clamped ** math.exp(-max(0.0, now_s - worker.last_s) / FACTOR_DECAY_S))

    def s_per_token(self, place: Place, now_s: float) -> float:
        """What is expected of this worker."""
        return self.prior_s_per_token(place.kind) * self.factor(place.key, now_s)

    def learn(self, place: Place, s_per_token: float, now_s: float) -> None:
        """Enter a clean sample."""
        if not (math.isfinite(s_per_token) and s_per_token > 0):
            return
        worker = self._worker(place)
        worker.samples.append((now_s, s_per_token))
        while worker.samples[0][0] < now_s - SAMPLE_LIFE_S:
            worker.samples.popleft()
        worker.last_s = now_s
        if len(worker.samples) >= SAMPLES_NEEDED:
            ordered = sorted(value for _, value in worker.samples)
            worker.typical_s = ordered[len(ordered) // 4]
            self._update(self._kinds[worker.kind])

    def forget(self, key: Key) -> None:
        """A place is gone. What its kind was seen to do stays known."""
        worker = self._workers.pop(key, None)
        if worker is not None:
            self._kinds[worker.kind].workers.pop(key, None)

    def _worker(self, place: Place) -> _Worker:
        key, kind = place.key, place.kind
        worker = self._workers.get(key)
        if worker is not None and worker.kind == kind:
            self._kinds.move_to_end(kind)
            return worker
        self.forget(key)
        if kind not in self._kinds:
            self._kinds[kind] = _Kind(self._prior_s)
            if len(self._kinds) > KINDS_MAX:
                _, dropped = self._kinds.popitem(last=False)
                for gone in dropped.workers:
                    del self._workers[gone]
        self._kinds.move_to_end(kind)
        made = self._workers[key] = self._kinds[kind].workers[key] = _Worker(kind)
        return made

    def _update(self, kind: _Kind) -> None:
        known = [worker.typical_s for worker in kind.workers.values() if worker.typical_s is not None]
        kind.is_measured = True
        found = median_low(known)
        kind.s_per_token = min(self._prior_s * KIND_RANGE, max(self._prior_s / KIND_RANGE, found))
