"""Checks sparse specs against the model of their kind: defaults, cost of changes, references, and all faults at once,
worded for the author of the YAML. Paths are inside the spec and use YAML names; keyed items are steps: ``"[qwen]"``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import starmap
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from areal.errors import InvalidManifest, did_you_mean
from areal.resources.fields import PATTERN_WORDS, Fault, Metadata, SpecModel, fields_of, resolve
from areal.resources.kinds import KINDS, Ref, load, name_problem
from areal.resources.tree import ABSENT, FieldPath, UpdateClass, get_path, path_text

M = TypeVar("M", bound=SpecModel)


class Reference(NamedTuple):
    """The field at ``path`` inside the spec refers to the object ``ref``."""

    path: FieldPath
    ref: Ref


@cache
def spec_model(kind: str) -> type[SpecModel]:
    """Return the pydantic model of the spec of a canonical kind."""
    model: type[SpecModel] = load(KINDS[kind].spec)
    return model


def effective(kind: str, sparse: Mapping[str, object]) -> Any:
    """Return the spec with all defaults, as an instance of ``spec_model(kind)``. Raises InvalidManifest.

    The return type is Any because the class depends on ``kind``: a caller that knows the kind annotates the result.
    """
    try:
        return _valid(spec_model(kind), json.dumps(sparse))
    except _SpecFaults as error:
        lines = [f"{path_text(('spec', *fault.path))}: {fault.message}" for fault in error.faults]
        raise InvalidManifest(f"the spec of this {kind} is not valid: {'; '.join(lines)}") from None


def spec_faults(kind: str, sparse: Mapping[str, object]) -> list[Fault]:
    """Return the faults of a sparse spec."""
    try:
        _valid(spec_model(kind), json.dumps(sparse))
    except _SpecFaults as error:
        return error.faults
    return []


def validate(kind: str, sparse: Mapping[str, object]) -> list[tuple[FieldPath, str]]:
    """Return the faults of a sparse spec, as (path inside the spec, message)."""
    return [(fault.path, fault.message) for fault in spec_faults(kind, sparse)]


class _SpecFaults(Exception):
    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults


@lru_cache(4096)  # specs and metadata
def _valid(model: type[SpecModel], sparse: str) -> SpecModel:
    """Return a sparse map (JSON) with its defaults. Raises _SpecFaults. A command reads a spec several times, and a
    large apply has many that are equal."""
    spec, faults = check_model(model, json.loads(sparse))
    if spec is None:
        raise _SpecFaults(faults)
    return spec


def check_metadata(given: Any) -> tuple[Metadata | None, list[Fault]]:
    """Return an object's metadata (None if they are invalid), and their faults. The metadata of many objects differ in
    nothing but the name."""
    name = given.get("name") if isinstance(given, dict) else None
    if isinstance(name, str) and name_problem(name) is None:
        with suppress(_SpecFaults):
            valid: Any = _valid(Metadata, json.dumps({**given, "name": "any"}))
            return valid.model_copy(update={"name": name}), []
    return check_model(Metadata, given)


@cache
def update_class(kind: str, path: FieldPath) -> UpdateClass:
    """Return the cost of changing the leaf at ``path``: the highest class of the fields along ``path``.

    A section that several kinds share can thus differ in cost. A leaf of a free-form map or list has the cost of its
    field; a field that this version does not know is RECREATE, which is safe.
    """
    fields = list(resolve(spec_model(kind), path))
    known_steps = sum(2 if field.repeated or field.mapped else 1 for field in fields)  # an item is a step of its own
    if not fields or (fields[-1].nested is not None and len(path) > known_steps):
        return UpdateClass.RECREATE
    return max((field.update for field in fields if field.update is not None), default=UpdateClass.RECREATE)


def references(kind: str, sparse: Mapping[str, object]) -> tuple[Reference, ...]:
    """Return the references of a sparse spec, with defaults: a Model without ``service`` refers to ``default``."""
    found = []
    for base, name, target in spec_model(kind).REFERENCES:
        holder = get_path(sparse, base)
        if not isinstance(holder, Mapping):
            continue
        value = holder.get(name, ABSENT)
        if value is ABSENT and spec_model(kind).INSTEAD.get((*base, name)) in holder:
            continue
        if value is ABSENT:
            value = _default(kind, (*base, name))
        if isinstance(value, str):
            found.append(Reference((*base, name), Ref(target, value)))
    return tuple(found)


@cache
def _default(kind: str, path: FieldPath) -> Any:
    return next(reversed(list(resolve(spec_model(kind), path)))).default


_EXPECTED = {
    "string_type": "text",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a map",
    "model_type": "a map",
    "model_attributes_type": "a map",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_YAML_1_1_BOOLEANS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def check_model(model: type[M], value: Any) -> tuple[M | None, list[Fault]]:
    """Return ``value`` as an instance of ``model`` (None if it is invalid), and its faults."""
    try:
        spec = model.model_validate(value)
    except ValidationError as error:
        faults = _merge_unions(_fault(model, value, detail) for detail in error.errors(include_url=False))
        return None, [*faults, *_faults_beside(model, value, faults)]
    found = [Fault(*each) for each in spec.problems()]
    for info in fields_of(type(spec)).values():
        if info.repeated and info.nested is not None and "name" in info.nested.model_fields:
            for item in getattr(spec, info.attribute):
                base = (info.name, f"[{item.name}]")
                found += [each.below(base) for each in starmap(Fault, item.problems())]
    return (None, found) if found else (spec, found)


def _faults_beside(model: type[SpecModel], value: Any, faults: Sequence[Fault]) -> list[Fault]:
    """Return the faults between fields that are valid each, where other fields are not. That one of those is absent,
    and a fault of the spec as a whole, may be a consequence and is left out."""
    lost = {str(fault.path[0]) for fault in faults if fault.path}
    if not isinstance(value, Mapping) or not lost:
        return []
    try:
        spec = model.model_validate({name: each for name, each in value.items() if name not in lost})
    except ValidationError:
        return []
    return [each for each in starmap(Fault, spec.problems()) if each.path and not lost.intersection(each.absent[:1])]


def _fault(model: type[SpecModel], value: Any, detail: ErrorDetails) -> tuple[Fault, bool]:
    """Convert a pydantic error to a fault. Also returns whether the error is of one arm of a union."""
    at_key = detail["loc"][-1:] == ("[key]",)  # pydantic's step for the key of a map
    path, union = _locate(value, detail["loc"][:-1] if at_key else detail["loc"])
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        near = did_you_mean(str(path[-1]), _siblings(model, path))
        return Fault(path, f"unknown field{near}", at_key=True), union
    if kind == "missing":
        message = f'required field "{path[-1]}" is missing'
        return Fault(path[:-1], message, at_key=True, absent=path), union
    if "key" in context:  # a validator of a whole map names the entry
        path = (*path, context["key"])
    message = _message(kind, detail["input"], context) or detail["msg"]
    return Fault(path, message, (), at_key, context.get("column", 0), _EXPECTED.get(kind, "")), union


def _message(kind: str, given: Any, context: Mapping[str, Any]) -> str | None:
    """Return the message for an invalid value; None to keep the message of pydantic or of our validator."""
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, got {describe(given)}{_advice(kind, given)}"
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"must be {words} {context[key]:.12g}, got {describe(given)}"
    if kind == "literal_error":
        options = [option.strip("'") for option in str(context["expected"]).replace(" or ", ", ").split(", ")]
        near = did_you_mean(given, options) if isinstance(given, str) else ""
        return f"{describe(given)} is not one of {', '.join(options)}{near}"
    if kind == "string_pattern_mismatch":
        words = PATTERN_WORDS.get(context["pattern"], f"match {context['pattern']}")
        return f"must {words}, got {describe(given)}"
    return {"string_too_short": "must not be empty"}.get(kind)


def _locate(value: Any, loc: tuple[int | str, ...]) -> tuple[FieldPath, bool]:
    """Return the YAML path of a pydantic location, and whether it ends in an arm of a union. Steps that are not in the
    value name arms of a union; an item of a list of named maps is addressed by its name."""
    path: list[int | str] = []
    for at, step in enumerate(loc):
        if isinstance(value, Mapping):
            path.append(step)
            value = value.get(step) if step in value else None
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
            name = value.get("name") if isinstance(value, Mapping) else None
            path.append(f"[{name}]" if isinstance(name, str) else step)
        else:
            return tuple(path), at == len(loc) - 1 and bool(path)
    return tuple(path), False


def _merge_unions(details: Iterable[tuple[Fault, bool]]) -> list[Fault]:
    """Merge the faults that the arms of a union report at one path into one message with alternatives."""
    found: dict[tuple[FieldPath, str], Fault] = {}
    for fault, union in details:
        key = (fault.path, "" if union else fault.message)
        earlier = found.get(key)
        if earlier is not None:
            fault = fault._replace(message=f"{earlier.message}; or {fault.message}", expected="")
        found[key] = fault
    return list(found.values())


def _siblings(model: type[SpecModel], path: FieldPath) -> list[str]:
    """Return the fields of the map that has the unknown field at ``path``."""
    holder: type[SpecModel] | None = model
    if len(path) > 1:
        fields = list(resolve(model, path[:-1]))
        holder = fields[-1].nested if fields else None
    return list(fields_of(holder)) if holder is not None else []


_PLAIN_TYPES = {"int_type": (int,), "float_type": (int, float), "bool_type": (bool,)}


def _advice(kind: str, given: Any) -> str:
    if kind == "string_type" and isinstance(given, (int, float, bool)):
        return ": quote it"
    if isinstance(given, float) and given.is_integer():  # as Helm writes large numbers
        return f": write {given:.0f}"
    if not isinstance(given, str) or kind not in _PLAIN_TYPES:
        return ""
    if kind == "bool_type" and given.lower() in _YAML_1_1_BOOLEANS:
        return f": write {_YAML_1_1_BOOLEANS[given.lower()]}"
    from areal.resources.yaml_io import BadScalar, resolve_plain

    with suppress(BadScalar):
        return ": remove the quotes" if type(resolve_plain(given)) in _PLAIN_TYPES[kind] else ""
    return ""


def describe(value: Any) -> str:
    """Describe a value for an error message; long text is truncated."""
    match value:
        case None:
            return "null"
        case bool() | int() | float():
            return json.dumps(value)
        case str():
            return f'"{value}"' if len(value) <= 60 else f'"{value[:57]}..."'
        case list():
            return "a list"
        case dict():
            return "a map"
        case _:
            return str(type(value).__name__)
