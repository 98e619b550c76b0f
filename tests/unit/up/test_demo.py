"""The demo's judgement of its rows, and its closing line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from infera.up.demo import PROMPT_LETTERS, Results, _check_rows, real_text, report
from infera.up.stream import Measured

COLD = Measured(worker_id="a", ttft_s=4.0, prompt_tokens=1800, cached_tokens=0, text="It allows use.")
WARM = Measured(worker_id="a", ttft_s=0.1, prompt_tokens=1800, cached_tokens=1792, text="It allows use.")


def good_results() -> Results:
    return Results(rows={"cold": COLD, "hbm": WARM, "other engine": WARM, "restart": WARM})


def test_a_good_run_ends_with_exactly_the_keys_of_the_closing_line(capsys: pytest.CaptureFixture[str]) -> None:
    results = good_results()
    _check_rows(results)
    assert report(results) == 0
    closing = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(closing) == ["cold_ttft_s", "hbm_ttft_s", "other_engine_ttft_s", "restart_ttft_s", "identical"]
    assert closing["identical"] is True


@pytest.mark.parametrize(
    ("row", "change", "words"),
    [
        ("restart", {"text": "It does not."}, "another text"),
        ("other engine", {"cached_tokens": 32}, "32 of 1800 tokens cached"),
        ("other engine", {"cached_tokens": None}, "None of 1800 tokens cached"),
        ("hbm", {"ttft_s": 4.5}, "no less than the cold"),
    ],
)
def test_whatever_is_off_is_named_and_fails(
    row: str, change: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    results = good_results()
    results.rows[row] = replace(results.rows[row], **change)  # type: ignore[arg-type]
    _check_rows(results)
    assert report(results) == 1
    output = capsys.readouterr().out
    assert f"PROBLEM: row '{row}'" in output
    assert words in output
    assert json.loads(output.splitlines()[-1])["identical"] is ("text" not in change)


def test_a_cold_run_that_was_not_cold_fails() -> None:
    results = good_results()
    results.rows["cold"] = replace(COLD, cached_tokens=64)
    _check_rows(results)
    assert any("should have none" in problem for problem in results.problems)


def test_the_text_is_long_enough() -> None:
    assert len(real_text()) > PROMPT_LETTERS
