"""The server's options: one table for flags, environment variables and the reference page."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infera.router.affinity import AFFINITY_MODES, TTL_S_DEFAULT, TTL_S_MAX, TTL_S_MIN, AffinityMode
from infera.router.core import SATURATION_S_DEFAULT
from infera.router.pair import GUARD_RELEASES, GuardRelease
from infera.router.policy import UnknownPolicyError, find_policy
from infera.router.waiting import WAITING_MAX_DEFAULT
from kvd.options import Option, OptionError, Program, parse_count, parse_duration_s, parse_port, parse_size_bytes

WEIGHT_MAX: Final = 1e6
_LATER: Final = {
    "discovery_backend": ("embedded", ("etcd", "kubernetes")),
    "request_transport": ("http", ("nats",)),
    "kv_event_transport": ("zmq", ("nats",)),
}


def parse_weight(text: str) -> float:
    """A number from 0 up. Raises OptionError otherwise."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= WEIGHT_MAX:
        raise OptionError(f"{text!r} is not a weight; write a number from 0 to {WEIGHT_MAX:g}, like 1.0")
    return value


def parse_ttl_s(text: str) -> float:
    """Seconds a session may be idle. Raises OptionError out of range."""
    if not re.fullmatch(r"[0-9]{1,6}", text) or not TTL_S_MIN <= int(text) <= TTL_S_MAX:
        raise OptionError(f"{text!r} is not from {TTL_S_MIN:g} to {TTL_S_MAX:g} seconds; write it like 3600")
    return float(text)


def parse_map_name(text: str) -> str:
    """A name that fits a socket's address. Raises OptionError."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text):
        raise OptionError(f"{text!r} is no name: letters, digits, dots, dashes and underscores, at most 64")
    return text


PROGRAM: Final = Program(
    name="python -m infera.server",
    summary="Serves one OpenAI-compatible endpoint in front of all registered workers.",
    options=(
        Option("--host", "Address to listen on.", default="127.0.0.1", section="Endpoint"),
        Option("--port", "Port to listen on.", parse=parse_port, default="8000", section="Endpoint"),
        Option(
            "--api-key",
            "Key a client must send as a bearer token; none means that everybody may ask.",
            env="INFERA_API_KEY",
            repeatable=True,
            section="Endpoint",
        ),
        Option(
            "--body-size-max",
            "Largest request body.",
            parse=parse_size_bytes,
            default="32M",
            metavar="SIZE",
            section="Limits",
        ),
        Option(
            "--concurrency-max",
            "Requests under way at once; more are refused with 429.",
            parse=parse_count,
            default="4096",
            section="Limits",
        ),
        Option(
            "--connect-timeout",
            "Longest wait for a worker to accept a connection.",
            parse=parse_duration_s,
            default="5s",
            metavar="TIME",
            section="Limits",
        ),
        Option(
            "--first-byte-timeout",
            "Longest wait for a worker's answer to begin (for an answer that is not streamed: its end).",
            parse=parse_duration_s,
            default="10m",
            metavar="TIME",
            section="Limits",
        ),
        Option(
            "--idle-timeout",
            "Longest silence within a worker's answer.",
            parse=parse_duration_s,
            default="2m",
            metavar="TIME",
            section="Limits",
        ),
        Option(
            "--tries-max",
            "Workers a request is sent to, one after the other, until one begins to answer.",
            parse=parse_count,
            default="3",
            section="Limits",
        ),
        Option(
            "--drain-timeout",
            "How long requests under way may go on after SIGTERM.",
            parse=parse_duration_s,
            default="30s",
            metavar="TIME",
            section="Limits",
        ),
        Option(
            "--queue-max",
            "Requests that may wait while all workers are saturated; at the limit, more urgent ones displace others.",
            parse=parse_count,
            default="1024",
            section="Queue",
        ),
        Option(
            "--queue-timeout",
            "Longest wait for a worker that is not saturated; then the request is refused with 429.",
            parse=parse_duration_s,
            default="30s",
            metavar="TIME",
            section="Queue",
        ),
        Option(
            "--saturation-queue",
            "A worker whose predicted queue is longer takes no more requests while others can.",
            parse=parse_duration_s,
            default="10s",
            metavar="TIME",
            section="Queue",
        ),
        Option(
            "--router-policy",
            "How a worker is chosen: kv-aware, round-robin, least-loaded, random, session, text-prefix, or one that an "
            "installed package adds.",
            default="kv-aware",
            section="Routing",
        ),
        Option(
            "--kv-overlap-weight",
            "kv-aware: how much what a worker holds counts against how loaded it is; 0 balances load alone.",
            parse=parse_weight,
            default="1.0",
            metavar="WEIGHT",
            section="Routing",
        ),
        Option(
            "--kv-prefill-overlap-weight",
            "The same for picks of prefill workers (default: --kv-overlap-weight).",
            parse=parse_weight,
            metavar="WEIGHT",
            section="Routing",
        ),
        Option(
            "--kv-decode-overlap-weight",
            "The same for picks of decode workers (default: --kv-overlap-weight).",
            parse=parse_weight,
            metavar="WEIGHT",
            section="Routing",
        ),
        Option(
            "--session-affinity",
            "Keep requests with the same X-Session-ID on the worker first chosen: on prefill workers, or on all.",
            default="off",
            choices=AFFINITY_MODES,
            section="Routing",
        ),
        Option(
            "--session-affinity-ttl-seconds",
            "How long a session that is idle stays bound, 1 to 86400 seconds.",
            parse=parse_ttl_s,
            default="3600",
            metavar="SECONDS",
            section="Routing",
        ),
        Option(
            "--pd-prefill-guard-release",
            "When the prefill worker of a disaggregated request is free of its load: when decode ends, or when "
            "prefill's own response was read.",
            env="INFERA_PD_PREFILL_GUARD_RELEASE",
            default="decode",
            choices=GUARD_RELEASES,
            section="Routing",
        ),
        Option(
            "--shared-map",
            "Keep one cache map with the other servers of this host that have the same NAME, and see their load.",
            parse=parse_map_name,
            env="INFERA_SHARED_MAP",
            metavar="NAME",
            section="Routing",
        ),
        Option(
            "--router-backend",
            "Implementation of the router.",
            default="python",
            choices=("python", "rust"),
            section="Routing",
        ),
        Option(
            "--router-tokenizer-path",
            "Folder with the model's tokenizer and chat template, when the workers' own folder cannot be read here.",
            parse=Path,
            metavar="FOLDER",
            section="Routing",
        ),
        Option(
            "--discovery-backend",
            "Where workers are found.",
            default="embedded",
            choices=("embedded", "etcd", "kubernetes"),
            section="Fleet",
        ),
        Option("--etcd-endpoint", "Addresses of etcd, host:port.", metavar="ENDPOINTS", section="Fleet"),
        Option(
            "--join-token",
            "Secret that workers must send to register; needed when listening off loopback.",
            env="INFERA_JOIN_TOKEN",
            section="Fleet",
        ),
        Option(
            "--workers-max",
            "Workers that may be registered at once.",
            parse=parse_count,
            default="1024",
            section="Fleet",
        ),
        Option(
            "--request-transport",
            "How requests reach workers.",
            default="http",
            choices=("http", "nats"),
            section="Fleet",
        ),
        Option(
            "--kv-event-transport",
            "How cache events come from workers.",
            default="zmq",
            choices=("zmq", "nats"),
            section="Fleet",
        ),
        Option(
            "--log-level",
            "How much is logged.",
            env="INFERA_LOG_LEVEL",
            default="info",
            choices=("debug", "info", "warning", "error"),
            section="Diagnostics",
        ),
    ),
    epilog="example: python -m infera.server --port 8000 --router-policy kv-aware",
)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Options after they were checked. Times in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    body_bytes_max: int = 32 * 2**20
    concurrency_max: int = 4096
    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = 600.0
    idle_timeout_s: float = 120.0
    tries_max: int = 3
    drain_timeout_s: float = 30.0
    queue_max: int = WAITING_MAX_DEFAULT
    queue_timeout_s: float = 30.0
    saturation_queue_s: float = SATURATION_S_DEFAULT
    router_policy: str = "kv-aware"
    kv_overlap_weight: float = 1.0
    kv_prefill_overlap_weight: float | None = None
    kv_decode_overlap_weight: float | None = None
    session_affinity: AffinityMode = "off"
    session_affinity_ttl_s: float = TTL_S_DEFAULT
    pd_prefill_guard_release: GuardRelease = "decode"
    shared_map: str | None = None
    router_backend: str = "python"
    router_tokenizer_path: Path | None = None
    join_token: str | None = None
    workers_max: int = 1024
    log_level: str = "info"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def load_config(argv: Sequence[str], environ: Mapping[str, str]) -> ServerConfig:
    """Options from the command line and the environment. Prints and raises SystemExit as a command does."""
    values = PROGRAM.parse(argv, environ)
    try:
        _refuse_later_features(values.as_dict())
        _check_policy(values.router_policy)
    except OptionError as error:
        raise SystemExit(f"{PROGRAM.name}: {error}") from error
    return ServerConfig(
        host=values.host,
        port=values.port,
        api_keys=values.api_key,
        body_bytes_max=values.body_size_max,
        concurrency_max=values.concurrency_max,
        connect_timeout_s=values.connect_timeout,
        first_byte_timeout_s=values.first_byte_timeout,
        idle_timeout_s=values.idle_timeout,
        tries_max=values.tries_max,
        drain_timeout_s=values.drain_timeout,
        queue_max=values.queue_max,
        queue_timeout_s=values.queue_timeout,
        saturation_queue_s=values.saturation_queue,
        router_policy=values.router_policy,
        kv_overlap_weight=values.kv_overlap_weight,
        kv_prefill_overlap_weight=values.kv_prefill_overlap_weight,
        kv_decode_overlap_weight=values.kv_decode_overlap_weight,
        session_affinity=values.session_affinity,
        session_affinity_ttl_s=values.session_affinity_ttl_seconds,
        pd_prefill_guard_release=values.pd_prefill_guard_release,
        shared_map=values.shared_map,
        router_backend=values.router_backend,
        router_tokenizer_path=values.router_tokenizer_path,
        join_token=values.join_token,
        workers_max=values.workers_max,
        log_level=values.log_level,
    )


def _refuse_later_features(values: Mapping[str, object]) -> None:
    for name, (works, later) in _LATER.items():
        if values[name] in later:
            flag = "--" + name.replace("_", "-")
            raise OptionError(f"{flag} {values[name]} is not built yet; use {flag} {works}")
    if values["etcd_endpoint"]:
        raise OptionError("--etcd-endpoint: discovery through etcd is not built yet; leave it out")


def _check_policy(name: str) -> None:
    try:
        find_policy(name)
    except UnknownPolicyError as error:
        raise OptionError(f"--router-policy: {error}") from error
