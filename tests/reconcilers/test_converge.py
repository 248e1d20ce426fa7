"""How often a command plans: again only where objects or processes have changed, or where more may be left to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from areal.reconcilers.context import Context, Outcome
from areal.reconcilers.converge import converge
from areal.reconcilers.desired import Target, Wanted, target_for
from areal.reconcilers.plan import Plan
from areal.reconcilers.planning import Policy
from areal.reconcilers.prepare import CommandContext, Prepared, plan_targets
from areal.resources.kinds import Ref
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


def test_apply_that_only_records_plans_once(tmp_path: Path) -> None:
    command = Command(tmp_path)
    assert command.converge().exit_code == 0
    assert len(command.plans) == 1
    assert command.context.store.expect(SERVICE).spec == {"suspend": True}


def test_apply_plans_again_where_an_object_changed_before_its_locks_were_held(tmp_path: Path) -> None:
    command = Command(tmp_path)

    def record_once(plan: Plan) -> None:
        if len(command.plans) == 1:
            layer = Layer("scale", {"service": "x", "external": {"url": "https://example.com/v1"}}, {}, "another", 0.0)
            other = StoredObject("Model", "other", "uid-other", layers=(layer,))
            command.context.store.put(other)

    assert command.converge(record_once).exit_code == 0
    assert [plan.serial for plan in command.plans] == [0, 1]


def test_apply_without_a_change_plans_once_and_leaves_nothing_to_do(tmp_path: Path) -> None:
    Command(tmp_path).converge()
    again = Command(tmp_path)
    assert [item.action for item in again.converge().objects] == ["unchanged"]
    assert [plan.ops for plan in again.plans] == [()]
