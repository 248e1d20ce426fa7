"""``areal doctor``: finds inconsistencies between the records and the machine, and repairs them. All are found before
the first is repaired.

The backends and the state report their own problems (``Backend.inspect``, ``state.upkeep``). This module turns them
into findings with the next command to run, and adds runs whose owner is not recorded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple

from areal.dataclasses import dataclass, replace
from areal.errors import ArealError
from areal.installation import conflicts, searched
from areal.reconcilers.context import Context
from areal.reconcilers.converge import recover
from areal.reconcilers.desired import Target
from areal.reconcilers.kinds import ServiceController, controller_of, controllers, started_again_by
from areal.reconcilers.launch import key_path
from areal.reconcilers.observe import look, setting
from areal.resources.addresses import is_loopback
from areal.resources.kinds import Ref, parse_ref
from areal.runtime.backends import Backends
from areal.runtime.backends.base import LIVE, LOOPBACK, Phase, ProblemKind, RunState
from areal.runtime.runs import COPIED
from areal.state import upkeep
from areal.state.files import NEWER, crash_point, remedy
from areal.state.home import read_key
from areal.state.journal import orphans
from areal.state.locks import holder
from areal.state.objects import ObjectStore

FIX = "areal doctor --fix"
END = f"{FIX} --yes ends it"
_LEAST_FREE_BYTES = 64 << 20


@dataclass(frozen=True)
class Finding:
    """``severity`` is error | warning | info; ``fix_command`` is what a person would run."""

    severity: str
    what: str
    why: str = ""
    fix_command: str = ""
    fixed: bool = False


class _Diagnosis(NamedTuple):
    """A finding and its repair. ``ends``: the repair ends a living process."""

    finding: Finding
    repair: Callable[[], object] | None = None
    ends: bool = False


def doctor(
    ctx: Context, fix: bool = False, security: bool = False, may_end: Callable[[str], bool] = lambda what: False
) -> tuple[Finding, ...]:
    """Return every finding, worst first. ``fix`` makes the repairs that lose no data; a repair that ends a living
    process also needs the approval of ``may_end``."""
    backend = Backends(ctx.home.root, crash=crash_point)
    found = [*_journals(ctx, backend), *_state(ctx, backend), *_processes(ctx, backend), *_keys(ctx, backend)]
    names = (Finding("warning", other.what, other.why, other.fix) for other in conflicts(searched()))
    found += [*_home(ctx), *_data(ctx), *map(_Diagnosis, names)]
    if security:
        found += _security(ctx, backend)
    results = [
        _repaired(each.finding, each.repair) if fix and (not each.ends or may_end(each.finding.what)) else each.finding
        for each in found
    ]
    rank = {"error": 0, "warning": 1, "info": 2}
    return tuple(sorted(results, key=lambda finding: (rank[finding.severity], finding.what)))


def _repaired(finding: Finding, repair: Callable[[], object] | None) -> Finding:
    if repair is None:
        return finding
    try:
        repair()
    except ArealError as error:
        why, hint = f"{finding.why}; not fixed: {error.message}", error.hint or finding.fix_command
        return replace(finding, why=why, fix_command=hint)
    return replace(finding, fixed=True)


def _journals(ctx: Context, backend: Backends) -> Iterator[_Diagnosis]:
    for orphan in orphans(ctx.home):
        count = len(orphan.unfinished)
        why = f"its process {orphan.pid} is gone; {count} operation{'s were' if count != 1 else ' was'} open"
        finding = Finding("warning", f"interrupted command: {orphan.command}", why, FIX)
        yield _Diagnosis(finding, lambda: recover(ctx, backend))


def _state(ctx: Context, backend: Backends) -> Iterator[_Diagnosis]:
    for defect in upkeep.defects(ctx.home):
        if defect.reason.startswith(NEWER):
            yield _Diagnosis(Finding("error", f"unreadable file: {defect.path}", defect.reason, remedy(defect.reason)))
        elif defect.ref is not None:
            finding = Finding("error", f"unreadable state of {defect.ref}: {defect.path}", defect.reason, FIX)
            yield _Diagnosis(finding, partial(_restore, ctx, backend, defect.ref))
        else:
            finding = Finding("error", f"unreadable file: {defect.path}", defect.reason, f"{FIX} sets it aside")
            yield _Diagnosis(finding, partial(upkeep.set_aside, ctx.home, defect))
    for item in ObjectStore(ctx.home).list():
        if fault := Target(item, "unchanged").fault:
            yield _Diagnosis(Finding("error", f"the recorded fields of {item.ref} are refused", *fault))
    for path in upkeep.leftovers(ctx.home):
        yield _Diagnosis(Finding("info", f"left over: {path}", fix_command=FIX), lambda: upkeep.sweep(ctx.home))


def _restore(ctx: Context, backend: Backends, ref: Ref) -> None:
    """Restore an object from its newest revision, and its status as far as its processes know it."""
    store = ObjectStore(ctx.home)
    found = store.restore(ref)
    states = sorted(backend.observe().values(), key=lambda state: state.started_at or 0.0)
    runs = [state.spec for state in states if state.spec.owner == str(ref)]
    if known := controller_of(ref.kind).status_of(found, runs):
        store.put_statuses({ref: {**known, **found.status}})


def _processes(ctx: Context, backend: Backends) -> Iterator[_Diagnosis]:
    for problem in backend.inspect():
        severity = "error" if problem.pids or problem.trouble is ProblemKind.STRAY_PROCESS else "warning"
        ends = problem.trouble is ProblemKind.STRAY_PROCESS
        by_hand = "" if COPIED in problem.message else "repair it by hand: stop its processes where they run"
        hint = by_hand if not problem.repairable else END if ends else FIX
        finding = Finding(severity, f"{problem.trouble}: {problem.subject}", problem.message, hint)
        yield _Diagnosis(finding, partial(backend.repair, problem) if problem.repairable else None, ends)
    store = ObjectStore(ctx.home).list()
    known = {str(item.ref) for item in store}
    known |= {str(upkeep.ref_of(path)) for path, _ in store.unreadable}  # their runs are no orphans
    for uid, state in sorted(backend.observe().items()):
        if state.spec.owner and state.spec.owner not in known:
            yield from _orphan(ctx, backend, uid, state)
        elif state.phase is Phase.CRASHLOOP:
            what = f"{state.spec.owner} {state.spec.component}/{state.spec.replica} is in a crash loop"
            again = started_again_by(parse_ref(state.spec.owner)) if state.spec.owner else "areal reconcile"
            hint = f"areal logs {state.spec.owner} -c {state.spec.component}; {again} starts it again"
            yield _Diagnosis(Finding("error", what, state.reason, hint))
    for run in chain.from_iterable(look(list(backend.observe().values())).runs.values()):
        for trouble in filter(None, (run.trouble, run.notice)):
            what = f"{run.state.spec.owner} {run.slot}: {trouble.message}"
            yield _Diagnosis(Finding("error", what, trouble.reason, trouble.hint))
    try:
        squatters = backend.capacity().squatters
    except ArealError as error:
        squatters = {}
        yield _Diagnosis(Finding("error", error.message, "free GPUs and strays are not known", error.hint or ""))
    for uuid, who in sorted(squatters.items()):
        yield _Diagnosis(Finding("warning", f"GPU {uuid} is used without a lease", who, "nothing is started on it"))


def _keys(ctx: Context, backend: Backends) -> Iterator[_Diagnosis]:
    """Find services whose processes run with a key that can no longer be read."""
    alive = {state.spec.owner for state in backend.observe().values() if state.phase in LIVE}
    for item in ObjectStore(ctx.home).list():
        if str(item.ref) not in alive or not isinstance(controller_of(item.kind), ServiceController):
            continue
        try:
            read_key(key_path(ctx.home, item))
        except ArealError as error:
            hint = "put it back, or have what uses it replaced with a new one: areal reconcile --yes"
            yield _Diagnosis(Finding("error", f"the key of {item.ref} is lost", error.message, hint))


def _orphan(ctx: Context, backend: Backends, uid: str, state: RunState) -> Iterator[_Diagnosis]:
    """Report a run whose owner is not recorded. ``Backend.inspect`` reports problems of its processes."""
    owner = state.spec.owner
    if holder(ctx.home, parse_ref(owner)) is not None:
        return  # another command holds its lock
    if state.phase in LIVE:
        what, why = f"run {uid} lives and its owner {owner} is not recorded", f"pid {state.pid or state.shim_pid}"
        yield _Diagnosis(Finding("error", what, why, END), lambda: _end(backend, uid), ends=True)
    elif state.phase in (Phase.EXITED, Phase.CRASHLOOP):
        what = f"record of ended run {uid} of {owner}, which is not recorded"
        yield _Diagnosis(Finding("info", what, fix_command=FIX), lambda: _end(backend, uid))


def _end(backend: Backends, uid: str) -> None:
    backend.stop(uid)
    backend.forget(uid)


def _home(ctx: Context) -> Iterator[_Diagnosis]:
    root = ctx.home.root
    if not root.exists():
        return
    kind, options = upkeep.filesystem(ctx.home)
    hold = upkeep.locks_hold_between_machines(kind, options)
    if hold is False:
        why = "its mount options keep kernel locks on one machine: two of them could run one object"
        fix = "mount it without nolock and local_lock (NFS), with flock (Lustre), or use a local folder: AREAL_HOME"
        yield _Diagnosis(Finding("error", f"{root} is on {kind}", why, fix))
    elif hold is None and upkeep.may_span_machines(kind):
        why = "kernel locks may not hold between machines: two of them could run one object"
        fix = "use areal from one machine, or a local folder: --home or AREAL_HOME"
        yield _Diagnosis(Finding("warning", f"{root} is on {kind}", why, fix))
    if closed := ctx.home.closed():
        yield _Diagnosis(Finding("error", closed, "no command can change an object", "make it writable: chmod u+rwx"))
    space = os.statvfs(root)
    free = space.f_bavail * space.f_frsize
    if free < _LEAST_FREE_BYTES:
        what = f"{root} has {free >> 20} MiB left"
        yield _Diagnosis(Finding("error", what, "state can soon no longer be written", "free some space"))


def _data(ctx: Context) -> Iterator[_Diagnosis]:
    """Find files whose object is deleted."""
    for controller in controllers():
        found = ObjectStore(ctx.home).list(controller.kind)
        known = [item.name for item in found] + [path.parent.name for path, _ in found.unreadable]
        for what, hint in controller.leftovers(ctx.home, known):
            yield _Diagnosis(Finding("info", what, "", hint))


def _security(ctx: Context, backend: Backends) -> Iterator[_Diagnosis]:
    for path, mode in upkeep.exposed(ctx.home):
        what, why = f"{path} has mode {mode:o}", f"others may read or write it; {mode & 0o700:o} is enough"
        finding = Finding("error", what, why, f"chmod {mode & 0o700:o} {path}")
        yield _Diagnosis(finding, partial(upkeep.tighten, path))
    for uid, state in sorted(backend.observe().items()):
        host = setting(state.spec, "host") or LOOPBACK
        if state.phase in LIVE and not is_loopback(host) and not state.job_id:  # on a cluster, all listen openly
            what = f"run {uid} of {state.spec.owner} listens on {host}"
            why = "reachable from outside: every route but health wants a key, and traffic is not encrypted"
            hint = "spec.gateway.host: 127.0.0.1, or a TLS proxy in front"
            yield _Diagnosis(Finding("warning", what, why, hint))
