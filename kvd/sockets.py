"""The daemon's unix socket: only this user's, never in the place of anything else."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

SOCKET_PATH_BYTES_MAX = 107 - len(".snapshot")
"""A socket's path has at most 107 bytes; those for events have names made from this one."""


BACKLOG = 512
"""Connections waiting to be accepted: as many as there can be at all, since engines start together."""


def check_socket_path(path: Path) -> None:
    """See that a socket can be made at `path`, before anything costly is done.

    Raises:
        OSError: when the path is too long, something else is there, or somebody listens there.
    """
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise OSError(
            f"{path} is too long for a socket (at most {SOCKET_PATH_BYTES_MAX} bytes); choose another --socket"
        )
    try:
        kind = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISSOCK(kind):
        raise OSError(f"{path} is not a socket and is left alone; choose another path with --socket")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    probe.setblocking(False)
    try:
        probe.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return
    except BlockingIOError:
        pass  # its queue is full: somebody is there
    finally:
        probe.close()
    raise OSError(f"another infera-kvd listens on {path}; stop it or choose another with --socket")


def bind_unix(path: Path) -> socket.socket:
    """Listen on a unix socket only this user may reach; a stale one is replaced.

    Raises:
        OSError: when somebody listens there already, or the path cannot be bound.
    """
    check_socket_path(path)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {path}: {error}; choose another path with --socket") from error
    finally:
        os.umask(mask)
    listener.listen(BACKLOG)
    return listener
