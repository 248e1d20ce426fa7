"""Which keys configuration classes have."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from areal.api.config.building import Path, hints_of
from areal.api.config.overrides import dotted
from areal.resources.suggest import closest

TRAINERS = ("grpo", "ppo", "sft", "rw", "dpo")


def is_declared(cls: type, path: Path) -> bool:
    """Whether the classes have such a field; what is under a free map or a list, they leave open."""
    return _undeclared(cls, path) is None


def _undeclared(cls: type, path: Path) -> tuple[type, Path] | None:
    """The class that lacks the first part of the path which no class has (``str`` for a plain value), with that part's
    path."""
    if path[0] == "trainer" and len(path) > 2 and path[1] in TRAINERS:
        path = path[2:]
    for depth, part in enumerate(path):
        hints = hints_of(cls)
        if part not in hints:
            return cls, path[: depth + 1]
        nested = [kind for kind in _kinds(hints[part]) if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
        if not nested or typing.get_origin(hints[part]) is list:
            rest = path[depth + 1 : depth + 2]
            return None if not rest or _is_open(hints[part]) else (str, path[: depth + 2])
        cls = nested[0]
    return None


def _kinds(hint: Any) -> Iterator[Any]:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:
        arguments = arguments[:1]
    yield hint
    for argument in arguments:
        yield from _kinds(argument)


def _is_open(hint: Any) -> bool:
    """Whether any key may be below."""
    kinds = list(_kinds(hint))
    return Any in kinds or any(
        typing.get_origin(kind) in (list, dict) or (isinstance(kind, type) and issubclass(kind, dict)) for kind in kinds
    )


def suggestion(cls: type, path: Path) -> str:
    """`` (did you mean "a.b"?)``, or nothing."""
    lacking = _undeclared(cls, path)
    if lacking is None or lacking[0] is str:
        return ""
    near = closest(str(lacking[1][-1]), hints_of(lacking[0]))
    return f' (did you mean "{dotted((*lacking[1][:-1], near))}"?)' if near is not None else ""
