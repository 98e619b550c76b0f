"""Runs in every Python process of an engine environment; acts only in the one that launches an engine.

`install` puts a finder on `sys.meta_path` that waits for an engine package. When one is imported by
the launching process, its plugin fills in command line and environment, and the agent is started.
Children inherit INFERA_INCARNATION and are left alone. Every process of the environment imports this
module, so it imports next to nothing itself.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import importlib.abc
    import subprocess
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

ENGINES = ("vllm", "sglang", "atom")
INCARNATION = "INFERA_INCARNATION"
AGENT_FACTS = "INFERA_AGENT_FACTS"


def install() -> None:
    """Wait for an engine's package to be imported."""
    if INCARNATION not in os.environ:
        sys.meta_path.insert(0, _EngineFinder())


class _EngineFinder:
    """Finds engine packages the ordinary way, and runs the hook right after their import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in ENGINES:
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _AfterImport(spec.loader, fullname)  # type: ignore[assignment]
        return spec


class _AfterImport:
    """The package's own loader, then the hook."""

    def __init__(self, loader: importlib.abc.Loader, engine: str) -> None:
        self._loader = loader
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)  # resources, source: whatever the real loader offers

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            launch(self._engine)
        except Exception as error:
            from infera.hooks.switches import REQUIRE_NATIVE, is_on

            if is_on(os.environ, REQUIRE_NATIVE):
                raise
            say(f"{self._engine} runs without Infera: {type(error).__name__}: {error}")


def say(line: str) -> None:
    """One line to standard error; logging is not configured yet."""
    sys.stderr.write(f"infera: {line}\n")


def launch(engine: str) -> None:
    """Let the engine's plugin wire this process, and start the agent.

    Raises:
        RuntimeError: when no plugin for the engine is installed; with INFERA_REQUIRE_NATIVE, when anything that was
            asked for cannot be had.
    """
    import uuid

    import pluggy

    from infera.hooks import facts, spec
    from infera.hooks.switches import REQUIRE_NATIVE, is_on

    if not (os.environ.get("INFERA_KVD_SOCKET") or os.environ.get("INFERA_DISCOVERY")):
        return
    manager = pluggy.PluginManager(spec.PROJECT)
    manager.add_hookspecs(spec.EngineHooks)
    if not manager.load_setuptools_entrypoints(spec.ENTRY_POINT_GROUP):
        raise RuntimeError(f"no plugin for {engine} is installed; add infera-plugin-{engine} to this environment")
    runtime_dir = make_runtime_dir()
    launched = spec.Launch(engine, sys.argv, list(sys.orig_argv), os.environ, uuid.uuid4().hex, runtime_dir)
    wiring = manager.hook.infera_engine_launched(launch=launched)
    if wiring is None:
        return
    if wiring.degraded and is_on(os.environ, REQUIRE_NATIVE):
        raise RuntimeError(f"{REQUIRE_NATIVE} is set, and {'; '.join(wiring.degraded)}")
    path = facts.facts_path(runtime_dir, launched.incarnation)
    os.environ |= {
        INCARNATION: launched.incarnation,
        "INFERA_RUNTIME_DIR": runtime_dir,
        facts.ENGINE_FACTS: str(path),
    }
    try:
        facts.begin_facts(path, wiring.facts)
    except OSError as error:
        say(f"`infera doctor` will not know this engine: {error}")
    for note in [*wiring.notes, *wiring.degraded]:
        say(note)
    if wiring.agent is not None:
        start_agent(wiring.agent)


def make_runtime_dir() -> str:
    """The folder for sockets, private to this user.

    Raises:
        RuntimeError: when it belongs to somebody else.
    """
    from kvd.program import runtime_folder

    folder = runtime_folder(os.environ)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user; set INFERA_RUNTIME_DIR to a folder of yours")
    return str(folder)


def start_agent(facts: dict[str, object]) -> subprocess.Popen[bytes]:
    """Start the agent, in a session of its own so that a Ctrl-C meant for the engine does not end it
    before it has deregistered."""
    import json
    import subprocess

    environ = dict(os.environ)
    environ[AGENT_FACTS] = json.dumps(facts | {"launcher_pid": os.getpid()})
    return subprocess.Popen(
        [sys.executable, "-m", "infera.engine.agent"],
        env=environ,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
