"""What a reward's process is asked to do: ``--reward`` names user code, called with those keywords that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from areal.collect.loading import call_with, load_named
from areal.errors import ArealError


def scorer(spec: str) -> Callable[[Mapping[str, Any]], Any]:
    """``module:function`` or ``path/to/file.py:function``, as a function of all fields. Raises ArealError."""
    function = load_named(spec, "--reward")

    def scored(given: Mapping[str, Any]) -> Any:
        return call_with(function, given=given)

    return scored


def takes(spec: str) -> dict[str, Any]:
    """The names of the function's parameters, or why it cannot be had: ``error`` and ``hint``."""
    try:
        function = load_named(spec, "--reward")
    except ArealError as error:
        return {"error": error.message, "hint": error.hint}
    try:
        return {"takes": list(inspect.signature(function).parameters)}
    except (TypeError, ValueError):  # a builtin
        return {"takes": []}
