from __future__ import annotations

from infera.router.decision import ATTEMPTS_MAX, Decision, DecisionRing, RequestStory
from tests.support.placement import STREAM, core, option


def decision(workers: int) -> Decision:
    return core().pick([option(number) for number in range(1, workers + 1)], STREAM, now=0.0)[0]


def test_the_ring_forgets_the_oldest() -> None:
    ring = DecisionRing(requests_max=2)
    for name in ("a", "b", "a", "c"):
        ring.open(name, RequestStory(name, {}))
    assert ring.get("b") is None
    assert ring.get("a") is not None
    assert ring.get("c") is not None


def test_memory_is_bounded_in_rows_too() -> None:
    ring = DecisionRing(requests_max=1_000, rows_max=100)
    made = decision(8)
    for number in range(200):
        ring.open(str(number), RequestStory("m", {}))
        ring.add(str(number), made)
        assert ring.row_count <= 100
    assert len(ring) == 12
    assert ring.row_count == sum(8 for number in range(200) if ring.get(str(number)))
    ring.open("199", RequestStory("m", {}))
    assert ring.row_count == 11 * 8


def test_a_request_has_so_many_attempts_and_forgotten_ones_can_still_be_completed() -> None:
    ring = DecisionRing()
    ring.open("a", RequestStory("m", {}))
    for _ in range(ATTEMPTS_MAX + 5):
        ring.add("a", decision(1)).outcome = "failed"
    ring.add("unknown", decision(1)).outcome = "served"
    story = ring.get("a")
    assert story is not None
    assert len(story.explain()["attempts"]) == ATTEMPTS_MAX
    assert story.explain()["attempts"][0]["outcome"] == "failed"
