"""`infera doctor vllm`: what the hooks would make of a command line, without starting anything."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from infera.hooks import bootstrap
from infera.hooks.spec import Launch, Wiring
from kvd.options import Option, Program
from kvd.program import runtime_folder

ENGINES: Final = ("vllm",)
NOBODY: Final = "0" * 32
"""Stands for the incarnation a real launch would get."""

PROGRAM = Program(
    name="infera doctor vllm",
    summary="Says what the hooks would add to `vllm serve` with what follows --, and why. Starts nothing.",
    options=(
        Option("--kvd-socket", "Unix socket of the cache daemon.", env="INFERA_KVD_SOCKET", metavar="PATH"),
        Option("--discovery", "Servers that the engine would join.", env="INFERA_DISCOVERY", metavar="URL"),
        Option("--json", "Print one JSON object.", is_switch=True),
    ),
    rest="MODEL and vLLM flags",
)


@dataclass(frozen=True)
class Report:
    """What would be run, and what was decided on the way. ``problem`` is why nothing would be wired."""

    command: list[str]
    added: list[str]
    notes: list[str]
    uses_kvd: bool
    joins_fleet: bool
    problem: str = ""

    @property
    def is_good(self) -> bool:
        """Whether everything that the environment asks for would happen."""
        return not self.problem


def main(argv: Sequence[str]) -> int:
    """Prints the report; the status is 1 when the engine would run without what was asked for."""
    values, flags = PROGRAM.parse_known(argv[1:], os.environ)
    environ = {key: value for key, value in os.environ.items() if not key.startswith("INFERA_")}
    environ |= {"INFERA_RUNTIME_DIR": os.environ.get("INFERA_RUNTIME_DIR", str(runtime_folder(os.environ)))}
    for name, value in (("INFERA_KVD_SOCKET", values.kvd_socket), ("INFERA_DISCOVERY", values.discovery)):
        if value:
            environ[name] = value
    report = examine(argv[0], flags, environ)
    print(json.dumps(vars(report)) if values.json else "\n".join(lines_of(report)))
    return 0 if report.is_good else 1


def examine(engine: str, flags: list[str], environ: dict[str, str]) -> Report:
    """Let the plugin wire a launch that does not happen."""
    before = [engine, "serve", *flags]
    asks_kvd, asks_fleet = "INFERA_KVD_SOCKET" in environ, "INFERA_DISCOVERY" in environ
    if not asks_kvd and not asks_fleet:
        return Report(before, [], [], False, False, "neither INFERA_KVD_SOCKET nor INFERA_DISCOVERY is set: the hooks "
                      "leave the engine alone; set them, or give --kvd-socket and --discovery")  # fmt: skip
    launch = Launch(engine, list(before), [sys.executable, *before], environ, NOBODY, environ["INFERA_RUNTIME_DIR"])
    try:
        wiring = bootstrap.wire(launch) or Wiring()
    except RuntimeError as error:
        return Report(before, [], [], False, False, str(error))
    uses_kvd = "INFERA_ENGINE_FACTS" in environ
    joins = wiring.agent is not None
    problem = ""
    if asks_kvd and not uses_kvd:
        problem = "kvd would not be used: see the notes"
    elif asks_fleet and not joins:
        problem = "the engine would join no fleet: see the notes"
    added = [word for word in launch.argv if word not in before]
    return Report(launch.argv, added, wiring.notes, uses_kvd, joins, problem)


def lines_of(report: Report) -> list[str]:
    """The report for people."""
    lines = [f"{'yes' if report.uses_kvd else 'no ':<4} KV blocks are kept in infera-kvd"]
    lines += [f"{'yes' if report.joins_fleet else 'no ':<4} the engine joins the fleet"]
    lines += [f"     {note}" for note in report.notes]
    if report.problem:
        lines += [f"FAIL {report.problem}"]
    return [*lines, "", "The command as the engine would see it:", shlex.join(report.command)]
