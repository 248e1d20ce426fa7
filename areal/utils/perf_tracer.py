"""AReaL's import path of the tracer. The duration of a scope or phase in seconds is recorded as the metric
``timeperf/NAME`` of the episode or of the driver in ``metrics.jsonl``. There is no trace file."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import Enum
from typing import Any, TypeVar

from areal.api import stats, workflow_context

F = TypeVar("F", bound=Callable[..., Any])
_log = logging.getLogger(__name__)


class Category(Enum):
    """Categories of scopes. They are accepted and have no effect."""

    COMPUTE = "compute"
    COMM = "comm"
    IO = "io"
    SYNC = "sync"
    SCHEDULER = "scheduler"
    INSTR = "instr"
    MISC = "misc"


@contextmanager
def trace_scope(name: str, category: Category | str | None = None, args: Any = None, **_: Any) -> Iterator[None]:
    """Record the duration of the block in seconds."""
    tracker = stats.get(workflow_context.stat_scope() if workflow_context.get().task_id is not None else "")
    with tracker.record_timing(name):
        yield


@asynccontextmanager
async def atrace_scope(
    name: str, category: Category | str | None = None, args: Any = None, **_: Any
) -> AsyncIterator[None]:
    """Return ``trace_scope`` for ``async with``."""
    with trace_scope(name):
        yield


trace_session_phase = trace_scope
atrace_session_phase = atrace_scope


def trace_perf(name: str, category: Category | str | None = None, **_: Any) -> Callable[[F], F]:
    """Return a decorator of a function or coroutine function that records the duration of each call in seconds."""

    def wrap(function: F) -> F:
        if inspect.iscoroutinefunction(function):
            return atrace_scope(name)(function)
        return trace_scope(name)(function)

    return wrap


trace_session = trace_perf


def session_context(*_: Any, **__: Any) -> Callable[[F], F]:
    """Return a decorator without effect: an episode already is a session."""
    return lambda function: function


def trace_session_event(name: str, *args: Any, **details: Any) -> None:
    """Write a line to the debug log."""
    _log.debug("%s %s", name, details or args or "")


def instant(name: str, *args: Any, **details: Any) -> None:
    """Write a line to the debug log."""
    trace_session_event(name, *args, **details)


def initialize(*_: Any, **__: Any) -> None:
    """Do nothing: the trainer writes ``metrics.jsonl``."""


save = initialize


__all__ = [
    "Category",
    "atrace_scope",
    "atrace_session_phase",
    "initialize",
    "instant",
    "save",
    "session_context",
    "trace_perf",
    "trace_scope",
    "trace_session",
    "trace_session_event",
    "trace_session_phase",
]
