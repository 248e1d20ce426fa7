"""One model call through the relay: pick a worker, pass the bytes on, try another while nothing has begun.

What may be tried again:

* a refused connection, or 503 before the answer: the worker never began. Tried elsewhere for as long as the call
  may wait. So is 421: the worker no longer holds the session's journal, as a newer table will say.
* a connection lost, or 502, before the answer's first byte: the worker began and died. Tried elsewhere once; what
  it produced reached nobody. A call that kills workers stops there.
* never a timeout: the worker may still be at it, and one slow call must not become four.

After the first byte a failure is an error event in the stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from areal.services.inference.gateway.admission import Admission
from areal.services.inference.gateway.envelope import Envelope, read_envelope
from areal.services.inference.gateway.follow import Follower
from areal.services.inference.gateway.live_table import LiveTable
from areal.services.inference.gateway.metrics import RelayMetrics
from areal.services.inference.router.table import ModelEntry, WorkerEntry
from areal.services.web import headers as names
from areal.services.web.body import read_body
from areal.services.web.client import Answering, Connection, HttpClient, Lost, NotConnected
from areal.services.web.errors import ApiError
from areal.services.web.fields import Headers
from areal.services.web.server import AnyResponse, Request, Response, StreamResponse
from areal.services.web.streaming import EventCutter
from areal.services.web.watchdog import Watchdog

_RETRY_COUNT = b"x-stainless-retry-count"
_REQUEST_FIELDS = (b"authorization", b"x-api-key", b"idempotency-key", b"anthropic-version")
_RESPONSE_HEADERS = ("Content-Type", "Retry-After", "WWW-Authenticate", names.IGNORED)
MOVED = "moved"
_RETRIED = {421: MOVED, 502: "engine", 503: "unavailable"}
_BEGUN_RETRIES = 1
_GRACE_S = 1.0  # the data proxy's own progress deadline is the first to speak


@dataclass(frozen=True)
class Failed:
    """An attempt that gave the caller nothing. ``begun``: the worker may have worked on it."""

    worker: WorkerEntry
    begun: bool
    reason: str
    answer: Response | None = None  # what the worker said, if it said something


@dataclass
class Call:
    """One request on its way. Times in seconds of ``perf_counter``."""

    request: Request
    path: str
    body: bytes
    envelope: Envelope
    model: ModelEntry
    started: float
    elsewhere: float = 0.0  # spent waiting: for a worker, or for its answer
    attempts: int = 0
    answering: bool = False  # the caller has the answer's first byte
    again: bool = False  # some worker began it: what it recorded must not be recorded twice

    def overhead_us(self) -> int:
        return int((time.perf_counter() - self.started - self.elsewhere) * 1e6)


class Relay:
    def __init__(
        self,
        table: LiveTable,
        follower: Follower,
        admission: Admission,
        http: HttpClient,
        metrics: RelayMetrics,
    ) -> None:
        self._table = table
        self._follower = follower
        self._admission = admission
        self._http = http
        self._metrics = metrics

    async def forward(self, request: Request, path: str, journal: str | None = None) -> AnyResponse:
        """Answer ``request`` from a worker's ``path``: from the one that holds ``journal`` where it is a session's."""
        body = await read_body(request, self._table.limits.max_body_bytes)
        started = time.perf_counter()
        # Calls of the admin are recorded too: the turns of one conversation belong into one journal.
        with_prefix = journal is None and (self._table.records or self._table.snapshot.strategy == "prefix")
        envelope = read_envelope(body, journal, with_prefix=with_prefix)
        model = await self.resolve(envelope.model if journal is None else self._table.model_of_journal(journal))
        return await self._until_answered(Call(request, path, body, envelope, model, started))

    async def resolve(self, name: str | None) -> ModelEntry:
        """The model asked for, or the only one. Raises 400, 404, and 503 while there is no table."""
        model = self._table.resolve(name)
        if model is None:  # it may have been registered a moment ago
            await self._follower.refresh()
            model = self._table.resolve(name)
        if model is None:
            self._table.require_whole()
            message = f"the model {name!r} does not exist" if name is not None else "no model is registered"
            raise ApiError(404, message, code="model_not_found", param="model")
        return model

    async def _until_answered(self, call: Call) -> AnyResponse:
        refused: set[str] = set()
        begun = 0
        loop = asyncio.get_running_loop()
        without_worker_since = loop.time()
        while True:
            waiting_since = time.perf_counter()
            worker = await self._admission.worker(call.model.name, call.envelope.key, refused, without_worker_since)
            call.elsewhere += time.perf_counter() - waiting_since
            call.attempts += 1
            outcome = await self._attempt(call, worker)
            if not isinstance(outcome, Failed):
                self._table.trust(worker.addr)
                return outcome
            if outcome.begun:
                begun += 1
                call.again = True
                without_worker_since = loop.time()
            if begun > _BEGUN_RETRIES:
                return _give_up(outcome)
            if outcome.reason != MOVED:
                self._table.suspect(worker.addr)
            self._metrics.retries.labels(outcome.reason).inc()
            refused = {worker.addr} if worker.addr in refused else refused | {worker.addr}

    async def _attempt(self, call: Call, worker: WorkerEntry) -> AnyResponse | Failed:
        self._admission.begin(worker, call.envelope.key)
        waiting_since = time.perf_counter()
        try:
            async with self._watchdog(call, worker) as watchdog:
                async with self._post(call, worker) as upstream:
                    call.elsewhere += time.perf_counter() - waiting_since
                    watchdog.kick()
                    return await self._pass_on(call, worker, upstream, watchdog)
        except NotConnected:
            return Failed(worker, begun=False, reason="connect")
        except TimeoutError as error:
            raise ApiError(504, f"no progress in {self._idle_s():g} s", code="progress_timeout") from error
        except (Lost, OSError) as error:
            if not call.answering:
                return Failed(worker, begun=True, reason="lost")
            raise ApiError(502, "the worker was lost in the middle of the answer", code="worker_lost") from error
        finally:
            self._admission.end(worker, call.envelope.key)

    def _idle_s(self) -> float:
        return self._table.limits.request_timeout_seconds

    def _watchdog(self, call: Call, worker: WorkerEntry) -> Watchdog:
        """Silence is excused while the router sees the worker alive: its data proxy keeps the deadline then."""
        return Watchdog(
            lambda: self._idle_s() + _GRACE_S,
            excused=lambda: self._follower.connected and self._table.is_serving(call.model.name, worker.addr),
        )

    def _post(self, call: Call, worker: WorkerEntry) -> Answering:
        """The caller's fields go on as they came: the server's parser lets no line break pass."""
        given = call.request.headers.raw
        lines = [b"%b: %b\r\n" % (name, given[name]) for name in _REQUEST_FIELDS if name in given]
        retries = given.get(_RETRY_COUNT, b"0")
        if call.again and retries == b"0":
            retries = b"1"
        if retries != b"0":
            lines.append(b"%b: %b\r\n" % (_RETRY_COUNT, retries))
        ours = f"Content-Type: application/json\r\n{names.REQUEST_ID}: {call.request.id}\r\n"
        lines.append(f"{ours}{names.PROGRESS_TIMEOUT}: {self._idle_s():g}\r\n".encode())
        return self._http.send(worker.addr, "POST ", call.path, b"".join(lines), call.body)

    async def _pass_on(
        self, call: Call, worker: WorkerEntry, upstream: Connection, watchdog: Watchdog
    ) -> AnyResponse | Failed:
        said = upstream.headers
        headers = {name: value for name in _RESPONSE_HEADERS if (value := said.get(name)) is not None}
        headers[names.ATTEMPTS] = str(call.attempts)
        if upstream.status == 200 and headers.get("Content-Type", "").startswith("text/event-stream"):
            return await self._stream(call, upstream, headers, watchdog)
        waiting_since = time.perf_counter()
        body = await upstream.whole()
        call.elsewhere += time.perf_counter() - waiting_since
        headers[names.OVERHEAD] = self._overhead(call, said)
        answer = Response(upstream.status, body, headers=headers)
        final = upstream.status == 503 and said.get(names.FINAL) is not None
        if not final and (reason := _RETRIED.get(upstream.status)) is not None:
            return Failed(worker, begun=upstream.status == 502, reason=reason, answer=answer)
        return answer

    def _overhead(self, call: Call, said: Headers) -> str:
        """Our own microseconds and the data proxy's, which left the engine's out."""
        ours = call.overhead_us()
        self._metrics.overhead_of(call.path).observe(ours / 1e6)
        theirs = said.get(names.OVERHEAD, "")
        return str(ours + (int(theirs) if theirs.isdecimal() else 0))

    async def _stream(
        self, call: Call, upstream: Connection, headers: dict[str, str], watchdog: Watchdog
    ) -> AnyResponse:
        """Events go to the caller from inside the callback that brings them. Each holds the other back."""
        headers["Cache-Control"] = "no-cache"
        headers[names.OVERHEAD] = self._overhead(call, upstream.headers)
        passing = _Passing(call, upstream, StreamResponse(headers=headers), watchdog)
        try:
            await upstream.pour(passing.part, passing.chunk)
            passing.end()
        except ConnectionResetError:  # the caller is gone; leaving closes the worker's connection, which ends its work
            return passing.out
        finally:
            if passing.out.prepared:
                passing.out.hold_back(None)
        return passing.out


class _Passing:
    """One stream on its way through: whole events only, so that a worker that breaks off leaves no half one behind."""

    def __init__(self, call: Call, upstream: Connection, out: StreamResponse, watchdog: Watchdog) -> None:
        self.out = out
        self._call = call
        self._upstream = upstream
        self._watchdog = watchdog
        self._cutter = EventCutter()
        self._feed_framed: Callable[[bytes], None] | None = None

    def part(self, part: bytes) -> None:
        self._watchdog.kick()
        if events := self._cutter.push(part):
            self._feed(events)

    def chunk(self, chunk: bytes) -> bool:
        """A chunk of whole events goes on with its framing, not a byte of it copied."""
        feed = self._feed_framed
        if feed is None or self._cutter.held or not chunk.endswith(b"\n\n\r\n"):
            return False
        self._watchdog.kick()
        feed(chunk)
        return True

    def end(self) -> None:
        """The worker's answer is whole."""
        if rest := self._cutter.rest():
            self._feed(rest)

    def _feed(self, data: bytes) -> None:
        call, out = self._call, self.out
        if not call.answering:
            call.answering = True
            out.begin(call.request, data)
            out.hold_back(self._upstream)
            self._feed_framed = out.framed_feed()
        else:
            out.feed(data)


def _give_up(failed: Failed) -> AnyResponse:
    if failed.answer is not None:
        return failed.answer
    raise ApiError(502, "the workers that took this request were lost before they answered", code="worker_lost")
