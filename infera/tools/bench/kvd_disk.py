"""`make bench-kvd-disk`: the disk tier's store against fio: same path, flags and depth, in the same run.

QUICK=1 for under a minute; BENCH_PATH names the folder to measure (default: `build/bench-disk` of the checkout).
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from infera.tools.bench.results import keep
from infera.tools.sources import checkout_folder
from kvd.disk_bench import BenchStore, Speed
from kvd.disk_store import DiskSettings, DiskStore
from kvd.storage_look import look

QUICK = bool(os.environ.get("QUICK"))
DEPTH = 32
LARGE_BYTES, SMALL_BYTES = 1 << 20, 64 << 10
FILE_BYTES = (1 if QUICK else 4) << 30
ROUNDS = 2 if QUICK else 5
REST_S = 0.6 if QUICK else 2.0
"""Before each pass: virtual disks save up a burst while idle, and whoever follows a pause would have it alone."""
SEGMENT_BYTES = 256 << 20
RESTART_OBJECTS = 100_000 if QUICK else 1_000_000
RESTART_OBJECT_BYTES = 4096
KILLS = 2 if QUICK else 6
PASS_LIMIT_S = 60.0
LOAD_LIMIT_S = 120.0
TARGETS = {"write_ratio_fio": 0.9, "read_ratio_fio": 0.9, "read_64k_ratio_fio": 0.8}
RESTART_TARGET_S = 1.0


def settings(size_bytes: int, entries: int = 1 << 20) -> DiskSettings:
    """A store with room for so much, and two segments to spare."""
    return DiskSettings(
        size_bytes=int(size_bytes * 1.1) + 6 * SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES, depth=DEPTH, entries=entries
    )


def fio(files: list[Path], pattern: str, block_bytes: int, size_bytes: int, way: str) -> float:
    """Bytes a second of one fio pass over some files, in the store's own way."""
    flags = ["--ioengine=io_uring", f"--iodepth={DEPTH}"]
    if "thread pool" in way:
        flags = ["--ioengine=psync", "--thread", "--numjobs=16", "--group_reporting"]
    command = [
        "fio", "--name=pass", f"--filename={':'.join(map(str, files))}", f"--rw={pattern}", f"--bs={block_bytes}",
        f"--direct={int('O_DIRECT' in way and 'refuses' not in way)}", "--output-format=json", "--fallocate=native",
        "--norandommap", "--randrepeat=0", f"--io_size={size_bytes}", f"--runtime={PASS_LIMIT_S:.0f}", *flags,
    ]  # fmt: skip
    if pattern == "write":
        command.append(f"--size={size_bytes}")
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"fio failed: {ended.stderr.strip() or ended.stdout[-500:]}")
    job = json.loads(ended.stdout[ended.stdout.index("{") :])["jobs"][0]
    return float(job["write" if pattern == "write" else "read"]["bw_bytes"])


class Rates:
    """Bytes a second of all passes by name, and objects that were wrong."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}
        self.wrong = 0

    def note(self, name: str, speed: Speed | float) -> None:
        """Take one pass in."""
        if isinstance(speed, Speed):
            self.wrong += speed.wrong + speed.refused
            speed = speed.bytes_per_s
        self.samples.setdefault(name, []).append(speed)

    def ratio(self, name: str) -> float:
        """Ours over fio's, medians."""
        return statistics.median(self.samples[name]) / statistics.median(self.samples[f"fio_{name}"])


def measure_reads(rates: Rates, name: str, store: BenchStore, written: int, way: str) -> None:
    """Passes over the same files in turn, who is first too: what else the machine does hits both alike."""
    # Not the one being written and the one made ready: reading blocks that were never written costs fio nothing.
    files = sorted(store.folder.glob("*.segment"))[:-2]
    for number in range(4):
        is_ours = number % 4 in (0, 3)
        time.sleep(REST_S)
        if is_ours:
            rates.note(name, store.read(PASS_LIMIT_S, written))
        else:
            rates.note(f"fio_{name}", fio(files, "randread", store.object_bytes, written * store.object_bytes, way))


def measure_fio_write(rates: Rates, folder: Path, way: str) -> None:
    """A new file, as large as what the store writes."""
    time.sleep(REST_S)
    path = folder / "fio.data"
    rates.note("fio_write", fio([path], "write", LARGE_BYTES, FILE_BYTES, way))
    path.unlink()


def measure_store(rates: Rates, folder: Path, object_bytes: int, size_bytes: int, suffix: str) -> str:
    """A new store: written, and read in turn with fio; returns how the device is used."""
    store = BenchStore(folder, size_bytes, object_bytes, DEPTH, settings(size_bytes))
    try:
        way = store.store.devices()[0].way
        time.sleep(REST_S)
        written = store.write(PASS_LIMIT_S)
        rates.note(f"write{suffix}", written)
        measure_reads(rates, f"read{suffix}", store, written.operations, way)
        return way
    finally:
        store.close()


def measure_speed(folder: Path) -> tuple[Rates, str]:
    """Ours and fio's passes, who is first in turn, and how the device is used."""
    rates = Rates()
    way = measure_store(Rates(), folder, LARGE_BYTES, FILE_BYTES // 2, "")  # nobody has the first pass
    for number in range(ROUNDS):
        say(f"round {number + 1} of {ROUNDS}")
        if number % 2:
            measure_fio_write(rates, folder, way)
        measure_store(rates, folder, LARGE_BYTES, FILE_BYTES, "")
        if not number % 2:
            measure_fio_write(rates, folder, way)
        measure_store(rates, folder, SMALL_BYTES, FILE_BYTES // 2, "_64k")
    return rates, way


def measure_restart(folder: Path) -> tuple[float, int]:
    """Seconds a restart takes for each million objects, and objects that were not there again."""
    size_bytes = RESTART_OBJECTS * (RESTART_OBJECT_BYTES + 4096)
    chosen = settings(size_bytes, entries=2 * RESTART_OBJECTS)
    bench = BenchStore(folder, RESTART_OBJECTS * RESTART_OBJECT_BYTES, RESTART_OBJECT_BYTES, DEPTH, chosen)
    try:
        written = bench.write(10 * PASS_LIMIT_S).operations
        bench.store.close()
        seconds = []
        for _ in range(3):
            started_s = time.perf_counter()
            bench.store = DiskStore([bench.folder], chosen)
            while not bench.store.is_loaded and time.perf_counter() - started_s < LOAD_LIMIT_S:
                bench.store.poll()
            seconds.append(time.perf_counter() - started_s)
            loaded = bench.store.stats()["loaded_total"]
            bench.store.close()
        bench.store = DiskStore([bench.folder], chosen)
        return statistics.median(seconds) * 1e6 / written, written - loaded
    finally:
        bench.close()


def _write_until_killed(folder: str, counts: mmap.mmap, ready: Event) -> None:
    """In a process of its own: puts as fast as it can, and says in shared memory what it did."""
    bench = BenchStore(Path(folder), FILE_BYTES, LARGE_BYTES, DEPTH, settings(FILE_BYTES))
    name = str(bench.folder).encode()
    counts[24 : 24 + len(name)] = name
    put = bench._put

    def counted(number: int, slot: int) -> Any:
        status = put(number, slot)
        stats = bench.store.stats()
        counts[0:8] = (stats["put_total"] + stats["operations"]).to_bytes(8, "little")
        counts[8:16] = stats["put_total"].to_bytes(8, "little")
        if stats["put_total"] > DEPTH:
            ready.set()
        return status

    bench._put = counted  # type: ignore[method-assign]
    bench.write(PASS_LIMIT_S)


def measure_kills(folder: Path) -> tuple[int, int]:
    """Most bytes that were handed to the store and not there after a SIGKILL, and completed writes that were lost."""
    most_bytes, completed_lost = 0, 0
    for number in range(KILLS):
        counts, ready = mmap.mmap(-1, 4096), multiprocessing.Event()
        child = multiprocessing.get_context("fork").Process(
            target=_write_until_killed, args=(str(folder), counts, ready)
        )
        child.start()
        if not ready.wait(PASS_LIMIT_S):
            raise RuntimeError("the writer did not begin")
        time.sleep(0.05 + 0.03 * number)
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        accepted, completed = (int.from_bytes(counts[at : at + 8], "little") for at in (0, 8))
        left = Path(counts[24:1024].split(b"\0")[0].decode())
        store = DiskStore([left], settings(FILE_BYTES))
        while not store.is_loaded:
            store.poll()
        loaded = store.stats()["loaded_total"]
        store.close()
        shutil.rmtree(left)
        most_bytes = max(most_bytes, (accepted - loaded) * LARGE_BYTES)
        completed_lost += max(0, completed - loaded)
    return most_bytes, completed_lost


def say(what: str) -> None:
    """Progress, apart from the results."""
    print(f"bench-kvd-disk: {what}", file=sys.stderr, flush=True)


def main() -> int:
    """Measure, print, keep; returns the exit status."""
    if shutil.which("fio") is None:
        print("bench-kvd-disk: fio is not installed; install it (Debian: apt-get install fio)", file=sys.stderr)
        return 1
    folder = Path(os.environ.get("BENCH_PATH") or (checkout_folder() or Path.cwd()) / "build" / "bench-disk").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    rates, way = measure_speed(folder)
    say(f"restart with {RESTART_OBJECTS} objects")
    restart_s, missing = measure_restart(folder)
    say("kills")
    lost_bytes, completed_lost = measure_kills(folder)
    figures: dict[str, object] = {
        f"{name}_ratio_fio": round(rates.ratio(name), 3) for name in ("write", "read", "read_64k")
    }
    figures["restart_s_per_million"] = round(restart_s, 3)
    figures["bytes_lost_on_sigkill_max"] = lost_bytes
    figures["wrong_objects"] = rates.wrong + missing + completed_lost
    storage = look(folder)
    raw = {
        "quick": QUICK,
        "bytes_per_s": rates.samples,
        "way": way,
        "storage": [storage.kind, storage.file_system, storage.detail],
        "depth": DEPTH,
    }
    keep("kvd-disk", figures, raw | {"missing_after_restart": missing, "completed_lost": completed_lost})
    print(f"{storage.describe()}; {way}; depth {DEPTH}")
    for name, samples in sorted(rates.samples.items()):
        rounds = ", ".join(f"{sample / 1e9:.3f}" for sample in samples)
        print(f"{name:14} {statistics.median(samples) / 1e9:8.3f} GB/s  (rounds: {rounds})")
    for name, wanted in TARGETS.items():
        print(f"{name:22} {figures[name]!s:>8}  target >= {wanted}")
    print(f"{'restart_s_per_million':22} {restart_s:8.3f}  target <= {RESTART_TARGET_S}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
