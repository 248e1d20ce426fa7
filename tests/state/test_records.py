from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from areal.resources.tree import changes, get_path, leaves, path_text
from areal.state.records import APPLY, Layer, conflicts, effective, origin, origins, replace_layer, take_leaves

scalars = st.one_of(st.none(), st.booleans(), st.integers(-2, 3), st.sampled_from(["", "a", "b"]), st.just(1.0))
words = st.sampled_from(["a", "b", "c"])
maps = st.dictionaries(words, scalars, min_size=1)
lists = st.lists(st.integers(0, 2), min_size=1, max_size=3)


def items() -> st.SearchStrategy[dict[str, Any]]:
    extra = st.fixed_dictionaries({}, optional={"replicas": scalars, "env": maps})
    return st.builds(lambda name, rest: {"name": name, **rest}, words, extra)


keyed = st.lists(items(), min_size=1, max_size=3, unique_by=lambda item: item["name"])
specs = st.fixed_dictionaries(
    {}, optional={"replicas": scalars, "path": scalars, "env": maps, "args": lists, "models": keyed}
)
"""Of one schema: a path is a map, a list or a scalar in all of them."""

trees = st.recursive(
    scalars, lambda inner: st.dictionaries(words, inner) | st.lists(inner, max_size=2) | keyed, max_leaves=8
)
wild = st.dictionaries(words, trees)
"""Of no schema at all: what a hand-edited or older store may hold."""


def stacks(content: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[tuple[Layer, ...]]:
    def build(parts: list[dict[str, Any]]) -> tuple[Layer, ...]:
        layers: tuple[Layer, ...] = ()
        for manager, spec in zip((APPLY, "scale", "suspend"), parts, strict=False):
            layers = replace_layer(layers, Layer(manager, spec, None, f"{manager}@box", 1.0))
        return layers

    return st.lists(content, max_size=3).map(build)


def apply_layer(spec: dict[str, Any], at: float = 5.0) -> Layer:
    return Layer(APPLY, spec, {"file": "x.yaml"}, "bob@box", at)


def own(layers: tuple[Layer, ...]) -> dict[str, dict[str, Any]]:
    return {layer.manager: layer.spec for layer in layers}


@given(stacks(wild), wild)
def test_replace_with_same_spec_changes_nothing(layers: tuple[Layer, ...], spec: dict[str, Any]) -> None:
    once = replace_layer(layers, apply_layer(spec))
    assert replace_layer(once, apply_layer(spec, at=99.0)) == once


@given(stacks(wild), wild, wild)
def test_replace_drops_all_of_previous_manifest(
    layers: tuple[Layer, ...], first: dict[str, Any], second: dict[str, Any]
) -> None:
    through = replace_layer(replace_layer(layers, apply_layer(first)), apply_layer(second))
    direct = replace_layer(layers, apply_layer(second))
    assert own(through) == own(direct)
    assert effective(through) == effective(direct)


@given(stacks(wild), wild)
def test_replace_keeps_one_layer_per_manager_apply_first(layers: tuple[Layer, ...], spec: dict[str, Any]) -> None:
    managers = [layer.manager for layer in replace_layer(layers, apply_layer(spec))]
    assert managers[0] == APPLY
    assert len(set(managers)) == len(managers)


@given(specs, specs)
def test_replace_removes_field_without_holder(first: dict[str, Any], second: dict[str, Any]) -> None:
    layers = replace_layer(replace_layer((), apply_layer(first)), apply_layer(second))
    assert not changes(effective(layers), second)


@given(stacks(wild))
def test_leaf_origin_is_last_layer_holding_it(layers: tuple[Layer, ...]) -> None:
    merged = leaves(effective(layers))
    found = origins(layers)
    assert found.keys() == merged.keys()
    for path, layer in found.items():
        assert not changes({"": merged[path]}, {"": leaves(layer.spec)[path]})
        later = layers[layers.index(layer) + 1 :]
        assert not any(path in leaves(other.spec) for other in later)


@given(stacks(specs), specs)
def test_conflicts_are_leaves_held_differently_by_later_layers(layers: tuple[Layer, ...], spec: dict[str, Any]) -> None:
    found = {(conflict.path, conflict.manager) for conflict in conflicts(layers, apply_layer(spec))}
    expected = {
        (path, layer.manager)
        for layer in layers
        if layer.manager != APPLY
        for path, value in leaves(spec).items()
        if path in leaves(layer.spec) and changes({"": value}, {"": leaves(layer.spec)[path]})
    }
    assert found == expected


@given(stacks(wild), wild)
def test_take_conflicts_makes_manifest_win(layers: tuple[Layer, ...], spec: dict[str, Any]) -> None:
    mine = apply_layer(spec)
    taken = take_leaves(layers, conflicts(layers, mine))
    assert conflicts(taken, mine) == ()
    result = effective(replace_layer(taken, mine))
    for path, value in leaves(spec).items():
        if value != {}:
            assert not changes({"": value}, {"": get_path(result, path)})


@given(stacks(specs), specs)
def test_take_conflicts_changes_no_other_leaf(layers: tuple[Layer, ...], spec: dict[str, Any]) -> None:
    found = conflicts(layers, apply_layer(spec))
    taken = own(take_leaves(layers, found))
    for layer in layers:
        lost = {conflict.path for conflict in found if conflict.manager == layer.manager}
        kept = {path: value for path, value in leaves(layer.spec).items() if path not in lost}
        after = leaves(taken.get(layer.manager, {}))
        assert {path: kept[path] for path in kept if path[-1] != "name"} == {
            path: after[path] for path in after if path[-1] != "name"
        }


def test_conflict_with_empty_map_is_found() -> None:
    layers = (apply_layer({}), Layer("scale", {"env": {"a": "1"}, "replicas": 4}, None, "alice@box", 7.0))

    found = conflicts(layers, apply_layer({"env": {}, "replicas": 3}))

    assert [each.path for each in found] == [("replicas",)]


def test_conflict_names_owner_time_and_both_values() -> None:
    layers = (apply_layer({"replicas": 2}), Layer("scale", {"replicas": 4}, None, "alice@box", 7.0))
    (conflict,) = conflicts(layers, apply_layer({"replicas": 3}))
    assert (path_text(conflict.path), conflict.mine, conflict.theirs) == ("replicas", 3, 4)
    assert (conflict.manager, conflict.actor, conflict.at) == ("scale", "alice@box", 7.0)


def test_conflict_between_scalar_and_map_is_found_and_taken() -> None:
    layers = (apply_layer({}), Layer("scale", {"env": None}))
    found = conflicts(layers, apply_layer({"env": {"A": "1"}}))
    assert [(path_text(conflict.path), conflict.theirs) for conflict in found] == [("env.A", None)]
    assert own(take_leaves(layers, found)) == {APPLY: {}}


def test_taking_last_field_of_named_item_removes_item() -> None:
    layers = (apply_layer({}), Layer("scale", {"models": [{"name": "qwen", "replicas": 4}], "replicas": 2}))
    found = conflicts(layers, apply_layer({"models": [{"name": "qwen", "replicas": 1}]}))
    assert own(take_leaves(layers, found))["scale"] == {"replicas": 2}


def test_unmentioned_field_is_left_to_its_owner() -> None:
    layers = (apply_layer({"path": "p"}), Layer("scale", {"replicas": 4}))
    assert conflicts(layers, apply_layer({"path": "q"})) == ()
    after = replace_layer(layers, apply_layer({"path": "q"}))
    assert effective(after) == {"path": "q", "replicas": 4}
    assert origin(after) == {"path": APPLY, "replicas": "scale"}


def test_replace_with_empty_layer_drops_it_except_manifest() -> None:
    layers = (apply_layer({}), Layer("scale", {"replicas": 4}))
    assert own(replace_layer(layers, Layer("scale", {}))) == {APPLY: {}}


def test_replacing_true_by_one_is_a_change() -> None:
    once = replace_layer((), apply_layer({"stream": True}, at=1.0))
    assert replace_layer(once, apply_layer({"stream": 1}, at=2.0))[0].at == 2.0
