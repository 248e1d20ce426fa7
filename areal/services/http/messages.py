"""Requests, whose bodies are read on demand and within a limit, and their responses, whole or streamed."""

from __future__ import annotations

import asyncio
import gzip
import io
import re
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Protocol, TypeVar
from urllib.parse import parse_qsl, quote

import orjson

from areal.dataclasses import dataclass, field
from areal.errors import FieldError
from areal.http.headers import IGNORED, REQUEST_ID, Headers, unique_id
from areal.services.http.errors import ApiError, ErrorFormat, bad_field, bad_request
from areal.wire.bodies import IDEMPOTENCY_KEY, IDEMPOTENCY_KEY_PROBLEM, is_idempotency_key
from areal.wire.fields import read_fields

T = TypeVar("T")
_GIVEN_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_REQUEST_ID = REQUEST_ID.encode()
_INFLATED_AT_ONCE = 1024 * 1024  # bytes of a compressed body between checks of the limits

_SMALL = 1024 * 1024


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one connection in seconds and bytes; ``bodies_bytes`` is the limit of all connections together.

    A body may take ``body_grace_s``, and longer while its average rate is at least ``body_bytes_per_s``. Up to
    ``buffered_bytes`` are buffered of a body that no handler reads yet.
    """

    keep_alive_s: float = 120.0  # longer than POOL_IDLE_S of our clients
    header_s: float = 15.0
    header_bytes: int = 64 * 1024
    header_count: int = 128
    body_grace_s: float = 30.0
    body_bytes_per_s: float = 1024.0
    buffered_bytes: int = 256 * 1024
    bodies_bytes: int = 512 * 1024 * 1024
    pipelined: int = 64
    linger_s: float = 10.0  # for a caller to stop sending and to read its last answer
    linger_bytes: int = 64 * 1024 * 1024  # the most that the caller may still send
    stalled_s: float = 900.0  # for a caller to read any byte of the answer
    sweep_s: float = 4.0  # between checks of these limits; until then a disconnected caller keeps its buffers


class BodyBudget:
    """The bytes of bodies and messages that a process holds for all callers, from their arrival to the end of their
    request.

    A body of up to 1 MiB may use twice the limit, so that large bodies do not block usual ones. A body is always
    accepted if there is no other.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0

    def take(self, count: int, size: int) -> None:
        """Count ``count`` more bytes of a body that has ``size`` bytes so far. Raises 503 beyond the limit."""
        of_others = self.held + count - size
        if of_others > 0 and self.held + count > (self._most if size > _SMALL else 2 * self._most):
            message = f"the request bodies of all callers have {self._most} bytes, which is the limit"
            raise ApiError(503, message, code="too_many_bytes", headers={"Retry-After": "1"})
        self.held += count

    def give(self, count: int) -> None:
        self.held -= count


class ServerConnection(Protocol):
    """The connection that a request came on. Methods that send raise ConnectionResetError when the caller is gone."""

    last_part: bytes  # the newest bytes of the stream that is being written
    budget: BodyBudget

    @property
    def writable(self) -> bool: ...

    def want_body(self, request: Request) -> None: ...

    def send(self, request: Request, response: Response) -> None: ...

    def begin_stream(self, request: Request, response: StreamingResponse, first: bytes = b"") -> None: ...

    def write_part(self, request: Request, data: bytes) -> None: ...

    def write_chunk(self, chunk: bytes) -> None: ...

    async def wait_writable(self) -> None: ...

    def set_source(self, source: FlowControl | None) -> None: ...

    def upgrade(self, request: Request, head: bytes, reader: Upgraded) -> None: ...

    def write_raw(self, data: bytes) -> None: ...

    def hold_input(self, hold: bool) -> None: ...

    def has_left(self, *, aborted: bool = False) -> bool: ...

    def abort(self) -> None: ...


class Upgraded(Protocol):
    """Takes the input of a connection that was upgraded to another protocol. ``lingers``: at its end, the caller gets
    time to stop sending."""

    lingers: bool

    def received(self, data: bytes) -> None: ...

    def lost(self) -> None: ...

    def go_away(self) -> None: ...

    def is_gone(self, now: float) -> bool: ...


@dataclass(slots=True, eq=False)
class Request:
    """``target`` and ``path`` are percent-encoded as they came; ``match_info`` has the route's decoded parameters.
    ``size``: bytes of the body that have arrived."""

    connection: ServerConnection
    method: str
    target: str
    headers: Headers
    is_http_1_0: bool = False
    keep_alive: bool = True
    upgrade: bytes = b""  # the requested protocol
    expects_continue: bool = False
    by_admin: bool = False  # the caller presented the admin key
    complete: bool = False  # the whole body has arrived
    closes: bool = False  # the answer is the connection's last
    chunked: bool = False  # the answer's transfer encoding
    answered: bool = False  # a whole answer was written
    stream: StreamingResponse | None = None  # the answer, while it is streamed
    size: int = 0
    ignored: tuple[str, ...] = ()  # fields of the body without effect, for the answer's header
    id_headers: tuple[str, ...] = (REQUEST_ID,)
    match_info: dict[str, str] = field(init=False)
    id: str = field(init=False)
    path: str = field(init=False)
    query_string: str = field(init=False)
    _parts: list[bytes] = field(init=False)
    _limit: int | None = None  # bytes of the body, once a handler reads it
    _held: int = 0  # bytes of the body that the connection's budget counts
    _waiter: asyncio.Future[None] | None = None
    _refusal: ApiError | None = None

    def __post_init__(self) -> None:
        self.match_info, self._parts = {}, []
        self.path, _, self.query_string = self.target.partition("?")
        given = self.headers.raw.get(_REQUEST_ID)
        self.id = given.decode() if given is not None and _GIVEN_ID.fullmatch(given) else unique_id("req_")

    @property
    def query(self) -> dict[str, str]:
        """The query's fields; of a repeated field, the first value."""
        return dict(reversed(parse_qsl(self.query_string, keep_blank_values=True)))

    @property
    def content_length(self) -> int | None:
        text = self.headers.raw.get(b"content-length")
        return None if text is None else int(text)

    async def read(self, limit: int) -> bytes:
        """Return the whole body, decompressed. Raises 413 as soon as it is known to exceed ``limit`` bytes, 408 if the
        rest does not arrive in time, 415 for an encoding other than gzip."""
        if (self.content_length or 0) > limit or self.size > limit:
            raise _too_large(limit)
        self._limit = limit
        if not self.complete:
            self.connection.want_body(self)
            if self._refusal is None:
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
            if self._refusal is not None:
                raise self._refusal
        if len(self._parts) != 1:
            self._parts = [b"".join(self._parts)]
        if (encoding := self.headers.raw.pop(b"content-encoding", b"identity").strip().lower()) != b"identity":
            self._parts = [await self._decompressed(encoding, self._parts[0], limit)]
        return self._parts[0]

    async def _decompressed(self, encoding: bytes, data: bytes, limit: int) -> bytes:
        if encoding not in (b"gzip", b"x-gzip"):
            message = (
                f"Content-Encoding {encoding.decode(errors='replace')} is not supported: send the body plain, or gzip"
            )
            raise ApiError(415, message, code="unsupported_encoding", headers={"Accept-Encoding": "gzip"})
        received, source = self._held, gzip.GzipFile(fileobj=io.BytesIO(data))
        parts = []
        try:
            while part := await asyncio.to_thread(source.read, _INFLATED_AT_ONCE):
                self._hold(len(part), self._held + len(part))
                parts.append(part)
                if self._held - received > limit:
                    raise _too_large(limit)
        except (OSError, EOFError, zlib.error) as error:
            raise ApiError(400, f"the request body is not valid gzip: {error}", code="invalid_gzip") from error
        self._give(received)  # the compressed bytes, which are freed now
        return b"".join(parts)

    async def answer(self, response: Response) -> None:
        """Send ``response`` before the handler returns. Raises ConnectionResetError when the caller is gone."""
        self.connection.send(self, response)
        await self.connection.wait_writable()

    # Called by the connection.

    def received(self, data: bytes) -> None:
        self.size += len(data)
        if self._limit is not None and self.size > self._limit:
            self._drop_body()
            self.refuse(_too_large(self._limit))
        elif self._refusal is None:
            try:
                self._hold(len(data), self.size)
            except ApiError as error:
                self._drop_body()
                self.refuse(error)
                return
            self._parts.append(data)

    def _hold(self, count: int, size: int) -> None:
        """Count ``count`` more bytes of a body that has ``size`` bytes. Raises 503."""
        self.connection.budget.take(count, size)
        self._held += count

    def _give(self, count: int) -> None:
        self.connection.budget.give(count)
        self._held -= count

    def _drop_body(self) -> None:
        self._parts.clear()
        self._give(self._held)

    def release(self) -> None:
        """Free the body and break reference cycles: the request is answered, or its caller is gone."""
        self._drop_body()
        self._refusal = self.stream = None
        self._limit = 0

    @property
    def backlog(self) -> int:
        """The buffered bytes of a body that no handler reads yet."""
        return self.size if self._limit is None else 0

    def completed(self) -> None:
        self.complete = True
        self._wake()

    def refuse(self, error: ApiError) -> None:
        """Make reading the body, now or later, raise ``error``."""
        self._refusal = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes", code="body_too_large")


# A whole response is one write. A stream is chunked, or, for an HTTP/1.0 caller, ended by closing the connection. The
# server adds the framing, the date and the request's id to the handler's headers.

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}
_WITHOUT_BODY = frozenset({204, 304})


class FlowControl(Protocol):
    """Pauses the source of a stream while its reader lags behind."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Response:
    """A whole response. ``headers`` may be added to until it is sent."""

    __slots__ = ("body", "headers", "status")

    def __init__(
        self,
        status: int = 200,
        body: bytes = b"",
        *,
        content_type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.body = body
        self.headers: dict[str, str] = {} if content_type is None else {"Content-Type": content_type}
        if headers:
            self.headers |= headers


class StreamingResponse:
    """A response that is written in parts: ``begin`` sends its head, returning it from the handler ends it.

    ``write`` waits while the caller lags behind. ``write_nowait`` never waits: pause its source by
    ``set_backpressure``. Both raise ConnectionResetError once the caller is gone. ``end``: the last bytes, sent with
    the stream's end.
    """

    __slots__ = ("_request", "end", "headers", "status")

    def __init__(self, status: int = 200, *, headers: Mapping[str, str] | None = None) -> None:
        self.status = status
        self.end = b""
        self.headers: dict[str, str] = dict(headers) if headers else {}
        self._request: Request | None = None

    @property
    def prepared(self) -> bool:
        return self._request is not None

    @property
    def is_events(self) -> bool:
        return self.headers.get("Content-Type", "").startswith("text/event-stream")

    def begin(self, request: Request, first: bytes = b"") -> None:
        """Send the head and ``first`` in one write. Raises ConnectionResetError when the caller is gone."""
        assert self._request is None, "a stream begins once"
        request.connection.begin_stream(request, self, first)
        self._request = request

    async def write(self, data: bytes) -> None:
        connection = self._prepared_request().connection
        connection.write_part(self._prepared_request(), data)
        if not connection.writable:
            await connection.wait_writable()

    def write_nowait(self, data: bytes) -> None:
        request = self._request or self._prepared_request()
        request.connection.write_part(request, data)

    @property
    def writable(self) -> bool:
        return self._prepared_request().connection.writable

    async def wait_writable(self) -> None:
        await self._prepared_request().connection.wait_writable()

    def chunk_writer(self) -> Callable[[bytes], None] | None:
        """Return a ``write_nowait`` for bytes that are a whole HTTP chunk, including its size line; None if the
        response is not chunked."""
        request = self._prepared_request()
        return request.connection.write_chunk if request.chunked else None

    def set_backpressure(self, source: FlowControl | None) -> None:
        """Pause ``source`` from now on whenever the caller lags behind. None ends that."""
        self._prepared_request().connection.set_source(source)

    def _prepared_request(self) -> Request:
        assert self._request is not None, "a stream is prepared before it is written"
        return self._request


AnyResponse = Response | StreamingResponse


def error_response(error: ApiError, form: ErrorFormat, request_id: str) -> Response:
    body = orjson.dumps(form.body(error, request_id))
    headers = {**error.headers, **dict.fromkeys(form.id_headers, request_id)}
    return Response(error.status, body, content_type="application/json", headers=headers)


@lru_cache(maxsize=1)
def _date_line(second: int) -> str:
    return f"Date: {formatdate(second, usegmt=True)}\r\n"


def encode_head(status: int, headers: Mapping[str, str], framing: str) -> bytes:
    """Return the head of a response; ``framing`` is the server's own lines. Raises ValueError for a header with a line
    break, which would inject a header or a response."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("a header has a line break")
    first = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"
    return f"{first}{lines}{_date_line(int(time.time()))}{framing}\r\n".encode("utf-8", "surrogateescape")


def has_body(method: str, status: int) -> bool:
    return method != "HEAD" and status not in _WITHOUT_BODY


def id_lines(names: Iterable[str], headers: Mapping[str, str], request_id: str, ignored: Collection[str] = ()) -> str:
    """Return header lines with the request's id, one for each of ``names`` that the handler did not set, and one with
    the ``ignored`` fields of its body."""
    ids = "".join([f"{name}: {request_id}\r\n" for name in names if name not in headers])
    return f"{ids}{IGNORED}: {', '.join(ignored)}\r\n" if ignored else ids


_MOST_IGNORED_NAMES = 50
DEFAULT_MAX_BODY_BYTES = 32 * 1024 * 1024


_CONTAINERS = (dict, list, tuple)
MOST_LEVELS = 200
"""The limit on nested objects and lists. orjson reads 1,024 levels and writes 254, including those around a value."""


def is_deeper(value: object, levels: int) -> bool:
    """Return whether a JSON value has more than ``levels`` levels of nested objects and lists."""
    level = [value]
    for _ in range(levels):
        containers = (each for each in level if isinstance(each, _CONTAINERS))
        level = [item for each in containers for item in (each.values() if isinstance(each, dict) else each)]
    return any(isinstance(each, _CONTAINERS) for each in level)


def decode_object(body: bytes | str, what: str = "the request body") -> dict[str, object]:
    """Return the JSON object in ``body``, which is UTF-8. Raises 400; ``what`` names the body in the message."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"{what} is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, f"{what} must be a JSON object", code="invalid_json")
    opened = body.count("{") + body.count("[") if isinstance(body, str) else body.count(b"{") + body.count(b"[")
    if opened > MOST_LEVELS and is_deeper(data, MOST_LEVELS):
        raise ApiError(400, f"{what} has more than {MOST_LEVELS} levels", code="invalid_json")
    return data


async def read_object(request: Request, limit: int = DEFAULT_MAX_BODY_BYTES) -> dict[str, object]:
    return decode_object(await request.read(limit))


async def read_body(request: Request, cls: type[T], limit: int = DEFAULT_MAX_BODY_BYTES, empty: bytes = b"") -> T:
    """Return the request's body as ``cls``, one of ``areal.wire.bodies``; ``empty`` replaces an empty one. Raises 400
    naming the field."""
    data = decode_object(await request.read(limit) or empty)
    given = {name for name, value in data.items() if value is not None}
    request.ignored = ignored_names(given - cls.__dataclass_fields__.keys())  # type: ignore[attr-defined]
    return body_as(cls, data)


def ignored_names(names: Collection[str]) -> tuple[str, ...]:
    """Return the names of fields without effect as ``x-areal-ignored`` lists them: encoded, the first 50."""
    listed = sorted({quote(name, safe="[]") for name in names})
    more = len(listed) - _MOST_IGNORED_NAMES
    return tuple(listed) if more <= 0 else (*listed[:_MOST_IGNORED_NAMES], f"and {more} more")


def body_as(cls: type[T], data: Mapping[str, object], path: str = "") -> T:
    """Return ``data`` as ``cls``; ``path`` locates it within the body. Raises 400 naming the field."""
    try:
        return read_fields(cls, data, path, lenient=True)
    except FieldError as error:
        code = "missing_field" if error.is_missing else "invalid_value"
        raise bad_field(error.field, error.problem, code=code) from error


def idempotency_key(headers: Mapping[str, str]) -> str | None:
    """Return the request's Idempotency-Key. Raises 400 for a malformed one."""
    key = headers.get(IDEMPOTENCY_KEY)
    if key is not None and not is_idempotency_key(key):
        raise bad_field(IDEMPOTENCY_KEY, IDEMPOTENCY_KEY_PROBLEM)
    return key


def refuse_idempotency_key(request: Request, instead: str) -> None:
    """Refuse an Idempotency-Key on a route where a repeated request would take effect twice. ``instead``: what to
    do."""
    if IDEMPOTENCY_KEY in request.headers:
        message = f"{IDEMPOTENCY_KEY} has no effect on {request.method} {request.path}: {instead}"
        raise bad_request(message, param=IDEMPOTENCY_KEY, code="idempotency_key_unsupported")


def query_int(request: Request, name: str, default: int, least: int, most: int) -> int:
    """Return a whole number of the query. Raises 400."""
    text = request.query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or not least <= int(text) <= most:
        raise bad_field(name, f"must be a whole number from {least} to {most}")
    return int(text)


def query_seconds(request: Request, name: str, most: float) -> float:
    """Return seconds given in the query, 0 if there are none. Raises 400."""
    try:
        seconds = float(request.query.get(name) or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= most:
        raise bad_field(name, f"must be between 0 and {most:g} seconds")
    return seconds
