"""LoRA adapters of the tiny model, written by hand: random weights, large enough to change every answer."""

from __future__ import annotations

import json
import random
import struct
from array import array
from pathlib import Path

HIDDEN, LAYERS, RANK = 64, 2, 8
OUTPUTS = {"q_proj": 64, "v_proj": 32}


def make_adapter(folder: Path, seed: int) -> Path:
    """An adapter folder as PEFT writes it (adapter_config.json, adapter_model.safetensors in float32)."""
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(seed)
    tensors: dict[str, tuple[list[int], array[float]]] = {}
    for layer in range(LAYERS):
        for name, outputs in OUTPUTS.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = ([RANK, HIDDEN], noise(dice, RANK * HIDDEN))
            tensors[f"{stem}.lora_B.weight"] = ([outputs, RANK], noise(dice, outputs * RANK))
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 16, "lora_dropout": 0.0,
        "target_modules": list(OUTPUTS), "bias": "none", "base_model_name_or_path": "tiny", "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def noise(dice: random.Random, count: int) -> array[float]:
    return array("f", (dice.gauss(0, 0.4) for _ in range(count)))


def write_safetensors(path: Path, tensors: dict[str, tuple[list[int], array[float]]]) -> None:
    """The format: length of the header (u64), the header as JSON, the tensors' bytes one after the other."""
    header: dict[str, object] = {}
    at = 0
    for name, (shape, values) in tensors.items():
        size = len(values) * values.itemsize
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    body = b"".join(values.tobytes() for _, values in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
