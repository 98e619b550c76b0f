"""`infera-kvd serve`: the daemon itself."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

from kvd.arena_files import ArenaFolderError
from kvd.commands.asking import socket_path
from kvd.daemon import Daemon, DaemonSettings
from kvd.options import EXIT_USAGE
from kvd.program import SERVE, arena_folder


def run(arguments: list[str]) -> int:
    """Run the daemon until it is told to stop; returns the exit status."""
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
        socket_path=socket_path(values),
        arena_path=arena_folder(values.path),
        memory_bytes=values.memory,
        records=values.records,
        shards_max=values.shards_max,
        http_port=values.http_port,
        prefault=not values.no_prefault,
        quota_namespace_bytes=values.quota_namespace,
        quota_tenant_bytes=values.quota_tenant,
    )
    try:
        asyncio.run(_run(Daemon(settings)))
    except (ArenaFolderError, OSError) as error:
        print(f"infera-kvd: {error}", file=sys.stderr)
        return 1
    return 0


async def _run(daemon: Daemon) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await daemon.start()
    try:
        await stop.wait()
    finally:
        await daemon.close()
