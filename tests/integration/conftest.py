"""Real processes for integration tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chat_templates import CHATML
from tests.support.models import make_model_folder
from tests.support.processes import Cluster, cluster


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a chat template."""
    return make_model_folder(tmp_path_factory.mktemp("model"), CHATML)


@pytest.fixture
def fleet(model_folder: Path) -> Iterator[Cluster]:
    """A cluster to fill with a server and engines."""
    with cluster(model_folder) as made:
        yield made
