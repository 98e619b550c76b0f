"""What `infera doctor prompts` makes of an engine's answers, and of none."""

from __future__ import annotations

from typing import Any

import pytest

from infera.commands import doctor_prompts
from infera.commands.doctor import main
from infera.commands.doctor_prompts import WorkerReport, compare, enter
from infera.prompt.outcome import RenderedPrompt, RenderedRequest, Unrenderable
from infera.tools.errors import ToolError
from tests.support.processes import free_port
from tests.support.records import record

OURS = RenderedRequest((RenderedPrompt((1, 2, 3), b""),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "answer", "ours", "counts"),
    [
        (200, {"tokens": [1, 2, 3]}, OURS, (1, 0, 0, 0)),
        (200, {"tokens": [1, 2]}, OURS, (0, 0, 0, 1)),
        (400, None, OURS, (0, 0, 1, 0)),
        (403, None, OURS, (0, 0, 0, 1)),
        (0, None, OURS, (0, 0, 0, 1)),
        (200, {"tokens": [1]}, Unrenderable("image", "an image"), (0, 1, 0, 0)),
    ],
)
def test_one_request(status: int, answer: Any, ours: Any, counts: tuple[int, ...]) -> None:
    report = WorkerReport("w")
    enter(report, "chat", {"messages": []}, status, answer, ours)
    assert (report.exact, report.unknown, report.refused, len(report.problems)) == counts
    assert report.is_good == (counts == (1, 0, 0, 0))


def test_without_a_server_it_says_what_to_name() -> None:
    with pytest.raises(ToolError, match="--server"):
        main(["prompts", "--server", f"http://127.0.0.1:{free_port()}"])


async def test_a_worker_whose_tokenizer_cannot_be_read_is_a_failure() -> None:
    (report,) = await compare([record(1, model_path="")], None)
    assert not report.is_good
    assert "no_tokenizer" in report.problems[0]


def test_a_server_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_prompts, "ask", lambda url, body: (200, {"data": []}))
    with pytest.raises(ToolError, match="knows no worker"):
        main(["prompts"])
