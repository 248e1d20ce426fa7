"""Two recording replicas behind a gateway, shared by the tests that break nothing, and services to break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.services.inference.sessions.recording_service import RecordingService, build_recording_service
from tests.services.processes import Processes, script


@pytest.fixture(scope="package")
def shared_recording(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Iterator[RecordingService]:
    processes = Processes(tmp_path_factory.mktemp("recording"))
    try:
        yield build_recording_service(processes, tokenizer, tmp_path_factory.mktemp("state"))
    finally:
        processes.stop()


@pytest.fixture
def recording(shared_recording: RecordingService) -> RecordingService:
    """The shared service with the engines' scripts as new. Sessions of other tests may be in it."""
    for engine in shared_recording.engines:
        script(engine, reset=True)
    return shared_recording


@pytest.fixture
def build(processes: Processes, tokenizer: Path, tmp_path: Path) -> Callable[..., RecordingService]:
    """Services of a test's own, to break."""
    return lambda *flags, **more: build_recording_service(processes, tokenizer, tmp_path / "state", *flags, **more)
