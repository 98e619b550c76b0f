from __future__ import annotations

from infera.router.decision import DecisionRing, RequestStory


def test_the_ring_forgets_the_oldest() -> None:
    ring = DecisionRing(size=2)
    for name in ("a", "b", "a", "c"):
        ring.open(name, RequestStory(name, {}))
    assert ring.get("b") is None
    assert ring.get("a") is not None
    assert ring.get("c") is not None
