"""``areal.dataclasses.dataclass`` against the standard library's, by the same classes made by both."""

from __future__ import annotations

import ast
import copy
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

import areal
from areal.dataclasses import asdict, dataclass, field, replace

Decorator = Callable[..., Any]
OPTIONS: dict[str, dict[str, bool]] = {
    "plain": {},
    "frozen": {"frozen": True},
    "slots": {"slots": True},
    "frozen slots": {"frozen": True, "slots": True},
    "keywords": {"frozen": True, "kw_only": True},
    "by identity": {"eq": False},
}


def family(make: Decorator, options: dict[str, bool]) -> tuple[type, type]:
    """A class with all kinds of fields and one that extends it."""

    @make(**options)
    class Base:
        count: int
        name: str = "x"
        shared: ClassVar[list[int]] = []
        tags: tuple[str, ...] = ()
        extra: dict[str, int] = field(default_factory=dict, compare=False)
        secret: str = field(default="s", repr=False)
        late: list[int] = field(init=False, default_factory=list, hash=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "name", self.name.lower())

    @make(**options)
    class Derived(Base):
        tags: tuple[str, ...] = ("d",)
        more: float = field(default=0.5, kw_only=True)

    return Base, Derived


def outcome(act: Callable[[], Any]) -> Any:
    """What a call returns or raises, in a form that does not depend on who made the class."""
    try:
        return act()
    except (TypeError, AttributeError) as error:
        return type(error), str(error)


def observed(cls: Any) -> list[Any]:
    one, same, other = cls(count=1, name="A"), cls(count=1, name="a", extra={"k": 1}), cls(count=2)
    acts: list[Callable[[], Any]] = [
        lambda: repr(one),
        lambda: (one == same, one == other, one != same, one == 1),
        lambda: hash(one) == hash(same),
        lambda: hash(one) == hash(other),
        lambda: asdict(same),
        lambda: repr(replace(one, count=7, tags=("r",))),
        lambda: repr(cls(1, "B", ("t",), {"k": 2})),
        lambda: setattr(one, "count", 3),
        lambda: delattr(one, "name"),
        lambda: repr(one),
        lambda: hasattr(one, "__dict__"),
        lambda: repr(copy.copy(other)),
        lambda: repr(copy.deepcopy(other)),
        lambda: cls(),
        lambda: cls(count=1, unknown=2),
        lambda: other.late is cls(count=2).late,
        lambda: cls.__match_args__,
        lambda: [each.name for each in dataclasses.fields(cls)],
    ]
    return [outcome(act) for act in acts]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_class_behaves_as_one_of_the_standard_library(options: dict[str, bool]) -> None:
    for ours, standard in zip(family(dataclass, options), family(dataclasses.dataclass, options), strict=True):
        assert observed(ours) == observed(standard)


def written(make: Decorator, frozen: bool) -> Any:
    @make(frozen=frozen)
    class Written:
        value: int

        def __eq__(self, other: object) -> bool:
            return True

        def __repr__(self) -> str:
            return "own"

    return Written


@pytest.mark.parametrize("frozen", [False, True])
def test_methods_that_a_class_has_stay(frozen: bool) -> None:
    ours, standard = written(dataclass, frozen), written(dataclasses.dataclass, frozen)
    assert (repr(ours(1)), ours(1) == ours(2)) == ("own", True)
    assert outcome(lambda: hash(ours(1)) == hash(ours(1))) == outcome(lambda: hash(standard(1)) == hash(standard(1)))


@dataclass(frozen=True, slots=True)
class Pickled:
    first: int
    second: tuple[str, ...] = ()


def test_frozen_object_with_slots_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(Pickled(1, ("a",)))) == Pickled(1, ("a",))  # noqa: S301


def test_subclass_that_is_no_dataclass_calls_the_inherited_init_and_has_attributes_of_its_own() -> None:
    class Child(Pickled):
        def __init__(self) -> None:
            super().__init__(3)
            self.own = 1

    child = Child()
    assert (child.first, child.own) == (3, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        child.first = 4  # type: ignore[misc]


def test_every_dataclass_but_those_of_the_api_is_made_by_it() -> None:
    """User code extends the classes of ``areal.api``; classes of both kinds cannot extend each other."""
    root = Path(areal.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        if path == root / "dataclasses.py" or root / "api" in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "dataclasses":
                found += [f"{path.relative_to(root)}:{node.lineno}" for each in node.names if each.name == "dataclass"]
    assert found == []
