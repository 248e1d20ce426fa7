"""A data proxy that records, before a scripted engine: what the clients of these tests talk to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.services.processes import Process, Processes, script
from tests.services.tokenizer_folder import write_tokenizer


@dataclass(frozen=True)
class Place:
    """``folder`` has the tokenizer."""

    processes: Processes
    engine: Process
    proxy: Process
    folder: Path

    @property
    def key(self) -> str:
        return self.processes.key


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def shared_place(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("services")
    processes = Processes(folder)
    try:
        engine = processes.engine(tokenizer)
        proxy = processes.data_proxy(engine, tokenizer, "--state-dir", str(folder / "state"))
        yield Place(processes, engine, proxy, tokenizer)
    finally:
        processes.stop()


@pytest.fixture
def place(shared_place: Place) -> Place:
    script(shared_place.engine, reset=True)
    return shared_place
