"""The command `infera-kvd`."""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import os
import signal
import sys
from pathlib import Path

from kvd.options import Values
from kvd.program import DROP, PROGRAMS, SERVE, STATUS, default_socket

EXIT_USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: infera-kvd COMMAND [flags]\n")
        for name, program in PROGRAMS.items():
            print(f"  {name:8} {program.summary}")
        return 0
    command, rest = arguments[0], arguments[1:]
    if command not in PROGRAMS:
        near = difflib.get_close_matches(command, PROGRAMS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"infera-kvd: unknown command {command!r}{hint}\nTry: infera-kvd --help", file=sys.stderr)
        return EXIT_USAGE
    return {"serve": _serve, "status": _status, "drop": _drop}[command](rest)


def _socket_path(values: Values) -> Path:
    return Path(values.socket) if values.socket else default_socket(os.environ)


def _serve(arguments: list[str]) -> int:
    from kvd.arena_files import ArenaFolderError
    from kvd.daemon import Daemon, DaemonSettings

    values = SERVE.parse(arguments, os.environ)
    level = os.environ.get("INFERA_LOG_LEVEL", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        print(f"infera-kvd: INFERA_LOG_LEVEL is {level!r}; use DEBUG, INFO, WARNING or ERROR", file=sys.stderr)
        return EXIT_USAGE
    logging.basicConfig(
        level=level,
        format="%(asctime)s %(levelname)s kvd: %(message)s",
        stream=sys.stderr,
    )
    settings = DaemonSettings(
        socket_path=_socket_path(values),
        arena_path=Path(values.path or f"/dev/shm/infera-kvd-{os.getuid()}"),
        memory_bytes=values.memory,
        records=values.records,
        shards_max=values.shards_max,
        http_port=values.http_port,
        prefault=not values.no_prefault,
    )
    try:
        asyncio.run(_run(Daemon(settings)))
    except (ArenaFolderError, OSError) as error:
        print(f"infera-kvd: {error}", file=sys.stderr)
        return 1
    return 0


async def _run(daemon: object) -> None:
    from kvd.daemon import Daemon

    assert isinstance(daemon, Daemon)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await daemon.start()
    try:
        await stop.wait()
    finally:
        await daemon.close()


def _ask(path: Path, message: int, payload: bytes) -> dict[str, object]:
    from kvd import protocol
    from kvd.client.connection import ClientConnection

    connection = ClientConnection.open(path)
    try:
        return protocol.decode_json(connection.call(message, payload))
    finally:
        connection.close()


def _status(arguments: list[str]) -> int:
    from kvd.client.connection import UnavailableError
    from kvd.protocol import Message, RefusedError
    from kvd.status import render_status

    values = STATUS.parse(arguments, os.environ)
    path = _socket_path(values)
    try:
        facts = _ask(path, Message.STATUS, b"")
    except (UnavailableError, RefusedError) as error:
        print(f"infera-kvd: {error}", file=sys.stderr)
        return 1
    print(json.dumps(facts) if values.json else render_status(facts))
    return 0


def _drop(arguments: list[str]) -> int:
    from kvd.client.connection import UnavailableError
    from kvd.protocol import Message, RefusedError, encode_json

    values = DROP.parse(arguments, os.environ)
    try:
        answer = _ask(_socket_path(values), Message.DROP, encode_json({"namespace": values.namespace}))
    except (UnavailableError, RefusedError) as error:
        print(f"infera-kvd: {error}", file=sys.stderr)
        return 1
    print(f"dropped {answer['dropped']} records")
    return 0
