"""``diff``, ``apply`` and everything that converges: render, lay over, observe, plan; then lock, plan again, execute.

Nothing is written, and no lock is taken, when the plan is empty. The plan that is executed is made under the locks,
by the same function that ``diff`` calls.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from areal.errors import ArealError, Conflict, UsageFault
from areal.reconcilers import conditions
from areal.reconcilers.context import Context, ObjectOutcome, Outcome
from areal.reconcilers.desired import Target, Wanted, pruned, target_for
from areal.reconcilers.effects import Effects
from areal.reconcilers.executor import Report, execute
from areal.reconcilers.manifests import check_against_state, rendered, wanted_of
from areal.reconcilers.model import Policy
from areal.reconcilers.observe import observe
from areal.reconcilers.observed import Observed
from areal.reconcilers.plan import Op, Plan, Verb
from areal.reconcilers.planner import Scope, make_plan, without_ops
from areal.reconcilers.recover import recover
from areal.reconcilers.requests import ApplyRequest
from areal.reconcilers.slots import claim_slots
from areal.resources.inference_service import InferenceServiceSpec
from areal.resources.kinds import parse_ref
from areal.resources.model import ModelSpec
from areal.resources.registry import effective
from areal.runtime.backends.local import LocalBackend
from areal.state.journal import Journal, crash_point
from areal.state.locks import lock_objects
from areal.state.objects import ObjectStore
from areal.state.records import StoredObject

MAX_PASSES = 3  # a second pass follows what the first one could not know, such as a port that had to move
SERVED_KINDS = ("InferenceService", "Model")

Choose = Callable[[list[StoredObject]], tuple[Target, ...]]


@dataclass
class Desk:
    """What one command works with."""

    ctx: Context
    store: ObjectStore
    backend: LocalBackend

    @classmethod
    def open(cls, ctx: Context) -> Desk:
        if os.path.lexists(ctx.home.root) and not ctx.home.root.is_dir():
            ctx.home.ensure()  # says what is in the way
        return cls(ctx, ObjectStore(ctx.home), LocalBackend(ctx.home.root, crash=crash_point))


@dataclass(frozen=True)
class Prepared:
    """A plan with what it was made from."""

    scope: Scope
    observed: Observed
    plan: Plan


def diff(ctx: Context, request: ApplyRequest) -> Plan:
    """The plan that ``apply`` would run. Read-only."""
    desk = Desk.open(ctx)
    return _prepare(desk, request).plan


def drift(ctx: Context, refs: Iterable[str] | None = None) -> Plan:
    """The plan that heals what is recorded, with every drift named. Read-only."""
    desk = Desk.open(ctx)
    return plan_targets(desk, _recorded(refs), Policy()).plan


def apply(ctx: Context, request: ApplyRequest, approve: Callable[[Plan], bool]) -> Outcome:
    """Converge to the manifests. Raises ArealError before the first effect; afterwards failures are in the outcome."""
    desk = Desk.open(ctx)
    wanted: tuple[Wanted, ...] | None = None
    if request.plan_file:
        request, wanted = _saved(desk, request)
    if request.dry_run:
        plan = _prepare(desk, request, wanted).plan
        return outcome_of(plan, None, dry_run=True)
    return converge(
        desk,
        lambda: _prepare(desk, request, wanted),
        approve,
        timeout_s=request.timeout_s,
        wait=request.wait,
    )


def converge(
    desk: Desk,
    prepare: Callable[[], Prepared],
    approve: Callable[[Plan], bool],
    *,
    timeout_s: float,
    wait: bool = True,
) -> Outcome:
    """Plan, lock what the plan touches, plan again under the locks, execute; until nothing is left to do."""
    notes = list(recover(desk.ctx, desk.backend))
    prepared = prepare()
    if prepared.plan.is_empty:
        return replace(outcome_of(prepared.plan, None), notes=tuple(notes))
    if prepared.plan.destructive and not approve(prepared.plan):
        raise UsageFault("declined; nothing was changed", hint="--yes approves a destructive plan")
    desk.ctx.home.ensure()
    deadline = time.monotonic() + timeout_s
    refs = sorted({parse_ref(op.ref) for op in prepared.plan.ops})
    with lock_objects(desk.ctx.home, refs, desk.ctx.lock_timeout_s, desk.ctx.command) as held:
        prepared = prepare()
        if prepared.plan.is_empty:
            return replace(outcome_of(prepared.plan, None), notes=tuple(notes))
        held.announce()
        first, report = prepared.plan, Report()
        for _ in range(MAX_PASSES):
            report = _run(desk, prepared, deadline, wait)
            if report.failed or report.interrupted or not wait:
                break
            settled = prepare()
            if settled.plan.is_empty or [op.to_text() for op in settled.plan.ops] == [
                op.to_text() for op in prepared.plan.ops
            ]:
                break
            prepared = settled
        endings = conditions.write_statuses(desk.ctx, desk.store, desk.backend, prepared.scope.all, report, first)
    return _with_endings(outcome_of(first, report), notes, endings)


def _with_endings(outcome: Outcome, notes: list[str], endings: dict[str, conditions.Ending]) -> Outcome:
    """Say how each object is now, and where a service answers."""
    objects = []
    for item in outcome.objects:
        ending = endings.get(item.ref)
        if ending is None or item.exit_code or item.action == "unchanged":
            objects.append(item)
            continue
        where = f" at {ending.address}" if ending.address and ending.phase == "Ready" else ""
        cause = f"; {item.message}" if item.message else ""
        objects.append(replace(item, message=f"{ending.phase}{where}{cause}"))
    addresses = {ref: ending.address for ref, ending in endings.items() if ending.address}
    return replace(outcome, objects=tuple(objects), notes=(*notes, *outcome.notes), addresses=addresses)


def plan_targets(desk: Desk, choose: Choose, policy: Policy, source: dict[str, Any] | None = None) -> Prepared:
    """Choose targets among what is stored, add their neighbours, observe, plan."""
    snapshot = desk.store.snapshot()
    stored = snapshot.objects
    targets = choose(stored)
    scope = Scope(targets, _context(targets, stored))
    refs = [target.ref for target in scope.all]
    want_gpus = any(_wants_gpus(target) for target in scope.all)
    observed = observe(desk.ctx.home, desk.backend, refs, want_gpus=want_gpus)
    policy = replace(policy, free_gpus=len(observed.capacity.gpus))
    plan = make_plan(scope, observed, policy, serial=snapshot.serial, source=source)
    return Prepared(scope, observed, plan)


def _prepare(desk: Desk, request: ApplyRequest, saved: tuple[Wanted, ...] | None = None) -> Prepared:
    """Plan a request; ``saved`` resources come from a saved plan instead of from files."""
    found = rendered(request.source) if saved is None else None
    wanted = saved if found is None else tuple(wanted_of(resource) for resource in found.resources)
    assert wanted is not None
    _require_some(request, wanted)

    def choose(stored: list[StoredObject]) -> tuple[Target, ...]:
        if found is not None:
            check_against_state(found, {item.ref for item in stored})
        return _lay_over(desk, request, wanted, stored)

    policy = Policy(allow_downtime=request.allow_downtime)
    source = {"resources": [asdict(item) for item in wanted], "options": _options(request)}
    if request.dry_run == "client":
        targets = choose(desk.store.list())
        plan = without_ops(make_plan(Scope(targets), Observed(), replace(policy, free_gpus=1 << 20)))
        return Prepared(Scope(targets), Observed(), plan)
    return plan_targets(desk, choose, policy, source)


def _require_some(request: ApplyRequest, wanted: Sequence[Wanted]) -> None:
    if not wanted and not request.allow_empty:
        raise UsageFault(
            "the manifests hold no resources", hint="--allow-empty applies an empty set (with --prune: deletes it)"
        )
    if request.prune and not request.set_name:
        raise UsageFault("--prune needs --set-name", hint="only members of a named set are ever pruned")


def _lay_over(
    desk: Desk, request: ApplyRequest, wanted: Sequence[Wanted], stored: list[StoredObject]
) -> tuple[Target, ...]:
    by_ref = {str(item.ref): item for item in stored}
    for item in wanted:
        if item.ref not in by_ref:
            desk.store.require_readable(parse_ref(item.ref))  # a damaged file is never taken as absent
    targets, conflicts = [], []
    for item in wanted:
        try:
            targets.append(
                target_for(
                    item,
                    by_ref.get(item.ref),
                    set_name=request.set_name,
                    force_conflicts=request.force_conflicts,
                    replace_it=request.replace,
                )
            )
        except Conflict as conflict:
            conflicts.append(conflict)
    if conflicts:
        raise Conflict("\n".join(c.message for c in conflicts), hint=conflicts[0].hint)
    targets += pruned(stored, wanted, prune=request.prune, set_name=request.set_name)
    _refuse_unserved(targets)
    return tuple(targets)


def _refuse_unserved(targets: Iterable[Target]) -> None:
    for target in targets:
        if target.object.kind not in SERVED_KINDS and not target.gone and not target.object.spec.get("suspend"):
            raise ArealError(
                f"{target.ref}: running a {target.object.kind} is not implemented yet; nothing was changed",
                hint="`areal validate` checks the manifest; with `suspend: true` it can be recorded",
            )


def _recorded(refs: Iterable[str] | None) -> Choose:
    wanted = None if refs is None else set(refs)

    def choose(stored: list[StoredObject]) -> tuple[Target, ...]:
        return tuple(Target(item, "unchanged") for item in stored if wanted is None or str(item.ref) in wanted)

    return choose


def _context(targets: Sequence[Target], stored: Sequence[StoredObject]) -> tuple[Target, ...]:
    """Services that the targets' models need, and the other models of every service in play."""
    names = {target.ref for target in targets}
    services = {f"InferenceService/{_service_of(t.object)}" for t in targets if t.object.kind == "Model"}
    services |= {target.ref for target in targets if target.object.kind == "InferenceService"}
    if not services:
        return ()
    found = []
    for item in stored:
        ref = str(item.ref)
        if ref in names:
            continue
        if ref in services or (item.kind == "Model" and f"InferenceService/{_service_of(item)}" in services):
            found.append(Target(item, "unchanged"))
    return tuple(found)


def _service_of(item: StoredObject) -> str:
    return str(item.spec.get("service", "default"))


def _wants_gpus(target: Target) -> bool:
    if target.object.kind != "Model" or target.gone:
        return False
    from areal.reconcilers.model import gpus_per_replica

    spec = effective("Model", target.object.spec)
    assert isinstance(spec, ModelSpec)
    return gpus_per_replica(spec) > 0


def _run(desk: Desk, prepared: Prepared, deadline: float, wait: bool) -> Report:
    """Execute one plan in one transaction; afterwards nothing half-started is left."""
    plan = prepared.plan
    targets = {target.ref: target for target in prepared.scope.all}
    services = {
        ref: spec for ref, target in targets.items() if isinstance(spec := _spec_of(target), InferenceServiceSpec)
    }
    slots = claim_slots(plan, prepared.observed, services, desk.backend)
    transaction = Journal.open(desk.ctx.home, desk.ctx.command, sorted(targets))
    try:
        effects = Effects(desk.ctx, desk.backend, desk.store, targets, prepared.observed, slots, transaction, deadline)
        report = execute(_begun_only(plan) if not wait else plan, effects.perform, desk.ctx.interrupted)
        _clean_up(desk, plan, report, effects)
        transaction.commit()
    except BaseException as error:
        transaction.abort(str(error) or type(error).__name__)
        raise
    return report


def _spec_of(target: Target) -> object:
    return effective(target.object.kind, target.object.spec) if target.object.kind == "InferenceService" else None


def _begun_only(plan: Plan) -> Plan:
    """``--no-wait``: processes are started, nothing is waited for; the next apply or reconcile goes on."""
    kept = {Verb.RECORD, Verb.SPAWN, Verb.KICK, Verb.FORGET, Verb.ERASE, Verb.STOP}
    begun: set[int] = set()
    ops: list[Op] = []
    for op in plan.ops:
        if op.verb in kept and set(op.needs) <= begun:
            begun.add(op.id)
            ops.append(op)
    return replace(plan, ops=tuple(ops))


def _clean_up(desk: Desk, plan: Plan, report: Report, effects: Effects) -> None:
    """Stop what was started and did not make it: a run that died while starting, a successor that was never routed."""
    if not report.failed and not report.skipped:
        return
    routed = {run for op in plan.ops if op.verb is Verb.ROUTE and op.id in report.done for run in op.runs}
    failed = {plan_op.run for plan_op in plan.ops if plan_op.id in report.failed}
    for op in plan.ops:
        if op.verb is not Verb.SPAWN or op.run not in effects.spawned:
            continue
        proxy = op.run.replace("/engine/", "/data-proxy/")
        abandoned = bool(op.args.get("successor")) and proxy not in routed and not report.interrupted
        if abandoned or op.run in failed:
            desk.backend.stop(effects.spawned[op.run])


def outcome_of(plan: Plan, report: Report | None, *, dry_run: bool = False) -> Outcome:
    from areal.errors import worst_exit

    words = {"create": "created", "configure": "configured", "heal": "healed", "prune": "pruned", "delete": "deleted"}
    objects = []
    for item in plan.objects:
        errors = report.errors_of(plan, item.ref) if report is not None else []
        if errors:
            worst = min(errors, key=lambda error: error.exit_code)
            objects.append(ObjectOutcome(item.ref, "failed", worst.message, worst.exit_code, worst))
            continue
        action = words.get(item.action, item.action)
        skipped = report is not None and any(op.id in report.skipped for op in plan.ops_of(item.ref))
        message = "(dry run)" if dry_run else "not converged: an earlier step failed" if skipped else item.cause
        objects.append(ObjectOutcome(item.ref, action, message, 9 if skipped else 0))
    if report is not None and report.interrupted:
        hint = "interrupted; the same command again goes on from here"
        return Outcome(tuple(objects), (hint,), 130)
    return Outcome(tuple(objects), (), worst_exit([item.exit_code for item in objects]))


def _options(request: ApplyRequest) -> dict[str, Any]:
    return {
        "prune": request.prune,
        "set_name": request.set_name,
        "allow_empty": request.allow_empty,
        "replace": request.replace,
        "force_conflicts": request.force_conflicts,
        "allow_downtime": request.allow_downtime,
    }


def _saved(desk: Desk, request: ApplyRequest) -> tuple[ApplyRequest, tuple[Wanted, ...]]:
    """A saved plan as a request. Raises Conflict when planning again does not give the same plan."""
    assert request.plan_file is not None
    try:
        saved = json.loads(Path(request.plan_file).read_bytes())
        wanted = tuple(
            Wanted(**{**item, "depends_on": tuple(item["depends_on"])}) for item in saved["source"]["resources"]
        )
        again = replace(request, plan_file=None, **saved["source"]["options"])
        serial, ops = saved["serial"], saved["ops"]
    except OSError as error:
        raise ArealError(f"{request.plan_file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ArealError(f"{request.plan_file} is not a plan saved by `areal diff --out`") from error
    now = _prepare(desk, again, wanted).plan.to_json()
    if now["serial"] != serial or json.loads(json.dumps(now["ops"])) != ops:
        raise Conflict(
            f"{request.plan_file} is stale: state or processes changed since it was made",
            hint="make a new one: areal diff -f ... --out plan.json",
        )
    return again, wanted
