"""One house of services for all tests that break nothing, and houses to break."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.inference.houses import House, build_house
from tests.services.processes import Processes, script


@pytest.fixture(scope="session")
def shared_house(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Iterator[House]:
    processes = Processes(tmp_path_factory.mktemp("house"))
    yield build_house(processes, tokenizer)
    processes.stop()


@pytest.fixture
def house(shared_house: House) -> House:
    """The shared house with the engine's script as new."""
    script(shared_house.engine, reset=True)
    return shared_house
