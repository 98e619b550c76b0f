"""What is expected and what came: one line a case, and the sums."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.vllm_cases.engines import Answer, Engine


@dataclass
class Table:
    """All cases of a run."""

    cases: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=lambda: {"miss_overhead_pct": None, "restart_speedup": None})

    def enter(self, group: str, name: str, *, is_same: bool, wanted: object, found: object) -> None:
        """One case: same answer as without a cache, and what the engine's counters had to say."""
        is_right = is_same and wanted == found
        self.cases.append(
            {"group": group, "case": name, "identical": is_same, "wanted": wanted, "found": found, "right": is_right}
        )
        word = "ok   " if is_right else "WRONG"
        print(f"  {word} {name}: wanted {wanted}, found {found}" + ("" if is_same else ", ANSWER DIFFERS"), flush=True)

    def summary(self) -> dict[str, Any]:
        """The last line. `wrong` counts answers that differ and hits that are not the expected ones."""
        return {
            "cases": len(self.cases),
            "identical": sum(case["identical"] for case in self.cases),
            "wrong": sum(not case["right"] for case in self.cases),
            **self.figures,
        }


class Group:
    """Engines with one model and one set of flags, and the reference that answers without any cache."""

    def __init__(self, name: str, table: Table, reference: Engine, tolerance: float, block_tokens: int) -> None:
        self.name, self.table, self.reference, self.tolerance = name, table, reference, tolerance
        self.block_tokens = block_tokens
        self._known: dict[tuple[Any, ...], Answer] = {}

    def whole_blocks(self, tokens: int) -> int:
        """Tokens in the whole blocks of a prompt, one token left to compute."""
        return (tokens - 1) // self.block_tokens * self.block_tokens

    def right_answer(self, prompt: list[int], tokens: int, model: str) -> Answer:
        """What an engine without cache says; asked once for each question."""
        key = (tuple(prompt), tokens, model)
        if key not in self._known:
            self._known[key] = self.reference.ask(prompt, tokens, model=model)
        return self._known[key]

    def case(
        self, name: str, engine: Engine, prompt: list[int], wanted: tuple[int, int], *, tokens: int = 16,
        model: str = "m", **fields: Any,
    ) -> Answer:  # fmt: skip
        """Ask once; `wanted` are the prompt tokens from the engine's own cache and from kvd."""
        before = engine.hits()
        answer = engine.ask(prompt, tokens, model=model, **fields)
        after = engine.hits()
        found = (after[0] - before[0], after[1] - before[1])
        right = self.right_answer(prompt, tokens, model)
        self.table.enter(
            self.name, name, is_same=answer.is_same(right, self.tolerance), wanted=list(wanted), found=list(found)
        )
        return answer


def progress(text: str) -> None:
    """A line with the time, for whoever waits."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
