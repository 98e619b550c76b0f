"""Our token ids against vLLM's own render endpoints, and our pieces against whole texts with real tokenizers."""

from __future__ import annotations

import json
import random
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from infera.commands.doctor import main as doctor_main
from infera.commands.doctor_prompts import REQUESTS
from infera.prompt.segments import SegmentedTokenizer
from infera.tools.models import prepare_smollm2, prepare_tiny
from tests.support.engine_fixtures import EngineFleet
from tests.support.processes import call
from tests.support.prompt_parity import compare_all

pytestmark = pytest.mark.e2e

_SPICES = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "start|>", "<", "|>", " ", "  ", "\n", "\n\n", "\t", "\r\n",
    "user\n", "e\u0301", "\u00a0", "\u200d", "ﬁ", "🇪🇸", "日本", "'s", "123", "<file_sep>", "<jupyter_code>",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(_SPICES) | st.text(max_size=8), max_size=30).map("".join)


@pytest.mark.timeout(300)
async def test_random_requests_of_every_kind_get_the_engines_ids() -> None:
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")
    count = await compare_all(seed, per_model=30)
    assert not count.differing, f"seed {seed}:\n" + "\n".join(count.differing[:3])
    assert count.exact >= 200, count
    assert count.unknown_by_design > 0, count
    assert set(count.by_kind) == {"chat", "completions", "responses", "messages"}


def test_doctor_compares_a_running_fleet(engine_fleet: EngineFleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor_main(["prompts", "--server", engine_fleet.url, "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert [report["worker"] for report in reports] == sorted(engine_fleet.worker_ids)
    for report in reports:
        assert report["exact"] + report["refused"] == report["requests"] == len(REQUESTS), report
        assert report["exact"] > 6


@cache
def real(name: str) -> tuple[Tokenizer, SegmentedTokenizer]:
    folder = {"smollm2": prepare_smollm2, "tiny": prepare_tiny}[name]()
    path = str(folder / "tokenizer.json")
    return Tokenizer.from_file(path), SegmentedTokenizer(Tokenizer.from_file(path), cache_bytes_max=20_000)


@pytest.mark.parametrize("name", ["smollm2", "tiny"])
@settings(max_examples=400, deadline=None)
@given(text=TEXTS)
@example(text="<|im_start|><|im_start|>")
@example(text=" <|im_end|> ")
def test_pieces_give_the_ids_of_the_whole_text(name: str, text: str) -> None:
    whole, segmented = real(name)
    assert segmented.is_segmented
    assert segmented.encode(text).tolist() == whole.encode(text, add_special_tokens=False).ids


def test_a_running_engine_counts_the_tokens_we_rendered(engine_fleet: EngineFleet) -> None:
    """The self-check of a real fleet: no answer's prompt_tokens differs from ours."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve? 🇪🇸"}]
    for fields in ({}, {"tools": [tool], "tool_choice": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        body = {"model": "tiny", "messages": messages, "max_tokens": 1, **fields}
        assert call(f"{engine_fleet.url}/v1/chat/completions", body, timeout_s=60).status == 200
    engine_fleet.ask("parity <|im_end|> of a text", max_tokens=1)
    metrics = call(f"{engine_fleet.url}/metrics").body.decode()
    assert 'infera_prompt_tokens_total{model="tiny",source="predicted"}' in metrics
    assert "infera_prompt_mismatches_total{" not in metrics
    (record, *_) = [entry["record"] for entry in call(f"{engine_fleet.url}/v1/workers").json["data"]]
    assert record["render"]["text_probe_digest"], "the agent asked its engine for the ids of the probe"
    assert record["render"]["chat_probe_digest"]
