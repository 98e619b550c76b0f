"""`make bench-tokenizing`: what a prompt of 131k tokens costs the others, and what a repeated prefix costs.

Renders chats with a real model's tokenizer in one process, as a server does. Figures that depend on the machine come
with a ratio against the same work alone or fresh. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from typing import Any

from infera.prompt.outcome import RenderedRequest
from infera.prompt.renderer import PromptRenderer
from infera.tools.bench.results import keep
from infera.tools.models import prepare_smollm2

ROUNDS = 3 if os.environ.get("QUICK") else 15
LONG_TOKENS = 131_072
SHORT_CHARACTERS = 2_000
CONVERSATION_CHARACTERS = 64_000
TURN_CHARACTERS = 3_200
CHARACTERS_PER_TOKEN = 1.81  # of the text made here
TICK_S = 0.001
_WORDS = [
    "the",
    "model",
    "reads",
    "def",
    "return",
    "import",
    "value",
    "of",
    "a",
    "request,",
    "and",
    "writes:",
    "tokens;",
    "blocks",
    "keys",
    "3.14",
    "42",
    "(x",
    "+",
    "y)",
    "naïve",
]


class Bench:
    """One renderer and a supply of text that no cache has seen."""

    def __init__(self) -> None:
        self._random = random.Random(7)
        self.renderer = PromptRenderer()

    def text(self, characters: int) -> str:
        """Fresh text of about this length."""
        words: list[str] = []
        length = 0
        while length < characters:
            words.append(self._random.choice(_WORDS) + str(self._random.randrange(1000)))
            length += len(words[-1]) + 1
        return " ".join(words)

    async def render_ms(self, messages: list[dict[str, Any]]) -> tuple[float, int]:
        """Milliseconds until a chat is rendered, and its tokens."""
        started_s = time.perf_counter()
        outcome = await self.renderer.render("m", "chat", {"messages": messages}, context_tokens_max=None)
        assert isinstance(outcome, RenderedRequest), outcome
        return (time.perf_counter() - started_s) * 1000, outcome.token_count

    async def short_ms(self) -> float:
        """A fresh short chat."""
        return (await self.render_ms(_user(self.text(SHORT_CHARACTERS))))[0]


def _user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def _lag_ms(stop: asyncio.Event) -> float:
    """The longest time by which the event loop came late to a timer."""
    longest_s = 0.0
    while not stop.is_set():
        started_s = time.perf_counter()
        await asyncio.sleep(TICK_S)
        longest_s = max(longest_s, time.perf_counter() - started_s - TICK_S)
    return longest_s * 1000


async def beside_a_long_prompt(bench: Bench) -> dict[str, list[float]]:
    """Short chats and the event loop, alone and while long prompts are rendered."""
    found: dict[str, list[float]] = {name: [] for name in ("alone", "beside", "lag_alone", "lag", "long", "tokens")}
    for _ in range(ROUNDS):
        for kind in ("alone", "beside"):
            text = bench.text(int(LONG_TOKENS * CHARACTERS_PER_TOKEN))
            stop = asyncio.Event()
            lag = asyncio.create_task(_lag_ms(stop))
            long = asyncio.create_task(bench.render_ms(_user(text))) if kind == "beside" else None
            await asyncio.sleep(0.005)
            for _ in range(10):
                found[kind].append(await bench.short_ms())
                if long is not None and long.done():
                    break
            if long is not None:
                duration_ms, tokens = await long
                found["long"].append(duration_ms)
                found["tokens"].append(tokens)
            stop.set()
            found["lag" if kind == "beside" else "lag_alone"].append(await lag)
    return found


async def repeated_prefix(bench: Bench) -> dict[str, list[float]]:
    """A conversation of 64 kB: wholly fresh, and with one new turn of 5% behind what was rendered before."""
    found: dict[str, list[float]] = {"fresh": [], "repeated": [], "tokens_per_ms": []}
    for _ in range(ROUNDS):
        turns = CONVERSATION_CHARACTERS // TURN_CHARACTERS
        messages = [
            {"role": ("user", "assistant")[number % 2], "content": bench.text(TURN_CHARACTERS)}
            for number in range(turns - 1)
        ]
        duration_ms, tokens = await bench.render_ms(messages)
        found["fresh"].append(duration_ms)
        found["tokens_per_ms"].append(tokens / duration_ms)
        messages.append({"role": "user", "content": bench.text(TURN_CHARACTERS)})
        found["repeated"].append((await bench.render_ms(messages))[0])
    return found


async def _measure() -> None:
    bench = Bench()
    await bench.renderer.prepare("m", str(prepare_smollm2()), "")
    await bench.short_ms()
    beside = await beside_a_long_prompt(bench)
    prefix = await repeated_prefix(bench)
    bench.renderer.close()
    median = statistics.median
    figures: dict[str, object] = {
        "long_tokens": int(median(beside["tokens"])),
        "long_ms": round(median(beside["long"]), 1),
        "loop_lag_ms": round(max(beside["lag"]), 2),
        "loop_lag_alone_ms": round(max(beside["lag_alone"]), 2),
        "short_alone_p50_ms": round(median(beside["alone"]), 2),
        "short_beside_p50_ms": round(median(beside["beside"]), 2),
        "short_beside_max_ms": round(max(beside["beside"]), 2),
        "short_ratio": round(median(beside["beside"]) / median(beside["alone"]), 2),
        "fresh_64k_ms": round(median(prefix["fresh"]), 2),
        "repeated_64k_ms": round(median(prefix["repeated"]), 2),
        "repeated_ratio": round(median(prefix["repeated"]) / median(prefix["fresh"]), 3),
    }
    for name, value in figures.items():
        print(f"{name:22} {value}")
    keep("tokenizing", figures, {"beside": beside, "prefix": prefix})
    print(json.dumps(figures))


def main() -> None:
    """Measure and print."""
    asyncio.run(_measure())


if __name__ == "__main__":
    main()
