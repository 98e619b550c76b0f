from __future__ import annotations

import pytest

from infera.server.options import PROGRAM, ServerConfig, load_config


def test_defaults_serve_the_newcomer() -> None:
    assert load_config([], {}) == ServerConfig()


@pytest.mark.parametrize(
    "flags",
    [
        ["--discovery-backend", "etcd"],
        ["--discovery-backend", "kubernetes"],
        ["--etcd-endpoint", "127.0.0.1:2379"],
        ["--request-transport", "nats"],
        ["--kv-event-transport", "nats"],
    ],
)
def test_what_is_not_built_yet_is_refused_in_words(flags: list[str]) -> None:
    with pytest.raises(SystemExit, match="not built yet"):
        load_config(flags, {})


def test_unknown_policies_name_the_known_ones() -> None:
    with pytest.raises(SystemExit, match="kv-aware"):
        load_config(["--router-policy", "best"], {})


def test_a_policy_that_is_almost_right_is_named() -> None:
    with pytest.raises(SystemExit, match="did you mean least-loaded"):
        load_config(["--router-policy", "leastloaded"], {})


def test_routing_options_keep_the_manuals_names_and_ranges() -> None:
    config = load_config(
        [
            *("--kv-overlap-weight", "2", "--kv-prefill-overlap-weight", "20.0", "--kv-decode-overlap-weight", "0"),
            *("--session-affinity", "prefill", "--session-affinity-ttl-seconds", "86400"),
            *("--pd-prefill-guard-release", "completion"),
        ],
        {},
    )
    assert (config.kv_overlap_weight, config.kv_prefill_overlap_weight, config.kv_decode_overlap_weight) == (2, 20, 0)
    assert (config.session_affinity, config.session_affinity_ttl_s) == ("prefill", 86_400)
    assert config.pd_prefill_guard_release == "completion"


def test_the_guards_release_comes_from_the_environment_too() -> None:
    assert load_config([], {"INFERA_PD_PREFILL_GUARD_RELEASE": "completion"}).pd_prefill_guard_release == "completion"


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv-overlap-weight", "-1"],
        ["--kv-overlap-weight", "nan"],
        ["--kv-overlap-weight", "x"],
        ["--session-affinity", "on"],
        ["--session-affinity-ttl-seconds", "0"],
        ["--session-affinity-ttl-seconds", "86401"],
        ["--pd-prefill-guard-release", "headers"],
        ["--queue-max", "0"],
    ],
)
def test_values_out_of_range_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(flags, {})


def test_secrets_come_from_the_environment_and_are_not_shown() -> None:
    config = load_config([], {"INFERA_JOIN_TOKEN": "t", "INFERA_API_KEY": "a,b"})
    assert (config.join_token, config.api_keys) == ("t", ("a", "b"))


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("10.1.2.3", False), ("box", False)],
)
def test_loopback(host: str, is_loopback: bool) -> None:
    assert ServerConfig(host=host).is_loopback is is_loopback


def test_flags_keep_the_names_of_the_published_manual() -> None:
    flags = {option.flag for option in PROGRAM.options}
    assert {
        "--host",
        "--port",
        "--router-policy",
        "--router-backend",
        "--router-tokenizer-path",
        "--discovery-backend",
        "--etcd-endpoint",
        "--request-transport",
        "--kv-event-transport",
    } <= flags
