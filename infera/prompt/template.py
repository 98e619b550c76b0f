"""A model's chat template, compiled once and rendered the way Hugging Face renders it.

Templates come with a model, so they run sandboxed, and the output is watched while it grows: a template that
writes without end is stopped by size and by time.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from infera.prompt.outcome import UnrenderableError

RENDERED_CHARACTERS_MAX: Final = 32 * 1024 * 1024
RENDER_TIME_S_MAX: Final = 10.0
CHUNKS_BETWEEN_CHECKS: Final = 256
# The trailing space shows whether the template strips what it is given.
CONTINUE_MARK: Final = "INFERA_CONTINUES_HERE_7f3c51 "
RESERVED_ARGUMENTS: Final = frozenset({"messages", "conversation", "tools", "chat_template", "tokenize"})


class _GenerationTag(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training. Here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja reads it as it is declared)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        # A call block, not the bare statements: the body gets a scope of its own, as in Hugging Face's renderer.
        line = parser.stream.current.lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)]

    @staticmethod
    def _body(caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would change the tokens.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment() -> ImmutableSandboxedEnvironment:
    """The sandbox every chat template is compiled in."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    return environment


class ChatTemplate:
    """One compiled template. Rendering has no side effects and may run in several threads at once."""

    def __init__(self, source: str) -> None:
        """Compile ``source``. Raises UnrenderableError when it is not a valid template."""
        self.source = source
        self.environment = make_environment()
        try:
            self._template = self.environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UnrenderableError("template_invalid", f"the chat template does not compile: {error}") from error

    def knows_developer_role(self) -> bool:
        """Whether the template names the developer role; engines turn it into system where it does not."""
        return '"developer"' in self.source or "'developer'" in self.source

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        arguments: Mapping[str, Any],
        special_tokens: Mapping[str, str],
    ) -> str:
        """The prompt text. ``arguments`` beat ``special_tokens`` of the same name.

        Raises UnrenderableError when the template refuses the request, or is too slow or too long.
        """
        context = {**special_tokens, **arguments}
        continues = context.pop("continue_final_message", False)
        context.setdefault("add_generation_prompt", False)
        context.setdefault("documents", None)
        if continues:
            messages = self._mark_last_message(messages, continues)
        text = self._run({**context, "messages": messages, "tools": tools})
        return _cut_at_mark(text) if continues else text

    def _run(self, context: dict[str, Any]) -> str:
        deadline_s = time.monotonic() + RENDER_TIME_S_MAX
        pieces: list[str] = []
        characters = 0
        try:
            for count, piece in enumerate(self._template.generate(context)):
                pieces.append(piece)
                characters += len(piece)
                if characters > RENDERED_CHARACTERS_MAX:
                    raise UnrenderableError("too_large", f"more than {RENDERED_CHARACTERS_MAX} characters rendered")
                if count % CHUNKS_BETWEEN_CHECKS == 0 and time.monotonic() > deadline_s:
                    raise UnrenderableError("timeout", f"the chat template ran longer than {RENDER_TIME_S_MAX} s")
        except UnrenderableError:
            raise
        except Exception as error:
            # A template is a program of the model's author: whatever it raises means that it refused this request.
            raise UnrenderableError("template_failed", f"{type(error).__name__}: {error}") from error
        return "".join(pieces)

    def _mark_last_message(self, messages: list[dict[str, Any]], continues: Any) -> list[dict[str, Any]]:
        field = continues if isinstance(continues, str) else "content"
        if not messages or messages[-1].get(field) is None or field not in self.source:
            raise UnrenderableError("continue_failed", f"the last message has no {field} that could be continued")
        last = copy.deepcopy(messages[-1])
        if isinstance(last[field], list):
            for part in reversed(last[field]):
                if "text" in part:
                    part["text"] += CONTINUE_MARK
                    break
            else:
                raise UnrenderableError("continue_failed", "the last message has no text that could be continued")
        else:
            last[field] += CONTINUE_MARK
        return [*messages[:-1], last]


def _cut_at_mark(text: str) -> str:
    place = text.rfind(CONTINUE_MARK.strip())
    if place < 0:
        raise UnrenderableError("continue_failed", "the chat template drops the end of the last message")
    if text.startswith(CONTINUE_MARK, place):
        return text[:place]
    # The template strips content, so the space that the client left before our mark goes too.
    return text[:place].rstrip()
