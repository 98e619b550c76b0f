"""Things die while the fleet serves; answers stay right."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import signal
import subprocess

import pytest

from tests.support.engine_fixtures import ENGINE_FLAGS, EngineFleet, prompt_of
from tests.support.processes import call, free_port, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.e2e, pytest.mark.timeout(600)]


def test_kvd_killed_during_traffic(engine_fleet: EngineFleet) -> None:
    """Engines go on without it, answers stay the same, and it is used again when it is back."""
    one, other = engine_fleet.worker_ids
    prompts = [prompt_of(seed, 120) for seed in range(100, 124)]
    expected = [engine_fleet.ask(prompt, one).text for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(engine_fleet.ask, prompt, other) for prompt in prompts]
        answers[4].result()
        os.kill(engine_fleet.fleet.kvd.pid, signal.SIGKILL)
        assert [answer.result().text for answer in answers] == expected
    engine_fleet.fleet.restart_kvd()
    seeds = itertools.count(130)

    def is_shared_again() -> bool:
        fresh = prompt_of(next(seeds), 200)
        cold = engine_fleet.ask(fresh, one)
        return engine_fleet.ask(fresh, other).cached_tokens == cold.cacheable_tokens

    wait_until(is_shared_again, "both engines use the new infera-kvd")
    assert engine_fleet.kvd_metric("records_present") > 0


def test_engine_killed_leaves_the_fleet(engine_fleet: EngineFleet) -> None:
    """The next request succeeds elsewhere, at once; the worker is gone from the list soon after."""
    victim, survivor = engine_fleet.worker_ids
    prompt = prompt_of(440, 200)
    before = engine_fleet.ask(prompt, victim)
    os.killpg(os.getpgid(engine_fleet.fleet.engines[0].pid), signal.SIGKILL)
    after = engine_fleet.ask(prompt)
    assert after.worker == survivor
    assert after.text == before.text
    wait_until(lambda: _workers(engine_fleet) == {survivor}, "the dead engine left the fleet")
    reply = call(
        f"{engine_fleet.url}/v1/completions", {"model": "tiny", "prompt": "x"}, headers={"X-Infera-Worker": victim}
    )
    assert reply.status == 400
    assert survivor in reply.json["error"]["message"]


def test_vllm_serve_by_hand_joins_and_uses_kvd(engine_fleet: EngineFleet, tmp_path: str) -> None:
    """Unmodified `vllm serve MODEL` with nothing but INFERA_ variables and the overlay on PYTHONPATH."""
    settings = engine_fleet.fleet.settings
    port = free_port()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("INFERA_")} | {
        "PYTHONPATH": str(settings.overlay),
        "INFERA_KVD_SOCKET": str(settings.kvd_socket),
        "INFERA_KVD_LOADS": "always",
        "INFERA_DISCOVERY": settings.server_url,
        "INFERA_RUNTIME_DIR": str(settings.runtime_folder),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(settings.engine_python.python.with_name("vllm")), "serve", settings.model, "--served-model-name"]
    command += ["tiny", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", *ENGINE_FLAGS]
    survivor = engine_fleet.worker_ids[1]
    known = engine_fleet.ask_and_save(prompt_of(450, 200), survivor)
    with open(f"{tmp_path}/serve.log", "w") as log:
        engine = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        mine = f"vllm-127.0.0.1:{port}"
        wait_until(lambda: mine in _workers(engine_fleet) or engine.poll() is not None, "vllm serve joined", 180)
        answer = engine_fleet.ask(prompt_of(450, 200), mine)
        assert answer.text == known.text
        assert answer.cached_tokens == known.cacheable_tokens
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(60) in (0, -signal.SIGTERM)
        wait_until(lambda: mine not in _workers(engine_fleet), "it left the fleet")
    finally:
        if engine.poll() is None:
            os.killpg(engine.pid, signal.SIGKILL)
            engine.wait()


def _workers(fleet: EngineFleet) -> set[str]:
    return {entry["worker_id"] for entry in call(f"{fleet.url}/v1/workers").json["data"]}
