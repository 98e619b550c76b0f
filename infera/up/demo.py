"""`infera demo`: a real model, two real engines, and what the cache saves, measured from outside.

Four requests with the same long prompt: cold; on the engine that has it; on the other engine, which takes it from the
cache daemon; and after both engines were restarted. The text must be the same each time. The last line is one JSON
object.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infera.tools.errors import ToolError
from infera.tools.models import prepare_smollm2
from infera.tools.overlay import ensure_overlay
from infera.tools.progress import say
from infera.tools.sources import checkout_folder
from infera.up.fleet import Fleet
from infera.up.ports import require_free_port
from infera.up.settings import FleetSettings, make_run_folder
from infera.up.signals import StopRequested, stop_on_signals
from infera.up.stream import Measured, stream_chat
from infera.up.up import ENGINE_PYTHON, KVD_MEMORY, PORT, engine_python_of
from kvd.options import Program

SERVED_NAME = "SmolLM2-135M-Instruct"
ENGINES = 2
# In bfloat16 the rounding of a prefill depends on how many tokens are computed at once, which can turn a near tie of
# two words; in float32 the text is the same whether a prompt is computed or loaded: a difference is a wrong byte.
ENGINE_FLAGS = ("--max-model-len", "4096", "--dtype", "float32")
PROMPT_LETTERS = 9300
ANSWER_TOKENS = 48
# Saves run off the critical path and events travel: a client that asks again the same instant may be too early.
SETTLE_S = 2.0
CACHED_SHARE_MIN = 0.9
QUESTION = "\n\nIn one or two sentences: what does this licence allow?"
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

PROGRAM = Program(
    name="infera demo",
    summary="Serves SmolLM2-135M-Instruct with two engines and shows what the cache saves, with real requests.",
    options=(ENGINE_PYTHON, PORT, KVD_MEMORY),
)


@dataclass
class Results:
    """The rows of the table in order, and what is wrong with them."""

    rows: dict[str, Measured] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def is_identical(self) -> bool:
        """Whether every row has the text of the first."""
        return len({row.text for row in self.rows.values()}) == 1


def main(argv: Sequence[str]) -> int:
    """Runs the demo; the status is 0 when everything is as it should be. Raises ToolError."""
    values = PROGRAM.parse(argv, os.environ)
    require_free_port(values.port)  # before minutes of installation, not after
    try:
        with stop_on_signals():
            engine_python = engine_python_of(values)
            settings = FleetSettings(
                model=str(prepare_smollm2(engine_python=None if engine_python.is_cpu else engine_python)),
                served_name=SERVED_NAME,
                engine_python=engine_python,
                overlay=ensure_overlay(engine_python),
                run_folder=make_run_folder(),
                engines=ENGINES,
                port=values.port,
                kvd_memory=values.kvd_memory,
                keeps_arena=False,
                engine_flags=ENGINE_FLAGS,
            )
            with Fleet(settings) as fleet:
                fleet.start()
                results = measure(fleet)
    except StopRequested:
        say("stopped")
        return EXIT_INTERRUPTED
    return report(results)


def measure(fleet: Fleet) -> Results:
    """Sends the requests and checks each row."""
    results = Results()
    prompt = real_text()[:PROMPT_LETTERS] + QUESTION
    _warm_up(fleet)
    cold = _request(fleet, results, "cold", "a prompt that nobody has", prompt)
    hbm = _request(fleet, results, "hbm", "the same again: the router should pick the same engine", prompt)
    if hbm.worker_id != cold.worker_id:
        results.problems.append(f"the router picked {hbm.worker_id}, but {cold.worker_id} has the prompt")
    others = [worker["worker_id"] for worker in fleet.workers() if worker["worker_id"] != cold.worker_id]
    if len(others) != ENGINES - 1:
        raise ToolError(f"expected {ENGINES} workers, found {[cold.worker_id, *others]}")
    other = _request(fleet, results, "other engine", f"the same, forced onto {others[0]}", prompt, others[0])
    if other.worker_id != others[0]:
        results.problems.append(f"the request was forced onto {others[0]}, but {other.worker_id} answered it")
    fleet.stop_engines()
    fleet.start_engines()
    _warm_up(fleet)
    _request(fleet, results, "restart", "the same, after both engines were restarted", prompt)
    _check_rows(results)
    return results


def report(results: Results) -> int:
    """Prints table, problems, and the closing JSON line; returns the exit status."""
    print(_table(results))
    for problem in results.problems:
        print(f"PROBLEM: {problem}")
    names = {"cold": "cold", "hbm": "hbm", "other engine": "other_engine", "restart": "restart"}
    closing: dict[str, object] = {f"{key}_ttft_s": round(results.rows[row].ttft_s, 3) for row, key in names.items()}
    print(json.dumps({**closing, "identical": results.is_identical()}), flush=True)
    return EXIT_FAILED if results.problems else 0


def real_text() -> str:
    """A text of about 2,400 tokens that every installation has: the licence. Raises ToolError when it is missing."""
    root = checkout_folder()
    if root is not None:
        return (root / "LICENSE").read_text().lstrip()
    for file in importlib.metadata.files("infera") or ():
        if file.name == "LICENSE":
            return Path(str(file.locate())).read_text().lstrip()
    raise ToolError("the file LICENSE is missing from this installation of infera; install it again")


def _request(
    fleet: Fleet, results: Results, row: str, what: str, prompt: str, worker_id: str | None = None
) -> Measured:
    say(f"request: {what}")
    messages = [{"role": "user", "content": prompt}]
    measured = stream_chat(fleet.settings.port, SERVED_NAME, messages, max_tokens=ANSWER_TOKENS, worker_id=worker_id)
    say(f"request: first token after {measured.ttft_s:.2f} s from {measured.worker_id}")
    results.rows[row] = measured
    time.sleep(SETTLE_S)
    return measured


def _warm_up(fleet: Fleet) -> None:
    """One short request to each engine: what an engine does at its very first request is not what we measure."""
    say("warming up the engines with a short request each")
    # A system message of its own: the template's default one would give the cold prompt a first block for free.
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
    for worker in fleet.workers():
        stream_chat(fleet.settings.port, SERVED_NAME, messages, max_tokens=4, worker_id=worker["worker_id"])


def _check_rows(results: Results) -> None:
    cold = results.rows["cold"]
    if cold.cached_tokens:
        results.problems.append(f"the cold prompt had {cold.cached_tokens} cached tokens; it should have none")
    for name, row in results.rows.items():
        if row.text != cold.text:
            results.problems.append(f"row {name!r} has another text than the cold run: {row.text!r}, not {cold.text!r}")
        if row is cold:
            continue
        if (row.cached_tokens or 0) < CACHED_SHARE_MIN * row.prompt_tokens:
            results.problems.append(f"row {name!r} had {row.cached_tokens} of {row.prompt_tokens} tokens cached")
        if row.ttft_s >= cold.ttft_s:
            results.problems.append(f"row {name!r} took {row.ttft_s:.2f} s, no less than the cold {cold.ttft_s:.2f} s")


def _table(results: Results) -> str:
    head = ("row", "worker", "TTFT s", "prompt tokens", "cached tokens", "same text")
    cold_text = results.rows["cold"].text
    lines = [head]
    for name, row in results.rows.items():
        cached = "not reported" if row.cached_tokens is None else str(row.cached_tokens)
        same = "yes" if row.text == cold_text else "NO"
        lines.append((name, row.worker_id, f"{row.ttft_s:.3f}", str(row.prompt_tokens), cached, same))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    drawn = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    drawn.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(["", *drawn, "", f"answer: {' '.join(cold_text.split())}", ""])
