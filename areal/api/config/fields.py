"""Fields of configuration dataclasses: their marks, and the conversion from plain data, with all its faults.

``Annotated[float, Range(0, 1)]`` bounds a number. The bounds are checked for configurations from files and from code;
no field accepts NaN or infinity. AReaL's drivers and YAML files set fields that are not supported here, or that have no
effect. None of them is ignored silently: a ``NotSupported`` field with a value other than its default is an error, and
a ``NoEffect`` field causes a warning.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from pathlib import Path as FilePath
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from areal.errors import FieldError, did_you_mean
from areal.resources.tree import FieldPath, merge_values
from areal.wire.fields import BAD, Faults, Range, Reader, default_of, hints_of

POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(0)
COUNT = Range(1)
SHARE = Range(0, 1)
PORT = Range(0, 65535)


@cache
def ranges_of(cls: type) -> dict[str, Range | None]:
    """Return the ranges of the numeric fields; None for a field without bounds."""
    found: dict[str, Range | None] = {}
    for name, hint in hints_of(cls).items():
        marks = hint.__metadata__ if get_origin(hint) is Annotated else ()
        kind = hint.__origin__ if marks else hint
        if {int, float} & {kind, *get_args(kind)} and get_origin(kind) in (None, Union, types.UnionType):
            found[name] = next((mark for mark in marks if isinstance(mark, Range)), None)
    return found


def check_numbers(config: Any) -> None:
    """Check the ranges of all numeric fields. Raises FieldError."""
    for name, allowed in ranges_of(type(config)).items():  # type: ignore[arg-type]  # a class is hashable
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            raise FieldError(name, f"must be a finite number, not {value}")
        if allowed is not None and not allowed.has(value):
            raise FieldError(name, f"{allowed}, not {value}")


@dataclass(frozen=True)
class NotSupported:
    """A field that is not supported. ``why`` completes "FIELD is not supported: "."""

    why: str


@dataclass(frozen=True)
class NoEffect:
    """A field that is accepted without effect. ``why`` completes "FIELD has no effect: "."""

    why: str


PLACEMENT = NoEffect("processes are placed by the resources (areal apply), not by the driver")
"""Mark of scheduling fields: manifests place processes."""

ADAPTER = NoEffect("the adapter that is trained is served as the model's weights, under the model's own name")
"""Mark of the adapter's name in the engine."""


# Conversion of plain values to configuration dataclasses. A YAML scalar of another type is a fault, except that
# ``float`` accepts whole numbers and strings like ``1e-5``, ``int`` accepts floats like ``1.0``, and ``str`` accepts
# numbers.

T = TypeVar("T")


def build(cls: type[T], values: Mapping[str, object], faults: Faults, path: FieldPath = ()) -> T | None:
    """Return a ``cls`` from plain values; None, with faults added, if a value under ``path`` is invalid."""
    hints = hints_of(cls)  # type: ignore[arg-type]  # a class is hashable, whatever its instances are
    before = len(faults.found)
    given: dict[str, Any] = {}
    preset = _preset(cls, values, faults, path)
    for key, value in (merge_values(preset, values) if preset else values).items():
        if key == "preset" and preset is not None:
            continue
        if key not in hints:
            faults.add((*path, key), f"there is no such key{did_you_mean(str(key), hints)}")
            continue
        converted = _YAML.convert(hints[key], value, faults, (*path, key))
        if converted is not BAD:
            given[key] = converted
            _marked(cls, key, hints[key], converted, faults, (*path, key))
    for key in getattr(cls, "required", ()) if not path else ():
        if not given.get(key):
            faults.add((*path, key), "is needed")
    for each in dataclasses.fields(cls):  # type: ignore[arg-type]
        needed = each.init and each.default is MISSING and each.default_factory is MISSING
        if needed and each.name not in values:
            faults.add((*path, each.name), "is needed")
    if len(faults.found) > before:
        return None
    try:
        built = cls(**given)
        if preset:
            built.preset = values["preset"]  # type: ignore[attr-defined]
        return built
    except FieldError as error:
        keys = [tuple(each.split(".")) for each in (error.field, *error.others)]
        place = next((key for key in keys if key[0] in values), ())
        faults.add((*path, *place), error.problem if place == keys[0] else str(error))
    except (ValueError, TypeError, AssertionError) as error:  # raised by the checks of a driver's own class
        faults.add(path, str(error))
    return None


def _preset(cls: type, values: Mapping[str, object], faults: Faults, path: FieldPath) -> Mapping[str, object] | None:
    """Return the values of the named preset; None if the class has no presets."""
    presets: Mapping[str, Mapping[str, object]] | None = getattr(cls, "presets", None)
    if presets is None:
        return None
    name = str(values.get("preset") or "")
    if name and name not in presets:
        faults.add((*path, "preset"), f"must be one of {', '.join(presets)}, not {name!r}{did_you_mean(name, presets)}")
    return presets.get(name, {})


def _marked(cls: Any, key: str, hint: Any, value: Any, faults: Faults, path: FieldPath) -> None:
    if get_origin(hint) is not Annotated or value == default_of(cls.__dataclass_fields__[key]):
        return
    for mark in hint.__metadata__:
        if isinstance(mark, NotSupported):
            faults.add(path, f"is not supported: {mark.why}")
        elif isinstance(mark, NoEffect):
            faults.ineffective.append((path, mark.why))


def _whole(value: Any) -> Any:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole and not isinstance(value, bool) else BAD


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return BAD
    try:
        number = float(value)
    except ValueError:
        return BAD
    return number if math.isfinite(number) or not isinstance(value, str) else BAD


def _text(value: Any) -> Any:
    """Return a string, also from a number: a trial may be named 1."""
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else BAD


_YAML = Reader(
    {
        int: ("a whole number", _whole),
        float: ("a number", _number),
        bool: ("true or false", lambda value: value if isinstance(value, bool) else BAD),
        str: ("text", _text),
        FilePath: ("a path", lambda value: FilePath(value) if isinstance(value, str | FilePath) else BAD),
    },
    build,
    "a map",
    "which no configuration file can say",
)
