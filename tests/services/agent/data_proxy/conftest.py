from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.agent.data_proxy.pair import Pair, start_pair
from tests.services.processes import Processes


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    processes = Processes(tmp_path_factory.mktemp("pair"))
    yield start_pair(processes, tmp_path_factory.mktemp("state"))
    processes.stop()


@pytest.fixture
def pair(shared: Pair) -> Pair:
    """Shared by the tests that break nothing."""
    return shared


@pytest.fixture
def own(processes: Processes, tmp_path: Path) -> Pair:
    """The test's own."""
    return start_pair(processes, tmp_path / "state")
