from __future__ import annotations

import pytest

from infera.router.place import usable_tokens
from tests.support.placement import option


@pytest.mark.parametrize(
    ("length", "held", "expected"), [(64, 64, 48), (65, 64, 64), (16, 16, 0), (0, 0, 0), (100, 32, 32)]
)
def test_the_last_token_is_always_computed(length: int, held: int, expected: int) -> None:
    assert usable_tokens(option(1, length, hbm=held)) == (expected, 0, 0, 0)


def test_the_last_block_is_taken_from_the_lowest_tier() -> None:
    assert usable_tokens(option(1, 64, hbm=32, ram=32)) == (32, 16, 0, 0)
    assert usable_tokens(option(1, 200, hbm=32, ram=32, disk=48, peer=16)) == (32, 32, 48, 16)
