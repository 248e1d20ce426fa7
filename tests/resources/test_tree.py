"""Merging, leaves and changes, over generated trees of one shape: what layers and plans rely on."""

from __future__ import annotations

import re
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


def test_absent_is_no_value_and_false() -> None:
    assert not tree.ABSENT and repr(tree.ABSENT) == "ABSENT" and tree.get_path({"a": None}, ("a",)) is None


@pytest.mark.parametrize(
    ("value", "keyed"),
    [
        ([{"name": "a"}], True),
        ([{"name": "a", "x": 1}, {"name": "b"}], True),
        ([], False),
        ([{"name": "a"}, {"name": "a"}], False),
        ([{"name": "a"}, {"x": 1}], False),
        ([{"name": "a"}, {"name": 1}], False),
        ([{"name": "a"}, "b"], False),
        ({"name": "a"}, False),
        ("name", False),
    ],
)
def test_keyed_list_has_maps_with_distinct_names(value: Any, keyed: bool) -> None:
    assert tree.is_keyed(value) is keyed


@pytest.mark.parametrize(
    ("base", "patch", "merged"),
    [
        ([{"name": "a"}], [], [{"name": "a"}]),
        ([{"name": "a"}], [1], [1]),
        ([{"name": "a"}], None, None),
        ([1], [], []),
        ([], [{"name": "a"}], [{"name": "a"}]),
        ({"a": 1}, 2, 2),
        (2, {"a": 1}, {"a": 1}),
        ({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"b": 1, "c": 2}}),
    ],
)
def test_merge_of_each_pair_of_shapes(base: Any, patch: Any, merged: Any) -> None:
    assert tree.merge(base, patch) == merged


@pytest.mark.parametrize(
    ("base", "over", "merged"),
    [
        ({"a": {"b": 1}}, {"a": {"c": 2}, "d": 3}, {"a": {"b": 1, "c": 2}, "d": 3}),
        ({"a": {"b": 1}}, {"a": 2}, {"a": 2}),
        ({"a": 2}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": [{"name": "x"}]}, {"a": [{"name": "y"}]}, {"a": [{"name": "y"}]}),
        ({"a": 1}, {}, {"a": 1}),
    ],
)
def test_values_of_templates_merge_as_maps_alone(base: Any, over: Any, merged: Any) -> None:
    assert tree.merge_values(base, over) == merged


def test_leaves_are_scalars_plain_lists_and_empty_maps() -> None:
    value = {"a": {}, "b": [], "[c]": 1, "\\d": 2, "e": [{"name": "x", "f": {"g": None}}], "h": [{"x": 1}]}
    assert tree.leaves(value) == {
        ("a",): {},
        ("b",): [],
        ("\\[c]",): 1,
        ("\\\\d",): 2,
        ("e", "[x]", "name"): "x",
        ("e", "[x]", "f", "g"): None,
        ("h",): [{"x": 1}],
    }
    assert (tree.leaves({}), tree.leaves(5)) == ({}, {(): 5})


@pytest.mark.parametrize(
    ("old", "new", "differ"),
    [
        ([1, 2], [1, 2], False),
        ([1, 2], [1, 3], True),
        ([1, 2], [3, 2], True),
        ([1, 2], [1], True),
        ([1], [True], True),
        ([1], [1.0], True),
        ([{"x": 1, "y": 2}], [{"y": 2, "x": 1}], False),
        ([{"x": 1, "y": 2}], [{"x": 1, "y": 3}], True),
        ([{"x": 1}], [{"x": 1, "y": 2}], True),
        ({}, [], True),
        ({}, None, True),
    ],
)
def test_leaf_changes_by_value_and_by_type(old: Any, new: Any, differ: bool) -> None:
    assert len(tree.changes({"a": old}, {"a": new})) == differ


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (("a", 0), 1),
        (("a", 1), {"name": "n", "b": 2}),
        (("a", -1), {"name": "n", "b": 2}),
        (("a", -2), 1),
        (("a", 2), tree.ABSENT),
        (("a", -3), tree.ABSENT),
        (("a", "[n]", "b"), 2),
        (("a", "[m]"), tree.ABSENT),
        (("a", "b"), tree.ABSENT),
        (("c", "[x.y]"), 3),
        (("c", "x.y"), 3),
        (("c", "[x.y]", "z"), tree.ABSENT),
        (("c", "\\[q]"), 4),
        (("c", "[[q]]"), 4),
    ],
)
def test_get_path_finds_items_by_number_or_name_and_keys_in_brackets(path: tree.FieldPath, found: Any) -> None:
    assert tree.get_path({"a": [1, {"name": "n", "b": 2}], "c": {"x.y": 3, "[q]": 4}}, path) == found


@pytest.mark.parametrize(
    ("before", "path", "after"),
    [
        ({}, ("a", "b"), {"a": {"b": 9}}),
        ({"a": 1}, ("a", "b"), {"a": {"b": 9}}),
        ({"a": 1}, (), 9),
        ({"a": [1, 2]}, ("a", 1), {"a": [1, 9]}),
        ({"a": [1, 2]}, ("a", 0), {"a": [9, 2]}),
        ({"a": [{"name": "n", "b": 1}]}, ("a", "[n]", "b"), {"a": [{"name": "n", "b": 9}]}),
        ({"a": [{"name": "n"}]}, ("a", "[m]", "b"), {"a": [{"name": "n"}, {"name": "m", "b": 9}]}),
        ({}, ("a", "[m]", "b"), {"a": [{"name": "m", "b": 9}]}),
        ({"a": {}}, ("a", "[m]", "b"), {"a": [{"name": "m", "b": 9}]}),
        ({"a": 1}, ("a", "[m]", "b"), {"a": [{"name": "m", "b": 9}]}),
        ({"a": {"x.y": 1}}, ("a", "[x.y]"), {"a": {"x.y": 9}}),
        ({"a": {"k": 1}}, ("a", "[x.y]"), {"a": {"k": 1, "x.y": 9}}),
        ({"a": {"k": 1}}, ("a", "\\[q]"), {"a": {"k": 1, "[q]": 9}}),
    ],
)
def test_set_path_creates_what_is_missing(before: Any, path: tree.FieldPath, after: Any) -> None:
    assert tree.set_path(before, path, 9) == after


@pytest.mark.parametrize(("step", "text"), [(2, "[2]"), (-3, "[-3]"), ("b", "b")])
def test_set_path_of_missing_index_is_an_error(step: tree.Step, text: str) -> None:
    with pytest.raises(KeyError, match=f"^'{re.escape(text)}'$"):
        tree.set_path({"a": [1, 2]}, ("a", step), 9)


@pytest.mark.parametrize(
    ("before", "path", "after"),
    [
        ({"a": [1, 2, 3]}, ("a", 1), {"a": [1, 3]}),
        ({"a": [1]}, ("a", 0), {}),
        ({"a": {"b": {"c": 1}}, "d": 2}, ("a", "b", "c"), {"d": 2}),
        ({"a": {"b": 1, "c": 2}, "d": 2}, ("a", "b"), {"a": {"c": 2}, "d": 2}),
        ({"a": {"b": {}}}, ("a", "b", "c"), {"a": {"b": {}}}),
        ({"a": [{"name": "n", "b": 1}, {"name": "m"}]}, ("a", "[n]", "b"), {"a": [{"name": "n"}, {"name": "m"}]}),
        ({"a": [{"name": "n"}, {"name": "m"}]}, ("a", "[n]", "name"), {"a": [{"name": "m"}]}),
        ({"a": [{"name": "n"}, {"name": "m"}]}, ("a", "[n]"), {"a": [{"name": "m"}]}),
        ({"a": 1}, ("b",), {"a": 1}),
        ({"a": 1}, ("a", "b"), {"a": 1}),
    ],
)
def test_delete_path_drops_branches_that_become_empty(before: Any, path: tree.FieldPath, after: Any) -> None:
    assert tree.delete_path(before, path) == after


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("", ()),
        ("a", ("a",)),
        ("a.b-c.$d", ("a", "b-c", "$d")),
        ("a[0][12].b", ("a", 0, 12, "b")),
        ("a['0']", ("a", "[0]")),
        ("a[x.y].b", ("a", "[x.y]", "b")),
        ("[n].b", ("[n]", "b")),
    ],
)
def test_parse_path_reads_keys_indexes_and_names(text: str, path: tree.FieldPath) -> None:
    assert tree.parse_path(text) == path


@pytest.mark.parametrize(("text", "column"), [("spec..x", 5), (".spec", 1), ("a b", 2), ("[x]y", 4), ("a.b[", 4)])
def test_parse_path_error_points_at_the_fault(text: str, column: int) -> None:
    with pytest.raises(ValueError, match=f'unexpected "{re.escape(text[column - 1])}" at column {column}$'):
        tree.parse_path(text)


@pytest.mark.parametrize(
    ("step", "name"),
    [("[a]", "a"), ("[ab]", "ab"), ("[]", None), ("[", None), ("a]", None), ("[a", None), ("[a]b", None), (0, None)],
)
def test_bracketed_step_has_a_name_in_brackets(step: tree.Step, name: str | None) -> None:
    assert tree.bracketed(step) == name


def test_update_classes_ascend_with_their_cost() -> None:
    assert [str(each.name) for each in sorted(tree.UpdateClass)] == ["META", "HOT", "ROLL", "RECREATE", "IMMUTABLE"]


@pytest.mark.parametrize(
    ("text", "op", "path", "value"),
    [
        ("a=1", "", ("a",), "1"),
        ("a.0.b=x=y", "", ("a", 0, "b"), "x=y"),
        ("a=", "", ("a",), ""),
        ("+a=1", "+", ("a",), "1"),
        ("++a.b=1", "+", ("a", "b"), "1"),
        ("~a", "~", ("a",), None),
        ("~a.b=1", "~", ("a", "b"), "1"),
    ],
)
def test_override_has_operation_path_and_value(text: str, op: str, path: tree.FieldPath, value: str | None) -> None:
    assert tree.parse_override(text) == tree.Override(text, op, path, value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no override: write key=value"),
        ("=1", "is no override: write key=value"),
        ("a b=1", "is no override: write key=value"),
        ("a", "'a' has no value: write a=value"),
        ("+a", "has no value: write a=value"),
        ("a..b=1", "a part of the key is empty"),
        (".a=1", "a part of the key is empty"),
        ("~a.", "a part of the key is empty"),
    ],
)
def test_malformed_override_is_refused(text: str, message: str) -> None:
    with pytest.raises(tree.BadOverride, match=message):
        tree.parse_override(text)


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("a.l.1=9", {"a": {"b": 1, "l": [{"x": 1}, 9]}, "n": None}),
        ("a.l.0.x=9", {"a": {"b": 1, "l": [{"x": 9}, 2]}, "n": None}),
        ("+new.key=9", {"a": {"b": 1, "l": [{"x": 1}, 2]}, "n": None, "new": {"key": 9}}),
        ("n.x=9", {"a": {"b": 1, "l": [{"x": 1}, 2]}, "n": {"x": 9}}),
        ("~a.l.0.x", {"a": {"b": 1, "l": [{}, 2]}, "n": None}),
        ("~n", {"a": {"b": 1, "l": [{"x": 1}, 2]}}),
        ("~a.b=1", {"a": {"l": [{"x": 1}, 2]}, "n": None}),
        ("a.b.c=9", "^a.b is 1, it has no keys"),
        ("a.l.2=9", "a.l has 2 items, there is none with number 2"),
        ("a.l.x=9", r"a.l is .*, it has no keys"),
        ("~a.c", "~a.c: the file has no such key"),
        ("~c.d", "~c.d: the file has no such key"),
        ("~a.l.0", "~a.l.0: the file has no such key"),
        ("~a.b=2", "~a.b: the file says 1 there"),
    ],
)
def test_override_changes_one_key_or_is_refused(text: str, after: Any) -> None:
    node: dict[str, Any] = {"a": {"b": 1, "l": [{"x": 1}, 2]}, "n": None}
    override = tree.parse_override(text)
    value = int(override.value) if override.value else None
    if isinstance(after, str):
        with pytest.raises(tree.BadOverride, match=after):
            tree.apply_override(node, override, value)
    else:
        tree.apply_override(node, override, value)
        assert node == after


NESTED = {"actor": {"lr": 1}, "trainer": {"epochs": 2, "grpo": {"actor": {"lr": 3, "eps": 4}, "seed": 5}}}


@pytest.mark.parametrize(
    ("overridden", "actor"),
    [
        ([], {"lr": 3, "eps": 4}),
        ([("actor", "lr")], {"lr": 1, "eps": 4}),
        ([("trainer", "grpo", "actor", "lr")], {"lr": 3, "eps": 4}),
        ([("actor", "lr"), ("trainer", "grpo", "actor", "lr")], {"lr": 3, "eps": 4}),
        ([("trainer", "grpo", "actor", "lr"), ("actor", "lr")], {"lr": 1, "eps": 4}),
        ([("trainer", "grpo")], {"lr": 3, "eps": 4}),
        ([("trainer", "epochs")], {"lr": 3, "eps": 4}),
        ([("gone", "key")], {"lr": 3, "eps": 4}),
    ],
)
def test_keys_below_a_trainer_move_up_but_not_over_overrides(overridden: Any, actor: Any) -> None:
    assert tree.lifted(NESTED, overridden) == {"actor": actor, "trainer": {"epochs": 2}, "seed": 5}


def test_overrides_of_other_keys_below_trainer_stay_there() -> None:
    found: dict[str, object] = {"trainer": {"saver": {"freq": 3}, "ppo": {"seed": 5}}, "actor": {"ppo": {"eps": 4}}}
    overridden = [("trainer", "saver", "freq"), ("actor", "ppo", "eps")]
    assert tree.lifted(found, overridden) == {
        "trainer": {"saver": {"freq": 3}},
        "actor": {"ppo": {"eps": 4}},
        "seed": 5,
    }


def test_configuration_without_nested_trainer_stays_as_it_is() -> None:
    for plain in ({"actor": {"lr": 1}}, {"trainer": None}, {"trainer": {"epochs": 2}}):
        assert tree.lifted(dict(plain)) == plain
