"""How an engine publishes its KV events: filled in, or the user's own where they can be subscribed to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from infera.hooks.spec import Launch, Wiring
from infera_vllm.arguments import ServeArguments

SOCKET_PATH_BYTES_MAX: Final = 107
EVENTS_FLAG: Final = "--kv-events-config"


def wire_events(launch: Launch, arguments: ServeArguments, wiring: Wiring) -> dict[str, object]:
    """Have events published; returns what the agent must know of them, empty without them.

    Raises:
        RuntimeError: when the runtime folder's path is too long for sockets.
    """
    if arguments.find(EVENTS_FLAG) is not None:
        return _given_events(arguments, wiring)
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
    arguments.add(EVENTS_FLAG, json.dumps(config, separators=(",", ":")))
    return {
        "event_topic": topic,
        "event_endpoint": config["endpoint"],
        "replay_endpoint": config["replay_endpoint"],
    }


def _given_events(arguments: ServeArguments, wiring: Wiring) -> dict[str, object]:
    try:
        config = arguments.find_json(EVENTS_FLAG) or {}
    except ValueError:
        config = {}
    usable = config.get("enable_kv_cache_events") and config.get("publisher", "zmq") == "zmq"
    if usable and config.get("topic") and config.get("endpoint"):
        wiring.notes.append(f"{EVENTS_FLAG} is yours; the router subscribes to it as it is")
        return {
            "event_topic": config["topic"],
            "event_endpoint": config["endpoint"],
            "replay_endpoint": config.get("replay_endpoint"),
        }
    wiring.degraded.append(
        f"{EVENTS_FLAG} is yours and names no ZMQ topic and endpoint: the router cannot see this engine's cache"
    )
    return {}
