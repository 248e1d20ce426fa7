"""One service process: routes with their access, probes, errors and request ids, as the server's application.

Every request passes ``answer`` once: it finds the route, checks the key, and turns errors into the API's object,
beside a status where none is sent yet, else as the last event of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import orjson

from areal.services.http.auth import Access, AdminKey, Authenticator
from areal.services.http.errors import ApiError
from areal.services.http.headers import ANTHROPIC_REQUEST_ID, REQUEST_ID
from areal.services.http.messages import AnyResponse, PathTable, Request, Response, StreamResponse
from areal.services.http.metrics import CONTENT_TYPE, Metrics, RouteMetrics

# How each API says that a call went wrong: as a body beside a status, and as the last event of a
# stream. OpenAI's object everywhere but under Anthropic's paths; a stream of the Responses API has an event type of
# its own.

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_SEQUENCE = re.compile(rb'"sequence_number":\s*(\d{1,18})')  # within a text of the answer its quotes are escaped


@dataclass(frozen=True)
class ErrorForm:
    """``event`` is what a stream ends with, after the bytes that were written last."""

    body: Callable[[ApiError, str], dict[str, Any]]
    event: Callable[[ApiError, str, bytes], bytes]
    id_headers: tuple[str, ...] = (REQUEST_ID,)

    def response(self, error: ApiError, request_id: str) -> Response:
        ids = dict.fromkeys(self.id_headers, request_id)
        body = orjson.dumps(self.body(error, request_id))
        headers = {**error.headers, **ids}
        return Response(error.status, body, content_type="application/json", headers=headers)


def _openai_body(error: ApiError, request_id: str) -> dict[str, Any]:
    return error.body(request_id)


def _openai_event(error: ApiError, request_id: str, before: bytes) -> bytes:
    return b"data: " + orjson.dumps(error.body(request_id)) + b"\n\n"


def _responses_event(error: ApiError, request_id: str, before: bytes) -> bytes:
    """The API's own event, and the object by which clients tell an error from an event they do not know. Its number
    follows that of the event before."""
    numbers = _SEQUENCE.findall(before)
    number = int(numbers[-1]) + 1 if numbers else 0
    body = error.body(request_id)
    about = {"message": error.message, "code": error.code, "param": error.param}
    event = {"type": "error", "sequence_number": number, **about}
    return b"event: error\ndata: " + orjson.dumps(event | body) + b"\n\n"


def _anthropic_body(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def _anthropic_event(error: ApiError, request_id: str, before: bytes) -> bytes:
    return b"event: error\ndata: " + orjson.dumps(_anthropic_body(error, request_id)) + b"\n\n"


OPENAI = ErrorForm(_openai_body, _openai_event)
RESPONSES = ErrorForm(_openai_body, _responses_event)
ANTHROPIC = ErrorForm(_anthropic_body, _anthropic_event, (REQUEST_ID, ANTHROPIC_REQUEST_ID))

_FORMS = {"/messages": ANTHROPIC, "/responses": RESPONSES}
_OTHERS = tuple(_FORMS)


def error_form(path: str) -> ErrorForm:
    """The form in which callers of ``path`` expect errors, whether it is a path of ours or not."""
    path = path.removeprefix("/v1")
    if not path.startswith(_OTHERS):
        return OPENAI
    return next((form for prefix, form in _FORMS.items() if path == prefix or path.startswith(prefix + "/")), OPENAI)


class Lifetime:
    """Whether a process is starting, ready or draining. ``not_ready`` is called at each probe and gives the reason, or
    None when the process can serve. ``news`` is set when the answer to a probe may have changed."""

    def __init__(self, not_ready: Callable[[], str | None]) -> None:
        self._not_ready = not_ready
        self._draining = asyncio.Event()
        self.news = asyncio.Event()
        self.in_flight = 0

    @property
    def draining(self) -> bool:
        return self._draining.is_set()

    def drain(self) -> None:
        """From now on not ready; whoever holds a stream without end (``wait_draining``) ends it."""
        self._draining.set()
        self.news.set()

    async def wait_draining(self) -> None:
        await self._draining.wait()

    def state(self) -> tuple[str, str | None]:
        """``ready``, ``not_ready`` or ``draining``, and why it is not ready."""
        if self.draining:
            return "draining", "the process was told to stop and finishes what it has"
        reason = self._not_ready()
        return ("ready", None) if reason is None else ("not_ready", reason)


# Server-sent events that are passed on, and streams that end badly.

_FINAL_WRITE_S = 5.0
_LONGEST_EVENT = 16 * 1024 * 1024


class EventCutter:
    """Cuts a byte stream between events, so that a source that breaks off never leaves half an event behind. ``held``
    is the half that waits for its end."""

    def __init__(self) -> None:
        self.held = b""

    def push(self, part: bytes) -> bytes:
        """The whole events that may be passed on."""
        if not self.held and part.endswith(b"\n\n"):
            return part
        if self.held:
            part = self.held + part
        end = max(part.rfind(b"\n\n") + 2, part.rfind(b"\n\r\n") + 3)
        if end < 3:
            end = len(part) if len(part) > _LONGEST_EVENT else 0
        self.held = part[end:]
        return part[:end] if self.held else part

    def rest(self) -> bytes:
        """The bytes after the last event of a source that ended well."""
        return self.held


async def write_final(out: StreamResponse, data: bytes) -> None:
    """Write ``data`` to a stream that ends now. A caller that is gone, or reads nothing any more, misses it."""
    with contextlib.suppress(ConnectionResetError, TimeoutError):
        async with asyncio.timeout(_FINAL_WRITE_S):
            await out.write(data)


Handler = Callable[[Request], Awaitable[AnyResponse]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Route:
    """``metrics`` of a model request: in flight now, how long it took, how it ended."""

    handler: Handler
    access: Access
    metrics: RouteMetrics | None


class Service:
    """A component under construction: add routes and what runs beside them, then hand it to ``serve``.

    ``not_ready`` gives the reason why the component cannot serve now, or None. ``details`` adds fields to the
    answers of /health and /ready (load, version), which is how the router learns them.
    """

    def __init__(
        self,
        component: str,
        *,
        key: AdminKey | None,
        loopback: bool,
        not_ready: Callable[[], str | None] = lambda: None,
        details: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.component = component
        self.address: str | None = None  # where it listens, once it does
        self.authenticator = Authenticator(key, loopback=loopback)
        self.lifetime = Lifetime(not_ready)
        self.metrics = Metrics()
        self._details = details
        self._routes = PathTable[_Route]()
        self._lifespans: list[Callable[[], AbstractAsyncContextManager[Any]]] = []
        self.route("GET", "/health", self._health, Access.HEALTH)
        self.route("GET", "/ready", self._ready, Access.HEALTH)
        self.route("GET", "/metrics", self._metrics, Access.METRICS)

    def route(self, method: str, path: str, handler: Handler, access: Access) -> None:
        counted = access in (Access.INFERENCE, Access.SESSION)
        self._routes.add(method, path, _Route(handler, access, self.metrics.of_route(path) if counted else None))

    def add_lifespan(self, lifespan: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        """A context that lasts as long as the service: entered before it listens, left when it has drained."""
        self._lifespans.append(lifespan)

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for lifespan in self._lifespans:
                await stack.enter_async_context(lifespan())
            yield

    async def answer(self, request: Request) -> AnyResponse:
        """Raises CancelledError, and ConnectionResetError when the caller left during the answer; nothing else."""
        try:
            form = error_form(request.path)
            request.id_headers = form.id_headers
            route, request.match_info = self._routes.find(request.method, request.path)
            request.by_admin = self.authenticator.check(request.headers, route.access)
            if route.metrics is None:
                return await route.handler(request)
            return await self._counted(route.handler, route.metrics, request)
        except ApiError as error:
            if error.status >= 500:
                _log.warning("%s %s: %d %s [%s]", request.method, request.path, error.status, error, request.id)
            return await _failure(request, error)
        except ConnectionResetError:
            raise
        except Exception:  # noqa: BLE001 - the process boundary: the log gets the detail, the caller an id
            _log.exception("%s %s failed [%s]", request.method, request.path, request.id)
            return await _failure(request, ApiError(500, "internal error", code="internal_error"))

    async def _counted(self, handler: Handler, metrics: RouteMetrics, request: Request) -> AnyResponse:
        started = time.perf_counter()
        status = 499  # the caller went away, as nginx writes it
        self.lifetime.in_flight += 1
        metrics.began()
        try:
            response = await handler(request)
            status = response.status
            return response
        except ApiError as error:
            status = error.status
            raise
        except Exception:
            status = 500
            raise
        finally:
            self.lifetime.in_flight -= 1
            metrics.ended(status, time.perf_counter() - started)

    async def _health(self, request: Request) -> Response:
        body: dict[str, Any] = {"status": "ok", "component": self.component}
        if self.authenticator.sees_details(request.headers):
            body |= {"pid": os.getpid(), **self._details(), "in_flight": self.lifetime.in_flight}
        return json_response(body)

    async def _ready(self, request: Request) -> Response:
        body = self.readiness()
        status = 200 if body["status"] == "ready" else 503
        if not self.authenticator.sees_details(request.headers):
            body = {name: body[name] for name in ("status", "component", "reason")}
        return json_response(body, status=status)

    def readiness(self) -> dict[str, Any]:
        """The whole body of /ready."""
        state, reason = self.lifetime.state()
        body: dict[str, Any] = {"status": state, "component": self.component, "reason": reason, "pid": os.getpid()}
        return {**body, "in_flight": self.lifetime.in_flight, **self._details()}

    async def _metrics(self, request: Request) -> Response:
        return Response(body=self.metrics.exposition(), content_type=CONTENT_TYPE)


def json_response(data: object, *, status: int = 200, more_headers: dict[str, str] | None = None) -> Response:
    return Response(status, orjson.dumps(data), content_type="application/json", headers=more_headers)


async def _failure(request: Request, error: ApiError) -> AnyResponse:
    """The error as a status where none is sent yet, else as the last event of the stream. Any other answer that began
    can only be broken off."""
    form = error_form(request.path)
    stream: StreamResponse | None = request.stream
    if stream is None and not request.answered:
        return form.response(error, request.id)
    if stream is None or not stream.is_events:
        raise ConnectionResetError("the answer had begun")
    await write_final(stream, form.event(error, request.id, request.connection.last_part))
    return stream
