"""The connector's two halves over a real infera-kvd and real tensors, with the test in vLLM's place."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from infera_vllm.layout import segments
from infera_vllm.metadata import InferaMetadata
from infera_vllm.scheduler_side import SchedulerSide
from infera_vllm.worker_side import WorkerSide

from kvd.client.client import KvdClient, RecordSpec
from kvd.client.copier import CpuCopier

BLOCK_TOKENS = 32
BLOCKS = 64
LAYERS = 3
START_S_MAX = 30.0
NAMESPACE = b"n" * 16


class Daemon:
    """A real infera-kvd with 8 MiB."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="infera-inside-"))
        self.socket = self.folder / "kvd.sock"
        self.arena = Path(f"/dev/shm/infera-inside-{os.getpid()}-{time.monotonic_ns()}")
        self.memory = "8M"
        self.start()

    def start(self) -> None:
        self.log = (self.folder / "kvd.log").open("a")
        argv = [sys.executable, "-m", "kvd", "serve", "--socket", str(self.socket), "--memory", self.memory]
        argv += ["--path", str(self.arena), "--http-port", "0"]
        self.process = subprocess.Popen(argv, stdout=self.log, stderr=self.log)
        wait_for(self.socket.exists, "infera-kvd listens")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.socket.unlink(missing_ok=True)

    def clean_up(self) -> None:
        """End it if it runs, and remove what it leaves for a successor."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(20)
        self.log.close()
        for folder in (self.arena, self.folder):
            shutil.rmtree(folder, ignore_errors=True)

    def data_file(self) -> Path:
        (path,) = self.arena.glob("*.data")
        return path


def wait_for(condition: Any, what: str) -> None:
    deadline_s = time.monotonic() + START_S_MAX
    while not condition():
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        time.sleep(0.02)


class Engine:
    """What vLLM would hold: tensors for each rank, a scheduler half, and worker halves."""

    def __init__(self, daemon: Daemon, ranks: int = 1, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.caches = [
            {f"layer.{i}": torch.randn(BLOCKS, 2, BLOCK_TOKENS, 16, generator=generator) for i in range(LAYERS)}
            for _ in range(ranks)
        ]
        names = list(self.caches[0])
        copiers = [CpuCopier(segments(cache, names, BLOCKS)) for cache in self.caches]
        self.spec = RecordSpec(NAMESPACE, 0, tuple(copier.object_bytes for copier in copiers), "rig")
        self.clients = [KvdClient(daemon.socket, f"rig-{i}", [self.spec]) for i in range(ranks + 1)]
        for client in self.clients:
            client.start()
        self.scheduler = SchedulerSide(self.clients[0], self.spec, BLOCK_TOKENS, ranks)
        self.workers = [
            WorkerSide(client, self.spec, rank, copier)
            for rank, (client, copier) in enumerate(zip(self.clients[1:], copiers, strict=True))
        ]
        self.free = list(range(1, BLOCKS))

    def blocks(self, block_ids: list[int]) -> list[Any]:
        return [cache[name][block_ids].clone() for cache in self.caches for name in cache]

    def step(self, orders: InferaMetadata, ranks: list[int] | None = None) -> set[int]:
        """Run a step on some ranks (all by default) and report it; the blocks that failed."""
        invalid: set[int] = set()
        report = None
        for rank in ranks if ranks is not None else range(len(self.workers)):
            worker = self.workers[rank]
            worker.load(orders.loads)
            worker.save(orders.saves)
            invalid |= worker.take_failed()
            mine = worker.report()
            report = mine if report is None else (report.aggregate(mine) if mine else report)
        self.scheduler.step_done(invalid, report)
        return invalid

    def pins(self) -> int:
        session = self.clients[0].session()
        return session.arena.pins_held() if session else 0

    def close(self) -> None:
        self.scheduler.close()
        for client in self.clients:
            client.close()


_numbers = itertools.count()


def request(tokens: list[int], salt: str | None = None, **fields: Any) -> Any:
    """The fields of vLLM's Request that the connector reads."""
    facts = {
        "request_id": f"r{next(_numbers)}", "all_token_ids": list(tokens), "num_tokens": len(tokens),
        "prompt_token_ids": list(tokens), "cache_salt": salt, "lora_request": None, "mm_features": [],
        "prompt_embeds": None, "pooling_params": None,
    }  # fmt: skip
    return SimpleNamespace(**(facts | fields))


def new_step(entries: list[tuple[Any, list[int], int, int]]) -> Any:
    """A scheduler output of new requests: (request, block ids, computed tokens, scheduled tokens)."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=r.request_id, block_ids=(blocks,), num_computed_tokens=computed)
            for r, blocks, computed, _ in entries
        ],
        num_scheduled_tokens={r.request_id: scheduled for r, _, _, scheduled in entries},
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        ),
    )


def running_step(entries: list[tuple[Any, list[int] | None, int, int]], resumed: set[str] | None = None) -> Any:
    """A scheduler output of running requests: (request, new block ids, computed, scheduled)."""
    return SimpleNamespace(
        scheduled_new_reqs=[],
        num_scheduled_tokens={r.request_id: scheduled for r, _, _, scheduled in entries},
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r.request_id for r, _, _, _ in entries],
            new_block_ids=[None if blocks is None else (blocks,) for _, blocks, _, _ in entries],
            num_computed_tokens=[computed for _, _, computed, _ in entries],
            resumed_req_ids=resumed or set(),
        ),
    )


def serve(engine: Engine, tokens: list[int], block_ids: list[int], salt: str | None = None) -> tuple[int, set[int]]:
    """One request from its first look-up to the end of its prefill; tokens found, and failed blocks."""
    asked = request(tokens, salt)
    found = engine.scheduler.matched_tokens(asked, 0)
    engine.scheduler.allocated(asked, block_ids, found)
    orders = engine.scheduler.orders(new_step([(asked, block_ids, found, len(tokens) - found)]))
    failed = engine.step(orders)
    engine.scheduler.finished(asked.request_id)
    return found, failed
