"""What `infera-kvd` can be told: one table for flags, environment variables and the reference page."""

from __future__ import annotations

import os
from pathlib import Path

from kvd.options import Option, Positional, Program, parse_count, parse_duration_s, parse_size_bytes

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


def arena_folder(path: str | None) -> Path:
    """The arena's folder: the one named, else infera-kvd-UID in /dev/shm."""
    return Path(path or f"/dev/shm/infera-kvd-{os.getuid()}")


def parse_memory_bytes(text: str) -> int:
    """Parse a size of at least 1 MiB."""
    size_bytes = parse_size_bytes(text)
    if size_bytes < MEMORY_BYTES_MIN:
        raise ValueError(f"{text} is too small; an arena has at least 1M")
    return size_bytes


def parse_quota_bytes(text: str) -> int:
    """Parse a size; 0 stands for no limit."""
    return 0 if text == "0" else parse_size_bytes(text)


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


def parse_depth(text: str) -> int:
    """Parse a number of transfers at once, 1 to 256."""
    count = parse_count(text)
    if count > 256:
        raise ValueError(f"{text} transfers at once; at most 256")
    return count


def parse_interval_s(text: str) -> float:
    """Parse a duration of 100 ms to an hour."""
    interval_s = parse_duration_s(text)
    if not 0.1 <= interval_s <= 3600:
        raise ValueError(f"{text} is not between 100ms and 1h")
    return interval_s


SOCKET = Option(
    "--socket",
    "Unix socket of the daemon (default: kvd.sock in the runtime folder).",
    env="INFERA_KVD_SOCKET",
    metavar="PATH",
)

PATH = Option(
    "--path",
    "Folder for the arena, on tmpfs or hugetlbfs (default: infera-kvd-UID in /dev/shm).",
    env="INFERA_KVD_PATH",
    metavar="DIR",
)

JSON = Option("--json", "Print one JSON object.", is_switch=True)

NAMESPACE = Positional("NAMESPACE", "Digest of the namespace, as `status` prints it.")

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
        PATH,
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
            "--quota-namespace",
            "Most memory for the records of one namespace, which then gives up its own oldest; 0 for no limit.",
            parse=parse_quota_bytes,
            default="0",
            env="INFERA_KVD_QUOTA_NAMESPACE",
            metavar="SIZE",
        ),
        Option(
            "--quota-tenant",
            "Most memory for the records of one tenant, likewise; 0 for no limit.",
            parse=parse_quota_bytes,
            default="0",
            env="INFERA_KVD_QUOTA_TENANT",
            metavar="SIZE",
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
    options=(SOCKET, JSON),
)

DROP = Program(
    name="infera-kvd drop",
    summary="Drop every record of a namespace that no engine is reading.",
    options=(SOCKET, JSON),
    positionals=(NAMESPACE,),
)

TOP = Program(
    name="infera-kvd top",
    summary="Watch what the daemon does: rates, space, classes and clients on one screen.",
    options=(
        SOCKET,
        JSON,
        Option("--once", "Print one screen and end.", is_switch=True),
        Option("--interval", "Time between screens.", parse=parse_interval_s, default="2s", metavar="TIME"),
    ),
)

LS = Program(
    name="infera-kvd ls",
    summary="List classes, or the records of a namespace.",
    options=(
        SOCKET,
        JSON,
        Option("--keys", "List records with their content keys, not classes; needs NAMESPACE.", is_switch=True),
        Option("--limit", "Most records to list.", parse=parse_count, default="1000", metavar="N"),
        Option(
            "--after",
            "Go on where an earlier listing stopped (its last line, or `next` in its JSON).",
            parse=parse_count,
            metavar="CURSOR",
        ),
    ),
    positionals=(Positional("NAMESPACE", "Only this namespace.", is_required=False),),
)

PIN = Program(
    name="infera-kvd pin",
    summary="Keep every record a namespace has now until `unpin` or `drop`: eviction passes over them.",
    options=(SOCKET, JSON),
    positionals=(NAMESPACE,),
)

UNPIN = Program(
    name="infera-kvd unpin",
    summary="Let the records of a namespace be evicted again.",
    options=(SOCKET, JSON),
    positionals=(NAMESPACE,),
)

CLEAR = Program(
    name="infera-kvd clear",
    summary="Free the memory of an arena that a stopped daemon left and no engine uses.",
    options=(PATH, JSON),
)

CHECK = Program(
    name="infera-kvd check",
    summary="Verify a disk store while no daemon uses it: every record, byte by byte.",
    options=(
        Option("--drop", "Take out what is bad, for good.", is_switch=True),
        JSON,
    ),
    positionals=(Positional("PATH", "Folder of the store, as given to --disk-path."),),
    epilog="Exit status: 0 nothing bad is left, 1 something is, 2 it could not be checked.",
)

BENCH = Program(
    name="infera-kvd bench",
    summary="Measure a folder the way the daemon would use it, in a store of its own that is removed afterwards.",
    options=(
        Option("--size", "How much to write.", parse=parse_memory_bytes, default="1G", metavar="SIZE"),
        Option("--depth", "Transfers at once.", parse=parse_depth, default="32", metavar="N"),
        JSON,
    ),
    positionals=(Positional("PATH", "Folder to measure; it is made if need be."),),
)

PROGRAMS = {
    "serve": SERVE,
    "status": STATUS,
    "top": TOP,
    "ls": LS,
    "pin": PIN,
    "unpin": UNPIN,
    "drop": DROP,
    "clear": CLEAR,
    "check": CHECK,
    "bench": BENCH,
}
