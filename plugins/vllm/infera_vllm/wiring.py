"""What Infera fills in on vLLM's command line, and what it tells the agent."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from infera.hooks.spec import Launch, Wiring
from infera_vllm.arguments import ServeArguments
from infera_vllm.render_profile import render_profile
from infera_vllm.transfer_config import combine

SOCKET_PATH_BYTES_MAX = 107
ENGINE_FACTS = "INFERA_ENGINE_FACTS"
DEFAULT_PORT = 8000
DEFAULT_SHUTDOWN_TIMEOUT_S = 30


def wire(launch: Launch, arguments: ServeArguments, version: str) -> Wiring:
    """Add flags to `arguments` where the user has set none; returns notes and the agent's facts.

    Raises:
        RuntimeError: when the runtime folder's path is too long for sockets.
    """
    wiring = Wiring()
    headless = arguments.find("--headless") is not None
    kvd_socket = _wire_connector(launch, arguments, wiring)
    events = _wire_events(launch, arguments, wiring)
    _wire_reporting(arguments)
    servers = [url.strip() for url in launch.environ.get("INFERA_DISCOVERY", "").split(",") if url.strip()]
    if not servers or headless:
        return wiring
    agent: dict[str, object] = {
        "incarnation": launch.incarnation,
        "engine": "vllm",
        "engine_version": version,
        "url": _advertised_url(launch, arguments),
        "servers": servers,
        "join_token": launch.environ.get("INFERA_JOIN_TOKEN"),
        "kvd_socket": kvd_socket,
        "engine_facts_path": launch.environ.get(ENGINE_FACTS),
        "render": msgspec.to_builtins(render_profile(arguments)),
    }
    wiring.notes.append(f"joins the fleet at {', '.join(servers)} as {agent['url']}")
    return Wiring(wiring.notes, agent | events)


def _wire_connector(launch: Launch, arguments: ServeArguments, wiring: Wiring) -> str | None:
    """The kvd socket when the connector was added."""
    socket = launch.environ.get("INFERA_KVD_SOCKET")
    if not socket:
        return None
    if arguments.find("--kv-offloading-size") is not None:
        wiring.notes.append("--kv-offloading-size makes vLLM choose its own connector: kvd is not used by this engine")
        return None
    combined = combine(_given_transfer_config(arguments))
    wiring.notes.extend(combined.notes)
    if not combined.uses_kvd:
        return None
    if combined.config is not None:
        arguments.replace("--kv-transfer-config", json.dumps(combined.config, separators=(",", ":")))
    launch.environ[ENGINE_FACTS] = str(Path(launch.runtime_dir) / f"engine-{launch.incarnation}.json")
    wiring.notes.append(f"KV blocks are kept in infera-kvd at {socket}")
    return socket


def _given_transfer_config(arguments: ServeArguments) -> str | None:
    """The user's --kv-transfer-config as JSON, also where it is given key by key (--kv-transfer-config.key value)."""
    whole = arguments.find("--kv-transfer-config", dotted=False)
    keys = arguments.find_keys("--kv-transfer-config")
    if not keys:
        return whole
    return json.dumps(keys) if whole is None else "both a JSON value and single keys"


def _wire_events(launch: Launch, arguments: ServeArguments, wiring: Wiring) -> dict[str, object]:
    """What the agent must know about KV events; empty without them."""
    if not launch.environ.get("INFERA_DISCOVERY"):
        return {}
    given = arguments.find("--kv-events-config")
    if given is not None:
        return _given_events(given, wiring)
    stem = Path(launch.runtime_dir) / f"kv-{launch.incarnation[:12]}"
    publish, replay = f"{stem}.pub", f"{stem}.replay"
    if len(replay.encode()) > SOCKET_PATH_BYTES_MAX - 8:  # room for a rank's suffix
        raise RuntimeError(
            f"{launch.runtime_dir} is too long a path for sockets; set INFERA_RUNTIME_DIR to a shorter one"
        )
    topic = f"kv@{launch.incarnation}"
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{publish}",
        "replay_endpoint": f"ipc://{replay}",
        "topic": topic,
    }
    arguments.add("--kv-events-config", json.dumps(config, separators=(",", ":")))
    return {
        "event_topic": topic,
        "event_endpoint": config["endpoint"],
        "replay_endpoint": config["replay_endpoint"],
    }


def _given_events(given: str, wiring: Wiring) -> dict[str, object]:
    try:
        config = json.loads(given)
        usable = config.get("enable_kv_cache_events") and config.get("publisher", "zmq") == "zmq"
        if usable and config.get("topic") and config.get("endpoint"):
            wiring.notes.append("--kv-events-config is yours; the router subscribes to it as it is")
            return {
                "event_topic": config["topic"],
                "event_endpoint": config["endpoint"],
                "replay_endpoint": config.get("replay_endpoint"),
            }
    except (ValueError, AttributeError):
        pass
    wiring.notes.append(
        "--kv-events-config is yours and names no ZMQ topic and endpoint: the router cannot see this engine's cache"
    )
    return {}


def _wire_reporting(arguments: ServeArguments) -> None:
    """Have the engine report cached tokens, and let running requests end on SIGTERM."""
    if arguments.find("--enable-prompt-tokens-details") is None:
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
