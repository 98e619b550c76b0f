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
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from infera_vllm.faults import LoadFaults
from infera_vllm.layout import group_copiers
from infera_vllm.metadata import InferaMetadata
from infera_vllm.plan import EnginePlan, GroupPlan, Need
from infera_vllm.scheduler_side import SchedulerSide
from infera_vllm.stats import InferaStats
from infera_vllm.worker_side import WorkerSide
from infera_vllm.worth import LoadWorth

from kvd.client.client import KvdClient, RecordSpec

BLOCK_TOKENS = 32
BLOCKS = 64
LAYERS = 3
WINDOW_TOKENS = 2 * BLOCK_TOKENS
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
    """What vLLM would hold: tensors for each rank and group, a scheduler half, and worker halves.

    Groups after the first have a sliding window of two blocks.
    """

    def __init__(
        self, daemon: Daemon, ranks: int = 1, groups: int = 1, seed: int = 0, *, inexact: bool = False,
        faults: LoadFaults | None = None, deadline_s: float = 5.0, unable_rank: int | None = None,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        names = [tuple(f"group.{g}.layer.{i}" for i in range(LAYERS)) for g in range(groups)]
        self.caches = [
            {name: torch.randn(BLOCKS, 2, BLOCK_TOKENS, 16, generator=generator) for group in names for name in group}
            for _ in range(ranks)
        ]
        self.plan = make_plan(names, ranks)
        copiers = [group_copiers(self.plan.groups, rank, cache, BLOCKS) for rank, cache in enumerate(self.caches)]
        self.clients = [
            KvdClient(daemon.socket, f"rig-{i}", self.plan.specs, i - 1 if i else None) for i in range(ranks + 1)
        ]
        for client in self.clients:
            client.start()
        self.stats = InferaStats()
        self.scheduler = SchedulerSide(
            self.clients[0], self.plan, self.stats, LoadWorth(always=True), other_is_inexact=inexact
        )
        self.workers = [
            WorkerSide(
                client, self.plan, rank, is_writer=True, copiers=None if rank == unable_rank else copiers[rank],
                faults=faults or LoadFaults({}), deadline_s=deadline_s,
            )
            for rank, client in enumerate(self.clients[1:])
        ]  # fmt: skip
        self.over: Counter[str] = Counter()
        """Request -> ranks that have reported its load over; whole ones are taken out by `loaded`."""
        self.failed: set[str] = set()
        self.invalid: set[int] = set()

    def blocks(self, block_ids: list[int], group: int = 0) -> list[Any]:
        return [cache[name][block_ids].clone() for cache in self.caches for name in self.plan.groups[group].layers]

    def step(self, orders: InferaMetadata, write: Callable[[], None] = lambda: None, ranks: Any = None) -> None:
        """Run a step in vLLM's order on some ranks (all by default) and report it; `write` is the forward pass."""
        chosen = [self.workers[rank] for rank in (range(len(self.workers)) if ranks is None else ranks)]
        for worker in chosen:
            worker.begin_step(orders)
        write()
        report = None
        for worker in chosen:
            worker.load(orders.loads)
            worker.save(orders)
            over, failed = worker.take_loaded()
            self.over.update(over)
            self.failed |= failed
            self.invalid |= worker.take_failed_blocks()
            mine = worker.report()
            report = mine if report is None else (report.aggregate(mine) if mine else report)
        self.scheduler.step_done(report)

    def loaded(self) -> set[str]:
        """Requests whose loads every rank has reported over since the last call."""
        done = {name for name, ranks in self.over.items() if ranks == len(self.workers)}
        for name in done:
            del self.over[name]
        return done

    def settle(self) -> None:
        """Empty steps until nothing is under way."""
        deadline_s = time.monotonic() + START_S_MAX
        while len(self.scheduler._loads) or len(self.scheduler._saves) or self.scheduler._orders:
            assert time.monotonic() < deadline_s, "loads or saves never ended"
            self.step(self.scheduler.orders(new_step([])))
            time.sleep(0.001)

    def pins(self) -> int:
        session = self.clients[0].session()
        return session.arena.pins_held() if session else 0

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()
        for client in self.clients:
            client.close()


def make_plan(names: list[tuple[str, ...]], ranks: int) -> EnginePlan:
    """A plan as vLLM's configuration would give it."""
    shard_bytes = (LAYERS * 2 * BLOCK_TOKENS * 16 * 4,) * ranks
    groups = tuple(
        GroupPlan(
            position, Need.WINDOW if position else Need.ALL, BLOCK_TOKENS, WINDOW_TOKENS if position else 0, layers,
            RecordSpec(NAMESPACE, position, shard_bytes, "rig"),
        )
        for position, layers in enumerate(names)
    )  # fmt: skip
    return EnginePlan(groups, BLOCK_TOKENS, ranks, {}, ranks, 1)


_numbers = itertools.count()


def request(tokens: list[int], salt: str | None = None, **fields: Any) -> Any:
    """The fields of vLLM's Request that the connector reads."""
    facts = {
        "request_id": f"r{next(_numbers)}", "all_token_ids": list(tokens), "num_tokens": len(tokens),
        "prompt_token_ids": list(tokens), "cache_salt": salt, "lora_request": None, "mm_features": [],
        "prompt_embeds": None, "pooling_params": None, "kv_transfer_params": None, "num_computed_tokens": 0,
        "sampling_params": None, "skip_reading_prefix_cache": False,
    }  # fmt: skip
    return SimpleNamespace(**(facts | fields))


def tables(block_ids: Any) -> tuple[list[int], ...]:
    """One group's blocks, or those of several, as vLLM has them."""
    return block_ids if isinstance(block_ids, tuple) else (block_ids,)


def new_step(entries: list[tuple[Any, Any, int, int]]) -> Any:
    """A scheduler output of new requests: (request, block ids, computed tokens, scheduled tokens)."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=r.request_id, block_ids=tables(blocks), num_computed_tokens=computed)
            for r, blocks, computed, _ in entries
        ],
        num_scheduled_tokens={r.request_id: scheduled for r, _, _, scheduled in entries},
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        ),
    )


def running_step(entries: list[tuple[Any, Any, int, int]], resumed: set[str] | None = None) -> Any:
    """A scheduler output of running requests: (request, new block ids, computed, scheduled)."""
    return SimpleNamespace(
        scheduled_new_reqs=[],
        num_scheduled_tokens={r.request_id: scheduled for r, _, _, scheduled in entries},
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r.request_id for r, _, _, _ in entries],
            new_block_ids=[None if blocks is None else tables(blocks) for _, blocks, _, _ in entries],
            num_computed_tokens=[computed for _, _, computed, _ in entries],
            resumed_req_ids=resumed or set(),
        ),
    )


def serve(
    engine: Engine, tokens: list[int], block_ids: Any, salt: str | None = None, **fields: Any
) -> tuple[int, set[int]]:
    """One request from its first look-up until its blocks are saved; tokens found, and failed blocks."""
    asked = request(tokens, salt, **fields)
    found = matched(engine, asked)
    engine.scheduler.allocated(asked, tables(block_ids), found)
    failed = wait_for_load(engine, asked) if found else set()
    computed = 0 if failed else found
    engine.step(engine.scheduler.orders(new_step([(asked, block_ids, computed, len(tokens) - computed)])))
    engine.settle()
    engine.scheduler.finished(asked)
    return found, failed


def matched(engine: Engine, asked: Any, computed: int = 0) -> int:
    """What can be loaded for a request, asked again as long as its adapter is being read."""
    deadline_s = time.monotonic() + START_S_MAX
    while (found := engine.scheduler.matched_tokens(asked, computed)) is None:
        assert time.monotonic() < deadline_s, "the adapter was never read"
        time.sleep(0.001)
    return found


def wait_for_load(engine: Engine, asked: Any) -> set[int]:
    """Empty steps until the request's load is over on all ranks; the blocks that failed, or {0} for the request."""
    deadline_s = time.monotonic() + START_S_MAX
    while True:
        engine.step(engine.scheduler.orders(new_step([])))
        if asked.request_id in engine.loaded():
            break
        assert time.monotonic() < deadline_s, "the load was never reported"
        time.sleep(0.001)
    failed, engine.invalid = engine.invalid, set()
    return failed | ({0} if asked.request_id in engine.failed else set())
