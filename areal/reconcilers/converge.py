"""Converge: observe, plan, lock what the plan touches, plan again under the locks, execute; until nothing is left.

Everything that changes the world comes through here, so that ``diff`` and every verb share one way of planning.
Invariants: nothing is written, and no lock is taken, when the plan is empty; a plan that is executed touches only
objects whose locks are held, and destroys only what was approved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from areal.errors import TimedOut, UsageFault
from areal.reconcilers import background, conditions
from areal.reconcilers.context import Context, Outcome, Progress
from areal.reconcilers.desired import Target
from areal.reconcilers.effects import perform
from areal.reconcilers.executor import Report, execute
from areal.reconcilers.hands import Hands
from areal.reconcilers.job_service import following_jobs
from areal.reconcilers.model_files import ModelFiles, require_models
from areal.reconcilers.model_work import Policy
from areal.reconcilers.observe import observe
from areal.reconcilers.observed import Observed
from areal.reconcilers.outcomes import outcome_of, with_endings
from areal.reconcilers.plan import Op, Plan, Verb
from areal.reconcilers.planner import Scope, make_plan
from areal.reconcilers.process_effects import give_up
from areal.reconcilers.recover import recover
from areal.reconcilers.replicas import gpus_per_replica
from areal.reconcilers.slots import claim_slots
from areal.resources.inference_service import InferenceServiceSpec
from areal.resources.kinds import Ref, parse_ref
from areal.resources.registry import effective
from areal.runtime.backends.local import LocalBackend
from areal.state.journal import Journal, crash_point
from areal.state.locks import lock_objects
from areal.state.objects import ObjectStore, Snapshot
from areal.state.records import StoredObject

MAX_PASSES = 3  # a second pass follows what the first one could not know, such as a port that had to move
STABLE_READS = 3
NO_LIMIT = 1 << 20  # more GPUs than any plan takes

Choose = Callable[[list[StoredObject]], tuple[Target, ...]]
Approve = Callable[[Plan], bool]


@dataclass
class Desk:
    """What one command works with."""

    ctx: Context
    store: ObjectStore
    backend: LocalBackend
    files: ModelFiles

    @classmethod
    def open(cls, ctx: Context) -> Desk:
        if os.path.lexists(ctx.home.root) and not ctx.home.root.is_dir():
            ctx.home.ensure()  # says what is in the way
        store = ObjectStore(ctx.home)
        return cls(ctx, store, LocalBackend(ctx.home.root, crash=crash_point), ModelFiles(store))


@dataclass(frozen=True)
class Prepared:
    """A plan with what it was made from."""

    scope: Scope
    observed: Observed
    plan: Plan

    @property
    def touched(self) -> frozenset[Ref]:
        return frozenset(parse_ref(op.ref) for op in self.plan.ops)


def plan_targets(desk: Desk, choose: Choose, policy: Policy, source: dict[str, Any] | None = None) -> Prepared:
    """Choose targets among what is stored, add their neighbours, observe, plan. Read-only."""
    snapshot, scope, observed = _look(desk, choose)
    plan = make_plan(scope, observed, replace(policy, free_gpus=NO_LIMIT), serial=snapshot.serial, source=source)
    # NVML is asked by a process of its own: for a plan that starts or stops something, not for one that is empty.
    if any(op.verb in (Verb.SPAWN, Verb.STOP) for op in plan.ops) and any(_wants_gpus(t) for t in scope.all):
        observed = replace(observed, capacity=desk.backend.capacity())
        policy = replace(policy, free_gpus=len(observed.capacity.gpus))
        plan = make_plan(scope, observed, policy, serial=snapshot.serial, source=source)
    return Prepared(scope, observed, plan)


def _look(desk: Desk, choose: Choose) -> tuple[Snapshot, Scope, Observed]:
    """Objects and processes of one moment: a model that another command records while we look must not be taken for
    one that nobody declares, only because its routes were seen and its object was not."""
    snapshot = desk.store.snapshot()
    for _ in range(STABLE_READS):
        targets = following_jobs(choose(snapshot.objects), snapshot.objects, desk.backend.observe().values())
        scope = Scope(targets, _context(targets, snapshot.objects))
        observed = observe(desk.backend, [target.object for target in scope.all])
        if desk.store.serial() == snapshot.serial:
            break
        snapshot = desk.store.snapshot()
    return snapshot, scope, observed


def _context(targets: Sequence[Target], stored: Sequence[StoredObject]) -> tuple[Target, ...]:
    """Services that the targets' models need; the other models of every service in play, and the jobs that train in
    it."""
    names = {target.ref for target in targets}
    services = {f"InferenceService/{service_of(t.object)}" for t in targets if t.object.kind == "Model"}
    services |= {target.ref for target in targets if target.object.kind == "InferenceService"}
    if not services:
        return ()
    found = []
    for item in stored:
        ref = str(item.ref)
        if ref in names:
            continue
        rollout = item.spec.get("rollout") or {} if item.kind == "TrainJob" else {}
        used = service_of(item) if item.kind == "Model" else rollout.get("service")
        if ref in services or f"InferenceService/{used}" in services:
            found.append(Target(item, "unchanged"))
    return tuple(found)


def service_of(item: StoredObject) -> str:
    """The name of the service that a Model belongs to."""
    return str(item.spec.get("service", "default"))


def _wants_gpus(target: Target) -> bool:
    if target.object.kind == "TrainJob" and not target.gone and not target.object.spec.get("suspend"):
        return (target.object.spec.get("resources") or {}).get("gpus") != 0
    if target.object.kind != "Model" or target.gone:
        return False
    return gpus_per_replica(effective("Model", target.object.spec)) > 0


def converge(
    desk: Desk,
    prepare: Callable[[], Prepared],
    approve: Approve,
    *,
    timeout_s: float,
    wait: bool = True,
    check: Callable[[Plan], None] | None = None,
) -> Outcome:
    """Make reality agree with what ``prepare`` plans; ``check`` may refuse a plan before the first effect. Raises
    ArealError before the first effect; afterwards failures are in the outcome."""
    notes = recover(desk.ctx, desk.backend)
    approved = _Approved(approve, check)
    prepared = prepare()
    approved.require(prepared.plan)
    if prepared.plan.is_empty:
        return _with_notes(outcome_of(prepared.plan), notes)
    _require_models(desk, prepared)
    desk.ctx.home.ensure()
    deadline = time.monotonic() + timeout_s
    with _taken_over(desk, prepared, timeout_s) as taken, _locked(desk, prepared, prepare) as (prepared, held):
        approved.require(prepared.plan)
        taken.refs -= held
        if not wait and not prepared.plan.is_empty:
            taken.refs |= held
        taken.hand_on()
        if prepared.plan.is_empty:
            return _with_notes(outcome_of(prepared.plan), notes)
        passes = _Passes(desk, prepare, held, approved, deadline, wait)
        reports = passes.run(prepared)
        endings = conditions.write_statuses(desk.ctx, desk.store, desk.backend, prepared.scope.all, reports)
    outcome = with_endings(outcome_of(prepared.plan, reports), endings)
    return _with_notes(outcome, (*notes, *passes.notes))


@dataclass
class _TakenOver:
    """What processes in the background had in hand, and we have to see to."""

    desk: Desk
    refs: frozenset[Ref]
    seconds: float

    def hand_on(self) -> None:
        """To another one, which begins when it gets the locks."""
        refs, self.refs = self.refs, frozenset()
        if refs:
            ctx = self.desk.ctx
            with Journal.open(ctx.home, ctx.command, sorted(map(str, refs))) as transaction:
                background.start(ctx, self.desk.backend, transaction, refs, self.seconds)


@contextmanager
def _taken_over(desk: Desk, prepared: Prepared, seconds: float) -> Iterator[_TakenOver]:
    """A command that cannot do its own part either, because somebody else has the locks, hands everything on."""
    taken = _TakenOver(desk, background.take_over(desk.backend, prepared.touched), seconds)
    try:
        yield taken
    finally:
        taken.hand_on()


def _require_models(desk: Desk, prepared: Prepared) -> None:
    """What will be started has its files, or can have them. Raises ArealError."""
    starting = {op.ref for op in prepared.plan.ops if op.verb is Verb.SPAWN}
    models = {target.ref: target.object for target in prepared.scope.all if target.object.kind == "Model"}
    require_models(
        {ref: (item, effective("Model", item.spec)) for ref, item in models.items() if ref in starting},
        lambda ref, stage: desk.ctx.progress(Progress(ref, stage)),
    )


def _with_notes(outcome: Outcome, notes: Sequence[str]) -> Outcome:
    return replace(outcome, notes=(*notes, *outcome.notes))


class _Approved:
    """What the caller has agreed to destroy: asked once for each sentence."""

    def __init__(self, approve: Approve, check: Callable[[Plan], None] | None) -> None:
        self._approve = approve
        self._check = check or (lambda plan: None)
        self._sentences: set[str] = set()

    def covers(self, plan: Plan) -> bool:
        return set(plan.destructive) <= self._sentences

    def require(self, plan: Plan) -> None:
        self._check(plan)
        if self.covers(plan):
            return
        if not self._approve(plan):
            raise UsageFault("declined; nothing was changed", hint="--yes approves a destructive plan")
        self._sentences |= set(plan.destructive)


@contextmanager
def _locked(
    desk: Desk, prepared: Prepared, prepare: Callable[[], Prepared]
) -> Iterator[tuple[Prepared, frozenset[Ref]]]:
    """Hold the locks of all that the plan touches, with the plan made again under them. The world may have moved in
    between: when the new plan touches more, everything is given back and taken again in order."""
    refs = prepared.touched
    while True:
        with lock_objects(
            desk.ctx.home,
            sorted(refs),
            desk.ctx.lock_timeout_s,
            desk.ctx.command,
            interrupted=desk.ctx.interrupted,
            on_wait=lambda message: desk.ctx.progress(Progress("", message)),
        ) as held:
            again = prepare()
            if again.touched <= refs:
                if not again.plan.is_empty:
                    held.announce()
                yield again, refs
                return
        refs |= again.touched


class _Passes:
    """Plan and execute until a plan is empty, says the same as the one before, or wants more than it may."""

    def __init__(
        self,
        desk: Desk,
        prepare: Callable[[], Prepared],
        held: frozenset[Ref],
        approved: _Approved,
        deadline: float,
        wait: bool,
    ) -> None:
        self._desk, self._prepare, self._held, self._approved = desk, prepare, held, approved
        self._deadline, self._wait = deadline, wait
        self.notes: list[str] = []

    def run(self, prepared: Prepared) -> list[Report]:
        reports = []
        for left in reversed(range(MAX_PASSES)):
            reports.append(_execute(self._desk, prepared, self._deadline, self._wait))
            if reports[-1].failed or reports[-1].interrupted or not self._wait:
                break
            following = self._prepare()
            if following.plan.is_empty or not self._may_follow(following, prepared, left):
                break
            prepared = following
        return reports

    def _may_follow(self, following: Prepared, done: Prepared, left: int) -> bool:
        if not following.touched <= self._held or not self._approved.covers(following.plan):
            self.notes.append("more is to be done than was planned at first: the same command again goes on")
            return False
        same = [op.to_text() for op in following.plan.ops] == [op.to_text() for op in done.plan.ops]
        if same or not left:
            self.notes.append(f"still to be done: {following.plan.ops[0].to_text()}; areal diff --drift shows it all")
            return False
        return True


def _execute(desk: Desk, prepared: Prepared, deadline: float, wait: bool) -> Report:
    """Execute one plan in one transaction; afterwards nothing half-started is left."""
    targets = {target.ref: target for target in prepared.scope.all}
    plan = prepared.plan if wait else begun_only(prepared.plan, {ref for ref, it in targets.items() if it.gone})
    services: dict[str, InferenceServiceSpec] = {
        ref: effective("InferenceService", target.object.spec)
        for ref, target in targets.items()
        if target.object.kind == "InferenceService"
    }
    slots = claim_slots(plan, prepared.observed, services, desk.backend)
    transaction = Journal.open(desk.ctx.home, desk.ctx.command, sorted(targets))
    try:
        hands = Hands(
            desk.ctx,
            desk.backend,
            desk.store,
            targets,
            prepared.observed,
            slots,
            transaction,
            deadline,
            desk.files,
        )
        report = execute(plan, lambda op: perform(hands, op), desk.ctx.interrupted)
        report.notes = tuple(hands.notes)
        give_up(hands, abandoned(report, hands.spawned.keys()))
        transaction.commit()
    except BaseException as error:
        transaction.abort(str(error) or type(error).__name__)
        raise
    finally:
        desk.backend.release_claims()
    return report


def begun_only(plan: Plan, gone: Collection[str] = ()) -> Plan:
    """``--no-wait``: processes are started, nothing is waited for; a process in the background goes on. What is deleted
    is deleted whole: nothing records that it is to be."""
    kept = {Verb.RECORD, Verb.SPAWN, Verb.KICK, Verb.FORGET, Verb.ERASE, Verb.STOP}
    begun: set[int] = set()
    ops: list[Op] = []
    for op in plan.ops:
        if (op.verb in kept or op.ref in gone) and set(op.needs) <= begun:
            begun.add(op.id)
            ops.append(op)
    return replace(plan, ops=tuple(ops))


def abandoned(report: Report, spawned: Collection[str]) -> tuple[str, ...]:
    """Runs to stop after a failure: what failed itself, and successors that were to replace what still serves.

    Running out of the command's own time is no failure of a process, and neither is an interrupt: what was started
    goes on starting, and the same command goes on from there.
    """
    terminal = [op for op in report.failed_ops if not isinstance(report.failed[op.id], TimedOut)]
    failed_runs = {op.run for op in terminal if op.run}
    failed_refs = {op.ref for op in terminal}
    routed = {run for op in report.plan.ops if op.verb is Verb.ROUTE and op.id in report.done for run in op.runs}
    found = []
    for op in report.plan.ops:
        if op.verb is not Verb.SPAWN or op.run not in spawned:
            continue
        proxy = op.run.replace("/engine/", "/data-proxy/")
        given_up = bool(op.args.get("successor")) and op.ref in failed_refs and proxy not in routed
        if given_up or op.run in failed_runs:
            found.append(op.run)
    return tuple(found)
