"""One pair under test: a data proxy, and the worker that does what messages say."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.services.inference.running_service import later
from tests.services.processes import Answer, Process, Processes, wait_ready

WORKER = Path(__file__).parent / "scripted_worker.py"
Event = dict[str, Any]


class TurnStream:
    """A turn's events, one by one."""

    def __init__(self, proxy: Process, key: str, path: str, body: Event) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        self._connection.request("POST", path, body=json.dumps(body), headers=headers)
        self._response = self._connection.getresponse()
        self.status = self._response.status

    def __iter__(self) -> Iterator[Event]:
        while line := self._response.readline():
            yield json.loads(line)

    def close(self) -> None:
        self._response.close()
        self._connection.close()


@dataclass
class Pair:
    processes: Processes
    worker: Process
    proxy: Process
    state: Path
    flags: tuple[str, ...] = ()
    runs: Iterator[int] = field(default_factory=count)

    @property
    def key(self) -> str:
        return self.processes.key

    def call(self, method: str, path: str, body: Any = None) -> Answer:
        return self.proxy.call(method, path, body, key=self.key)

    def start(self, key: str | None = None, **more: Any) -> str:
        answer = self.call("POST", "/rl/start_session", {"api_key": key, **more})
        assert answer.status == 201, answer.body
        started: str = answer.json()["sessions"][0]["session_id"]
        return started

    def path(self, session: str, verb: str = "") -> str:
        return f"/session/{quote(session, safe='')}{verb}"

    def stream(self, session: str, message: str, **more: Any) -> TurnStream:
        body = {"message": message, "run_id": f"run-{next(self.runs)}", **more}
        return TurnStream(self.proxy, self.key, self.path(session, "/turn"), body)

    def turn(self, session: str, message: str, **more: Any) -> list[Event]:
        stream = self.stream(session, message, **more)
        events = list(stream)
        assert stream.status == 200, events
        return events

    def say(self, session: str, message: str, **more: Any) -> str:
        """The summary."""
        last = self.turn(session, message, **more)[-1]
        assert last["type"] == "complete", last
        summary: str = last["summary"]
        return summary

    def later(self, session: str, message: str, **more: Any) -> Future[list[Event]]:
        return later(self.turn, session, message, **more)

    def show(self, session: str) -> Event:
        answer = self.call("GET", self.path(session))
        assert answer.status == 200, answer.body
        shown: Event = answer.json()
        return shown

    def reported(self, until: str | None = None, number: int = 1) -> Event:
        query = f"?until={until}&count={number}" if until else ""
        reported: Event = self.worker.call("GET", f"/calls{query}", key=self.key).json()
        return reported

    def calls(self, session: str) -> list[Event]:
        return [call for call in self.reported()["calls"] if call["session_key"] == session]

    def wait_begun(self, session: str, turns: int = 1) -> None:
        """So many of its turns have reached the worker."""
        total = 0
        while len(self.calls(session)) < turns:
            total = len(self.reported("any", total + 1)["calls"])

    def release(self) -> None:
        assert self.worker.call("POST", "/release", key=self.key).status == 200

    def restart_worker(self) -> None:
        self.worker = start_worker(self.processes, self.worker.port)

    def restart(self) -> None:
        """The data proxy of the same run."""
        self.proxy = start_proxy(self.processes, self.worker, self.state, *self.flags)


def start_worker(processes: Processes, port: int = 0) -> Process:
    process = processes.spawn(str(WORKER), "--admin-key-file", str(processes.key_file), "--port", str(port))
    process.port = int(process.wait_log(r"listens on \S+ port (\d+)")[1])
    return process


def start_proxy(processes: Processes, worker: Process, state: Path, *flags: str, uid: str = "pair-0") -> Process:
    own = ("--worker-url", worker.url, "--state-dir", str(state), "--health-period", "0.5", "--adopt-after", "1")
    process = processes.service("agent.data_proxy", *own, *flags, env={"AREAL_RUN_UID": uid})
    wait_ready(process)
    return process


def start_pair(processes: Processes, state: Path, *flags: str) -> Pair:
    worker = start_worker(processes)
    return Pair(processes, worker, start_proxy(processes, worker, state, *flags), state, flags)
