"""What planning collects beside the ops: drift, what is destroyed, what could not be seen, what is refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from areal.reconcilers.components import Action, Component, Decision
from areal.reconcilers.observed import ObservedRun
from areal.reconcilers.plan import Drift, Refusal


@dataclass
class Findings:
    drift: list[Drift] = field(default_factory=list)
    destructive: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    refused: dict[str, Refusal] = field(default_factory=dict)  # by object

    def note(self, component: Component, decision: Decision) -> None:
        """What deciding about one process has found."""
        if decision.drift is not None:
            kind, message = decision.drift
            self.drift.append(Drift(component.ref, kind, component.target, message))
        if decision.action is Action.LEAVE:
            self.unknown.append(f"{component.ref} {component.target}: {decision.cause}")

    def cannot_see(self, ref: str, runs: Iterable[ObservedRun]) -> None:
        """Runs that may be alive somewhere else; nothing is done about them."""
        for run in runs:
            where = f"{run.state.spec.component}/{run.state.spec.replica}"
            self.unknown.append(f"{ref} {where}: cannot be seen: {run.state.reason}")
