from __future__ import annotations

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infera.router.scoring import COST_COLUMNS, ROW_COLUMNS, Row, Weights, score
from tests.support.score_reference import score_reference

numbers = st.one_of(
    st.floats(0, 1e6),
    st.floats(0, 1),
    st.sampled_from([0.0, 1.0, 0.5, 2.0, -1.0, math.nan, math.inf, -math.inf, 1e300, 5e-324]),
)
rows = st.lists(numbers, min_size=ROW_COLUMNS, max_size=ROW_COLUMNS).map(lambda values: Row(*values))
weights = st.builds(Weights, *[numbers] * 6)


def cost_of(row: Row, chosen: Weights | None = None) -> tuple[float, ...]:
    chosen = chosen or Weights()
    return tuple(score(chosen, array("d", row))[0])


@given(weights, st.lists(rows, max_size=5))
def test_the_c_function_and_its_description_agree(chosen: Weights, given_rows: list[Row]) -> None:
    table = score(chosen, array("d", [value for row in given_rows for value in row]))
    assert len(table) == len(given_rows)
    for index, row in enumerate(given_rows):
        expected = score_reference(chosen, row)
        for part, value in zip(expected._fields, table[index], strict=True):
            assert value == pytest.approx(getattr(expected, part), rel=1e-9, abs=0), part
            assert math.isfinite(value)
            assert value >= 0


def test_columns_are_the_structures_fields() -> None:
    from infera_core._native import ffi

    assert tuple(name for name, _ in ffi.typeof("infera_score_candidate").fields) == Row._fields
    assert [name for name, _ in ffi.typeof("infera_score_cost").fields] == list(score_reference(Weights(), ROW)._fields)
    names = [name for name, _ in ffi.typeof("infera_score_weights").fields]
    assert names == list(Weights.__dataclass_fields__)
    assert COST_COLUMNS == 7


ROW = Row(1000.0, prefill_s_per_token=0.001)


def test_without_samples_the_ranking_is_that_of_uncached_tokens_plus_load() -> None:
    plain = Row(1000.0, hbm_tokens=400.0, queued_prefill_tokens=300.0, prefill_s_per_token=0.001)
    assert cost_of(plain)[-1] == pytest.approx(0.9)
    other = plain._replace(hbm_tokens=0.0, queued_prefill_tokens=0.0)
    assert cost_of(other)[-1] == pytest.approx(1.0)


def test_a_load_never_costs_more_than_computing() -> None:
    slow_disk = ROW._replace(disk_tokens=1000.0, disk_s_per_token=5.0)
    assert cost_of(slow_disk)[2] == pytest.approx(1.0)
    fast_ram = ROW._replace(ram_tokens=1000.0, ram_s_per_token=0.0001)
    assert cost_of(fast_ram)[2] == pytest.approx(0.1)


def test_an_overlap_weight_of_zero_leaves_load_alone() -> None:
    chosen = Weights(overlap=0.0)
    held, bare = ROW._replace(hbm_tokens=900.0), ROW
    assert cost_of(held, chosen)[-1] == cost_of(bare, chosen)[-1]
    heavy = Weights(overlap=20.0)
    assert cost_of(bare, heavy)[-1] > 20 * cost_of(held, heavy)[-1] / 3


def test_rows_must_be_whole() -> None:
    with pytest.raises(ValueError, match="no whole number of rows"):
        score(Weights(), array("d", [1.0] * (ROW_COLUMNS + 1)))
    assert len(score(Weights(), array("d"))) == 0
