from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.inference.data_proxy.dialects.talks import TEMPLATE, build_talking_service
from tests.services.inference.running_service import Service
from tests.services.processes import Processes, script
from tests.services.tokenizer_folder import write_tokenizer


@pytest.fixture(scope="session")
def talking_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("talking"), template=TEMPLATE)


@pytest.fixture(scope="session")
def talking_service(tmp_path_factory: pytest.TempPathFactory, talking_tokenizer: Path) -> Iterator[Service]:
    processes = Processes(tmp_path_factory.mktemp("talking-service"))
    yield build_talking_service(processes, talking_tokenizer)
    processes.stop()


@pytest.fixture
def service(talking_service: Service) -> Service:
    """The one service of these tests, with the engine's script as new."""
    script(talking_service.engine, reset=True)
    return talking_service
