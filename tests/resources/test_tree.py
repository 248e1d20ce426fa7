"""Merging, leaves and changes, over generated trees of one shape: what layers and plans rely on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.resources import tree

_WORDS = st.text("abcxyz[]\\.-", min_size=1, max_size=4)
_SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2)
_ITEM_NAMES = st.sampled_from(["p", "q", "r"])


def _any_tree() -> st.SearchStrategy[Any]:
    plain_lists = st.lists(_SCALARS, max_size=3)
    keyed = st.lists(_ITEM_NAMES, unique=True, min_size=1).flatmap(
        lambda names: st.tuples(*(st.fixed_dictionaries({"name": st.just(name), "v": _SCALARS}) for name in names)).map(
            list
        )
    )
    return st.dictionaries(
        _WORDS, st.recursive(_SCALARS | plain_lists | keyed, lambda inner: st.dictionaries(_WORDS, inner, max_size=3))
    )


def _shaped() -> st.SearchStrategy[Any]:
    """Sparse trees of one schema: a path has the same type in all of them."""
    item = st.fixed_dictionaries(
        {"name": _ITEM_NAMES}, optional={"replicas": st.integers(0, 3), "args": st.dictionaries(_WORDS, _SCALARS)}
    )
    return st.fixed_dictionaries(
        {},
        optional={
            "gateway": st.fixed_dictionaries({}, optional={"port": st.integers(), "host": st.text("ab")}),
            "models": st.lists(item, max_size=3, unique_by=lambda model: model["name"]),
            "overrides": st.lists(st.text("ab"), max_size=2),
            "suspend": st.booleans() | st.none(),
        },
    )


@given(_shaped(), _shaped(), _shaped())
def test_merge_of_three_layers_is_associative(a: Any, b: Any, c: Any) -> None:
    assert tree.merge(tree.merge(a, b), c) == tree.merge(a, tree.merge(b, c))


@given(_shaped())
def test_merge_with_itself_changes_nothing(a: Any) -> None:
    assert tree.merge(a, a) == a
    assert tree.merge({}, a) == a == tree.merge(a, {})


def _apply(value: Any, changes: tuple[tree.Change, ...]) -> Any:
    """Removals first, since a leaf may stand where a branch was. An item is addressed by its name, so names go last,
    and inner ones before outer ones."""
    removed = [change.path for change in changes if change.new is tree.ABSENT]
    for path in sorted(removed, key=lambda path: (path[-1:] == ("name",), -len(path))):
        value = tree.delete_path(value, path)
    for change in changes:
        if change.new is not tree.ABSENT:
            value = tree.set_path(value, change.path, change.new)
    return value


@given(_any_tree(), _any_tree())
def test_changes_applied_to_old_give_new(old: Any, new: Any) -> None:
    result = _apply(old, tree.changes(old, new))
    assert tree.leaves(result) == tree.leaves(new)
    assert tree.changes(result, new) == ()


@given(_any_tree())
def test_every_leaf_is_found_at_its_path(value: Any) -> None:
    for path, leaf in tree.leaves(value).items():
        assert tree.get_path(value, path) == leaf


@given(_any_tree(), _any_tree())
def test_operations_never_mutate_their_arguments(a: Any, b: Any) -> None:
    before = repr((a, b))
    tree.merge(a, b)
    _apply(a, tree.changes(a, b))
    assert repr((a, b)) == before


def test_merge_keyed_list_keeps_order_and_appends_new_items() -> None:
    base = {"models": [{"name": "a", "replicas": 1}, {"name": "b"}]}
    patch = {"models": [{"name": "c"}, {"name": "a", "replicas": 4}]}
    assert tree.merge(base, patch) == {"models": [{"name": "a", "replicas": 4}, {"name": "b"}, {"name": "c"}]}


def test_merge_plain_list_and_none_replace() -> None:
    assert tree.merge({"a": [1, 2], "b": {"c": 1}}, {"a": [3], "b": None}) == {"a": [3], "b": None}


def test_changes_distinguish_types_and_name_keyed_items() -> None:
    old = {"models": [{"name": "qwen", "replicas": 1}], "flag": 1}
    new = {"models": [{"name": "qwen", "replicas": 2}], "flag": True}
    found = tree.changes(old, new)
    assert [(tree.path_text(change.path), change.old, change.new) for change in found] == [
        ("models[qwen].replicas", 1, 2),
        ("flag", 1, True),
    ]


def test_filling_empty_map_changes_its_entries() -> None:
    (found,) = tree.changes({"engineArgs": {}}, {"engineArgs": {"max-batch-size": 16}})
    assert (tree.path_text(found.path), found.old, found.new) == ("engineArgs.max-batch-size", tree.ABSENT, 16)


def test_keyed_item_order_is_not_a_change() -> None:
    items = [{"name": "a"}, {"name": "b"}]
    assert tree.changes({"models": items}, {"models": items[::-1]}) == ()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (("spec", "models", "[qwen]", "replicas"), "spec.models[qwen].replicas"),
        (("spec", "overrides", 0), "spec.overrides[0]"),
        (("metadata", "labels", "areal.dev/team"), "metadata.labels[areal.dev/team]"),
        ((), ""),
    ],
)
def test_path_text_formats_path(path: tree.FieldPath, text: str) -> None:
    assert tree.path_text(path) == text


@pytest.mark.parametrize("key", ["areal.dev/team", '"areal.dev/team"', "'areal.dev/team'"])
def test_parse_path_of_bracketed_key_finds_map_entry(key: str) -> None:
    path = tree.parse_path(f"labels[{key}]")
    assert tree.get_path({"labels": {"areal.dev/team": "x"}}, path) == "x"


@pytest.mark.parametrize("text", ["spec..x", ".spec", "spec.", "a[b", "a[]", "a b", "[x]y"])
def test_parse_path_error_names_column(text: str) -> None:
    with pytest.raises(ValueError, match="column"):
        tree.parse_path(text)


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("~a.0", {"a": {"b": 1}}),
        ("~a.b", {"a": {"0": 2}}),
        ("~a.0=2", {"a": {"b": 1}}),
        ("a.0=3", {"a": {"0": 3, "b": 1}}),
    ],
)
def test_override_treats_number_as_map_key(text: str, after: Any) -> None:
    node: dict[str, Any] = {"a": {"0": 2, "b": 1}}
    override = tree.parse_override(text)
    tree.apply_override(node, override, None if override.value is None else int(override.value))
    assert node == after


def test_delete_path_removes_whole_or_nothing() -> None:
    value = {"a": {"b": 1}, "c": [{"name": "x", "d": 2}]}
    assert tree.delete_path(value, ()) == {}
    assert tree.delete_path(value, ("a", "z")) == value
    assert tree.delete_path(value, ("a", "b")) == {"c": value["c"]}
