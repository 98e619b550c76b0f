"""The namespace: a fingerprint of everything that changes the bytes of a block."""

from __future__ import annotations

import platform
from typing import Any

from kvd.client.weights import weights_identity

LAYOUT_VERSION = 2
"""Raise when this plugin arranges the same cache differently."""


def namespace_facts(config: Any, kv_cache_config: Any, version: str) -> dict[str, object]:
    """What has to be equal for two engines to exchange blocks, as JSON values."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    return {
        "engine": "vllm",
        # Packing inside a block is a kernel's private matter, so releases do not share.
        "engine_version": version,
        "plugin_layout": LAYOUT_VERSION,
        "weights": weights_identity(str(model.model), model.revision),
        "model_dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "hf_overrides": str(model.hf_overrides),
        "rope_and_length": str(getattr(model.hf_text_config, "rope_parameters", None)),
        "cache_dtype": str(cache.cache_dtype),
        "runtime_scales": bool(getattr(cache, "calculate_kv_scales", False)),
        "layout": str(kv_cache_config.kv_cache_layout),
        # A spec's text names its class, block size, heads, dtype, quantisation, window and padding.
        "groups": [[str(group.kv_cache_spec), list(group.layer_names)] for group in kv_cache_config.kv_cache_groups],
        "tensor_parallel": int(parallel.tensor_parallel_size),
        "pipeline_parallel": int(parallel.pipeline_parallel_size),
        # An image's identifier given by a client need not say how the image was processed.
        "images": str(getattr(getattr(model, "multimodal_config", None), "mm_processor_kwargs", None)),
        "draft": _draft_identity(config.speculative_config),
        "device": device_identity(),
    }


def _draft_identity(speculative: Any) -> str:
    """The model whose layers lie beside the target's. A draft without a model (n-grams) changes nothing."""
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or str(getattr(speculative, "method", "")).startswith(("ngram", "suffix")):
        return ""
    return str(weights_identity(str(draft.model), draft.revision))


def device_identity() -> str:
    """The kind of device. On a CPU the kernels pack K for the instruction set, so that counts too."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return f"{current_platform.device_type} {current_platform.get_device_name()}"
    import torch

    matrix_units = torch.cpu._is_amx_tile_supported()
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()} amx={matrix_units}"
