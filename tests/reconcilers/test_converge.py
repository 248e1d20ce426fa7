"""How often a command plans: again only where objects or processes have changed, or where more may be left to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal.reconcilers.context import Context, Outcome
from areal.reconcilers.converge import converge
from areal.reconcilers.desired import Target, Wanted, target_for
from areal.reconcilers.plan import Plan
from areal.reconcilers.planning import Policy
from areal.reconcilers.prepare import CommandContext, Prepared, plan_targets
from areal.resources.kinds import Ref
from areal.state import objects
from areal.state.files import write_together
from areal.state.home import Home
from areal.state.records import Layer, StoredObject

SERVICE = Ref("InferenceService", "default")


class Command:
    """Applies a suspended service; counts its plans."""

    def __init__(self, home: Path) -> None:
        self.context = CommandContext.open(Context(Home(home), "someone", "apply"))
        self.plans: list[Plan] = []

    def prepare(self) -> Prepared:
        wanted = Wanted(str(SERVICE), SERVICE.kind, SERVICE.name, {"suspend": True}, {}, {})

        def choose(stored: list[StoredObject]) -> tuple[Target, ...]:
            before = next((item for item in stored if item.ref == SERVICE), None)
            return (target_for(wanted, before, set_name=None, force_conflicts=False, replace_it=False),)

        prepared = plan_targets(self.context, choose, Policy())
        self.plans.append(prepared.plan)
        return prepared

    def converge(self, check: Callable[[Plan], None] = lambda plan: None) -> Outcome:
        return converge(self.context, self.prepare, lambda plan: True, timeout_s=10, check=check)


def test_record_only_apply_plans_once(tmp_path: Path) -> None:
    command = Command(tmp_path)
    assert command.converge().exit_code == 0
    assert len(command.plans) == 1
    assert command.context.store.expect(SERVICE).spec == {"suspend": True}


def test_record_only_apply_writes_each_object_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The status is written with the object."""
    written: list[str] = []

    def write(files: Sequence[tuple[Path, bytes]], mode: int = 0o600) -> None:
        written.extend(path.name for path, _ in files)
        write_together(files, mode)

    monkeypatch.setattr(objects, "write_together", write)
    command = Command(tmp_path)
    assert command.converge().exit_code == 0
    assert written.count("object.json") == 1
    status = command.context.store.expect(SERVICE).status
    assert (status["phase"], status["observedGeneration"]) == ("Suspended", 1)
    assert [condition["type"] for condition in status["conditions"]] == ["Ready", "Progressing", "Degraded", "Stalled"]


def test_apply_replans_when_object_changes_before_lock(tmp_path: Path) -> None:
    command = Command(tmp_path)

    def record_once(plan: Plan) -> None:
        if len(command.plans) == 1:
            layer = Layer("scale", {"service": "x", "external": {"url": "https://example.com/v1"}}, {}, "another", 0.0)
            other = StoredObject("Model", "other", "uid-other", layers=(layer,))
            command.context.store.put(other)

    assert command.converge(record_once).exit_code == 0
    assert [plan.serial for plan in command.plans] == [0, 1]


def test_unchanged_apply_plans_once_and_does_nothing(tmp_path: Path) -> None:
    Command(tmp_path).converge()
    again = Command(tmp_path)
    assert [item.action for item in again.converge().objects] == ["unchanged"]
    assert [plan.ops for plan in again.plans] == [()]


def test_plan_of_constantly_changing_object_is_not_current(tmp_path: Path) -> None:
    context = Command(tmp_path).context
    levels = iter(["debug", "info", "warning", "error"])

    def record() -> None:
        layer = Layer("apply", {"suspend": True, "logLevel": next(levels)}, {}, "another", 0.0)
        context.store.put(StoredObject(SERVICE.kind, SERVICE.name, "uid", layers=(layer,)))

    def choose(stored: list[StoredObject]) -> tuple[Target, ...]:
        record()
        return (Target(stored[0], "unchanged"),)

    record()
    prepared = plan_targets(context, choose, Policy())
    assert prepared.scope.all[0].object.spec["logLevel"] != context.store.expect(SERVICE).spec["logLevel"]
    assert not prepared.is_current(context)


def test_restart_recorded_before_locking_is_kept(tmp_path: Path) -> None:
    command = Command(tmp_path)
    layer = Layer("apply", {"suspend": True, "logLevel": "debug"}, {}, "another", 0.0)
    command.context.store.put(StoredObject(SERVICE.kind, SERVICE.name, "uid", layers=(layer,)))

    def restart_once(plan: Plan) -> None:  # `areal restart`, killed after it has recorded the restart
        if len(command.plans) == 1:
            stored = command.context.store.expect(SERVICE)
            command.context.store.put(replace(stored, status={**stored.status, "restartedAt": "1.000"}))

    assert command.converge(restart_once).exit_code == 0
    assert command.context.store.expect(SERVICE).status["restartedAt"] == "1.000"


def test_approved_plan_is_recomputed_under_locks(tmp_path: Path) -> None:
    Command(tmp_path).converge()
    command, plans = Command(tmp_path), list[Plan]()

    def prepare() -> Prepared:
        prepared = plan_targets(
            command.context, lambda stored: tuple(Target(item, "delete") for item in stored), Policy()
        )
        plans.append(prepared.plan)
        return prepared

    asked: list[int] = []

    def approve(plan: Plan) -> bool:
        asked.append(len(plans))
        return True

    assert converge(command.context, prepare, approve, timeout_s=10).exit_code == 0
    assert asked == [1]
    assert [bool(plan.ops) for plan in plans] == [True, True, False]


def test_second_record_only_pass_does_nothing(tmp_path: Path) -> None:
    Command(tmp_path).converge()
    command, other = Command(tmp_path), Ref("InferenceService", "other")
    layer = Layer("apply", {"suspend": True}, {}, "another", 0.0)
    command.context.store.put(StoredObject(other.kind, other.name, "uid", layers=(layer,)))

    def prepare() -> Prepared:
        def choose(stored: list[StoredObject]) -> tuple[Target, ...]:
            by_ref = {item.ref: item for item in stored}
            level = "debug" if other in by_ref else "error"
            wanted = Wanted(str(SERVICE), SERVICE.kind, SERVICE.name, {"suspend": True, "logLevel": level}, {}, {})
            target = target_for(wanted, by_ref[SERVICE], set_name=None, force_conflicts=False, replace_it=False)
            return (target, *(Target(by_ref[ref], "delete") for ref in by_ref if ref == other))

        return plan_targets(command.context, choose, Policy())

    assert converge(command.context, prepare, lambda plan: True, timeout_s=10).exit_code == 0
    stored = command.context.store.expect(SERVICE)
    assert stored.spec["logLevel"] == "error"
    assert stored.status["observedGeneration"] == stored.generation


def test_neighbor_with_invalid_recorded_spec_is_left_alone(tmp_path: Path) -> None:
    command = Command(tmp_path)
    external = {"url": "https://example.com/v1", "model": "m"}
    layer = Layer("apply", {"service": "default", "external": external, "toolCallParser": "x"}, {}, "another", 0.0)
    command.context.store.put(StoredObject("Model", "old", "uid-old", layers=(layer,)))
    outcome = command.converge()
    assert outcome.exit_code == 0 and command.context.store.expect(SERVICE).spec == {"suspend": True}
    assert any(re.match("left alone: Model/old: .*spec.toolCallParser", note) for note in outcome.notes)


def test_plan_of_job_includes_models_of_its_service(tmp_path: Path) -> None:
    """When the job ends, its service is suspended: the engines of the service's models must stop with it."""
    command, job = Command(tmp_path), "TrainJob/learn"
    specs: dict[str, dict[str, Any]] = {
        "TrainJob": {"config": {}, "suspend": True},
        "InferenceService": {},
        "Model": {"service": "learn", "path": "m", "backend": "embedded:d1"},
    }
    for kind, spec in specs.items():
        layer = Layer("apply", spec, {}, "another", 0.0)
        owner = None if kind == "TrainJob" else job
        command.context.store.put(StoredObject(kind, "learn", f"uid-{kind}", layers=(layer,), owner=owner))

    def choose(stored: list[StoredObject]) -> tuple[Target, ...]:
        return tuple(Target(item, "unchanged") for item in stored if str(item.ref) == job)

    scope = plan_targets(command.context, choose, Policy()).scope
    service = scope.by_ref["InferenceService/learn"]
    assert service.object.spec.get("suspend") is True
    assert "Model/learn" in scope.by_ref
