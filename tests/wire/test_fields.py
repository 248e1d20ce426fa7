from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from areal.errors import FieldError
from areal.wire.fields import Count, PositiveFloat, read_fields, write_fields


@dataclass(frozen=True)
class Part:
    name: str
    weight: float = 1.0


@dataclass(frozen=True)
class Whole:
    count: Count
    seconds: PositiveFloat = 1.0
    kind: Literal["a", "b"] = "a"
    exact: bool = False
    file: str | None = None
    parts: tuple[Part, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    free: Mapping[str, Any] = field(default_factory=dict)
    part: Part | None = None
    messages: tuple[Mapping[str, object], ...] = ()


FULL = {
    "count": 2,
    "seconds": 3,
    "kind": "b",
    "exact": True,
    "file": "x",
    "parts": [{"name": "p"}, {"name": "q", "weight": 0.5}],
    "labels": {"k": "v"},
    "free": {"k": [1, None]},
}


def test_read_fields_builds_every_field() -> None:
    read = read_fields(Whole, FULL)
    assert read == Whole(2, 3.0, "b", True, "x", (Part("p"), Part("q", 0.5)), {"k": "v"}, {"k": [1, None]})
    assert type(read.seconds) is float


def test_write_fields_omits_defaults_and_round_trips() -> None:
    assert write_fields(Whole(1)) == {"count": 1}
    assert read_fields(Whole, write_fields(read_fields(Whole, FULL))) == read_fields(Whole, FULL)


@pytest.mark.parametrize(
    ("changed", "at_fault", "problem"),
    [
        ({"cuont": 1}, "cuont", "is not a known field"),
        ({"count": None}, "count", "must be a whole number, not null"),
        ({"count": True}, "count", "must be a whole number, not True"),
        ({"count": 1.0}, "count", "must be a whole number, not 1.0"),
        ({"count": 0}, "count", "must be at least 1, not 0"),
        ({"seconds": 0}, "seconds", "must be above 0, not 0"),
        ({"seconds": float("nan")}, "seconds", "must be a number, not nan"),
        ({"seconds": 10**400}, "seconds", "must be a number, not 1000"),
        ({"seconds": -float("inf")}, "seconds", "must be a number, not -inf"),
        ({"kind": "c"}, "kind", "must be one of a, b, not 'c'"),
        ({"exact": 1}, "exact", "must be true or false, not 1"),
        ({"file": 3}, "file", "must be a string, not 3"),
        ({"parts": "p"}, "parts", "must be a list, not 'p'"),
        ({"parts": [{"name": "p"}, {}]}, "parts[1].name", "is required"),
        ({"part": {}}, "part.name", "is required"),
        ({"labels": {"k": 1}}, "labels.k", "must be a string, not 1"),
        ({"free": []}, "free", "must be an object, not a list"),
    ],
)
def test_read_fields_names_wrong_field(changed: dict[str, Any], at_fault: str, problem: str) -> None:
    with pytest.raises(FieldError) as caught:
        read_fields(Whole, FULL | changed)
    assert caught.value.field == at_fault
    assert caught.value.problem.startswith(problem)
    assert caught.value.is_missing == (problem == "is required")


def test_read_fields_refuses_missing_or_non_object() -> None:
    with pytest.raises(FieldError, match=r"^count is required$"):
        read_fields(Whole, {})
    with pytest.raises(FieldError, match=r"^must be an object$"):
        read_fields(Whole, [1])


def test_read_fields_passes_messages_on_as_they_are() -> None:
    """Each turn of an agent reads the whole conversation: a copy of each message cost it 5 ms after 1,800 messages."""
    messages = [{"role": "user", "content": "x"}, {"role": "tool", "content": [{"type": "text"}]}]
    read = read_fields(Whole, {"count": 1, "messages": messages}).messages
    assert all(one is other for one, other in zip(read, messages, strict=True))
    with pytest.raises(FieldError, match=r"^messages\[1\] must be an object, not 7$"):
        read_fields(Whole, {"count": 1, "messages": [messages[0], 7]})
