"""Small tokenizers made in place, so that unit tests need no model."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

_CORPUS = [
    "The capital of France is Paris. What is the capital of Germany?",
    "You are a helpful assistant. Answer in one sentence, please.",
    "def add(first, second):\n    return first + second\n",
    '{"type": "function", "function": {"name": "get_weather", "parameters": {}}}',
]
SPECIALS = [
    "<|bos|>",
    "<|eos|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]


def make_model_folder(folder: Path, template: str | None, *, begins_with_bos: bool = False) -> Path:
    """A folder with a byte-level tokenizer and, if given, a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if begins_with_bos:
        bos = tokenizer.token_to_id("<|bos|>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", bos)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": {"__type": "AddedToken", "content": "<|eos|>"},
        "model_max_length": 4096,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
