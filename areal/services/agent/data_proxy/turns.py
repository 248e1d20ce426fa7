"""The queue of turns of each session, which the pair's worker runs one after the other.

A message that arrives while a turn of its session runs waits. With queue mode ``followup`` it gets its own turn; with
``collect`` it shares a turn with the other waiting ``collect`` messages. The callers of a turn receive its events as
they are emitted. If a caller disconnects, its message is removed from a waiting turn, and a running turn is cancelled
once its last caller has disconnected. A message with an Idempotency-Key stays, and its turn continues, for the retry. A
finished turn is written to the journal before its callers receive its last event. A failed turn is recorded, but is not
part of the conversation.

The worker receives the conversation with each turn, so that any worker can run any turn. A turn that the worker has not
started waits up to ``_WORKER_AWAY_S`` for a ready worker; a turn that has started fails when its worker is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import orjson

from areal.dataclasses import dataclass, field
from areal.http.client import CallFailed, Connection, NotConnected
from areal.services.agent.data_proxy.inference import RlSessions
from areal.services.agent.data_proxy.journal import Outcome, RlSession, SessionEntry, TurnEntry, TurnRequestKey
from areal.services.agent.data_proxy.worker import (
    ALL_EVENTS,
    PairWorker,
    Transcript,
    TurnFailed,
    event_line,
    last_event,
)
from areal.services.http.errors import ApiError
from areal.services.http.messages import Request, StreamingResponse
from areal.services.http.service import Metrics
from areal.services.http.tasks import Watchdog
from areal.wire.agents import EVENTS, CompleteEvent, ModelAccess, QueueMode, TurnRequest
from areal.wire.processes import AgentDataProxyConfig

_log = logging.getLogger(__name__)
_WORKER_AWAY_S = 60.0
_NOT_PARSED = b'{"type":"delta"'
_OWN_STREAM = b'{"type":"response"'  # cannot occur within a JSON string, where its quotation marks are escaped
_OWN_EVENTS = (_OWN_STREAM, b'{"type":"data"')
_LINE_SLACK = 64 * 1024
_MOST_BEHIND = 4 * 1024 * 1024  # bytes that a caller may lag behind the others of its turn
_HELD_BYTES = 64 * 1024
_MOST_KEPT_BYTES = 4 * 1024 * 1024  # of a turn's events, kept for retries that join it or get its own stream


@dataclass(eq=False)
class TurnMessage:
    """A message of a turn, and the data of its request. ``request``: None without an Idempotency-Key."""

    text: str
    metadata: Mapping[str, object]
    inference: ModelAccess | None
    request: TurnRequestKey | None


@dataclass(eq=False)
class TurnCaller:
    """The HTTP request of one message. Its response receives the turn's events as they are emitted.

    ``live`` false: the request repeats that of a running turn whose earlier events were too many to keep; it gets all
    events at the end. ``stream`` false: the events are held until the turn's end, unless they exceed ``_HELD_BYTES`` or
    start the agent's own stream. ``behind``: bytes written since the caller fell behind. ``failed``: the event that
    ends its response, for one too far behind or withdrawn. ``ended``: the caller has its last event.
    """

    http: Request
    message: TurnMessage
    stream: bool = True
    live: bool = True
    accepted: bytes = b""  # the event ``accepted``, followed by the held events
    behind: int = 0
    failed: bytes = b""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    out: StreamingResponse = field(default_factory=lambda: StreamingResponse(headers={"Content-Type": EVENTS}))

    def begin(self, events: bytes = b"") -> None:
        """Begin the response with ``accepted``, the held events and ``events``, unless it has begun."""
        if not self.out.prepared:
            with contextlib.suppress(ConnectionResetError):
                self.out.begin(self.http, self.accepted + events)

    @property
    def lags(self) -> bool:
        return self.out.prepared and not self.out.writable

    def pass_on(self, events: bytes) -> None:
        if not self.out.prepared:
            fits = len(self.accepted) + len(events) <= _HELD_BYTES
            if fits and not self.stream and _OWN_STREAM not in events:
                self.accepted += events
            else:
                self.begin(events)
        elif not self.failed:
            with contextlib.suppress(ConnectionResetError):
                self.out.write_nowait(events)
            self.behind = self.behind + len(events) if self.lags else 0
            if self.behind > _MOST_BEHIND:
                error = "this caller reads too slowly for the others of its turn: GET /sessions/{key} has its answer"
                self.failed = TurnFailed("infra", error).event()

    async def wait_writable(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            await self.out.wait_writable()


@dataclass(eq=False)
class SessionTurn:
    """A waiting or running turn. ``last``: its last event, set before ``ended``. ``recorded``: its journal entry, None
    if it could not be written. ``aborted``: the reason to end it early. ``writing``: it waits for slow callers.
    ``events``: all events so far if a request has an Idempotency-Key; None if they are too many. ``has_own``: some
    events belong to the agent's own stream."""

    run_id: str
    mode: QueueMode
    callers: list[TurnCaller] = field(default_factory=list)
    messages: list[TurnMessage] = field(default_factory=list)
    aborted: TurnFailed | None = None
    interruptible: bool = False
    writing: bool = False
    has_own: bool = False
    events: list[bytes] | None = field(default_factory=list)
    said_bytes: int = 0
    recorded: TurnEntry | None = None
    last: bytes = b""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def text(self) -> str:
        return "\n\n".join(message.text for message in self.messages)

    @property
    def metadata(self) -> dict[str, object]:
        return {name: value for message in self.messages for name, value in message.metadata.items()}

    @property
    def inference(self) -> ModelAccess | None:
        """The RL session of the newest message that has one, or None."""
        return next((each.inference for each in reversed(self.messages) if each.inference is not None), None)

    def keep(self, events: Iterable[bytes]) -> None:
        """Keep events for retries, up to ``_MOST_KEPT_BYTES``."""
        for event in events:
            self.has_own = self.has_own or event.startswith(_OWN_EVENTS)
            if self.events is not None:
                self.events.append(event)
                self.said_bytes += len(event)
        if self.said_bytes > _MOST_KEPT_BYTES:
            self.events = None

    @property
    def stream(self) -> bytes | None:
        """The events to record for a turn with an own stream of its agent; empty if they are too many."""
        if not self.has_own:
            return None
        return b"".join(event + b"\n" for event in (ALL_EVENTS, *self.events)) if self.events is not None else b""

    @property
    def requests(self) -> list[TurnRequestKey]:
        return [message.request for message in self.messages if message.request is not None]


@dataclass(eq=False)
class SessionQueue:
    """The running and waiting turns of one session. ``task`` runs them all."""

    session: SessionEntry
    running: SessionTurn
    task: asyncio.Task[None]
    waiting: deque[SessionTurn] = field(default_factory=deque)

    def turns(self) -> Iterator[SessionTurn]:
        yield self.running
        yield from self.waiting


class TurnSlots:
    """A FIFO semaphore that limits how many turns run at once. ``set_limit`` may be called at any time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def set_limit(self, limit: int) -> None:
        self.limit = limit
        self._grant()

    async def __aenter__(self) -> None:
        if self.taken < self.limit:
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
        while self._waiting and self.taken < self.limit:
            granted = self._waiting.popleft()
            if not granted.done():
                self.taken += 1
                granted.set_result(None)


class TurnRunner:
    """Queues the turns of all sessions of a data proxy and runs them on the worker."""

    def __init__(self, config: AgentDataProxyConfig, worker: PairWorker, rl: RlSessions, metrics: Metrics) -> None:
        self._config = config
        self.turn_timeout = config.turn_timeout
        self.slots = slots = TurnSlots(config.max_concurrent)
        self._worker = worker
        self._rl = rl
        self._queues: dict[SessionEntry, SessionQueue] = {}
        turns = metrics.counter("areal_agent_turns_total", "Turns, by how they ended.", ("outcome",))
        self._outcomes = {each: turns.labels(each) for each in ("complete", "agent", "infra", "cancelled")}
        self._seconds = metrics.histogram("areal_agent_turn_seconds", "From a turn's start to its end.", labels=())
        running = metrics.gauge("areal_agent_turns_running", "Turns that the worker runs.")
        running.set_function(lambda: slots.taken)
        waiting = metrics.gauge("areal_agent_turns_waiting", "Turns that wait for others.")
        waiting.set_function(lambda: sum(1 + len(queue.waiting) for queue in self._queues.values()) - slots.taken)

    @property
    def busy_sessions(self) -> int:
        """The number of sessions with a running or waiting turn, connected callers or not."""
        return len(self._queues)

    def queue(self, session: SessionEntry) -> SessionQueue | None:
        return self._queues.get(session)

    def find(self, session: SessionEntry, key: bytes) -> tuple[SessionTurn, TurnMessage] | None:
        """Return the message of a request with this Idempotency-Key, and its running or waiting turn."""
        queue = self._queues.get(session)
        for turn in queue.turns() if queue is not None else ():
            for message in turn.messages:
                if message.request is not None and message.request.key == key:
                    return turn, message
        return None

    def add(self, session: SessionEntry, asked: TurnRequest, caller: TurnCaller) -> SessionTurn:
        """Queue the message, and return the turn that will answer the caller."""
        queue = self._queues.get(session)
        if (
            queue is not None
            and asked.queue_mode == "collect"
            and queue.waiting
            and queue.waiting[-1].mode == "collect"
        ):
            turn = queue.waiting[-1]
        else:
            turn = SessionTurn(asked.run_id, asked.queue_mode)
            if queue is None:
                task = asyncio.create_task(self._run_all(session, turn), name=f"turns-{session.number}")
                self._queues[session] = SessionQueue(session, turn, task)
            else:
                queue.waiting.append(turn)
        turn.callers.append(caller)
        turn.messages.append(caller.message)
        return turn

    def leave(self, session: SessionEntry, turn: SessionTurn, caller: TurnCaller) -> None:
        """Remove a caller, and its message if the turn waits. One without callers and Idempotency-Keys is cancelled."""
        queue = self._queues.get(session)
        if caller not in turn.callers:
            return
        turn.callers.remove(caller)
        if queue is None or caller.message.request is not None:
            return
        if turn in queue.waiting:
            self._remove(queue, turn, caller.message)
        elif turn is queue.running and not turn.callers and not turn.requests:
            self._interrupt(queue, TurnFailed("cancelled", "its caller left"))

    async def withdraw(self, session: SessionEntry, key: bytes, why: TurnFailed) -> bool:
        """Withdraw the message of the request with this Idempotency-Key; its callers get ``why``. Its turn ends unless
        it also runs for other messages. Return False if no such message waits or runs."""
        found = self.find(session, key)
        if found is None:
            return False
        turn, message = found
        queue = self._queues[session]
        callers = [caller for caller in turn.callers if caller.message is message]
        if turn is queue.running and len(callers) == len(turn.callers) and turn.requests == [message.request]:
            return await self.abort(session, why)
        message.request = None
        for caller in callers:
            turn.callers.remove(caller)
            caller.failed = why.event()
            caller.ended.set()
        if turn in queue.waiting:
            self._remove(queue, turn, message)
        return True

    def _remove(self, queue: SessionQueue, turn: SessionTurn, message: TurnMessage) -> None:
        """Remove the message from its waiting turn."""
        turn.messages.remove(message)
        if not turn.messages:
            queue.waiting.remove(turn)

    async def abort(self, session: SessionEntry, why: TurnFailed, *, waiting: bool = False) -> bool:
        """End the running turn and wait for its record; with ``waiting``, the waiting ones too. False if none runs."""
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
        """End all turns, because the process ends."""
        why = TurnFailed("infra", "the data proxy was stopped")
        await asyncio.gather(*(self.abort(session, why, waiting=True) for session in list(self._queues)))

    def _interrupt(self, queue: SessionQueue, why: TurnFailed) -> None:
        turn = queue.running
        if turn.aborted is None:
            turn.aborted = why
            if turn.interruptible:
                queue.task.cancel()

    async def _run_all(self, session: SessionEntry, turn: SessionTurn) -> None:
        with session.journal.in_use():
            while True:
                await self._run(session, turn)
                queue = self._queues[session]
                if not queue.waiting:
                    break
                turn = queue.running = queue.waiting.popleft()
            del self._queues[session]

    async def _run(self, session: SessionEntry, turn: SessionTurn) -> None:
        """Run one turn, write it to the journal, and then release its callers."""
        at, began = session.journal.clock(), time.perf_counter()
        transcript = Transcript(turn.text, self._config.max_body_bytes)
        outcome: Outcome = "complete"
        error, summary, metadata = None, "", b"{}"
        try:
            complete = await self._interruptibly(session, turn, transcript)
            summary, metadata = complete["summary"], orjson.dumps(complete["metadata"])
            session.checked_at = time.monotonic()
        except TurnFailed as failed:
            outcome, error = failed.failure, failed.error
            turn.last = failed.event()
            session.checked_at = -math.inf
        seconds = time.perf_counter() - began
        messages = transcript.messages(summary)
        # Recorded without its request keys, a turn that failed through no fault of the agent runs again on a retry.
        requests = turn.requests if outcome != "infra" else []
        stream = turn.stream if requests else None
        record = TurnEntry(turn.run_id, outcome, error, at, seconds, messages, metadata, stream)
        try:
            await session.journal.record(session, record, requests)
            turn.recorded = record
        except ApiError as refusal:
            outcome = "infra"
            turn.last = event_line(type="failed", failure=outcome, error=f"the turn could not be recorded: {refusal}")
        self._outcomes[outcome].inc()
        self._seconds.observe(seconds)
        turn.ended.set()
        for caller in turn.callers:
            caller.ended.set()

    async def _interruptibly(self, session: SessionEntry, turn: SessionTurn, transcript: Transcript) -> CompleteEvent:
        """Run the turn, and return its event ``complete``. Raises TurnFailed for any other end, including an abort."""
        turn.interruptible = True
        try:
            if turn.aborted is not None:
                raise turn.aborted
            complete = await self._attempt(session, turn, transcript)
            turn.last = event_line(**complete)  # raises for values that JSON cannot represent
            return complete
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

    async def _attempt(self, session: SessionEntry, turn: SessionTurn, transcript: Transcript) -> CompleteEvent:
        async with self.slots:
            if (named := turn.inference) is not None:
                theirs = RlSession(**vars(named))
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

    def _body(self, session: SessionEntry, turn: SessionTurn) -> bytes:
        """Return the turn as a JSON ``WorkerRun``."""
        access, metadata = self._rl.access(session), {**session.metadata, **turn.metadata}
        if access is not None:
            metadata["areal_inference"] = vars(access)
        return orjson.dumps(
            {
                "message": turn.text,
                "session_key": session.key,
                "run_id": turn.run_id,
                "history": orjson.Fragment(b"[%b]" % session.journal.conversation(session)),
                "queue_mode": turn.mode,
                "metadata": metadata,
            }
        )

    async def _call(self, session: SessionEntry, turn: SessionTurn, transcript: Transcript) -> CompleteEvent:
        """Make one attempt to run the turn on the worker. Raises NotConnected if the turn has not started."""
        idle_s = self.turn_timeout
        try:
            async with Watchdog(lambda: idle_s, suspended=lambda: turn.writing) as watchdog:
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
            raise self._silent(turn, idle_s) from error
        except CallFailed as error:
            raise TurnFailed("infra", f"the worker was lost: {error}") from error

    def _silent(self, turn: SessionTurn, idle_s: float) -> TurnFailed:
        """Return the failure of a turn without events for ``idle_s``. It is attributed to the agent, unless the worker
        is not ready and its fault does not name this turn."""
        error, fault = f"the agent gave no sign of life for {idle_s:g} s", self._worker.fault
        if fault is None:
            return TurnFailed("agent", error)
        return TurnFailed("agent" if turn.run_id in fault else "infra", f"{error}: {fault}")

    async def _read(
        self, answer: Connection, turn: SessionTurn, transcript: Transcript, watchdog: Watchdog
    ) -> CompleteEvent:
        """Forward events to the callers, and return ``complete``. Raises TurnFailed; CallFailed for a lost worker."""
        held: list[bytes] = []
        keyed = bool(turn.requests)
        longest = self._config.max_body_bytes + _LINE_SLACK
        too_long = TurnFailed("agent", "an event of the agent is larger than a turn may be")
        while part := await answer.part():
            watchdog.kick()
            lines = part.split(b"\n")
            if held and len(lines) > 1:
                lines[0] = b"".join((*held, lines[0]))
                held.clear()
            if rest := lines.pop():
                held.append(rest)
            passed = []
            last: CompleteEvent | TurnFailed | None = None
            for line in lines:
                if len(line) > longest:
                    last = too_long
                elif not line.startswith(_NOT_PARSED):
                    last = last_event(line, transcript)
                if last is not None:
                    break
                passed.append(line)
            if last is None and sum(map(len, held)) > longest:
                last = too_long
            if keyed:
                turn.keep(passed)
            if passed:
                passed.append(b"")
                await _relay_events(turn, b"\n".join(passed))
            if isinstance(last, TurnFailed):
                raise last
            if last is not None:
                with contextlib.suppress(CallFailed):
                    await answer.whole(_LINE_SLACK)  # so that the connection can be reused
                return last
        raise TurnFailed("infra", "the worker's answer ended before the turn")


async def _relay_events(turn: SessionTurn, events: bytes) -> None:
    """Write events to the live callers. Waits while all of them lag: one slow caller does not block the others."""
    callers = [caller for caller in turn.callers if caller.live and not caller.failed]
    for caller in callers:
        caller.pass_on(events)
    if not callers or not all(caller.lags for caller in callers):
        return
    turn.writing = True
    waits = [asyncio.create_task(caller.wait_writable(), name="lagging-caller") for caller in callers]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        turn.writing = False
