"""A daemon of its own for each test or one for a file, and clients in other processes and in this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.kvd_daemon import DaemonProcess, running
from tests.support.kvd_user import SPEC, KvdUser, UserProcess

MakeUser = Callable[[], UserProcess]


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    yield from running()


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[DaemonProcess]:
    """One daemon for all tests of a file that do it no harm."""
    yield from running()


@pytest.fixture
def user(shared_daemon: DaemonProcess) -> Iterator[KvdUser]:
    """A client of the shared daemon, in this process; what it stored is dropped after the test."""
    made = KvdUser(shared_daemon.socket)
    yield made
    made.client.close()
    shared_daemon.drop(SPEC.namespace)


@pytest.fixture
def new_user(daemon: DaemonProcess) -> Iterator[MakeUser]:
    users: list[UserProcess] = []

    def make() -> UserProcess:
        users.append(UserProcess(daemon.socket))
        return users[-1]

    yield make
    for user in users:
        user.kill()


@pytest.fixture
def here(daemon: DaemonProcess) -> Iterator[KvdUser]:
    """A client in this process."""
    user = KvdUser(daemon.socket)
    yield user
    user.client.close()
