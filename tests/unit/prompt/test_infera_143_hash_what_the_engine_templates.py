"""Infera#143, production-stack#1045, sglang#27386: routers hashed the raw messages while engines templated them;
tools and template arguments never reached the template. Everything that changes the prompt must change the keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infera.prompt.outcome import RenderedRequest
from infera.prompt.renderer import PromptRenderer
from tests.support.chat_templates import HEADERS
from tests.support.models import make_model_folder

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BASE: dict[str, Any] = {"messages": [{"role": "user", "content": "a long enough question " * 10}]}


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": [TOOL]},
        {"chat_template_kwargs": {"date_string": "1 Jan 2030"}},
        {"add_generation_prompt": False},
        {"messages": [{"role": "system", "content": "s"}, *BASE["messages"]]},
    ],
)
async def test_whole_request_reaches_the_template(extra: dict[str, Any], tmp_path: Path) -> None:
    renderer = PromptRenderer()
    await renderer.prepare("m", str(make_model_folder(tmp_path / "m", HEADERS)), "")
    plain = await renderer.render("m", "chat", BASE, context_tokens_max=None)
    changed = await renderer.render("m", "chat", BASE | extra, context_tokens_max=None)
    assert isinstance(plain, RenderedRequest)
    assert isinstance(changed, RenderedRequest)
    assert plain.prompts[0].tokens != changed.prompts[0].tokens
    renderer.close()
