"""`infera-kvd status|top|ls|pin|unpin|drop` against the real daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kvd.cli import main
from kvd.client.client import RecordSpec
from kvd.commands.top import RATES
from tests.support.kvd_daemon import DaemonProcess, running
from tests.support.kvd_user import SPEC, KvdUser, key_of

pytestmark = pytest.mark.integration
NAMESPACE = SPEC.namespace.hex()
RECORDS = 40


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    yield from running()


@pytest.fixture
def filled(daemon: DaemonProcess) -> Iterator[KvdUser]:
    user = KvdUser(daemon.socket)
    assert user.save([key_of(number) for number in range(RECORDS)]) == RECORDS
    yield user
    user.client.close()
    daemon.drop(SPEC.namespace)


def ask(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main([*words, "--socket", str(daemon.socket)]) == 0
    return capsys.readouterr().out


def test_top_shows_one_screen(daemon: DaemonProcess, filled: KvdUser, capsys: pytest.CaptureFixture[str]) -> None:
    screen = ask(daemon, capsys, "top", "--once")
    assert f"{RECORDS} of " in screen
    assert NAMESPACE in screen
    assert "test-model" in screen
    assert "\x1b" not in screen
    facts = json.loads(ask(daemon, capsys, "top", "--once", "--json"))
    assert facts["metrics"]["records_present"] == RECORDS
    assert facts["rates_per_s"] is None


def test_top_counts_what_happens_between_screens(
    daemon: DaemonProcess, filled: KvdUser, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    screens = 0

    def work(_: float) -> None:
        nonlocal screens
        screens += 1
        if screens == 2:
            raise KeyboardInterrupt
        assert filled.save([key_of(1000 + number) for number in range(10)]) == 10

    monkeypatch.setattr("kvd.commands.top.time.sleep", work)
    first, second = map(json.loads, ask(daemon, capsys, "top", "--json").splitlines())
    assert first["rates_per_s"] is None
    assert set(second["rates_per_s"]) == {name.removesuffix("_total") for name in RATES}
    assert second["metrics"]["stored_total"] - first["metrics"]["stored_total"] == 10
    assert second["rates_per_s"]["stored"] > 0


def test_ls_lists_classes(daemon: DaemonProcess, filled: KvdUser, capsys: pytest.CaptureFixture[str]) -> None:
    head, *rows = ask(daemon, capsys, "ls").splitlines()
    assert head.split()[:4] == ["id", "namespace", "group", "records"]
    assert any(NAMESPACE in row and f" {RECORDS} " in row for row in rows)
    classes = json.loads(ask(daemon, capsys, "ls", "--json", NAMESPACE))["classes"]
    assert [(kind["records"], kind["record_bytes"], kind["shards"]) for kind in classes] == [(RECORDS, 40_000, 1)]
    assert json.loads(ask(daemon, capsys, "ls", "--json", "00" * 16)) == {"classes": []}


def test_ls_lists_records_page_by_page(
    daemon: DaemonProcess, filled: KvdUser, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[str] = []
    after: list[str] = []
    pages = 0
    while True:
        page = json.loads(ask(daemon, capsys, "ls", "--json", "--keys", NAMESPACE, "--limit", "7", *after))
        assert len(page["records"]) <= 7
        found += [record["key"] for record in page["records"]]
        pages += 1
        if page["next"] is None:
            break
        after = ["--after", str(page["next"])]
    assert pages > RECORDS // 7
    assert sorted(found) == sorted(key_of(number).hex() for number in range(RECORDS))


def test_ls_of_records_says_how_to_go_on(
    daemon: DaemonProcess, filled: KvdUser, capsys: pytest.CaptureFixture[str]
) -> None:
    *rows, last = ask(daemon, capsys, "ls", "--keys", NAMESPACE, "--limit", "5").splitlines()
    assert len(rows) == 6
    assert last.startswith("more: add --after ")
    everything = ask(daemon, capsys, "ls", "--keys", NAMESPACE)
    assert everything.count("\n") == RECORDS + 1
    assert "more:" not in everything


def test_ls_shows_what_a_record_is(daemon: DaemonProcess, filled: KvdUser, capsys: pytest.CaptureFixture[str]) -> None:
    (record,) = json.loads(ask(daemon, capsys, "ls", "--json", "--keys", NAMESPACE, "--limit", "1"))["records"]
    assert record["present"] is True
    assert record["shards"] == 1
    assert record["bytes"] == 40_960
    assert record["depth_tokens"] == 16


def test_ls_of_an_incomplete_record(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    spec = RecordSpec(b"two-shard-record", 0, (4096, 4096), "pair")
    user = KvdUser(daemon.socket, spec)
    grants = user.client.reserve(spec, 0, [key_of(1)], [3])
    assert user.client.commit(grants, [0]) == 1
    (record,) = json.loads(ask(daemon, capsys, "ls", "--json", "--keys", spec.namespace.hex()))["records"]
    assert (record["present"], record["shards"], record["bytes"], record["depth_tokens"]) == (False, 1, 4096, 48)
    user.client.close()


@pytest.mark.parametrize("command", [["ls", "--keys"], ["drop"], ["pin"], ["unpin"]])
def test_an_unknown_namespace_is_answered_with_those_there_are(
    daemon: DaemonProcess, filled: KvdUser, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "ff" * 16, "--socket", str(daemon.socket)]) == 1
    error = capsys.readouterr().err
    assert "no such namespace" in error
    assert NAMESPACE in error


def test_keys_without_a_namespace_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--keys"]) == 2
    assert "needs a NAMESPACE" in capsys.readouterr().err


def test_pin_and_unpin(daemon: DaemonProcess, filled: KvdUser, capsys: pytest.CaptureFixture[str]) -> None:
    def retentions() -> set[str]:
        records = json.loads(ask(daemon, capsys, "ls", "--json", "--keys", NAMESPACE))["records"]
        return {record["retention"] for record in records}

    assert json.loads(ask(daemon, capsys, "pin", "--json", NAMESPACE)) == {"changed": RECORDS, "retention": "pinned"}
    assert retentions() == {"pinned"}
    assert ask(daemon, capsys, "unpin", NAMESPACE) == f"{RECORDS} records are short now\n"
    assert retentions() == {"short"}


def test_drop_says_how_many(daemon: DaemonProcess, filled: KvdUser, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(ask(daemon, capsys, "drop", "--json", NAMESPACE)) == {"dropped": RECORDS}
    assert ask(daemon, capsys, "drop", NAMESPACE) == "dropped 0 records\n"
