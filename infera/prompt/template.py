"""A chat template: compiled once, rendered as Hugging Face's renderer does, in a sandbox with limits."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from infera.prompt.outcome import UnrenderableError
from infera.prompt.sandbox import RENDER_TIME_S_MAX, LimitedEnvironment, run_limited

TEMPLATE_CHARACTERS_MAX: Final = 1024 * 1024
RENDERED_CHARACTERS_MAX: Final = 32 * 1024 * 1024
# The renderer's own mark, so that a template that changes it changes it in the same way. The trailing space
# shows whether the template strips what it is given.
CONTINUE_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG "
# Parameters of the renderer that never reach a template, given as a template argument or not.
RENDERER_PARAMETERS: Final = frozenset(
    {"padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
)
# Parameters of the renderer that do reach it, whether or not the template names them.
_ALWAYS_PASSED: Final = frozenset({"documents", "add_generation_prompt", "continue_final_message"})


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


def make_environment() -> LimitedEnvironment:
    """The sandbox every chat template is compiled in."""
    environment = LimitedEnvironment([_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    return environment


class ChatTemplate:
    """One compiled template. Rendering has no side effects and may run in several threads at once."""

    def __init__(self, source: str) -> None:
        """Compile ``source``. Raises UnrenderableError when it is not a valid template, or too long."""
        if len(source) > TEMPLATE_CHARACTERS_MAX:
            raise UnrenderableError("too_large", f"a chat template may have {TEMPLATE_CHARACTERS_MAX} characters")
        self.source = source
        self.environment = make_environment()
        try:
            self._template = run_limited(lambda: self.environment.from_string(source), RENDER_TIME_S_MAX)
            self._variables = _free_variables(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise UnrenderableError("template_invalid", f"the chat template does not compile: {error}") from error

    @property
    def reads_clock(self) -> bool:
        """Whether the text depends on when it is rendered."""
        return "strftime_now" in self.source

    def knows_developer_role(self) -> bool:
        """Whether the template names the developer role; engines turn it into system where it does not."""
        return '"developer"' in self.source or "'developer'" in self.source

    def wants_system_first(self) -> bool:
        """Whether the template refuses a second system message.

        Asked the way the engine asks it, of an environment without the renderer's own functions: a template
        that calls one of them (to refuse, for instance) fails there, and counts as refusing.
        """
        conversation = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
        try:
            template = LimitedEnvironment([loopcontrols]).from_string(self.source)
            run_limited(lambda: template.render(messages=conversation, add_generation_prompt=False), RENDER_TIME_S_MAX)
        except jinja2.TemplateError:
            return True
        except Exception:
            return False
        return False

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        arguments: Mapping[str, Any],
        special_tokens: Mapping[str, str],
    ) -> str:
        """The prompt text. ``arguments`` beat ``special_tokens`` of the same name; those the template does not
        name are left out, as the engine does.

        Raises UnrenderableError when the template refuses the request, or is too slow or too long.
        """
        accepted = (self._variables | _ALWAYS_PASSED) - RENDERER_PARAMETERS
        context = dict(special_tokens) | {name: value for name, value in arguments.items() if name in accepted}
        continues = context.pop("continue_final_message", False)
        context.setdefault("add_generation_prompt", False)
        context.setdefault("documents", None)
        final = ""
        if continues:
            messages, final = self._mark_last_message(messages)
        text = self._run({**context, "messages": messages, "tools": tools})
        return _cut_at_mark(text, final) if continues else text

    def _run(self, context: dict[str, Any]) -> str:
        try:
            return run_limited(lambda: self._pieces(context), RENDER_TIME_S_MAX)
        except UnrenderableError:
            raise
        except Exception as error:
            # A template is a program of the model's author: whatever it raises means that it refused this request.
            raise UnrenderableError("template_failed", f"{type(error).__name__}: {error}") from error

    def _pieces(self, context: dict[str, Any]) -> str:
        pieces: list[str] = []
        characters = 0
        for piece in self._template.generate(context):
            pieces.append(piece)
            characters += len(piece)
            if characters > RENDERED_CHARACTERS_MAX:
                raise UnrenderableError("too_large", f"more than {RENDERED_CHARACTERS_MAX} characters rendered")
        return "".join(pieces)

    def _mark_last_message(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """The messages with the mark behind the last one's text, and that text."""
        if not messages or messages[-1].get("content") is None or "content" not in self.source:
            raise UnrenderableError("continue_failed", "the last message has no content that could be continued")
        last = copy.deepcopy(messages[-1])
        content = last["content"]
        if isinstance(content, str):
            last["content"] = content + CONTINUE_MARK
            return [*messages[:-1], last], content
        for part in reversed(content):
            if "text" in part:
                text: str = part["text"]
                part["text"] = text + CONTINUE_MARK
                return [*messages[:-1], last], text
        raise UnrenderableError("continue_failed", "the last message has no text that could be continued")


def _free_variables(source: str) -> frozenset[str]:
    """Names the template looks up outside itself: the arguments an engine lets through."""
    environment = LimitedEnvironment([_GenerationTag, loopcontrols])
    return frozenset(meta.find_undeclared_variables(environment.parse(source)))


def _cut_at_mark(text: str, final: str) -> str:
    place = text.rfind(CONTINUE_MARK.strip())
    if place < 0 or final.strip() not in text:
        raise UnrenderableError("continue_failed", "the chat template drops the end of the last message")
    if text.startswith(CONTINUE_MARK, place):
        return text[:place]
    # The template strips content, so the space that the client left before our mark goes too.
    return text[:place].rstrip()
