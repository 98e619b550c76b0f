"""Options: one table gives flags, variables, help and the reference page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.options import (
    Option,
    OptionError,
    Positional,
    Program,
    did_you_mean,
    parse_count,
    parse_duration_s,
    parse_port,
    parse_size_bytes,
    parse_switch,
)

SERVE = Program(
    name="prog serve",
    summary="Serves.",
    options=(
        Option("--socket", "Where to listen.", env="PROG_SOCKET", default="/tmp/s"),
        Option("--memory", "Arena size.", parse=parse_size_bytes, default="2G", env="PROG_MEMORY", metavar="SIZE"),
        Option("--verbose", "Say more.", is_switch=True, env="PROG_VERBOSE"),
        Option("--events", "Publish events.", is_switch=True, default=True),
        Option("--peer", "A peer.", repeatable=True, env="PROG_PEERS"),
        Option("--policy", "How to pick.", choices=("kv-aware", "round-robin"), default="kv-aware", section="Routing"),
    ),
    epilog="Example: prog serve --memory 4G",
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4096", 4096), ("16G", 16 * 2**30), ("512m", 512 * 2**20), ("64KiB", 65536), ("1.5K", 1536), ("2TB", 2**41)],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "G", "-1", "12X", "1e3", "0.3", "1 2"])
def test_what_is_not_a_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(OptionError, match="write it"):
        parse_size_bytes(text)


@given(st.integers(min_value=0, max_value=2**62), st.sampled_from(["", "K", "M", "G"]))
def test_whole_sizes_are_exact(count: int, unit: str) -> None:
    assert parse_size_bytes(f"{count}{unit}") == count * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[unit]


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30.0), ("30s", 30.0), ("5m", 300.0), ("250ms", 0.25), ("2h", 7200.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-3s", "5 years", "nan"])
def test_what_is_not_a_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(OptionError, match="30s"):
        parse_duration_s(text)


@pytest.mark.parametrize("text", ["0", "65536", "-1", "http", "8000.0", ""])
def test_what_is_not_a_port_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="1 to 65535"):
        parse_port(text)


def test_ports_and_counts() -> None:
    assert parse_port("8000") == 8000
    assert parse_count("2") == 2
    with pytest.raises(OptionError, match="at least 1"):
        parse_count("0")


def test_a_switch_variable_is_never_guessed() -> None:
    assert parse_switch("Yes") is True
    assert parse_switch("off") is False
    with pytest.raises(OptionError, match="write 1 or 0"):
        parse_switch("maybe")


def test_defaults_are_parsed_like_input() -> None:
    values = SERVE.resolve([], {})
    assert values.memory == 2 * 2**30
    assert values.verbose is False
    assert values.events is True
    assert values.peer == ()
    assert values.source("memory") == "default"


def test_flag_beats_variable_beats_default() -> None:
    environ = {"PROG_MEMORY": "1G", "PROG_SOCKET": "/env"}
    values = SERVE.resolve(["--memory", "3G"], environ)
    assert values.memory == 3 * 2**30
    assert values.socket == "/env"
    assert values.source("memory") == "flag"
    assert values.source("socket") == "environment PROG_SOCKET"


def test_an_empty_variable_counts_as_unset() -> None:
    assert SERVE.resolve([], {"PROG_SOCKET": ""}).socket == "/tmp/s"


def test_values_joined_by_an_equals_sign() -> None:
    assert SERVE.resolve(["--memory=4K", "--socket=--odd"], {}).as_dict()["socket"] == "--odd"


def test_switches() -> None:
    assert SERVE.resolve(["--verbose", "--no-events"], {}).verbose is True
    assert SERVE.resolve(["--verbose", "--no-events"], {}).events is False
    assert SERVE.resolve(["--no-verbose"], {"PROG_VERBOSE": "1"}).verbose is False
    assert SERVE.resolve([], {"PROG_VERBOSE": "on"}).verbose is True
    with pytest.raises(OptionError, match="PROG_VERBOSE"):
        SERVE.resolve([], {"PROG_VERBOSE": "maybe"})


def test_repeatable_flags_replace_the_variable_as_a_whole() -> None:
    environ = {"PROG_PEERS": "a, b,"}
    assert SERVE.resolve([], environ).peer == ("a", "b")
    assert SERVE.resolve(["--peer", "c", "--peer=d"], environ).peer == ("c", "d")


def test_an_unknown_flag_suggests_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"unknown flag --memroy; did you mean --memory\?"):
        SERVE.resolve(["--memroy", "1G"], {})


def test_flags_are_not_abbreviated() -> None:
    with pytest.raises(OptionError, match="unknown flag --mem"):
        SERVE.resolve(["--mem", "1G"], {})


def test_a_flag_without_its_value_is_refused() -> None:
    for argv in (["--memory"], ["--memory", "--verbose"]):
        with pytest.raises(OptionError, match="--memory SIZE"):
            SERVE.resolve(argv, {})


def test_a_bad_value_names_where_it_came_from() -> None:
    with pytest.raises(OptionError, match=r"^--memory: 'x' is not a size"):
        SERVE.resolve(["--memory", "x"], {})
    with pytest.raises(OptionError, match=r"^environment variable PROG_MEMORY: "):
        SERVE.resolve([], {"PROG_MEMORY": "x"})


def test_choices_suggest_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"did you mean round-robin\?"):
        SERVE.resolve(["--policy", "roundrobin"], {})


def test_a_required_option_says_how_to_give_it() -> None:
    program = Program("p", "s", (Option("--url", "U.", is_required=True, env="P_URL"),))
    with pytest.raises(OptionError, match="--url URL or set P_URL"):
        program.resolve([], {})


def test_parse_exits_with_status_two_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        SERVE.parse(["--zzz"], {})
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "prog serve: unknown flag --zzz\nTry: prog serve --help\n"


def test_help_shows_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        SERVE.parse(["--help"], {})
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert all(option.flag in text or option.usage in text for option in SERVE.options)
    assert "Routing:" in text
    assert "variable PROG_MEMORY" in text


def test_parse_known_returns_engine_flags_verbatim() -> None:
    argv = ["--dtype", "float32", "--memory=1G", "--enforce-eager", "--verbose", "--", "--socket", "theirs"]
    values, rest = SERVE.parse_known(argv, {})
    assert values.memory == 2**30
    assert values.verbose is True
    assert rest == ["--dtype", "float32", "--enforce-eager", "--socket", "theirs"]


def test_help_behind_two_dashes_belongs_to_the_engine() -> None:
    assert SERVE.parse_known(["--", "--help"], {})[1] == ["--help"]


def test_positionals_and_what_follows_two_dashes() -> None:
    program = Program(
        "up",
        "s",
        (Option("--engines", "N.", parse=parse_count, default="1"),),
        positionals=(Positional("MODEL", "A folder."), Positional("NAME", "A name.", is_required=False)),
        rest="engine flags",
    )
    values = program.resolve(["m", "--engines", "2", "--", "--dtype", "auto"], {})
    assert (values.model, values.name, values.engines) == ("m", None, 2)
    assert values.rest == ("--dtype", "auto")
    with pytest.raises(OptionError, match="MODEL is missing"):
        program.resolve([], {})
    with pytest.raises(OptionError, match="unexpected argument 'z'"):
        program.resolve(["x", "y", "z"], {})


def test_nothing_may_follow_two_dashes_unless_said() -> None:
    with pytest.raises(OptionError, match="takes nothing after --"):
        SERVE.resolve(["--", "x"], {})


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'memroy'"):
        _ = SERVE.resolve([], {}).memroy


def test_values_do_not_print_secrets() -> None:
    assert "hunter2" not in repr(SERVE.resolve(["--socket", "hunter2"], {}))


def test_tables_with_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="some-name"):
        Option("-x", "Short.")
    with pytest.raises(ValueError, match="used twice"):
        Program("p", "s", (Option("--a", "A."), Option("--a", "B.")))


def test_the_reference_lists_every_option_once() -> None:
    text = SERVE.reference_markdown()
    for option in SERVE.options:
        assert text.count(f"| `{option.usage}` |") == 1
    assert "### Routing" in text
    assert "`PROG_MEMORY` | `2G`" in text


def test_did_you_mean() -> None:
    assert did_you_mean("demmo", ["demo", "up"]) == "demo"
    assert did_you_mean("zzz", ["demo", "up"]) is None
