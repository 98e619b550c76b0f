"""What `infera-kvd` can be told: one table for flags, environment variables and the reference page."""

from __future__ import annotations

import os
from pathlib import Path

from kvd.options import Option, Positional, Program, parse_count, parse_size_bytes

MEMORY_BYTES_MIN = 1 << 20


def runtime_folder(environ: dict[str, str] | os._Environ[str]) -> Path:
    """Folder for sockets: INFERA_RUNTIME_DIR, else XDG_RUNTIME_DIR/infera, else /tmp/infera-UID."""
    if folder := environ.get("INFERA_RUNTIME_DIR"):
        return Path(folder)
    if folder := environ.get("XDG_RUNTIME_DIR"):
        return Path(folder) / "infera"
    return Path("/tmp") / f"infera-{os.getuid()}"


def default_socket(environ: dict[str, str] | os._Environ[str]) -> Path:
    """The socket used when none is named."""
    return runtime_folder(environ) / "kvd.sock"


def parse_memory_bytes(text: str) -> int:
    """Parse a size of at least 1 MiB."""
    size_bytes = parse_size_bytes(text)
    if size_bytes < MEMORY_BYTES_MIN:
        raise ValueError(f"{text} is too small; an arena has at least 1M")
    return size_bytes


def parse_port_or_zero(text: str) -> int:
    """Parse a TCP port; 0 stands for none."""
    if not text.isdecimal() or int(text) > 65535:
        raise ValueError(f"{text!r} is not a port; write a number from 1 to 65535, or 0 for none")
    return int(text)


def parse_shards(text: str) -> int:
    """Parse a number of shards, 1 to 64."""
    count = parse_count(text)
    if count > 64:
        raise ValueError(f"{text} shards; a record has at most 64")
    return count


SOCKET = Option(
    "--socket",
    "Unix socket of the daemon (default: kvd.sock in the runtime folder).",
    env="INFERA_KVD_SOCKET",
    metavar="PATH",
)

SERVE = Program(
    name="infera-kvd serve",
    summary="Run the cache daemon of this host.",
    options=(
        SOCKET,
        Option(
            "--memory",
            "Size of the memory tier.",
            parse=parse_memory_bytes,
            default="2G",
            env="INFERA_KVD_MEMORY",
            metavar="SIZE",
        ),
        Option(
            "--path",
            "Folder for the arena, on tmpfs or hugetlbfs (default: infera-kvd-UID in /dev/shm).",
            env="INFERA_KVD_PATH",
            metavar="DIR",
        ),
        Option(
            "--records",
            "Index records; by default one for every 32 KiB of memory.",
            parse=parse_count,
            env="INFERA_KVD_RECORDS",
            metavar="N",
        ),
        Option(
            "--shards-max",
            "Most shards (TP times PP ranks) a record may have.",
            parse=parse_shards,
            default="8",
            env="INFERA_KVD_SHARDS_MAX",
            metavar="N",
        ),
        Option(
            "--http-port",
            "Port on 127.0.0.1 for /health, /ready and /metrics; 0 for none.",
            parse=parse_port_or_zero,
            default="9400",
            env="INFERA_KVD_HTTP_PORT",
            metavar="PORT",
        ),
        Option(
            "--no-prefault",
            "Start without touching the memory first: quicker, but first saves are slow.",
            is_switch=True,
            env="INFERA_KVD_NO_PREFAULT",
        ),
    ),
    epilog="Engines find the daemon through INFERA_KVD_SOCKET.",
)

STATUS = Program(
    name="infera-kvd status",
    summary="Show what the daemon holds.",
    options=(SOCKET, Option("--json", "Print one JSON object.", is_switch=True)),
)

DROP = Program(
    name="infera-kvd drop",
    summary="Drop every record of a namespace that no engine is reading.",
    options=(SOCKET,),
    positionals=(Positional("NAMESPACE", "Digest of the namespace, as `status` prints it."),),
)

PROGRAMS = {"serve": SERVE, "status": STATUS, "drop": DROP}
