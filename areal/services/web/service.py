"""One service process as an aiohttp application: routes with their access, probes, errors and request ids.

Every request passes ``_boundary`` once: it names the request and turns errors into the API's object, beside a status
where none is sent yet, else as the last event of the stream.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from areal.services.web import headers
from areal.services.web.access import Access, Gatekeeper
from areal.services.web.error_forms import error_form
from areal.services.web.errors import ApiError, from_http_exception
from areal.services.web.ids import unique_id
from areal.services.web.keys import AdminKey
from areal.services.web.lifetime import Lifetime
from areal.services.web.metrics import CONTENT_TYPE, Metrics
from areal.services.web.streaming import last_word

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
_STREAM: web.RequestKey[web.StreamResponse] = web.RequestKey("stream", web.StreamResponse)

_log = logging.getLogger(__name__)
_GIVEN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Service:
    """A component under construction: add routes, then hand ``app`` to ``serve``.

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
        self.gate = Gatekeeper(key, loopback=loopback)
        self.lifetime = Lifetime(not_ready)
        self.metrics = Metrics()
        self._details = details
        self.app = web.Application(middlewares=[self._boundary], client_max_size=0)
        self.app.on_response_prepare.append(_on_prepare)
        self.route("GET", "/health", self._health, Access.PROBE)
        self.route("GET", "/ready", self._ready, Access.PROBE)
        self.route("GET", "/metrics", self._metrics, Access.PROBE)

    def route(self, method: str, path: str, handler: Handler, access: Access) -> None:
        if access in (Access.CALLER, Access.SESSION):
            handler = self._counted(path, handler)

        async def guarded(request: web.Request) -> web.StreamResponse:
            self.gate.check(request.headers, access)
            return await handler(request)

        self.app.router.add_route(method, path, guarded)

    def _counted(self, path: str, handler: Handler) -> Handler:
        """Count a model request: in flight now, how long it took, how it ended."""
        metrics, lifetime = self.metrics, self.lifetime
        seconds = metrics.seconds.labels(path)

        async def counted(request: web.Request) -> web.StreamResponse:
            started = time.perf_counter()
            status = "499"  # the caller went away, as nginx writes it
            lifetime.in_flight += 1
            metrics.in_flight.inc()
            try:
                response = await handler(request)
                status = str(response.status)
                return response
            except ApiError as error:
                status = str(error.status)
                raise
            except Exception:
                status = "500"
                raise
            finally:
                lifetime.in_flight -= 1
                metrics.in_flight.dec()
                metrics.requests.labels(path, status).inc()
                seconds.observe(time.perf_counter() - started)

        return counted

    @web.middleware
    async def _boundary(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get(headers.REQUEST_ID, "")
        request_id = given if _GIVEN_ID.fullmatch(given) else unique_id("req_")
        request[REQUEST_ID] = request_id
        try:
            return await handler(request)
        except ApiError as error:
            if error.status >= 500:
                _log.warning("%s %s: %d %s [%s]", request.method, request.path, error.status, error, request_id)
            return await _failure(request, error)
        except web.HTTPException as error:
            return await _failure(request, from_http_exception(error, request))
        except ConnectionResetError:  # the caller went away while we wrote
            raise
        except Exception:  # noqa: BLE001 - the process boundary: the log gets the detail, the caller an id
            _log.exception("%s %s failed [%s]", request.method, request.path, request_id)
            return await _failure(request, ApiError(500, "internal error", code="internal_error"))

    async def _health(self, request: web.Request) -> web.Response:
        body = {"status": "ok", "component": self.component, "pid": os.getpid(), **self._details()}
        return json_response({**body, "in_flight": self.lifetime.in_flight})

    async def _ready(self, request: web.Request) -> web.Response:
        state, reason = self.lifetime.state()
        body = {"status": state, "component": self.component, "in_flight": self.lifetime.in_flight, "reason": reason}
        return json_response({**body, **self._details()}, status=200 if state == "ready" else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


def json_response(data: object, *, status: int = 200, more_headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(data), content_type="application/json", headers=more_headers)


async def _failure(request: web.Request, error: ApiError) -> web.StreamResponse:
    """The error as a status where none is sent yet, else as the last event of the stream."""
    form = error_form(request.path)
    stream: web.StreamResponse | None = request.get(_STREAM)
    if stream is None:
        return form.response(error, request[REQUEST_ID])
    await last_word(stream, form.event(error, request[REQUEST_ID]))
    return stream


async def _on_prepare(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.pop("Server", None)  # versions are nobody's business
    if response.content_type == "text/event-stream":
        request[_STREAM] = response
    if headers.REQUEST_ID not in response.headers and (request_id := request.get(REQUEST_ID)) is not None:
        for name in error_form(request.path).id_headers:
            response.headers[name] = request_id
