"""A field's type in words, for ``explain`` and ``init``."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from areal.resources.registry import FieldInfo
from areal.resources.tree import ABSENT

_WORDS = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null"}


def type_text(info: FieldInfo) -> str:
    """``integer from 1 to 65535 (port)``, ``list of maps``, ``auto | round_robin``."""
    field = info.owner.model_fields[info.attribute]
    text = _type(info.annotation, list(_bounds(field.metadata)))
    return f"{text} ({info.unit.name})" if info.unit is not None and info.unit.name not in text else text


def default_text(info: FieldInfo) -> str:
    """The default as YAML's flow style writes it; ``required`` when there is none, ``absent`` when that is null."""
    if info.default is ABSENT or info.default is None:
        return "required" if info.default is ABSENT else "absent"
    return json.dumps(plain_default(info.default), ensure_ascii=False)


def plain_default(value: Any) -> Any:
    """A default without models: maps with YAML names, and without the entries that are absent by default."""
    dump = getattr(value, "model_dump", None)
    return dump(by_alias=True, exclude_none=True) if dump is not None else value


def _type(annotation: Any, bounds: list[Any]) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(args[0], [*bounds, *_bounds(annotation.__metadata__)])
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " | ".join(_type(arm, bounds) for arm in args if arm is not type(None))
    if origin is list:
        return f"list of {_type(args[0], []).replace('map', 'maps')}"
    if origin is dict:
        value = _type(args[1], [])
        return "map" if value == "anything" else f"map from text to {value}"
    word = _WORDS.get(annotation)
    if word is not None:
        return word + _range(bounds) if annotation in (int, float) else word
    return "map" if isinstance(annotation, type) else "anything"


def _bounds(metadata: Any) -> Iterator[Any]:
    """The bounds of a field, also those inside a pydantic ``FieldInfo``."""
    for mark in metadata:
        if hasattr(mark, "metadata"):
            yield from _bounds(mark.metadata)
        elif any(hasattr(mark, name) for name in ("ge", "gt", "le", "lt")):
            yield mark


def _range(bounds: list[Any]) -> str:
    found = {name: getattr(mark, name) for mark in bounds for name in ("ge", "gt", "le", "lt") if hasattr(mark, name)}
    words = []
    if "ge" in found:
        words.append(f"from {found['ge']:.12g}")
    if "gt" in found:
        words.append(f"above {found['gt']:.12g}")
    if "le" in found:
        words.append(f"to {found['le']:.12g}")
    return "".join(f" {word}" for word in words)
