"""Dispatch of one turn to the data proxy that holds its session, and the stream of its events (``areal.wire.agents``).

A turn that no data proxy has started is sent again: after a refused connection, a 503, or a 421 for a journal that has
moved. A turn that may have started is not sent again: it fails if its data proxy is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from areal.dataclasses import dataclass, field
from areal.http import headers as names
from areal.http.client import Connection, HttpClient, HttpReply, NotConnected, ResponseLost
from areal.http.headers import unique_id
from areal.services.agent.gateway.sessions import AgentSessions, path_of
from areal.services.http.errors import ApiError, refusal
from areal.services.http.service import Metrics
from areal.services.http.tasks import Watchdog
from areal.services.inference.gateway.relay import Admission
from areal.services.inference.gateway.routing import AnswerLines, Follower, LiveTable
from areal.services.inference.router.picking import CallKey
from areal.wire.agents import TurnRequest
from areal.wire.routing import WorkerEntry

Event = Mapping[str, Any]
Sink = Callable[[Event], Awaitable[None]]
LAST = ("complete", "failed")
_NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients would run the agent again
_FAILURES = {
    "agent": (500, "agent_failed", _NO_RETRY),
    "infra": (502, "worker_lost", {}),
    "cancelled": (409, "turn_cancelled", _NO_RETRY),
}


def new_run_id() -> str:
    return unique_id("run-")


class TurnMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self._turns = metrics.counter("areal_agent_turns_total", "Turns, by how they ended.", ("outcome",))
        self._seconds = metrics.histogram("areal_agent_turn_seconds", "From a turn's request to its end.", labels=())
        self.first = metrics.histogram(
            "areal_agent_first_event_seconds", "From a streamed turn's request to what the agent says first.", labels=()
        )
        self.running = metrics.gauge("areal_agent_turns_running", "Turns that run now.")

    def ended(self, outcome: str, seconds: float) -> None:
        self._turns.labels(outcome).inc()
        self._seconds.observe(seconds)


@dataclass
class TurnCall:
    """A turn in progress. ``key``: of its session. ``writing``: an event is being written to the caller."""

    key: str
    turn: TurnRequest
    request_id: str
    started: float = field(default_factory=time.perf_counter)
    answered: bool = False  # an event came after ``accepted``
    writing: bool = False
    waited: float = 0.0  # seconds spent waiting for data proxies, agents and the caller
    theirs_us: int = 0  # the data proxy's own time until the turn was queued

    @property
    def overhead_us(self) -> int:
        """The service's own time so far, without the agent's time and time in queues."""
        return int((time.perf_counter() - self.started - self.waited) * 1e6) + self.theirs_us


@dataclass(eq=False)
class TurnDispatcher:
    """Runs turns on the data proxies of an agent service."""

    _sessions: AgentSessions
    _table: LiveTable
    _follower: Follower
    _admission: Admission
    _http: HttpClient
    _headers: Mapping[str, str]
    _metrics: TurnMetrics

    async def run(self, call: TurnCall, sink: Sink) -> Event:
        """Pass the turn's events to ``sink``, and return the last one, ``complete``. Cancelling the call cancels the
        turn unless another caller waits for it. Raises ApiError for a turn that was refused or has failed."""
        outcome = "abandoned"  # the caller has left
        self._metrics.running.inc()
        try:
            last = await self._until_begun(call, sink)
            outcome = "complete" if last["type"] == "complete" else last["failure"]
        except ApiError:
            outcome = "refused"
            raise
        finally:
            self._metrics.running.dec()
            self._metrics.ended(outcome, time.perf_counter() - call.started)
        if outcome != "complete":
            status, code, headers = _FAILURES[outcome]
            raise ApiError(status, last["error"], code=code, headers=headers)
        return last

    async def _until_begun(self, call: TurnCall, sink: Sink) -> Event:
        body = orjson.dumps(call.turn)
        refused: set[str] = set()
        since = asyncio.get_running_loop().time()
        tag = await self._sessions.find_or_start(call.key, call.turn.inference, call.request_id)
        while True:
            try:
                model = self._table.model_of_journal(tag) or self._sessions.service
                worker = await self._admission.worker(model, CallKey(tag=tag), refused, since)
            except ApiError as error:
                tag = await self._sessions.find_again(call.key, tag, error)
                continue
            outcome = await self._attempt(call, body, tag, worker, sink)
            if not isinstance(outcome, ApiError):
                return outcome
            refused = {worker.addr}
            if outcome.status == 503:
                self._table.suspect(worker.addr)
            elif outcome.status != 421:
                self._sessions.forget(call.key)
                raise outcome

    async def _attempt(
        self, call: TurnCall, body: bytes, tag: str, worker: WorkerEntry, sink: Sink
    ) -> Event | ApiError:
        """Return the turn's last event, or the error of a data proxy that did not start the turn."""
        path = path_of(call.key, "/turn")
        headers = {**self._headers, names.REQUEST_ID: call.request_id, names.JOURNAL: tag}
        sent_at = time.perf_counter()
        try:
            # The deadline is also suspended while the caller lags behind.
            watched = self._follower.watchdog(self._sessions.service, worker.addr, lambda: call.writing)
            async with watched as watchdog, self._http.call("POST", worker.addr, path, headers, body) as answer:
                call.waited += time.perf_counter() - sent_at
                theirs = answer.headers.get(names.OVERHEAD, "")
                call.theirs_us = int(theirs) if theirs.isdecimal() else 0
                if answer.status != 200:
                    return refusal(HttpReply(answer.status, answer.headers, await answer.whole()), "a data proxy")
                self._table.trust(worker.addr)
                return await self._read(call, answer, sink, watchdog)
        except NotConnected:
            return ApiError(503, "the data proxy is not available", code="worker_lost")
        except TimeoutError:
            return _lost(f"the data proxy gave no sign of life for {self._table.timeout_s:g} s")
        except (ResponseLost, ValueError) as error:
            return _lost(f"the data proxy was lost: {error}")

    async def _read(self, call: TurnCall, answer: Connection, sink: Sink, watchdog: Watchdog) -> Event:
        """Pass events to ``sink``, and return the last one. Raises ResponseLost for a response that ends early."""
        waiting_since = time.perf_counter()
        async for line in AnswerLines(answer):
            call.waited += time.perf_counter() - waiting_since
            watchdog.kick()
            event: Event = orjson.loads(line)
            kind = event["type"]
            if call.turn.stream and not call.answered and kind != "accepted":
                call.answered = True
                self._metrics.first.observe(time.perf_counter() - call.started)
            if kind in LAST:
                return event
            call.writing = True
            await sink(event)
            call.writing = False
            watchdog.kick()
            waiting_since = time.perf_counter()
        raise ResponseLost("its answer ended before the turn")


def _lost(error: str) -> Event:
    return {"type": "failed", "failure": "infra", "error": error}
