"""`infera doctor prompts`: asks every engine of a fleet for the token ids of the same requests as ours.

A router whose tokens are not the engine's predicts no hits, and nobody notices. Here it shows, request by request.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from infera.discovery.record import WorkerRecord, tokenizer_digest
from infera.prompt.outcome import ContextLengthError, RenderedRequest, RenderOutcome
from infera.prompt.renderer import PromptRenderer, RequestKind
from infera.tools.errors import ToolError
from kvd.options import Option, Program

ASK_LIMIT_S: Final = 30.0
ANSWER_BYTES_MAX: Final = 16 << 20
PATH: Final = "/tokenize"

PROGRAM = Program(
    name="infera doctor prompts",
    summary="Compares our token ids with every engine's own, for a set of requests.",
    options=(
        Option("--server", "Base URL of the server.", default="http://127.0.0.1:8000", env="INFERA_DISCOVERY"),
        Option("--router-tokenizer-path", "Folder with the tokenizer, as the server was given.", metavar="DIR"),
        Option("--json", "Print one JSON object.", is_switch=True),
    ),
)

_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
_TEXT: Final = " The quick  brown fox\n\n\tdef f(a):\r\n  return {'naïve': '日本'} 🚀 3.1415 "
REQUESTS: Final[tuple[tuple[RequestKind, dict[str, Any]], ...]] = (
    ("chat", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("chat", {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": _TEXT}]}),
    ("chat", {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."},
                           {"role": "user", "content": "And 3 + 3?"}]}),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "In parts, "},
                                                        {"type": "text", "text": "two of them."}]}]}),
    ("chat", {"messages": [{"role": "user", "content": "Rain?"}], "tools": [_TOOL]}),
    ("chat", {"messages": [{"role": "user", "content": "Count: 1, 2,"}, {"role": "assistant", "content": "3,"}],
              "add_generation_prompt": False, "continue_final_message": True}),
    ("completions", {"prompt": "Once upon a time"}),
    ("completions", {"prompt": _TEXT}),
    ("completions", {"prompt": "No special tokens", "add_special_tokens": False}),
)  # fmt: skip


@dataclass
class WorkerReport:
    """One engine's answers beside ours. ``unknown`` are requests that we say we cannot render."""

    worker: str
    requests: int = 0
    exact: int = 0
    unknown: int = 0
    refused: int = 0
    """By the engine itself."""
    problems: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether nothing differed and something was compared."""
        return not self.problems and self.exact > 0


def main(argv: Sequence[str]) -> int:
    """Prints a line for each worker; the status is 1 when tokens differ or nothing could be compared."""
    values = PROGRAM.parse(argv[1:], os.environ)
    base = values.server.split(",")[0].rstrip("/")
    reports = asyncio.run(compare(records_of(base), values.router_tokenizer_path))
    if values.json:
        print(json.dumps([vars(report) for report in reports]))
    for report in reports if not values.json else ():
        mark = "ok  " if report.is_good else "FAIL"
        print(f"{mark} {report.worker}: {report.exact} of {report.requests} requests have the engine's own token ids, "
              f"{report.unknown} unknown to us, {report.refused} refused by the engine")  # fmt: skip
        for problem in report.problems:
            print(f"     {problem}")
    return 0 if reports and all(report.is_good for report in reports) else 1


def records_of(base: str) -> list[WorkerRecord]:
    """The workers a server knows. Raises ToolError when there is none, or no server."""
    status, answer = ask(f"{base}/v1/workers", None)
    if status != 200:
        raise ToolError(f"{base}/v1/workers answers {status or 'nothing'}; name the server with --server")
    records = [msgspec.convert(entry["record"], WorkerRecord) for entry in answer["data"]]
    if not records:
        raise ToolError(f"{base} knows no worker; start one with INFERA_DISCOVERY={base}")
    return records


async def compare(records: Sequence[WorkerRecord], tokenizer_path: str | None) -> list[WorkerReport]:
    """Every worker's engine against our renderer."""
    renderer = PromptRenderer(tokenizer_path=Path(tokenizer_path) if tokenizer_path else None)
    try:
        return [await compare_worker(renderer, record) for record in records]
    finally:
        renderer.close()


async def compare_worker(renderer: PromptRenderer, record: WorkerRecord) -> WorkerReport:
    """All requests at one engine."""
    report = WorkerReport(record.worker_id)
    digest = record.tokenizer_digest or (tokenizer_digest(record.model_path) if record.model_path else "")
    await renderer.prepare(record.model, record.model_path, digest, record.render)
    problem = renderer.problems().get(record.model)
    if problem is not None:
        report.problems.append(f"{problem.reason}: {problem.detail}")
        return report
    for kind, body in REQUESTS:
        status, answer = ask(record.url + PATH, {"model": record.model, **body})
        if status == 404:
            report.problems.append(f"{record.url}{PATH} is not there: this engine cannot be asked")
            return report
        try:
            ours = await renderer.render(record.model, kind, body, context_tokens_max=record.max_context_tokens)
        except ContextLengthError as error:
            ours = None
            report.problems.append(f"{kind}: {error}")
        enter(report, kind, body, status, answer, ours)
    return report


def enter(
    report: WorkerReport, kind: str, body: dict[str, Any], status: int, answer: Any, ours: RenderOutcome | None
) -> None:
    """Count one request, and say what differs."""
    report.requests += 1
    if status in (400, 422):
        report.refused += 1
        return
    if status != 200:
        report.problems.append(f"{kind} {json.dumps(body):.80}: the engine answers {status or 'nothing'}")
        return
    if not isinstance(ours, RenderedRequest):
        report.unknown += 1
        return
    theirs, mine = [answer["tokens"]], [list(prompt.tokens) for prompt in ours.prompts]
    if mine == theirs:
        report.exact += 1
        return
    report.problems.append(
        f"{kind} {json.dumps(body, ensure_ascii=False):.120}: the engine has {theirs!s:.120}, we have {mine!s:.120}"
    )


def ask(url: str, body: dict[str, Any] | None) -> tuple[int, Any]:
    """Status and JSON of an answer; status 0 when there is none."""
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ASK_LIMIT_S) as answer:
            return answer.status, json.loads(answer.read(ANSWER_BYTES_MAX))
    except urllib.error.HTTPError as error:
        return error.code, None
    except (OSError, ValueError):
        return 0, None
