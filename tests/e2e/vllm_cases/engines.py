"""Real `vllm serve` processes and their infera-kvd, wired by nothing but INFERA_ variables."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infera.tools.engine_env import ensure_vllm
from infera.tools.engine_python import environment_without_infera
from infera.tools.overlay import ensure_overlay
from tests.support.kvd_daemon import DaemonProcess
from tests.support.processes import Reply, call, free_port, wait_until

READY_S_MAX = 240.0
STOP_S_MAX = 60.0
ASK_S_MAX = 120.0
SETTLE_S_MAX = 20.0
QUIET_S = 0.3
"""A daemon that stored nothing for so long has everything: saves take milliseconds."""


@dataclass(frozen=True)
class Answer:
    """What an engine said: the text, its tokens' logprobs, and the prompt tokens it took from caches."""

    text: str
    logprobs: tuple[float, ...]
    token_ids: tuple[int, ...]
    body: Any

    def is_same(self, other: Answer, tolerance: float) -> bool:
        """Whether both are the same text, and no logprob differs by more than `tolerance`."""
        return self.text == other.text and all(
            abs(mine - theirs) <= tolerance for mine, theirs in zip(self.logprobs, other.logprobs, strict=True)
        )


class Engine:
    """One engine. Without `kvd` it has no connector and no prefix cache: the reference."""

    def __init__(
        self, name: str, model: Path, flags: list[str], folder: Path, kvd: DaemonProcess | None,
        environ: dict[str, str] | None = None, cores: str = "0",
    ) -> None:  # fmt: skip
        self.name, self.model, self.flags, self.folder, self.kvd = name, model, flags, folder, kvd
        self._environ = environ or {}
        self._cores = cores
        self.port = free_port()
        self.popen: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        """Start without waiting; see `wait_ready`."""
        python = ensure_vllm()
        environ = environment_without_infera() | {
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
            "VLLM_HOST_IP": "127.0.0.1", "VLLM_SERVER_DEV_MODE": "1", "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": self._cores, "PYTHONUNBUFFERED": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        }  # fmt: skip
        argv = [str(python.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        argv += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager"]
        argv += self.flags
        if self.kvd is None:
            argv += ["--no-enable-prefix-caching"]
        else:
            environ["PYTHONPATH"] = str(ensure_overlay(python))
            environ |= {"INFERA_KVD_SOCKET": str(self.kvd.socket), "INFERA_RUNTIME_DIR": str(self.folder)}
            environ |= {"INFERA_KVD_LOADS": "always"} | self._environ
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(argv, env=environ, stdout=log, stderr=log, start_new_session=True)

    def wait_ready(self) -> None:
        """Wait until it serves."""
        wait_until(self._is_ready, f"engine {self.name} serves (see {self.log})", READY_S_MAX)

    def _is_ready(self) -> bool:
        assert self.popen is not None
        if self.popen.poll() is not None:
            raise AssertionError(f"engine {self.name} ended:\n{self.log.read_text(errors='replace')[-3000:]}")
        try:
            return call(f"{self.url}/health", timeout_s=2).status == 200
        except OSError:
            return False

    def stop(self, how: int = signal.SIGTERM) -> None:
        """End it and its workers, and wait."""
        if self.popen is None:
            return
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(STOP_S_MAX)
        with contextlib.suppress(ProcessLookupError):  # workers that outlived it
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self.popen = None

    def restart(self) -> None:
        """Another life of the same engine."""
        self.stop()
        self.start()
        self.wait_ready()

    def ask(self, prompt: list[int], tokens: int = 16, *, model: str = "m", **fields: Any) -> Answer:
        """A greedy completion of token ids, with its logprobs."""
        reply = self.post(prompt, tokens, model=model, **fields)
        assert reply.status == 200, reply.body[:500]
        (choice,) = reply.json["choices"]
        logprobs = tuple(choice["logprobs"]["token_logprobs"])
        return Answer(choice["text"], logprobs, tuple(choice.get("token_ids") or ()), reply.json)

    def post(self, prompt: list[int], tokens: int, *, model: str = "m", **fields: Any) -> Reply:
        """The same, whatever comes of it."""
        body = {
            "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1, "ignore_eos": True,
            "return_token_ids": True, **fields,
        }  # fmt: skip
        return call(f"{self.url}/v1/completions", body, timeout_s=ASK_S_MAX)

    def ask_and_leave(self, prompt: list[int], tokens: int, after_s: float) -> None:
        """Begin a stream and close the connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ASK_S_MAX)
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        time.sleep(after_s)
        connection.close()

    def last_words(self) -> list[str]:
        """The end of the engine's log."""
        return self.log.read_text(errors="replace").splitlines()[-60:] if self.log.exists() else []

    def said(self, text: str) -> int:
        """How often the engine's log holds a text."""
        return self.log.read_text(errors="replace").count(text)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a counter over the label sets that match; 0 when there is none."""
        total = 0.0
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        for line in call(f"{self.url}/metrics").body.decode().splitlines():
            if line.startswith((name + "{", name + " ")) and all(word in line for word in wanted):
                total += float(line.rpartition(" ")[2])
        return total

    def hits(self) -> tuple[int, int]:
        """Prompt tokens served so far by the engine's own cache, and by kvd."""
        return (
            int(self.metric("vllm:prefix_cache_hits_total")),
            int(self.metric("vllm:external_prefix_cache_hits_total")),
        )

    def reset(self, *, external: bool = False) -> None:
        """Empty the engine's own cache."""
        path = "/reset_prefix_cache" + ("?reset_external=true" if external else "")

        def is_done() -> bool:
            return call(f"{self.url}{path}", b"", method="POST").status == 200

        wait_until(is_done, "the prefix cache is reset")


def settle(kvd: DaemonProcess) -> None:
    """Wait until the daemon has everything that engines are saving."""
    seen, since_s, deadline_s = -1, time.monotonic(), time.monotonic() + SETTLE_S_MAX
    while time.monotonic() - since_s < QUIET_S:
        assert time.monotonic() < deadline_s, "saves never end"
        stored = int(kvd.metrics()["stored_total"])
        if stored != seen:
            seen, since_s = stored, time.monotonic()
        time.sleep(0.03)
