"""What is filled in, and what is left to the user."""

from __future__ import annotations

import json
from typing import Any

import pytest
from infera_vllm.arguments import ServeArguments
from infera_vllm.wiring import wire

from infera.hooks.spec import Launch

INCARNATION = "ab" * 16
FLEET = {"INFERA_DISCOVERY": "http://127.0.0.1:8000, http://127.0.0.1:8001", "INFERA_KVD_SOCKET": "/run/kvd.sock"}


def wired(flags: list[str], runtime_dir: str = "/run/i", **environ: str) -> tuple[ServeArguments, Any, dict[str, str]]:
    variables = dict(environ)
    arguments = ServeArguments(["vllm", "serve", "m", *flags], 2)
    launch = Launch("vllm", arguments.argv, [], variables, INCARNATION, runtime_dir)
    return arguments, wire(launch, arguments, "0.32.0"), variables


def test_fleet_member_gets_everything() -> None:
    arguments, wiring, environ = wired(["--port", "8101"], **FLEET)
    events = json.loads(arguments.find("--kv-events-config") or "")
    assert events["topic"] == f"kv@{INCARNATION}"
    assert events["endpoint"].startswith("ipc:///run/i/")
    assert arguments.find("--enable-prompt-tokens-details") is not None
    assert arguments.find("--shutdown-timeout") == "30"
    assert wiring.agent["url"] == "http://127.0.0.1:8101"
    assert wiring.agent["servers"] == ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]
    assert wiring.agent["engine_facts_path"] == environ["INFERA_ENGINE_FACTS"]
    assert (wiring.agent["event_topic"], wiring.agent["event_endpoint"]) == (events["topic"], events["endpoint"])


def test_users_own_connector_is_kept_beside_ours_and_said() -> None:
    arguments, wiring, _ = wired(["--kv-transfer-config", '{"kv_connector":"NixlConnector"}'], **FLEET)
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
    arguments, _, _ = wired(flags, **FLEET)
    config = json.loads(arguments.find("--kv-transfer-config") or "")
    assert config["kv_connector"] == "MultiConnector"
    assert config["kv_connector_extra_config"]["connectors"][0] == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
    }
    assert not any("kv-transfer-config." in word for word in arguments.argv)
    assert arguments.find("--port") == "9"


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--kv-transfer-config", "no json"], "left to vLLM"),
        (["--kv-transfer-config", "{}", "--kv-transfer-config.kv_connector", "X"], "left to vLLM"),
        (["--kv-offloading-size", "8"], "its own connector"),
    ],
)
def test_vllm_26452_what_cannot_be_combined_is_said_before_the_engine_starts(flags: list[str], word: str) -> None:
    arguments, wiring, environ = wired(flags, **FLEET)
    assert wiring.agent["kvd_socket"] is None
    assert any(word in note for note in wiring.notes)
    assert "INFERA_ENGINE_FACTS" not in environ
    assert arguments.argv[3 : 3 + len(flags)] == flags


def test_users_own_events_are_used() -> None:
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "mine"}
    _, wiring, _ = wired(["--kv-events-config", json.dumps(config)], **FLEET)
    assert (wiring.agent["event_topic"], wiring.agent["event_endpoint"]) == ("mine", "tcp://*:5557")


@pytest.mark.parametrize("config", ["{}", "not json", '{"enable_kv_cache_events":true,"publisher":"null"}', "[]"])
def test_unusable_events_are_said(config: str) -> None:
    _, wiring, _ = wired(["--kv-events-config", config], **FLEET)
    assert "event_topic" not in wiring.agent
    assert any("cannot see" in note for note in wiring.notes)


def test_headless_node_has_no_agent() -> None:
    arguments, wiring, _ = wired(["--headless"], **FLEET)
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
