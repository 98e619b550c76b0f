"""What all launchers share: options, and the environment that makes an unmodified engine a worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvd.options import Option, OptionError, Values, parse_port

ENGINE_OPTIONS = (
    Option(
        "--engine-python",
        "Python of the environment that has the engine (default: the one Infera installs).",
        env="INFERA_ENGINE_PYTHON",
        metavar="PATH",
        section="Engine",
    ),
    Option(
        "--overlay",
        "Folder with Infera's payload for that Python (default: made when missing).",
        env="INFERA_OVERLAY",
        metavar="DIR",
        section="Engine",
    ),
    Option(
        "--require-native",
        "Do not start when anything of Infera that is asked for cannot be had.",
        is_switch=True,
        env="INFERA_REQUIRE_NATIVE",
        section="Engine",
    ),
    Option(
        "--allow-untested",
        "Use the connector with versions of the engine that it was not tested with.",
        is_switch=True,
        env="INFERA_ALLOW_UNTESTED",
        section="Engine",
    ),
)

OPTIONS = (
    Option("--model", "Model folder or name, as the engine takes it.", is_required=True, metavar="MODEL"),
    Option("--served-model-name", "Name that clients use (default: the model).", metavar="NAME"),
    Option("--host", "Address the engine listens on.", default="127.0.0.1", metavar="HOST"),
    Option("--port", "Port the engine listens on.", parse=parse_port, default="30000", metavar="PORT"),
    Option(
        "--advertise-host",
        "Host name or address at which servers reach this engine (default: the one it listens on).",
        env="INFERA_ADVERTISE_HOST",
        metavar="HOST",
        section="Fleet",
    ),
    Option(
        "--discovery-backend",
        "How servers find this worker.",
        choices=("embedded", "etcd", "kubernetes"),
        default="embedded",
        section="Fleet",
    ),
    Option(
        "--discovery",
        "URL of every server to register with (embedded discovery).",
        env="INFERA_DISCOVERY",
        repeatable=True,
        metavar="URL",
        section="Fleet",
    ),
    Option("--etcd-endpoint", "Address of etcd (discovery backend etcd).", metavar="HOST:PORT", section="Fleet"),
    Option(
        "--join-token",
        "Secret a server off loopback asks of workers.",
        env="INFERA_JOIN_TOKEN",
        metavar="TOKEN",
        section="Fleet",
    ),
    Option("--request-transport", "How requests travel.", choices=("http", "nats"), default="http", section="Fleet"),
    Option("--kv-event-transport", "How cache events travel.", choices=("zmq", "nats"), default="zmq", section="Fleet"),
    Option(
        "--kvd-socket",
        "Socket of this host's infera-kvd; without it the engine keeps KV in its own memory only.",
        env="INFERA_KVD_SOCKET",
        metavar="PATH",
        section="Cache",
    ),
    Option(
        "--kvd-loads",
        "Which hits are loaded: those that are faster to load than to compute, as measured, or all.",
        choices=("auto", "always"),
        default="auto",
        env="INFERA_KVD_LOADS",
        section="Cache",
    ),
    *ENGINE_OPTIONS,
    Option("--dry-run", "Print what would be run, and why, and stop.", is_switch=True, section="Engine"),
)

NOT_BUILT = {
    "discovery_backend": (
        "embedded",
        "etcd and kubernetes discovery are not built yet; use embedded with --discovery URL",
    ),
    "request_transport": ("http", "the nats request plane is not built yet; use http"),
    "kv_event_transport": ("zmq", "the nats event plane is not built yet; use zmq"),
}


# What the hooks act on.
VARIABLES = (
    "INFERA_KVD_SOCKET",
    "INFERA_KVD_LOADS",
    "INFERA_DISCOVERY",
    "INFERA_ADVERTISE_HOST",
    "INFERA_JOIN_TOKEN",
    "INFERA_REQUIRE_NATIVE",
    "INFERA_ALLOW_UNTESTED",
)


@dataclass(frozen=True)
class Command:
    """A process to become: arguments and environment."""

    argv: list[str]
    environ: dict[str, str]


def check_supported(values: Values) -> None:
    """Refuse what this version cannot do.

    Raises:
        OptionError: naming what to use instead.
    """
    for name, (supported, text) in NOT_BUILT.items():
        if getattr(values, name) != supported:
            raise OptionError(text)


def engine_environment(values: Values, overlay: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the engine's process: the hooks on PYTHONPATH, and what they should wire."""
    built = dict(environ)
    inherited = built.get("PYTHONPATH")
    built["PYTHONPATH"] = f"{overlay}{os.pathsep}{inherited}" if inherited else str(overlay)
    wanted = {
        "INFERA_KVD_SOCKET": values.kvd_socket,
        "INFERA_DISCOVERY": ",".join(values.discovery),
        "INFERA_ADVERTISE_HOST": values.advertise_host,
        "INFERA_JOIN_TOKEN": values.join_token,
        "INFERA_KVD_LOADS": values.kvd_loads if values.kvd_loads != "auto" else "",
        "INFERA_REQUIRE_NATIVE": "1" if values.require_native else "",
        "INFERA_ALLOW_UNTESTED": "1" if values.allow_untested else "",
    }
    for name, value in wanted.items():
        built.pop(name, None)
        if value:
            built[name] = value
    return built


def explain(command: Command, values: Values) -> str:
    """What `--dry-run` prints: the variables set for the hooks, then the command."""
    lines = ["# Environment the hooks act on:"]
    for name in ("PYTHONPATH", *VARIABLES):
        if name in command.environ:
            shown = "(secret)" if name == "INFERA_JOIN_TOKEN" else command.environ[name]
            lines.append(f"#   {name}={shown}")
    if not values.kvd_socket:
        lines.append("#   no --kvd-socket: KV blocks stay in the engine's own memory")
    if not values.discovery:
        lines.append("#   no --discovery: the engine runs alone, in no fleet")
    lines.append("# Command (the hooks add the KV connector and KV events to it):")
    lines.append(" ".join(command.argv))
    return "\n".join(lines)


def become(command: Command) -> None:
    """Replace this process by the engine: its signals, its exit status and its pid are the engine's."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command.argv[0], command.argv, command.environ)
