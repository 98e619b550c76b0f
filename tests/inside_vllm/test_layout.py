"""Which engines are served, and that all others are refused in words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from infera_vllm.layout import UnsupportedLayoutError, check_engine, segments
from infera_vllm.namespace import namespace_of
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec


def spec(kind: Any = FullAttentionSpec, **fields: Any) -> Any:
    facts: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    return kind(**(facts | fields))


def engine(*specs: Any, **parallel: Any) -> tuple[Any, Any]:
    config = SimpleNamespace(
        speculative_config=parallel.pop("speculative", None),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, decode_context_parallel_size=1, tensor_parallel_size=1
        ),
        model_config=SimpleNamespace(
            model="a-model", revision=None, dtype=torch.bfloat16, quantization=None, hf_overrides={},
            hf_text_config=SimpleNamespace(),
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )  # fmt: skip
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    groups = [SimpleNamespace(kv_cache_spec=each, layer_names=["a", "b"]) for each in specs]
    return config, SimpleNamespace(kv_cache_groups=groups, kv_cache_layout="LBHNC")


def test_plain_full_attention_is_served() -> None:
    assert check_engine(*engine(spec())).block_size == 32


@pytest.mark.parametrize(
    ("made", "word"),
    [
        (engine(spec(), spec()), "groups"),
        (engine(spec(SlidingWindowSpec, sliding_window=128)), "SlidingWindowSpec"),
        (engine(spec(sliding_window=128)), "window"),
        (engine(spec(MLAAttentionSpec, num_kv_heads=1)), "MLAAttentionSpec"),
        (engine(spec(), speculative=object()), "speculative"),
        (engine(spec(), pipeline_parallel_size=2), "pipeline"),
        (engine(spec(block_size=8)), "multiple of 16"),
    ],
)
def test_llm_d_router_2362_everything_else_is_refused_in_words(made: tuple[Any, Any], word: str) -> None:
    with pytest.raises(UnsupportedLayoutError, match=word):
        check_engine(*made)


def test_tensors_that_are_not_whole_blocks_are_refused() -> None:
    good = torch.zeros(8, 2, 32, 16)
    assert [part.size_bytes for part in segments({"a": good}, ["a"], 8)] == [2 * 32 * 16 * 4]
    assert [part.size_bytes for part in segments({"a": good}, ["a"], 4)] == [2 * 2 * 32 * 16 * 4]
    for bad, blocks in ((good.permute(0, 2, 1, 3), 8), (good, 3), (torch.zeros(2, 8, 32, 16).transpose(0, 1), 8)):
        with pytest.raises(UnsupportedLayoutError):
            segments({"a": bad}, ["a"], blocks)
    with pytest.raises(UnsupportedLayoutError, match="share"):
        segments({"a": good, "b": good}, ["a", "b"], 8)
    with pytest.raises(UnsupportedLayoutError, match="no cache tensor"):
        segments({}, ["a"], 8)


def test_vllm_55904_namespace_changes_with_whatever_shapes_a_block() -> None:
    def digest(change: Any = None, version: str = "0.32.0", **fields: Any) -> bytes:
        config, cache = engine(spec(**fields))
        if change:
            change(config, cache)
        return namespace_of(config, cache, check_engine(config, cache), version)

    changes = [
        lambda c, k: setattr(c.model_config, "model", "another"),
        lambda c, k: setattr(c.model_config, "revision", "r2"),
        lambda c, k: setattr(c.model_config, "dtype", torch.float16),
        lambda c, k: setattr(c.model_config, "quantization", "fp8"),
        lambda c, k: setattr(c.model_config, "hf_overrides", {"rope_theta": 2}),
        lambda c, k: setattr(c.cache_config, "cache_dtype", "fp8"),
        lambda c, k: setattr(c.parallel_config, "tensor_parallel_size", 2),
        lambda c, k: setattr(k, "kv_cache_layout", "LBNHC"),
        lambda c, k: k.kv_cache_groups[0].layer_names.append("c"),
    ]
    digests = [digest(), digest(version="0.32.1"), digest(block_size=64), digest(head_size=32)]
    digests += [digest(change) for change in changes]
    assert digest() == digests[0]
    assert len(set(digests)) == len(digests)
