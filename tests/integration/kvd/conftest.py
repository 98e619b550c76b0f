"""A daemon of their own for each test, and clients in other processes and in this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.kvd_daemon import DaemonProcess, running
from tests.support.kvd_user import KvdUser, UserProcess

MakeUser = Callable[[], UserProcess]


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    yield from running()


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
