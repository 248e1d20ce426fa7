"""User code by name: ``module:attribute`` or ``path/to/file.py:attribute``, and what of it can be called with what.

The current folder is on the import path, as for ``python script.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from areal.errors import ArealError, NotFound, UsageFault


def load_named(text: str, flag: str) -> Any:
    """Raises UsageFault for what is no name, NotFound for what is not there, ArealError when its import fails."""
    place, colon, attribute = text.rpartition(":")
    if not colon and all(part.isidentifier() for part in text.split(".")) and not text.endswith(".py"):
        place, colon, attribute = text.rpartition(".")
    if not colon or not place or not attribute:
        raise UsageFault(f"{flag}: {text!r} names no code", hint="write module:function or path/to/file.py:function")
    module = _module(place, flag)
    found: Any = module
    for step in attribute.split("."):
        if not hasattr(found, step):
            from areal.resources.suggest import did_you_mean

            names = [name for name in vars(module) if not name.startswith("_")]
            raise NotFound(f"{flag}: {place} has no {attribute}{did_you_mean(attribute, names)}")
        found = getattr(found, step)
    if not callable(found):
        raise UsageFault(f"{flag}: {text} is {type(found).__name__}, and cannot be called")
    return found


def _module(place: str, flag: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return _from_file(Path(place), flag) if place.endswith(".py") else importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise NotFound(f"{flag}: no module {error.name!r}", hint=f"it is looked for in {here} and sys.path") from error
    except ArealError:
        raise
    except Exception as error:  # the boundary to user code: whatever its import raises is its failure
        import traceback

        raise ArealError(f"{flag}: importing {place} failed: {error!r}", detail=traceback.format_exc()) from error


def _from_file(path: Path, flag: str) -> Any:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise NotFound(f"{flag}: there is no file {path}")
    name = f"areal_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def call_with(function: Callable[..., Any], *positional: Any, given: Mapping[str, Any]) -> Any:
    """Call with those of ``given`` that it takes. Raises TypeError for one that it needs and nobody has."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return function(*positional)
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        first = [each.name for each in parameters][: len(positional)]
        return function(*positional, **{name: value for name, value in given.items() if name not in first})
    named = {each.name for each in list(parameters)[len(positional) :] if each.kind not in _UNNAMED}
    return function(*positional, **{name: value for name, value in given.items() if name in named})


_UNNAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
