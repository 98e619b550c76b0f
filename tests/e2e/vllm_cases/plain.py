"""Cases that every model must stand: lengths around block edges, chats, two engines, restarts, terms, aborts."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tests.e2e.vllm_cases.engines import Engine, settle
from tests.e2e.vllm_cases.table import Group
from tests.support.kvd_daemon import DaemonProcess
from tests.support.processes import wait_until

VOCABULARY = 2000
CLIENTS = 2
"""Of kvd, in an engine with one worker: its scheduler and the worker."""
CONNECTED, AWAY = "connected to infera-kvd at", "going on without infera-kvd"


class Prompts:
    """Prompts that share nothing, unless asked to."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def make(self, tokens: int) -> list[int]:
        return [self._dice.randrange(10, VOCABULARY) for _ in range(tokens)]


def lengths(group: Group, engine: Engine, kvd: DaemonProcess, prompts: Prompts, counts: list[int]) -> None:
    """Each length twice: saved by the first, loaded by the second, and served by the engine's own cache to a third."""
    for count in counts:
        prompt, blocks = prompts.make(count), group.whole_blocks(count)
        group.case(f"{count} tokens, new", engine, prompt, (0, 0))
        settle(kvd)
        group.case(f"{count} tokens, in the engine", engine, prompt, (blocks, 0))
        engine.reset()
        group.case(f"{count} tokens, in kvd", engine, prompt, (0, blocks))


def partly_in_the_engine(group: Group, engine: Engine, kvd: DaemonProcess, prompts: Prompts) -> None:
    """The engine holds the beginning, kvd more of it."""
    size = group.block_tokens
    prompt = prompts.make(6 * size + 5)
    engine.ask(prompt)
    settle(kvd)
    engine.reset()
    engine.ask(prompt[: 2 * size + 1], kv_transfer_params={"infera_no_load": True})
    group.case("the first blocks in the engine, the rest in kvd", engine, prompt, (2 * size, 4 * size))


def chat(group: Group, engine: Engine, kvd: DaemonProcess, prompts: Prompts) -> None:
    """Decode blocks hit too: each turn goes on from the last one's answer."""
    size = group.block_tokens
    history = prompts.make(2 * size + 3)
    cached = 0
    for turn in range(3):
        answer = group.case(f"chat, turn {turn + 1}", engine, history, (0, cached), tokens=size + 9)
        history = [*history, *answer.token_ids]
        cached = (len(history) - 1) // size * size  # the last token was sampled, not computed
        history += prompts.make(7)
        settle(kvd)
        engine.reset()


def two_engines(group: Group, one: Engine, other: Engine, kvd: DaemonProcess, prompts: Prompts) -> None:
    """What one has saved the other loads, and the other way round."""
    for name, first, second in (("first to second", one, other), ("second to first", other, one)):
        prompt = prompts.make(5 * group.block_tokens + 7)
        first.ask(prompt)
        settle(kvd)
        group.case(f"two engines, {name}", second, prompt, (0, group.whole_blocks(len(prompt))))


def salts(group: Group, engine: Engine, kvd: DaemonProcess, prompts: Prompts) -> None:
    """A prompt under one salt is not found under another, nor without."""
    prompt = prompts.make(4 * group.block_tokens + 1)
    blocks = group.whole_blocks(len(prompt))
    for salt in ("a", "b", None):
        fields = {"cache_salt": salt} if salt else {}
        group.case(f"salt {salt}, new", engine, prompt, (0, 0), **fields)
        settle(kvd)
        engine.reset()
        group.case(f"salt {salt}, saved", engine, prompt, (0, blocks), **fields)
        engine.reset()


def terms(group: Group, engine: Engine, kvd: DaemonProcess, prompts: Prompts) -> None:
    """What a request says of its blocks is done."""
    size = group.block_tokens
    for name, parameters, found in [
        ("retention none", {"infera_retention": "none"}, 0),
        ("retention long", {"infera_retention": "long"}, 3 * size),
        ("an hour to live", {"infera_ttl_seconds": 3600}, 3 * size),
        ("a second to live", {"infera_ttl_seconds": 1}, 0),
        ("not understood", {"infera_retention": "forever"}, 3 * size),
    ]:
        prompt = prompts.make(3 * size + 1)
        group.case(f"{name}, new", engine, prompt, (0, 0), kv_transfer_params=parameters)
        settle(kvd)
        if "infera_ttl_seconds" in parameters and not found:
            wait_until(lambda: kvd.metrics()["ttl_expired_total"] > 0, "the time to live is over")
        engine.reset()
        group.case(f"{name}, again", engine, prompt, (0, found))
    prompt = prompts.make(3 * size + 1)
    engine.ask(prompt)
    settle(kvd)
    engine.reset()
    group.case("no load", engine, prompt, (0, 0), kv_transfer_params={"infera_no_load": True})


def parallel(group: Group, engine: Engine, kvd: DaemonProcess, prompts: Prompts) -> None:
    """Requests at once that share a long beginning: each gets its own answer, and all of the beginning from a cache."""
    size = group.block_tokens
    shared = prompts.make(8 * size)
    engine.ask([*shared, 1])
    settle(kvd)
    engine.reset()
    asked = [[*shared, *prompts.make(9)] for _ in range(6)]
    before = engine.hits()
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(engine.ask, asked))
    found = sum(after - then for after, then in zip(engine.hits(), before, strict=True))
    same = [answer.is_same(group.right_answer(prompt, 16, "m"), group.tolerance)
            for answer, prompt in zip(answers, asked, strict=True)]  # fmt: skip
    group.table.enter(group.name, "six at once with one beginning", is_same=all(same), wanted=6 * 8 * size, found=found)


def preemption(group: Group, engine: Engine, prompts: Prompts) -> None:
    """More requests than the engine's memory holds: some are put back and come again."""
    asked = [prompts.make(300 + 10 * number) for number in range(8)]
    before = engine.metric("vllm:num_preemptions_total")
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda prompt: engine.ask(prompt, 120), asked))
    same = [answer.is_same(group.right_answer(prompt, 120, "m"), group.tolerance)
            for answer, prompt in zip(answers, asked, strict=True)]  # fmt: skip
    happened = engine.metric("vllm:num_preemptions_total") > before
    group.table.enter(group.name, "preemption", is_same=all(same), wanted=True, found=happened)


def aborts(group: Group, engine: Engine, kvd: DaemonProcess, prompts: Prompts) -> None:
    """Clients that leave at any moment cost nobody anything, and leave nothing behind."""
    size = group.block_tokens
    saved = prompts.make(10 * size + 1)
    engine.ask(saved)
    settle(kvd)
    engine.reset()
    for after_s in (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1):
        engine.ask_and_leave(saved, 60, after_s)
        engine.ask_and_leave(prompts.make(7 * size), 60, after_s)
    wait_until(lambda: engine.metric("vllm:num_requests_running") == 0, "nothing runs any more")
    settle(kvd)
    engine.reset()
    group.case("after clients that left", engine, saved, (0, 10 * size))
    metrics = kvd.status(audit=True)["metrics"]
    left = (metrics["reservations"], metrics["quarantined_bytes"])
    group.table.enter(group.name, "nothing left of them", is_same=True, wanted=[0, 0], found=list(left))


def resets(group: Group, engine: Engine, kvd: DaemonProcess, prompts: Prompts) -> None:
    """A reset of the external cache begins a new name; nothing kept before is used by this engine any more."""
    prompt = prompts.make(4 * group.block_tokens + 1)
    engine.ask(prompt)
    settle(kvd)
    records = kvd.metrics()["records_present"]
    engine.reset(external=True)
    settle(kvd)
    group.case("external reset, not used any more", engine, prompt, (0, 0))
    kept = kvd.metrics()["records_present"] >= records
    group.table.enter(group.name, "external reset, others' blocks are kept", is_same=True, wanted=True, found=kept)


def kvd_restarts(group: Group, engine: Engine, kvd: DaemonProcess, prompts: Prompts) -> None:
    """The daemon is stopped, killed, away, and back: right answers throughout, and what it held is still there."""
    prompt = prompts.make(4 * group.block_tokens + 1)
    blocks = group.whole_blocks(len(prompt))
    engine.ask(prompt)
    settle(kvd)
    clients = engine.said(CONNECTED)
    for name, end in (("stopped", kvd.stop), ("killed", kvd.kill)):
        away, there = engine.said(AWAY), engine.said(CONNECTED)
        end()
        wait_until(lambda away=away: engine.said(AWAY) == away + clients, "the engine misses the daemon")  # type: ignore[misc]
        engine.reset()
        group.case(f"kvd {name}, away", engine, prompt, (0, 0))
        kvd.start()
        wait_until(lambda there=there: engine.said(CONNECTED) == there + clients, "the engine is back")  # type: ignore[misc]
        engine.reset()
        group.case(f"kvd {name}, back", engine, prompt, (0, blocks))
    there = engine.said(CONNECTED)
    kvd.kill()
    kvd.start()  # faster than anybody looks
    wait_until(lambda: engine.said(CONNECTED) == there + clients, "the engine is back")
    engine.reset()
    group.case("kvd back at once", engine, prompt, (0, blocks))


def engine_restarts(group: Group, engine: Engine, kvd: DaemonProcess, prompts: Prompts) -> None:
    """A new engine finds what the old one had saved; one killed in the middle leaves nothing pinned."""
    prompt = prompts.make(6 * group.block_tokens + 2)
    engine.ask(prompt)
    settle(kvd)
    engine.ask_and_leave(prompts.make(5 * group.block_tokens), 200, 0.05)
    left = kvd.metrics()["clients"] - CLIENTS
    engine.stop(signal.SIGKILL)
    wait_until(lambda: kvd.metrics()["clients"] == left, "the killed engine's clients are gone")
    metrics = kvd.status(audit=True)["metrics"]
    group.table.enter(
        group.name, "engine killed, nothing left of it", is_same=True, wanted=[0, 0],
        found=[metrics["reservations"], metrics["quarantined_bytes"]],
    )  # fmt: skip
    engine.start()
    engine.wait_ready()
    group.case("engine restarted", engine, prompt, (0, group.whole_blocks(len(prompt))))


def faults(group: Group, engine: Engine, kvd: DaemonProcess, prompts: Prompts) -> None:
    """The engine's first loads fail, come late, and bring a wrong byte: recomputed, counted, and right. The engine
    itself goes on counting the failed tokens as hits."""
    size = group.block_tokens
    asked = [prompts.make(5 * size + 3 + number) for number in range(3)]
    for prompt in asked:
        engine.ask(prompt)
    settle(kvd)
    engine.reset()
    for prompt, (name, outcome) in zip(asked, ERRORS, strict=True):
        before = engine.metric("infera_kvd_engine_loads_total", outcome=outcome)
        answer = engine.ask(prompt)
        right = answer.is_same(group.right_answer(prompt, 16, "m"), group.tolerance)
        found = read_counter(engine, outcome, before)
        group.table.enter(group.name, name, is_same=right, wanted=1, found=found)
    settle(kvd)
    engine.reset()
    group.case("after the faults", engine, asked[0], (0, group.whole_blocks(len(asked[0]))))


ERRORS = (("a load that fails", "injected"), ("a wrong byte", "damaged"), ("a load past its deadline", "deadline"))
FAULTS = "fail@1,corrupt@2,delay:6@3"


def read_counter(engine: Engine, outcome: str, before: float) -> int:
    """The counter's growth; vLLM takes statistics in with a later step, so one more request may be needed."""

    def grown() -> Iterator[float]:
        for _ in range(20):
            yield engine.metric("infera_kvd_engine_loads_total", outcome=outcome) - before
            engine.ask([7, 8, 9], 1)
            time.sleep(0.05)

    return int(next((value for value in grown() if value), 0))
