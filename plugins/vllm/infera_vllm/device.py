"""An engine's GPU, as far as copies of KV blocks go: CUDA, or ROCm under the same names.

Written against vLLM 0.32's own offloading worker (`vllm/v1/kv_offload/cpu/gpu_worker.py`): one stream a direction,
each batch after the compute stream's work so far, loads too, since a block may still be being zeroed. Not run yet where
there is no GPU; everything that does not need one is in `kvd.client.device_copier` and is tested.
"""

from __future__ import annotations

import logging
import threading
from array import array
from typing import Any, Final

import torch
from vllm import _custom_ops
from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.host_register import host_register, host_unregister

DESCRIPTORS_MAX_ROCM: Final = 8192
"""hipMemcpyBatchAsync takes no more in one call."""
DESCRIPTORS_MAX: Final = 1 << 16

log = logging.getLogger("infera.vllm")


class TorchDevice:
    """The device of this worker. See `kvd.client.device_copier.Device`."""

    def __init__(self) -> None:
        """Raises RuntimeError when this vLLM has no batched copy."""
        if not hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
            raise RuntimeError("this build of vLLM has no swap_blocks_batch")
        self.descriptors_max = DESCRIPTORS_MAX_ROCM if current_platform.is_rocm() else DESCRIPTORS_MAX
        self._streams = {to_device: current_platform.Stream() for to_device in (False, True)}
        self._locks = {to_device: threading.Lock() for to_device in (False, True)}
        self._register_lock = threading.Lock()
        self._registered: tuple[int, int] | None = None
        self._is_pinned = False

    def mark(self) -> Any:
        """An event after everything the compute stream was given."""
        event = torch.Event()
        event.record(current_platform.current_stream())
        return event

    def register(self, address: int, size_bytes: int) -> None:
        """Pin the arena for direct copies; without that they still work, slower, and that is said once."""
        with self._register_lock:
            if self._registered == (address, size_bytes):
                return
            if self._registered is not None and self._is_pinned:
                host_unregister(self._registered[0])
            self._registered = (address, size_bytes)
            self._is_pinned = host_register(address, size_bytes)
            if not self._is_pinned:
                log.warning("the arena could not be registered with the driver: copies are slower")

    def copy(self, sources: array[int], targets: array[int], sizes: array[int], *, to_device: bool, after: Any) -> None:
        """One batch on the direction's own stream; waits for it without holding the interpreter."""
        stream = self._streams[to_device]
        with self._locks[to_device]:
            if after is not None:
                stream.wait_event(after)
            with current_platform.stream(stream):
                # The source of a load is memory that nobody writes to, so it may be read out of order.
                _custom_ops.swap_blocks_batch(
                    _pointers(sources), _pointers(targets), _pointers(sizes), is_src_access_order_any=to_device
                )
                done = torch.Event()
                done.record(stream)
        done.synchronize()


def _pointers(values: array[int]) -> Any:
    return torch.frombuffer(values, dtype=torch.int64)
