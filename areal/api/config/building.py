"""From plain values to configuration dataclasses: every fault is collected with its path, none stops the others.

``str`` takes numbers and flags as they are written only where the type says so: a YAML scalar of another type is a
fault, except that whole numbers are good floats and ``1e-5`` is a number whatever YAML calls it.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from areal.api.config.marks import Absent, Inert
from areal.resources.suggest import did_you_mean

T = TypeVar("T")
Path = tuple[str | int, ...]


@dataclass
class Faults:
    """``inert``: accepted fields without effect."""

    found: list[tuple[Path, str]] = field(default_factory=list)
    inert: list[tuple[Path, Inert]] = field(default_factory=list)

    def add(self, path: Path, message: str) -> None:
        self.found.append((path, message))


_BAD = object()


def build(cls: type[T], values: Mapping[str, Any], faults: Faults, path: Path = ()) -> T | None:
    """An instance, or None where something under ``path`` is wrong."""
    hints = hints_of(cls)  # type: ignore[arg-type]  # a class is hashable, whatever its instances are
    before = len(faults.found)
    given: dict[str, Any] = {}
    preset = _preset(cls, values, faults, path)
    for key, value in (over(preset, values) if preset else values).items():
        if key == "preset" and preset is not None:
            continue
        if key not in hints:
            faults.add((*path, key), f"there is no such key{did_you_mean(str(key), hints)}")
            continue
        converted = _convert(hints[key], value, faults, (*path, key))
        if converted is not _BAD:
            given[key] = converted
            _marked(cls, key, hints[key], converted, faults, (*path, key))
    for key in getattr(cls, "required", ()) if not path else ():
        if not given.get(key):
            faults.add((*path, key), "is needed")
    for key in _without_default(cls):
        if key not in values:
            faults.add((*path, key), "is needed")
    if len(faults.found) > before:
        return None
    try:
        built = cls(**given)
        if preset:
            built.preset = values["preset"]  # type: ignore[attr-defined]
        return built
    except (ValueError, TypeError, AssertionError) as error:  # what a class of the driver's own may say of its values
        named = _named(str(error), hints, values)
        faults.add((*path, *named), str(error).removeprefix(f"{'.'.join(named)}: "))
        return None


def _preset(cls: type, values: Mapping[str, Any], faults: Faults, path: Path) -> Mapping[str, Any] | None:
    """What the named preset says, where the class has presets."""
    presets: Mapping[str, Mapping[str, Any]] | None = getattr(cls, "presets", None)
    if presets is None:
        return None
    name = str(values.get("preset") or "")
    if name and name not in presets:
        faults.add((*path, "preset"), f"must be one of {', '.join(presets)}, not {name!r}{did_you_mean(name, presets)}")
    return presets.get(name, {})


def over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``above``, and what it does not say from ``below``; maps are merged."""
    merged = dict(below)
    for key, value in above.items():
        before = merged.get(key)
        merged[key] = over(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return merged


def _named(message: str, hints: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[str, ...]:
    """The key that a class's own complaint is about: the first that it names and the user gave."""
    for word in _KEY.findall(message):
        parts = word.split(".")
        if parts[0] in hints and parts[0] in values:
            return tuple(parts)
    return ()


_KEY = re.compile(r"[a-z_][a-z0-9_]*(?:\.[a-z_][a-z0-9_]*)*")


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """The types of the fields of a dataclass, in their order, marks included."""
    hints = get_type_hints(cls, include_extras=True)
    return {each.name: hints[each.name] for each in dataclasses.fields(cls)}


def _without_default(cls: type) -> list[str]:
    return [
        each.name
        for each in dataclasses.fields(cls)
        if each.init and each.default is MISSING and each.default_factory is MISSING
    ]


def _marked(cls: type, key: str, hint: Any, value: Any, faults: Faults, path: Path) -> None:
    if get_origin(hint) is not Annotated or value == default_of(cls, key):
        return
    for mark in hint.__metadata__:
        if isinstance(mark, Absent):
            faults.add(path, f"is not supported: {mark.why}")
        elif isinstance(mark, Inert):
            faults.inert.append((path, mark))


def default_of(cls: type, key: str) -> Any:
    (found,) = (each for each in dataclasses.fields(cls) if each.name == key)
    return found.default if found.default_factory is MISSING else found.default_factory()


def _convert(hint: Any, value: Any, faults: Faults, path: Path) -> Any:
    """``value`` as ``hint`` wants it, or _BAD with a fault noted."""
    if get_origin(hint) is Annotated:
        return _convert(hint.__origin__, value, faults, path)
    if hint is Any or hint is object:
        return value
    origin = get_origin(hint) or hint
    if origin in (Union, types.UnionType):
        return _choice(get_args(hint), value, faults, path)
    if origin is Literal:
        return _literal(get_args(hint), value, faults, path)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _nested(hint, value, faults, path)
    if origin is tuple:
        return _tuple(get_args(hint), value, faults, path)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _dict(hint, value, faults, path)
    if origin in _LISTS:
        return _list(hint, value, faults, path)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint, value, faults, path)
    return _scalar(hint, value, faults, path)


_LISTS: dict[Any, Callable[[list[Any]], Any]] = {
    list: list,
    set: set,
    frozenset: frozenset,
    Sequence: list,
    Iterable: list,
    Collection: list,
}
"""What a YAML list becomes."""


def _choice(options: tuple[Any, ...], value: Any, faults: Faults, path: Path) -> Any:
    if value is None and type(None) in options:
        return None
    tried = Faults()
    for option in options:
        if option is type(None):
            continue
        attempt = Faults()
        converted = _convert(option, value, attempt, path)
        if not attempt.found:
            faults.inert += attempt.inert
            return converted
        tried = tried if tried.found else attempt
    faults.found += tried.found
    return _BAD


def _literal(options: tuple[Any, ...], value: Any, faults: Faults, path: Path) -> Any:
    if isinstance(value, bool) and (word := "on" if value else "off") in options:
        return word  # YAML's own reading of the word
    if value in options:
        return value
    names = ", ".join(map(str, options))
    faults.add(path, f"must be one of {names}, not {_said(value)}{did_you_mean(str(value), map(str, options))}")
    return _BAD


def _nested(cls: type, value: Any, faults: Faults, path: Path) -> Any:
    if dataclasses.is_dataclass(value) and isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        faults.add(path, f"must be a map, not {_said(value)}")
        return _BAD
    built = build(cls, value, faults, path)
    return _BAD if built is None else built


def _list(hint: Any, value: Any, faults: Faults, path: Path) -> Any:
    if not isinstance(value, list | tuple):
        faults.add(path, f"must be a list, not {_said(value)}")
        return _BAD
    (kind, *_) = get_args(hint) or (Any,)
    items = [_convert(kind, item, faults, (*path, number)) for number, item in enumerate(value)]
    return _BAD if _has_bad(items) else _LISTS[get_origin(hint) or hint](items)


def _tuple(kinds: tuple[Any, ...], value: Any, faults: Faults, path: Path) -> Any:
    if not kinds or kinds[-1] is Ellipsis:
        items = _list(list[kinds[0] if kinds else Any], value, faults, path)  # type: ignore[misc]
        return _BAD if items is _BAD else tuple(items)
    if not isinstance(value, list | tuple) or len(value) != len(kinds):
        faults.add(path, f"must be a list of {len(kinds)}, not {_said(value)}")
        return _BAD
    items = [_convert(kind, value[number], faults, (*path, number)) for number, kind in enumerate(kinds)]
    return _BAD if _has_bad(items) else tuple(items)


def _has_bad(items: Iterable[Any]) -> bool:
    return any(item is _BAD for item in items)


def _enum(cls: type[Enum], value: Any, faults: Faults, path: Path) -> Any:
    """By name or by value."""
    if isinstance(value, cls):
        return value
    for member in cls:
        if value == member.value or value == member.name:
            return member
    names = [str(member.value) for member in cls]
    faults.add(path, f"must be one of {', '.join(names)}, not {_said(value)}{did_you_mean(str(value), names)}")
    return _BAD


def _dict(hint: Any, value: Any, faults: Faults, path: Path) -> Any:
    if not isinstance(value, Mapping):
        faults.add(path, f"must be a map, not {_said(value)}")
        return _BAD
    kinds = get_args(hint)
    items = {str(key): _convert(kinds[1] if kinds else Any, item, faults, (*path, key)) for key, item in value.items()}
    if _has_bad(items.values()):
        return _BAD
    return hint(items) if isinstance(hint, type) and issubclass(hint, dict) else items


def _is_whole(value: Any) -> Iterator[Any]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, float) and value.is_integer():
        yield int(value)


def _is_number(value: Any) -> Iterator[Any]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)
    elif isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return
        if math.isfinite(number):
            yield number


def _is_flag(value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield value


def _is_path(value: Any) -> Iterator[Any]:
    if isinstance(value, str | FilePath):
        yield FilePath(value)


def _is_text(value: Any) -> Iterator[Any]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)  # a trial named 1


_READERS: dict[Any, tuple[str, Callable[[Any], Iterator[Any]]]] = {
    int: ("a whole number", _is_whole),
    float: ("a number", _is_number),
    bool: ("true or false", _is_flag),
    str: ("text", _is_text),
    FilePath: ("a path", _is_path),
}


def _scalar(hint: Any, value: Any, faults: Faults, path: Path) -> Any:
    if hint not in _READERS:
        if value is None or (isinstance(hint, type) and isinstance(value, hint)):
            return value
        faults.add(path, f"is of type {getattr(hint, '__name__', hint)}, which no configuration file can say")
        return _BAD
    what, reader = _READERS[hint]
    for converted in reader(value):
        return converted
    faults.add(path, f"must be {what}, not {_said(value)}")
    return _BAD


def _said(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "a map"
    return "a list" if isinstance(value, list) else repr(value)
