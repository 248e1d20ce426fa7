"""Converge: observe, plan, lock what the plan touches, plan again under the locks, execute; until nothing is left.

Everything that changes the world comes through here, so that ``diff`` and every verb share one way of planning.
Invariants: nothing is written, and no lock is taken, when the plan is empty; a plan that is executed touches only
objects whose locks are held, and destroys only what was approved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from areal.errors import TimedOut, UsageFault
from areal.reconcilers import outcomes as conditions
from areal.reconcilers.context import Context, Outcome, Progress
from areal.reconcilers.desired import Target
from areal.reconcilers.effect_context import EffectContext
from areal.reconcilers.effects import give_up, perform
from areal.reconcilers.executor import Report, execute
from areal.reconcilers.kinds import controller_of, controllers, host_of
from areal.reconcilers.kinds.model_files import ModelFiles
from areal.reconcilers.observe import Observed, observe
from areal.reconcilers.outcomes import outcome_of, with_endings
from areal.reconcilers.plan import Op, Plan, Verb
from areal.reconcilers.planner import make_plan
from areal.reconcilers.planning import PlanScope, Policy
from areal.reconcilers.recover import recover, start_background, take_over
from areal.reconcilers.slots import claim_slots
from areal.resources.kinds import Ref, parse_ref
from areal.runtime.backends import Backends
from areal.state.journal import Journal, crash_point
from areal.state.locks import lock_objects
from areal.state.objects import ObjectStore, StoreSnapshot
from areal.state.records import StoredObject

MAX_PASSES = 3  # a second pass follows what the first one could not know, such as a port that had to move
STABLE_READS = 3
NO_LIMIT = 1 << 20  # more GPUs than any plan takes

Choose = Callable[[list[StoredObject]], tuple[Target, ...]]
Approve = Callable[[Plan], bool]


@dataclass
class CommandContext:
    """What one command works with."""

    ctx: Context
    store: ObjectStore
    backend: Backends
    files: ModelFiles

    @classmethod
    def open(cls, ctx: Context) -> CommandContext:
        if os.path.lexists(ctx.home.root) and not ctx.home.root.is_dir():
            ctx.home.ensure()  # says what is in the way
        store = ObjectStore(ctx.home)
        return cls(ctx, store, Backends(ctx.home.root, crash=crash_point), ModelFiles(store))

    def scheduler_of(self, planned: Mapping[str, StoredObject], ref: str) -> str:
        """The name of the backend of an object that is planned or recorded, ``spec.scheduler.type``; that of its host,
        where it has one."""
        item = planned.get(ref) or self.store.get(parse_ref(ref))
        if item is None:
            return "local"
        if (host := host_of(item)) is not None:
            return self.scheduler_of(planned, host)
        return str((item.spec.get("scheduler") or {}).get("type", "local"))


@dataclass(frozen=True)
class Prepared:
    """A plan with what it was made from."""

    scope: PlanScope
    observed: Observed
    plan: Plan

    @property
    def touched(self) -> frozenset[Ref]:
        return frozenset(parse_ref(op.ref) for op in self.plan.ops)


def plan_targets(
    command: CommandContext, choose: Choose, policy: Policy, source: dict[str, Any] | None = None
) -> Prepared:
    """Choose targets among what is stored, add their neighbours, observe, plan. Read-only."""
    snapshot, scope, observed = _look(command, choose)
    plan = make_plan(scope, observed, replace(policy, free_gpus=NO_LIMIT), serial=snapshot.serial, source=source)
    # NVML is asked by a process of its own: for a plan that starts or stops something, not for one that is empty.
    if any(op.verb in (Verb.SPAWN, Verb.STOP) for op in plan.ops) and any(_wants_gpus(t) for t in scope.all):
        planned = {target.ref: target.object for target in scope.all}
        needed = {command.scheduler_of(planned, target.ref) for target in scope.all if _wants_gpus(target)}
        observed = replace(observed, capacity=command.backend.capacity(needed))
        policy = replace(policy, free_gpus=len(observed.capacity.gpus))
        plan = make_plan(scope, observed, policy, serial=snapshot.serial, source=source)
    return Prepared(scope, observed, plan)


def _look(command: CommandContext, choose: Choose) -> tuple[StoreSnapshot, PlanScope, Observed]:
    """Objects and processes of one moment: a model that another command records while we look must not be taken for
    one that nobody declares, only because its routes were seen and its object was not."""
    snapshot = command.store.snapshot()
    for _ in range(STABLE_READS):
        targets, states = choose(snapshot.objects), command.backend.observe().values()
        for controller in controllers():
            targets = controller.follow(targets, snapshot.objects, states)
        scope = PlanScope(targets, _context(targets, snapshot.objects))
        observed = observe(command.backend, [target.object for target in scope.all])
        if command.store.serial() == snapshot.serial:
            break
        snapshot = command.store.snapshot()
    return snapshot, scope, observed


def _context(targets: Sequence[Target], stored: Sequence[StoredObject]) -> tuple[Target, ...]:
    """The hosts of the targets, and what has to be known to plan for those: the other models of a service, and the jobs
    that train in it."""
    names = {target.ref for target in targets}
    hosts = {host for target in targets if (host := host_of(target.object))}
    in_play = names | hosts
    return tuple(
        Target(item, "unchanged")
        for item in stored
        if (ref := str(item.ref)) not in names
        and (ref in hosts or controller_of(item.kind).neighbour_of(item.spec) in in_play)
    )


def _wants_gpus(target: Target) -> bool:
    return not target.gone and controller_of(target.object.kind).wants_gpus(target.object.spec)


def converge(
    command: CommandContext,
    prepare: Callable[[], Prepared],
    approve: Approve,
    *,
    timeout_s: float,
    wait: bool = True,
    check: Callable[[Plan], None] | None = None,
) -> Outcome:
    """Make reality agree with what ``prepare`` plans; ``check`` may refuse a plan before the first effect. Raises
    ArealError before the first effect; afterwards failures are in the outcome."""
    notes = recover(command.ctx, command.backend)
    approved = _Approved(approve, check)
    prepared = prepare()
    approved.require(prepared.plan)
    if prepared.plan.is_empty:
        return _with_notes(outcome_of(prepared.plan), notes)
    _check_start(command, prepared)
    command.ctx.home.ensure()
    deadline = time.monotonic() + timeout_s
    with _taken_over(command, prepared, timeout_s) as taken, _locked(command, prepared, prepare) as (prepared, held):
        approved.require(prepared.plan)
        taken.refs -= held
        if not wait and not prepared.plan.is_empty:
            taken.refs |= held
        taken.hand_on()
        if prepared.plan.is_empty:
            return _with_notes(outcome_of(prepared.plan), notes)
        passes = _Passes(command, prepare, held, approved, deadline, wait)
        reports = passes.run(prepared)
        endings = conditions.write_statuses(command.ctx, command.store, command.backend, prepared.scope.all, reports)
    outcome = with_endings(outcome_of(prepared.plan, reports), endings)
    return _with_notes(outcome, (*notes, *passes.notes))


@dataclass
class _TakenOver:
    """What processes in the background had in hand, and we have to see to."""

    command: CommandContext
    refs: frozenset[Ref]
    seconds: float

    def hand_on(self) -> None:
        """To another one, which begins when it gets the locks."""
        refs, self.refs = self.refs, frozenset()
        if refs:
            ctx = self.command.ctx
            with Journal.open(ctx.home, ctx.command, sorted(map(str, refs))) as transaction:
                start_background(ctx, self.command.backend, transaction, refs, self.seconds)


@contextmanager
def _taken_over(command: CommandContext, prepared: Prepared, seconds: float) -> Iterator[_TakenOver]:
    """A command that cannot do its own part either, because somebody else has the locks, hands everything on."""
    taken = _TakenOver(command, take_over(command.backend, prepared.touched), seconds)
    try:
        yield taken
    finally:
        taken.hand_on()


def _check_start(command: CommandContext, prepared: Prepared) -> None:
    """What will be started has its files, or can have them. Raises ArealError."""
    refs = {op.ref for op in prepared.plan.ops if op.verb is Verb.SPAWN}
    starting = {target.ref: target.object for target in prepared.scope.all if target.ref in refs}
    for kind in sorted({item.kind for item in starting.values()}):
        mine = {ref: item for ref, item in starting.items() if item.kind == kind}
        controller_of(kind).check_start(mine, lambda ref, stage: command.ctx.progress(Progress(ref, stage)))


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
    command: CommandContext, prepared: Prepared, prepare: Callable[[], Prepared]
) -> Iterator[tuple[Prepared, frozenset[Ref]]]:
    """Hold the locks of all that the plan touches, with the plan made again under them. The world may have moved in
    between: when the new plan touches more, everything is given back and taken again in order."""
    refs = prepared.touched
    while True:
        with lock_objects(
            command.ctx.home,
            sorted(refs),
            command.ctx.lock_timeout_s,
            command.ctx.command,
            interrupted=command.ctx.interrupted,
            on_wait=lambda message: command.ctx.progress(Progress("", message)),
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
        command: CommandContext,
        prepare: Callable[[], Prepared],
        held: frozenset[Ref],
        approved: _Approved,
        deadline: float,
        wait: bool,
    ) -> None:
        self._command, self._prepare, self._held, self._approved = command, prepare, held, approved
        self._deadline, self._wait = deadline, wait
        self.notes: list[str] = []

    def run(self, prepared: Prepared) -> list[Report]:
        reports = []
        for left in reversed(range(MAX_PASSES)):
            reports.append(_execute(self._command, prepared, self._deadline, self._wait))
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


def _execute(command: CommandContext, prepared: Prepared, deadline: float, wait: bool) -> Report:
    """Execute one plan in one transaction; afterwards nothing half-started is left."""
    targets = {target.ref: target for target in prepared.scope.all}
    plan = prepared.plan if wait else begun_only(prepared.plan, {ref for ref, it in targets.items() if it.gone})
    schedulers = partial(command.scheduler_of, {ref: target.object for ref, target in targets.items()})
    specs = {ref: target.object.spec for ref, target in targets.items()}
    slots = claim_slots(plan, prepared.observed, specs, command.backend.named, schedulers)
    transaction = Journal.open(command.ctx.home, command.ctx.command, sorted(targets))
    try:
        context = EffectContext(
            command.ctx,
            command.backend,
            command.store,
            targets,
            prepared.observed,
            slots,
            transaction,
            deadline,
            command.files,
        )
        report = execute(plan, lambda op: perform(context, op), command.ctx.interrupted)
        report.notes = tuple(context.notes)
        give_up(context, abandoned(report, context.spawned.keys()))
        transaction.commit()
    except BaseException as error:
        transaction.abort(str(error) or type(error).__name__)
        raise
    finally:
        command.backend.release_claims()
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
