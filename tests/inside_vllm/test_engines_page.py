"""docs/engines.md says what is so, as far as it takes vLLM to know."""

from __future__ import annotations

from pathlib import Path

from infera_vllm.stats import COUNTERS, PREFIX
from infera_vllm.worker_loads import DEADLINE_S

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()


def test_the_metrics() -> None:
    body = PAGE.split(f"\n| `{PREFIX}` | label | what |\n")[1].split("\n\n")[0].splitlines()[1:]
    table = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in body]
    assert table == [[name, "".join(labels), text] for name, (text, labels) in COUNTERS.items()]


def test_the_deadline() -> None:
    assert f"not over {DEADLINE_S:.0f} s after its order" in PAGE
