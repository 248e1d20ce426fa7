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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal.dataclasses import asdict, fields, replace
from areal.errors import ArealError, Conflict, NotFound, UsageFault
from areal.files import sync_folder, try_lock
from areal.runtime import procfs, records
from areal.runtime.backends.base import (
    NODE_HOST,
    STOPPED_DEAD,
    Cause,
    HttpProbe,
    Job,
    JobState,
    LastExit,
    Phase,
    RestartPolicy,
    RunSpec,
    RunState,
    Stage,
)
from areal.runtime.identity import Liveness, ProcessIdentity, identify, liveness, same_boot, where
from areal.wire.stage import FAILING

_UID = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]{0,127}")
_NEW = ".new-"
_FORGOTTEN = ".forgotten-"
_LEFTOVER_AGE_S = 600.0
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""The errors that reading a damaged record raises."""
_SPEC_FIELDS = frozenset(field.name for field in fields(RunSpec))
_TUPLES = ("argv", "ports", "shared_ports", "gpus", "on_end")


def check_uid(uid: str) -> str:
    """``uid``, which names a folder. Raises UsageFault where it could leave the folder ``runs/``."""
    if not _UID.fullmatch(uid):
        raise UsageFault(f"{uid!r} is not a run uid (letters, digits, '-', '_' and '.', not starting with a mark)")
    return uid


def spec_to_record(spec: RunSpec) -> dict[str, Any]:
    """All of the spec but the secrets."""
    record = asdict(spec)
    del record["secret_env"]
    return record


def spec_from_record(record: Mapping[str, Any]) -> RunSpec:
    """Unknown keys are ignored and missing ones take their defaults: another version of areal may have written it.
    Raises KeyError, TypeError or ValueError on a damaged record."""
    values = {key: value for key, value in record.items() if key in _SPEC_FIELDS}
    for name in _TUPLES:
        if name in values:
            values[name] = tuple(values[name])
    restart = dict(values["restart"])
    for name in ("success_exit_codes", "final_exit_codes"):
        if name in restart:
            restart[name] = tuple(restart[name])
    values["restart"] = RestartPolicy(**restart)
    if values.get("liveness"):
        values["liveness"] = HttpProbe(**values["liveness"])
    return RunSpec(**values)


def placed(spec: RunSpec, address: str) -> RunSpec:
    """The spec of a run whose node has been found: ``NODE_HOST`` is ``address`` in its argv, environment, configuration
    and URLs."""
    host = f"[{address}]" if ":" in address else address

    def put(value: Any) -> Any:
        if isinstance(value, str):
            return address if value == NODE_HOST else value.replace(NODE_HOST, host)
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


def is_placed(spec: RunSpec) -> bool:
    """Whether its address, where it has one, can be called."""
    return spec.url is None or NODE_HOST not in spec.url


def read_intent(folder: str) -> tuple[dict[str, Any], RunSpec] | None:
    """The record and its spec; from the copy where the first is damaged or gone; None when there is neither. Raises
    what reading a damaged one raises, where no copy is whole."""
    damage: Exception | None = None
    for name in (records.INTENT, records.INTENT_COPY):
        try:
            record = records.read_object(folder, name)
            if record is not None:
                return record, spec_from_record(record)
        except DAMAGED as error:
            damage = damage or error
    if damage is not None:
        raise damage
    return None


def folder_identity(path: str, folder: str) -> dict[str, Any]:
    """The entries of a record that ``is_copy`` reads. ``folder`` is at ``path``, or will be moved there."""
    return {"folder": path, "inode": os.stat(folder).st_ino}


def is_copy(folder: str, record: Mapping[str, Any]) -> bool:
    """Whether the record was made in another folder that is still there, so that ``folder`` was copied from it and not
    moved. A run's processes are those of the original, never of a copy. An earlier version recorded no folder."""
    path = record.get("folder", folder)
    if path == folder:
        return False
    try:
        original = os.stat(path)
        return original.st_ino == record.get("inode") and not os.path.samestat(original, os.stat(folder))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # it is there, and may not be looked at


def copy_reason(folder: str, original: str) -> str:
    """The reason that a copied run is neither seen nor touched, with the next step."""
    return f"its processes belong to {original}, and this is a copy: use that home, or remove {folder} to start it here"


def last_exit_from_record(record: Mapping[str, Any] | None) -> LastExit | None:
    if not record:
        return None
    return LastExit(record["code"], record["signal"], record["at"], record["reason"], record.get("line", ""))


def record_end(
    folder: str,
    reason: str,
    restarts: int,
    last_exit: Mapping[str, Any] | None,
    *,
    logged_at: float | None = None,
    swept: Sequence[int] = (),
) -> None:
    """Write the exit record of a run whose supervisor has written none. Raises OSError."""
    record = {"phase": Phase.EXITED, "reason": reason, "restarts": restarts, "last_exit": last_exit}
    records.write_json(folder, records.EXIT, {**record, "logged_at": logged_at, "swept": list(swept)})


def _locked_folder(supervisor_pid: int) -> str:
    """The run's folder whose lock the supervisor holds, where it is now; "" where that cannot be seen."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{supervisor_pid}/fd"):
            with contextlib.suppress(OSError):
                folder, _, file = os.readlink(f"/proc/{supervisor_pid}/fd/{name}").rpartition("/")
                if file == records.LIFE_LOCK:
                    return folder
    return ""


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

    def with_config(self, spec: RunSpec) -> RunSpec:
        """The spec whose command gets the file of its configuration. It starts in its working folder, else in the run's
        own, which stays as long as the run."""
        argv = (*spec.argv, "--config", f"{self.folder(spec.uid)}/{records.CONFIG}") if spec.config else spec.argv
        return replace(spec, argv=argv, cwd=spec.cwd or self.folder(spec.uid))

    def create(self, spec: RunSpec, **facts: object) -> int:
        """Make the run durable; returns the descriptor that holds its life lock. ``facts`` of the moment join the
        intent and are no part of the spec. Leftovers, which may hold secrets, go with the next run that is made, but
        are looked for once in their age: one look reads the names of all runs."""
        if time.monotonic() - self._cleared_at > _LEFTOVER_AGE_S:
            self._cleared_at = time.monotonic()
            for leftover in self.leftovers():
                _remove_tree(leftover)
        folder = self.folder(spec.uid)
        temporary = f"{self.root}/{_NEW}{spec.uid}-{os.getpid()}"
        life = -1
        try:
            life = self._fill(temporary, spec, facts)
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
                hint="free space or choose another folder with --home",
            )
        return life

    def _fill(self, folder: str, spec: RunSpec, facts: Mapping[str, object]) -> int:
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        os.mkdir(folder, 0o700)
        os.mkdir(f"{folder}/{records.LOG_FOLDER}", 0o700)
        if spec.secret_env:
            records.write_json(folder, records.SECRET, dict(spec.secret_env))
        if spec.config:
            records.write_json(folder, records.CONFIG, dict(spec.config))
        facts = {**facts, **folder_identity(self.folder(spec.uid), folder), "created_at": time.time()}
        intent = {**spec_to_record(spec), **facts}
        records.write_json(folder, records.INTENT_COPY, intent, durable=False)
        records.write_json(folder, records.INTENT, intent)
        life = os.open(f"{folder}/{records.LIFE_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(life, fcntl.LOCK_EX | fcntl.LOCK_NB)  # new, so it is free
        return life

    def place(self, uid: str, address: str) -> RunSpec:
        """Record the address of the run's node, before its supervisor starts there; again where it is placed anew.
        Raises what reading and writing its intent raise."""
        folder = self.folder(uid)
        found = read_intent(folder)
        if found is None:
            raise NotFound(f"run {uid} has no record in {self.root}")
        intent = found[0]
        unplaced = spec_from_record(intent.get("unplaced") or intent)
        spec = placed(unplaced, address)
        intent = {**intent, **spec_to_record(spec), "unplaced": spec_to_record(unplaced)}
        if spec.config:
            records.write_json(folder, records.CONFIG, dict(spec.config))
        records.write_json(folder, records.INTENT_COPY, intent, durable=False)
        records.write_json(folder, records.INTENT, intent)
        return spec

    def started_in(self, uid: str) -> tuple[str, bool]:
        """The folder that the run was started in, and whether this one is a copy of it. A folder that was moved is not,
        and its processes still have the former path. This folder where the record is lost."""
        folder = self.folder(uid)
        with contextlib.suppress(*DAMAGED):
            if (found := read_intent(folder)) is not None:
                return found[0].get("folder", folder), is_copy(folder, found[0])
        return folder, False

    def original_of(self, uid: str, supervisor: ProcessIdentity) -> str:
        """The run's folder that its living supervisor belongs to; "" where that is the one here. A supervisor holds the
        lock of its own folder, wherever that was moved, and never that of a copy. One that exits holds none."""
        started_in, is_copied = self.started_in(uid)
        if is_copied:
            return started_in
        if self.is_held(uid):
            return ""
        with contextlib.suppress(OSError):
            held = _locked_folder(supervisor.pid)
            return "" if not held or os.path.samefile(held, self.folder(uid)) else held
        return ""

    def end(self, uid: str, state: RunState) -> None:
        """Record that the run was stopped, where its supervisor has not done it. Raises OSError."""
        folder = self.folder(uid)
        if records.read_object(folder, records.EXIT) is None:
            reason = STOPPED_DEAD if state.phase is Phase.DEAD else "stopped"
            last = asdict(state.last_exit) if state.last_exit else None
            record_end(folder, reason, state.restarts, last, logged_at=state.logged_at)

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
        """Whether a shim, or a caller about to start one, holds the run's life lock."""
        try:
            fd = os.open(f"{self.folder(uid)}/{records.LIFE_LOCK}", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not try_lock(fd, shared=True)
        finally:
            os.close(fd)

    def is_provably_over(self, uid: str, identity: ProcessIdentity) -> bool:
        """Whether a run of another pid namespace has ended: on the same kernel, with its life lock free."""
        return same_boot(identity) and not self.is_held(uid)

    def leftovers(self) -> list[str]:
        """Hidden folders of a ``create`` or ``remove`` that was killed: older than any that still runs."""
        found = []
        with contextlib.suppress(OSError), os.scandir(self.root) as entries:
            for entry in entries:
                if not entry.name.startswith((_NEW, _FORGOTTEN)):
                    continue
                with contextlib.suppress(FileNotFoundError):  # another command clears it too
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _LEFTOVER_AGE_S:
                        found.append(entry.path)
        return sorted(found)

    def stage(self, uid: str) -> Stage | None:
        """The component's own words, or None; whatever it wrote, reading it never fails."""
        record = _stage_record(self.folder(uid))
        if record is None or not isinstance(record.get("stage"), str):
            return None
        done, total = record.get("done"), record.get("total")
        return Stage(
            record["stage"], done if isinstance(done, int) else None, total if isinstance(total, int) else None
        )


def _stage_record(folder: str) -> dict[str, Any] | None:
    try:
        return records.read_object(folder, records.STAGE)
    except (OSError, ValueError):
        return None


# Observation, never raising, DEAD only on proof. The shim writes ``exit.json`` before it dies, so its life is
# checked first and the exit record after: a run found dead without one truly has none.

_HALTED = "Tt"  # by a signal (SIGSTOP), or by a debugger
_SETTLE_TRIES = 60  # a quarter of a second: a supervisor on a loaded machine may have to wait for its turn
_SETTLE_STEP_S = 0.004


def observe_run(store: RunStore, uid: str) -> RunState | None:
    """The run's state; None when there is no such run."""
    folder = f"{store.root}/{uid}"
    try:
        intent = read_intent(folder)
    except DAMAGED as error:
        return _unreadable(uid, f"{records.INTENT} cannot be read: {_brief(error)}")
    if intent is None:
        return _unreadable(uid, f"{records.INTENT} is missing") if uid in store.uids() else None
    _, spec = intent
    try:
        identity, lost = supervisor_of(store, uid)
        ended = records.read_object(folder, records.EXIT)
        if identity is None and ended is not None:
            return _ended(spec, None, ended)
        if identity is None and lost:
            return RunState(
                spec, Phase.UNKNOWN, reason=f"{folder}/{records.ID} is lost, and its supervisor is not here"
            )
        if identity is None:
            return RunState(spec, Phase.INTENDED)
        state = liveness(identity)
        if ended is not None:
            return _ended(spec, identity, ended)
        if state is Liveness.ALIVE and (original := store.original_of(uid, identity)):
            reason = copy_reason(folder, original)
            return RunState(spec, Phase.UNKNOWN, shim_pid=identity.pid, reason=reason)
        if state is Liveness.ALIVE:
            damage = f"{folder}/{records.ID} is lost" if lost else _config_damage(folder, intent[0])
            return replace(_living(folder, spec, identity), damage=damage)
        if state is Liveness.UNKNOWN and not store.is_provably_over(spec.uid, identity):
            return RunState(spec, Phase.UNKNOWN, shim_pid=identity.pid, reason=where(identity))
        return _dead(folder, spec, identity)
    except DAMAGED as error:
        return RunState(spec, Phase.UNKNOWN, reason=f"a record in {folder} cannot be read: {_brief(error)}")


def _brief(error: Exception) -> str:
    """The error without the bytes of the file."""
    return "it is not UTF-8" if isinstance(error, UnicodeError) else repr(error)


def read_identity(folder: str) -> ProcessIdentity | None:
    """The shim's; raises ValueError, KeyError or TypeError on a damaged record."""
    record = records.read_object(folder, records.ID)
    return None if record is None else ProcessIdentity.from_record(record)


def repair_run(store: RunStore, uid: str) -> None:
    """Write the lost identity of a living supervisor, and its component's configuration, again. Raises OSError."""
    folder = store.folder(uid)
    identity, lost = supervisor_of(store, uid)
    if identity is not None and lost:
        records.write_json(folder, records.ID, procfs.identity_fields(identity.pid))
    found = read_intent(folder)
    if found is not None and _config_damage(folder, found[0]):
        records.write_json(folder, records.CONFIG, found[0]["config"])


def _config_damage(folder: str, intent: Mapping[str, Any]) -> str:
    """Why the component's next start could not read its configuration; "" if it can. The component itself may have
    written other values: settings that were changed while it ran."""
    try:
        found = records.read_object(folder, records.CONFIG)
    except DAMAGED:
        found = None
    is_whole = found is not None and found.keys() >= intent["config"].keys() if intent.get("config") else True
    return "" if is_whole else f"{folder}/{records.CONFIG} is not what it was started with"


def supervisor_of(store: RunStore, uid: str) -> tuple[ProcessIdentity | None, bool]:
    """The shim's identity, and whether its record is lost: it is then read from the living process."""
    folder = store.folder(uid)
    try:
        identity = read_identity(folder)
        if identity is not None or not store.is_held(uid) or not os.path.exists(f"{folder}/{records.CHILD}"):
            return identity, False  # it did not start, or has yet to
    except DAMAGED:
        pass
    return find_shim(folder), True


def find_shim(run_dir: str) -> ProcessIdentity | None:
    """The living supervisor of a run folder, found without its record: the session leader started with the folder.

    Shims never rename themselves, and only a shim leads a session with that folder in its first environment.
    """
    for stat in procfs.processes():
        if stat.session == stat.pid and procfs.environment(stat.pid).get(procfs.RUN_DIR_VARIABLE) == run_dir:
            with contextlib.suppress(ProcessLookupError):
                return identify(stat.pid)
    return None


def _ended(spec: RunSpec, identity: ProcessIdentity | None, record: Mapping[str, Any]) -> RunState:
    return RunState(
        spec,
        Phase(record["phase"]),
        shim_pid=identity.pid if identity is not None else None,
        restarts=int(record["restarts"]),
        last_exit=last_exit_from_record(record["last_exit"]),
        reason=str(record["reason"]),
        logged_at=record.get("logged_at"),
    )


def _dead(folder: str, spec: RunSpec, identity: ProcessIdentity) -> RunState:
    reason = "its supervisor died without a word" if same_boot(identity) else "the machine was restarted"
    restarts, last_exit, started_at = 0, None, None
    try:
        child = records.read_object(folder, records.CHILD)
        if child:
            restarts, last_exit = int(child["restarts"]), last_exit_from_record(child["last_exit"])
            started_at = child.get("started_at")
    except DAMAGED:
        pass  # written without fsync: after a power cut it may be empty, and the verdict does not need it
    logged_at = records.logged_at(folder)
    return RunState(spec, Phase.DEAD, None, identity.pid, started_at, restarts, last_exit, reason, logged_at=logged_at)


def _living(folder: str, spec: RunSpec, identity: ProcessIdentity) -> RunState:
    """The shim lives. A component that has just died is given a moment to be noticed by it."""
    child = records.read_object(folder, records.CHILD)
    for _ in range(_SETTLE_TRIES):
        if child is None or child["state"] != "running" or _living_child(child) is not None:
            break
        time.sleep(_SETTLE_STEP_S)
        if ended := records.read_object(folder, records.EXIT):
            return _ended(spec, identity, ended)
        child = records.read_object(folder, records.CHILD)
    if child is None:
        return RunState(spec, Phase.STARTING, shim_pid=identity.pid)
    stat = _living_child(child) if child["state"] == "running" else None
    runs, halted = stat is not None, stat is not None and stat.state in _HALTED
    return _of_child(folder, spec, identity, child, runs=runs, halted=halted)


def _of_child(
    folder: str, spec: RunSpec, identity: ProcessIdentity, child: Mapping[str, Any], *, runs: bool, halted: bool
) -> RunState:
    """The state of a run whose supervisor lives and has started the component."""
    restarts, last_exit = int(child["restarts"]), last_exit_from_record(child["last_exit"])
    if runs:
        pid, started_at = int(child["pid"]), float(child["started_at"])
        failing = "" if spec.url else str((_stage_record(folder) or {}).get(FAILING, ""))
        return RunState(
            spec, Phase.RUNNING, pid, identity.pid, started_at, restarts, last_exit, halted=halted, failing=failing
        )
    reason = _backoff_reason(child, last_exit)
    return RunState(spec, Phase.BACKOFF, None, identity.pid, None, restarts, last_exit, reason)


def _living_child(child: Mapping[str, Any]) -> procfs.Stat | None:
    """The stat of the recorded child; None when the child is gone."""
    stat = procfs.read_stat(int(child["pid"]))
    return stat if stat is not None and stat.alive and stat.start_ticks == int(child["start_ticks"]) else None


def _backoff_reason(child: Mapping[str, Any], last_exit: LastExit | None) -> str:
    if child["state"] == "running":
        return "the component has died and its supervisor has not noticed yet"
    wait_s = max(0.0, float(child["next_start_at"]) - time.time())
    return f"{last_exit.reason if last_exit else 'not started'}; next start in {wait_s:.0f} s"


def observe_job(store: RunStore, uid: str, job: Job | None) -> RunState | None:
    """The state of a run of another machine: its records, and the scheduler's word in place of /proc. ``job`` None: the
    scheduler does not know it. None when there is no such run."""
    folder = f"{store.root}/{uid}"
    try:
        intent = read_intent(folder)
        if intent is None:
            return _unreadable(uid, f"{records.INTENT} is missing") if uid in store.uids() else None
        # The order of the reads is that of a local run: life first (the scheduler was asked before), the end after.
        record, spec = intent
        identity = read_identity(folder)
        child = records.read_object(folder, records.CHILD) or {}
        ended = records.read_object(folder, records.EXIT)
        if job is not None and job.requeues and _requeues_seen(folder) != job.requeues:
            identity, child, ended = None, {}, None
        if ended is None and is_copy(folder, record):
            return RunState(spec, Phase.UNKNOWN, reason=copy_reason(folder, record["folder"]))
        since = record.get("created_at")
        if job is None and identity is None and ended is None:
            return RunState(spec, Phase.INTENDED, queued_at=since)
        job = job or Job(JobState.ENDED)
        asked = job.cause and records.read_object(folder, records.STOP)  # by us: no accident
        state, cause = _of_job(folder, spec, identity, child, ended, job), Cause.NONE if asked else job.cause
        if cause and job.reason and state.reason == "stopped":  # its supervisor knew no more
            last = state.last_exit or LastExit(None, None, job.ended_at or time.time())
            state = replace(state, last_exit=replace(last, reason=job.reason))
        return replace(
            state,
            node=job.node,
            job_id=job.job_id,
            gpus=job.gpus,
            cause=cause,
            queued_at=job.queued_at or since,
        )
    except DAMAGED as error:
        return _unreadable(uid, f"a record cannot be read: {error!r}")


def _requeues_seen(folder: str) -> int:
    """How often the job had been requeued when its node program last started."""
    return int((records.read_object(folder, records.NODE) or {}).get("requeues", 0))


def _of_job(
    folder: str,
    spec: RunSpec,
    identity: ProcessIdentity | None,
    child: Mapping[str, Any],
    ended: Mapping[str, Any] | None,
    job: Job,
) -> RunState:
    if ended is not None and job.state is not JobState.QUEUED:
        return _ended(spec, identity, ended)
    if job.state is JobState.QUEUED:
        return RunState(spec, Phase.QUEUED, reason=job.reason)
    shim_pid = identity.pid if identity is not None else None
    restarts, last_exit = int(child.get("restarts", 0)), last_exit_from_record(child.get("last_exit"))
    if job.state is not JobState.RUNNING:
        phase = Phase.UNKNOWN if job.state is JobState.UNKNOWN else Phase.DEAD
        reason = job.reason or "its job is gone without a word of its supervisor"
        if phase is Phase.DEAD and job.ended_at is not None:
            last_exit = LastExit(None, None, job.ended_at, reason)
        return RunState(spec, phase, shim_pid=shim_pid, restarts=restarts, last_exit=last_exit, reason=reason)
    if identity is None or not child:
        return RunState(spec, Phase.STARTING, shim_pid=shim_pid)
    state = _of_child(folder, spec, identity, child, runs=child["state"] == "running", halted=job.suspended)
    return replace(state, reason=job.reason) if job.suspended else state


def _unreadable(uid: str, reason: str) -> RunState:
    spec = RunSpec(uid=uid, owner="", component="", replica=0, argv=())
    return RunState(spec, Phase.UNKNOWN, reason=reason)
