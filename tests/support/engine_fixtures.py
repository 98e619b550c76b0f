"""One real fleet for a whole test run: infera-kvd, the server and two vLLM engines with the tiny model."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infera.tools.engine_env import ensure_vllm
from infera.tools.models import prepare_tiny
from infera.tools.overlay import ensure_overlay
from infera.up.fleet import Fleet
from infera.up.settings import FleetSettings
from tests.support.processes import Reply, call, free_port, wait_until

BLOCK_TOKENS = 32
ENGINE_FLAGS = (
    "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8", "--block-size", str(BLOCK_TOKENS),
    "--num-gpu-blocks-override", "80",
)  # fmt: skip


@dataclass
class EngineFleet:
    """The running fleet and how tests speak to it."""

    fleet: Fleet

    @property
    def url(self) -> str:
        """The server's address."""
        return self.fleet.settings.server_url

    @property
    def worker_ids(self) -> list[str]:
        """The workers' ids in the order of the engines."""
        return [f"vllm-127.0.0.1:{port}" for port in self.fleet.engine_ports]

    def ask(self, prompt: str, worker: str | None = None, max_tokens: int = 16, **fields: Any) -> Completion:
        """A greedy completion; fails the test unless the answer is 200."""
        headers = {"X-Infera-Worker": worker} if worker else {}
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        reply = call(f"{self.url}/v1/completions", body, headers=headers, timeout_s=60)
        assert reply.status == 200, reply.body
        return Completion(reply)

    def kvd_metric(self, name: str) -> int:
        """One value of infera-kvd's /metrics."""
        reply = call(f"http://127.0.0.1:{self.fleet.kvd_http_port}/metrics")
        for line in reply.body.decode().splitlines():
            if line.startswith(f"infera_kvd_{name} "):
                return int(line.split()[1])
        raise AssertionError(f"infera-kvd has no metric {name}")

    def ask_and_save(self, prompt: str, worker: str, max_tokens: int = 16, **fields: Any) -> Completion:
        """A greedy completion of a prompt nobody sent before, and the wait until its whole blocks are in kvd:
        engines save behind their answers. The last token was sampled but never computed, so it completes none."""
        before = self.kvd_metric("records_present")
        answer = self.ask(prompt, worker, max_tokens, **fields)
        blocks = (int(answer.reply.json["usage"]["total_tokens"]) - 1) // BLOCK_TOKENS
        wait_until(lambda: self.kvd_metric("records_present") >= before + blocks, f"{blocks} blocks were saved")
        return answer

    def engine_log(self, index: int) -> str:
        """What an engine has logged so far."""
        return (self.fleet.settings.run_folder / f"engine-{index + 1}.log").read_text(errors="replace")


@dataclass(frozen=True)
class Completion:
    """An answer, with what tests look at."""

    reply: Reply

    @property
    def text(self) -> str:
        """The generated text."""
        return str(self.reply.json["choices"][0]["text"])

    @property
    def worker(self) -> str:
        """Who answered."""
        return self.reply.headers["x-infera-worker"]

    @property
    def prompt_tokens(self) -> int:
        """As the engine counts."""
        return int(self.reply.json["usage"]["prompt_tokens"])

    @property
    def cached_tokens(self) -> int:
        """As the engine reports."""
        return int(self.reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    @property
    def cacheable_tokens(self) -> int:
        """Whole blocks of the prompt, one token left to compute."""
        return (self.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture(scope="session")
def engine_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFleet]:
    """The fleet, started once (about a minute on two cores) and ended with the run."""
    python = ensure_vllm()
    runtime = tempfile.mkdtemp(prefix="infera-e2e-")
    os.environ["INFERA_RUNTIME_DIR"] = runtime
    settings = FleetSettings(
        model=str(prepare_tiny(engine_python=python)),
        served_name="tiny",
        engine_python=python,
        overlay=ensure_overlay(python),
        run_folder=tmp_path_factory.mktemp("fleet"),
        engines=2,
        port=free_port(),
        kvd_memory="256M",
        keeps_arena=False,
        # Else a busy machine may find that computing is faster, and tests could not say what is loaded.
        engine_flags=(*ENGINE_FLAGS, "--kvd-loads", "always"),
    )
    try:
        with Fleet(settings) as fleet:
            fleet.start()
            yield EngineFleet(fleet)
    finally:
        os.environ.pop("INFERA_RUNTIME_DIR", None)
        shutil.rmtree(Path(runtime), ignore_errors=True)


def prompt_of(seed: int, words: int) -> str:
    """A prompt that no other seed shares a block with."""
    vocabulary = [
        "def",
        "class",
        "return",
        "import",
        "self",
        "value",
        "index",
        "token",
        "buffer",
        "stream",
        "if",
        "else",
        "for",
        "while",
        "yield",
        "list",
        "map",
    ]
    state = seed * 2654435761 % 2**32
    chosen = [f"# {seed}"]
    for _ in range(words):
        state = (state * 1103515245 + 12345) % 2**31
        chosen.append(vocabulary[(state >> 8) % len(vocabulary)])
    return " ".join(chosen)
