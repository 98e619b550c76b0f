"""vLLM's --kv-offloading-size, which chooses a connector by itself: the same said as a --kv-transfer-config.

vLLM would put the chosen connector's name over ours and keep our module, and not start. Nothing but this choice
depends on the flag, so the connector can be named instead (vLLM: `VllmConfig._post_init_kv_transfer_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from infera_vllm.arguments import ServeArguments

SIZE_FLAG: Final = "--kv-offloading-size"
BACKEND_FLAG: Final = "--kv-offloading-backend"


class UntranslatableError(Exception):
    """The flag must stay as it is; the text says why."""


def offloading_config(arguments: ServeArguments, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """The connector that --kv-offloading-size stands for; None without the flag.

    Raises:
        UntranslatableError: where the flag cannot be taken away, or is not understood.
    """
    size = arguments.find(SIZE_FLAG)
    if size is None:
        return None
    if arguments.is_in_file(SIZE_FLAG):
        raise UntranslatableError(
            f"{SIZE_FLAG} in the file of --config makes vLLM choose its own connector; give it on the command line"
        )
    if arguments.find("--kv-transfer-config") is not None:
        raise UntranslatableError(
            f"{SIZE_FLAG} replaces the connector of your --kv-transfer-config; give one of the two"
        )
    try:
        size_bytes = float(size) * (1 << 30)
    except ValueError:
        raise UntranslatableError(f"{SIZE_FLAG} {size} is no number and is left to vLLM") from None
    backend = arguments.find(BACKEND_FLAG) or "native"
    if backend == "lmcache":
        return {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
    if backend != "native":
        raise UntranslatableError(f"{BACKEND_FLAG} {backend} is not known and is left to vLLM")
    is_simple = environ.get("VLLM_USE_SIMPLE_KV_OFFLOAD", "0") not in ("", "0")
    return {
        "kv_connector": "SimpleCPUOffloadConnector" if is_simple else "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": size_bytes},
    }
