"""A kind of N processes of one component, each with an address of its own: the short way to a controller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from areal.reconcilers.health import Health, best_run, judge, serves
from areal.reconcilers.kinds.base import Endpoint, KindController
from areal.runtime.backends.base import RestartPolicy

if TYPE_CHECKING:
    from areal.reconcilers.effect_context import EffectContext
    from areal.reconcilers.launch import Slot
    from areal.reconcilers.observe import Observed, ObservedRun
    from areal.reconcilers.plan import Op
    from areal.reconcilers.planning import KindPlan, Planning
    from areal.runtime.backends.base import RunSpec
    from areal.state.records import StoredObject


class SimpleController(KindController):
    """A process answers ``GET /health`` while it lives, and ``GET /ready`` with 200 while it serves. Its successor is
    ready before an outdated process is stopped."""

    replicas_field = "replicas"
    component: ClassVar[str] = "server"
    fields: ClassVar[tuple[str, ...]] = ()
    """The fields of the spec that a process depends on: it is replaced when one of them changes."""
    restart: ClassVar[RestartPolicy] = RestartPolicy()
    grace_s: ClassVar[float] = 10.0

    def argv(self, found: StoredObject, slot: Slot) -> list[str]:
        """The command line of one process, which listens at ``slot.host`` and ``slot.port``."""
        raise NotImplementedError

    def env(self, found: StoredObject) -> Mapping[str, str]:
        return {}

    def health(self, ref: str, spec: Mapping[str, Any], seen: Observed, host: Mapping[str, Any] | None) -> Health:
        count = self.replicas(spec)
        if count == 0:
            return Health("Suspended", 0, 0)
        best = [best_run(seen.of(ref), self.component, index) for index in range(count)]
        return judge(sum(1 for run in best if serves(run)), count, best)

    def address(self, runs: Iterable[ObservedRun]) -> str:
        return next((run.url for run in runs if run.is_live and run.replica == 0), "")

    def plan(self, planning: Planning) -> KindPlan:
        from areal.reconcilers.planning import SimplePlan

        return SimplePlan(planning, self.kind, self.component, self.fields, self.replicas)

    def endpoint(self, spec: Mapping[str, Any], component: str) -> Endpoint | None:
        return Endpoint()

    def launch(self, context: EffectContext, op: Op, slot: Slot) -> RunSpec:
        from areal.reconcilers.launch import run_spec

        found, inputs = context.object(op.ref), dict(op.args.get("inputs", {}))
        argv = self.argv(found, slot)
        return run_spec(found, slot, argv, self.restart, self.grace_s, inputs=inputs, env=self.env(found))
