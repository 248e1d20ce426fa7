"""A worker process with an agent that a test writes."""

from __future__ import annotations

import functools
import http.client
import json
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.services.processes import Process, Processes, wait_ready

StartWorker = Callable[..., Process]


@pytest.fixture
def start_worker(processes: Processes, tmp_path: Path) -> StartWorker:
    """``code`` defines ``Agent``."""
    return functools.partial(start_agent, processes, tmp_path)


def start_agent(
    processes: Processes, folder: Path, code: str, *argv: str, env: dict[str, str] | None = None
) -> Process:
    file = folder / "my_agent.py"
    file.write_text(textwrap.dedent(code))
    process = processes.service("agent.worker", "--agent", f"{file}:Agent", *argv, keyed=False, env=env)
    wait_ready(process)
    return process


class Events:
    """The events of one turn, as they come."""

    def __init__(self, worker: Process, message: str, **more: Any) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=30)
        body = {"message": message, "session_key": "s", "run_id": "run-1", **more}
        self._connection.request("POST", "/run", json.dumps(body), {"Content-Type": "application/json"})
        self.response = self._connection.getresponse()
        assert self.response.status == 200, self.response.read()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while line := self.response.readline():
            yield json.loads(line)

    def next(self) -> dict[str, Any]:
        return json.loads(self.response.readline())

    def leave(self) -> None:
        self.response.close()
        self._connection.close()


def run(worker: Process, message: str = "hello", **more: Any) -> list[dict[str, Any]]:
    """The events of a whole turn."""
    events = Events(worker, message, **more)
    try:
        return list(events)
    finally:
        events.leave()


def answer(worker: Process, message: str = "hello", **more: Any) -> dict[str, Any]:
    """The last event of a turn."""
    return run(worker, message, **more)[-1]
