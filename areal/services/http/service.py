"""One service process: routes with their access, probes, errors and request ids, as the server's application.

Every request passes ``answer`` once. It finds the route, checks the key, and sends errors in the API's format: as the
response if none has begun, otherwise as the last event of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar
from urllib.parse import unquote

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from areal.dataclasses import dataclass, field
from areal.files import size_of
from areal.http import tracing
from areal.http.events import LONGEST_EVENT
from areal.http.headers import IGNORED
from areal.services.http.auth import Access, AdminKey, Authenticator
from areal.services.http.errors import ApiError, bad_request, error_format
from areal.services.http.messages import AnyResponse, Request, Response, StreamingResponse, error_response

if TYPE_CHECKING:
    from areal.http.client import HttpReply

# Prometheus metrics. A scrape of relay processes that share a port reaches only one of them. If their supervisor sets
# ``PROMETHEUS_MULTIPROC_DIR``, ``exposition`` sums over all of them.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
OVERHEAD_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1)


class _MultiprocessMetrics(Collector):
    """The metrics that all processes have written to ``folder``. The file of a starting process may be empty."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        written = [str(file) for file in self._folder.glob("*.db") if size_of(file)]
        return MultiProcessCollector.merge(written)  # type: ignore[no-untyped-call]


class RouteMetrics:
    """The metrics of one route, with their labels resolved."""

    def __init__(self, metrics: Metrics, route: str) -> None:
        self._requests = metrics.requests
        self._route = route
        self._seconds = metrics.seconds.labels(route)
        self._in_flight = metrics.in_flight
        self._by_status: dict[int, Counter] = {}

    def began(self) -> None:
        self._in_flight.inc()

    def ended(self, status: int, seconds: float) -> None:
        self._in_flight.dec()
        counter = self._by_status.get(status)
        if counter is None:
            counter = self._by_status[status] = self._requests.labels(self._route, str(status))
        counter.inc()
        self._seconds.observe(seconds)


class Metrics:
    """The registry of one process; every name begins with ``areal_``."""

    def __init__(self) -> None:
        self._shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        self._registry = CollectorRegistry()
        self.requests = self.counter("areal_http_requests_total", "Requests answered.", ("route", "status"))
        self.seconds = self.histogram("areal_http_request_seconds", "From the first byte in to the last byte out.")
        self.overhead = self.histogram(
            "areal_overhead_seconds", "This process's own time in a proxied request.", OVERHEAD_SECONDS
        )
        self.in_flight = self.gauge("areal_http_in_flight", "Model requests being answered now.")

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def gauge(
        self, name: str, text: str, labels: Sequence[str] = (), across: Literal["livesum", "livemax"] = "livesum"
    ) -> Gauge:
        """``across``: how the values of processes that share a port are combined."""
        return Gauge(name, text, labels, registry=self._registry, multiprocess_mode=across)

    def histogram(
        self, name: str, text: str, buckets: Sequence[float] = SECONDS, labels: Sequence[str] = ("route",)
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)

    def exposition(self) -> bytes:
        registry = self._registry
        if self._shared:
            registry = CollectorRegistry()
            registry.register(_MultiprocessMetrics(Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])))
        return generate_latest(registry)


class Lifetime:
    """Whether a process is starting, ready or draining. ``not_ready`` is called at each probe and returns the reason,
    or None when the process can serve. ``news`` is set when the answer to a probe may have changed."""

    def __init__(self, not_ready: Callable[[], str | None]) -> None:
        self._not_ready = not_ready
        self._draining = asyncio.Event()
        self.news = asyncio.Event()
        self.in_flight = 0

    @property
    def draining(self) -> bool:
        return self._draining.is_set()

    def drain(self) -> None:
        """Become not ready for good. Handlers of endless streams wait for this with ``wait_draining`` and end the
        streams."""
        self._draining.set()
        self.news.set()

    async def wait_draining(self) -> None:
        await self._draining.wait()

    def state(self) -> tuple[str, str | None]:
        """Return ``ready``, ``not_ready`` or ``draining``, and the reason."""
        if self.draining:
            return "draining", "the process was asked to stop and finishes what it has"
        reason = self._not_ready()
        return ("ready", None) if reason is None else ("not_ready", reason)


_FINAL_WRITE_S = 5.0
_EVENT_ENDS = (b"\n\n", b"\n\r\n", b"\r\r", b"\n\r")


class EventCutter:
    """Cuts a stream of server-sent events between events, so that a source that fails leaves no partial event. ``held``
    is the incomplete event; pass it on if the source ended well."""

    def __init__(self) -> None:
        self.held = b""

    def push(self, part: bytes) -> bytes:
        """Return the whole events that may be passed on."""
        if not self.held and part.endswith(b"\n\n"):
            return part
        if self.held:
            part = self.held + part
        ends = (part.rfind(end) + len(end) for end in _EVENT_ENDS)
        end = max(ends)
        if end < 3:
            end = len(part) if len(part) > LONGEST_EVENT else 0
        self.held = part[end:]
        return part[:end] if self.held else part


# Routes. A path without parameters is looked up; patterns with parameters are tried in the order in which they were
# added. ``{name}`` matches one segment, a final ``{name...}`` the rest of the path. Parameters are decoded after the
# match, so that an encoded slash does not change it.

T = TypeVar("T")


@dataclass
class _Pattern(Generic[T]):
    segments: tuple[str, ...]
    methods: dict[str, T] = field(default_factory=dict)

    def match(self, path: str) -> dict[str, str] | None:
        rest = self.segments[-1].endswith("...}")
        given = path.split("/", len(self.segments) - 1 if rest else -1)
        if len(given) != len(self.segments):
            return None
        found: dict[str, str] = {}
        for wanted, segment in zip(self.segments, given, strict=True):
            if wanted.startswith("{"):
                if not segment:
                    return None
                found[wanted.strip("{.}")] = _unquote(segment)
            elif wanted != segment:
                return None
        return found


def _unquote(segment: str) -> str:
    """Raise 400 for bytes that are not UTF-8: replacing them would make different names equal."""
    try:
        return unquote(segment, errors="strict")
    except UnicodeDecodeError as error:
        raise bad_request("the path is not percent-encoded UTF-8", code="invalid_path") from error


class PathTable(Generic[T]):
    """Targets by method and path. HEAD is routed as GET."""

    def __init__(self) -> None:
        self._fixed: dict[str, dict[str, T]] = {}
        self._patterns: list[_Pattern[T]] = []

    def add(self, method: str, path: str, target: T) -> None:
        fixed = "{" not in path
        methods = self._fixed.setdefault(path, {}) if fixed else self._pattern(tuple(path.split("/"))).methods
        if method in methods:
            raise ValueError(f"{method} {path} is routed twice")
        methods[method] = target

    def _pattern(self, segments: tuple[str, ...]) -> _Pattern[T]:
        for pattern in self._patterns:
            if pattern.segments == segments:
                return pattern
        self._patterns.append(pattern := _Pattern[T](segments))
        return pattern

    def find(self, method: str, path: str) -> tuple[T, dict[str, str]]:
        """Return the target and the path's parameters. A path without this method may still match a pattern that has
        it. Raises 404, and 405 with the methods that the path has."""
        wanted, methods = "GET" if method == "HEAD" else method, self._fixed.get(path)
        if methods is not None and wanted in methods:
            return methods[wanted], {}
        for pattern in self._patterns:
            if (found := pattern.match(path)) is not None:
                if wanted in pattern.methods:
                    return pattern.methods[wanted], found
                methods = methods or pattern.methods
        if methods is None:
            raise ApiError(404, f"no such path: {method} {path}", code="unknown_path")
        allowed = sorted({*methods, *(("HEAD",) if "GET" in methods else ())})
        message = f"{method} is not allowed on {path}"
        raise ApiError(405, message, code="method_not_allowed", headers={"Allow": ", ".join(allowed)})


Handler = Callable[[Request], Awaitable[AnyResponse]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Route:
    """A route. ``metrics``: only for model requests."""

    path: str
    handler: Handler
    access: Access
    metrics: RouteMetrics | None


class Service:
    """A component's routes, probes, metrics and lifespans; ``serve`` runs it.

    ``not_ready`` returns the reason why the component cannot serve now, or None. ``details`` adds fields such as load
    and version to /health and /ready, where the router reads them.
    """

    def __init__(
        self,
        component: str,
        *,
        key: AdminKey | None,
        loopback: bool,
        not_ready: Callable[[], str | None] = lambda: None,
        details: Callable[[], dict[str, object]] = dict,
    ) -> None:
        self.component = component
        self.address: str | None = None  # once it listens
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
        metrics = RouteMetrics(self.metrics, path) if counted else None
        self._routes.add(method, path, _Route(path, handler, access, metrics))

    def add_lifespan(self, lifespan: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        """Add a context that lasts as long as the service: entered before it listens, left when it has drained."""
        self._lifespans.append(lifespan)

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for lifespan in self._lifespans:
                await stack.enter_async_context(lifespan())
            yield

    async def answer(self, request: Request) -> AnyResponse:
        """Answer a request. Raises only CancelledError, and ConnectionResetError if the caller disconnected during the
        answer."""
        try:
            form = error_format(request.path)
            request.id_headers = form.id_headers
            route, request.match_info = self._routes.find(request.method, request.path)
            request.by_admin = self.authenticator.check(request.headers, route.access)
            if b"traceparent" in request.headers.raw or (route.metrics is not None and tracing.is_on()):
                return await self._answer_traced(route, request)
            if route.metrics is None:
                return await route.handler(request)
            return await self._answer_counted(route.handler, route.metrics, request)
        except ApiError as error:
            if error.status >= 500:
                _log.warning("%s %s: %d %s [%s]", request.method, request.path, error.status, error, request.id)
            return await _error_answer(request, error)
        except ConnectionResetError:
            raise
        except Exception:  # noqa: BLE001 - the process boundary: the log gets the detail, the caller an id
            _log.exception("%s %s failed [%s]", request.method, request.path, request.id)
            return await _error_answer(request, ApiError(500, "internal error", code="internal_error"))

    async def _answer_traced(self, route: _Route, request: Request) -> AnyResponse:
        with tracing.serving(request.method, route.path, request.headers) as span:
            if route.metrics is None:
                response = await route.handler(request)
            else:
                response = await self._answer_counted(route.handler, route.metrics, request)
            span.set({"http.response.status_code": response.status})
        return response

    async def _answer_counted(self, handler: Handler, metrics: RouteMetrics, request: Request) -> AnyResponse:
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
        body: dict[str, object] = {"status": "ok", "component": self.component}
        if self.authenticator.sees_details(request.headers):
            body |= {"pid": os.getpid(), **self._details(), "in_flight": self.lifetime.in_flight}
        return json_response(body)

    async def _ready(self, request: Request) -> Response:
        body = self.readiness()
        status = 200 if body["status"] == "ready" else 503
        if not self.authenticator.sees_details(request.headers):
            body = {name: body[name] for name in ("status", "component", "reason")}
        return json_response(body, status=status)

    def readiness(self) -> dict[str, object]:
        """Return the body of /ready for callers that may see details."""
        state, reason = self.lifetime.state()
        body: dict[str, object] = {"status": state, "component": self.component, "reason": reason, "pid": os.getpid()}
        return {**body, "in_flight": self.lifetime.in_flight, **self._details()}

    async def _metrics(self, request: Request) -> Response:
        return Response(body=self.metrics.exposition(), content_type=CONTENT_TYPE)


def json_response(data: object, *, status: int = 200, more_headers: dict[str, str] | None = None) -> Response:
    return Response(status, orjson.dumps(data), content_type="application/json", headers=more_headers)


def to_response(reply: HttpReply) -> Response:
    """Return another component's answer as the answer to our caller."""
    again = {name: reply.headers[name] for name in ("Retry-After", IGNORED) if name in reply.headers}
    kind = reply.headers.get("Content-Type", "application/json")
    return Response(reply.status, reply.body, content_type=kind, headers=again)


async def _error_answer(request: Request, error: ApiError) -> AnyResponse:
    """Return the error as a response if none has begun, otherwise as the last event of the event stream. Any other
    response that has begun can only be broken off."""
    form = error_format(request.path)
    stream: StreamingResponse | None = request.stream
    if stream is None and not request.answered:
        return error_response(error, form, request.id)
    if stream is None or not stream.is_events:
        raise ConnectionResetError("the answer had begun")
    with contextlib.suppress(ConnectionResetError, TimeoutError):  # the caller is gone, or does not read
        async with asyncio.timeout(_FINAL_WRITE_S):
            await stream.write(form.event(error, request.id, request.connection.last_part))
    return stream
