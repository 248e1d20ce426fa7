"""Properties of a configuration field beside its type, as ``Annotated`` marks.

``Annotated[float, Range(0, 1)]`` bounds a number, checked wherever a configuration is made, from a file or in code; no
field takes NaN or infinity. Drivers and YAML written for AReaL name fields that have no meaning here, or none yet. None
of them is dropped silently: an ``Absent`` field is an error where it is set to anything but its default, an ``Inert``
one is accepted and reported once.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Range:
    """From ``least`` to ``most``, or ``above`` to ``below``, which do not belong to it."""

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
            return f"must be from {self.least:g} to {self.most:g}"
        bounds = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        return "must be " + " and ".join(f"{word} {value:g}" for word, value in bounds if value is not None)


POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(0)
COUNT = Range(1)
SHARE = Range(0, 1)
PORT = Range(0, 65535)


@cache
def ranges_of(cls: type) -> dict[str, Range | None]:
    """The range of each field that may be a number; None for a field without bounds."""
    hints = get_type_hints(cls, include_extras=True)
    found: dict[str, Range | None] = {}
    for each in dataclasses.fields(cls):
        hint = hints[each.name]
        marks = hint.__metadata__ if get_origin(hint) is Annotated else ()
        kind = hint.__origin__ if marks else hint
        if {int, float} & set(get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)):
            found[each.name] = next((mark for mark in marks if isinstance(mark, Range)), None)
    return found


def check_numbers(config: Any) -> None:
    """Raises ValueError naming the field."""
    for name, allowed in ranges_of(type(config)).items():  # type: ignore[arg-type]  # a class is hashable
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, not {value}")
        if allowed is not None and not allowed.has(value):
            raise ValueError(f"{name} {allowed}, not {value}")


@dataclass(frozen=True)
class Absent:
    """Not supported. ``why`` completes "FIELD is not supported: "."""

    why: str


@dataclass(frozen=True)
class Inert:
    """Accepted without effect. ``why`` completes "FIELD has no effect: "."""

    why: str


PLACEMENT = Inert("processes are placed by the resources (areal apply), not by the driver")
"""Scheduling fields: where processes run is said in a manifest."""

ADAPTER = Inert("the adapter that is trained is served as the model's weights, under the model's own name")
"""The adapter's name in the engine."""
