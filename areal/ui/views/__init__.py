"""The registry of views. Each is one module with ``read``, and ``marks`` where it can tell cheaply what changed.

``read(view)`` returns a JSON-able dict; it raises what a command would raise. ``marks(view)`` maps names to cursors
(the size of a file in bytes, or a text): the page reads again when one differs. It is asked once a second, and only
stats. Both may be called by several threads at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from areal.ui.context import ViewContext

VIEWS = ("alerts", "chat", "compare", "home", "job", "logs", "object", "plan", "step", "top", "weights")

Marks = Mapping[str, int | str]


class Reader(NamedTuple):
    read: Callable[[ViewContext], dict[str, Any]]
    marks: Callable[[ViewContext], Marks]


def reader_of(name: str) -> Reader | None:
    """The functions of a view; None for a name that no view has."""
    if name not in VIEWS:
        return None
    module = importlib.import_module(f"areal.ui.views.{name}")
    return Reader(module.read, getattr(module, "marks", lambda view: {}))
