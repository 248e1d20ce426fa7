from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.inference.data_proxy.dialects.talks import TEMPLATE, build_talking_house
from tests.services.inference.houses import House
from tests.services.processes import Processes, script
from tests.services.tokenizer_folder import write_tokenizer


@pytest.fixture(scope="session")
def talking_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("talking"), template=TEMPLATE)


@pytest.fixture(scope="session")
def talking_house(tmp_path_factory: pytest.TempPathFactory, talking_tokenizer: Path) -> Iterator[House]:
    processes = Processes(tmp_path_factory.mktemp("talking-house"))
    yield build_talking_house(processes, talking_tokenizer)
    processes.stop()


@pytest.fixture
def house(talking_house: House) -> House:
    """The one house of these tests, with the engine's script as new."""
    script(talking_house.engine, reset=True)
    return talking_house
