"""Merge patches: like ``tree.merge`` where nothing is removed, and what directives add to it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.resources import tree
from areal.resources.nodes import MappingNode, Pos, Problems, locate, patched, plain, to_node

BASE, OVER = Pos("base", 1, 1), Pos("over", 2, 2)


def _patched(base: Any, patch: Any) -> Any:
    problems = Problems()
    found = patched(to_node(base, BASE), to_node(patch, OVER), problems)
    assert not problems, problems.diagnostics()
    return plain(found)


@pytest.mark.parametrize(
    ("base", "patch", "result"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}, {"a": {"b": 3, "c": 2}}),
        ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
        ({"a": {"b": 1}}, {"a": {"$patch": "delete"}}, {}),
        ({}, {"a": None, "b": {"$patch": "delete"}}, {}),
        ({"a": {"b": 1}}, {"a": {"$patch": "replace", "c": 2}}, {"a": {"c": 2}}),
        ({"a": 1}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": {"b": 1}}, {"a": 1}, {"a": 1}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": [1, 2]}, {"a": {"$append": [3]}}, {"a": [1, 2, 3]}),
        ({}, {"a": {"$append": [3]}}, {"a": [3]}),
        ({"m": [{"name": "a", "x": 1}]}, {"m": [{"name": "a", "y": 2}]}, {"m": [{"name": "a", "x": 1, "y": 2}]}),
        ({"m": [{"name": "a"}]}, {"m": [{"name": "b"}]}, {"m": [{"name": "a"}, {"name": "b"}]}),
        ({"m": [{"name": "a"}, {"name": "b"}]}, {"m": [{"name": "a", "$patch": "delete"}]}, {"m": [{"name": "b"}]}),
        ({"m": [{"name": "a"}]}, {"m": [{"name": "z", "$patch": "delete"}]}, {"m": [{"name": "a"}]}),
        (
            {"m": [{"name": "a", "x": 1}]},
            {"m": [{"name": "a", "$patch": "replace", "y": 2}]},
            {"m": [{"name": "a", "y": 2}]},
        ),
        ({"m": [{"name": "a"}]}, {"m": [{"$patch": "replace"}, {"name": "b"}]}, {"m": [{"name": "b"}]}),
        ({"m": [{"name": "a"}]}, {"m": []}, {"m": []}),
        ({"m": [{"name": "a", "x": 1}]}, {"m": [{"name": "a", "x": None}]}, {"m": [{"name": "a"}]}),
        (
            {"a": {"b": {"c": 1}}},
            {"a": {"b": {"d": None, "e": {"f": None, "g": 1}}}},
            {"a": {"b": {"c": 1, "e": {"g": 1}}}},
        ),
    ],
)
def test_patch_merges_replaces_and_removes(base: Any, patch: Any, result: Any) -> None:
    assert _patched(base, patch) == result


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"a": {"$patch": "remove"}}, 'expected "delete" or "replace"'),
        ({"a": {"$append": [1]}}, "$append adds a list to a list, alone in its map"),
        ({"l": {"$append": 1}}, "$append adds a list to a list, alone in its map"),
        ({"l": {"$append": [1], "x": 1}}, "$append adds a list to a list, alone in its map"),
    ],
)
def test_bad_directive_is_reported(patch: Any, message: str) -> None:
    problems = Problems()
    patched(to_node({"a": {"b": 1}, "l": [1]}, BASE), to_node(patch, OVER), problems)
    assert {fault.message for fault in problems.diagnostics()} == {message}


def test_patched_positions_come_from_patch_or_base() -> None:
    found = patched(to_node({"a": {"b": 1, "c": 2}}, BASE), to_node({"a": {"b": 3, "d": 4}}, OVER), Problems())
    assert isinstance(found, MappingNode)
    assert locate(found, ("a", "b")) == OVER and locate(found, ("a", "c")) == BASE
    assert locate(found, ("a", "d"), at_key=True) == OVER and locate(found, ("a", "b"), at_key=True) == BASE


_SCALARS = st.integers(0, 3) | st.booleans() | st.text("ab", max_size=2)
_ITEMS = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from("pqr")}, optional={"v": _SCALARS, "w": _SCALARS}),
    min_size=1,
    max_size=3,
    unique_by=lambda item: item["name"],
)
_SHAPED = st.fixed_dictionaries(
    {},
    optional={"a": st.dictionaries(st.sampled_from("xyz"), _SCALARS), "m": _ITEMS, "l": st.lists(_SCALARS, max_size=2)},
)


@given(_SHAPED, _SHAPED)
def test_patch_without_directives_is_merge(base: Any, patch: Any) -> None:
    assert _patched(base, patch) == tree.merge(base, patch)


@given(_SHAPED, _SHAPED)
def test_patching_is_idempotent(base: Any, patch: Any) -> None:
    once = _patched(base, patch)
    assert _patched(once, patch) == once
