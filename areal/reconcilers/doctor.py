"""``areal doctor``: what is wrong between the records and the machine, and what repairs it. Looks first, then fixes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from areal.errors import ArealError
from areal.reconcilers.context import Context
from areal.reconcilers.recover import recover
from areal.resources.kinds import Ref, parse_ref
from areal.runtime.backends.base import Phase, RunState
from areal.runtime.backends.local import LocalBackend
from areal.runtime.doctor import inspect, repair
from areal.state.journal import crash_point, orphans
from areal.state.locks import holder
from areal.state.objects import ObjectStore

NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "fuse.sshfs", "ceph", "gpfs")
LOOPBACKS = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Finding:
    """``severity`` is error | warning | info; ``fix_command`` is what a person would run."""

    severity: str
    what: str
    why: str = ""
    fix_command: str = ""
    fixed: bool = False


@dataclass(frozen=True)
class _Trouble:
    finding: Finding
    repair: Callable[[], object] | None = None


def doctor(ctx: Context, fix: bool = False, security: bool = False) -> tuple[Finding, ...]:
    """Every finding, worst first. With ``fix`` whatever can be repaired without losing anything is."""
    backend = LocalBackend(ctx.home.root, crash=crash_point)
    found = [*_journals(ctx, backend), *_objects(ctx), *_runs(ctx, backend), *_home(ctx)]
    if security:
        found += _security(ctx, backend)
    results = [_mended(trouble) if fix else trouble.finding for trouble in found]
    rank = {"error": 0, "warning": 1, "info": 2}
    return tuple(sorted(results, key=lambda finding: (rank[finding.severity], finding.what)))


def _mended(trouble: _Trouble) -> Finding:
    if trouble.repair is None:
        return trouble.finding
    try:
        trouble.repair()
    except ArealError as error:
        return replace(trouble.finding, why=f"{trouble.finding.why}; not fixed: {error.message}")
    return replace(trouble.finding, fixed=True)


def _journals(ctx: Context, backend: LocalBackend) -> Iterator[_Trouble]:
    for orphan in orphans(ctx.home):
        yield _Trouble(
            Finding(
                "warning",
                f"interrupted command: {orphan.command}",
                f"its process {orphan.pid} is gone and {len(orphan.unfinished)} operations were open",
                "areal doctor --fix, or any mutating command",
            ),
            lambda: recover(ctx, backend),
        )


def _objects(ctx: Context) -> Iterator[_Trouble]:
    store = ObjectStore(ctx.home)
    for path, reason in store.list().unreadable:
        ref = _ref_of(Path(path))
        yield _Trouble(
            Finding("error", f"unreadable state: {path}", reason, "areal doctor --fix restores the newest revision"),
            (lambda ref=ref: store.restore(ref)) if ref is not None else None,  # type: ignore[misc]
        )


def _ref_of(path: Path) -> Ref | None:
    try:
        return parse_ref(f"{path.parent.parent.name}/{path.parent.name}")
    except ArealError:
        return None


def _runs(ctx: Context, backend: LocalBackend) -> Iterator[_Trouble]:
    known = {str(item.ref) for item in ObjectStore(ctx.home).list()}
    for problem in inspect(backend):
        yield _Trouble(
            Finding(
                "error" if problem.pids else "warning",
                f"{problem.trouble}: {problem.subject}",
                problem.message,
                "areal doctor --fix" if problem.repairable else "",
            ),
            (lambda problem=problem: repair(backend, problem)) if problem.repairable else None,  # type: ignore[misc]
        )
    for uid, state in sorted(backend.observe().items()):
        yield from _run(ctx, backend, uid, state, known)
    for uuid, who in sorted(backend.capacity().squatters.items()):
        yield _Trouble(Finding("warning", f"GPU {uuid} is used by a stranger", who, "stop that process"))


def _run(ctx: Context, backend: LocalBackend, uid: str, state: RunState, known: set[str]) -> Iterator[_Trouble]:
    """Runs whose owner is gone, and runs that gave up. What only concerns processes is ``runtime.doctor``'s."""
    owner = state.spec.owner
    if owner in known or holder(ctx.home, parse_ref(owner)) is not None:
        if state.phase is Phase.CRASHLOOP:
            yield _Trouble(
                Finding("error", f"run {uid} of {owner} is in a crash loop", state.reason, f"areal logs {owner}")
            )
        return
    if state.phase in (Phase.STARTING, Phase.RUNNING, Phase.BACKOFF):
        yield _Trouble(
            Finding(
                "error",
                f"run {uid} lives and its owner {owner} is not recorded",
                f"pid {state.pid}",
                "areal doctor --fix",
            ),
            lambda: _end(backend, uid),
        )
    elif state.phase in (Phase.EXITED, Phase.CRASHLOOP):
        yield _Trouble(Finding("info", f"record of ended run {uid} of {owner}"), lambda: _end(backend, uid))


def _end(backend: LocalBackend, uid: str) -> None:
    backend.stop(uid)
    backend.forget(uid)


def _home(ctx: Context) -> Iterator[_Trouble]:
    root = ctx.home.root
    if not root.exists():
        return
    kind = _filesystem(root)
    if kind in NETWORK_FILESYSTEMS:
        yield _Trouble(
            Finding(
                "warning",
                f"{root} is on {kind}",
                "kernel locks may not hold between machines",
                "use a local folder: --home or AREAL_HOME",
            )
        )
    free = os.statvfs(root)
    if free.f_bavail * free.f_frsize < 64 << 20:
        yield _Trouble(Finding("error", f"{root} has less than 64 MiB free", "state can no longer be written safely"))


def _filesystem(path: Path) -> str:
    """The type of the file system that holds ``path``: the longest mount point that is a prefix of it."""
    best = ("", "")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        inside = str(path) == mount or str(path).startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]


def _security(ctx: Context, backend: LocalBackend) -> Iterator[_Trouble]:
    for path in (ctx.home.root, ctx.home.credentials, *_key_files(ctx)):
        if not path.exists():
            continue
        wanted = 0o700 if path.is_dir() else 0o600
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & ~wanted:
            yield _Trouble(
                Finding(
                    "error",
                    f"{path} has mode {mode:o}",
                    f"others may read it; {wanted:o} is enough",
                    f"chmod {wanted:o} {path}",
                ),
                lambda path=path, wanted=wanted: path.chmod(wanted),  # type: ignore[misc]
            )
    for uid, state in sorted(backend.observe().items()):
        host = (state.spec.url or "").removeprefix("http://").rpartition(":")[0].strip("[]")
        bound = _bound_host(state)
        if state.phase is Phase.RUNNING and (host not in LOOPBACKS or bound not in LOOPBACKS):
            yield _Trouble(
                Finding(
                    "warning",
                    f"run {uid} of {state.spec.owner} listens on {bound}",
                    "reachable from outside; every route but the key-guarded ones refuses, traffic is not encrypted",
                    "spec.gateway.host: 127.0.0.1, or a TLS proxy in front",
                )
            )


def _bound_host(state: RunState) -> str:
    argv = list(state.spec.argv)
    return argv[argv.index("--host") + 1] if "--host" in argv else "127.0.0.1"


def _key_files(ctx: Context) -> list[Path]:
    return sorted(ctx.home.credentials.glob("*")) if ctx.home.credentials.is_dir() else []
