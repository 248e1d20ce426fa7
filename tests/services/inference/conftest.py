"""One service for all tests that break nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.services.inference.running_service import Service, build_service
from tests.services.processes import Processes, script


@pytest.fixture(scope="session")
def shared_service(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Iterator[Service]:
    processes = Processes(tmp_path_factory.mktemp("service"))
    yield build_service(processes, tokenizer)
    processes.stop()


@pytest.fixture
def service(shared_service: Service) -> Service:
    """The shared service with the engine's script as new."""
    script(shared_service.engine, reset=True)
    return shared_service


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.gateway.url}/v1", api_key=service.key, max_retries=0) as client:
        yield client
