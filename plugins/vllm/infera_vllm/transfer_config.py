"""How our connector goes into vLLM's --kv-transfer-config, alone or beside the user's own.

Beside others it runs in vLLM's MultiConnector, which loads from the first child that has something and saves to all:
the user's come first. Of the outer configuration vLLM's core reads the role, the engine's id and the policy. The role
must be `kv_both` there, whatever the user's own connector is: without a consumer vLLM does not hold back blocks that a
step in flight may still write to, and a load could be overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

NAME: Final = "InferaConnector"
MULTI: Final = "MultiConnector"
MODULE: Final = "infera_vllm.connector"
BESIDE: Final = "infera_beside"
"""In our own part of the configuration: which other connectors there are, since vLLM shows each only its own part."""
POLICY: Final = "kv_load_failure_policy"
EXTRA: Final = "kv_connector_extra_config"
OUTER_KEYS: Final = ("engine_id", POLICY)
"""MultiConnector gives its children the outer engine_id, and refuses one of their own."""

EXACT_CONNECTORS: Final = frozenset(
    {
        "NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector",
        "MooncakeStoreConnector", "OffloadingConnector", "SimpleCPUOffloadConnector",
    }
)  # fmt: skip
"""They bring a request's own blocks, or look blocks up by vLLM's whole hash. Of others it is not known: vLLM's
ExampleConnector looks at tokens alone, so an adapter's request can get the base model's blocks."""

NOT_COMBINED: Final = {
    "ExampleHiddenStatesConnector": "one rank reports for all, which MultiConnector does not pass on"
}


def own_config(beside: list[str]) -> dict[str, Any]:
    """Our connector's part, with the names of the others."""
    return {
        "kv_connector": NAME,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        # vLLM's default is to fail the request; a cache must never do that.
        POLICY: "recompute",
        EXTRA: {BESIDE: beside},
    }


@dataclass
class Combined:
    """The configuration to use, or None with the reason why kvd is not used; and what to tell the user."""

    config: dict[str, Any] | None
    reason: str = ""
    notes: list[str] = field(default_factory=list)


def combine(given: Mapping[str, Any] | None) -> Combined:
    """Our connector beside what the user's --kv-transfer-config says (None for no flag)."""
    if given is None:
        return Combined(own_config([]))
    config = dict(given)
    try:
        name = str(config["kv_connector"])
        extra = dict(config.get(EXTRA) or {})
        children = [dict(child) for child in extra.get("connectors", ())] if name == MULTI else [config]
        names = [str(child["kv_connector"]) for child in children]
    except (ValueError, KeyError, TypeError):
        return Combined(None, "--kv-transfer-config names no connector and is left to vLLM")
    for other in names:
        if other in NOT_COMBINED:
            return Combined(None, f"{other} is not run beside another connector: {NOT_COMBINED[other]}")
    if NAME in names:
        return _completed(config, children, names)
    ours = own_config(names)
    if name == MULTI:
        outer = config | {EXTRA: {**extra, "connectors": [*children, ours]}}
    else:
        outer = {key: config[key] for key in OUTER_KEYS if key in config}
        child = {key: value for key, value in config.items() if key not in OUTER_KEYS}
        outer |= {"kv_connector": MULTI, EXTRA: {"connectors": [child, ours]}}
    outer |= {"kv_role": "kv_both"}
    outer.setdefault(POLICY, "recompute")
    note = f"your --kv-transfer-config is kept: {', '.join(names)} and {NAME} run side by side in {MULTI}"
    return Combined(outer, notes=[note, *_policy_notes(outer)])


def _completed(config: dict[str, Any], children: list[dict[str, Any]], names: list[str]) -> Combined:
    """A configuration that has ours in it already, with what only we know filled in."""
    others = [name for name in names if name != NAME]
    for child in children:
        if child["kv_connector"] == NAME:
            child.setdefault("kv_connector_module_path", MODULE)
            child[EXTRA] = {**(child.get(EXTRA) or {}), BESIDE: others}
    completed = config
    if config["kv_connector"] == MULTI:
        completed = config | {EXTRA: {**config[EXTRA], "connectors": children}}
    notes = [f"your --kv-transfer-config has {NAME} in it already and is kept"]
    if completed.get("kv_role") != "kv_both":
        completed = completed | {"kv_role": "kv_both"}
        notes.append("its kv_role is set to kv_both: with another, loads could be overwritten")
    return Combined(completed, notes=notes + _policy_notes(completed))


def _policy_notes(config: Mapping[str, Any]) -> list[str]:
    if config.get(POLICY) == "recompute":
        return []
    policy = config.get(POLICY, "fail, vLLM's default")
    consequence = "a request whose cached blocks cannot be loaded ends with an error; recompute has them computed"
    return [f"{POLICY} is {policy}: {consequence}"]


def inexact_connectors(kv_transfer_config: Any) -> str:
    """The connectors beside ours whose blocks may not be what their keys say, as text; empty for none.

    A configuration that Infera did not write names no others: then there may be any.
    """
    beside = (kv_transfer_config.kv_connector_extra_config or {}).get(BESIDE)
    if beside is None:
        return "another connector"
    return ", ".join(name for name in beside if name not in EXACT_CONNECTORS)
