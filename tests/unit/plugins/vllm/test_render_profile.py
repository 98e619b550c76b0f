"""What of the command line ends up in the render profile."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from infera_vllm.arguments import ServeArguments
from infera_vllm.render_profile import UNRENDERED_FLAGS, render_profile

from infera.discovery.record import CHAT_TEMPLATE_BYTES_MAX, RenderProfile


def profile(*flags: str) -> RenderProfile:
    return render_profile(ServeArguments(["vllm", "serve", "m", *flags], 2))


def test_without_flags_everything_is_the_models_own() -> None:
    assert profile() == RenderProfile()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--tokenizer", "/t", "--tokenizer-mode=mistral"], {"tokenizer_path": "/t", "tokenizer_mode": "mistral"}),
        (["--chat-template-content-format", "openai"], {"content_format": "openai"}),
        (["--default-chat-template-kwargs", '{"a": 1}'], {"template_arguments": {"a": 1}}),
        (["--default_chat_template_kwargs={}"], {"template_arguments": {}}),
        (["--exclude-tools-when-tool-choice-none"], {"excludes_tools_when_choice_none": True}),
        (["--trust_request_chat_template"], {"trusts_request_template": True}),
        (["--trust-request-chat-template", "--no-trust-request-chat-template"], {"trusts_request_template": False}),
        (["--tool-call-parser", "hermes"], {"tool_parser": "hermes"}),
        (["--reasoning-parser", "qwen3"], {"reasoning_parser": "qwen3"}),
        (["--anthropic-disabled-thinking-effort", "low"], {"disabled_thinking_effort": "low"}),
    ],
)  # fmt: skip
def test_flags_become_fields(flags: list[str], expected: dict[str, Any]) -> None:
    found = profile(*flags)
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.unrendered_flags == ()


def test_a_template_is_read_from_its_file_or_taken_as_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ file }}")
    for given, source in ((str(file), "{{ file }}"), ("{{ inline }}", "{{ inline }}")):
        found = profile("--chat-template", given)
        assert found.chat_template == source
        assert found.chat_template_digest == hashlib.sha256(source.encode()).hexdigest()


def test_a_long_template_travels_as_its_digest(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("x" * (CHAT_TEMPLATE_BYTES_MAX + 1))
    found = profile("--chat-template", str(file))
    assert found.chat_template is None
    assert found.chat_template_digest == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "flags",
    [
        *([flag, "x"] for flag in UNRENDERED_FLAGS),
        ["--chat-template", "template_chatml.jinja"],
        ["--default-chat-template-kwargs", "not json"],
        ["--default-chat-template-kwargs", "[1]"],
        ["--default-chat-template-kwargs.enable_thinking", "false"],
    ],
)
def test_what_cannot_be_followed_is_named(flags: list[str]) -> None:
    assert profile(*flags).unrendered_flags == (flags[0].partition(".")[0],)
