"""Traces: W3C trace context through every hop, and spans by OpenTelemetry where its environment variables ask for them.

The ``traceparent`` and ``tracestate`` of a request go with every call that is made while the request is answered, also
by a process that exports no spans. A process exports spans once ``start`` has found an exporter; before that
``opentelemetry`` is not imported, and ``span`` returns an object that does nothing. Parents follow the context of
tasks (``contextvars``), and OpenTelemetry's own context is kept the same, so that spans of instrumented libraries
belong to the same trace. https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar, Token
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, Self

_log = logging.getLogger(__name__)
_FIELDS = r"-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
_LATER = rf"(?!00|ff)[0-9a-f]{{2}}{_FIELDS}(?:-[!-~]{{0,200}})?"  # later versions may have more fields
_VALID = re.compile(rf"00{_FIELDS}|{_LATER}")
_MEMBER = re.compile("[ -<>-~]+=[ -~]+")
_MEMBERS, _STATE_LENGTH = 32, 512  # of a tracestate: the most it may have, and the least characters to pass on
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_DEFAULT_PROPAGATORS = "tracecontext,baggage"
_FLUSH_S = 2.0  # at the end of a process, whose collector may be unreachable

Attributes = Mapping[str, object]
Kind = Literal["internal", "server", "client"]

_lines: ContextVar[bytes] = ContextVar("areal_trace_context", default=b"")
_tracer: Any = None  # opentelemetry.trace.Tracer, once spans are exported
_service: Any = None  # areal.http.spans.ServiceSpans, where moreover no user's code runs
_ends: list[Callable[[], None]] = []  # what exports the last spans


def is_on() -> bool:
    return _tracer is not None


def header_lines() -> bytes:
    """Return the header lines of the current trace context; empty if there is none."""
    return _lines.get()


def headers() -> dict[str, str]:
    """Return ``header_lines`` as names and values."""
    pairs = (line.split(": ", 1) for line in _lines.get().decode("utf-8", "replace").splitlines())
    return dict(pairs)


class Span:
    """A context in which nothing is recorded: what ``span`` returns where spans are not exported. ``is_recorded``:
    whether attributes that are set now will be exported."""

    is_recorded = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...

    def set(self, attributes: Attributes) -> None:
        """Add attributes; None is left out."""


_NOTHING = Span()


class _Passed(Span):
    """The caller's trace context, passed on unchanged."""

    def __init__(self, lines: bytes) -> None:
        self._given = lines

    def __enter__(self) -> Self:
        self._token = _lines.set(self._given)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _lines.reset(self._token)


class _Recorded(Span):
    """A span that is exported, as OpenTelemetry's SDK records it. An error raised in it sets its status; in a server's
    span, an HTTP error only from status 500."""

    def __init__(self, name: str, kind: Kind, parent: Any, attributes: Attributes) -> None:
        from opentelemetry.trace import SpanKind

        self._server = kind == "server"
        self._span = _tracer.start_span(name, parent, SpanKind[kind.upper()], _present(attributes))
        self.is_recorded = self._span.is_recording()

    def __enter__(self) -> Self:
        from opentelemetry import context, propagate, trace

        self._attached = context.attach(trace.set_span_in_context(self._span))
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        carrier["tracestate"] = _shortened(carrier.get("tracestate", ""))
        lines = "".join(f"{name}: {value}\r\n" for name, value in carrier.items() if value)
        self._token: Token[bytes] = _lines.set(lines.encode())
        return self

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(_present(attributes))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        from opentelemetry import context
        from opentelemetry.trace import StatusCode

        _lines.reset(self._token)
        context.detach(self._attached)
        about, fault = _described(error, server=self._server)
        self._span.set_attributes(about)
        if fault is not None:
            self._span.set_status(StatusCode.ERROR, fault)
        self._span.end()


class _OfService(Span):
    """A span of a service that is exported."""

    def __init__(self, name: str, kind: Kind, above: bytes, attributes: Attributes) -> None:
        self._server = kind == "server"
        self._span = _service.begin(name, kind, above, _present(attributes))
        self.is_recorded = self._span.context.trace_flags.sampled

    def __enter__(self) -> Self:
        self._token = _lines.set(self._span.lines)
        return self

    def set(self, attributes: Attributes) -> None:
        self._span.attributes.update(_present(attributes))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _lines.reset(self._token)
        about, fault = _described(error, server=self._server)
        self._span.attributes.update(about)
        _service.end(self._span, fault)


def _described(error: BaseException | None, *, server: bool) -> tuple[dict[str, object], str | None]:
    """Return the attributes of the error that a span ends with, and its text if it sets the span's status."""
    if error is None:
        return {}, None
    status = getattr(error, "status", None)
    about: dict[str, object] = {}
    if server and isinstance(status, int):
        about["http.response.status_code"] = status
        if status < 500:
            return about, None
    return about | {"error.type": type(error).__name__}, str(error)[:500]


def _present(attributes: Attributes) -> dict[str, object]:
    return {name: value for name, value in attributes.items() if value is not None}


def span(name: str, attributes: Attributes | None = None, kind: Kind = "internal", *, root: bool = False) -> Span:
    """Return a new span, a child of the current one, to use in ``with``. ``root``: the first of a new trace."""
    if _service is not None:
        return _OfService(name, kind, b"" if root else _lines.get(), attributes or {})
    if _tracer is None:
        return _NOTHING
    from opentelemetry.context import Context

    return _Recorded(name, kind, Context() if root else None, attributes or {})


def serving(method: str, route: str, headers: Mapping[str, str]) -> Span:
    """Return the server span of a request, a child of the caller's span."""
    about = {"http.request.method": method, "http.route": route}
    if _tracer is not None and (_service is None or "baggage" in headers):
        from opentelemetry import propagate

        names = propagate.get_global_textmap().fields
        carrier = {name: value for name in names if (value := headers.get(name, "")).isascii()}
        if state := carrier.get("tracestate"):  # the SDK drops a state of more than 32 members
            carrier["tracestate"] = _shortened(state)
        return _Recorded(f"{method} {route}", "server", propagate.extract(carrier), about)
    given, lines = headers.get("traceparent", ""), b""
    if _VALID.fullmatch(given):
        state = _shortened(headers.get("tracestate", ""))
        lines = (f"traceparent: {given}\r\n" + (f"tracestate: {state}\r\n" if state else "")).encode()
    if _service is not None:
        return _OfService(f"{method} {route}", "server", lines, about)
    return _Passed(lines) if lines else _NOTHING


def _shortened(state: str) -> str:
    """Return the first members of a ``tracestate`` that are within the limits; empty if one of them is no member: a
    server that is called may refuse a request for its headers."""
    members = [each.strip() for each in state.split(",", _MEMBERS)[:_MEMBERS]]
    members = [each for each in members if each]
    if not all(map(_MEMBER.fullmatch, members)):
        return ""
    while len(state := ",".join(members)) > _STATE_LENGTH:
        members.pop()
    return state


def here() -> Any:
    """Return the current span, for ``record_step``; None if it is not exported."""
    if _tracer is None:
        return None
    from opentelemetry import trace

    return trace.get_current_span()


def record_step(name: str, rollouts: Iterable[Any], started_s: float, attributes: Attributes) -> None:
    """Record a step that began at ``started_s`` (Unix time) and ends now: a separate trace that links to the spans
    ``rollouts``, and in the trace of each of them a span that links back."""
    if _tracer is None:
        return
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, set_span_in_context

    spans, start = [each for each in rollouts if each is not None], int(started_s * 1e9)
    links = [Link(each.get_span_context()) for each in spans]
    step = _tracer.start_span(name, Context(), links=links, start_time=start, attributes=_present(attributes))
    back = [Link(step.get_span_context())]
    for each in spans:
        parent = set_span_in_context(each, Context())
        _tracer.start_span(name, parent, links=back, start_time=start, attributes=_present(attributes)).end()
    step.end()


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Return whether OpenTelemetry's environment variables ask for spans."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    return exporter != "none" and bool(exporter or any(environ.get(name) for name in _ENDPOINTS))


def start(component: str, *, own_code: bool = False) -> None:
    """Export this process's spans from now on, where the environment asks for it. ``own_code``: user code runs in
    this process, and its calls through httpx carry the trace context too. An error of the
    setup is logged, and the process continues without spans."""
    global _tracer, _service
    if _tracer is not None or not is_wanted(os.environ):
        return
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from areal.http.spans import ServiceSpans, SpanResource

        exporter = _exporter(os.environ)
        about = Resource.create(_resource(component, os.environ))
        provider = TracerProvider(resource=SpanResource(about.attributes, about.schema_url), shutdown_on_exit=False)
        processor = BatchSpanProcessor(exporter)
        provider.add_span_processor(processor)
        if own_code:
            _instrument_clients(provider)
        elif os.environ.get("OTEL_PROPAGATORS", _DEFAULT_PROPAGATORS) == _DEFAULT_PROPAGATORS:
            _service = ServiceSpans(provider, processor)
    except ImportError as error:
        _log.warning("no spans are exported: %s is not installed; the extra otel has it", error.name)
        return
    except ValueError as error:
        _log.warning("no spans are exported: %s", error)
        return
    trace.set_tracer_provider(provider)
    _ends.append(partial(_end, provider, _limiter(exporter)))
    atexit.register(end)
    _tracer = provider.get_tracer("areal")
    _log.info("spans of areal-%s are exported", component)


def _limiter(exporter: Any) -> threading.Event:
    """Return an event that, once set, ends the exporter after ``_FLUSH_S``: otherwise an unreachable collector would
    delay the end of the process for as long as the exporter retries."""
    ending = threading.Event()

    def limit() -> None:
        ending.wait()
        time.sleep(_FLUSH_S)
        exporter.shutdown()

    threading.Thread(target=limit, name="trace-flush", daemon=True).start()  # a process that ends starts no threads
    return ending


def end() -> None:
    """Export the last spans. A process that ends by ``os._exit``, which skips ``atexit``, calls it before."""
    while _ends:
        _ends.pop()()


def _end(provider: Any, ending: threading.Event) -> None:
    ending.set()
    provider.force_flush()
    provider.shutdown()


def _instrument_clients(provider: Any) -> None:
    """Instrument httpx, so that SDKs such as OpenAI's and Anthropic's send the current trace context."""
    for library, name in (("httpx", "HTTPXClientInstrumentor"), ("httpx2", "HTTPX2ClientInstrumentor")):
        if find_spec(library):
            from opentelemetry.instrumentation import httpx

            if (instrumentor := getattr(httpx, name, None)) is not None:
                instrumentor().instrument(tracer_provider=provider)


def _resource(component: str, environ: Mapping[str, str]) -> dict[str, Any]:
    about = {"service.namespace": "areal", "areal.component": component, "process.pid": os.getpid()}
    if owner := environ.get("AREAL_OWNER"):
        about["areal.object"] = owner
    if "OTEL_SERVICE_NAME" in environ or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        return about
    return {**about, "service.name": f"areal-{component}"}


def _exporter(environ: Mapping[str, str]) -> Any:
    """Return the exporter that the environment names. Raises ImportError, and ValueError for an unsupported setting."""
    kind = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if kind == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    if kind != "otlp":
        raise ValueError(f"OTEL_TRACES_EXPORTER is {kind}, and only otlp, console and none are supported")
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}, and only http/protobuf is supported")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()
