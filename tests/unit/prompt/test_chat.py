from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infera.discovery.record import RenderProfile
from infera.prompt.chat import chat_prompt, chat_text, effort_of_disabled_thinking
from infera.prompt.outcome import UnrenderableError
from infera.prompt.tokenizer import ModelTokenizer
from tests.support.chat_templates import CHATML, PARTS, TAGS
from tests.support.models import make_model_folder

TOOL = {"type": "function", "function": {"name": "f"}}
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}]}


@pytest.mark.parametrize(
    ("excludes", "choice", "has_tools"),
    [(False, "none", True), (True, "none", False), (True, "auto", True), (True, None, True), (True, "required", True)],
)
def test_tools_are_left_out_only_where_the_engine_says_so(excludes: bool, choice: Any, has_tools: bool) -> None:
    profile = RenderProfile(excludes_tools_when_choice_none=excludes)
    named = chat_prompt(
        {**BODY, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, profile
    )
    assert named.tools is not None
    assert (chat_prompt({**BODY, "tools": [TOOL], "tool_choice": choice}, profile).tools is not None) is has_tools


def test_a_requests_template_is_used_only_where_the_engine_trusts_it(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(make_model_folder(tmp_path / "m", CHATML), RenderProfile(trusts_request_template=True))
    body = {**BODY, "chat_template": "{{ messages[0].content }}!"}
    assert chat_text(tokenizer, chat_prompt(body, tokenizer.profile)) == "q!"
    with pytest.raises(UnrenderableError) as caught:
        chat_prompt(body, RenderProfile())
    assert caught.value.reason == "chat_template"


def test_templates_of_requests_are_kept_up_to_a_limit(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(make_model_folder(tmp_path / "m", CHATML))
    for number in range(100):
        tokenizer.template_for(has_tools=False, own=f"{{# {number} #}}x")
    assert len(tokenizer._request_templates) == 32
    first = tokenizer.template_for(has_tools=False, own="{# 99 #}x")
    assert tokenizer.template_for(has_tools=False, own="{# 99 #}x") is first


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": []}, "malformed"),
        ({"chat_template": 3}, "malformed"),
        ({"add_generation_prompt": "yes"}, "malformed"),
        ({"continue_final_message": True}, "malformed"),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "kv_transfer_params"),
    ],
)
def test_what_is_left_to_the_engine_has_a_reason(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnrenderableError) as caught:
        chat_prompt({**BODY, **fields}, RenderProfile())
    assert caught.value.reason == reason


def test_developer_messages_with_tools_are_left_to_templates_that_know_them(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.role == 'developer' }}{{ m.tools | tojson }}{% endfor %}"
    tokenizer = ModelTokenizer(make_model_folder(tmp_path / "m", source))
    body = {"messages": [{"role": "developer", "content": "d", "tools": [TOOL]}]}
    with pytest.raises(UnrenderableError) as caught:
        chat_text(tokenizer, chat_prompt(body, tokenizer.profile))
    assert caught.value.reason == "developer_tools"


@pytest.mark.parametrize(
    ("template", "said", "expected"),
    [
        (TAGS, "auto", "none"),
        (CHATML, "auto", "low"),
        ("{% if reasoning_effort == 'none' %}{{ raise_exception('no') }}{% endif %}", "auto", "low"),
        (CHATML, "none", "none"),
    ],
)
def test_no_thinking_is_an_effort_the_template_understands(
    template: str, said: str, expected: str, tmp_path: Path
) -> None:
    folder = make_model_folder(tmp_path / "m", template)
    assert effort_of_disabled_thinking(ModelTokenizer(folder, RenderProfile(disabled_thinking_effort=said))) == expected


def test_a_content_format_on_the_command_line_beats_what_the_template_looks_like(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m", PARTS)
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}
    for wanted, shown in (("auto", "a;b;"), ("string", "a\nb")):
        tokenizer = ModelTokenizer(folder, RenderProfile(content_format=wanted))  # type: ignore[arg-type]
        assert shown in chat_text(tokenizer, chat_prompt(body, tokenizer.profile))
