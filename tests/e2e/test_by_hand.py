"""The commands of docs/engines.md, run as they stand there but for paths and ports, with a real engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infera.tools.engine_env import ensure_vllm
from infera.tools.models import prepare_tiny
from infera.tools.overlay import ensure_overlay
from infera.up.cpu_engine import cpu_environment, cpu_flags
from tests.support.engine_fixtures import BLOCK_TOKENS, ENGINE_FLAGS, prompt_of
from tests.support.processes import call, free_port, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "engines.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)
START_S_MAX = 180.0


def block(word: str) -> str:
    """The commands of the page that hold this word."""
    (found,) = [text for text in BLOCKS if word in text]
    return found


@dataclass
class ByHand:
    """What was started by the page's first commands, and the others with the same paths and ports."""

    folder: Path
    engine_python: Path
    model: Path
    server_port: int
    engine_port: int

    @property
    def engine_url(self) -> str:
        """The engine itself."""
        return f"http://127.0.0.1:{self.engine_port}"

    def environ(self) -> dict[str, str]:
        """No other arena, port or folder than this test's own."""
        own = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "INFERA_RUNTIME_DIR": str(self.folder),
            "INFERA_KVD_PATH": str(self.arena),
            "INFERA_KVD_HTTP_PORT": "0",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        return {**os.environ, **cpu_environment(0, 1, ENGINE_FLAGS), **own}

    @property
    def arena(self) -> Path:
        """Where kvd's memory lies."""
        return Path("/dev/shm") / self.folder.name

    def filled_in(self, text: str) -> str:
        """A block with this test's paths and ports."""
        for theirs, ours in (
            ("/path/to/venv/bin", str(self.engine_python.parent)),
            ("/tmp/kvd.sock", str(self.folder / "kvd.sock")),
            ("--memory 4G", "--memory 64M"),
            ("8101", str(self.engine_port)),
            ("8000", str(self.server_port)),
            ("MODEL", str(self.model)),
        ):
            text = text.replace(theirs, ours)
        return text

    def run(self, word: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a block of the page to its end."""
        command = ["bash", "-ec", self.filled_in(block(word))]
        return subprocess.run(
            command, env=self.environ() | variables, capture_output=True, text=True, timeout=200, cwd=ROOT
        )

    def ask(self, prompt: str) -> Any:
        """The page's request, with a longer prompt."""
        word = "infera_retention"
        command = self.filled_in(block(word)).replace("Once upon a time", prompt)
        done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def metric(self, name: str, **labels: str) -> float:
        """One of our counters at the engine's /metrics, over all label values not named."""
        total = 0.0
        for line in call(f"{self.engine_url}/metrics").body.decode().splitlines():
            if line.startswith(f"infera_kvd_engine_{name}_total{{") and all(
                f'{k}="{v}"' in line for k, v in labels.items()
            ):
                total += float(line.rpartition(" ")[2])
        return total


@contextmanager
def started(*more_flags: str) -> Iterator[ByHand]:
    """The page's first block, in the background, until the engine has joined."""
    python = ensure_vllm()
    ensure_overlay(python)
    folder = Path(tempfile.mkdtemp(prefix="infera-hand-"))
    hand = ByHand(folder, python.python, prepare_tiny(engine_python=python), free_port(), free_port())
    script = (
        hand.filled_in(block("infera-kvd serve")).rstrip()
        + " "
        + " ".join([*ENGINE_FLAGS, *cpu_flags(ENGINE_FLAGS), *more_flags])
    )
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-ec", script], env=hand.environ(), cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )

    def has_joined() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")[-500:]
        try:
            return bool(call(f"http://127.0.0.1:{hand.server_port}/v1/workers").json["data"])
        except OSError:
            return False

    try:
        wait_until(has_joined, "the engine joined", START_S_MAX)
        yield hand
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with_group(process.pid, number)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                continue
        with_group(process.pid, signal.SIGKILL)
        sys.stdout.write(log.read_text(errors="replace")[-12000:])
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(hand.arena, ignore_errors=True)


def with_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def test_the_page_works_as_it_stands() -> None:
    prompt = prompt_of(1, 200)
    with started() as hand:
        first = hand.ask(prompt)
        tokens = first["usage"]["prompt_tokens"]
        cacheable = (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert first["kv_transfer_params"]["infera_hit_tokens"] == {"hbm": 0, "ram": 0}
        wait_until(lambda: hand.metric("saved_blocks") >= tokens // BLOCK_TOKENS, "the blocks were saved")
        assert call(f"{hand.engine_url}/reset_prefix_cache", b"").status == 200
        again = hand.ask(prompt)
        assert again["kv_transfer_params"]["infera_hit_tokens"] == {"hbm": 0, "ram": cacheable}
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        wait_until(lambda: hand.metric("hit_tokens", tier="ram") == cacheable, "the hit is counted")
        assert hand.metric("loads", outcome="loaded") == hand.metric("loads") == 1
        assert hand.metric("loaded_blocks") == cacheable // BLOCK_TOKENS
        _look_at_times(hand)
        _look_at_the_doctor(hand)
        dry = hand.run("--dry-run")
        assert dry.returncode == 0, dry.stderr
        assert f"INFERA_KVD_SOCKET={hand.folder}/kvd.sock" in dry.stdout


def _look_at_times(hand: ByHand) -> None:
    """What a test of the connector's cost needs is there."""
    for part in ("scheduler", "worker"):
        assert hand.metric(f"{part}_steps") > 0
        assert hand.metric(f"{part}_seconds") > 0
    assert hand.metric("worker_step_seconds") > hand.metric("worker_seconds")


def _look_at_the_doctor(hand: ByHand) -> None:
    variables = {
        "INFERA_KVD_SOCKET": str(hand.folder / "kvd.sock"),
        "INFERA_DISCOVERY": f"http://127.0.0.1:{hand.server_port}",
    }
    done = hand.run("infera doctor vllm", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(re.findall(r"^(?:ok  |    ) (\w[\w ]*?) {2,}(.*)$", done.stdout, re.M))
    assert "loads into vLLM 0.32" in found["connector"]
    assert "answers on" in found["kvd"]
    assert hand.engine_url in found["running engine"]
    assert f"blocks of {BLOCK_TOKENS} tokens" in found["running engine"]
    assert "--kv-transfer-config" in done.stdout.splitlines()[-1]


def test_vllm_26452_beside_another_connector_both_work_and_are_counted(tmp_path: Path) -> None:
    """MultiConnector asks more of a connector than vLLM does of one alone; where it is not met, the front end ends."""
    given = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "engine_id": "mine",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    with started("--kv-transfer-config", f"'{json.dumps(given)}'") as hand:
        first = hand.ask(prompt_of(2, 200))
        wait_until(lambda: hand.metric("saved_blocks") > 0, "ours has saved")
        assert list(tmp_path.iterdir()), "theirs has saved"
        assert call(f"{hand.engine_url}/reset_prefix_cache", b"").status == 200
        again = hand.ask(prompt_of(2, 200))
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
