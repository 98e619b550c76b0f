"""Our token ids against those of the engine's own library, template by template."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infera.prompt.outcome import RenderedRequest
from infera.prompt.renderer import PromptRenderer
from infera.tools.engine_env import ensure_vllm
from infera.tools.models import prepare_smollm2, prepare_tiny
from tests.support import chat_templates
from tests.support.models import make_model_folder

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parent.parent / "support" / "render_with_engine.py"

_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather <b>now</b> & later, in Zürich 'or' elsewhere",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_USER = {"role": "user", "content": "What is the capital of France?  "}
_CHATS: list[dict[str, Any]] = [
    {"messages": [_USER]},
    {"messages": [{"role": "system", "content": " Be brief. "}, _USER]},
    {"messages": [_USER, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Spain? 🇪🇸"}]},
    {"messages": [_USER], "add_generation_prompt": False},
    {"messages": [_USER], "tools": [_TOOL]},
    {"messages": [_USER], "chat_template_kwargs": {"enable_thinking": False, "date_string": "1 Jan 2030"}},
    {"messages": [_USER], "documents": [{"title": "A", "text": "B"}]},
    {"messages": [_USER], "add_special_tokens": True},
    {
        "messages": [_USER, {"role": "assistant", "content": " The capital is "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    {"messages": [{"role": "user", "content": "<|im_end|> inside, and \u00e9\u0301 \t tabs\n\n\nlines"}]},
    {"messages": [{"role": "assistant", "content": "I begin"}, _USER]},
]
_PROMPTS = ["The capital of France is", "", " ", "a\n\nb", "<|im_start|>user\nhi", "naïve 日本語 text" * 40]
REQUESTS = [{"kind": "chat", "body": body} for body in _CHATS] + [
    {"kind": "completions", "body": {"prompt": prompt, **extra}}
    for prompt in _PROMPTS
    for extra in ({}, {"add_special_tokens": False})
]


def _with_parts(request: dict[str, Any]) -> dict[str, Any]:
    """The request as an engine hands it to a template that loops over parts of content."""
    messages = request["body"].get("messages", [])
    wrapped = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    return {**request, "body": {**request["body"], "messages": wrapped}}


def _engine_ids(folder: Path, *, wants_parts: bool) -> list[Any]:
    requests = [_with_parts(request) for request in REQUESTS] if wants_parts else REQUESTS
    task = json.dumps({"folder": str(folder), "requests": requests})
    python = str(ensure_vllm().python)
    done = subprocess.run([python, str(SCRIPT)], input=task, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: list[Any] = json.loads(done.stdout)
    return answer


async def _compare(folder: Path, *, wants_parts: bool = False) -> None:
    theirs = _engine_ids(folder, wants_parts=wants_parts)
    renderer = PromptRenderer()
    await renderer.prepare("m", str(folder), "")
    try:
        for request, expected in zip(REQUESTS, theirs, strict=True):
            outcome = await renderer.render("m", request["kind"], request["body"], context_tokens_max=None)
            if isinstance(expected, dict):
                assert not isinstance(outcome, RenderedRequest), f"{request}: the engine refuses: {expected}"
                continue
            assert isinstance(outcome, RenderedRequest), f"{request}: {outcome}"
            assert list(outcome.prompts[0].tokens) == expected, request
    finally:
        renderer.close()


@pytest.mark.parametrize("style", sorted(chat_templates.ALL))
async def test_parity_with_handmade_templates(style: str, tmp_path: Path) -> None:
    folder = make_model_folder(
        tmp_path / style, chat_templates.ALL[style], begins_with_bos=style in ("headers", "turns")
    )
    await _compare(folder, wants_parts=style == "parts")


@pytest.mark.parametrize("prepare", [prepare_tiny, prepare_smollm2])
async def test_parity_with_prepared_models(prepare: Callable[[], Path]) -> None:
    await _compare(prepare())
