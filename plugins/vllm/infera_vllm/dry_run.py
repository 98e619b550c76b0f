"""What the hook would make of a command line: `python -m infera_vllm.dry_run`, run by `infera doctor vllm`.

Reads one JSON object from standard input, `{"words": [...], "environ": {...}, "loads_connector": true}`, and writes
one: `version`, `serves` (whether the hook would act at all), the `command` with what is filled in, `notes`,
`degraded`, and `connector_problem`, what came of loading the connector into this vLLM. Nothing is started or written.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infera.hooks.spec import Launch
from infera_vllm.arguments import find_serve_arguments
from infera_vllm.plugin import installed_version
from infera_vllm.transfer_config import MODULE
from infera_vllm.wiring import wire
from kvd.program import runtime_folder

INCARNATION = "0" * 32


def dry_run(words: Sequence[str], environ: Mapping[str, str], version: str) -> dict[str, Any]:
    """The hook's answer to a command line, as a shell has it."""
    head, argv, original_argv = _as_python_sees_it(list(words))
    arguments = find_serve_arguments(argv, original_argv)
    if arguments is None:
        return {"version": version, "serves": False}
    variables = dict(environ)
    launch = Launch("vllm", argv, original_argv, variables, INCARNATION, str(runtime_folder(variables)))
    try:
        wiring = wire(launch, arguments, version)
    except RuntimeError as error:
        return {"version": version, "serves": True, "command": list(words), "notes": [], "degraded": [str(error)]}
    command = head + arguments.argv[1:]
    return {
        "version": version,
        "serves": True,
        "command": command,
        "notes": wiring.notes,
        "degraded": wiring.degraded,
    }


def _as_python_sees_it(words: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Words that stay before the arguments, sys.argv while the hook runs, and sys.orig_argv."""
    if words[:1] == ["serve"]:
        words = ["vllm", *words]
    if not Path(words[0]).name.startswith("python"):
        return words[:1], words, ["python", *words]
    if words[1:2] == ["-m"]:
        return words[:3], ["-m", *words[3:]], words
    return words[:2], words[1:], words


def connector_problem() -> str:
    """Why the connector cannot be loaded into this vLLM; empty when it can."""
    try:
        importlib.import_module(MODULE)
    except Exception as error:  # whatever another version of vLLM does
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> int:
    """Entry point; what vLLM prints while it is loaded goes to standard error."""
    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        answer = dry_run(asked["words"], asked["environ"], installed_version())
        if asked.get("loads_connector"):
            answer["connector_problem"] = connector_problem()
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
