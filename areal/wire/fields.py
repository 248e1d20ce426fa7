"""Conversion of plain data to dataclasses and back. Each field is converted by its annotation, and unknown fields are
refused.

``read_fields`` reads data from other processes strictly: an int is accepted as a float, and nothing else is converted.
Marks of a type limit its values: ``Annotated[int, Range(1, 9)]``, ``Annotated[str, Valid(PROBLEM, str.isprintable)]``.
The same ``Reader`` reads drivers' configurations, with YAML's scalars and more marks (``areal.api.config.fields``).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from enum import Enum
from functools import cache
from reprlib import repr as short
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from areal.dataclasses import dataclass, field
from areal.errors import FieldError, did_you_mean

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """A range from ``least`` to ``most`` inclusive, or from ``above`` to ``below`` exclusive."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def has(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self == Range(0):
            return "must not be negative"
        if self.least is not None and self.most is not None:
            return f"must be from {self.least:.12g} to {self.most:.12g}"
        bounds = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        return "must be " + " and ".join(f"{word} {value:.12g}" for word, value in bounds if value is not None)


@dataclass(frozen=True)
class Valid:
    """Values for which ``test`` holds; others are refused with ``problem``."""

    problem: str
    test: Callable[[Any], object]


NonNegativeInt: TypeAlias = Annotated[int, Range(0)]
NonNegativeFloat: TypeAlias = Annotated[float, Range(0)]
PositiveInt: TypeAlias = Annotated[int, Range(above=0)]
PositiveFloat: TypeAlias = Annotated[float, Range(above=0)]
Count: TypeAlias = Annotated[int, Range(1)]
Share: TypeAlias = Annotated[float, Range(0, 1)]


@cache
def hints_of(cls: type[Any]) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields in order, with their marks."""
    hints = get_type_hints(cls, include_extras=True)
    return {each.name: hints[each.name] for each in fields(cls)}


def default_of(field: Field[Any]) -> Any:
    """Return the default of a field; MISSING if it is required."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def read_fields(cls: type[T], data: object, path: str = "", *, lenient: bool = False) -> T:
    """Return ``data`` as an instance of the dataclass ``cls``. ``path``: the path of ``data`` in errors. ``lenient``:
    unknown fields are ignored, and null means the default, as in the body of a request. Raises FieldError."""
    if not isinstance(data, Mapping):
        raise FieldError(path, "must be an object")
    prefix, known = f"{path}." if path else "", _declared(cls)  # type: ignore[arg-type]  # a class is hashable
    if not lenient and (unknown := [name for name in data if name not in known]):
        raise FieldError(f"{prefix}{unknown[0]}", f"is not a known field: {', '.join(known)}")
    values = {}
    for name, each in known.items():
        value = data.get(name, MISSING)
        if value is None and lenient and not each.is_nullable:
            value = MISSING
        if value is not MISSING:
            values[name] = value if type(value) in each.plain else _read(each.hint, value, prefix + name)
            if each.marks and values[name] is not None:
                _check(each.marks, values[name], prefix + name)
        elif each.is_required:
            raise FieldError(prefix + name, "is required", is_missing=True)
    return cls(**values)


def write_fields(value: Any) -> dict[str, object]:
    """Return the object that ``read_fields`` reads, without fields that have their default."""
    written = asdict(value)
    return {each.name: written[each.name] for each in fields(value) if getattr(value, each.name) != default_of(each)}


@cache
def _parts(hint: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return a type without its marks, its origin, and its arguments."""
    kind = hint.__origin__ if get_origin(hint) is Annotated else hint
    return kind, get_origin(kind) or kind, get_args(kind)


@cache
def _unconverted_types(hint: Any) -> frozenset[type[Any]]:
    """Return the types whose values are accepted unchanged, which are nearly all values of a request."""
    kind, origin, arguments = _parts(hint)
    if origin in (Union, types.UnionType):
        return frozenset().union(*map(_unconverted_types, arguments))
    return frozenset((kind,)) if kind in (bool, int, str, NoneType) else frozenset()


@cache
def _is_any_object(hint: Any) -> bool:
    """Return whether each mapping with text as keys is a value of a type."""
    _, origin, kinds = _parts(hint)
    return origin is Mapping and (not kinds or (kinds[0] is str and kinds[1] in (Any, object)))


class _Declared(NamedTuple):
    """A field. ``plain``: types whose values are accepted unchanged, if their ``marks`` allow them."""

    hint: Any
    plain: frozenset[type[Any]]
    marks: tuple[Range | Valid, ...]
    is_nullable: bool
    is_required: bool


@cache
def _declared(cls: type[Any]) -> dict[str, _Declared]:
    """Return the fields of a dataclass in order."""
    found = {}
    for each in fields(cls):
        hint = hints_of(cls)[each.name]  # type: ignore[arg-type]  # a class is hashable
        plain = _unconverted_types(hint)
        is_required = default_of(each) is MISSING
        found[each.name] = _Declared(hint, plain, marks_of(hint), hint is Any or NoneType in plain, is_required)
    return found


def marks_of(hint: Any) -> tuple[Range | Valid, ...]:
    """Return the limits of the values of a type, and of the types of a union."""
    own = hint.__metadata__ if get_origin(hint) is Annotated else ()
    _, origin, arguments = _parts(hint)
    options = arguments if origin in (Union, types.UnionType) else ()
    limits = (mark for mark in own if isinstance(mark, Range | Valid))
    return (*limits, *(mark for option in options for mark in marks_of(option)))


BAD: Any = object()
"""What a conversion returns of a value that it refuses."""
FieldSteps = tuple[str | int, ...]


@dataclass
class Faults:
    """Collected faults. ``missing``: absent required fields. ``ineffective``: fields without effect, and the
    reasons."""

    found: list[tuple[FieldSteps, str]] = field(default_factory=list)
    missing: set[FieldSteps] = field(default_factory=set)
    ineffective: list[tuple[FieldSteps, str]] = field(default_factory=list)

    def add(self, path: FieldSteps, message: str) -> None:
        self.found.append((path, message))


_LISTS: dict[Any, Callable[[list[Any]], Any]] = {
    list: list,
    set: set,
    frozenset: frozenset,
    Sequence: list,
    Iterable: list,
    Collection: list,
}
"""Types that a list can be converted to, and the conversions."""


@dataclass(frozen=True)
class Reader:
    """Converts plain values to annotated types. ``scalars``: for each plain type, the name of its values and the
    conversion, which returns BAD for an invalid value. ``record`` converts a mapping to a dataclass; None, with a fault
    added, if it cannot."""

    scalars: Mapping[Any, tuple[str, Callable[[Any], Any]]]
    record: Callable[[type[Any], Mapping[str, Any], Faults, FieldSteps], Any]
    mapping: str
    fallback: str

    def convert(self, hint: Any, value: Any, faults: Faults, path: FieldSteps) -> Any:
        if type(value) in _unconverted_types(hint):
            return value
        hint, origin, kinds = _parts(hint)
        if hint is Any or hint is object:
            return value
        if origin in (Union, types.UnionType):
            return self._choice(kinds, value, faults, path)
        if origin is Literal:
            return self._literal(kinds, value, faults, path)
        if origin is tuple or origin in _LISTS:
            return self._sequence(origin, kinds, value, faults, path)
        if not isinstance(origin, type):
            return self._scalar(hint, value, faults, path)
        if is_dataclass(origin) and isinstance(value, Mapping):
            made = self.record(origin, value, faults, path)
            return BAD if made is None else made
        if is_dataclass(origin):
            return value if isinstance(value, origin) else self._bad(faults, path, self.mapping, value)
        if issubclass(origin, Mapping):
            return self._mapping(hint, kinds, value, faults, path)
        if issubclass(origin, Enum):
            return self._enum(hint, value, faults, path)
        return self._scalar(hint, value, faults, path)

    def _bad(self, faults: Faults, path: FieldSteps, wanted: str, value: Any, guess: str = "") -> Any:
        shown = self.mapping if isinstance(value, Mapping) else "a list" if isinstance(value, list) else short(value)
        faults.add(path, f"must be {wanted}, not {'null' if value is None else shown}{guess}")
        return BAD

    def _choice(self, options: tuple[Any, ...], value: Any, faults: Faults, path: FieldSteps) -> Any:
        """Convert to the first option that accepts the value. If none does, the faults of the first are reported."""
        if value is None and NoneType in options:
            return None
        attempts: list[Faults] = []
        for option in options:
            if option is not NoneType:
                attempts.append(attempt := Faults())
                converted = self.convert(option, value, attempt, path)
                if not attempt.found:
                    faults.ineffective += attempt.ineffective
                    return converted
        faults.found += attempts[0].found
        faults.missing |= attempts[0].missing
        return BAD

    def _literal(self, options: tuple[Any, ...], value: Any, faults: Faults, path: FieldSteps) -> Any:
        if isinstance(value, bool) and (word := "on" if value else "off") in options:
            return word  # YAML reads on and off as booleans
        return value if value in options else self._not_one_of(list(map(str, options)), value, faults, path)

    def _enum(self, cls: type[Enum], value: Any, faults: Faults, path: FieldSteps) -> Any:
        """Return the member with this name or value."""
        for member in cls:
            if value is member or value == member.value or value == member.name:
                return member
        return self._not_one_of([str(member.value) for member in cls], value, faults, path)

    def _not_one_of(self, names: list[str], value: Any, faults: Faults, path: FieldSteps) -> Any:
        return self._bad(faults, path, f"one of {', '.join(names)}", value, did_you_mean(str(value), names))

    def _sequence(self, origin: Any, kinds: tuple[Any, ...], value: Any, faults: Faults, path: FieldSteps) -> Any:
        is_list = isinstance(value, list | tuple)
        fixed = origin is tuple and bool(kinds) and kinds[-1] is not Ellipsis
        if not is_list or (fixed and len(value) != len(kinds)):
            return self._bad(faults, path, f"a list of {len(kinds)}" if fixed else "a list", value)
        if fixed:
            pairs = enumerate(zip(kinds, value, strict=True))
            items = [self.convert(kind, item, faults, (*path, at)) for at, (kind, item) in pairs]
        else:
            items = self._items(kinds[0] if kinds else Any, value, faults, path)
        if any(item is BAD for item in items):
            return BAD
        return tuple(items) if origin is tuple else _LISTS[origin](items)

    def _items(self, kind: Any, value: Sequence[Any], faults: Faults, path: FieldSteps) -> list[Any]:
        """Convert items of one type. Those that need no conversion, as the messages of a conversation, cost little."""
        plain, any_object = _unconverted_types(kind), _is_any_object(kind)
        items = []
        for at, item in enumerate(value):
            is_object = any_object and type(item) is dict and all(type(key) is str for key in item)
            unchanged = is_object or type(item) in plain
            items.append(item if unchanged else self.convert(kind, item, faults, (*path, at)))
        return items

    def _mapping(self, hint: Any, kinds: tuple[Any, ...], value: Any, faults: Faults, path: FieldSteps) -> Any:
        if not isinstance(value, Mapping):
            return self._bad(faults, path, self.mapping, value)
        key_of, kind = (_whole_key, kinds[1]) if kinds[:1] == (int,) else (str, kinds[1] if kinds else Any)
        items = {key_of(key): self.convert(kind, item, faults, (*path, key)) for key, item in value.items()}
        if any(item is BAD for item in items.values()):
            return BAD
        return hint(items) if isinstance(hint, type) and issubclass(hint, dict) else items

    def _scalar(self, hint: Any, value: Any, faults: Faults, path: FieldSteps) -> Any:
        if hint in self.scalars:
            wanted, read = self.scalars[hint]
            converted = read(value)
            return converted if converted is not BAD else self._bad(faults, path, wanted, value)
        if value is None or (isinstance(hint, type) and isinstance(value, hint)):
            return value
        faults.add(path, f"is of type {getattr(hint, '__name__', hint)}, {self.fallback}")
        return BAD


def _whole_key(key: Any) -> Any:
    """Return a key of a JSON object as a number, if it is one."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key


def _exactly(kind: type[Any]) -> Callable[[Any], Any]:
    return lambda value: value if type(value) is kind else BAD


def _finite(value: Any) -> Any:
    return float(value) if type(value) in (int, float) and abs(value) <= sys.float_info.max else BAD


def _record(cls: type[Any], data: Mapping[str, object], faults: Faults, path: FieldSteps) -> Any:
    try:
        return read_fields(cls, data)
    except FieldError as error:
        faults.add((*path, error.field), error.problem)
        if error.is_missing:
            faults.missing.add((*path, error.field))
        return None


_STRICT = Reader(
    {
        bool: ("true or false", _exactly(bool)),
        int: ("a whole number", _exactly(int)),
        float: ("a number", _finite),
        str: ("a string", _exactly(str)),
    },
    _record,
    "an object",
    "which is not read",
)


def _read(kind: Any, value: object, path: str) -> Any:
    faults = Faults()
    converted = _STRICT.convert(kind, value, faults, ())
    for steps, problem in faults.found:
        below = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
        raise FieldError(path + below, problem, is_missing=steps in faults.missing)
    return converted


def _check(marks: tuple[Range | Valid, ...], value: Any, path: str) -> None:
    for mark in marks:
        if isinstance(mark, Valid):
            if not mark.test(value):
                raise FieldError(path, mark.problem)
        elif not mark.has(value):
            raise FieldError(path, f"{mark}, not {value}")
