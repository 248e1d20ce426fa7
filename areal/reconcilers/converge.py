"""Converge: observe, plan, lock what the plan touches, plan again under the locks, execute; until nothing is left.

Every verb changes objects through this module, and therefore plans as ``diff`` does. Invariants: with an empty plan,
nothing is written and no lock is taken; an executed plan touches only objects whose locks are held, and destroys only
what was approved.

Leftovers of earlier commands come first: interrupted operations are finished or rolled back, and background commands
are ended if they converge one of the objects. Only starting a process can leave something that the next plan does not
see: a shim between its fork and its identity record. Every other operation is idempotent and level-triggered, so that
planning again recovers it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from areal import interrupt
from areal.errors import ArealError, InvalidManifest, TimedOut, UsageFault
from areal.installation import install_command, module_argv
from areal.reconcilers.context import Context, Deadline, Outcome
from areal.reconcilers.kinds import controller_of
from areal.reconcilers.outcomes import (
    outcome_of,
    recorded_targets,
    settle_statuses,
    with_endings,
    with_stuck,
    write_statuses,
)
from areal.reconcilers.plan import Op, Plan, Report, StartRun, Verb
from areal.reconcilers.prepare import CommandContext, Prepared
from areal.reconcilers.status import BACKGROUND, held_back
from areal.resources.kinds import Ref, parse_ref
from areal.runtime.backends import LOCAL
from areal.runtime.backends.base import ENDED, Phase, RestartPolicy, RunControl, RunSpec, RunState, reserved
from areal.state.events import EventLog
from areal.state.journal import Operation, Transaction, orphans
from areal.state.locks import HOUSEKEEPING, lock_objects
from areal.state.records import StoredObject

GOES_ON = "more is to be done than was planned at first: the same command again goes on"
MAX_PASSES = 3  # a pass can reveal facts that it did not know, such as a port that had to change

Approve = Callable[[Plan], bool]


def converge(
    command: CommandContext,
    prepare: Callable[[], Prepared],
    approve: Approve,
    *,
    timeout_s: float,
    wait: bool = True,
    check: Callable[[Plan], None] = lambda plan: None,
) -> Outcome:
    """Make the actual state match what ``prepare`` plans. ``check`` may refuse a plan before the first effect. Raises
    ArealError before the first effect; later failures are in the outcome."""
    notes = list(recover(command.ctx, command.backend))
    approved: set[str] = set()  # destructive sentences that were approved; each is asked once

    def require_approval(plan: Plan) -> None:
        check(plan)
        if not approved.issuperset(plan.destructive) and not approve(plan):
            raise UsageFault("declined; nothing was changed", hint="--yes approves a destructive plan")
        approved.update(plan.destructive)

    prepared, reports = prepare(), list[Report]()
    require_approval(prepared.plan)
    if prepared.plan.is_empty:
        return _nothing_to_do(command, prepared, notes)
    _check_start(command, prepared)
    command.ctx.home.ensure()
    deadline = Deadline(time.monotonic() + timeout_s)
    left = take_over(command.backend, prepared.touched)
    try:
        with _locked(command, prepared, prepare) as (prepared, held):
            require_approval(prepared.plan)
            refs = left - held if wait or prepared.plan.is_empty else left | held
            left = frozenset()
            start_background(command, refs, timeout_s)
            if prepared.plan.is_empty:
                return _nothing_to_do(command, prepared, notes)
            planned, unfinished = prepared, frozenset[Ref]() if wait else held
            stuck: dict[str, str] = {}
            for passes_left in reversed(range(MAX_PASSES)):
                report = _execute(command, planned, deadline, wait)
                if wait and passes_left and is_overtaken(report, command.backend.observe):
                    report = replace(report, failed={}, skipped=set())
                reports.append(report)
                if report.failed or report.interrupted or not wait:
                    break
                if _only_records(planned):
                    unfinished = frozenset()
                    break
                following = prepare()
                unfinished = following.touched
                if following.plan.is_empty:
                    break
                if not following.touched <= held or not approved.issuperset(following.plan.destructive):
                    notes.append(GOES_ON)
                    break
                todo = [op.to_text() for op in following.plan.ops]
                if not passes_left or todo == [op.to_text() for op in planned.plan.ops]:
                    stuck = following.plan.first_ops
                    notes.append(
                        f"still to be done: {following.plan.ops[0].to_words()}; areal diff --drift shows it all"
                    )
                    break
                planned = following
            left_to_do = {str(ref) for ref in unfinished}
            endings = write_statuses(command.ctx, command.store, command.backend, prepared.scope, reports, left_to_do)
        stopped = any(op.verb is Verb.STOP and op.id in report.done for report in reports for op in report.plan.ops)
        if stopped and HOUSEKEEPING not in command.ctx.command:  # a job's end sees to what was held back itself
            left |= {item.ref for item in held_back(command.ctx.home, command.backend)}  # there may be room for it now
    finally:
        start_background(command, left, timeout_s)  # after an error, such as locks held by another command
    return _with_notes(with_endings(with_stuck(outcome_of(prepared.plan, reports), stuck), endings), notes)


def _only_records(prepared: Prepared) -> bool:
    """Return whether nothing can be left to do after the plan: it only records, and no process follows. If an object
    waits for a job, the answer is False: the job may have ended before that was recorded, without starting the
    object."""
    waits = any(target.object.awaits for target in prepared.scope.targets)
    return not waits and all(op.verb is Verb.RECORD for op in prepared.plan.ops)


def _check_start(command: CommandContext, prepared: Prepared) -> None:
    """Check the files of the objects that will start, and that each cluster can place their processes. Raises
    ArealError."""
    spawned = [op for op in prepared.plan.ops if op.verb is Verb.SPAWN]
    planned = {target.ref: target.object for target in prepared.scope.all}
    refs = {op.ref for op in spawned}
    starting = {ref: item for ref, item in planned.items() if ref in refs}
    demands: list[tuple[Mapping[str, Any], dict[str, Any]]] = []
    for op in spawned:
        cpus, memory_bytes = reserved(op.target.partition("/")[0], planned[op.ref].spec)
        wanted = {"gpus": op.args.gpus or 0, "nodes": op.args.nodes}
        demand = command.scheduler_of(planned, op.ref), {**wanted, "cpus": cpus, "memory_bytes": memory_bytes}
        if demand not in demands:
            demands.append(demand)
    local = {ref: each for ref, each in starting.items() if command.scheduler_of(planned, ref)["type"] == LOCAL}
    _require_packages(local)
    for ref, item in local.items():
        for place, program in controller_of(item.kind).programs(item.spec).items():
            from shutil import which  # with what it imports, only where a program is named

            if which(program) is None:
                raise InvalidManifest(f"{ref}: {place}: there is no program {program!r}")
    for scheduler, wanted in demands:
        command.backend.named(scheduler["type"]).require_possible(scheduler, **wanted)
    for kind in sorted({item.kind for item in starting.values()}):
        mine = {ref: item for ref, item in starting.items() if item.kind == kind}
        controller_of(kind).check_start(mine, command.ctx.report)


def _require_packages(starting: Mapping[str, StoredObject]) -> None:
    """Raise UsageFault if this Python lacks packages of processes that it starts on this machine."""
    needs: dict[str, str] = {}
    for item in starting.values():
        needs |= controller_of(item.kind).packages(item.spec)
    lacking = {package: needs[package] for package in sorted(needs) if not find_spec(package)}
    if lacking:
        hint = install_command(",".join(sorted(set(lacking.values()))))
        raise UsageFault(f"the processes need packages that are not installed: {', '.join(lacking)}", hint=hint)


def _nothing_to_do(command: CommandContext, prepared: Prepared, notes: Sequence[str]) -> Outcome:
    settle_statuses(command.ctx, command.store, command.backend, prepared.plan, prepared.scope)
    return _with_notes(outcome_of(prepared.plan), notes)


def _with_notes(outcome: Outcome, notes: Sequence[str]) -> Outcome:
    return replace(outcome, notes=(*notes, *outcome.notes))


@contextmanager
def _locked(
    command: CommandContext, prepared: Prepared, prepare: Callable[[], Prepared]
) -> Iterator[tuple[Prepared, frozenset[Ref]]]:
    """Hold the locks of all objects that the plan touches, and plan again under them, unless nothing has changed since
    the plan was made and no approval was requested. If the new plan touches more objects, release the locks and take
    all of them in order."""
    refs, ctx = prepared.touched, command.ctx
    while True:
        with lock_objects(
            ctx.home,
            sorted(refs),
            ctx.lock_timeout_s,
            ctx.command,
            interrupted=ctx.interrupted,
            on_wait=partial(ctx.report, ""),
        ) as held:
            asked = bool(prepared.plan.destructive)  # health and GPUs may have changed while the user was deciding
            again = prepared if not (asked or held.waited) and prepared.is_current(command) else prepare()
            if again.touched <= refs:
                if not again.plan.is_empty:
                    held.announce()
                yield again, refs
                return
        refs, prepared = refs | again.touched, again


def _execute(command: CommandContext, prepared: Prepared, deadline: Deadline, wait: bool) -> Report:
    """Execute one plan in one transaction, and stop the processes that it started in vain."""
    from areal.reconcilers.execute import claim_slots, execute, give_up, perform
    from areal.reconcilers.launch import EffectContext

    found = prepared.scope.all
    if wait and _only_records(prepared):
        found = recorded_targets(command.ctx, prepared.scope, prepared.observed)
    targets = {target.ref: target for target in found}
    plan = prepared.plan if wait else begun_only(prepared.plan, {ref for ref, it in targets.items() if it.is_deleted})
    schedulers = partial(command.scheduler_of, {ref: target.object for ref, target in targets.items()})
    specs = {ref: target.object.spec for ref, target in targets.items()}
    slots = claim_slots(plan, prepared.observed, specs, command.backend.named, schedulers)
    ctx = command.ctx
    try:
        with Transaction.open(ctx.home, ctx.command, sorted(targets)) as transaction:
            context = EffectContext(
                ctx, command.backend, command.store, targets, prepared.observed, slots, transaction, deadline
            )
            report = execute(plan, partial(perform, context), ctx.interrupted)
            report.notes = tuple(context.notes)
            give_up(context, abandoned(report, context.spawned.keys()))
    finally:
        command.backend.release_claims()
    return report


def begun_only(plan: Plan, deleted: Collection[str] = ()) -> Plan:
    """Return the ops for ``--no-wait``: start processes without waiting for anything, not even for the cluster to place
    a neighbor. A background command does the rest. Deletions (``deleted``) run completely, since no record says that
    they are due."""
    kept = {Verb.RECORD, Verb.SPAWN, Verb.KICK, Verb.REPAIR, Verb.FORGET, Verb.ERASE, Verb.STOP, Verb.BARRIER}
    begun: dict[int, Op[Any]] = {}
    for op in plan.ops:
        waits = op.verb is Verb.SPAWN and any(begun[need].verb is Verb.SPAWN for need in op.needs if need in begun)
        if (op.verb in kept or op.ref in deleted) and begun.keys() >= set(op.needs) and not waits:
            begun[op.id] = op
    return replace(plan, ops=tuple(begun.values()))


def is_overtaken(report: Report, observe: Callable[[Sequence[str]], Mapping[str, RunState]]) -> bool:
    """Return whether a pass failed only because processes that it had not started ended while it waited for them, by a
    cancelled job, a lost node or a killed supervisor. The next pass then plans again."""
    ops, failed = report.plan.ops, [op for op in report.plan.ops if op.id in report.failed]
    begun = {op.run for op in ops if op.verb in (Verb.SPAWN, Verb.KICK)}
    if not failed or any(op.verb is not Verb.AWAIT or op.run in begun for op in failed):
        return False
    states = observe([op.run for op in failed])
    found = [states.get(op.run) for op in failed]
    ended = [s for s in found if s is not None and s.phase is Phase.EXITED and (s.reason == "stopped" or s.cause)]
    return len(failed) == len(ended) + sum(s is not None and s.phase is Phase.DEAD for s in found)


def abandoned(report: Report, spawned: Collection[str]) -> tuple[str, ...]:
    """Return the runs to stop after a failure: failed runs, runs whose start waits for them, and successors of
    processes that still serve.

    The command's own timeout and an interrupt are not failures of a process: it continues to start, and the same
    command run again waits for it.
    """
    ops, errors = report.plan.ops, report.failed
    failed = [op for op in ops if op.id in errors and not isinstance(errors[op.id], TimedOut)]
    failed_runs, failed_refs = {op.run for op in failed if op.run}, {op.ref for op in failed}
    ids = {op.id for op in failed}
    failed_runs |= {op.run for op in ops if op.verb is Verb.AWAIT and ids.intersection(op.needs)}
    routed = {run for op in ops if op.verb is Verb.ROUTE and op.id in report.done for run in op.runs}

    def is_useless(op: Op[StartRun]) -> bool:
        proxy = f"+{op.ref}/data-proxy/{op.target.rpartition('/')[2]}"
        return op.args.successor and op.ref in failed_refs and proxy not in routed

    started = (op for op in ops if op.verb is Verb.SPAWN and op.run in spawned)
    return tuple(op.run for op in started if op.run in failed_runs or is_useless(op))


IDENTITY_GRACE_S = 2.0  # a shim that got "go" writes its identity within milliseconds


def recover(ctx: Context, backend: RunControl) -> tuple[str, ...]:
    """Settle every orphaned journal; one sentence each. Writes nothing when there is none."""
    sentences = []
    for orphan in orphans(ctx.home):
        taken = Transaction.resume(orphan)
        if taken is None:
            continue
        found, transaction = taken
        settled = []
        for operation in found.unfinished:
            settled.append(_settle(backend, operation))
            transaction.end(operation.n)
        transaction.commit()
        when = time.strftime("%H:%M:%S", time.localtime(found.at))
        detail = "; ".join(filter(None, settled))
        sentences.append(f"recovered an interrupted `{found.command}` of {when}" + (f": {detail}" if detail else ""))
    return tuple(sentences)


def _settle(backend: RunControl, operation: Operation) -> str:
    if operation.op != "spawn":
        return ""
    uid, target = str(operation.data.get("run", "")), f"{operation.data.get('ref')} {operation.data.get('target')}"
    pid = operation.data.get("pid")
    deadline = time.monotonic() + IDENTITY_GRACE_S
    while True:
        state = backend.observe([uid]).get(uid)
        if state is None:
            return ""
        if state.phase is not Phase.INTENDED:
            return f"{target} is {state.phase}, kept"
        if pid is None or not Path(f"/proc/{pid}").exists() or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    with suppress(ArealError):
        backend.stop(uid, grace_s=0)
    backend.forget(uid)
    return f"{target} had not started, forgotten"


_GRACE_S = 60.0  # to finish operations that have begun
TRY_AGAIN = (6, 7, interrupt.STATUS)  # locked, timed out, interrupted; other failures are permanent
_RESTART = RestartPolicy(
    "OnFailure",
    1.0,
    2.0,
    10.0,
    budget_count=20,
    final_exit_codes=tuple(code for code in range(1, 128) if code not in TRY_AGAIN),
)


def start_background(command: CommandContext, refs: Collection[Ref], seconds: float) -> None:
    """Start the process that converges ``refs`` once this command has released its locks."""
    if not refs:
        return
    ctx, names, uid = command.ctx, sorted(map(str, refs)), f"{BACKGROUND}-{secrets.token_hex(4)}"
    spec = RunSpec(
        uid=uid,
        owner="",
        component=BACKGROUND,
        replica=0,
        argv=tuple(module_argv("areal.reconcilers.background", str(ctx.home.root), f"{seconds:g}", *names)),
        env={"PYTHONUNBUFFERED": "1"},
        inputs={"refs": names, "seconds": seconds},
        restart=_RESTART,
        stop_grace_s=_GRACE_S,
    )
    with Transaction.open(ctx.home, ctx.command, names) as tx:
        number = tx.begin("spawn", ref=", ".join(names), target=f"{BACKGROUND}/0", run=uid)
        command.backend.start(spec, on_pid=lambda pid: tx.note(number, pid=pid))
        tx.end(number)
        for ref in refs:
            message = f"process {uid} starts what is left in the background, and ends by itself"
            EventLog(ctx.home).record(ref, "Normal", "GoesOn", message, actor=ctx.actor)


def take_over(backend: RunControl, touched: Collection[Ref]) -> frozenset[Ref]:
    """End the background commands that converge one of ``touched``, and forget those that have ended. Return the
    objects that the ended commands were to converge."""
    left: set[Ref] = set()
    for uid, state in backend.observe().items():
        if state.spec.component != BACKGROUND or uid == os.environ.get("AREAL_RUN_UID"):
            continue
        if state.phase in ENDED:
            backend.forget(uid)
            continue
        refs = frozenset(map(parse_ref, state.spec.inputs.get("refs", ())))
        if state.phase is not Phase.UNKNOWN and refs & set(touched):
            backend.stop(uid, grace_s=_GRACE_S)
            backend.forget(uid)
            left |= refs
    return frozenset(left)
