"""A connection pool to one service: sends JSON, returns a response or raises a typed error, within a deadline.

Proxy variables are ignored, and redirects are not followed. The pool belongs to the event loop that first uses it. A
deadline applies to the whole call: all attempts and the pauses between them.

A call is *repeatable* if executing it twice has the effect of executing it once: a read, an idempotent route, or a call
with an ``Idempotency-Key``. A repeatable call is retried after connection failures and most server errors. Any other
call is retried only if it was not started: the connection was refused, or the service was overloaded.

A service may move while its clients run. A transport with a ``lookup`` calls it when the connection is refused, and
continues with the address that it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import quote

import aiohttp
import orjson
from yarl import URL

from areal.client.errors import (
    CallerError,
    ClientError,
    ConnectionLost,
    DeadlineExceeded,
    InfrastructureError,
    Overloaded,
    ServiceError,
    Unreachable,
    error_of_answer,
)
from areal.errors import ArealError

_log = logging.getLogger(__name__)
AddressLookup = Callable[[], str]
"""Returns the service's current address, "" if it has none. It may block, and raise ArealError."""

_NEVER_AGAIN = (500, 501, 505, 507)  # a bug of the service or a full disk: a retry would fail as well


@dataclass(frozen=True)
class RetryPolicy:
    """``attempts`` counts the first one too. Pauses double from ``first_s`` up to ``longest_s``, times a jitter
    between 0.5 and 1; a ``Retry-After`` is a lower bound."""

    attempts: int = 4
    first_s: float = 0.1
    longest_s: float = 4.0

    def pause_s(self, attempt: int, error: ClientError, *, repeatable: bool, jitter: float) -> float | None:
        """Seconds to wait before the next attempt, None to give up. ``attempt`` counts those made, from 1."""
        if attempt >= self.attempts or not may_repeat(error, repeatable=repeatable):
            return None
        pause = min(self.longest_s, self.first_s * 2.0 ** (attempt - 1)) * (0.5 + 0.5 * jitter)
        return max(pause, error.retry_after_s or 0.0)


def may_repeat(error: ClientError, *, repeatable: bool) -> bool:
    if isinstance(error, DeadlineExceeded):
        return False  # the deadline is that of all attempts together
    if isinstance(error, Unreachable | Overloaded):
        return True
    if not repeatable:
        return False
    return isinstance(error, InfrastructureError) or (
        isinstance(error, ServiceError) and error.status not in _NEVER_AGAIN
    )


_CONNECT_S = 5.0
_LOOKUP_PERIOD_S = 2.0
_LINE_BYTES = 1024 * 1024  # one event of a stream
_KEEP_ALIVE_S = 30.0  # below the usual timeout of servers, so that no connection is reused that a server just closed


@dataclass(frozen=True)
class HttpAnswer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return orjson.loads(self.body)


@dataclass(frozen=True)
class HttpCall:
    """One call. ``key`` None: the transport's key. ``repeatable``: executing it twice is the same as once."""

    method: str
    path: str
    body: Any = None
    key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    repeatable: bool = False


class Transport:
    """Calls one service. At most ``connections`` calls run at once; further ones wait within their deadline."""

    def __init__(
        self,
        base_url: str,
        key: str | None,
        *,
        timeout_s: float,
        retry: RetryPolicy | None = None,
        connections: int = 1024,
        lookup: AddressLookup | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._lookup = lookup
        self._lookup_lock = asyncio.Lock()
        self._looked_up_at = -_LOOKUP_PERIOD_S
        self._key = key
        self._timeout_s = timeout_s
        self._retry = retry or RetryPolicy()
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def call(self, call: HttpCall) -> HttpAnswer:
        """Make a call, with retries. Returns a response with a status below 300. Raises ClientError."""
        deadline = time.monotonic() + (self._timeout_s if call.timeout_s is None else call.timeout_s)
        attempt = 0
        while True:
            attempt += 1
            base = self.base_url
            try:
                with self._failures(call):
                    async with asyncio.timeout(deadline - time.monotonic()), self._request(call) as response:
                        answer = HttpAnswer(response.status, response.headers, await response.read())
                return checked(answer, self._what(call))
            except ClientError as error:
                if isinstance(error, Unreachable) and await self._moved_from(base):
                    attempt = 0
                pause = self._retry.pause_s(attempt, error, repeatable=call.repeatable, jitter=random.random())
                if pause is None or time.monotonic() + pause >= deadline:
                    raise
                await asyncio.sleep(pause)

    async def _moved_from(self, base: str) -> bool:
        """Look the service up, after ``base`` refused a connection. Whether its address is another one now."""
        if self._lookup is None:
            return False
        async with self._lookup_lock:  # one lookup serves all waiting calls
            now = time.monotonic()
            if self.base_url == base and now - self._looked_up_at >= _LOOKUP_PERIOD_S:
                self._looked_up_at = now
                try:
                    found = (await asyncio.to_thread(self._lookup)).rstrip("/")
                except ArealError as error:
                    found = ""
                    _log.warning("nobody listens at %s, and where it is now is not known: %s", base, error)
                if found and found != base:
                    _log.warning("%s has moved to %s", base, found)
                    self.base_url = found
            return self.base_url != base

    async def json(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """The decoded response. ``options`` are the other fields of HttpCall."""
        return (await self.call(HttpCall(method, path, body, **options))).json()

    async def sessions(self, path: str, page: int) -> AsyncIterator[dict[str, Any]]:
        """All sessions of the list at ``path``, requested in pages of ``page`` sessions."""
        after = ""
        while True:
            answer = await self.json(
                "GET", f"{path}?limit={page}" + (f"&after={after}" if after else ""), repeatable=True
            )
            for session in answer["sessions"]:
                yield session
            if not answer["next"]:
                return
            after = quote(answer["next"], safe="")

    @contextlib.asynccontextmanager
    async def stream(self, call: HttpCall) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """A streamed response; read it with ``events``. The timeout applies to the response head, then to each read.
        The call is not retried, except at a new address after a refused connection."""
        timeout_s = self._timeout_s if call.timeout_s is None else call.timeout_s
        async with contextlib.AsyncExitStack() as stack:
            while True:
                base = self.base_url
                try:
                    response = await self._head(stack, call, timeout_s)
                    break
                except Unreachable:
                    if not await self._moved_from(base):
                        raise
            yield response

    async def _head(self, stack: contextlib.AsyncExitStack, call: HttpCall, timeout_s: float) -> aiohttp.ClientResponse:
        with self._failures(call):
            async with asyncio.timeout(timeout_s):
                response: aiohttp.ClientResponse = await stack.enter_async_context(
                    self._request(call, silence_s=timeout_s)
                )
                if response.status >= 300:
                    answer = HttpAnswer(response.status, response.headers, await response.read())
                    checked(answer, self._what(call))
        return response

    def _request(self, call: HttpCall, silence_s: float | None = None) -> Any:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=silence_s)
        headers = dict(call.headers)
        data = None
        if call.body is not None:
            data = _encoded(call.body)
            headers["Content-Type"] = "application/json"
        if (key := call.key or self._key) is not None:
            headers["Authorization"] = f"Bearer {key}"
        url = URL(self.base_url + call.path, encoded=True)  # a session's key may be ".."
        return self._open().request(
            call.method, url, data=data, headers=headers, timeout=timeout, allow_redirects=False
        )

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise RuntimeError("the client is closed")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=_KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False, read_bufsize=_LINE_BYTES)
        return self._session

    def _failures(self, call: HttpCall) -> contextlib.AbstractContextManager[None]:
        return failures(self._what(call), self._timeout_s if call.timeout_s is None else call.timeout_s)

    def _what(self, call: HttpCall) -> str:
        return f"{call.method} {self.base_url}{call.path}"

    async def close(self) -> None:
        """Idempotent. Running calls fail."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class AsyncClient:
    """Base of the asyncio clients, each of one service."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        timeout_s: float = 600.0,
        retry: RetryPolicy | None = None,
        connections: int = 1024,
        lookup: AddressLookup | None = None,
    ) -> None:
        """``lookup`` returns the service's current address. It is called when a connection is refused."""
        self.timeout_s = timeout_s
        self.transport = Transport(
            base_url, api_key, timeout_s=timeout_s, retry=retry, connections=connections, lookup=lookup
        )

    @property
    def base_url(self) -> str:
        """The service's address, as far as it is known now."""
        return self.transport.base_url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.transport.close()


@contextlib.contextmanager
def failures(what: str, timeout_s: float) -> Iterator[None]:
    """Raise the errors of the HTTP library as ClientError."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        why = error.os_error.strerror or error if isinstance(error, aiohttp.ClientConnectorError) else "no answer"
        raise Unreachable(f"{what}: nobody listens there: {why}", hint="areal inf status") from error
    except TimeoutError as error:
        raise DeadlineExceeded(f"{what}: no answer within {timeout_s:g} s") from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise ConnectionLost(f"{what}: the connection broke: {error!r}") from error


def _encoded(body: Any) -> bytes:
    """The body as JSON. Raises CallerError for a NaN or infinity, which orjson would write as null."""
    data = orjson.dumps(body)
    if b"null" in data:
        try:
            json.dumps(body, allow_nan=False, default=str)
        except ValueError as error:
            raise CallerError(f"the request cannot be written as JSON: {error}") from error
    return data


def checked(answer: HttpAnswer, what: str) -> HttpAnswer:
    """``answer``, if its status is below 300. Raises the typed error of any other."""
    if answer.status < 300:
        return answer
    try:
        body: object = answer.json()
    except orjson.JSONDecodeError:
        body = answer.body.decode("utf-8", "replace")
    raise error_of_answer(answer.status, body, answer.headers, what)


_LAST = ("response.completed", "response.incomplete")  # events that end a stream of the Responses API


async def events(response: aiohttp.ClientResponse, what: str, silence_s: float) -> AsyncIterator[Any]:
    """Decoded server-sent events until ``[DONE]`` or the end event of a response. Raises ConnectionLost for a stream
    that ends before, and the typed error of an error event."""
    while True:
        with failures(what, silence_s):
            line = await response.content.readline()
        if not line:
            raise ConnectionLost(f"{what}: the stream was cut short")
        payload = line[5:].strip() if line.startswith(b"data:") else b""
        if payload == b"[DONE]":
            return
        if payload:
            data = orjson.loads(payload)
            kind = data.get("type") if isinstance(data, dict) else None
            if isinstance(data, dict) and (error := _stream_error(kind, data)) is not None:
                raise error_of_answer(500, {"error": error}, response.headers, what)
            yield data
            if kind in _LAST:
                return


def _stream_error(kind: object, data: Mapping[str, Any]) -> Any:
    """The error of an error event, in the form of any of the APIs; None for other events."""
    if kind == "response.failed":
        return data["response"].get("error") or {}
    error = data.get("error")
    return error if isinstance(error, dict) else data if kind == "error" else None
