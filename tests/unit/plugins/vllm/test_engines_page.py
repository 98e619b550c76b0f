"""docs/engines.md says what is so.

What needs vLLM is looked at in tests/inside_vllm/test_engines_page.py; tests/e2e/test_by_hand.py runs its commands.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from infera_vllm.terms import RETENTIONS, TTL_S_MAX, Terms, terms_of
from infera_vllm.transfer_config import NOT_COMBINED
from infera_vllm.wiring import TESTED_VERSIONS

PAGE = (Path(__file__).parents[4] / "docs" / "engines.md").read_text()


def rows(head: str) -> list[list[str]]:
    """The rows of the table with this head."""
    body = PAGE.split(f"\n{head}\n")[1].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in body]


def test_the_terms_of_a_request() -> None:
    table = {name.strip("`"): value for name, value, _ in rows("| in `kv_transfer_params` | value | effect |")}
    assert tuple(re.findall(r"`(\w+)`", table["infera_retention"])) == RETENTIONS
    assert table["infera_ttl_seconds"] == f"1 to {TTL_S_MAX}"
    asked = {"infera_retention": "long", "infera_ttl_seconds": TTL_S_MAX, "infera_no_load": True}
    assert set(table) == set(asked)
    assert terms_of(asked) == Terms("long", TTL_S_MAX, True)


@pytest.mark.parametrize("name", NOT_COMBINED)
def test_connectors_that_stay_alone_are_named(name: str) -> None:
    assert f"| `{name}` |" in PAGE


def test_tested_versions() -> None:
    assert f"(tested: {', '.join(version.rstrip('.') for version in TESTED_VERSIONS)})" in PAGE
