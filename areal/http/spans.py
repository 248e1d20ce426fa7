"""The spans of a service, in which no user's code runs: recorded without OpenTelemetry's span, context and propagators,
which take three times as long. The SDK samples them, and exports them as its own.

The parent of a span is read from the header lines that go with calls (``traceparent``, then others). Imported only by a
process that exports spans.
"""

from __future__ import annotations

import time
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

_KINDS = {kind.name.lower(): kind for kind in SpanKind}
_PARENT, _STATE = b"traceparent: ", b"tracestate: "
_RANDOM = 2  # of the flags: the trace id is random
_NO_STATE, _OK = TraceState(), Status()


class SpanResource(Resource):
    """A resource that is hashed by its identity: the exporter hashes it for each span, by its JSON."""

    __hash__ = object.__hash__


class ServiceSpan:
    """A span that has begun. ``lines``: the header lines of calls that are made in it. ``attributes`` may be added to
    until its end."""

    __slots__ = ("attributes", "context", "kind", "lines", "name", "parent", "started_ns")

    def __init__(
        self, name: str, kind: SpanKind, parent: SpanContext | None, context: SpanContext, attributes: dict[str, Any]
    ) -> None:
        self.name, self.kind, self.parent, self.context, self.attributes = name, kind, parent, context, attributes
        self.started_ns = time.time_ns()
        self.lines = b"%b00-%032x-%016x-%02x\r\n" % (_PARENT, context.trace_id, context.span_id, context.trace_flags)


class ServiceSpans:
    """Begins and ends the spans of a process."""

    def __init__(self, provider: TracerProvider, processor: SpanProcessor) -> None:
        self._provider, self._processor = provider, processor
        self._scope = InstrumentationScope("areal")

    def begin(self, name: str, kind: str, above: bytes, attributes: dict[str, Any]) -> ServiceSpan:
        """Begin a span. ``above``: the header lines of the parent; without a ``traceparent``, the span is the first of
        its trace."""
        first, _, others = above.partition(b"\r\n")
        is_child = first.startswith(_PARENT)
        parent = _context(first, others, is_remote=kind == "server") if is_child else None
        ids, spans, around = self._provider.id_generator, _KINDS[kind], Context()
        if parent is None:
            trace_id, flags = ids.generate_trace_id(), 0
        else:
            trace_id, flags = parent.trace_id, parent.trace_flags & _RANDOM
            around = set_span_in_context(NonRecordingSpan(parent), around)
        sampled = self._provider.sampler.should_sample(around, trace_id, name, spans, attributes, ())
        flags = TraceFlags(flags | (sampled.decision is Decision.RECORD_AND_SAMPLE))
        state = _NO_STATE if sampled.trace_state is None else sampled.trace_state
        context = SpanContext(trace_id, ids.generate_span_id(), is_remote=False, trace_flags=flags, trace_state=state)
        span = ServiceSpan(name, spans, parent, context, dict(sampled.attributes or attributes))
        span.lines += others if is_child else above
        return span

    def end(self, span: ServiceSpan, fault: str | None) -> None:
        """End the span. ``fault``: the text of its error, or None."""
        if span.context.trace_flags.sampled:
            self._processor.on_end(
                ReadableSpan(
                    span.name,
                    span.context,
                    span.parent,
                    self._provider.resource,
                    span.attributes,
                    kind=span.kind,
                    status=_OK if fault is None else Status(StatusCode.ERROR, fault),
                    start_time=span.started_ns,
                    end_time=time.time_ns(),
                    instrumentation_scope=self._scope,
                )
            )


def _context(parent: bytes, others: bytes, *, is_remote: bool) -> SpanContext:
    """Return the context of valid header lines."""
    _, trace_id, span_id, flags = parent[len(_PARENT) :].split(b"-", 4)[:4]
    state = _NO_STATE
    if others.startswith(_STATE):
        state = TraceState.from_header([others.partition(b"\r\n")[0][len(_STATE) :].decode()])
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, TraceFlags(int(flags, 16)), state)
