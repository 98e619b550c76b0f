"""Which LoRA adapters an engine serves at the moment, and what each of them is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from infera.discovery.record import (
    ADAPTER_NAMES_BYTES_MAX,
    ADAPTERS_MAX,
    adapter_name_bytes,
    is_adapter_name,
)
from infera.engine.adapters import AdapterError, DigestReader, adapter_folder, adapter_stamp

UNKNOWN: Final = ""
"""In place of the digest of an adapter whose content is not known: it is served, and nothing of it is predicted."""

log = logging.getLogger("infera.agent")


class AdapterWatch:
    """Adapters as a worker record has them. Files are read by a thread: heartbeats do not wait for them."""

    def __init__(self) -> None:
        self._reader = DigestReader()
        self._said: dict[str, str] = {}

    def digests(self, listed: Mapping[str, str]) -> dict[str, str]:
        """LoRA name to hex digest, or UNKNOWN, of the adapters an engine lists as name and path.

        What a record cannot hold is left out, and logged once.
        """
        found: dict[str, str] = {}
        left_bytes = ADAPTER_NAMES_BYTES_MAX
        for name, path in listed.items():
            left_bytes -= adapter_name_bytes(name)
            if not is_adapter_name(name):
                self._say(name, "its name is empty, too long or not printable; it is not told to the fleet")
            elif len(found) == ADAPTERS_MAX or left_bytes < 0:
                self._say("", f"{len(listed)} are loaded: the fleet is told of the first {len(found)}")
                break
            else:
                found[name] = self._digest(name, path)
        self._said = {name: words for name, words in self._said.items() if name in listed or not name}
        return found

    def wait(self, timeout_s: float) -> None:
        """Wait until the files of all adapters listed so far have been read."""
        self._reader.wait(timeout_s)

    def _digest(self, name: str, path: str) -> str:
        try:
            folder = adapter_folder(path)
            digest = self._reader.find((folder, adapter_stamp(folder)))
        except AdapterError as error:
            self._say(name, f"what it holds is not known, so its cache is not followed: {error}")
            return UNKNOWN
        return digest.hex() if digest is not None else UNKNOWN

    def _say(self, name: str, words: str) -> None:
        if self._said.get(name) != words:
            self._said[name] = words
            log.warning("LoRA adapter%s: %s", f" {name!r:.80}" if name else "s", words)
