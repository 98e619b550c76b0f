from __future__ import annotations

import pytest

from infera.tools import reference
from infera.tools.sources import checkout_folder


def test_every_page_made_from_the_tables_is_current() -> None:
    root = checkout_folder()
    assert root is not None
    for path, text in reference.pages(root).items():
        assert (root / path).read_text() == text, "run: .venv/bin/python -m infera.tools.reference"


def test_marked_parts_are_filled_and_the_rest_is_kept() -> None:
    page = "a\n<!-- flags: python -m infera.server, Queue -->\nold | row\n<!-- end of flags -->\nz\n"
    made = reference.with_parts(page)
    assert made.startswith("a\n<!-- flags")
    assert made.endswith("<!-- end of flags -->\nz\n")
    assert "| `--queue-max QUEUE_MAX` |" in made
    assert "old" not in made
    assert reference.with_parts(made) == made


def test_a_section_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError):
        reference.with_parts("<!-- flags: python -m infera.server, Nothing -->\n<!-- end of flags -->\n")
