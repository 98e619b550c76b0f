"""Runs in an engine's Python: makes a tiny random model with its own tokenizer, for tests. The same bytes every time.

usage: tiny.py OUTPUT_FOLDER llama|llama2heads|gemma3

`llama2heads` has a KV head for each of two tensor-parallel ranks; `gemma3` has layers with a sliding window.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SEED = 20
VOCABULARY_TOKENS = 2048
TRAINING_FILES_MAX = 120
MAX_POSITION_TOKENS = 4096
WINDOW_TOKENS = 128

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# Shows everything a template may see: tools, the generation prompt, and an argument of its own, `mood`.
CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nTools:\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}\
{{ '<|im_end|>\\n' }}{% endif %}\
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}\
{{ '<|im_end|>\\n' }}\
{%- endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}\
{%- if mood is defined %}{{ '(' + mood + ') ' }}{% endif %}\
{%- endif %}"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the sources of the standard library, which every machine has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_path("stdlib"))
    texts = (path.read_text(errors="ignore") for path in sorted(library.glob("*.py"))[:TRAINING_FILES_MAX])
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_POSITION_TOKENS,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast, kind: str) -> PreTrainedModel:
    """A third of a million random weights, spread widely enough that greedy output depends on the whole prompt."""
    torch.manual_seed(SEED)
    shape = {
        "vocab_size": VOCABULARY_TOKENS,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2 if kind == "llama2heads" else 1,
        "head_dim": 32,  # the smallest that the CPU attention of vLLM knows
        "max_position_embeddings": MAX_POSITION_TOKENS,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    if kind == "gemma3":
        layers = ["sliding_attention", "full_attention"] * 2
        config = Gemma3TextConfig(
            **shape, num_hidden_layers=len(layers), layer_types=layers, sliding_window=WINDOW_TOKENS
        )
        return Gemma3ForCausalLM(config)
    return LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2))


def main() -> None:
    """Writes tokenizer and model."""
    output, kind = sys.argv[1], sys.argv[2]
    tokenizer = make_tokenizer()
    make_model(tokenizer, kind).save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    main()
