from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from infera_core.keys import chain_keys, root_key

from infera.discovery.record import tokenizer_digest
from infera.prompt import template
from infera.prompt.outcome import Adapter, ContextLengthError, RenderedRequest, Unrenderable
from infera.prompt.renderer import LONG_WAITING_MAX, THREADS_DEFAULT, PromptRenderer
from tests.support.chat_templates import CHATML, HEADERS
from tests.support.models import make_model_folder

LONG = "The capital of France is Paris. " * 30


@pytest.fixture
async def renderer(tmp_path: Path) -> AsyncIterator[PromptRenderer]:
    made = PromptRenderer()
    await made.prepare("m", str(make_model_folder(tmp_path / "m", HEADERS, begins_with_bos=True)), "")
    yield made
    made.close()


async def render(renderer: PromptRenderer, kind: Any = "chat", **body: Any) -> RenderedRequest:
    outcome = await renderer.render("m", kind, body, context_tokens_max=None)
    assert isinstance(outcome, RenderedRequest), outcome
    return outcome


async def refused(renderer: PromptRenderer, kind: Any = "chat", model: str = "m", **body: Any) -> str:
    outcome = await renderer.render(model, kind, body, context_tokens_max=None)
    assert isinstance(outcome, Unrenderable), outcome
    return outcome.reason


async def test_keys_are_those_of_the_tokens(renderer: PromptRenderer) -> None:
    made = await render(renderer, messages=[{"role": "user", "content": LONG}])
    assert made.prompts[0].keys == chain_keys(root_key(), made.prompts[0].tokens)
    assert len(made.prompts[0].keys) == made.token_count // 16 * 16


async def test_salt_changes_every_key_and_no_token(renderer: PromptRenderer) -> None:
    plain = await render(renderer, "completions", prompt=LONG)
    salted = await render(renderer, "completions", prompt=LONG, cache_salt="tenant")
    assert plain.prompts[0].tokens == salted.prompts[0].tokens
    assert salted.prompts[0].keys == chain_keys(root_key(salt=b"tenant"), salted.prompts[0].tokens)
    assert plain.prompts[0].keys[:16] != salted.prompts[0].keys[:16]


async def test_an_adapter_changes_every_key_and_no_token(renderer: PromptRenderer) -> None:
    body = {"prompt": LONG, "cache_salt": "tenant"}
    plain = await render(renderer, "completions", **body)
    adapter = Adapter("sql", "m", b"digest")
    made = await renderer.render("m", "completions", body, context_tokens_max=None, adapter=adapter)
    assert isinstance(made, RenderedRequest)
    assert (made.prompts[0].tokens, made.adapter) == (plain.prompts[0].tokens, adapter)
    assert made.prompts[0].keys == chain_keys(root_key(salt=b"tenant", lora=b"digest"), made.prompts[0].tokens)
    nameless = Adapter("sql", "m")
    unknown = await renderer.render("m", "completions", body, context_tokens_max=None, adapter=nameless)
    assert isinstance(unknown, RenderedRequest)
    assert (unknown.token_count, unknown.prompts[0].keys) == (plain.token_count, b""), "none of the model either"


async def test_completions_take_special_tokens_and_chats_do_not(renderer: PromptRenderer) -> None:
    with_bos = await render(renderer, "completions", prompt="hello")
    without = await render(renderer, "completions", prompt="hello", add_special_tokens=False)
    assert list(with_bos.prompts[0].tokens) == [0, *without.prompts[0].tokens]
    chat = await render(renderer, messages=[{"role": "user", "content": "hello"}])
    assert list(chat.prompts[0].tokens).count(0) == 1


async def test_all_shapes_of_completion_prompts(renderer: PromptRenderer) -> None:
    one = (await render(renderer, "completions", prompt="hello")).prompts[0]
    both = await render(renderer, "completions", prompt=["hello", "hello"])
    assert both.prompts == (one, one)
    assert (await render(renderer, "completions", prompt=[5, 6, 7])).prompts[0].tokens == array("I", [5, 6, 7])
    lists = await render(renderer, "completions", prompt=[[5, 6], [7]])
    assert [list(prompt.tokens) for prompt in lists.prompts] == [[5, 6], [7]]
    assert lists.token_count == 3


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": None}, "malformed"),
        ({"prompt": []}, "malformed"),
        ({"prompt": [1, "a"]}, "malformed"),
        ({"prompt": [[1], "a"]}, "malformed"),
        ({"prompt": [-1]}, "malformed"),
        ({"prompt": [2**32]}, "malformed"),
        ({"prompt": [True]}, "malformed"),
        ({"prompt": ["x"] * 2000}, "too_large"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ({"prompt": "x", "truncate_prompt_tokens": 0}, "malformed"),
        ({"prompt": "x", "truncation_side": "middle"}, "malformed"),
        ({"prompt": ""}, "malformed"),
        ({"prompt": "x", "cache_salt": 7}, "malformed"),
        ({"prompt": "x", "add_special_tokens": "yes"}, "malformed"),
    ],
)
async def test_what_cannot_be_rendered_says_why(renderer: PromptRenderer, body: dict[str, Any], reason: str) -> None:
    assert await refused(renderer, "completions", **body) == reason


async def test_token_ids_need_no_tokenizer() -> None:
    bare = PromptRenderer()
    assert (await render(bare, "completions", prompt=[1, 2])).token_count == 2
    assert await refused(bare, "completions", prompt="x") == "no_tokenizer"
    bare.close()


async def test_missing_and_different_tokenizers_are_shown(tmp_path: Path) -> None:
    renderer = PromptRenderer()
    folder = make_model_folder(tmp_path / "m", None)
    await renderer.prepare("none", str(tmp_path / "nothing"), "")
    await renderer.prepare("other", str(folder), "00" * 32)
    await renderer.prepare("same", str(folder), tokenizer_digest(folder))
    await renderer.prepare("unnamed", "", "")
    reasons = {model: problem.reason for model, problem in renderer.problems().items()}
    assert reasons == {"none": "no_tokenizer", "other": "tokenizer_differs", "unnamed": "no_tokenizer"}
    assert await refused(renderer, model="same", messages=[{"role": "user", "content": "x"}]) == "no_template"
    renderer.close()


async def test_too_long_is_the_clients_error_even_before_tokenizing(renderer: PromptRenderer) -> None:
    with pytest.raises(ContextLengthError, match="tokens"):
        await renderer.render("m", "completions", {"prompt": "hello world"}, context_tokens_max=2)
    with pytest.raises(ContextLengthError, match="characters"):
        await renderer.render("m", "completions", {"prompt": "hello " * 10_000}, context_tokens_max=2)


async def test_a_request_during_loading_waits_for_the_tokenizer(tmp_path: Path) -> None:
    renderer = PromptRenderer()
    folder = make_model_folder(tmp_path / "m", CHATML)
    loading = asyncio.create_task(renderer.prepare("m", str(folder), ""))
    await asyncio.sleep(0)
    assert renderer.problems()["m"].reason == "loading"
    assert (await render(renderer, "completions", prompt="x")).token_count == 1
    await loading
    renderer.close()


async def test_at_the_limit_of_waiting_prompts_nothing_is_predicted(tmp_path: Path) -> None:
    renderer = PromptRenderer(waiting_max=2, thread_count=1)
    await renderer.prepare("m", str(make_model_folder(tmp_path / "m", CHATML)), "")
    body = {"prompt": LONG * 50}
    asked = [renderer.render("m", "completions", body, context_tokens_max=None) for _ in range(4)]
    outcomes = await asyncio.gather(*asked)
    assert [outcome.reason for outcome in outcomes if isinstance(outcome, Unrenderable)] == ["busy", "busy"]
    await asyncio.sleep(0.01)
    assert isinstance(await renderer.render("m", "completions", body, context_tokens_max=None), RenderedRequest)
    renderer.close()


async def test_slow_rendering_ends_as_unrenderable(renderer: PromptRenderer) -> None:
    renderer._timeout_s = 0.0
    outcome = await renderer.render("m", "completions", {"prompt": LONG * 200}, context_tokens_max=None)
    assert isinstance(outcome, Unrenderable)
    assert outcome.reason == "timeout"


async def test_unclear_first_token_is_refused_for_text_prompts_only(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m", CHATML)
    config = (folder / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(config.replace("{", '{"add_bos_token": true, ', 1))
    renderer = PromptRenderer()
    await renderer.prepare("m", str(folder), "")
    assert await refused(renderer, "completions", prompt="x") == "begin_token_unclear"
    assert (await render(renderer, messages=[{"role": "user", "content": "x"}])).token_count > 1
    renderer.close()


async def test_a_template_that_loops_for_ever_does_not_hang_the_others(
    renderer: PromptRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "RENDER_TIME_S_MAX", 0.3)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    await renderer.prepare("endless", str(make_model_folder(tmp_path / "e", endless)), "")
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages}
    stuck = [
        asyncio.create_task(renderer.render("endless", "chat", body, context_tokens_max=None))
        for _ in range(THREADS_DEFAULT * 2)
    ]
    await render(renderer, messages=messages)  # waits for a thread that was stuck, and gets it
    reasons = [outcome.reason for outcome in await asyncio.gather(*stuck) if isinstance(outcome, Unrenderable)]
    assert reasons == ["timeout"] * len(stuck)


async def test_long_prompts_wait_in_a_queue_of_their_own(renderer: PromptRenderer) -> None:
    long = {"prompt": LONG * 1000}
    asked = [renderer.render("m", "completions", long, context_tokens_max=None) for _ in range(LONG_WAITING_MAX + 2)]
    tasks = [asyncio.create_task(question) for question in asked]
    await asyncio.sleep(0)
    assert (await render(renderer, "completions", prompt="short")).token_count > 0
    assert not all(task.done() for task in tasks)
    outcomes = await asyncio.gather(*tasks)
    assert [outcome.reason for outcome in outcomes if isinstance(outcome, Unrenderable)] == ["busy", "busy"]


@pytest.mark.parametrize(
    ("kind", "body", "reads"),
    [
        ("chat", {"messages": [{"role": "user", "content": "x"}]}, True),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "logprobs": True}, True),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0}, False),
        ("completions", {"prompt": "x", "echo": True}, True),
        ("completions", {"prompt": "x", "echo": True, "logprobs": 1}, False),
        ("completions", {"prompt": "x", "prompt_logprobs": 1}, False),
    ],
)
async def test_logprobs_of_a_prompt_need_it_computed_anew(
    renderer: PromptRenderer, kind: Any, body: dict[str, Any], reads: bool
) -> None:
    assert (await render(renderer, kind, **body)).reads_cache is reads


async def test_truncation_keeps_the_end_and_the_special_tokens(renderer: PromptRenderer) -> None:
    whole = (await render(renderer, "completions", prompt="one two three four")).prompts[0].tokens.tolist()
    cut = (await render(renderer, "completions", prompt="one two three four", truncate_prompt_tokens=4)).prompts[0]
    assert cut.tokens.tolist() == [whole[0], *whole[-3:]]
    least = (await render(renderer, "completions", prompt="one two", truncate_prompt_tokens=1)).prompts[0]
    assert least.tokens.tolist() == [whole[0]]
    ids = (await render(renderer, "completions", prompt=[1, 2, 3, 4], truncate_prompt_tokens=2)).prompts[0]
    assert ids.tokens.tolist() == [3, 4]


async def test_a_request_nested_without_end_is_refused(renderer: PromptRenderer) -> None:
    nested: Any = "x"
    for _ in range(100_000):
        nested = [nested]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": nested}}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    assert await refused(renderer, **body) in ("malformed", "template_failed")
