"""dynamo#7836: decode workers idle at high concurrency.

Decode computes no prompt: a prefix that one worker holds saves a transfer and nothing more, so it must not draw all
requests to that worker.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from infera.router.policy import OverlapWeights, PolicySettings
from tests.support.placement import STREAM, core, option

WORKERS, CONCURRENCY = 8, 800


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_every_decode_worker_has_work(weight: float) -> None:
    settings = PolicySettings(OverlapWeights(1.0, prefill=20.0, decode=weight))
    router = core(settings=settings)
    dice = random.Random(7836)
    running: list[tuple[str, object]] = []
    for number in range(4 * CONCURRENCY):
        options = [
            option(1, prompt=2_048, hbm=2_032),
            *(option(other, prompt=2_048) for other in range(2, WORKERS + 1)),
        ]
        decision, ticket = router.pick(options, replace(STREAM, role="decode"), now=number / 100)
        router.first_token(ticket, now=number / 100)
        running.append((decision.worker_id, ticket))
        if len(running) > CONCURRENCY:
            _, ended = running.pop(dice.randrange(len(running)))
            router.done(ended, now=number / 100)  # type: ignore[arg-type]
    counts = Counter(worker for worker, _ in running)
    assert len(counts) == WORKERS
    assert min(counts.values()) > 0.7 * CONCURRENCY / WORKERS
    assert max(counts.values()) < 1.3 * CONCURRENCY / WORKERS
