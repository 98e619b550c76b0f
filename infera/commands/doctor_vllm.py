"""`infera doctor vllm`: what the hooks would make of a vLLM command line, and what they made of running engines."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infera import __version__
from infera.commands.findings import Finding, ask_kvd, print_findings
from infera.engine.launch import ENGINE_OPTIONS
from infera.hooks.facts import live_engines
from infera.tools.engine_env import installed_vllm
from infera.tools.engine_python import EnginePython, environment_without_infera, inspect_engine_python
from infera.tools.errors import ToolError
from infera.tools.overlay import ensure_overlay
from kvd.options import EXIT_USAGE, Option, Program, Values
from kvd.program import JSON, runtime_folder

DRY_RUN_LIMIT_S = 180.0
"""Loading vLLM takes most of it, on a slow disk."""
PASSED_ON = ("INFERA_", "VLLM_USE_SIMPLE_KV_OFFLOAD")
EXAMPLE = ("vllm", "serve", "MODEL")

PROGRAM = Program(
    name="infera doctor vllm",
    summary="Shows what would be wired into a vLLM command line given after --, and what running engines were given.",
    options=(
        Option("--kvd-socket", "Unix socket of the cache daemon.", env="INFERA_KVD_SOCKET", metavar="PATH"),
        Option("--discovery", "URLs of the servers to join, comma-separated.", env="INFERA_DISCOVERY", metavar="URLS"),
        *(option for option in ENGINE_OPTIONS if option.name in ("engine_python", "overlay")),
        Option("--no-load", "Do not load vLLM to see whether the connector fits; quicker.", is_switch=True),
        JSON,
    ),
    epilog="infera doctor vllm -- vllm serve MODEL --port 8101",
    rest="the command line, from vllm or python on; vllm serve MODEL when there is none",
)


def main(argv: Sequence[str]) -> int:
    """Prints the report; the status is 1 when something that was asked for cannot be had."""
    values = PROGRAM.parse(argv, os.environ)
    words = list(values.rest) or list(EXAMPLE)
    environ = _environment(values)
    findings = [Finding("infera", None, __version__)]
    answer: dict[str, Any] | None = None
    try:
        engine = _engine(values)
        answer = _dry_run(values, engine, words, environ)
    except ToolError as error:
        findings.append(Finding("engine", False, str(error)))
    else:
        if not answer["serves"]:
            return _misuse(words)
        findings.append(Finding("engine", True, f"vLLM {answer['version']}, {engine.python}"))
        findings += _wiring(answer, environ, loads=not values.no_load)
    findings.append(ask_kvd(values.kvd_socket))
    engines = live_engines(runtime_folder(os.environ))
    findings += [_running(facts) for facts in engines]
    if values.json:
        report = {"findings": [finding.as_dict() for finding in findings], "engines": engines}
        print(json.dumps(report | {"command": answer["command"] if answer else None}))
    else:
        print_findings(findings)
        if answer:
            print(f"\n{shlex.join(answer['command'])}")
    return 1 if any(finding.is_good is False for finding in findings) else 0


def _misuse(words: list[str]) -> int:
    import sys

    sys.stderr.write(
        f"{PROGRAM.name}: {shlex.join(words)!r} does not serve, so nothing is wired into it; "
        f"give a command like: {shlex.join(EXAMPLE)}\n"
    )
    return EXIT_USAGE


def _environment(values: Values) -> dict[str, str]:
    """What of the environment counts for the hooks, with the flags' values in it."""
    found = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    for name, value in (("INFERA_KVD_SOCKET", values.kvd_socket), ("INFERA_DISCOVERY", values.discovery)):
        found.pop(name, None)
        if value:
            found[name] = value
    return found


def _engine(values: Values) -> EnginePython:
    if values.engine_python:
        return inspect_engine_python(Path(values.engine_python))
    found = installed_vllm()
    if found is None:
        raise ToolError(
            "no Python with vLLM is known; name one with --engine-python, or: infera engine-env install vllm"
        )
    return found


def _dry_run(values: Values, engine: EnginePython, words: list[str], environ: dict[str, str]) -> dict[str, Any]:
    overlay = values.overlay or ensure_overlay(engine)
    asked = {"words": words, "environ": environ, "loads_connector": not values.no_load}
    variables = environment_without_infera() | {"PYTHONPATH": str(overlay), "VLLM_NO_USAGE_STATS": "1"}
    command = [str(engine.python), "-m", "infera_vllm.dry_run"]
    try:
        done = subprocess.run(
            command, input=json.dumps(asked), env=variables, capture_output=True, text=True, timeout=DRY_RUN_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolError(f"{engine.python} could not be asked: {error}") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise ToolError(f"{overlay} does not work with {engine.python}: {last}; build it anew: infera overlay")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _wiring(answer: dict[str, Any], environ: dict[str, str], *, loads: bool) -> list[Finding]:
    findings = []
    if loads:
        problem = answer["connector_problem"]
        findings.append(Finding("connector", not problem, problem or f"loads into vLLM {answer['version']}"))
    if not environ.get("INFERA_KVD_SOCKET") and not environ.get("INFERA_DISCOVERY"):
        cure = "set INFERA_KVD_SOCKET for the cache, INFERA_DISCOVERY for a fleet"
        return [*findings, Finding("wiring", False, f"the hooks do nothing: {cure}")]
    findings += [Finding("wiring", None, note) for note in answer["notes"]]
    findings += [Finding("wiring", False, reason) for reason in answer["degraded"]]
    if environ.get("INFERA_KVD_SOCKET"):
        what = "what is kept follows from the model's cache groups, when the engine starts; see docs/engines.md"
        findings.append(Finding("layout", None, what))
    return findings


def _running(facts: dict[str, Any]) -> Finding:
    """One line for an engine that runs: is it kept, and how."""
    who = f"{facts.get('url', 'unknown address')} (process {facts['pid']}, vLLM {facts.get('engine_version', '?')})"
    problems = [*facts.get("degraded", []), *([facts["refused"]] if facts.get("refused") else [])]
    if problems:
        return Finding("running engine", False, f"{who}: {'; '.join(problems)}")
    if facts.get("layout"):
        return Finding("running engine", True, f"{who}: kept in {facts.get('kvd_socket')}: {facts['layout']}")
    return Finding("running engine", None, f"{who}: {'; '.join(facts.get('notes', []))}")
