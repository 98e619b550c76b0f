"""Where chat templates run: Jinja's immutable sandbox, with limits on time and on the size of any value.

A template is a program of somebody else. Its loops need not write anything, so the clock does not wait for
output: a watchdog raises an exception in the thread that runs too long. What a single operation can make
(repeating, joining, padding) is checked before it is made, because nothing can interrupt it.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from infera.prompt.outcome import UnrenderableError

RENDER_TIME_S_MAX: Final = 2.0
VALUE_CHARACTERS_MAX: Final = 32 * 1024 * 1024
NUMBER_BITS_MAX: Final = 4096
_WATCH_INTERVAL_S: Final = 0.05
_PADDING_METHODS: Final = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})

_T = TypeVar("_T")


class _TimeExceededError(BaseException):
    """Raised by the watchdog inside a template. No template can catch a BaseException."""


class _Section:
    """One run of a template in one thread."""

    __slots__ = ("deadline_s", "interrupted", "thread")

    def __init__(self, thread: int, deadline_s: float) -> None:
        self.thread = thread
        self.deadline_s = deadline_s
        self.interrupted = False


class _Watchdog:
    """Interrupts sections that are over their time. Its thread sleeps while there are none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sections: set[_Section] = set()
        self._thread: threading.Thread | None = None

    def enter(self, time_s: float) -> _Section:
        section = _Section(threading.get_ident(), time.monotonic() + time_s)
        with self._changed:
            if self._thread is None or not self._thread.is_alive():  # the first time, or after a fork
                self._thread = threading.Thread(target=self._watch, name="infera-template-watchdog", daemon=True)
                self._thread.start()
            self._sections.add(section)
            if len(self._sections) == 1:
                self._changed.notify()
        return section

    def leave(self, section: _Section) -> None:
        """May be called twice; afterwards no exception is on its way to this thread."""
        with self._changed:
            self._sections.discard(section)
            if section.interrupted:
                _raise_in_thread(section.thread, None)

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self._sections:
                    self._changed.wait()
                now_s = time.monotonic()
                for section in self._sections:
                    if not section.interrupted and section.deadline_s <= now_s:
                        section.interrupted = True
                        _raise_in_thread(section.thread, _TimeExceededError)
            time.sleep(_WATCH_INTERVAL_S)


def _raise_in_thread(thread: int, kind: type[BaseException] | None) -> None:
    target = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), target)


_WATCHDOG: Final = _Watchdog()


def run_limited(function: Callable[[], _T], time_s: float) -> _T:
    """What ``function`` returns. Raises UnrenderableError when it runs longer than ``time_s``."""
    section = _WATCHDOG.enter(time_s)
    try:
        try:
            return function()
        finally:
            _WATCHDOG.leave(section)
    except _TimeExceededError:
        _WATCHDOG.leave(section)  # the exception may have come while we were leaving
        raise UnrenderableError("timeout", f"the chat template ran longer than {time_s} s") from None


def _check_size(size: int) -> None:
    if size > VALUE_CHARACTERS_MAX:
        raise UnrenderableError("too_large", f"the chat template makes a value of more than {VALUE_CHARACTERS_MAX}")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0


class _LimitedCode(CodeGenerator):
    """Compiles ``a ~ b`` to a call that knows the limit."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (jinja's name)
        self.write("environment.concatenate((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of Hugging Face's renderer (trimmed blocks, loop controls), with limits on every value."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    code_generator_class = _LimitedCode

    def __init__(self, extensions: list[Any]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        for name in ("center", "indent"):
            self.filters[name] = _padding_limited(self.filters[name])
        self.filters["format"] = _format_limited(self.filters["format"])
        self.filters["join"] = _join_limited(self.filters["join"])
        self.filters["replace"] = _replace_limited(self.filters["replace"])

    def concatenate(self, values: tuple[Any, ...]) -> str:
        """The operator ``~``."""
        texts = [str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format``, refused where a width in the text is too large."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(str(value.__self__))
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """``+``, ``*`` and ``**``, refused where the result would be too large."""
        if operator == "+":
            _check_size(_size(left) + _size(right))
        elif operator == "*":
            _check_size(_product_size(left, right))
        elif operator == "%":
            if isinstance(left, str):
                _check_format(left)
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(right, 0) > NUMBER_BITS_MAX:
            raise UnrenderableError("too_large", f"the chat template computes a number of over {NUMBER_BITS_MAX} bits")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """A call inside a template; string methods that can make much from little are checked."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_method(owner, __obj.__name__, args)
        return super().call(__context, __obj, *args, **kwargs)


def _product_size(left: Any, right: Any) -> int:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, (str, list, tuple)) and isinstance(other, int):
            return len(one) * other
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > NUMBER_BITS_MAX:
        raise UnrenderableError("too_large", f"the chat template computes a number of over {NUMBER_BITS_MAX} bits")
    return 0


def _check_method(owner: str, name: str, args: tuple[Any, ...]) -> None:
    if name in _PADDING_METHODS and args and isinstance(args[0], int):
        _check_size(args[0] * (owner.count("\t") if name == "expandtabs" else 1))
    elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        _check_size(len(owner) + (owner.count(args[0]) + 1) * len(args[1]))
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        _check_size(sum(map(_size, args[0])) + len(owner) * len(args[0]))


def _check_format(text: str) -> None:
    for width in re.findall(r"\d+", text):
        _check_size(int(width[:20]))
    if "*" in text:  # a width among the arguments
        raise UnrenderableError("too_large", "the chat template formats with a computed width")


def _format_limited(plain: Callable[..., Any]) -> Callable[..., Any]:
    def limited(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_format(str(value))
        return plain(value, *args, **kwargs)

    return limited


def _padding_limited(plain: Callable[..., Any]) -> Callable[..., Any]:
    def limited(value: Any, *args: Any, **kwargs: Any) -> Any:
        width = kwargs.get("width", args[0] if args else 0)
        _check_size((width if isinstance(width, int) else _size(width)) * (1 + str(value).count("\n")))
        return plain(value, *args, **kwargs)

    return limited


def _join_limited(plain: Callable[..., Any]) -> Callable[..., Any]:
    @jinja2.pass_eval_context
    def limited(context: nodes.EvalContext, value: Any, d: str = "", attribute: Any = None) -> Any:
        items = list(value)
        if attribute is None:
            _check_size(sum(map(_size, items)) + _size(d) * len(items))
        return plain(context, items, d, attribute)

    return limited


def _replace_limited(plain: Callable[..., Any]) -> Callable[..., Any]:
    @jinja2.pass_eval_context
    def limited(context: nodes.EvalContext, s: Any, old: str, new: str, count: int | None = None) -> Any:
        text = str(s)
        _check_size(len(text) + (text.count(old) + 1) * len(new))
        return plain(context, s, old, new, count)

    return limited
