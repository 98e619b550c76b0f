"""How our connector goes into vLLM's --kv-transfer-config, alone or beside the user's own."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

NAME: Final = "InferaConnector"
MULTI: Final = "MultiConnector"
MODULE: Final = "infera_vllm.connector"
BESIDE: Final = "infera_beside"
"""In our own part of the configuration: which other connectors there are, since vLLM shows each only its own part."""
POLICY: Final = "kv_load_failure_policy"

EXACT_CONNECTORS: Final = frozenset(
    {"NixlConnector", "MooncakeConnector", "MoRIIOConnector", "OffloadingConnector", "SimpleCPUOffloadConnector"}
)
"""They bring a request's own blocks, or look blocks up by vLLM's whole hash. Of others it is not known: vLLM's
ExampleConnector looks at tokens alone, so an adapter's request can get the base model's blocks."""


def own_config(beside: list[str]) -> dict[str, Any]:
    """Our connector's part, with the names of the others."""
    return {
        "kv_connector": NAME,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        # vLLM's default is to fail the request; a cache must never do that.
        POLICY: "recompute",
        "kv_connector_extra_config": {BESIDE: beside},
    }


@dataclass
class Combined:
    """The configuration to use (None: leave what is there), whether kvd is used, and what to tell the user."""

    config: dict[str, Any] | None
    uses_kvd: bool
    notes: list[str] = field(default_factory=list)


def combine(given: str | None) -> Combined:
    """Our connector beside what the user's --kv-transfer-config says (JSON; None for no flag)."""
    if given is None:
        return Combined(own_config([]), uses_kvd=True)
    try:
        config = json.loads(given)
        name = config["kv_connector"]
        extra = config.get("kv_connector_extra_config") or {}
        children = extra.get("connectors", []) if name == MULTI else []
        names = [str(child["kv_connector"]) for child in children]
    except (ValueError, KeyError, TypeError, AttributeError):
        return Combined(None, False, ["--kv-transfer-config is not understood and is left to vLLM: kvd is not used"])
    if name == NAME or NAME in names:
        return Combined(None, True, _policy_notes(config))
    if name == MULTI:
        ours = own_config(names)
        combined = {**config, "kv_connector_extra_config": {**extra, "connectors": [*children, ours]}}
    else:
        names = [str(name)]
        combined = _beside(config, own_config(names))
    combined.setdefault(POLICY, "recompute")
    notes = [f"your --kv-transfer-config is kept: {', '.join(names)} and {NAME} run side by side in {MULTI}"]
    return Combined(combined, True, notes + _policy_notes(combined))


def _beside(config: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """A MultiConnector of the user's and ours. The user's comes first: vLLM loads from the first that has something."""
    outer: dict[str, Any] = {
        key: config[key] for key in ("engine_id", "kv_buffer_device", "kv_role", POLICY) if key in config
    }
    return {
        "kv_role": "kv_both",
        **outer,
        "kv_connector": MULTI,
        "kv_connector_extra_config": {"connectors": [config, ours]},
    }


def _policy_notes(config: dict[str, Any]) -> list[str]:
    if config.get(POLICY) == "recompute":
        return []
    policy = config.get(POLICY, "fail, the default")
    return [f"{POLICY} is {policy}: a request whose cached blocks cannot be loaded fails; set it to recompute"]


def inexact_connectors(kv_transfer_config: Any) -> str:
    """The connectors beside ours whose blocks may not be what their keys say, as text; empty for none.

    A configuration that Infera did not write names no others: then there may be any.
    """
    beside = (kv_transfer_config.kv_connector_extra_config or {}).get(BESIDE)
    if beside is None:
        return "another connector"
    return ", ".join(name for name in beside if name not in EXACT_CONNECTORS)
