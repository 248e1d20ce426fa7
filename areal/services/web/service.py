"""One service process: routes with their access, probes, errors and request ids, as the server's application.

Every request passes ``answer`` once: it finds the route, checks the key, and turns errors into the API's object,
beside a status where none is sent yet, else as the last event of the stream.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import orjson

from areal.services.web.access import Access, Gatekeeper
from areal.services.web.error_forms import error_form
from areal.services.web.errors import ApiError
from areal.services.web.keys import AdminKey
from areal.services.web.lifetime import Lifetime
from areal.services.web.metrics import CONTENT_TYPE, Metrics, RouteMetrics
from areal.services.web.server import AnyResponse, Request, Response, RouteTable, StreamResponse
from areal.services.web.streaming import last_word

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
        self.gate = Gatekeeper(key, loopback=loopback)
        self.lifetime = Lifetime(not_ready)
        self.metrics = Metrics()
        self._details = details
        self._routes = RouteTable[_Route]()
        self._companions: list[Callable[[], AbstractAsyncContextManager[Any]]] = []
        self.route("GET", "/health", self._health, Access.HEALTH)
        self.route("GET", "/ready", self._ready, Access.HEALTH)
        self.route("GET", "/metrics", self._metrics, Access.METRICS)

    def route(self, method: str, path: str, handler: Handler, access: Access) -> None:
        counted = access in (Access.CALLER, Access.SESSION)
        self._routes.add(method, path, _Route(handler, access, self.metrics.of_route(path) if counted else None))

    def beside(self, companion: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        """What lives as long as the service serves: entered before it listens, left when it has drained."""
        self._companions.append(companion)

    @contextlib.asynccontextmanager
    async def living(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for companion in self._companions:
                await stack.enter_async_context(companion())
            yield

    async def answer(self, request: Request) -> AnyResponse:
        """Raises nothing but CancelledError, and ConnectionResetError when the caller went away while we wrote."""
        try:
            form = error_form(request.path)
            request.id_headers = form.id_headers
            route, request.match_info = self._routes.find(request.method, request.path)
            request.by_admin = self.gate.check(request.headers, route.access)
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
        if self.gate.sees_details(request.headers):
            body |= {"pid": os.getpid(), **self._details(), "in_flight": self.lifetime.in_flight}
        return json_response(body)

    async def _ready(self, request: Request) -> Response:
        body = self.readiness()
        status = 200 if body["status"] == "ready" else 503
        if not self.gate.sees_details(request.headers):
            body = {name: body[name] for name in ("status", "component", "reason")}
        return json_response(body, status=status)

    def readiness(self) -> dict[str, Any]:
        """The body of /ready, for whoever may see all of it."""
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
    await last_word(stream, form.event(error, request.id, request.connection.last_part))
    return stream
