"""Templates that never end or grow without bound are stopped, and their thread serves the next one."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from infera.prompt import sandbox, template
from infera.prompt.outcome import UnrenderableError
from infera.prompt.sandbox import run_limited
from infera.prompt.template import ChatTemplate

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def render(source: str, content: str = "x") -> str:
    messages = [{"role": "user", "content": content}]
    return ChatTemplate(source).render(messages, tools=None, arguments={}, special_tokens={})


def reason_of(source: str) -> str:
    with pytest.raises(UnrenderableError) as caught:
        render(source)
    return caught.value.reason


def test_a_loop_without_output_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "RENDER_TIME_S_MAX", 0.1)
    assert reason_of(ENDLESS) == "timeout"
    # The exception that ended it does not reach what the thread does next.
    assert render("{{ messages[0].content }}") == "x"


def test_an_interrupted_thread_is_not_interrupted_again() -> None:
    for _ in range(3):
        with pytest.raises(UnrenderableError):
            run_limited(lambda: [None for _ in iter(int, 1)], 0.05)
        assert run_limited(lambda: "done", 5.0) == "done"
    assert not sandbox._WATCHDOG._sections


def test_a_function_that_ends_at_its_deadline_never_leaks_the_exception() -> None:
    """Ends and deadlines fall together in many threads; whatever wins, nothing is raised afterwards."""
    leaks: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(10):
                end_s = time.monotonic() + 0.049 + 0.001 * ((number + step) % 5)
                with contextlib.suppress(UnrenderableError):
                    run_limited(lambda end_s=end_s: [None for _ in iter(lambda: time.monotonic() < end_s, False)], 0.05)  # type: ignore[misc]
                sum(range(20_000))
        except BaseException as error:
            leaks.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not leaks
    assert not sandbox._WATCHDOG._sections


@pytest.mark.parametrize(
    "expression",
    [
        "'a' * 10**9",
        "10**9 * [1]",
        "9**99999",
        "2**4000 * 2**4000",
        "'a' | center(10**9)",
        "'a\\nb' | indent(10**9)",
        "'a'.ljust(10**9)",
        "'\\t'.expandtabs(10**9)",
        "'%999999999d' % 3",
        "'%*d' % (999999999, 3)",
        "'%999999999d' | format(3)",
        "'{:999999999}'.format(3)",
        "('a' * 9999) | replace('a', 'b' * 9999)",
        "('a' * 9999).replace('a', 'b' * 9999)",
        "(['a' * 9999] * 9999) | join",
        "'-'.join(['a' * 9999] * 9999)",
    ],
)
def test_one_operation_cannot_make_a_huge_value(expression: str) -> None:
    assert reason_of("{% set x = " + expression + " %}") in ("too_large", "template_failed")
    with pytest.raises(UnrenderableError, match=r"33554432|bits|width"):
        render("{% set x = " + expression + " %}")


@pytest.mark.parametrize("operator", ["~", "+"])
def test_doubling_ends_at_the_limit(operator: str) -> None:
    source = (
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x OP ns.x %}{% endfor %}"
    ).replace("OP", operator)
    assert reason_of(source) == "too_large"


def test_limits_change_nothing_else() -> None:
    source = (
        "{{ 'a' ~ 1 ~ none }}{{ 'a' + 'b' }}{{ 3 * 'x' }}{{ 2 ** 5 }}{{ 7 % 4 }}{{ '%05.2f' % 3.14159 }}"
        "{{ ['a', 'b'] | join('-') }}{{ 'aXa' | replace('X', 'YY') }}{{ 'a' | center(3) }}|{{ 'x\ny' | indent(2) }}"
        "{{ '{:>4}'.format('z') }}{{ 'q'.ljust(2) }}|{{ [1] + [2] }}"
    )
    assert render(source) == "a1Noneabxxx32303.14a-baYYa a |x\n  y   zq |[1, 2]"


def test_a_template_that_calls_itself_is_stopped() -> None:
    assert reason_of("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}") == "template_failed"
    assert reason_of("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}") == "template_invalid"


def test_a_template_of_excessive_length_is_refused() -> None:
    assert reason_of("x" * (template.TEMPLATE_CHARACTERS_MAX + 1)) == "too_large"
