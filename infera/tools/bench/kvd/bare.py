"""Plain copies and a plain ping-pong, compiled here so that Python's own time does not flatter us."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("bare.c")


class Bare:
    """The compiled helper. Raises OSError or CalledProcessError when there is no C compiler."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory(prefix="infera-bench-") as folder:
            library = Path(folder) / "bare.so"
            command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(library)]
            subprocess.run(command, check=True)
            self._library = ctypes.CDLL(str(library))

    def copy(self, targets: array[int], sources: array[int], size_bytes: int) -> None:
        """memcpy of blocks, addresses in arrays of type Q, one C call for all."""
        self._library.bare_copy(
            ctypes.c_void_p(targets.buffer_info()[0]),
            ctypes.c_void_p(sources.buffer_info()[0]),
            ctypes.c_uint64(len(targets)),
            ctypes.c_uint64(size_bytes),
        )

    def serve(self, sock: socket.socket, request_bytes: Sequence[int], answer_bytes: Sequence[int]) -> None:
        """Answer alternating requests until the peer is gone; runs in a process of its own."""
        requests, answers = array("Q", request_bytes), array("Q", answer_bytes)
        self._library.bare_serve(
            ctypes.c_int(sock.fileno()),
            ctypes.c_void_p(requests.buffer_info()[0]),
            ctypes.c_void_p(answers.buffer_info()[0]),
        )
