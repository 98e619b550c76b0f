"""The facts file: whole at every moment, and not taken for an engine once its process has ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infera.hooks import facts
from infera.hooks.facts import ENGINE_FACTS, add_facts, begin_facts, facts_path, live_engines


def test_what_is_added_later_is_there_too(tmp_path: Path) -> None:
    path = facts_path(str(tmp_path), "ab")
    begin_facts(path, {"url": "u", "notes": ["n"]})
    add_facts({ENGINE_FACTS: str(path)}, {"namespace": "00", "notes": []})
    (found,) = live_engines(tmp_path)
    assert (found["url"], found["namespace"], found["notes"], found["pid"]) == ("u", "00", [], os.getpid())
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_engines_of_fleets_in_folders_of_their_own_are_listed_too(tmp_path: Path) -> None:
    (tmp_path / "up-8000").mkdir()
    begin_facts(facts_path(str(tmp_path / "up-8000"), "ab"), {"url": "u"})
    assert [found["url"] for found in live_engines(tmp_path)] == ["u"]
    assert live_engines(tmp_path / "nowhere") == []


def test_without_a_file_nothing_is_written(tmp_path: Path) -> None:
    add_facts({}, {"namespace": "00"})
    assert list(tmp_path.iterdir()) == []


def test_ended_engines_are_not_listed_and_their_files_go(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from infera.hooks.facts import begin_facts; "
    code += "begin_facts(Path(sys.argv[1]), {})"
    old = facts_path(str(tmp_path), "old")
    subprocess.run([sys.executable, "-c", code, str(old)], check=True)
    assert old.exists()
    assert live_engines(tmp_path) == []
    begin_facts(facts_path(str(tmp_path), "new"), {})
    assert not old.exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"pid": "1"}', '{"pid": 1}', '{"pid": 999999999, "start_ticks": null}']
)
def test_other_files_are_not_taken_for_engines(tmp_path: Path, text: str) -> None:
    facts_path(str(tmp_path), "x").write_text(text)
    assert live_engines(tmp_path) == []


def test_a_process_id_used_again_is_another_process(tmp_path: Path) -> None:
    path = facts_path(str(tmp_path), "x")
    begin_facts(path, {})
    known = json.loads(path.read_text())
    path.write_text(json.dumps(known | {"start_ticks": known["start_ticks"] + 1}))
    assert live_engines(tmp_path) == []


def test_the_number_of_files_looked_at_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "FILES_MAX", 2)
    for name in "abc":
        facts_path(str(tmp_path), name).write_text("{}")
    begin_facts(facts_path(str(tmp_path), "z"), {})
    assert len(list(tmp_path.iterdir())) == 2
