"""The registry of views. Each is one module with ``read``, and ``marks`` where it can tell cheaply what changed.

``read(view)`` returns a JSON-able dict, or yields the parts of an answer that comes in parts; it raises what a command
would raise. ``marks(view)`` maps names to cursors (the size of a file in bytes, or a text): the page reads again when
one differs. It is asked once a second, and only stats. Both may be called by several threads at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from areal.errors import NotFound, UsageFault
from areal.ui.context import ViewContext

_OF_GATEWAYS = ("about", "alerts", "chat", "home", "sessions", "weights")  # also of a remote one
_OF_HOME = ("compare", "evaluations", "job", "logs", "object", "plan", "step", "top")
VIEWS = (*_OF_GATEWAYS, *_OF_HOME, "action")

Marks = Mapping[str, int | str]


class ViewReader(NamedTuple):
    read: Callable[[ViewContext], dict[str, object] | Iterator[dict[str, object]]]
    marks: Callable[[ViewContext], Marks]


def reader_of(name: str) -> ViewReader | None:
    """Return the functions of a view; None for a name that no view has."""
    if name not in VIEWS:
        return None
    module = importlib.import_module(f"areal.ui.views.{name}")
    return ViewReader(module.read, getattr(module, "marks", lambda view: {}))


def shown_by(view: ViewContext) -> tuple[str, ...]:
    """Return the views that this server has."""
    return (
        *_OF_GATEWAYS,
        *(_OF_HOME if view.remote is None else ()),
        *(("action",) if view.actions is not None else ()),
    )


def expect_reader(name: str, view: ViewContext) -> ViewReader:
    """Raise NotFound for a view that the server does not have, UsageFault for one that a gateway cannot serve."""
    reader = reader_of(name)
    if reader is None or (name == "action" and view.actions is None):
        raise NotFound(f"there is no view {name[:60]!r}")
    if name not in shown_by(view) and view.remote is not None:
        raise UsageFault(
            f"this view reads files of the machine that runs the processes, and {view.remote.client.url} serves none",
            hint="run `areal ui` there, or here with --context local",
        )
    return reader
