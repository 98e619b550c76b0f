"""What Infera fills in on vLLM's command line, and what it tells the agent."""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

from infera.hooks.facts import facts_path
from infera.hooks.spec import Launch, Wiring
from infera.hooks.switches import ALLOW_UNTESTED, is_on
from infera_vllm.arguments import ServeArguments
from infera_vllm.event_wiring import wire_events
from infera_vllm.offloading import SIZE_FLAG, UntranslatableError, offloading_config
from infera_vllm.render_profile import render_profile
from infera_vllm.transfer_config import NAME, Combined, combine

DEFAULT_PORT: Final = 8000
DEFAULT_SHUTDOWN_TIMEOUT_S: Final = 30
TESTED_VERSIONS: Final = ("0.32.",)
TRANSFER_FLAG: Final = "--kv-transfer-config"


def wire(launch: Launch, arguments: ServeArguments, version: str) -> Wiring:
    """Add flags to `arguments` where the user has set none; returns notes and the agent's facts.

    Raises:
        RuntimeError: when the runtime folder's path is too long for sockets.
    """
    wiring = Wiring()
    servers = [url.strip() for url in launch.environ.get("INFERA_DISCOVERY", "").split(",") if url.strip()]
    kvd_socket = _wire_connector(launch, arguments, version, wiring)
    events = wire_events(launch, arguments, wiring) if servers else {}
    _wire_reporting(arguments)
    facts: dict[str, object] = {
        "engine": "vllm",
        "engine_version": version,
        "url": _advertised_url(launch, arguments),
        "servers": servers,
        "kvd_socket": kvd_socket,
    }
    agent: dict[str, object] | None = None
    if servers and not arguments.is_set("headless"):
        agent = facts | events
        agent |= {
            "incarnation": launch.incarnation,
            "join_token": launch.environ.get("INFERA_JOIN_TOKEN"),
            "engine_facts_path": str(facts_path(launch.runtime_dir, launch.incarnation)),
            "render": msgspec.to_builtins(render_profile(arguments)),
        }
        wiring.notes.append(f"joins the fleet at {', '.join(servers)} as {agent['url']}")
    return Wiring(wiring.notes, agent, wiring.degraded, facts | {"notes": wiring.notes, "degraded": wiring.degraded})


def _wire_connector(launch: Launch, arguments: ServeArguments, version: str, wiring: Wiring) -> str | None:
    """The kvd socket when the connector is used."""
    socket = launch.environ.get("INFERA_KVD_SOCKET")
    if not socket:
        return None
    reason = _untested(version, launch)
    combined = Combined(None, reason) if reason else _combined(launch, arguments)
    if combined.config is None:
        wiring.degraded.append(f"infera-kvd is not used by this engine: {combined.reason}")
        return None
    arguments.remove(SIZE_FLAG)
    arguments.replace(TRANSFER_FLAG, json.dumps(combined.config, separators=(",", ":")))
    wiring.notes.extend(combined.notes)
    wiring.notes.append(f"KV blocks are kept in infera-kvd at {socket}")
    return socket


def _untested(version: str, launch: Launch) -> str:
    """Why the connector is not used with this version; empty when it is. Its interface changes with each release, and
    what does not fit would show in the middle of a request."""
    if version.startswith(TESTED_VERSIONS) or is_on(launch.environ, ALLOW_UNTESTED):
        return ""
    return f"vLLM {version} is no version it was tested with (0.32); {ALLOW_UNTESTED}=1 tries it all the same"


def _combined(launch: Launch, arguments: ServeArguments) -> Combined:
    """Ours, beside what the user's flags choose."""
    try:
        offloading = offloading_config(arguments, launch.environ)
        given: dict[str, Any] | None = offloading or arguments.find_json(TRANSFER_FLAG)
    except UntranslatableError as error:
        return Combined(None, str(error))
    except ValueError:
        return Combined(None, f"{TRANSFER_FLAG} is no JSON object and is left to vLLM")
    if arguments.keys_in_file(TRANSFER_FLAG):
        return Combined(None, f"{TRANSFER_FLAG} is given key by key in the file of --config; give it as one object")
    combined = combine(given)
    if offloading and combined.config is not None:
        name = offloading["kv_connector"]
        combined.notes[0] = (
            f"{SIZE_FLAG} is kept as {name} beside {NAME}; infera-kvd does the same for all engines of the host"
        )
    return combined


def _wire_reporting(arguments: ServeArguments) -> None:
    """Have the engine report cached tokens, and let running requests end on SIGTERM."""
    if not arguments.is_mentioned("enable-prompt-tokens-details"):
        arguments.add("--enable-prompt-tokens-details")
    if arguments.find("--shutdown-timeout") is None:
        arguments.add("--shutdown-timeout", str(DEFAULT_SHUTDOWN_TIMEOUT_S))


def _advertised_url(launch: Launch, arguments: ServeArguments) -> str:
    host = launch.environ.get("INFERA_ADVERTISE_HOST") or arguments.find("--host") or "127.0.0.1"
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    scheme = "https" if arguments.find("--ssl-certfile") else "http"
    return f"{scheme}://{host}:{arguments.find('--port') or DEFAULT_PORT}"
