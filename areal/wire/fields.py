"""JSON objects as dataclasses and back: each field is checked against its annotation, an unknown one is refused.

An annotation is made of bool, int, float, str, None, Literal, unions of these, ``tuple[T, ...]``, ``Mapping[str, T]``
and dataclasses. An int is taken for a float; nothing else is converted. A field's metadata may bound its value:
``above`` (exclusive), ``least`` and ``most`` (inclusive), or ``valid``, a predicate, with the ``problem`` it names.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, field, fields, is_dataclass
from functools import cache
from reprlib import repr as short
from types import NoneType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from areal.errors import FieldError

T = TypeVar("T")
_TYPES: dict[type[Any], Mapping[str, Any]] = {}
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", NoneType: "null"}


def bounded(least: float, most: float, default: Any = MISSING) -> Any:
    return field(default=default, metadata={"least": least, "most": most})


def field_types(cls: type[Any]) -> Mapping[str, Any]:
    """The resolved annotation of each field."""
    if cls not in _TYPES:
        hints = get_type_hints(cls)
        _TYPES[cls] = {field.name: hints[field.name] for field in fields(cls)}
    return _TYPES[cls]


def default_of(field: Field[Any]) -> Any:
    """MISSING where the field is required."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def read_fields(cls: type[T], data: object, path: str = "", *, lenient: bool = False) -> T:
    """``data`` as an instance of the dataclass ``cls``; ``path`` is the object's own. ``lenient``: unknown fields are
    ignored, and null stands for a default, as in a request's body. Raises FieldError."""
    if not isinstance(data, Mapping):
        raise FieldError(path, "must be an object")
    prefix, kinds = f"{path}." if path else "", field_types(cls)
    if not lenient and (unknown := [name for name in data if name not in kinds]):
        raise FieldError(f"{prefix}{unknown[0]}", f"is not a known field: {', '.join(kinds)}")
    values = {}
    for name, each in cls.__dataclass_fields__.items():  # type: ignore[attr-defined]
        value = data.get(name, MISSING)
        if value is None and lenient and NoneType not in _taken_as_they_are(kinds[name]) and kinds[name] is not Any:
            value = MISSING
        if value is not MISSING:
            values[name] = _read(kinds[name], value, prefix + name)
            if each.metadata:
                _check_bounds(each, values[name], prefix + name)
        elif each.default is MISSING and each.default_factory is MISSING:
            raise FieldError(prefix + name, "is required", is_missing=True)
    return cls(**values)


def write_fields(value: Any) -> dict[str, Any]:
    """The object that ``read_fields`` reads, without the fields that have their default."""
    written = asdict(value)
    return {each.name: written[each.name] for each in fields(value) if getattr(value, each.name) != default_of(each)}


@cache
def _taken_as_they_are(kind: Any) -> frozenset[type[Any]]:
    """Types whose values are valid for ``kind`` as they are: nearly all of a request."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return frozenset().union(*map(_taken_as_they_are, arguments))
    if origin is Mapping:
        return frozenset((dict,)) if arguments[1] is Any else frozenset()
    return frozenset((kind,)) if kind in _NAMES and kind is not float else frozenset()


def _read(kind: Any, value: object, path: str) -> Any:
    if kind is Any or type(value) in _taken_as_they_are(kind):
        return value
    if _fits(kind, value):
        return _built(kind, value, path)
    raise FieldError(path, f"must be {_described(kind)}, not {short(value)}")


def _fits(kind: Any, value: object) -> bool:
    """Whether ``value`` is of the kind, its items apart."""
    origin = get_origin(kind)
    if kind is Any:
        return True
    if origin is Literal:
        return value in get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(each, value) for each in get_args(kind))
    if origin is tuple:
        return isinstance(value, list | tuple)
    if origin is Mapping or is_dataclass(kind):
        return isinstance(value, Mapping)
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]
    return type(value) is kind


def _built(kind: Any, value: Any, path: str) -> Any:
    """``value``, which fits, as the field holds it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _built(next(each for each in arguments if _fits(each, value)), value, path)
    if origin is tuple:
        return tuple(_read(arguments[0], item, f"{path}[{place}]") for place, item in enumerate(value))
    if origin is Mapping and arguments[1] is not Any:
        return {name: _read(arguments[1], item, f"{path}.{name}") for name, item in value.items()}
    if is_dataclass(kind):
        return read_fields(kind, value, path)  # type: ignore[arg-type]
    return float(value) if kind is float else value


def _check_bounds(field: Field[Any], value: Any, path: str) -> None:
    bounds = field.metadata
    if value is None:
        return
    if "above" in bounds and not value > bounds["above"]:
        raise FieldError(path, f"must be above {bounds['above']}, not {value}")
    if "least" in bounds and value < bounds["least"]:
        raise FieldError(path, f"must be at least {bounds['least']}, not {value}")
    if "most" in bounds and value > bounds["most"]:
        raise FieldError(path, f"must be at most {bounds['most']}, not {value}")
    if "valid" in bounds and not bounds["valid"](value):
        raise FieldError(path, bounds["problem"])


def _described(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join(map(_described, arguments))
    if origin is tuple:
        return "a list"
    return _NAMES.get(kind, "an object")
