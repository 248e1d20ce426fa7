"""``areal.dataclasses.dataclass`` against the standard library's, by the same classes made by both."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
def test_class_behaves_like_standard_dataclass(options: dict[str, bool]) -> None:
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
def test_existing_methods_of_class_are_kept(frozen: bool) -> None:
    ours, standard = written(dataclass, frozen), written(dataclasses.dataclass, frozen)
    assert (repr(ours(1)), ours(1) == ours(2)) == ("own", True)
    assert outcome(lambda: hash(ours(1)) == hash(ours(1))) == outcome(lambda: hash(standard(1)) == hash(standard(1)))


@dataclass(frozen=True, slots=True)
class Pickled:
    first: int
    second: tuple[str, ...] = ()


def test_frozen_slotted_object_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(Pickled(1, ("a",)))) == Pickled(1, ("a",))  # noqa: S301


def test_plain_subclass_inherits_init_and_has_own_attributes() -> None:
    class Child(Pickled):
        def __init__(self) -> None:
            super().__init__(3)
            self.own = 1

    child = Child()
    assert (child.first, child.own) == (3, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        child.first = 4  # type: ignore[misc]


def test_only_api_uses_standard_dataclass() -> None:
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


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"frozen": True, "slots": True}])
@pytest.mark.parametrize("made_before", [False, True])
def test_signature_and_help_match_standard_library(options: dict[str, bool], made_before: bool) -> None:
    for ours, standard in zip(family(dataclass, options), family(dataclasses.dataclass, options), strict=True):
        if made_before:
            ours(count=1)
        assert str(inspect.signature(ours)).replace(" -> None", "") == str(inspect.signature(standard)).replace(
            " -> None", ""
        )
        assert inspect.getdoc(ours) == inspect.getdoc(standard)


def test_callable_object_signature_is_of_its_call() -> None:
    @dataclass
    class Callable_:
        value: int

        def __call__(self, other: int) -> int:
            return self.value + other

    assert list(inspect.signature(Callable_(1)).parameters) == ["other"]


def test_keyword_sentinel_makes_later_fields_keyword_only() -> None:
    @dataclass(frozen=True)
    class Mixed:
        first: int
        _: dataclasses.KW_ONLY
        second: int = 2
        third: int

    assert repr(Mixed(1, third=3)).endswith("Mixed(first=1, second=2, third=3)")
    with pytest.raises(TypeError):
        Mixed(1, 2, third=3)  # type: ignore[call-arg]


def test_custom_init_of_derived_dataclass_calls_inherited_one() -> None:
    @dataclass
    class Base:
        first: int
        second: int = 2

    @dataclass
    class Derived(Base):
        third: int = 3

        def __init__(self, first: int) -> None:
            super().__init__(first)
            self.third = 4

    assert repr(Derived(1)).endswith("Derived(first=1, second=2, third=4)")


def test_concurrent_first_instances_are_correct() -> None:
    for _ in range(20):

        @dataclass(frozen=True, slots=True)
        class First:
            number: int
            extra: tuple[int, ...] = ()

        start = threading.Barrier(8)

        def make(number: int, cls: Any = First, start: threading.Barrier = start) -> Any:
            start.wait()
            return cls(number)

        with ThreadPoolExecutor(8) as pool:
            assert [each.number for each in pool.map(make, range(8))] == list(range(8))


@pytest.mark.parametrize("option", ["order", "unsafe_hash", "init", "repr", "match_args", "weakref_slot"])
def test_option_without_effect_is_refused_at_definition(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        dataclass(**{option: True})


@pytest.mark.parametrize("kind", ["dataclasses.InitVar[int]", dataclasses.InitVar[int]])
def test_init_only_variable_is_refused_at_definition(kind: Any) -> None:
    with pytest.raises(TypeError, match="InitVar"):
        dataclass(type("Given", (), {"__annotations__": {"given": kind}, "__module__": __name__}))


@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_and_mutable_classes_do_not_mix(frozen: bool) -> None:
    base, _ = family(dataclass, {"frozen": frozen})
    with pytest.raises(TypeError, match="frozen"):
        dataclass(frozen=not frozen)(type("Derived", (base,), {"__annotations__": {}}))


@pytest.mark.parametrize("library", [dataclasses, areal.dataclasses])
def test_objects_with_same_nan_are_equal(library: Any) -> None:
    class Plain:
        value: float

    One: Any = library.dataclass(frozen=True)(Plain)
    nan = float("nan")
    assert One(nan) == One(nan) and hash(One(nan)) == hash(One(nan)) == hash((nan,))
    assert One(nan) != One(float("nan")) and One(1) == One(1.0)
