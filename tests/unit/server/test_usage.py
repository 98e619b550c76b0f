"""The engine's own count of prompt tokens, in the shapes of all surfaces, and what becomes of a difference."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from infera.server.metrics import ServerMetrics
from infera.server.usage import ReportedUsage, compare, usage_of_answer, usage_of_fields


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, ReportedUsage(9, 4)),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, ReportedUsage(9, None)),
        ({"prompt_tokens": 9}, ReportedUsage(9, None)),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 1}, ReportedUsage(9, 4)),
        ({"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 1}, ReportedUsage(9, 4)),
        (
            {"input_tokens": 2, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 3},
            ReportedUsage(9, 4),
        ),
        ({"input_tokens": 9}, ReportedUsage(9, None)),
        ({}, None),
        ({"prompt_tokens": "x"}, None),
    ],
)
def test_usage_of_every_surface(usage: dict[str, Any], expected: ReportedUsage | None) -> None:
    assert usage_of_fields(usage) == expected
    assert usage_of_answer(json.dumps({"usage": usage}).encode()) == expected


def test_answers_without_usage() -> None:
    assert usage_of_answer(b"{}") is None
    assert usage_of_answer(b"no json") is None


def compared(*pairs: tuple[str, int | None, int]) -> ServerMetrics:
    metrics = ServerMetrics()
    state = SimpleNamespace(
        metrics=metrics, models_mismatched=set(), fleet=SimpleNamespace(computed=lambda worker, tokens: None)
    )
    chosen = SimpleNamespace(worker="w", worker_id="w", cached_tokens=0)
    for model, rendered, real in pairs:
        compare(state, model, chosen, rendered, ReportedUsage(real, 0))  # type: ignore[arg-type]
    return metrics


def test_differences_are_counted_and_said_once_for_each_model(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        metrics = compared(("a", 5, 6), ("a", 5, 7), ("b", 5, 6), ("c", 5, 5), ("d", None, 5))
    assert metrics.mismatches.labels("a")._value.get() == 2
    assert metrics.mismatches.labels("c")._value.get() == 0
    assert sum("we rendered" in line for line in caplog.messages) == 2
