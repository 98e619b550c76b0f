"""`infera up MODEL`: a model served on this host until somebody ends it."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from infera.tools.engine_env import ensure_vllm
from infera.tools.engine_python import EnginePython, inspect_engine_python
from infera.tools.overlay import ensure_overlay
from infera.tools.progress import say
from infera.up.fleet import Fleet
from infera.up.settings import FleetSettings, make_run_folder, served_name_of
from infera.up.signals import StopRequested, stop_on_signals
from kvd.options import Option, Positional, Program, Values, parse_count, parse_port

ENGINE_PYTHON = Option(
    "--engine-python",
    "Python of an environment that has the engine, e.g. for CUDA; without it, vLLM for the CPU is installed.",
    parse=Path,
    metavar="PATH",
)
PORT = Option("--port", "Port of the server, on 127.0.0.1.", parse=parse_port, default="8000")
KVD_MEMORY = Option("--kvd-memory", "Memory of the cache daemon.", default="2G", metavar="SIZE")

PROGRAM = Program(
    name="infera up",
    summary="Serves a model on this host: the cache daemon, N engines, and the server that routes between them.",
    positionals=(Positional("MODEL", "A model folder, or a name that the engine can download."),),
    options=(
        Option("--engines", "How many engines.", parse=parse_count, default="1"),
        Option("--engine", "Which engine.", choices=("vllm",), default="vllm"),
        ENGINE_PYTHON,
        Option("--served-model-name", "Name under which clients ask for the model; by default that of its folder."),
        PORT,
        KVD_MEMORY,
    ),
    rest="engine flags",
    epilog="Example: infera up ./my-model --engines 2 -- --max-model-len 4096",
)


def main(argv: Sequence[str]) -> int:
    """Serves until SIGINT or SIGTERM; raises ToolError when something does not start or dies."""
    values = PROGRAM.parse(argv, os.environ)
    try:
        with stop_on_signals(), Fleet(settings_of(values)) as fleet:
            try:
                fleet.start()
                _say_how_to_use(fleet.settings)
                fleet.wait(threading.Event())
            except StopRequested:
                say("stopping")
    except StopRequested:
        say("stopped before anything was started")
    say("everything has ended")
    return 0


def engine_python_of(values: Values) -> EnginePython:
    """The user's engine, or the CPU engine, installed first when it is missing. Raises ToolError."""
    chosen: Path | None = values.engine_python
    return inspect_engine_python(chosen) if chosen else ensure_vllm()


def settings_of(values: Values) -> FleetSettings:
    """Prepares what a fleet needs: engine, overlay, folder for logs."""
    engine_python = engine_python_of(values)
    model = str(Path(values.model).resolve()) if Path(values.model).is_dir() else values.model
    return FleetSettings(
        model=model,
        served_name=values.served_model_name or served_name_of(values.model),
        engine_python=engine_python,
        overlay=ensure_overlay(engine_python),
        run_folder=make_run_folder(),
        engines=values.engines,
        port=values.port,
        kvd_memory=values.kvd_memory,
        engine_flags=values.rest,
    )


def _say_how_to_use(settings: FleetSettings) -> None:
    say(f"ready: {settings.server_url}/v1 serves {settings.served_name} with {settings.engines} engine(s)")
    body = f'{{"model": "{settings.served_name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    say(f"try: curl {settings.server_url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'")
    say("Ctrl-C stops everything")
