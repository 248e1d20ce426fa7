"""A run's folder as values: ``RunSpec`` to ``intent.json`` and back, the supervisor of the run, and its state.

The folder appears complete (it is filled under a hidden name and renamed) and disappears in one step: a run
always has its intent. Files: ``areal.runtime.records``.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from areal.dataclasses import asdict, dataclass, fields, replace
from areal.errors import ArealError, Conflict, NotFound, UsageFault
from areal.files import disk_remedy, sync_folder, try_lock
from areal.runtime import procfs, records
from areal.runtime.backends import base
from areal.runtime.identity import ProcessIdentity, same_boot
from areal.wire.stage import FAILING

_UID = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]{0,127}")
_NEW = ".new-"
_FORGOTTEN = ".forgotten-"
_LEFTOVER_AGE_S = 600.0
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""The errors that reading a damaged record raises."""
_SPEC_FIELDS = frozenset(field.name for field in fields(base.RunSpec))
_TUPLES = ("argv", "ports", "shared_ports", "gpus", "on_end")


def check_uid(uid: str) -> str:
    """Return ``uid``, which names a folder. Raises UsageFault if it could leave the folder ``runs/``."""
    if not _UID.fullmatch(uid):
        raise UsageFault(f"{uid!r} is not a run uid (letters, digits, '-', '_' and '.', not starting with a mark)")
    return uid


def spec_to_record(spec: base.RunSpec) -> dict[str, object]:
    """Return all of the spec but the secrets."""
    record = asdict(spec)
    del record["secret_env"]
    return record


def spec_from_record(record: Mapping[str, Any]) -> base.RunSpec:
    """Read a record of any version: unknown keys are ignored, missing ones have defaults. Raises for a damaged one."""
    values = {key: value for key, value in record.items() if key in _SPEC_FIELDS}
    for name in _TUPLES:
        if name in values:
            values[name] = tuple(values[name])
    restart = dict(values["restart"])
    for name in ("success_exit_codes", "final_exit_codes"):
        if name in restart:
            restart[name] = tuple(restart[name])
    values["restart"] = base.RestartPolicy(**restart)
    if values.get("liveness"):
        values["liveness"] = base.HttpProbe(**values["liveness"])
    return base.RunSpec(**values)


@dataclass(frozen=True)
class Intent:
    """``intent.json``: the spec, and the facts known when the run was created. ``folder``: where it was made, as which
    ``inode``; an earlier version recorded no folder. ``unplaced``: the spec before its node was known."""

    spec: base.RunSpec
    folder: str
    inode: int | None = None
    created_at: float | None = None
    gpu_free_bytes: Mapping[str, int] | None = None  # by the UUIDs of its GPUs
    unplaced: base.RunSpec | None = None

    @property
    def submitted(self) -> base.RunSpec:
        return self.unplaced or self.spec

    def write(self, folder: str) -> None:
        """Write it to ``folder``, the copy first. Raises OSError."""
        record = spec_to_record(self.spec)
        record |= {"folder": self.folder, "inode": self.inode, "created_at": self.created_at}
        if self.gpu_free_bytes is not None:
            record["gpu_free_bytes"] = self.gpu_free_bytes
        if self.unplaced is not None:
            record["unplaced"] = spec_to_record(self.unplaced)
        records.write_json(folder, records.INTENT_COPY, record, durable=False)
        records.write_json(folder, records.INTENT, record)


@dataclass(frozen=True)
class ChildRecord:
    """``child.json``: the component, which runs as ``pid``, or is started again at ``next_start_at``."""

    runs: bool
    restarts: int
    last_exit: base.LastExit | None
    pid: int = 0
    start_ticks: int = 0
    started_at: float | None = None
    next_start_at: float = 0.0


@dataclass(frozen=True)
class EndRecord:
    """``exit.json``: the end of the run. ``swept``: pids that outlived the component and were killed."""

    phase: base.Phase
    reason: str
    restarts: int = 0
    last_exit: base.LastExit | None = None
    logged_at: float | None = None
    swept: tuple[int, ...] = ()


def placed(spec: base.RunSpec, address: str) -> base.RunSpec:
    """Return the spec of a run whose node is known: ``NODE_HOST`` is ``address`` in argv, environment, config, URLs."""
    host = f"[{address}]" if ":" in address else address

    def put(value: Any) -> Any:
        if isinstance(value, str):
            return address if value == base.NODE_HOST else value.replace(base.NODE_HOST, host)
        if isinstance(value, Mapping):
            return {name: put(each) for name, each in value.items()}
        return type(value)(map(put, value)) if isinstance(value, list | tuple) else value

    return replace(
        spec,
        argv=put(spec.argv),
        env=put(spec.env),
        config=put(spec.config),
        url=put(spec.url),
        liveness=spec.liveness and replace(spec.liveness, url=put(spec.liveness.url)),
    )


def is_placed(spec: base.RunSpec) -> bool:
    """Return whether its address, if it has one, is known."""
    return spec.url is None or base.NODE_HOST not in spec.url


def read_intent(folder: str) -> Intent | None:
    """Return the intent, from the copy where the first is damaged or gone; None without both. Raises one of DAMAGED."""
    damage: Exception | None = None
    for name in (records.INTENT, records.INTENT_COPY):
        try:
            record = records.read_object(folder, name)
            if record is not None:
                unplaced = spec_from_record(record["unplaced"]) if record.get("unplaced") else None
                facts = {name: record.get(name) for name in ("inode", "created_at", "gpu_free_bytes")}
                return Intent(spec_from_record(record), record.get("folder", folder), unplaced=unplaced, **facts)
        except DAMAGED as error:
            damage = damage or error
    if damage is not None:
        raise damage
    return None


def read_child(folder: str) -> ChildRecord | None:
    """Return what the supervisor recorded of the component. Raises one of DAMAGED."""
    found = records.read_object(folder, records.CHILD)
    if found is None:
        return None
    runs = found["state"] == "running"
    child = ChildRecord(runs, int(found["restarts"]), last_exit_from_record(found["last_exit"]))
    if not runs:
        return replace(child, next_start_at=float(found["next_start_at"]))
    pid, start_ticks = int(found["pid"]), int(found["start_ticks"])
    return replace(child, pid=pid, start_ticks=start_ticks, started_at=float(found["started_at"]))


def read_end(folder: str) -> EndRecord | None:
    """Return how the run ended. Raises one of DAMAGED."""
    found = records.read_object(folder, records.EXIT)
    if found is None:
        return None
    last_exit, swept = last_exit_from_record(found["last_exit"]), tuple(map(int, found.get("swept", ())))
    phase, restarts = base.Phase(found["phase"]), int(found["restarts"])
    return EndRecord(phase, str(found["reason"]), restarts, last_exit, found.get("logged_at"), swept)


def is_copy(folder: str, made_in: str, inode: int | None) -> bool:
    """Return whether a record was made in another folder, which is still there as ``inode``, so that ``folder`` was
    copied from it and not moved. A run's processes are those of the original, never of a copy."""
    if made_in == folder:
        return False
    try:
        original = os.stat(made_in)
        return original.st_ino == inode and not os.path.samestat(original, os.stat(folder))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # it is there, and may not be looked at


COPIED = "and this is a copy: use that home"


def copy_reason(folder: str, original: str) -> str:
    """Return the reason that a copied run is neither seen nor touched, with the next step."""
    return f"its processes belong to {original}, {COPIED}, or remove {folder} to start it here"


def last_exit_from_record(record: Mapping[str, Any] | None) -> base.LastExit | None:
    if not record:
        return None
    return base.LastExit(record["code"], record["signal"], record["at"], record["reason"], record.get("line", ""))


def _remove_tree(folder: str) -> None:
    import shutil  # has all compressions import with it

    shutil.rmtree(folder, ignore_errors=True)


class RunStore:
    """The folder ``runs/`` of one home."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self._cleared_at = -math.inf

    def folder(self, uid: str) -> str:
        return f"{self.root}/{check_uid(uid)}"

    def uids(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.root) if not name.startswith("."))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ArealError(f"cannot read {self.root}: {error.strerror}", hint="choose your own folder with --home")

    def with_config(self, spec: base.RunSpec) -> base.RunSpec:
        """Return the spec whose command gets the file of its configuration. It starts in its working folder, else in
        the run's own, which stays as long as the run."""
        argv = (*spec.argv, "--config", f"{self.folder(spec.uid)}/{records.CONFIG}") if spec.config else spec.argv
        return replace(spec, argv=argv, cwd=spec.cwd or self.folder(spec.uid))

    def create(self, spec: base.RunSpec, gpu_free_bytes: Mapping[str, int] | None = None) -> int:
        """Make the run durable; returns the descriptor that holds its life lock. Leftovers, which may hold secrets, go
        with the next run that is made, but are looked for once in their age: one look reads the names of all runs."""
        if time.monotonic() - self._cleared_at > _LEFTOVER_AGE_S:
            self._cleared_at = time.monotonic()
            for leftover in self.leftovers():
                _remove_tree(leftover)
        folder = self.folder(spec.uid)
        temporary = f"{self.root}/{_NEW}{spec.uid}-{os.getpid()}"
        life = -1
        try:
            life = self._fill(temporary, spec, gpu_free_bytes)
            if os.path.lexists(folder):
                raise Conflict(f"run {spec.uid} exists already", hint="a new process needs a new uid")
            os.rename(temporary, folder)
            sync_folder(self.root)
        except (OSError, Conflict) as error:
            if life >= 0:
                os.close(life)
            _remove_tree(temporary)
            if isinstance(error, Conflict):
                raise
            raise ArealError(
                f"cannot record run {spec.uid} in {folder}: {error.strerror}",
                hint=f"{disk_remedy(error)} or choose another folder with --home",
            )
        return life

    def _fill(self, folder: str, spec: base.RunSpec, gpu_free_bytes: Mapping[str, int] | None) -> int:
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        os.mkdir(folder, 0o700)
        os.mkdir(f"{folder}/{records.LOG_FOLDER}", 0o700)
        if spec.secret_env:
            records.write_json(folder, records.SECRET, dict(spec.secret_env))
        if spec.config:
            records.write_json(folder, records.CONFIG, dict(spec.config))
        path = self.folder(spec.uid)  # where the folder will be moved
        Intent(spec, path, os.stat(folder).st_ino, time.time(), gpu_free_bytes).write(folder)
        life = os.open(f"{folder}/{records.LIFE_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(life, fcntl.LOCK_EX | fcntl.LOCK_NB)  # new, so it is free
        return life

    def place(self, uid: str, address: str) -> base.RunSpec:
        """Record the address of the run's node before its supervisor starts there. Raises OSError, one of DAMAGED."""
        folder = self.folder(uid)
        intent = read_intent(folder)
        if intent is None:
            raise NotFound(f"run {uid} has no record in {self.root}")
        spec = placed(intent.submitted, address)
        if spec.config:
            records.write_json(folder, records.CONFIG, dict(spec.config))
        replace(intent, spec=spec, unplaced=intent.submitted).write(folder)
        return spec

    def started_in(self, uid: str) -> tuple[str, bool]:
        """Return the folder that the run was started in, and whether this one is a copy of it. A folder that was moved
        is not, and its processes still have the former path. This folder where the record is lost."""
        folder = self.folder(uid)
        with contextlib.suppress(*DAMAGED):
            if (intent := read_intent(folder)) is not None:
                return intent.folder, is_copy(folder, intent.folder, intent.inode)
        return folder, False

    def original_of(self, uid: str, supervisor: ProcessIdentity) -> str:
        """Return the run's folder that its living supervisor belongs to; "" if that is this one. A supervisor holds the
        lock of its own folder, wherever that was moved, and never that of a copy. A dying one holds none."""
        started_in, is_copied = self.started_in(uid)
        if is_copied:
            return started_in
        if self.is_held(uid):
            return ""
        with contextlib.suppress(OSError):
            files = (path.rpartition("/") for path in procfs.open_files(supervisor.pid))
            held = next((folder for folder, _, file in files if file == records.LIFE_LOCK), "")
            return "" if not held or os.path.samefile(held, self.folder(uid)) else held
        return ""

    def end(self, uid: str, state: base.RunState) -> None:
        """Record that the run was stopped, where its supervisor has not done it. Raises OSError."""
        folder = self.folder(uid)
        if records.read_object(folder, records.EXIT) is None:
            reason = base.STOPPED_DEAD if state.phase is base.Phase.DEAD else "stopped"
            end = EndRecord(base.Phase.EXITED, reason, state.restarts, state.last_exit, state.logged_at)
            records.write_json(folder, records.EXIT, asdict(end))

    def remove(self, uid: str) -> None:
        """Forget the run in one step. After a death here the next ``create`` removes the files."""
        hidden = f"{self.root}/{_FORGOTTEN}{uid}-{os.getpid()}"
        try:
            os.rename(self.folder(uid), hidden)
        except FileNotFoundError:
            return
        sync_folder(self.root)
        _remove_tree(hidden)

    def is_held(self, uid: str) -> bool:
        """Return whether a shim, or a caller about to start one, holds the run's life lock."""
        try:
            fd = os.open(f"{self.folder(uid)}/{records.LIFE_LOCK}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not try_lock(fd, shared=True)
        finally:
            os.close(fd)

    def is_provably_over(self, uid: str, identity: ProcessIdentity) -> bool:
        """Return whether a run of another pid namespace has ended: on the same kernel, with its life lock free."""
        return same_boot(identity) and not self.is_held(uid)

    def leftovers(self) -> list[str]:
        """Return the hidden folders of a ``create`` or ``remove`` that was killed: older than any that still runs."""
        found = []
        with contextlib.suppress(OSError), os.scandir(self.root) as entries:
            for entry in entries:
                if not entry.name.startswith((_NEW, _FORGOTTEN)):
                    continue
                with contextlib.suppress(FileNotFoundError):  # another command clears it too
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _LEFTOVER_AGE_S:
                        found.append(entry.path)
        return sorted(found)

    def stage(self, uid: str) -> base.Stage | None:
        return read_stage(self.folder(uid))


def read_stage(folder: str) -> base.Stage | None:
    """Return the component's own words, or None; whatever it wrote, reading it never fails."""
    with contextlib.suppress(OSError, ValueError):
        record = records.read_object(folder, records.STAGE) or {}
        done, total = (value if isinstance(value := record.get(name), int) else None for name in ("done", "total"))
        if isinstance(record.get("stage"), str):
            return base.Stage(record["stage"], done, total, str(record.get(FAILING, "")))
    return None


def record_problems(
    store: RunStore, states: Iterable[base.RunState], unstarted: Callable[[base.RunState], str]
) -> Iterator[base.Problem]:
    """Yield the problems that the records of runs show, and the folders that killed commands have left. ``unstarted``
    says why a run that is only intended will not start; "" if it may."""
    for state in states:
        uid, run = state.spec.uid, f"run {state.spec.uid} of {state.spec.owner}"
        if state.phase is base.Phase.DEAD:
            yield base.Problem(base.ProblemKind.DEAD_RECORD, uid, f"{run}: {state.reason}")
        elif state.phase is base.Phase.INTENDED and (why := unstarted(state)):
            yield base.Problem(base.ProblemKind.NEVER_STARTED, uid, f"{run} {why}")
        elif state.damage:
            yield base.Problem(base.ProblemKind.DAMAGED_RECORD, uid, f"{run} lives, and {state.damage}")
        elif state.phase is base.Phase.UNKNOWN:
            yield base.Problem(base.ProblemKind.UNREADABLE, uid, f"run {uid}: {state.reason}", repairable=False)
    for path in store.leftovers():
        yield base.Problem(base.ProblemKind.LEFTOVER, path, f"{path} was left by a command that was killed")


def repair_record(backend: base.RunControl, problem: base.Problem) -> str:
    """Repair a problem that a backend's own operations solve. Return a sentence about it. Raises ArealError."""
    subject = problem.subject
    if not problem.repairable:
        raise ArealError(f"{subject}: {problem.message}: this needs a person")
    if problem.trouble in (base.ProblemKind.ORPHANS, base.ProblemKind.DEAD_RECORD):
        swept = backend.stop(subject).swept_pids
        return f"stopped run {subject}, killed {len(swept)} processes"
    if problem.trouble is base.ProblemKind.NEVER_STARTED:
        backend.forget(subject)
        return f"forgot run {subject}, which had not started"
    _remove_tree(subject)
    return f"removed {subject}"
