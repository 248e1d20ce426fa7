"""A sparse spec against its model: every fault at once, in words for the person who wrote the YAML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from areal.resources import registry
from areal.resources.suggest import did_you_mean
from areal.resources.tree import Path

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from areal.resources.fields import SpecModel

Found = list[tuple[Path, str]]

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


def check_spec(kind: str, sparse: Mapping[str, Any]) -> tuple[Any, Found]:
    """The effective spec (None when invalid) and what is wrong, as (path inside the spec, message)."""
    spec, found = check_model(registry.spec_model(kind), sparse)
    return (None, found) if found else (spec, [])


def check_model(model: type[SpecModel], value: Any) -> tuple[SpecModel | None, Found]:
    """``value`` as an instance of ``model``, and what is wrong with it."""
    try:
        spec = model.model_validate(value)
    except ValidationError as error:
        return None, _merge_unions(_explain(model, value, detail) for detail in error.errors(include_url=False))
    return spec, list(_nested_problems(spec))


def _nested_problems(spec: SpecModel) -> Iterator[tuple[Path, str]]:
    """The cross-field problems of a spec and of the keyed items in it."""
    yield from spec.problems()
    for info in registry.fields_of(type(spec)).values():
        if info.repeated and info.nested is not None:
            for item in getattr(spec, info.attribute):
                step = f"[{item.name}]"
                yield from (((info.name, step, *path), message) for path, message in item.problems())


def _explain(model: type[SpecModel], value: Any, detail: ErrorDetails) -> tuple[Path, str, bool]:
    """One pydantic error as (path, message, whether it is one arm of a union)."""
    path, union = _locate(value, detail["loc"])
    kind, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return path, f"unknown field{did_you_mean(str(path[-1]), _siblings(model, path))}", union
    if kind == "missing":
        return path[:-1], f'required field "{path[-1]}" is missing', union
    if kind in _EXPECTED:
        return path, f"expected {_EXPECTED[kind]}, got {describe(given)}{_advice(kind, given)}", union
    if kind == "literal_error":
        return path, _literal(given, str(context["expected"])), union
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return path, f"must be {words} {context[key]:g}, got {describe(given)}", union
    if kind == "string_pattern_mismatch":
        return path, f'must look like "module:Name", got {describe(given)}', union
    if kind == "string_too_short":
        return path, "must not be empty", union
    if kind == "finite_number":
        return path, f"must be a finite number, got {describe(given)}", union
    return path, _plain(detail["msg"], context), union


def _plain(message: str, context: Mapping[str, Any]) -> str:
    return message if "column" not in context else f"{message} (column {context['column']})"


def _locate(value: Any, loc: tuple[int | str, ...]) -> tuple[Path, bool]:
    """The YAML path of a pydantic location. Steps that are no part of the value name the arm of a union; an item of
    a list of named maps is addressed by its name."""
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


def _merge_unions(details: Iterator[tuple[Path, str, bool]]) -> Found:
    """The arms of a union each report their own fault at one path: say them as alternatives."""
    found: dict[tuple[Path, bool] | tuple[Path, str], tuple[Path, str]] = {}
    for path, message, union in details:
        key = (path, True) if union else (path, message)
        earlier = found.get(key)
        found[key] = (path, message if earlier is None else f"{earlier[1]}; or {message}")
    return list(found.values())


def _siblings(model: type[SpecModel], path: Path) -> list[str]:
    """The fields that the unknown one at ``path`` could have been."""
    holder: type[SpecModel] | None = model
    if len(path) > 1:
        fields = list(registry.resolve(model, path[:-1]))
        holder = fields[-1].nested if fields else None
    return list(registry.fields_of(holder)) if holder is not None else []


def _literal(given: Any, expected: str) -> str:
    options = [option.strip("'") for option in expected.replace(" or ", ", ").split(", ")]
    near = did_you_mean(given, options) if isinstance(given, str) else ""
    return f"{describe(given)} is not one of {', '.join(options)}{near}"


def _advice(kind: str, given: Any) -> str:
    if kind == "string_type" and isinstance(given, (int, float, bool)):
        return ": quote it"
    if kind == "bool_type" and isinstance(given, str) and given.lower() in _YAML_1_1_BOOLEANS:
        return f": write {_YAML_1_1_BOOLEANS[given.lower()]}"
    if kind in ("int_type", "float_type") and isinstance(given, str):
        return ": remove the quotes" if given.replace(".", "", 1).isdigit() else ""
    return ""


def describe(value: Any) -> str:
    """A value as its author would recognise it, cut when long."""
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
