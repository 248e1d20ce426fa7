"""Relays one model call: picks a worker, passes the bytes on, and retries until the caller has received a byte.

Retries:

* After a refused connection or 503, the worker has not started the call. It is retried on other workers for as long as
  the call may wait. So is 421: the worker no longer holds the session's journal, and a newer table names its holder.
* After a lost connection or 502 before the answer's first byte, the worker has started the call and died. It is retried
  on another worker once only, so that a call that kills workers kills at most two.
* After a timeout, never: the worker may still be busy, and one slow call must not become four.

A failure after the first byte is sent as an error event in the stream.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection

from prometheus_client import Gauge, Histogram

from areal.dataclasses import dataclass, field
from areal.http import headers as names
from areal.http.client import Connection, HttpClient, NotConnected, PendingCall, ResponseLost
from areal.http.headers import Headers, unique_id
from areal.services.http.errors import ApiError, bad_field
from areal.services.http.messages import AnyResponse, Request, Response, StreamingResponse, decode_object
from areal.services.http.service import EventCutter, Metrics
from areal.services.http.tasks import Watchdog
from areal.services.inference.gateway.routing import Follower, LiveTable
from areal.services.inference.router.picking import CallKey, Picker
from areal.wire.routing import ModelEntry, WorkerEntry

_BYTES_PER_TOKEN = 4
_DEFAULT_ANSWER_TOKENS = 256
_MOST_ANSWER_TOKENS = 131_072  # a call with a huge limit should not keep other calls off its worker
_PREFIX_CHARS = 4096
_PREFIX_TOKENS = 512


def read_envelope(body: bytes, tag: str | None = None, *, with_prefix: bool) -> tuple[str | None, CallKey]:
    """Return the requested model and the key for picking a worker. ``tag``: of the journal of the caller's
    session. Raises 400 for a body that is not a JSON object or whose model is not a string."""
    data = decode_object(body)
    model = data.get("model")
    if model is not None and not isinstance(model, str):
        raise bad_field("model", "must be a string")
    prefix = prompt_prefix(data) if with_prefix else None
    tokens = len(body) / _BYTES_PER_TOKEN + _answer_tokens(data)
    return model, CallKey(tokens, prefix, tag)


def _answer_tokens(data: dict[str, object]) -> float:
    names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
    asked = next((data[name] for name in names if data.get(name) is not None), None)
    if type(asked) is not int or asked <= 0:
        return _DEFAULT_ANSWER_TOKENS
    return float(min(asked, _MOST_ANSWER_TOKENS))


def prompt_prefix(data: dict[str, object]) -> bytes | None:
    """Return a digest of the prompt's beginning, or None without a prompt.

    For a chat it covers all messages up to the first user message, so that all turns of a conversation and all samples
    of a group have the same digest. For a completion it covers the first characters or token ids.
    """
    messages, prompt = _messages(data), data.get("prompt")
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(messages, list) and messages:
        for message in messages:
            if not isinstance(message, dict):
                return None
            digest.update(f"{message.get('role')}\0{message.get('content')}"[:_PREFIX_CHARS].encode())
            if message.get("role") == "user":
                break
    elif isinstance(prompt, str):
        digest.update(prompt[:_PREFIX_CHARS].encode())
    elif isinstance(prompt, list) and prompt:
        first = prompt[0] if isinstance(prompt[0], list | str) else prompt
        digest.update(repr(first[:_PREFIX_TOKENS]).encode())
    else:
        return None
    return digest.digest()


def _messages(data: dict[str, object]) -> object:
    """Return the messages of a chat, message or response request, preceded by its system prompt or instructions."""
    before = data.get("system", data.get("instructions"))
    messages = data.get("messages", data.get("input"))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if before is None or not isinstance(messages, list):
        return messages
    return [{"role": "system", "content": before}, *messages]


class RelayMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self._overhead = metrics.overhead
        self._overheads: dict[str, Histogram] = {}
        self.retries = metrics.counter(
            "areal_gateway_retries_total", "Attempts that failed and went to another worker.", ("reason",)
        )

    def overhead_of(self, path: str) -> Histogram:
        found = self._overheads.get(path)
        if found is None:
            found = self._overheads[path] = self._overhead.labels(path)
        return found


# Waiting for a worker. Calls queue, and are refused only beyond ``max_queued_requests``.  A call waits while no worker
# of its model can take it: the model is not published yet, all workers are dead or draining, or all have just refused
# the call. A session's call waits for the worker that holds its journal. The wait ends with 503: after
# ``request_timeout_seconds`` without a worker; at once if every worker reports that waiting will not help, such as an
# external API that refuses the key; after a few seconds if the session's worker drains but keeps the session.

_MOVING_S = 5.0  # for a session to move from a draining worker, unless a running call holds it longer
NO_SESSION = "session_not_found"
_JOURNAL_S = 1.0  # until a refused call asks the journal's holder again


class Admission:
    """Picks workers for calls, and counts the tokens of this relay's calls at each worker."""

    def __init__(self, table: LiveTable, queued: Gauge) -> None:
        self._table = table
        self._picker = Picker()
        self._tokens: defaultdict[str, float] = defaultdict(float)
        self._waiting = 0
        self._gauge = queued

    def begin(self, worker: WorkerEntry, key: CallKey) -> None:
        self._tokens[worker.addr] += key.tokens + 1.0
        self._picker.set_load(worker.addr, self._tokens[worker.addr])

    def end(self, worker: WorkerEntry, key: CallKey) -> None:
        self._tokens[worker.addr] -= key.tokens + 1.0
        if self._tokens[worker.addr] < 1.0:
            del self._tokens[worker.addr]
        self._picker.set_load(worker.addr, self._load(worker))

    def _load(self, worker: WorkerEntry) -> float:
        return self._tokens.get(worker.addr, 0.0)

    async def worker(self, model: str, key: CallKey, refused: Collection[str], since: float) -> WorkerEntry:
        """Return the worker for the next attempt, if possible not in ``refused``. ``since``: the loop time from which
        the call has been without a worker.

        Raises ApiError: 429 (queue full), 503 (no worker in time), 404 (the model or the journal is gone).
        """
        ready = self._table.routable(model, even_suspects=True, tag=key.tag)
        chosen = self._pick(model, ready, key)
        if chosen is not None and chosen.addr in refused:
            chosen = self._pick("", [worker for worker in ready if worker.addr not in refused], key)
        return chosen if chosen is not None else await self._wait(model, key, since)

    def _pick(self, model: str, candidates: list[WorkerEntry], key: CallKey) -> WorkerEntry | None:
        if not candidates:
            return None
        if key.tag is not None:
            return candidates[0]
        return self._picker.pick(self._table.snapshot.strategy, candidates, key, self._load, model)

    async def _wait(self, model: str, key: CallKey, since: float) -> WorkerEntry:
        if self._waiting >= self._table.limits.max_queued_requests:
            message = f"{self._waiting} requests already wait for a worker"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
        self._waiting += 1
        self._gauge.inc()
        try:
            while True:
                await self._table.changed(self._patience(model, key, since))
                # Refused workers are tried again once their suspicion has passed.
                ready = self._table.routable(model, even_suspects=False, tag=key.tag)
                chosen = self._pick(model, ready, key)
                if chosen is not None:
                    return chosen
        finally:
            self._waiting -= 1
            self._gauge.dec()

    def _patience(self, model: str, key: CallKey, since: float) -> float:
        """Return the seconds to wait for a new table before checking again. Raises ApiError if the wait is over."""
        if model not in self._table.snapshot.models:
            raise ApiError(404, f"the model {model!r} was removed", code="model_not_found", param="model")
        self._table.require_replicas(model)
        waited = asyncio.get_running_loop().time() - since
        left = self._table.timeout_s - waited
        look_again_s = math.inf
        if key.tag is not None:
            look_again_s = _JOURNAL_S
            if self._table.model_of_journal(key.tag) is None and self._table.all_heard:
                raise ApiError(404, "no data proxy has this session any more", code=NO_SESSION)
            moving = self._table.moving(model, key.tag)
            if moving is not None:
                left = min(left, (_MOVING_S if moving else 0.0) - waited)
            if moving is not None and left <= 0:
                message = "the session is on a worker that drains: try again"
                raise ApiError(503, message, code="session_moving", headers={"Retry-After": "2"})
        if fault := self._table.fault(model):
            message = f"the model {model!r} cannot be served: {fault}"
            raise ApiError(503, message, code="engine_unavailable", headers={"Retry-After": "5"})
        if left <= 0:
            message = f"no worker of model {model!r} took the request in {waited:.1f} s"
            raise ApiError(503, message, code="no_worker_available", headers={"Retry-After": "5"})
        return min(left, look_again_s, self._table.suspicion_left_s(model))


_REQUEST_FIELDS = (
    *(b"authorization", b"x-api-key", b"anthropic-version", b"anthropic-beta"),
    *(b"idempotency-key", b"x-stainless-retry-count"),
)
_RESPONSE_HEADERS = ("Content-Type", "Retry-After", "WWW-Authenticate", names.IGNORED)
MOVED = "moved"
_RETRIED = {421: MOVED, 502: "engine", 503: "unavailable"}
_BEGUN_RETRIES = 1


@dataclass(frozen=True)
class FailedAttempt:
    """An attempt that sent nothing to the caller. ``begun``: the worker may have started the call."""

    begun: bool
    reason: str
    answer: Response | None = None  # the worker's answer, if there is one


@dataclass
class Call:
    """One request. Times are seconds of ``perf_counter``."""

    request: Request
    path: str
    body: bytes
    key: CallKey
    model: ModelEntry
    started: float
    elsewhere: float = 0.0  # seconds spent waiting for a worker or for its answer
    attempts: int = 0
    answering: bool = False  # the caller has received the answer's first byte
    again: bool = False  # an earlier worker started the call, and may have recorded it
    id: str = field(default_factory=lambda: unique_id(""))

    def overhead_us(self) -> int:
        return int((time.perf_counter() - self.started - self.elsewhere) * 1e6)


@dataclass(eq=False)
class Relay:
    _table: LiveTable
    _follower: Follower
    _admission: Admission
    _http: HttpClient
    _metrics: RelayMetrics

    async def forward(self, request: Request, path: str, tag: str | None = None) -> AnyResponse:
        """Relay ``request`` to ``path`` of a worker: of a session's call, the one with the journal ``tag``."""
        body = await request.read(self._table.limits.max_body_bytes)
        started = time.perf_counter()
        # Without a session key, the turns of a recorded conversation still belong in one journal.
        with_prefix = tag is None and (self._table.records or self._table.snapshot.strategy == "prefix")
        name, key = read_envelope(body, tag, with_prefix=with_prefix)
        model = await self.resolve(name if tag is None else self._table.model_of_journal(tag))
        return await self._until_answered(Call(request, path, body, key, model, started))

    async def resolve(self, name: str | None) -> ModelEntry:
        """Return the requested model, or the only one. Raises 400, 404, and 503 while the table is incomplete."""
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
            worker = await self._admission.worker(call.model.name, call.key, refused, without_worker_since)
            call.elsewhere += time.perf_counter() - waiting_since
            call.attempts += 1
            outcome = await self._attempt(call, worker)
            if not isinstance(outcome, FailedAttempt):
                self._table.trust(worker.addr)
                return outcome
            if outcome.begun:
                begun += 1
                call.again = True
                without_worker_since = loop.time()
            if begun > _BEGUN_RETRIES:
                if outcome.answer is not None:
                    return outcome.answer
                message = "the workers that took this request were lost before they answered"
                raise ApiError(502, message, code="worker_lost")
            if outcome.reason != MOVED:
                self._table.suspect(worker.addr)
            self._metrics.retries.labels(outcome.reason).inc()
            refused = {worker.addr} if worker.addr in refused else refused | {worker.addr}

    async def _attempt(self, call: Call, worker: WorkerEntry) -> AnyResponse | FailedAttempt:
        self._admission.begin(worker, call.key)
        waiting_since = time.perf_counter()
        try:
            async with self._follower.watchdog(call.model.name, worker.addr) as watchdog:
                async with self._post(call, worker) as upstream:
                    call.elsewhere += time.perf_counter() - waiting_since
                    watchdog.kick()
                    return await self._relay_answer(call, upstream, watchdog)
        except NotConnected:
            return FailedAttempt(begun=False, reason="connect")
        except TimeoutError as error:
            raise ApiError(504, f"no progress in {self._table.timeout_s:g} s", code="progress_timeout") from error
        except (ResponseLost, OSError) as error:
            if not call.answering:
                return FailedAttempt(begun=True, reason="lost")
            raise ApiError(502, "the worker was lost in the middle of the answer", code="worker_lost") from error
        finally:
            self._admission.end(worker, call.key)

    def _post(self, call: Call, worker: WorkerEntry) -> PendingCall:
        """Send the call to a worker. The caller's headers are not checked: the server's parser rejects line breaks."""
        given = call.request.headers.raw
        lines = [b"%b: %b\r\n" % (name, given[name]) for name in _REQUEST_FIELDS if name in given]
        ours = f"Content-Type: application/json\r\n{names.REQUEST_ID}: {call.request.id}\r\n{names.CALL}: {call.id}\r\n"
        if call.again:
            ours += f"{names.AGAIN}: 1\r\n"
        if call.key.tag is not None:
            ours += f"{names.JOURNAL}: {call.key.tag}\r\n"
        lines.append(f"{ours}{names.PROGRESS_TIMEOUT}: {self._table.timeout_s:g}\r\n".encode())
        return self._http.send(worker.addr, "POST ", call.path, b"".join(lines), call.body)

    async def _relay_answer(self, call: Call, upstream: Connection, watchdog: Watchdog) -> AnyResponse | FailedAttempt:
        theirs = upstream.headers
        headers = {name: value for name in _RESPONSE_HEADERS if (value := theirs.get(name)) is not None}
        headers[names.ATTEMPTS] = str(call.attempts)
        if upstream.status == 200 and headers.get("Content-Type", "").startswith("text/event-stream"):
            return await self._stream(call, upstream, headers, watchdog)
        waiting_since = time.perf_counter()
        body = await upstream.whole()
        call.elsewhere += time.perf_counter() - waiting_since
        headers[names.OVERHEAD] = self._overhead(call, theirs)
        answer = Response(upstream.status, body, headers=headers)
        final = theirs.get(names.FINAL) is not None
        if not final and (reason := _RETRIED.get(upstream.status)) is not None:
            return FailedAttempt(begun=upstream.status == 502, reason=reason, answer=answer)
        return answer

    def _overhead(self, call: Call, headers: Headers) -> str:
        """Return the microseconds spent in the gateway and the data proxy, without the engine's."""
        ours = call.overhead_us()
        self._metrics.overhead_of(call.path).observe(ours / 1e6)
        theirs = headers.get(names.OVERHEAD, "")
        return str(ours + (int(theirs) if theirs.isdecimal() else 0))

    async def _stream(
        self, call: Call, upstream: Connection, headers: dict[str, str], watchdog: Watchdog
    ) -> AnyResponse:
        """Relay the events of a stream from within the callback that reads them, with backpressure on the worker."""
        headers["Cache-Control"] = "no-cache"
        headers[names.OVERHEAD] = self._overhead(call, upstream.headers)
        stream = _StreamRelay(call, upstream, StreamingResponse(headers=headers), watchdog)
        try:
            await upstream.stream_to(stream.part, stream.chunk)
            stream.end()
        except ConnectionResetError:  # the caller is gone; leaving closes the worker's connection, which ends its work
            return stream.out
        finally:
            if stream.out.prepared:
                stream.out.set_backpressure(None)
        return stream.out


class _StreamRelay:
    """Relays whole events only, so that a worker that fails in the middle of one leaves no partial event."""

    def __init__(self, call: Call, upstream: Connection, out: StreamingResponse, watchdog: Watchdog) -> None:
        self.out = out
        self._call = call
        self._upstream = upstream
        self._watchdog = watchdog
        self._cutter = EventCutter()
        self._write_chunk: Callable[[bytes], None] | None = None

    def part(self, part: bytes) -> None:
        self._watchdog.kick()
        if events := self._cutter.push(part):
            self._write(events)

    def chunk(self, chunk: bytes) -> bool:
        """Relay a chunk of whole events with its framing, without a copy. Return False for any other chunk."""
        write = self._write_chunk
        if write is None or self._cutter.held or not chunk.endswith(b"\n\n\r\n"):
            return False
        self._watchdog.kick()
        write(chunk)
        return True

    def end(self) -> None:
        """Relay the held bytes at the end of a complete answer."""
        if rest := self._cutter.held:
            self._write(rest)

    def _write(self, data: bytes) -> None:
        call, out = self._call, self.out
        if not call.answering:
            call.answering = True
            out.begin(call.request, data)
            out.set_backpressure(self._upstream)
            self._write_chunk = out.chunk_writer()
        else:
            out.write_nowait(data)
