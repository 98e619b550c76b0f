from __future__ import annotations

from typing import Any

import pytest

from infera.router.demand import PRIORITY_MAX, priority_of, retention_of


@pytest.mark.parametrize(
    ("body", "priority"),
    [
        ({}, 0),
        ({"priority": 3}, 3),
        ({"priority": -3}, -3),
        ({"priority": None}, 0),
        ({"priority": "high"}, 0),
        ({"priority": True}, 0),
        ({"priority": 10**12}, PRIORITY_MAX),
        ({"priority": -(10**12)}, -PRIORITY_MAX),
    ],
)
def test_priorities(body: dict[str, Any], priority: int) -> None:
    assert priority_of(body) == priority


@pytest.mark.parametrize(
    ("parameters", "retention"),
    [
        (None, None),
        ({}, None),
        ({"infera_retention": "none"}, "none"),
        ({"infera_retention": "short"}, "short"),
        ({"infera_retention": "long"}, "long"),
        ({"infera_retention": "pinned"}, None),
        ({"infera_retention": 1}, None),
        ("none", None),
    ],
)
def test_retention_hints(parameters: Any, retention: str | None) -> None:
    assert retention_of({"kv_transfer_params": parameters}) == retention
