"""Models for the demo and the tests. The end-to-end tests make and use the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from infera.tools import models


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="llama"):
        models.prepare_tiny(tmp_path, kind="gpt")


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    digest = models.digest_of([(models.MAKERS_FOLDER / "tiny.py").read_bytes()])
    folder = tmp_path / "models" / f"tiny-llama-{digest}"
    folder.mkdir(parents=True)
    assert models.prepare_tiny(tmp_path) == folder
