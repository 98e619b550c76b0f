"""Reading vLLM's command line the way vLLM does."""

from __future__ import annotations

from pathlib import Path

import pytest
from infera_vllm.arguments import ServeArguments, find_serve_arguments

API = "vllm.entrypoints.openai.api_server"


@pytest.mark.parametrize(
    ("argv", "original", "start"),
    [
        (["/env/bin/vllm", "serve", "m", "--port", "1"], ["python", "/env/bin/vllm", "serve", "m"], 2),
        (["-m", "--model", "m"], ["python", "-m", API, "--model", "m"], 1),
        (["-m", "serve", "m"], ["python", "-m", "vllm.entrypoints.cli.main", "serve", "m"], 2),
        (["/env/bin/vllm", "bench", "latency"], ["python", "/env/bin/vllm", "bench", "latency"], None),
        (["/env/bin/vllm"], ["python", "/env/bin/vllm"], None),
        (["train.py", "serve"], ["python", "train.py", "serve"], None),
        ([""], ["python"], None),
    ],
)
def test_which_processes_serve(argv: list[str], original: list[str], start: int | None) -> None:
    found = find_serve_arguments(argv, original)
    assert (found.start if found else None) == start


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--kv-transfer-config", "{}"], "{}"),
        (["--kv-transfer-config={}"], "{}"),
        (["--kv_transfer_config", "{}"], "{}"),
        (["--kv-transfer-config.kv_connector", "X"], "X"),
        (["--kv-transfer-config", "a", "--kv-transfer-config", "b"], "b"),
        (["--kv-transfer-config"], ""),
        (["--kv-transfer-config", "--port", "1"], ""),
        (["--kv-transfer-configs", "{}"], None),
        (["kv-transfer-config"], None),
        ([], None),
    ],
)
def test_flag_in_every_spelling(words: list[str], value: str | None) -> None:
    assert ServeArguments(["vllm", "serve", *words], 2).find("--kv-transfer-config") == value


def serve(*words: str) -> ServeArguments:
    return ServeArguments(["vllm", "serve", *words], 2)


def test_flag_in_the_config_file_counts_and_the_command_line_beats_it(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        'model: m\nkv_transfer_config: \'{"kv_connector": "X"}\'\nport: 9\nquiet: true\nloud: false\nnames: [a, b]\n'
        "nested:\n  a: 1\n"
    )
    arguments = serve("--config", str(path))
    assert arguments.find_json("--kv-transfer-config") == {"kv_connector": "X"}
    assert arguments.find("--port") == "9"
    assert arguments.find("--host") is None
    assert arguments.find("--names") == "a"
    assert arguments.find_json("--nested") == {"a": 1}
    assert (arguments.is_set("quiet"), arguments.is_set("loud"), arguments.is_set("other")) == (True, False, False)
    assert serve("--config", str(path), "--port", "10").find("--port") == "10"
    assert serve("--config", str(path), "--loud").is_set("loud")


@pytest.mark.parametrize("text", [None, "a: [", "- 1\n", "\x00"])
def test_a_config_file_that_cannot_be_read_is_left_to_vllm(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "serve.yaml"
    if text is not None:
        path.write_text(text)
    assert serve("--config", str(path)).find("--port") is None
    assert serve("--config").find("--port") is None


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], None),
        (["--f", '{"a": {"b": 80m}, "c": "80m"}'], {"a": {"b": 80_000_000}, "c": "80m"}),
        (["--f.a.b", "2K"], {"a": {"b": 2048}}),
        (["--f.a.b", "1.5g", "--f.a.c=x", "--f.d", "true"], {"a": {"b": 1_500_000_000, "c": "x"}, "d": True}),
        (["--f.l+", "a,b", "--f.l+", "c"], {"l": ["a", "b", "c"]}),
        (["--f.a", "1", "--f", '{"b": 2}'], {"a": 1}),
        (["--f.a.b", "1", "--f.a", "2"], {"a": 2}),
    ],
)
def test_json_flags_mean_what_vllm_makes_of_them(words: list[str], found: dict[str, object] | None) -> None:
    assert serve(*words).find_json("--f") == found


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", '{"a": 1.5K}'])
def test_what_is_no_object_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        serve("--f", text).find_json("--f")


def test_replacing_takes_every_form_away() -> None:
    arguments = serve("m", "--f", "1", "--x", "--f.a.b", "2", "--f=3", "--y", "4")
    arguments.replace("--f", "new")
    assert arguments.argv[2:] == ["m", "--x", "--y", "4", "--f", "new"]


def test_a_switch_is_what_was_said_last() -> None:
    assert serve("--a", "--no-a").is_set("a") is False
    assert serve("--no-a", "--a").is_set("a") is True
    assert serve("--no-a").is_mentioned("a")
    assert not serve("--ab").is_mentioned("a")
