"""Keep, heal or replace: what to do about one process, given what is wanted and what was seen; and its ops. Pure.

Keep or recreate is decided by comparing specs: the sparse spec that the run was started for, against the object's,
both read with today's defaults and cut to the fields that this component depends on. Never by a hash, so an upgrade
that adds a defaulted field or reorders keys restarts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from areal.reconcilers.desired import Target
from areal.reconcilers.observe import Observed, ObservedRun, Seen
from areal.reconcilers.plan import Drift, FieldChange, PlanBuilder, Refusal, Verb, spec_path
from areal.resources.backend import Part, parse_backend
from areal.resources.specs import InferenceServiceSpec
from areal.resources.tree import UpdateClass, changes
from areal.resources.validation import effective, update_class
from areal.runtime.backends.base import Phase

ENDED = (Phase.EXITED, Phase.DEAD, Phase.CRASHLOOP, Phase.INTENDED)
LIVE = (Phase.STARTING, Phase.RUNNING, Phase.BACKOFF)


STARTING_S = 60.0  # a process younger than this that does not answer yet is starting, not unhealthy
KEY_INPUT = "keyFrom"  # compared even where nothing is wanted: a process must not keep a key that is no longer declared


class Action(StrEnum):
    KEEP = "keep"
    AWAIT = "await"  # lives, has not answered yet
    KICK = "kick"  # its shim waits in back-off
    SPAWN = "spawn"
    REPLACE = "replace"
    LEAVE = "leave"  # cannot be seen: nothing is done
    DEFER = "defer"  # what it depends on has no address yet: the next pass decides


@dataclass(frozen=True)
class Component:
    """What one process of an object should be. ``fields`` are the top-level spec keys that it depends on;
    ``inputs`` what it must have been told about its neighbours (a key absent here is not compared, but for the key's
    origin)."""

    ref: str
    name: str
    replica: int
    kind: str
    spec: Mapping[str, Any]
    fields: tuple[str, ...]
    inputs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> str:
        return f"{self.name}/{self.replica}"


@dataclass(frozen=True)
class Decision:
    """``run`` is the run acted on (kept, kicked, replaced); ``drift`` is (kind, message) when reality moved."""

    action: Action
    cause: str = ""
    run: ObservedRun | None = None
    drift: tuple[str, str] | None = None
    decided_by: FieldChange | None = None


def key_input(service: InferenceServiceSpec) -> dict[str, str]:
    """Where the key comes from that all processes of a service must share; nothing when it is generated."""
    source = service.auth.admin_key_from
    if source is None:
        return {}
    return {KEY_INPUT: f"file {source.file}" if source.file else f"env {source.env}"}


def outdated(component: Component, run: ObservedRun) -> FieldChange | None:
    """The leaf that makes ``run`` the wrong process for ``component``, or None when it may stay."""
    told = run.state.spec.inputs
    wanted = {KEY_INPUT: None, **component.inputs}
    stale_input = next(
        (
            FieldChange(f"inputs.{name}", told.get(name), value, UpdateClass.ROLL)
            for name, value in sorted(wanted.items())
            if told.get(name) != value
        ),
        None,
    )
    if stale_input is not None:
        return stale_input
    had, wants = run.state.spec.spec, component.spec
    if had == wants:
        return None
    before = _relevant(component, had)
    after = _relevant(component, wants)
    found = [
        FieldChange(
            spec_path(("spec", *change.path)), change.old, change.new, update_class(component.kind, change.path)
        )
        for change in changes(before, after)
    ]
    return max((c for c in found if c.update >= UpdateClass.ROLL), key=lambda change: change.update, default=None)


def _relevant(component: Component, sparse: Mapping[str, Any]) -> dict[str, Any]:
    full = effective(component.kind, dict(sparse)).model_dump(by_alias=True, mode="json")
    kept = {name: full[name] for name in component.fields if name in full}
    if kept.get("backend"):
        kept["backend"] = engine_of(kept["backend"])
    return kept


def engine_of(backend: str) -> str:
    """The backend without its data-parallel dimension, which is only a number of replicas."""
    return str(replace(inference_part(backend), data=1))


def inference_part(backend: str) -> Part:
    part = parse_backend(backend).inference
    assert part is not None, f"validated backends name an inference engine: {backend}"
    return part


def decide(component: Component, runs: Sequence[ObservedRun]) -> Decision:
    """One process slot: keep the best run that fits, else say what must happen, with its cause."""
    unseen = [run for run in runs if run.state.phase is Phase.UNKNOWN]
    if unseen:
        return Decision(Action.LEAVE, f"cannot be seen: {unseen[0].state.reason}", unseen[0])
    live = [run for run in runs if run.state.phase in LIVE]
    fitting = [run for run in live if outdated(component, run) is None]
    if fitting:
        return _tend(max(fitting, key=_worth))
    if live:
        run = max(live, key=_worth)
        leaf = outdated(component, run)
        assert leaf is not None
        return Decision(Action.REPLACE, f"{leaf.path} changed", run, decided_by=leaf)
    dead = max((run for run in runs if run.state.phase in ENDED), key=lambda run: (run.ended_at, run.uid), default=None)
    if dead is None:
        return Decision(Action.SPAWN, "no process")
    died = how_it_died(dead)
    kind = "crash-loop" if dead.state.phase is Phase.CRASHLOOP else "process-died"
    if "recycled" in dead.state.reason:
        kind = "process-replaced"
    return Decision(Action.SPAWN, f"{kind}: {died}", dead, drift=(kind, died))


def _tend(run: ObservedRun) -> Decision:
    if run.state.phase is Phase.BACKOFF:
        died = how_it_died(run)
        return Decision(Action.KICK, f"process-died: {died}", run, drift=("process-died", died))
    if run.state.phase is Phase.STARTING:
        return Decision(Action.AWAIT, "starting", run)
    if run.seen in (Seen.REFUSING, Seen.SILENT):
        # A probe that times out is not proof of death: wait for an answer, and let the shim's liveness probe judge.
        if time_alive(run) < STARTING_S:
            return Decision(Action.AWAIT, "starting", run)
        message = run.why or "does not answer its probe"
        return Decision(Action.AWAIT, f"unhealthy: {message}", run, drift=("unhealthy", message))
    if run.seen is Seen.NOT_READY:
        return Decision(Action.AWAIT, f"not ready: {run.why}" if run.why else "not ready yet", run)
    return Decision(Action.KEEP, run=run)


def time_alive(run: ObservedRun) -> float:
    """Seconds since the present child was started, as seen when it was observed."""
    return run.age_s if run.age_s is not None else STARTING_S


def how_it_died(run: ObservedRun) -> str:
    """ "killed by SIGKILL", "exited 1": the last exit in words, else why the record says it is gone."""
    last = run.state.last_exit
    if last is not None and last.reason:
        return last.reason
    return run.state.reason or "gone without an exit record"


def _worth(run: ObservedRun) -> tuple[int, int, str]:
    ready = {Seen.READY: 3, Seen.UNSEEN: 2, Seen.NOT_READY: 1}.get(run.seen, 0)
    return (int(run.state.phase is Phase.RUNNING), ready, run.uid)


@dataclass
class PlanNotes:
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


# -- ops: start, keep, stop, forget

STARTED = "started"  # the cause of the wait for a process that the plan itself starts
SWEPT = "sweep what its session left"  # a shim that died may have left processes that hold what a successor needs


@dataclass(frozen=True)
class Started:
    """``run`` is the uid or symbol of a process that is or will be there; it is ready after the ops ``ready``."""

    run: str
    ready: tuple[int, ...] = ()


def start(
    build: PlanBuilder,
    component: Component,
    decision: Decision,
    observed: Observed,
    needs: Sequence[int],
    args: Mapping[str, Any] | None = None,
    after: Sequence[int] = (),
    trainer: str = "",
) -> Started:
    """SPAWN or KICK, then AWAIT.

    It is waited for only ``after`` what it waits for itself: an engine that fails ends the wait for its data proxy.
    Records of earlier runs of this slot are forgotten, all but the newest: `logs --previous` reads that one.
    """
    ref, target = component.ref, component.target
    if decision.action is Action.KICK:
        assert decision.run is not None
        run = decision.run.uid
        begun = build.add(Verb.KICK, ref, target, decision.cause, needs=needs, run=run)
    else:
        slot = observed.of(ref, component.name, component.replica)
        for old in superseded(slot):
            build.add(Verb.FORGET, ref, target, "an older record", needs=needs, run=old.uid)
        run = f"+{ref}/{target}"
        inputs = {"inputs": dict(component.inputs)} if component.inputs else {}
        begun = build.add(
            Verb.SPAWN, ref, target, decision.cause, needs=needs, run=run, args={**(args or {}), **inputs}
        )
    ready = build.add(Verb.AWAIT, ref, target, STARTED, needs=(begun, *after), run=run, args=awaiting(trainer))
    return Started(run, (ready,))


def awaiting(trainer: str) -> dict[str, str]:
    """``trainer``: the job that starts only then, and brings the weights that a data proxy may wait for."""
    return {"trainer": trainer} if trainer else {}


def keep(
    build: PlanBuilder,
    component: Component,
    decision: Decision,
    needs: Sequence[int],
    after: Sequence[int] = (),
    trainer: str = "",
) -> Started:
    """A process that stays, or is not there and not to be started now: waited for when it has not answered yet."""
    run = decision.run.uid if decision.run is not None else ""
    if decision.action is not Action.AWAIT:
        return Started(run)
    needs, args = (*needs, *after), awaiting(trainer)
    waited = build.add(Verb.AWAIT, component.ref, component.target, decision.cause, needs=needs, run=run, args=args)
    return Started(run, (waited,))


def superseded(slot: Sequence[ObservedRun], kept: int = 1) -> list[ObservedRun]:
    """Ended runs whose records nobody will read again, all but the last ``kept``; what never started has nothing to
    tell."""
    told = [run for run in slot if run.state.phase in ENDED and run.state.phase is not Phase.INTENDED]
    unstarted = [run for run in slot if run.state.phase is Phase.INTENDED]
    return [*unstarted, *sorted(told, key=lambda run: (run.ended_at, run.uid))[:-kept]]


def slot_of(run: ObservedRun) -> str:
    return f"{run.state.spec.component}/{run.state.spec.replica}"


def stop_in_order(
    build: PlanBuilder,
    ref: str,
    runs: Sequence[ObservedRun],
    components: Sequence[str],
    cause: str,
    needs: Sequence[int],
    args: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Stop ``runs`` one component after the other, callers before the called; the ops of the last component."""
    last = tuple(needs)
    for name in components:
        stops = tuple(
            build.add(Verb.STOP, ref, slot_of(run), cause, needs=last, run=run.uid, args=args)
            for run in runs
            if run.state.spec.component == name
        )
        last = stops or last
    return last


def stoppable(runs: Sequence[ObservedRun]) -> list[ObservedRun]:
    """Runs of which something may be left: never those that cannot be seen."""
    return [run for run in runs if run.is_live or run.leaves_session]


def unseen(runs: Sequence[ObservedRun]) -> list[ObservedRun]:
    return [run for run in runs if run.state.phase is Phase.UNKNOWN]


def erase(
    build: PlanBuilder, target: Target, observed: Observed, needs: Sequence[int], after: Sequence[int] = ()
) -> int:
    """Forget every run's record, then the object."""
    cause = end_cause(target)
    forgotten = tuple(
        build.add(Verb.FORGET, target.ref, slot_of(run), cause, needs=needs, run=run.uid)
        for run in observed.of(target.ref)
    )
    args = {"after": list(after)} if after else {}
    return build.add(Verb.ERASE, target.ref, "", cause, needs=(*needs, *forgotten), args=args)


def end_cause(target: Target) -> str:
    return target.cause or ("pruned" if target.action == "prune" else "deleted")
