"""Which adapter a request computes with: the digest of its content, never its name.

Digests are read by a thread beside the scheduler, once for every adapter that the engine loads. Until then, and
where nothing says which weights the engine has, there is no digest, and the request's blocks are not kept.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from infera.engine.adapters import AdapterError, AdapterStamp, DigestReader, adapter_folder, adapter_stamp

LOADED_MAX: Final = 4096
"""Adapters remembered; the one that was asked for longest ago is forgotten first."""


class AdapterPendingError(AdapterError):
    """The files are being read; ask again."""


@dataclass(frozen=True)
class _Loaded:
    """An adapter as it was when it was first asked for under the engine's number for it."""

    folder: Path
    stamp: AdapterStamp
    digest: bytes


class AdapterDigests:
    """The adapters of one engine. Called from the scheduler's thread only."""

    def __init__(self) -> None:
        self._loaded: OrderedDict[int, _Loaded] = OrderedDict()
        self._reader = DigestReader()

    def adapter_digest(self, lora_request: Any) -> bytes:
        """The digest of a `LoRARequest`'s content. Looks at the folder, but does not wait for its files to be read.

        Raises:
            AdapterPendingError: when the files are still being read.
            AdapterError: when they cannot be read, or changed after the engine had loaded them, so that nothing
                says with which of the two it computes.
        """
        if getattr(lora_request, "is_3d_lora_weight", False):
            raise AdapterError(
                f"adapter {lora_request.lora_name!r}: fused expert weights are not told apart by content"
            )
        folder = adapter_folder(lora_request.lora_path)
        stamp = adapter_stamp(folder)
        number = lora_request.lora_int_id
        loaded = self._loaded.get(number)
        if loaded is not None and loaded.folder == folder:
            if loaded.stamp == stamp:
                self._loaded.move_to_end(number)
                return loaded.digest
            if not getattr(lora_request, "load_inplace", False):
                raise AdapterError(
                    f"adapter {lora_request.lora_name!r}: its files in {folder} changed after it was loaded, so "
                    "nothing says which weights the engine has; unload it and load it again"
                )
        digest = self._reader.find((folder, stamp))
        if digest is None:
            raise AdapterPendingError(f"the adapter in {folder} is being read")
        self._loaded[number] = _Loaded(folder, stamp, digest)
        self._loaded.move_to_end(number)
        if len(self._loaded) > LOADED_MAX:
            self._loaded.popitem(last=False)
        return digest

    def is_current(self, lora_request: Any, digest: bytes) -> bool:
        """Whether the engine's number for an adapter still means this content.

        vLLM replaces an adapter in place under the same number, also for requests that are already running: what
        they compute from then on must not be kept under the digest they began with.
        """
        loaded = self._loaded.get(lora_request.lora_int_id)
        return loaded is not None and loaded.digest == digest

    def wait(self, timeout_s: float) -> None:
        """Wait until what is being read has been read; for the engine's start and for tests."""
        self._reader.wait(timeout_s)
