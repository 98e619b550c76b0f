"""Settings for every test run."""

from __future__ import annotations

import os
import random

import hypothesis
import hypothesis.core
import pytest

from tests.support.engine_fixtures import engine_fleet

__all__ = ["engine_fleet"]

# Deadlines, and the check for slow generation, measure the machine, not the code.
hypothesis.settings.register_profile(
    "infera", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("infera")


def pytest_configure(config: pytest.Config) -> None:
    """Gives every run a seed that can be repeated; the processes of one run share it."""
    seed = config.getoption("--hypothesis-seed", default=None)
    if seed is None:
        seed = os.environ.get(_SEED_OF_RUN) or str(random.SystemRandom().randrange(2**32))
        hypothesis.core.global_force_seed = int(seed)
    os.environ[_SEED_OF_RUN] = str(seed)  # xdist's workers are started later, and inherit it
    config.stash[_SEED] = str(seed)


def pytest_report_header(config: pytest.Config) -> str:
    return f"hypothesis seed: {config.stash[_SEED]} (repeat with --hypothesis-seed={config.stash[_SEED]})"


@pytest.fixture(autouse=True)
def _no_infera_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the developer's shell exports must not change a test. The cache folder stays: engines are found in it."""
    for name in list(os.environ):
        if name.startswith("INFERA_") and name != "INFERA_CACHE_DIR":
            monkeypatch.delenv(name)


_SEED = pytest.StashKey[str]()
_SEED_OF_RUN = "PYTEST_SEED_OF_RUN"


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first; those that break the shared fleet last.

    Tests with servers go, with `-n`, to one process, in this order: they share a fleet, and some count what is
    running on the machine. Unit tests of one file stay together, for their fixtures' sake.
    """
    order = ["unit", "integration", "e2e", "chaos"]

    def rank(item: pytest.Item) -> int:
        parts = item.path.parts
        return next((place for place, name in enumerate(order) if name in parts), 0)

    items.sort(key=rank)
    for item in items:
        group = "servers" if rank(item) else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
