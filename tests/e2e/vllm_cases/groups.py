"""The groups of cases: a model, its flags, its engines, and what is asked of them."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from infera.tools.models import prepare_smollm2, prepare_tiny
from tests.e2e.vllm_cases import plain
from tests.e2e.vllm_cases.adapters import make_adapter
from tests.e2e.vllm_cases.engines import Engine, settle
from tests.e2e.vllm_cases.table import Group, Table, progress
from tests.support.kvd_daemon import DaemonProcess
from tests.support.processes import call, wait_until

TINY = ["--max-model-len", "2048", "--max-num-seqs", "8", "--num-gpu-blocks-override", "80"]
FLOAT32 = ["--dtype", "float32", "--block-size", "32", *TINY]
# One kernel computes a chunk of any length here; sums in another order differ in the last bits.
TOLERANCE_FLOAT32, TOLERANCE_BFLOAT16 = 1e-4, 0.05


@contextmanager
def engines(
    title: str, table: Table, model: Path, flags: list[str], *, lives: list[dict[str, str]], block_tokens: int,
    tolerance: float = TOLERANCE_FLOAT32, own_flags: list[str] | None = None, cores: str = "",
    reference_flags: list[str] | None = None,
) -> Iterator[tuple[Group, list[Engine], DaemonProcess]]:  # fmt: skip
    """A reference, a daemon, and an engine for each of `lives` (its environment)."""
    progress(f"group {title}: starting {1 + len(lives)} engines")
    with tempfile.TemporaryDirectory(prefix="infera-cases-") as temporary:
        folder = Path(temporary)
        kvd = DaemonProcess(memory="512M").start()
        reference = Engine("reference", model, reference_flags or flags, folder, None, cores=cores or "0")
        others = [
            Engine(f"engine-{n}", model, flags + (own_flags or []), folder, kvd, environ, cores or str((n + 1) % 2))
            for n, environ in enumerate(lives)
        ]
        try:
            for engine in (reference, *others):
                engine.start()
            for engine in (reference, *others):
                engine.wait_ready()
            progress(f"group {title}")
            yield Group(title, table, reference, tolerance, block_tokens), others, kvd
        except BaseException:
            for engine in (reference, *others):
                print(f"last words of {engine.name}:", *engine.last_words(), sep="\n  ", flush=True)
            raise
        finally:
            for engine in (reference, *others):
                engine.stop()
            kvd.clean_up()


def llama(table: Table, seed: int) -> None:
    """The tiny Llama in float32, blocks of 32: everything."""
    faulty = {"INFERA_TEST_LOAD_FAULTS": plain.FAULTS}
    flags = [*FLOAT32, "--max-num-batched-tokens", "512"]
    with engines("llama", table, prepare_tiny(), flags, lives=[{}, faulty], block_tokens=32) as (group, both, kvd):
        one, other = both
        prompts = plain.Prompts(seed)
        plain.faults(group, other, kvd, prompts)
        plain.lengths(group, one, kvd, prompts, [1, 31, 32, 33, 64, 65, 167, 500, 1200, 1900])
        plain.partly_in_the_engine(group, one, kvd, prompts)
        plain.chat(group, one, kvd, prompts)
        plain.two_engines(group, one, other, kvd, prompts)
        plain.salts(group, one, kvd, prompts)
        plain.terms(group, one, kvd, prompts)
        plain.parallel(group, one, kvd, prompts)
        plain.preemption(group, one, prompts)
        plain.aborts(group, one, kvd, prompts)
        plain.kvd_restarts(group, one, kvd, prompts)
        plain.engine_restarts(group, other, kvd, prompts)
        plain.resets(group, one, kvd, prompts)


def bfloat16(table: Table, seed: int) -> None:
    """The tiny Llama in bfloat16, blocks of 128."""
    flags = ["--dtype", "bfloat16", "--block-size", "128", "--max-model-len", "2048", "--max-num-seqs", "8"]
    flags += ["--num-gpu-blocks-override", "40"]
    found = engines(
        "bfloat16", table, prepare_tiny(), flags, lives=[{}], block_tokens=128, tolerance=TOLERANCE_BFLOAT16
    )
    with found as (group, (engine,), kvd):
        prompts = plain.Prompts(seed)
        plain.lengths(group, engine, kvd, prompts, [127, 128, 129, 700])
        plain.chat(group, engine, kvd, prompts)


def hybrid(table: Table, seed: int) -> None:
    """A tiny Gemma 3: layers with a window of 128 tokens beside layers without."""
    flags = ["--dtype", "float32", "--block-size", "32", "--max-model-len", "2048", "--max-num-seqs", "8"]
    flags += ["--num-gpu-blocks-override", "160"]
    model = prepare_tiny(kind="gemma3")
    with engines("hybrid", table, model, flags, lives=[{}], block_tokens=32) as (group, (engine,), kvd):
        prompts = plain.Prompts(seed)
        plain.lengths(group, engine, kvd, prompts, [33, 129, 300, 800])
        plain.chat(group, engine, kvd, prompts)
        plain.kvd_restarts(group, engine, kvd, prompts)


def adapters(table: Table, seed: int) -> None:
    """Two LoRA adapters and the base model, then another adapter under an old name."""
    with tempfile.TemporaryDirectory(prefix="infera-adapters-") as temporary:
        folder = Path(temporary)
        paths = {name: make_adapter(folder / name, number) for number, name in enumerate(("a", "b", "c"), 1)}
        flags = [*FLOAT32, "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules"]
        flags += [f"{name}={paths[name]}" for name in ("a", "b")]
        with engines("adapters", table, prepare_tiny(), flags, lives=[{}], block_tokens=32) as (group, (engine,), kvd):
            ask_adapters(group, engine, kvd, plain.Prompts(seed), paths)


def ask_adapters(
    group: Group, engine: Engine, kvd: DaemonProcess, prompts: plain.Prompts, paths: dict[str, Path]
) -> None:
    prompt = prompts.make(4 * 32 + 9)
    for model in ("m", "a", "b"):
        group.case(f"{model}, new", engine, prompt, (0, 0), model=model)
        settle(kvd)
        engine.reset()
        group.case(f"{model}, saved", engine, prompt, (0, 4 * 32), model=model)
        engine.reset()
    answers = {group.right_answer(prompt, 16, model).text for model in ("m", "a", "b")}
    group.table.enter(group.name, "the adapters change the answer", is_same=True, wanted=3, found=len(answers))
    for each in (engine, group.reference):
        for path, body in (("unload", {"lora_name": "a"}), ("load", {"lora_name": "a", "lora_path": str(paths["c"])})):
            assert call(f"{each.url}/v1/{path}_lora_adapter", body).status == 200
    group._known.clear()
    group.case("another adapter under an old name", engine, prompt, (0, 0), model="a")


def speculation(table: Table, seed: int) -> None:
    """Drafts from n-grams of the prompt: what was rejected is never saved."""
    own = [
        "--speculative-config",
        json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}),
    ]
    with engines(
        "speculation", table, prepare_tiny(), FLOAT32, lives=[{}], block_tokens=32, own_flags=own
    ) as (group, (engine,), kvd):  # fmt: skip
        prompts = plain.Prompts(seed)
        part = prompts.make(24)
        history = part * 4
        cached = 0
        for turn in range(4):
            answer = group.case(f"repeating text, turn {turn + 1}", engine, history, (0, cached), tokens=40)
            history = [*history, *answer.token_ids]
            cached = (len(history) - 1) // 32 * 32
            history += part
            settle(kvd)
            engine.reset()
        drafted = engine.metric("vllm:spec_decode_num_draft_tokens_total")
        accepted = engine.metric("vllm:spec_decode_num_accepted_tokens_total")
        group.table.enter(group.name, "drafts were made and some rejected", is_same=True, wanted=True,
                          found=drafted > accepted)  # fmt: skip


def ranks(table: Table, seed: int) -> None:
    """Two tensor-parallel ranks, each with its shard."""
    model = prepare_tiny(kind="llama2heads")
    found = engines("two ranks", table, model, [*FLOAT32, "--tensor-parallel-size", "2"], lives=[{}], block_tokens=32,
                    cores="0|1")  # fmt: skip
    with found as (group, (engine,), kvd):
        prompts = plain.Prompts(seed)
        plain.lengths(group, engine, kvd, prompts, [33, 300])
        plain.chat(group, engine, kvd, prompts)


def beside(table: Table, seed: int) -> None:
    """vLLM's own ExampleConnector beside ours: it knows neither salts nor adapters, so what it brings is not kept."""
    with tempfile.TemporaryDirectory(prefix="infera-example-") as temporary:
        example = {
            "kv_connector": "ExampleConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": temporary},
        }  # fmt: skip
        own = ["--kv-transfer-config", json.dumps(example)]
        with engines(
            "beside another connector", table, prepare_tiny(), FLOAT32, lives=[{}], block_tokens=32, own_flags=own
        ) as (group, (engine,), kvd):  # fmt: skip
            prompt = plain.Prompts(seed).make(4 * 32 + 5)
            group.case("new", engine, prompt, (0, 0))
            settle(kvd)
            present = kvd.metrics()["records_present"]
            group.table.enter(group.name, "what we computed is kept", is_same=True, wanted=4, found=present)
            engine.reset()
            empty(engine, kvd)
            # The example's files come first. What it brings is right here, without salt and adapter.
            is_same = engine.ask(prompt).is_same(group.right_answer(prompt, 16, "m"), group.tolerance)
            group.table.enter(group.name, "again, from the other's files", is_same=is_same, wanted=True, found=True)
            settle(kvd)
            found = kvd.metrics()["records_present"]
            group.table.enter(group.name, "what the other brought is not kept", is_same=True, wanted=0, found=found)


def empty(engine: Engine, kvd: DaemonProcess) -> None:
    """A daemon that holds nothing in the place of the old one."""
    there = engine.said(plain.CONNECTED)
    kvd.stop()
    shutil.rmtree(kvd.arena)
    kvd.arena.mkdir()
    kvd.start()
    wait_until(lambda: engine.said(plain.CONNECTED) == there + plain.CLIENTS, "the engine is back")


def smollm2(table: Table, seed: int) -> None:
    """The real model: what the connector costs where nothing hits, and what it saves after a restart."""
    flags = ["--dtype", "float32", "--block-size", "32", "--max-model-len", "4096", "--max-num-seqs", "8"]
    model = prepare_smollm2()
    with engines(
        "smollm2", table, model, flags, lives=[{"INFERA_KVD_LOADS": "auto"}], block_tokens=32
    ) as (group, (engine,), kvd):  # fmt: skip
        prompts = plain.Prompts(seed)
        prompt = prompts.make(900)
        group.case("900 tokens, new", engine, prompt, (0, 0))
        settle(kvd)
        table.figures["miss_overhead_pct"] = measure_misses(engine, prompts)
        cold = [first_token_s(engine, prompts.make(1500)) for _ in range(3)]
        long = prompts.make(1500)
        first_token_s(engine, long)
        settle(kvd)
        warm = []
        for _ in range(2):
            engine.restart()
            first_token_s(engine, prompts.make(64))  # whatever a first request costs
            warm.append(first_token_s(engine, long))
        table.figures["restart_speedup"] = round(statistics.median(cold) / statistics.median(warm), 2)
        group.case("900 tokens, after a restart", engine, prompt, (0, group.whole_blocks(900)))


def measure_misses(engine: Engine, prompts: plain.Prompts) -> float:
    """The connector's own time in percent of the workers' steps, over requests that hit nothing. Read from the
    engine: throughput here is noisier than what is measured."""
    names = ("scheduler_seconds", "worker_seconds", "worker_step_seconds")
    before = [engine.metric(f"infera_kvd_engine_{name}_total") for name in names]
    for _ in range(6):
        engine.ask(prompts.make(400), 60)
    scheduler_s, worker_s, steps_s = (
        engine.metric(f"infera_kvd_engine_{name}_total") - then for name, then in zip(names, before, strict=True)
    )
    progress(f"own time: scheduler {scheduler_s:.3f} s, worker {worker_s:.3f} s, of {steps_s:.2f} s of steps")
    return round(100 * max(scheduler_s, worker_s) / steps_s, 3)


def first_token_s(engine: Engine, prompt: list[int]) -> float:
    began_s = time.perf_counter()
    engine.ask(prompt, 1)
    return time.perf_counter() - began_s


GROUPS: dict[str, Callable[[Table, int], None]] = {
    "llama": llama,
    "bfloat16": bfloat16,
    "hybrid": hybrid,
    "adapters": adapters,
    "speculation": speculation,
    "ranks": ranks,
    "beside": beside,
    "smollm2": smollm2,
}
SHORT = ("hybrid",)
