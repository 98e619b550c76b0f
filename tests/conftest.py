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
    """Gives every run a seed that can be repeated."""
    seed = config.getoption("--hypothesis-seed", default=None)
    if seed is None:
        seed = str(random.SystemRandom().randrange(2**32))
        hypothesis.core.global_force_seed = int(seed)
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first; those that break the shared fleet last."""
    order = ["unit", "integration", "e2e", "chaos"]

    def rank(item: pytest.Item) -> int:
        parts = item.path.parts
        return next((place for place, name in enumerate(order) if name in parts), 0)

    items.sort(key=rank)
