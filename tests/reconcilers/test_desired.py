"""Which recorded objects a manifest ends, and which of their fields it did not set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from areal.errors import Conflict
from areal.reconcilers.desired import Target, Wanted, is_derived, pruned, target_for
from areal.state.records import APPLY, Layer, StoredObject
from tests.reconcilers.worlds import model, service, stored, unchanged, wish


def in_set(item: StoredObject, name: str | None = "s", owner: str | None = None) -> StoredObject:
    return replace(item, set_name=name, owner=owner)


JOB, SERVICE, MODEL = "TrainJob/learn", "InferenceService/default", "Model/qwen"
OWNED = [  # a job, its service, and the service's model
    in_set(stored("TrainJob", "learn", {"driver": "m:f"})),
    in_set(service(), None, JOB),
    in_set(model(), None, SERVICE),
]
OTHER = in_set(stored("InferenceService", "other", {}), "another")
APPLIED = wish("TrainJob", "learn", {"driver": "m:f"})
OWNS_SERVICE = wish("InferenceService", "default", {}, owner=JOB)


def ended(wanted: list[Wanted], *, prune: bool = True, set_name: str | None = "s") -> dict[str, str]:
    targets = pruned([*OWNED, OTHER], wanted, prune=prune, set_name=set_name)
    assert {target.action for target in targets} <= {"prune"}
    return {target.ref: target.cause for target in targets}


@pytest.mark.parametrize(
    ("wanted", "options", "causes"),
    [
        (
            [],
            {},
            {
                JOB: "no longer in set s",
                SERVICE: f"no longer declared by {JOB}",
                MODEL: f"no longer declared by {SERVICE}",
            },
        ),
        ([], {"prune": False}, {}),
        ([], {"set_name": None}, {}),
        ([], {"set_name": "another"}, {"InferenceService/other": "no longer in set another"}),
        # An owner that is applied without them ends what it owned, also without --prune.
        (
            [APPLIED],
            {"prune": False},
            {SERVICE: f"no longer declared by {JOB}", MODEL: f"no longer declared by {SERVICE}"},
        ),
        ([APPLIED, OWNS_SERVICE], {}, {MODEL: f"no longer declared by {SERVICE}"}),
        ([APPLIED, OWNS_SERVICE, wish("Model", "qwen", {}, owner=SERVICE)], {}, {}),
        # Of an owner that is not applied itself, the manifest need not have all.
        ([OWNS_SERVICE], {"prune": False}, {}),
    ],
)
def test_objects_end_with_their_set_or_their_owner(
    wanted: list[Wanted], options: dict[str, Any], causes: dict[str, str]
) -> None:
    assert ended(wanted, **options) == causes


@pytest.mark.parametrize(
    ("source", "unnoted", "derived"),
    [
        ({"derived": ["path"]}, False, True),
        ({"derived": ["replicas"]}, True, False),
        ({"derived": []}, True, False),
        ({"path": "m.yaml"}, True, True),  # of an earlier version
        ({"path": "m.yaml"}, False, False),
        (None, True, True),
        (None, False, False),
    ],
)
def test_field_is_derived_if_its_layer_notes_it(source: Any, unnoted: bool, derived: bool) -> None:
    item = model()
    item = replace(item, layers=(replace(item.layers[0], source=source),))
    assert is_derived(item, ("path",), unnoted=unnoted) is derived
    assert not is_derived(item, ("strategy",), unnoted=unnoted), "it is not there"
    bare = replace(item, layers=(Layer("scale", {"path": "x"}, None, "me", 1.0),))
    assert is_derived(bare, ("path",), unnoted=unnoted) is unnoted, "no manifest set it"


def test_layers_that_contradict_each_other_are_refused_with_their_managers() -> None:
    item = model({"backend": "vllm:d1"})
    tuned = replace(item, layers=(*item.layers, Layer("tune", {"engineArgs": {"maxModelLen": 9}}, None, "me", 2.0)))
    spec = {**item.spec, "backend": "embedded:d1"}
    with pytest.raises(Conflict) as caught:
        target_for(
            wish("Model", "qwen", {**spec, "engineArgs": {"threads": 0}}),
            tuned,
            set_name=None,
            force_conflicts=False,
            replace_it=False,
        )
    message = str(caught.value)
    assert "Model/qwen: its fields contradict each other:" in message
    assert "\n  spec.engineArgs.threads: must be above 0, not 0" in message and APPLY not in message


def test_target_follows_no_other_deletion_unless_it_does() -> None:
    item = unchanged(model())
    assert (item.follows, item.is_expired, item.replaces, item.cause) == (False, False, None, "")
    assert Target(item.object, "delete").is_deleted and not item.is_deleted
