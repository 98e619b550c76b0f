"""The load table against a plain model, and what happens at its limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infera_core import lib

from infera.cachemap.load_table import LANE_LIFE_S, LANES_MAX, LoadLane, LoadTable, PlaceSum, map_whole, place_number

NOTHING = PlaceSum(0.0, 0.0, 0.0)
PUTS = st.tuples(st.integers(0, 3), st.integers(1, 12), st.integers(0, 9), st.integers(0, 5))


def lanes(table: LoadTable, count: int) -> list[LoadLane]:
    claimed = [table.claim() for _ in range(count)]
    return [table.lane(number) for number in claimed if number is not None]


@given(st.lists(PUTS, max_size=60))
def test_each_lane_sees_the_sum_of_the_others(puts: list[tuple[int, int, int, int]]) -> None:
    table = LoadTable()
    own = lanes(table, 4)
    held: dict[tuple[int, int], tuple[int, int]] = {}
    for lane in own:
        lane.beat(10.0)
    for writer, place, queued, requests in puts:
        own[writer].put(place, PlaceSum(queued, requests, 7 * requests), queued, 10.0)
        held[writer, place] = (queued, requests)
    places = list(range(1, 14))
    for reader, lane in enumerate(own):
        rows = {place: [held[w, place] for w in range(4) if w != reader and (w, place) in held] for place in places}
        wanted = [PlaceSum(sum(q for q, _ in row), sum(r for _, r in row), 7 * sum(r for _, r in row))
                  for row in rows.values()]  # fmt: skip
        assert lane.others(places, [0.0] * len(places), 10.0) == wanted
    table.close()


def test_a_queue_drains_at_the_speed_of_its_place() -> None:
    table = LoadTable()
    one, other = lanes(table, 2)
    one.beat(1.0)
    one.put(5, PlaceSum(100, 2, 300), 100, 1.0)
    assert other.others([5, 5, 5], [0.01, 0.001, 0.0], 1.5) == [(50.0, 2.0, 300.0), (0.0, 2.0, 300.0), (100, 2, 300)]


def test_a_queue_drains_no_further_than_its_owner_says() -> None:
    table = LoadTable()
    one, other = lanes(table, 2)
    one.beat(1.0)
    one.put(5, PlaceSum(100, 2, 300), 30, 1.0)
    assert other.others([5, 5], [0.01, 0.001], 1.2) == [(80, 2, 300), (70, 2, 300)]


def test_a_process_that_does_not_beat_is_soon_forgotten_and_comes_back() -> None:
    table = LoadTable()
    one, other = lanes(table, 2)
    one.beat(10.0)
    other.beat(10.0)
    one.put(5, PlaceSum(100, 2, 300), 100, 10.0)
    late_s = 10.0 + LANE_LIFE_S + 0.1
    assert other.live_count(10.0) == 2
    assert other.others([5], [0.0], late_s) == [NOTHING]
    assert other.live_count(late_s) == 0
    one.beat(late_s)
    assert other.others([5], [0.0], late_s) == [(100, 2, 300)]


def test_a_released_lane_is_empty_for_the_next() -> None:
    table = LoadTable()
    (watcher,) = lanes(table, 1)
    number = table.claim()
    assert number is not None
    gone = table.lane(number)
    gone.beat(1.0)
    gone.put(5, PlaceSum(100, 2, 300), 100, 1.0)
    table.release(number)
    assert watcher.others([5], [0.0], 1.0) == [NOTHING]
    assert table.claim() == number
    table.lane(number).beat(1.0)
    assert watcher.others([5], [0.0], 1.0) == [NOTHING]


def test_there_are_only_so_many_lanes() -> None:
    table = LoadTable()
    assert [table.claim() for _ in range(LANES_MAX + 1)] == [*range(LANES_MAX), None]


def test_at_the_limit_of_rows_places_are_not_shared_and_idle_ones_make_room() -> None:
    table = LoadTable()
    one, other = lanes(table, 2)
    one.beat(1.0)
    places = [place_number("worker", rank) for rank in range(2 * lib.LOADTABLE_ROWS_MAX)]
    for place in places:
        one.put(place, PlaceSum(1, 1, 1), 1, 1.0)
    assert one.refused_full > 0
    seen = sum(row.requests for row in other.others(places, [0.0] * len(places), 1.0))
    assert seen == len(places) - one.refused_full
    refused = one.refused_full
    for place in places:
        one.put(place, NOTHING, 0, 1.0)
    one.refused_full = 0
    for place in places[:100]:
        one.put(place, PlaceSum(1, 1, 1), 1, 1.0)
    assert one.refused_full == 0
    assert refused > 0
    assert [row.requests for row in other.others(places[:100], [0.0] * 100, 1.0)] == [1.0] * 100


def test_memory_that_is_no_table_is_refused() -> None:
    import mmap

    with pytest.raises(ValueError, match="not a load table"):
        LoadLane(mmap.mmap(-1, 4096), 0)
    with pytest.raises(ValueError, match="not a load table"):
        LoadLane(mmap.mmap(-1, int(lib.loadtable_bytes())), 0)


def test_others_map_the_same_memory_by_its_descriptor() -> None:
    table = LoadTable()
    one, other = table.claim(), table.claim()
    assert one is not None
    assert other is not None
    mapped = LoadLane(map_whole(table.descriptor), one)
    mapped.beat(1.0)
    mapped.put(9, PlaceSum(3, 1, 4), 3, 1.0)
    assert table.lane(other).others([9], [0.0], 1.0) == [(3, 1, 4)]
    table.close()
    table.close()
