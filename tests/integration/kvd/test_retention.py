"""Retention classes, times to live and quotas through the real client, daemon and command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.kvd_daemon import DaemonProcess, running
from tests.support.kvd_user import SPEC, KvdUser, key_of
from tests.support.processes import ROOT, wait_until

pytestmark = pytest.mark.integration
RECORD_BYTES = 40_960
TENANT, OTHER = 0x1111, 0x2222


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    yield from running("--quota-tenant", "1M", memory="8M")


@pytest.fixture
def user(daemon: DaemonProcess) -> Iterator[KvdUser]:
    made = KvdUser(daemon.socket)
    yield made
    made.client.close()


def save(
    user: KvdUser, numbers: range, retention: str = "short", *, ttl_s: int | None = None, tenant_tag: int = 0
) -> int:
    """Save blocks over the socket; returns how many were accepted."""
    accepted = 0
    for number in numbers:
        grants = user.client.reserve(
            SPEC, 0, [key_of(number)], [number + 1], retention=retention, ttl_s=ttl_s, tenant_tag=tenant_tag
        )
        accepted += user.client.commit(grants, user.copy(grants, [key_of(number)]))
    return accepted


def command(daemon: DaemonProcess, verb: str) -> dict[str, object]:
    """What `infera-kvd VERB` says of the namespace."""
    ended = subprocess.run(
        [sys.executable, "-m", "kvd", verb, SPEC.namespace.hex(), "--socket", str(daemon.socket), "--json"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    facts: dict[str, object] = json.loads(ended.stdout)
    return facts


def test_what_is_pinned_by_command_survives_pressure_until_it_is_unpinned(daemon: DaemonProcess, user: KvdUser) -> None:
    assert save(user, range(20)) == 20
    assert command(daemon, "pin")["changed"] == 20
    save(user, range(1000, 1400))
    assert user.probe([key_of(i) for i in range(20)]) == 20
    assert command(daemon, "unpin")["changed"] != 0
    assert daemon.metrics()["pinned_bytes"] == 0
    assert daemon.status(audit=True)["audit"] is None


def test_a_record_expires_by_the_daemons_clock_and_is_removed(daemon: DaemonProcess, user: KvdUser) -> None:
    save(user, range(3), ttl_s=2)
    save(user, range(3, 5))
    assert user.probe([key_of(0)]) == 1
    wait_until(lambda: user.probe([key_of(0)]) == 0, "it has expired")
    wait_until(lambda: daemon.metrics()["ttl_expired_total"] == 3, "the expired ones were removed")
    assert user.probe([key_of(3), key_of(4)]) == 2


def test_a_tenant_keeps_to_its_quota_and_is_accounted_for(daemon: DaemonProcess, user: KvdUser) -> None:
    assert save(user, range(60), tenant_tag=TENANT) == 60
    assert save(user, range(100, 110), tenant_tag=OTHER) == 10
    tenants = {int(tenant["tag"], 16): tenant["bytes"] for tenant in daemon.status()["tenants"]}
    assert tenants == {TENANT: (1 << 20) // RECORD_BYTES * RECORD_BYTES, OTHER: 10 * RECORD_BYTES}
    assert daemon.metrics()["evicted_quota_total"] == 60 - (1 << 20) // RECORD_BYTES


def test_a_record_not_worth_keeping_is_not_saved(daemon: DaemonProcess, user: KvdUser) -> None:
    assert save(user, range(5), "none") == 0
    assert daemon.metrics()["reserve_unwanted_total"] == 5
    with pytest.raises(ValueError, match="no retention class"):
        save(user, range(1), "forever")


def test_terms_travel_through_the_ring_too(daemon: DaemonProcess, user: KvdUser) -> None:
    for start in range(0, 60, 20):
        numbers = range(start, start + 20)
        keys = b"".join(key_of(number) for number in numbers)
        user.client.put(
            SPEC, 0, keys, [number + 1 for number in numbers], user._copier, list(range(20)), retention="long",
            ttl_s=1000, tenant_tag=OTHER,
        )  # fmt: skip
    wait_until(lambda: daemon.metrics()["long_records"] == (1 << 20) // RECORD_BYTES, "all were taken in")
    assert daemon.metrics()["evicted_quota_total"] == 60 - (1 << 20) // RECORD_BYTES
