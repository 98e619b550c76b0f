from __future__ import annotations

import pytest

from infera.prompt.content_format import detect_content_format
from infera.prompt.template import ChatTemplate
from tests.support.chat_templates import CHATML, HEADERS, PARTS


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, "string"),
        (HEADERS, "string"),
        (PARTS, "openai"),
        ("{% for m in messages %}{% for c in m['content'] %}{{ c.text }}{% endfor %}{% endfor %}", "openai"),
        ("{% set all = messages[1:] %}{% for m in all %}{% for c in m.content %}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages | list %}{% for c in m.content %}{% endfor %}{% endfor %}", "openai"),
        (
            "{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            (
                "{% macro show(body) %}{% for c in body %}{% endfor %}{% endmacro %}"
                "{% for m in messages %}{{ show(m.content) }}{% endfor %}"
            ),
            "openai",
        ),
        (
            "{% macro show(content) %}{% for c in content %}{% endfor %}{% endmacro %}{{ messages[0].content }}",
            "string",
        ),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", "string"),
    ],
)
def test_format_follows_loops_over_content(source: str, expected: str) -> None:
    assert detect_content_format(ChatTemplate(source)) == expected
