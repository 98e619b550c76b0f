"""The namespace: a fingerprint of everything that changes the bytes of a block."""

from __future__ import annotations

import platform
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvd.client.namespace import fingerprint
from kvd.client.weights import weights_identity

LAYOUT_VERSION = 1
"""Raise when this plugin arranges the same cache differently."""


def namespace_of(config: Any, kv_cache_config: Any, spec: FullAttentionSpec, version: str) -> bytes:
    """16 bytes that are equal exactly when blocks of two engines may be exchanged."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    return fingerprint(
        {
            "engine": "vllm",
            # Packing inside a block is a kernel's private matter, so releases do not share.
            "engine_version": version,
            "plugin_layout": LAYOUT_VERSION,
            "weights": weights_identity(str(model.model), model.revision),
            "model_dtype": str(model.dtype),
            "quantization": str(model.quantization),
            "hf_overrides": str(model.hf_overrides),
            "rope_and_length": str(getattr(model.hf_text_config, "rope_parameters", None)),
            "cache_dtype": str(spec.dtype),
            "cache_quantization": f"{cache.cache_dtype} {getattr(spec, 'kv_quant_mode', None)}",
            "layout": str(kv_cache_config.kv_cache_layout),
            "block_size_tokens": int(spec.block_size),
            "page_bytes": int(spec.page_size_bytes),
            "layers": list(kv_cache_config.kv_cache_groups[0].layer_names),
            "tensor_parallel": int(parallel.tensor_parallel_size),
            "device": device_identity(),
        }
    )


def device_identity() -> str:
    """The kind of device. On a CPU the kernels pack K for the instruction set, so that counts too."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return f"{current_platform.device_type} {current_platform.get_device_name()}"
    import torch

    matrix_units = torch.cpu._is_amx_tile_supported()
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()} amx={matrix_units}"
