"""What is filled in, and what is left to the user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from infera_vllm.arguments import ServeArguments
from infera_vllm.wiring import wire

from infera.hooks.spec import Launch

INCARNATION = "ab" * 16
FLEET = {"INFERA_DISCOVERY": "http://127.0.0.1:8000, http://127.0.0.1:8001", "INFERA_KVD_SOCKET": "/run/kvd.sock"}


def wired(
    flags: list[str], runtime_dir: str = "/run/i", version: str = "0.32.0", **environ: str
) -> tuple[ServeArguments, Any]:
    arguments = ServeArguments(["vllm", "serve", "m", *flags], 2)
    launch = Launch("vllm", arguments.argv, [], environ, INCARNATION, runtime_dir)
    return arguments, wire(launch, arguments, version)


def test_fleet_member_gets_everything() -> None:
    arguments, wiring = wired(["--port", "8101"], **FLEET)
    events = json.loads(arguments.find("--kv-events-config") or "")
    assert events["topic"] == f"kv@{INCARNATION}"
    assert events["endpoint"].startswith("ipc:///run/i/")
    assert arguments.find("--enable-prompt-tokens-details") is not None
    assert arguments.find("--shutdown-timeout") == "30"
    assert wiring.agent["url"] == "http://127.0.0.1:8101"
    assert wiring.agent["servers"] == ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]
    assert wiring.agent["engine_facts_path"] == f"/run/i/engine-{INCARNATION}.json"
    assert (wiring.agent["event_topic"], wiring.agent["event_endpoint"]) == (events["topic"], events["endpoint"])


def test_users_own_connector_is_kept_beside_ours_and_said() -> None:
    arguments, wiring = wired(["--kv-transfer-config", '{"kv_connector":"NixlConnector"}'], **FLEET)
    assert arguments.argv.count("--kv-transfer-config") == 1
    config = json.loads(arguments.find("--kv-transfer-config") or "")
    children = config["kv_connector_extra_config"]["connectors"]
    assert [child["kv_connector"] for child in children] == ["NixlConnector", "InferaConnector"]
    assert wiring.agent["kvd_socket"] == "/run/kvd.sock"
    assert any("side by side" in note for note in wiring.notes)


def test_a_configuration_given_key_by_key_is_one() -> None:
    flags = [
        "--kv-transfer-config.kv_connector",
        "NixlConnector",
        "--kv-transfer-config.kv_role=kv_both",
        "--port",
        "9",
    ]
    arguments, _ = wired(flags, **FLEET)
    config = json.loads(arguments.find("--kv-transfer-config") or "")
    assert config["kv_connector"] == "MultiConnector"
    assert config["kv_connector_extra_config"]["connectors"][0] == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
    }
    assert not any("kv-transfer-config." in word for word in arguments.argv)
    assert arguments.find("--port") == "9"


NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--kv-transfer-config", "no json"], "left to vLLM"),
        (["--kv-transfer-config", "[]"], "left to vLLM"),
        (["--kv-transfer-config"], "left to vLLM"),
        (["--kv-offloading-size", "8", "--kv-transfer-config", NIXL], "one of the two"),
        (["--kv-offloading-size", "much"], "no number"),
        (["--kv-offloading-size", "8", "--kv-offloading-backend", "other"], "not known"),
    ],
)
def test_vllm_26452_what_cannot_be_combined_is_said_before_the_engine_starts(flags: list[str], word: str) -> None:
    arguments, wiring = wired(flags, **FLEET)
    assert wiring.agent["kvd_socket"] is None
    assert any(word in note for note in wiring.degraded)
    assert arguments.argv[3 : 3 + len(flags)] == flags
    assert arguments.argv.count("--kv-transfer-config") == flags.count("--kv-transfer-config")


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.32.0", "unknown"])
def test_vllm_26452_versions_it_was_not_proven_with_run_without_the_connector(version: str) -> None:
    arguments, wiring = wired([], version=version, **FLEET)
    assert arguments.find("--kv-transfer-config") is None
    assert wiring.agent["kvd_socket"] is None
    assert f"vLLM {version}" in wiring.degraded[0]
    assert arguments.find("--kv-events-config") is not None, "the fleet has it all the same"
    tried, wiring = wired([], version=version, INFERA_ALLOW_UNTESTED="1", **FLEET)
    assert tried.find("--kv-transfer-config") is not None
    assert wiring.degraded == []


@pytest.mark.parametrize(
    ("flags", "environ", "child"),
    [
        (["--kv-offloading-size", "1.5"], {}, ("OffloadingConnector", 3 << 29)),
        (["--kv-offloading-size=2"], {"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"}, ("SimpleCPUOffloadConnector", 2 << 30)),
        (["--kv-offloading-size", "2", "--kv-offloading-backend=lmcache"], {}, ("LMCacheMPConnector", None)),
    ],
)
def test_vllms_own_offloading_runs_beside_ours(
    flags: list[str], environ: dict[str, str], child: tuple[str, float | None]
) -> None:
    """Left as it is, the flag would put another name over our connector's, and the engine would not start."""
    arguments, wiring = wired(flags, **FLEET, **environ)
    assert arguments.find("--kv-offloading-size") is None
    config = json.loads(arguments.find("--kv-transfer-config") or "")
    first, ours = config["kv_connector_extra_config"]["connectors"]
    assert first["kv_connector"] == child[0]
    assert first.get("kv_connector_extra_config", {}).get("cpu_bytes_to_use") == child[1]
    assert ours["kv_connector_extra_config"]["infera_beside"] == [child[0]]
    assert "--kv-offloading-size" in wiring.notes[0]


def config_file(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    return ["--config", str(path)]


def test_a_connector_in_the_configuration_file_is_kept(tmp_path: Path) -> None:
    text = "kv-transfer-config:\n  kv_connector: NixlConnector\n  kv_role: kv_both\nheadless: false\n"
    arguments, wiring = wired(config_file(tmp_path, text), **FLEET)
    config = json.loads(arguments.find("--kv-transfer-config") or "")
    assert config["kv_connector_extra_config"]["connectors"][0]["kv_connector"] == "NixlConnector"
    words = arguments.argv
    assert words.index("--kv-transfer-config") > words.index("--config"), "the last one counts"
    assert wiring.agent is not None, "headless is said to be off"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("kv-offloading-size: 4\n", "command line"),
        ("kv-transfer-config.kv_connector: NixlConnector\n", "key by key"),
        ("kv_transfer_config: nonsense\n", "left to vLLM"),
    ],
)
def test_what_cannot_be_taken_out_of_the_configuration_file_is_left(tmp_path: Path, text: str, word: str) -> None:
    arguments, wiring = wired(config_file(tmp_path, text), **FLEET)
    assert "--kv-transfer-config" not in arguments.argv
    assert word in wiring.degraded[0]


def test_events_in_the_configuration_file_are_used(tmp_path: Path) -> None:
    text = "kv-events-config:\n  enable_kv_cache_events: true\n  endpoint: tcp://*:5557\n  topic: mine\n"
    arguments, wiring = wired(config_file(tmp_path, text), **FLEET)
    assert wiring.agent["event_topic"] == "mine"
    assert "--kv-events-config" not in arguments.argv


def test_the_users_word_on_token_details_counts() -> None:
    arguments, _ = wired(["--no-enable-prompt-tokens-details", "--shutdown-timeout", "3"], **FLEET)
    assert "--enable-prompt-tokens-details" not in arguments.argv
    assert arguments.find("--shutdown-timeout") == "3"


def test_what_was_wired_is_left_for_the_doctor_without_secrets() -> None:
    _, wiring = wired(["--port", "8101"], **FLEET, INFERA_JOIN_TOKEN="secret-word")
    assert wiring.facts["kvd_socket"] == "/run/kvd.sock"
    assert wiring.facts["url"] == "http://127.0.0.1:8101"
    assert wiring.facts["notes"] == wiring.notes
    assert "secret-word" not in json.dumps(wiring.facts)


def test_users_own_events_are_used() -> None:
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "mine"}
    _, wiring = wired(["--kv-events-config", json.dumps(config)], **FLEET)
    assert (wiring.agent["event_topic"], wiring.agent["event_endpoint"]) == ("mine", "tcp://*:5557")


@pytest.mark.parametrize("config", ["{}", "not json", '{"enable_kv_cache_events":true,"publisher":"null"}', "[]"])
def test_dynamo_11984_events_that_nobody_can_follow_are_said(config: str) -> None:
    _, wiring = wired(["--kv-events-config", config], **FLEET)
    assert "event_topic" not in wiring.agent
    assert any("cannot see" in note for note in wiring.degraded)


def test_headless_node_has_no_agent() -> None:
    arguments, wiring = wired(["--headless"], **FLEET)
    assert wiring.agent is None
    assert arguments.find("--kv-transfer-config") is not None


@pytest.mark.parametrize(
    ("flags", "environ", "url"),
    [
        ([], {}, "http://127.0.0.1:8000"),
        (["--host", "0.0.0.0", "--port", "9"], {}, "http://127.0.0.1:9"),
        (["--host", "10.1.2.3"], {}, "http://10.1.2.3:8000"),
        (["--host", "::1"], {}, "http://[::1]:8000"),
        (["--host", "0.0.0.0"], {"INFERA_ADVERTISE_HOST": "node7"}, "http://node7:8000"),
    ],
)
def test_advertised_address(flags: list[str], environ: dict[str, str], url: str) -> None:
    assert wired(flags, **FLEET, **environ)[1].agent["url"] == url


def test_runtime_folder_too_long_for_sockets_is_refused_with_the_cure() -> None:
    with pytest.raises(RuntimeError, match="INFERA_RUNTIME_DIR"):
        wired([], "/" + "x" * 100, **FLEET)


def test_engines_of_one_host_collide_on_no_socket() -> None:
    """A species of failures.md: two workers on one host collide on default ports."""
    found = []
    for incarnation in ("ab" * 16, "cd" * 16):
        arguments = ServeArguments(["vllm", "serve", "m"], 2)
        wiring = wire(Launch("vllm", arguments.argv, [], dict(FLEET), incarnation, "/run/i"), arguments, "0.32.0")
        assert wiring.agent is not None
        found.append([wiring.agent[name] for name in ("event_endpoint", "replay_endpoint", "engine_facts_path")])
    assert len({path for paths in found for path in paths}) == 6
    assert all(str(path).removeprefix("ipc://").startswith("/run/i/") for paths in found for path in paths)
