"""What an engine plugin implements. Plugins are found through the entry-point group `infera.engine`."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field

import pluggy

PROJECT = "infera"
ENTRY_POINT_GROUP = "infera.engine"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass
class Launch:
    """One launch of an engine, seen from its first process.

    `argv` and `environ` may be changed in place: nothing has read them yet. `incarnation` is 32 hex
    digits, new for each launch. `original_argv` is the whole command line (`sys.orig_argv`).
    """

    engine: str
    argv: list[str]
    original_argv: list[str]
    environ: MutableMapping[str, str]
    incarnation: str
    runtime_dir: str


@dataclass(frozen=True)
class Wiring:
    """What a plugin made of a launch.

    `notes` are one line each: what was filled in, what was left alone, and why. `agent` holds what
    the agent process needs to know (see `infera.engine.agent`), or is None when there is nothing to
    register: a headless node, or no discovery configured. `degraded` says, a line each, what was asked
    for and cannot be had: with INFERA_REQUIRE_NATIVE the engine then does not start. `facts` are left
    for `infera doctor`, see `infera.hooks.facts`.
    """

    notes: list[str] = field(default_factory=list)
    agent: dict[str, object] | None = None
    degraded: list[str] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)


class EngineHooks:
    """Hook specifications."""

    @hookspec(firstresult=True)
    def infera_engine_launched(self, launch: Launch) -> Wiring | None:
        """Wire an engine whose package is being imported by the process that launches it.

        Return None when this is not that plugin's engine, or not a serving process. Called before
        the engine has parsed anything. Exceptions switch the wiring off (or, with
        INFERA_REQUIRE_NATIVE, end the process).
        """
