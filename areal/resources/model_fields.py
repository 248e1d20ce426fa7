"""The fields of a spec model, read from its annotations. Paths use YAML names; an item is a step like ``"[qwen]"``."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin

from areal.resources.fields import SpecModel, Unit
from areal.resources.tree import ABSENT, FieldPath, UpdateClass


@dataclass(frozen=True)
class FieldInfo:
    """One field of a spec model. ``nested`` is the model of its value, or of its items when ``repeated``, or of its
    map values when ``mapped``."""

    name: str
    attribute: str
    owner: type[SpecModel]
    annotation: Any
    update: UpdateClass | None
    unit: Unit | None
    required: bool
    default: Any
    nested: type[SpecModel] | None
    repeated: bool
    mapped: bool


def resolve(model: type[SpecModel], path: FieldPath) -> Iterator[FieldInfo]:
    """The fields on the way down ``path``, as far as models reach."""
    current: type[SpecModel] | None = model
    steps = iter(path)
    for step in steps:
        info = fields_of(current).get(str(step)) if current is not None else None
        if info is None:
            return
        yield info
        current = info.nested
        if info.repeated or info.mapped:
            next(steps, None)


@cache
def fields_of(model: type[SpecModel]) -> dict[str, FieldInfo]:
    """The fields of a model by YAML name, in declaration order."""
    return {info.name: info for info in (_field(model, name) for name in model.model_fields)}


def all_fields(model: type[SpecModel], prefix: FieldPath = ()) -> Iterator[tuple[FieldPath, FieldInfo]]:
    """Every field below ``model``, depth first, with its path (``[]`` stands for an item, ``*`` for a map key)."""
    for info in fields_of(model).values():
        path = (*prefix, info.name)
        yield path, info
        if info.nested is not None:
            inner: FieldPath = (*path, "[]") if info.repeated else (*path, "*") if info.mapped else path
            yield from all_fields(info.nested, inner)


def _field(model: type[SpecModel], attribute: str) -> FieldInfo:
    info = model.model_fields[attribute]
    nested, repeated, mapped = _nested(info.annotation)
    marks = [*info.metadata, *_marks(info.annotation)]
    return FieldInfo(
        name=info.alias or attribute,
        attribute=attribute,
        owner=model,
        annotation=info.annotation,
        update=next((mark for mark in marks if isinstance(mark, UpdateClass)), None),
        unit=next((mark for mark in marks if isinstance(mark, Unit)), None),
        required=info.is_required(),
        default=ABSENT if info.is_required() else info.default,
        nested=nested,
        repeated=repeated,
        mapped=mapped,
    )


def _nested(annotation: Any) -> tuple[type[SpecModel] | None, bool, bool]:
    """The model inside an annotation, and whether through a list or a map."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return (annotation, False, False) if issubclass(annotation, SpecModel) else (None, False, False)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _nested(args[0])
    if origin is list:
        nested = _nested(args[0])[0]
        return nested, nested is not None, False
    if origin is dict:
        nested = _nested(args[1])[0]
        return nested, False, nested is not None
    if origin in (Union, types.UnionType):
        return next((found for found in map(_nested, args) if found[0] is not None), (None, False, False))
    return None, False, False


def _marks(annotation: Any) -> Iterator[Any]:
    """Metadata that sits deeper than the field, as in ``Seconds | None``."""
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
        yield from _marks(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for arm in get_args(annotation):
            yield from _marks(arm)
