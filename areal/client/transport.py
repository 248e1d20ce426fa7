"""A connection pool to one service: sends JSON, returns a response or raises a typed error, within a deadline.

Proxy variables are ignored, and redirects are not followed. The pool belongs to the event loop that first uses it. A
deadline applies to the whole call: all attempts and the pauses between them.

A call is *repeatable* if executing it twice has the effect of executing it once: a read, an idempotent route, or a call
with an ``Idempotency-Key``, of which a repeatable POST carries a new one. A repeatable call is retried after connection
failures and most server errors. Any other call is retried only if it was not started: the connection was refused, or
the service was overloaded.

A service may move while its clients run: when a connection is refused, ``lookup`` returns its address.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Self
from urllib.parse import quote
from uuid import uuid4

from areal.client import errors
from areal.dataclasses import dataclass, field, replace
from areal.errors import ArealError
from areal.http.client import CallFailed, Connection, HttpClient, HttpReply, NotConnected, PendingCall, parse_address
from areal.http.events import EventReader
from areal.wire.bodies import IDEMPOTENCY_KEY

try:
    from orjson import dumps, loads
except ImportError:
    from areal.http.fallback import dumps, loads  # type: ignore[assignment]

_log = logging.getLogger(__name__)
AddressLookup = Callable[[], str]
"""Returns the service's current address, "" if it has none. It may block, and raise ArealError."""

_NEVER_AGAIN = (500, 501, 505, 507)  # a bug of the service or a full disk: a retry would fail as well
_LOOKUP_PERIOD_S = 2.0


@dataclass(frozen=True)
class RetryPolicy:
    """``attempts`` counts the first one too. Pauses double from ``first_s`` up to ``longest_s``, times a jitter
    between 0.5 and 1; a ``Retry-After`` is a lower bound."""

    attempts: int = 4
    first_s: float = 0.1
    longest_s: float = 4.0

    def pause_s(self, attempt: int, error: errors.ClientError, *, repeatable: bool, jitter: float) -> float | None:
        """Return seconds to wait before the next attempt, None to give up. ``attempt`` counts those made, from 1."""
        if attempt >= self.attempts or not may_repeat(error, repeatable=repeatable):
            return None
        pause = min(self.longest_s, self.first_s * 2.0 ** (attempt - 1)) * (0.5 + 0.5 * jitter)
        return max(pause, error.retry_after_s or 0.0)


def may_repeat(error: errors.ClientError, *, repeatable: bool) -> bool:
    if isinstance(error, errors.DeadlineExceeded):
        return False  # the deadline is that of all attempts together
    if isinstance(error, errors.Unreachable | errors.Overloaded):
        return True
    if not repeatable:
        return False
    return isinstance(error, errors.InfrastructureError) or (
        isinstance(error, errors.ServiceError) and error.status not in _NEVER_AGAIN
    )


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
        """Raise CallerError for a ``base_url`` that is not an address."""
        try:
            parse_address(base_url)
        except ValueError as error:
            raise errors.CallerError(f"base_url: {error}") from error
        self.base_url = base_url.rstrip("/")
        self._lookup = lookup
        self._lookup_lock = asyncio.Lock()
        self._looked_up_at = -_LOOKUP_PERIOD_S
        self._key = key
        self._timeout_s = timeout_s
        self._retry = retry or RetryPolicy()
        self._free = asyncio.Semaphore(connections)
        self._http: HttpClient | None = None
        self._closed = False

    async def call(self, call: HttpCall) -> HttpReply:
        """Make a call, with retries. Returns a response with a status below 300. Raises ClientError."""
        deadline = time.monotonic() + (self._timeout_s if call.timeout_s is None else call.timeout_s)
        if call.repeatable and call.method == "POST":
            call = replace(call, headers={IDEMPOTENCY_KEY: uuid4().hex, **call.headers})
        attempt = 0
        while True:
            attempt += 1
            base = self.base_url
            try:
                with self._failures(call):
                    async with asyncio.timeout(deadline - time.monotonic()), self._free, self._pending(call) as answer:
                        reply = HttpReply(answer.status, answer.headers, await answer.whole())
                return checked(reply, self._what(call))
            except errors.ClientError as error:
                if isinstance(error, errors.Unreachable) and await self._moved_from(base):
                    attempt = 0
                pause = self._retry.pause_s(attempt, error, repeatable=call.repeatable, jitter=random.random())
                if pause is None or time.monotonic() + pause >= deadline:
                    raise
                await asyncio.sleep(pause)

    async def _moved_from(self, base: str) -> bool:
        """Look up the service after ``base`` refused a connection, and return whether its address has changed."""
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
                    _log.warning("no service listens at %s, and where it is now is not known: %s", base, error)
                if found and found != base:
                    _log.warning("%s has moved to %s", base, found)
                    self.base_url = found
            return self.base_url != base

    async def json(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """Return the decoded response. ``options`` are the other fields of HttpCall."""
        return (await self.call(HttpCall(method, path, body, **options))).json()

    async def sessions(self, path: str, page: int) -> AsyncIterator[Any]:
        """Yield all sessions of the list at ``path``, requested in pages of ``page`` sessions."""
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
    async def stream(self, call: HttpCall) -> AsyncGenerator[Connection, None]:
        """Yield a streamed response; read it with ``events``. The timeout applies to the response head, then to each
        read. The call is not retried, except at a new address after a refused connection."""
        timeout_s = self._timeout_s if call.timeout_s is None else call.timeout_s
        async with contextlib.AsyncExitStack() as stack:
            while True:
                base = self.base_url
                try:
                    answer = await self._head(stack, call, timeout_s)
                    break
                except errors.Unreachable:
                    await stack.aclose()
                    if not await self._moved_from(base):
                        raise
            yield answer

    async def _head(self, stack: contextlib.AsyncExitStack, call: HttpCall, timeout_s: float) -> Connection:
        with self._failures(call):
            async with asyncio.timeout(timeout_s):
                await stack.enter_async_context(self._free)
                answer = await stack.enter_async_context(self._pending(call))
                if answer.status >= 300:
                    checked(HttpReply(answer.status, answer.headers, await answer.whole()), self._what(call))
        return answer

    def _pending(self, call: HttpCall) -> PendingCall:
        if self._closed:
            raise RuntimeError("the client is closed")
        if self._http is None:
            self._http = HttpClient()
        headers = {"Accept": "*/*", "User-Agent": "areal", **call.headers}
        body = b""
        if call.body is not None:
            body = _encoded(call.body)
            headers["Content-Type"] = "application/json"
        if (key := call.key or self._key) is not None:
            headers["Authorization"] = f"Bearer {key}"
        try:
            return self._http.call(call.method, self.base_url, call.path, headers, body)
        except ValueError as error:
            raise errors.CallerError(f"{self._what(call)}: {error}") from error

    def _failures(self, call: HttpCall) -> contextlib.AbstractContextManager[None]:
        return failures(self._what(call), self._timeout_s if call.timeout_s is None else call.timeout_s)

    def _what(self, call: HttpCall) -> str:
        return f"{call.method} {self.base_url}{call.path}"

    async def close(self) -> None:
        """Close all connections. Running calls fail. Idempotent."""
        self._closed = True
        if self._http is not None:
            self._http.close()


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
        """The service's address, as far as it is known."""
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
    except NotConnected as error:
        cause = error.__cause__
        if isinstance(cause, ssl.SSLError):
            trust = "SSL_CERT_FILE=FILE names the certificates to trust"
            raise errors.Unreachable(f"{what}: TLS failed: {cause}", hint=trust) from error
        why = "no answer" if isinstance(cause, TimeoutError) else getattr(cause, "strerror", None) or cause
        raise errors.Unreachable(
            f"{what}: no service listens there: {why}", hint="areal get lists services and addresses"
        ) from error
    except TimeoutError as error:
        raise errors.DeadlineExceeded(f"{what}: no answer within {timeout_s:g} s") from error
    except CallFailed as error:
        raise errors.ConnectionLost(f"{what}: {error}") from error


def _encoded(body: Any) -> bytes:
    """Return the body as JSON. Raises CallerError for values outside of JSON, such as NaN."""
    try:
        data = dumps(body)
        if b"null" in data:
            json.dumps(body, allow_nan=False, default=str)
    except (TypeError, ValueError) as error:
        raise errors.CallerError(f"the request cannot be written as JSON: {error}") from error
    return data


def checked(answer: HttpReply, what: str) -> HttpReply:
    """Return ``answer`` if its status is below 300. Raises the typed error otherwise."""
    if answer.status < 300:
        return answer
    try:
        body: object = answer.json()
    except ValueError:
        body = answer.body.decode("utf-8", "replace")
    raise errors.error_of_answer(answer.status, body, answer.headers, what)


_LAST = ("response.completed", "response.incomplete")  # events that end a stream of the Responses API


async def events(answer: Connection, what: str, silence_s: float) -> AsyncIterator[Any]:
    """Yield decoded server-sent events until ``[DONE]`` or the end event of a response. Raises ConnectionLost for a
    stream that ends before, and the typed error of an error event."""
    reader = EventReader()
    while True:
        with failures(what, silence_s):
            async with asyncio.timeout(silence_s):
                part = await answer.part()
        if not part:
            raise errors.ConnectionLost(f"{what}: the stream was cut short")
        for event in reader.feed(part):
            if event.data == b"[DONE]":
                return
            if not event.data:
                continue
            data = loads(event.data)
            kind = data.get("type") if isinstance(data, dict) else None
            if isinstance(data, dict) and (error := _stream_error(kind, data)) is not None:
                raise errors.error_of_answer(500, {"error": error}, answer.headers, what)
            yield data
            if kind in _LAST:
                return


def _stream_error(kind: object, data: Mapping[str, Any]) -> Any:
    """Return the error of an error event, in the form of any of the APIs; None for other events."""
    if kind == "response.failed":
        return data["response"].get("error") or {}
    error = data.get("error")
    return error if isinstance(error, dict) else data if kind == "error" else None
