"""The turns of each session, one after the other, run by the pair's worker.

A message that comes while a turn of its session runs waits: ``followup`` for a turn of its own, ``collect`` for one
with all others that wait so. A turn has callers, who get its events as they come; it is cancelled when the last of them
leaves, unless one has named it by an Idempotency-Key: it is there for the retry. When it has ended, it is written to
the journal, and only then are its callers told. A failed turn is recorded, and is no part of the conversation.

The worker gets the conversation with each turn, so that any worker can run any turn. A turn that the worker has not
begun waits for a worker that is about to be there; one that has begun fails when its worker is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from areal.services.agent.data_proxy.inference import RlSessions
from areal.services.agent.data_proxy.journal import AgentSession, Outcome, RecordedTurn, RlSession, TurnRequestKey
from areal.services.http.client import CallFailed, Connection, HttpClient, NotConnected, PendingCall
from areal.services.http.errors import ApiError
from areal.services.http.messages import Request, StreamResponse
from areal.services.http.service import Metrics
from areal.services.http.tasks import Watchdog
from areal.wire.agents import EVENTS, ModelAccess, QueueMode, TurnRequest
from areal.wire.processes import AgentDataProxyConfig

_log = logging.getLogger(__name__)
_WORKER_AWAY_S = 60.0  # a turn that has not begun waits so long for a worker
_PROBE_TIMEOUT_S = 5.0
_SOON_S = 0.1
_LOST_AFTER = 2
_CLOSE_TIMEOUT_S = 10.0
_LONGEST_ERROR = 4096
_NOT_PARSED = (b'{"type":"delta"', b'{"type":"data"')
_LINE_SLACK = 64 * 1024


class TurnFailed(Exception):
    """``failure``: whose fault it is."""

    def __init__(self, failure: Outcome, error: str) -> None:
        super().__init__(error)
        self.failure = failure
        self.error = error[:_LONGEST_ERROR]


# -- the worker


class Worker:
    """The pair's worker; ``fault`` says why it runs no turns now. ``on_change`` is called when that changes."""

    def __init__(self, config: AgentDataProxyConfig, http: HttpClient, headers: Mapping[str, str]) -> None:
        self._url = config.worker_url
        self.period_s = config.health_period
        self._http = http
        self._headers = {**headers, "Content-Type": "application/json"}
        self._failures = _LOST_AFTER
        self._look = asyncio.Event()
        self._ready = asyncio.Event()
        self.fault: str | None = "the worker was not asked yet"
        self.on_change: Callable[[], None] = lambda: None

    async def run(self) -> None:
        """Probe it: more often while it is not ready."""
        while True:
            self._look.clear()
            self._note(await self._ask())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SOON_S if self._failures else self.period_s):
                    await self._look.wait()

    async def _ask(self) -> str | None:
        try:
            reply = await self._http.fetch(
                "GET", self._url, "/ready", headers=self._headers, timeout_s=_PROBE_TIMEOUT_S
            )
        except (CallFailed, TimeoutError) as error:
            return f"the worker does not answer: {error!r}"
        return None if reply.status == 200 else f"the worker is not ready: {reply.object().get('reason')}"

    def _note(self, fault: str | None) -> None:
        self._failures = self._failures + 1 if fault is not None else 0
        if fault is not None and self._failures < _LOST_AFTER:
            return
        changed, self.fault = self.fault != fault, fault
        if fault is None:
            self._ready.set()
        else:
            self._ready.clear()
        if changed:
            self.on_change()

    async def wait_ready(self, timeout_s: float) -> bool:
        """After a call that it did not take: whether it is there within ``timeout_s``."""
        self._ready.clear()
        self._failures = max(self._failures, 1)
        self._look.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return False
        return True

    def call(self, body: bytes) -> PendingCall:
        return self._http.call("POST", self._url, "/run", self._headers, body)

    async def close_session(self, path: str) -> None:
        """Its agent may forget the session of this ``path``. A worker that does not answer has nothing to forget."""
        try:
            await self._http.fetch("POST", self._url, path, headers=self._headers, timeout_s=_CLOSE_TIMEOUT_S)
        except (CallFailed, TimeoutError) as error:
            _log.warning("the worker did not close a session: %r", error)


# -- what a turn leaves behind


class Transcript:
    """A turn's events as chat messages that can be sent to a model again: the tool calls that were made together in
    one message, each with its result behind it. ``room``: bytes that it may still grow by."""

    def __init__(self, message: str, room: int) -> None:
        self._message = message
        self._room = room - len(message)
        self._groups: list[dict[str, dict[str, Any]]] = []  # calls by id
        self._results: dict[str, str] = {}

    def add(self, event: Mapping[str, Any], size: int) -> None:
        """Raises TurnFailed for an event that is too large, KeyError for one without its fields."""
        self._room -= size
        if self._room < 0:
            raise TurnFailed("agent", "the agent's tool calls and answer are larger than a turn may be")
        if event["type"] == "tool_call":
            if not self._groups or any(call in self._results for call in self._groups[-1]):
                self._groups.append({})
            function = {"name": event["name"], "arguments": event["arguments"]}
            self._groups[-1][event["id"]] = {"id": event["id"], "type": "function", "function": function}
        elif event["type"] == "tool_result":
            self._results[event["id"]] = event["result"]

    def messages(self, summary: str) -> bytes:
        """A call that the agent told no result of has an empty one: without any, no model would take the messages."""
        found: list[dict[str, Any]] = [{"role": "user", "content": self._message}]
        for group in self._groups:
            found.append({"role": "assistant", "content": None, "tool_calls": list(group.values())})
            found += [{"role": "tool", "tool_call_id": call, "content": self._results.get(call, "")} for call in group]
        if summary:
            found.append({"role": "assistant", "content": summary})
        return orjson.dumps(found)


def event_line(**event: Any) -> bytes:
    return orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE)


def recorded_events(turn: RecordedTurn) -> bytes:
    """The events of a turn that has ended, after ``accepted`` and without its deltas."""
    summary, names, events = "", dict[str, str](), list[dict[str, Any]]()
    for message in orjson.loads(turn.messages):
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
            events.append({"type": "tool_call", "id": call["id"], **call["function"]})
        if message["role"] == "tool":
            told = {"id": message["tool_call_id"], "name": names[message["tool_call_id"]], "result": message["content"]}
            events.append({"type": "tool_result", **told})
        elif message["role"] == "assistant":
            summary = message["content"] or ""
    if turn.outcome == "complete":
        events.append({"type": "complete", "summary": summary, "metadata": orjson.Fragment(turn.metadata)})
    else:
        events.append({"type": "failed", "failure": turn.outcome, "error": turn.error})
    return b"".join(event_line(**event) for event in events)


# -- queues


@dataclass(eq=False)
class Caller:
    """Whoever sent a message: it gets the turn's events as they come. ``live`` false: it came for a turn that runs
    already, and is told all of it at its end."""

    http: Request
    message: str
    request: TurnRequestKey | None
    live: bool = True
    accepted: bytes = b""
    out: StreamResponse = field(default_factory=lambda: StreamResponse(headers={"Content-Type": EVENTS}))

    def begin(self, events: bytes = b"") -> None:
        """Tell it that its turn was accepted: with its first events, or where those are not there soon."""
        if not self.out.prepared:
            with contextlib.suppress(ConnectionResetError):
                self.out.begin(self.http, self.accepted + events)

    async def pass_on(self, events: bytes) -> None:
        """Waits while it lags behind."""
        if not self.out.prepared:
            self.begin(events)
        else:
            with contextlib.suppress(ConnectionResetError):
                await self.out.write(events)


@dataclass(eq=False)
class Turn:
    """``last``: its last event, once it has ``ended``. ``recorded``: None where it could not be written. ``aborted``:
    why it is to end. ``writing``: a caller lags behind."""

    run_id: str
    mode: QueueMode
    metadata: dict[str, Any] = field(default_factory=dict)
    inference: ModelAccess | None = None
    callers: list[Caller] = field(default_factory=list)
    requests: list[TurnRequestKey] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    aborted: TurnFailed | None = None
    interruptible: bool = False
    writing: bool = False
    recorded: RecordedTurn | None = None
    last: bytes = b""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class SessionQueue:
    session: AgentSession
    running: Turn
    task: asyncio.Task[None]
    waiting: deque[Turn] = field(default_factory=deque)

    def turns(self) -> Iterator[Turn]:
        yield self.running
        yield from self.waiting


class Slots:
    """As many turns as run at once; ``limit`` may change."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        self._grant()

    async def __aenter__(self) -> None:
        if self.taken < self._limit:
            self.taken += 1
            return
        self._waiting.append(granted := asyncio.get_running_loop().create_future())
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                self._free()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._free()

    def _free(self) -> None:
        self.taken -= 1
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self.taken < self._limit:
            granted = self._waiting.popleft()
            if not granted.done():
                self.taken += 1
                granted.set_result(None)


class TurnMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self.turns = metrics.counter("areal_agent_turns_total", "Turns, by how they ended.", ("outcome",))
        self.seconds = metrics.histogram("areal_agent_turn_seconds", "From a turn's start to its end.", labels=())
        self.running = metrics.gauge("areal_agent_turns_running", "Turns that the worker runs.")
        self.waiting = metrics.gauge("areal_agent_turns_waiting", "Turns that wait for others.")


class TurnRunner:
    def __init__(
        self, config: AgentDataProxyConfig, worker: Worker, rl: RlSessions, metrics: TurnMetrics, slots: Slots
    ) -> None:
        self._config = config
        self._worker = worker
        self._rl = rl
        self._metrics = metrics
        self._slots = slots
        self._queues: dict[AgentSession, SessionQueue] = {}
        self._outcomes = {each: metrics.turns.labels(each) for each in ("complete", "agent", "infra", "cancelled")}
        metrics.running.set_function(lambda: self._slots.taken)
        metrics.waiting.set_function(
            lambda: sum(1 + len(queue.waiting) for queue in self._queues.values()) - self._slots.taken
        )

    # -- callers

    def queue(self, session: AgentSession) -> SessionQueue | None:
        return self._queues.get(session)

    def find(self, session: AgentSession, key: bytes) -> tuple[Turn, TurnRequestKey] | None:
        """The turn that runs, or waits, for a request with this Idempotency-Key."""
        queue = self._queues.get(session)
        for turn in queue.turns() if queue is not None else ():
            for request in turn.requests:
                if request.key == key:
                    return turn, request
        return None

    def add(self, session: AgentSession, asked: TurnRequest, caller: Caller) -> Turn:
        """The turn that answers the caller."""
        queue = self._queues.get(session)
        if (
            queue is not None
            and asked.queue_mode == "collect"
            and queue.waiting
            and queue.waiting[-1].mode == "collect"
        ):
            turn = queue.waiting[-1]
        else:
            turn = Turn(asked.run_id, asked.queue_mode)
            if queue is None:
                task = asyncio.create_task(self._run_all(session, turn), name=f"turns-{session.number}")
                self._queues[session] = SessionQueue(session, turn, task)
            else:
                queue.waiting.append(turn)
        turn.callers.append(caller)
        turn.messages.append(asked.message)
        turn.metadata |= asked.metadata
        turn.inference = asked.inference or turn.inference
        if caller.request is not None:
            turn.requests.append(caller.request)
        return turn

    def leave(self, session: AgentSession, turn: Turn, caller: Caller) -> None:
        """The caller is gone."""
        queue = self._queues.get(session)
        turn.callers.remove(caller)
        if queue is None or caller.request is not None:
            return
        if turn in queue.waiting and caller.live:
            turn.messages.remove(caller.message)
            if not turn.messages:
                queue.waiting.remove(turn)
        elif turn is queue.running and not turn.callers and not turn.requests:
            self._interrupt(queue, TurnFailed("cancelled", "its caller left"))

    async def abort(self, session: AgentSession, why: TurnFailed, *, waiting: bool = False) -> bool:
        """End the turn that runs (with ``waiting`` those that wait, too), and return when that is on disk. False where
        none runs."""
        queue = self._queues.get(session)
        if queue is None:
            return False
        for turn in queue.waiting if waiting else ():
            turn.aborted = why
        self._interrupt(queue, why)
        if waiting:
            await asyncio.wait([queue.task])
        else:
            await queue.running.ended.wait()
        return True

    async def close(self) -> None:
        """The process ends: so does every turn."""
        why = TurnFailed("infra", "the data proxy was stopped")
        await asyncio.gather(*(self.abort(session, why, waiting=True) for session in list(self._queues)))

    def _interrupt(self, queue: SessionQueue, why: TurnFailed) -> None:
        turn = queue.running
        if turn.aborted is None:
            turn.aborted = why
            if turn.interruptible:
                queue.task.cancel()

    # -- running

    async def _run_all(self, session: AgentSession, turn: Turn) -> None:
        with session.journal.in_use():
            while True:
                await self._run(session, turn)
                queue = self._queues[session]
                if not queue.waiting:
                    break
                turn = queue.running = queue.waiting.popleft()
            del self._queues[session]

    async def _run(self, session: AgentSession, turn: Turn) -> None:
        """Run it, write down how it ended, and tell its callers."""
        at, began = session.journal.clock(), time.perf_counter()
        transcript = Transcript("\n\n".join(turn.messages), self._config.max_body_bytes)
        outcome: Outcome = "complete"
        error, summary, metadata = None, "", b"{}"
        try:
            complete = await self._interruptibly(session, turn, transcript)
            summary, metadata = complete["summary"], orjson.dumps(complete["metadata"])
            turn.last = event_line(**complete)
            session.checked_at = time.monotonic()
        except TurnFailed as failed:
            outcome, error = failed.failure, failed.error
            turn.last = event_line(type="failed", failure=outcome, error=error)
            session.checked_at = -math.inf
        seconds = time.perf_counter() - began
        record = RecordedTurn(turn.run_id, outcome, error, at, seconds, transcript.messages(summary), metadata)
        try:
            # A retry of what failed through no fault of the agent runs it again.
            await session.journal.record(session, record, turn.requests if outcome != "infra" else ())
            turn.recorded = record
        except ApiError as refusal:
            outcome = "infra"
            turn.last = event_line(type="failed", failure=outcome, error=f"the turn could not be recorded: {refusal}")
        self._outcomes[outcome].inc()
        self._metrics.seconds.observe(seconds)
        turn.ended.set()

    async def _interruptibly(self, session: AgentSession, turn: Turn, transcript: Transcript) -> dict[str, Any]:
        """The turn's ``complete``. Raises TurnFailed and nothing else."""
        turn.interruptible = True
        try:
            if turn.aborted is not None:
                raise turn.aborted
            return await self._attempt(session, turn, transcript)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if turn.aborted is None or task is None:
                raise
            task.uncancel()
            raise turn.aborted from None
        except ApiError as error:
            raise TurnFailed("infra", error.message) from error
        except TurnFailed:
            raise
        except Exception as error:
            _log.exception("the turn %s failed", turn.run_id)
            raise TurnFailed("infra", "internal error") from error
        finally:
            turn.interruptible = False

    async def _attempt(self, session: AgentSession, turn: Turn, transcript: Transcript) -> dict[str, Any]:
        async with self._slots:
            if turn.inference is not None:
                theirs = RlSession(**asdict(turn.inference))
                if theirs != session.inference:
                    await session.journal.set_inference(session, theirs)
            replaced = await self._rl.prepare(session)
            session.ran = True
            until = time.monotonic() + _WORKER_AWAY_S
            while True:
                try:
                    complete = await self._call(session, turn, transcript)
                    break
                except NotConnected as error:
                    if not await self._worker.wait_ready(until - time.monotonic()):
                        raise TurnFailed("infra", f"there is no worker: {error}") from error
            if replaced is not None:
                complete["metadata"]["areal_inference"] = replaced
            return complete

    def _body(self, session: AgentSession, turn: Turn) -> bytes:
        """A ``WorkerRun``."""
        access, metadata = self._rl.access(session), {**session.metadata, **turn.metadata}
        if access is not None:
            metadata["areal_inference"] = asdict(access)
        return orjson.dumps(
            {
                "message": "\n\n".join(turn.messages),
                "session_key": session.key,
                "run_id": turn.run_id,
                "history": orjson.Fragment(b"[%b]" % session.journal.conversation(session)),
                "queue_mode": turn.mode,
                "metadata": metadata,
            }
        )

    async def _call(self, session: AgentSession, turn: Turn, transcript: Transcript) -> dict[str, Any]:
        """Raises NotConnected for a turn that has not begun."""
        idle_s = self._config.turn_timeout
        try:
            async with Watchdog(lambda: idle_s, excused=lambda: turn.writing) as watchdog:
                async with self._worker.call(self._body(session, turn)) as answer:
                    if answer.status == 200:
                        return await self._read(answer, turn, transcript, watchdog)
                    text = await answer.whole(_LINE_SLACK)
                    raise TurnFailed(
                        "infra", f"the worker refuses the turn: {answer.status} {text.decode(errors='replace')}"
                    )
        except NotConnected:
            raise
        except TimeoutError as error:
            raise TurnFailed("agent", f"the agent gave no sign of life for {idle_s:g} s") from error
        except CallFailed as error:
            raise TurnFailed("infra", f"the worker was lost: {error}") from error

    async def _read(self, answer: Connection, turn: Turn, transcript: Transcript, watchdog: Watchdog) -> dict[str, Any]:
        """Pass the events on, and return the last one. Raises TurnFailed, and CallFailed for a worker that is lost."""
        held: list[bytes] = []
        async for part in answer.parts():
            watchdog.kick()
            lines = part.split(b"\n")
            if held and len(lines) > 1:
                lines[0] = b"".join((*held, lines[0]))
                held.clear()
            if rest := lines.pop():
                held.append(rest)
                if sum(map(len, held)) > self._config.max_body_bytes + _LINE_SLACK:
                    raise TurnFailed("infra", "an event of the worker is too long")
            passed = []
            last: dict[str, Any] | TurnFailed | None = None
            for line in lines:
                if not line.startswith(_NOT_PARSED) and (last := _ending(line, transcript)) is not None:
                    break
                passed.append(line)
            if passed:
                passed.append(b"")
                turn.writing = True
                for caller in tuple(turn.callers):
                    if caller.live:
                        await caller.pass_on(b"\n".join(passed))
                turn.writing = False
            if isinstance(last, TurnFailed):
                raise last
            if last is not None:
                with contextlib.suppress(CallFailed):
                    await answer.whole(_LINE_SLACK)  # nothing comes any more: then the connection can be used again
                return last
        raise TurnFailed("infra", "the worker's answer ended before the turn")


def _ending(line: bytes, transcript: Transcript) -> dict[str, Any] | TurnFailed | None:
    """Take an event down. Returns ``complete``, or why the turn has failed, where it is the last one."""
    try:
        event: dict[str, Any] = orjson.loads(line)
        transcript.add(event, len(line))
        if event["type"] == "failed":
            return TurnFailed(event["failure"], event["error"])
        if event["type"] != "complete":
            return None
        if not isinstance(event["summary"], str) or not isinstance(event["metadata"], dict):
            raise TypeError(event)
        return event
    except TurnFailed as error:
        return error
    except (KeyError, TypeError, ValueError) as error:
        return TurnFailed("infra", f"an event of the worker cannot be read: {error!r}")
