from __future__ import annotations

import contextlib
from typing import Any

import pytest

from infera.prompt import template as template_module
from infera.prompt.outcome import UnrenderableError
from infera.prompt.template import ChatTemplate
from tests.support.chat_templates import PARTS, TURNS

USER = {"role": "user", "content": "hi <b> & 'x'"}


def render(source: str, messages: list[dict[str, Any]] | None = None, **arguments: Any) -> str:
    return ChatTemplate(source).render(
        messages or [USER], tools=None, arguments=arguments, special_tokens={"bos_token": "<s>"}
    )


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "hi <b> & \'x\'"}'


def test_blocks_take_their_line_ends_with_them() -> None:
    assert render("{% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"


def test_loop_controls_and_generation_tag_render() -> None:
    text = render(PARTS, [{"role": "note", "content": "no"}, USER], add_generation_prompt=True)
    assert "no" not in text
    assert "/" in text


def test_arguments_the_template_does_not_name_are_left_out() -> None:
    source = "{{ a }}{{ max_length }}{% set own = 1 %}{{ own }}{% for x in messages %}{{ x.role }}{% endfor %}"
    assert render(source, a="1", max_length=7, x="no", own="no", unknown="no") == "11user"


def test_names_the_engine_shields_its_templates_from_stay_ours() -> None:
    """A client cannot replace what is part of Jinja; what the renderer adds, it can, as at the engine."""
    assert render("{{ range(2) | list }}", range="no") == "[0, 1]"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% if messages[2].role == 'system' %}{{ raise_exception('no') }}{% endif %}", True),
        ("{{ strftime_now('%Y') }}", True),
        ("{% generation %}x{% endgeneration %}", True),
        ("{{ bos_token + 'x' }}", True),
        ("{{ bos_token }}", False),
    ],
)
def test_whether_inline_system_messages_move_to_the_front_is_asked_as_the_engine_asks(
    source: str, expected: bool
) -> None:
    assert ChatTemplate(source).wants_system_first() is expected


def test_arguments_beat_special_tokens_of_the_same_name() -> None:
    assert render("{{ bos_token }}") == "<s>"
    assert render("{{ bos_token }}", bos_token="!") == "!"


def test_a_template_that_refuses_is_a_stated_outcome() -> None:
    with pytest.raises(UnrenderableError, match="alternate") as caught:
        render(TURNS, [{"role": "assistant", "content": "x"}])
    assert caught.value.reason == "template_failed"


def test_a_broken_template_is_a_stated_outcome() -> None:
    with pytest.raises(UnrenderableError) as caught:
        ChatTemplate("{% for %}")
    assert caught.value.reason == "template_invalid"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{% set _ = messages.append(1) %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with contextlib.suppress(UnrenderableError):
        assert render(source) == ""


def test_output_without_end_is_stopped_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "RENDERED_CHARACTERS_MAX", 1000)
    with pytest.raises(UnrenderableError) as caught:
        render("{% for i in range(99999) %}{{ i }} {% endfor %}")
    assert caught.value.reason == "too_large"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content }}<end>", "It is "),
        ("{{ messages[0].content | trim }}<end>", "It is"),
    ],
)
def test_continuing_cuts_right_behind_the_last_message(source: str, expected: str) -> None:
    assert render(source, [{"role": "assistant", "content": "It is "}], continue_final_message=True) == expected


def test_continuing_what_the_template_drops_is_refused() -> None:
    with pytest.raises(UnrenderableError) as caught:
        render(
            "{{ messages[0].content[:2] }}", [{"role": "assistant", "content": "It is"}], continue_final_message=True
        )
    assert caught.value.reason == "continue_failed"


def test_continuing_needs_the_whole_message_in_the_text() -> None:
    """The engine compares the message without the space around it, so the middle must be there as well."""
    with pytest.raises(UnrenderableError) as caught:
        render(
            "{{ messages[0].content[:2] }}{{ messages[0].content[4:] }}",
            [{"role": "assistant", "content": "It is long"}],
            continue_final_message=True,
        )
    assert caught.value.reason == "continue_failed"


def test_continuing_does_not_change_the_callers_messages() -> None:
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": [{"type": "text", "text": "It"}]}]
    render("{{ messages[0].content[0].text }}", messages, continue_final_message=True)
    assert messages == [{"role": "assistant", "content": [{"type": "text", "text": "It"}]}]
