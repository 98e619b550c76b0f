from __future__ import annotations

import pytest

from infera.server.options import ServerConfig
from infera.server.state import bearer_matches, make_state, origin_of
from tests.support.records import record


async def test_degraded_modes_are_named_with_their_cure() -> None:
    state = make_state(ServerConfig(host="0.0.0.0", router_backend="rust"))
    told = " ".join(state.degraded())
    assert "--router-backend rust" in told
    assert "--join-token" in told
    state.fleet.add(record(1, events=None))
    state.fleet.suspect(record(1).incarnation, "refused")
    told = " ".join(state.degraded())
    assert "publishes no KV events" in told
    assert "is suspect: refused" in told
    await state.stop()


async def test_adapters_nobody_can_read_are_named() -> None:
    """sglang#27386: hits that are zero are not zero in silence."""
    state = make_state(ServerConfig())
    adapters = {"known": "aa", **{f"hub-{number}": "" for number in range(9)}}
    state.fleet.add(record(1, adapters=adapters))
    (told,) = [line for line in state.degraded() if "LoRA" in line]
    assert "hub-0, hub-1, hub-2, hub-3, hub-4)" in told
    assert "folders that its agent can read" in told
    assert "known," not in told
    await state.stop()


async def test_a_worker_that_does_not_serve_alone_is_not_enough() -> None:
    state = make_state(ServerConfig())
    state.fleet.add(record(1, events=None, role="prefill"))
    assert any("role mixed" in line for line in state.missing())
    await state.stop()


@pytest.mark.parametrize(
    ("header", "matches"),
    [
        ("Bearer secret", True),
        ("bearer secret ", True),
        ("Bearer wrong", False),
        ("secret", False),
        (None, False),
        ("Basic secret", False),
    ],
)
def test_bearer_tokens(header: str | None, matches: bool) -> None:
    assert bearer_matches(header, "secret") is matches


def test_origins() -> None:
    assert origin_of(record(1, url="http://h:8101/base/")) == ("http://h:8101", "/base")
