"""Silent zero hits: routers hashed the raw messages while engines templated them (sglang#27386), tools and template
arguments never reached the template (production-stack#1045), and bodies of /v1/responses were not hashed at all
(Infera#143). Everything that changes the prompt must change the keys, and what is not known must say so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from infera.discovery.record import RenderProfile
from infera.prompt.outcome import RenderedRequest, Unrenderable
from infera.prompt.renderer import PromptRenderer
from tests.support.chat_templates import HEADERS, TAGS
from tests.support.models import make_model_folder

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
QUESTION = "a long enough question " * 10
BASE: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}]}


@pytest.fixture
async def renderer(tmp_path: Path) -> AsyncIterator[PromptRenderer]:
    made = PromptRenderer()
    await made.prepare("m", str(make_model_folder(tmp_path / "m", HEADERS)), "")
    await made.prepare("tags", str(make_model_folder(tmp_path / "tags", TAGS)), "")
    defaults = RenderProfile(template_arguments={"date_string": "1 Jan 2030"})
    await made.prepare("with defaults", str(make_model_folder(tmp_path / "d", HEADERS)), "", defaults)
    yield made
    made.close()


async def keys(renderer: PromptRenderer, body: dict[str, Any], kind: Any = "chat", model: str = "m") -> bytes:
    outcome = await renderer.render(model, kind, body, context_tokens_max=None)
    assert isinstance(outcome, RenderedRequest), outcome
    assert outcome.prompts[0].keys
    return outcome.prompts[0].keys


async def test_sglang_27386_keys_are_those_of_the_templated_text(renderer: PromptRenderer) -> None:
    chat = await keys(renderer, BASE)
    raw = await keys(renderer, {"prompt": QUESTION}, "completions")
    assert chat[:16] != raw[:16]
    assert await keys(renderer, BASE, model="tags") != chat


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": [TOOL]},
        {"chat_template_kwargs": {"date_string": "1 Jan 2030"}},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"add_special_tokens": True, "messages": [{"role": "user", "content": "<|bos|>"}, *BASE["messages"]]},
        {"messages": [{"role": "system", "content": "s"}, *BASE["messages"]]},
        {"truncate_prompt_tokens": 40},
    ],
)
async def test_production_stack_1045_the_whole_request_reaches_the_template(
    renderer: PromptRenderer, extra: dict[str, Any]
) -> None:
    plain = await renderer.render("m", "chat", BASE, context_tokens_max=None)
    changed = await renderer.render("m", "chat", BASE | extra, context_tokens_max=None)
    assert isinstance(plain, RenderedRequest)
    assert isinstance(changed, RenderedRequest)
    assert plain.prompts[0].tokens != changed.prompts[0].tokens


async def test_production_stack_1045_the_engines_defaults_reach_the_template(renderer: PromptRenderer) -> None:
    asked = await keys(renderer, BASE | {"chat_template_kwargs": {"date_string": "1 Jan 2030"}})
    assert await keys(renderer, BASE, model="with defaults") == asked


async def test_infera_143_every_surface_has_keys(renderer: PromptRenderer) -> None:
    chat = await keys(renderer, BASE)
    assert await keys(renderer, {"input": QUESTION}, "responses") == chat
    assert await keys(renderer, {"messages": BASE["messages"], "max_tokens": 9}, "messages") == chat


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        ("responses", {"input": QUESTION, "previous_response_id": "resp_1"}, "previous_response_id"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "not_text"),
        ("completions", {"prompt": "x", "suffix": "y"}, "suffix"),
    ],
)
async def test_infera_143_what_has_no_keys_says_why(
    renderer: PromptRenderer, kind: Any, body: dict[str, Any], reason: str
) -> None:
    outcome = await renderer.render("m", kind, body, context_tokens_max=None)
    assert isinstance(outcome, Unrenderable)
    assert outcome.reason == reason
