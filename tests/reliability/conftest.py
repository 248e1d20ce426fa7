from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reliability.faults import PAGE, Outcome, fault_of, read_page
from tests.reliability.fleet import Fleet, running_fleet
from tests.reliability.table import WRITING
from tests.services.processes import Processes
from tests.services.tokenizer_folder import write_tokenizer


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(fault): injects it, and tells the outcome for docs/reliability.md")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.stop()


@pytest.fixture
def fleet(tmp_path: Path, tokenizer: Path) -> Iterator[Fleet]:
    with running_fleet(tmp_path, tokenizer, replicas=2, behind_gateway=True, relays=2) as fleet:
        yield fleet


@pytest.fixture
def outcome(request: pytest.FixtureRequest) -> Iterator[Outcome]:
    """What the test of a fault saw: it must be what the page says."""
    fault = fault_of(request.node)
    assert fault is not None, "mark the test with its fault"
    outcome = Outcome(fault)
    yield outcome
    row = outcome.row()
    request.node.user_properties.append(("fault", row.plain()))
    if WRITING not in os.environ:
        published = read_page(PAGE.read_text(encoding="utf-8")).get(fault)
        assert published == row, "python -m tests.reliability.table --write makes the page anew"
