"""The parts of an effect: its context, and the inputs of a process: a slot, a run spec, secrets.

The admin key of a service is a file. If the spec takes a key from the environment, the command that starts a process,
and that has the variable, writes it to the service's 0600 file under ``credentials/``. Later commands, and the shim
that restarts a process, need only the file.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from areal import interrupt
from areal.dataclasses import dataclass, field
from areal.errors import ArealError, FieldName, InvalidManifest, TargetFailed, TimedOut, UsageFault, Wording
from areal.reconcilers.context import Context, Deadline, Progress
from areal.reconcilers.observe import KEYS, Observed, ObservedRun, queued_for
from areal.resources.addresses import base_url, is_loopback, key_fault
from areal.resources.kinds import parse_ref
from areal.resources.tree import FieldPath
from areal.runtime.backends import LOCAL
from areal.runtime.backends.base import (
    ENDED,
    LIVE,
    LOOPBACK,
    NODE_HOST,
    HttpProbe,
    Phase,
    RestartPolicy,
    RunSpec,
    RunState,
)
from areal.runtime.runs import is_placed
from areal.state.events import EventLog
from areal.state.files import explain, quarantine, write_atomic
from areal.state.home import Home, admin_key_path, ensure_admin_key, read_key
from areal.state.records import StoredObject

if TYPE_CHECKING:
    from areal.client.gateway import ServiceClient
    from areal.reconcilers.desired import Target
    from areal.reconcilers.plan import Op
    from areal.resources.fields import LivenessProbe
    from areal.runtime.backends import Backends
    from areal.state.journal import Transaction
    from areal.state.objects import ObjectStore

ADMIN_TIMEOUT_S = 10.0
PLACEMENT_POLL_S = 0.2
SUBMITTED_S = 10.0  # until a scheduler lists what it has accepted


@dataclass(frozen=True)
class Slot:
    """A place for a run, claimed before anything starts: its uid, its port and its address."""

    uid: str
    ref: str
    component: str
    replica: int
    port: int
    host: str = LOOPBACK  # where it listens; NODE_HOST: at the address of its node
    called: str = ""  # the host for callers, if it differs from ``host``
    shared: bool = False  # the port is shared with the predecessor
    backend: str = LOCAL  # spec.scheduler.type of the object
    scheduler: Mapping[str, object] = field(default_factory=dict, hash=False)  # all of spec.scheduler

    @property
    def url(self) -> str:
        return base_url(self.called or self.host, self.port)


class Interrupted(ArealError):
    """The user interrupted an op: it is neither done nor failed, and the same command continues it."""

    exit_code = interrupt.STATUS

    def __init__(self, op: Op[Any]) -> None:
        super().__init__(f"{op.ref} {op.target}: interrupted", hint="the same command again goes on from here")


@dataclass
class EffectContext:
    """The execution of one plan. ``slots`` maps the plan's symbols to claimed slots. Used from several threads."""

    ctx: Context
    backend: Backends
    store: ObjectStore
    targets: Mapping[str, Target]
    observed: Observed
    slots: Mapping[str, Slot]
    tx: Transaction
    deadline: Deadline
    spawned: dict[str, str] = field(default_factory=dict)  # symbol -> uid, once it has been started
    lock: threading.Lock = field(default_factory=threading.Lock)
    notes: list[str] = field(default_factory=list)  # sentences for the command's output
    began: float = field(default_factory=time.monotonic)

    def uid(self, run: str) -> str:
        return self.slots[run].uid if run in self.slots else run

    def url(self, op: Op[Any], run: str) -> str:
        """Return the run's address, after waiting while the run is queued. Raises TargetFailed, TimedOut,
        Interrupted."""
        if run in self.slots:
            found = self.slots[run].url
        else:
            seen = (each for runs in self.observed.runs.values() for each in runs if each.uid == run)
            found = next((each.state.spec.url or "" for each in seen), NODE_HOST)
        if NODE_HOST in found:
            found = self.placed(op, run).spec.url or ""
        if not found:
            raise ArealError(f"run {run} has no known address", hint="areal doctor")
        return found

    def placed(self, op: Op[Any], run: str) -> RunState:
        """Return the run's state once its scheduler has placed it or it has ended. Raises TimedOut, Interrupted."""
        submitted_by = time.monotonic() + SUBMITTED_S
        while True:
            state = self.state(run)
            unknown_yet = state.phase is Phase.INTENDED and time.monotonic() < submitted_by
            is_over = state.phase in ENDED or state.phase is Phase.INTENDED
            if state.phase is not Phase.QUEUED and (is_placed(state.spec) or is_over) and not unknown_yet:
                break
            on = f" on node {state.node}" if state.node else ""
            waits = queued_for(state) if state.phase is Phase.QUEUED else f"{state.phase}{on}"
            who = f"{state.spec.component}/{state.spec.replica}"
            waited_s = time.time() - state.queued_at if state.queued_at else None
            self.report(op, waits if who == op.target else f"waits for {who}, {waits}", elapsed_s=waited_s)
            self.require_time(op, f"{state.spec.owner} {who} is {waits}")
            self.pause(op, PLACEMENT_POLL_S)
        if not is_placed(state.spec):
            message = f"{op.ref} {op.target}: run {state.spec.uid} {state.phase}: {state.reason}"
            raise TargetFailed(message, hint=f"areal logs {op.ref.lower()}")
        return state

    def service_url(self, op: Op[Any], service: str) -> str:
        """Return the address of a service's gateway: the declared one on this machine, otherwise that of its process.
        Raises UsageFault if a process on a cluster would get a loopback address of this machine."""
        spec = self.spec_of(service)
        if spec.scheduler.type == LOCAL:
            url, slot = base_url(spec.gateway.host, spec.gateway.port), self.slots[op.run]
            if self.backend.named(slot.backend).host == NODE_HOST and is_loopback(urlsplit(url).hostname or ""):
                raise UsageFault(
                    f"{op.ref} runs by {slot.backend}, and {service} listens on {spec.gateway.host} of this machine",
                    hint=f"give {service} the same scheduler, or a spec.gateway.host that the nodes reach",
                )
            return url
        return self.url(op, self.run_of(service, "gateway"))

    def run_of(self, service: str, component: str) -> str:
        """Return the component's run that this plan starts, or else a live one. Raises TargetFailed."""
        runs = [run for run, slot in self.slots.items() if (slot.ref, slot.component) == (service, component)]
        runs += [run.uid for run in self.observed.of(service, component) if run.is_live]
        if not runs and not self.observed.of(service):  # no part of this plan
            found = [ObservedRun(state) for state in self.backend.observe().values() if state.spec.owner == service]
            runs = [run.uid for run in found if run.is_live and run.state.spec.component == component]
        if not runs:
            raise TargetFailed(f"{service} has no running {component}", hint=f"areal describe {service.lower()}")
        return runs[0]

    def object(self, ref: str) -> StoredObject:
        """Return the plan's target object, or else the recorded one."""
        found = self.targets[ref].object if ref in self.targets else self.store.get(parse_ref(ref))
        if found is None:
            raise ArealError(f"{ref} is not recorded", hint="areal get")
        return found

    def spec_of(self, ref: str) -> Any:
        """Return the object's spec with defaults, an instance of its kind's model."""
        from areal.resources.validation import effective

        return effective(parse_ref(ref).kind, self.object(ref).spec)

    def state(self, run: str) -> RunState:
        uid = self.uid(run)
        found = self.backend.observe([uid]).get(uid)
        if found is None:
            raise TargetFailed(f"run {uid} has no record", hint="areal doctor")
        return found

    def key_file(self, service: str) -> str:
        """Return the service's key file, after writing it if needed. Raises ArealError instead of making a new key if
        processes that this plan does not replace still have the earlier one."""
        found = self.object(service)
        path = key_path(self.ctx.home, found)
        with self.lock:
            if not _declared(found) and (why := _lost(path)):
                states = [state for state in self.backend.observe().values() if state.phase in LIVE]
                owners = {state.spec.owner for state in states if str(path) in state.spec.inputs.get(KEYS, {})}
                if kept := owners - {slot.ref for slot in self.slots.values()}:
                    raise ArealError(
                        f"{service}: the key file is lost ({why}), but {', '.join(sorted(kept))} still use the key",
                        hint="restore the file, or replace the key and these processes: areal reconcile --yes",
                    )
                if path.exists():
                    quarantine(path)
            return str(ensure_key(self.ctx.home, found))

    def admin(self, service: str, url: str, timeout_s: float = ADMIN_TIMEOUT_S) -> ServiceClient:
        from areal.client.gateway import ServiceClient

        return ServiceClient(url, read_key(Path(self.key_file(service))), timeout_s=timeout_s)

    def report(
        self,
        op: Op[Any],
        stage: str,
        done: int | None = None,
        total: int | None = None,
        *,
        elapsed_s: float | None = None,
    ) -> None:
        """Report the op's progress. ``elapsed_s`` None: since the plan began."""
        key = f"{op.ref} {op.target}".strip()
        elapsed_s = time.monotonic() - self.began if elapsed_s is None else elapsed_s
        self.ctx.progress(Progress(key, stage, done, total, elapsed_s))

    def event(self, ref: str, kind: str, reason: str, message: str) -> None:
        EventLog(self.ctx.home).record(parse_ref(ref), kind, reason, message, actor=self.ctx.actor)

    @property
    def left_s(self) -> float:
        return max(0.1, self.deadline.at - time.monotonic())

    def pause(self, op: Op[Any], seconds: float) -> None:
        """Sleep. Raises Interrupted."""
        if self.ctx.interrupted.wait(seconds):
            raise Interrupted(op)

    def require_time(self, op: Op[Any], message: str) -> None:
        if time.monotonic() > self.deadline.at:
            hint = f"areal logs {op.ref.lower()}; the same command again, with a longer --timeout, goes on"
            raise TimedOut(message, hint=hint)


# For processes that lease no GPUs: CUDA would otherwise take the machine's first one. A spec's env overrides it.
NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


def run_spec(
    found: StoredObject,
    slot: Slot,
    argv: Sequence[str],
    restart: RestartPolicy,
    grace_s: float,
    *,
    inputs: Mapping[str, object] | None = None,
    gpus: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    secret_env: Mapping[str, str] | None = None,
    liveness: LivenessProbe | None = None,
    config: Mapping[str, object] | None = None,
    cwd: str | None = None,
) -> RunSpec:
    """Return the run of a process that answers at its slot's address. ``inputs``: values from its neighbors.
    ``config``: its configuration (``areal.wire.processes``), besides its argv."""
    from areal.resources.fields import LivenessProbe

    probe = liveness or LivenessProbe()
    return RunSpec(
        uid=slot.uid,
        owner=slot.ref,
        component=slot.component,
        replica=slot.replica,
        argv=tuple(argv),
        backend=slot.backend,
        scheduler=slot.scheduler,
        env={"PYTHONUNBUFFERED": "1", **(env or {})},
        secret_env=dict(secret_env or {}),
        cwd=cwd,
        ports=() if slot.shared else (slot.port,),
        shared_ports=(slot.port,) if slot.shared else (),
        gpus=gpus,
        url=slot.url,
        generation=found.generation,
        spec=found.spec,
        inputs=dict(inputs or {}),
        config=dict(config or {}),
        restart=restart,
        liveness=HttpProbe(f"{slot.url}/health", probe.period_seconds, probe.timeout_seconds, probe.failure_threshold),
        stop_grace_s=min(grace_s, 10.0),
    )


def restart_policy(restart: Any, **budget: Any) -> RestartPolicy:
    """Return the policy of a spec's restart. ``budget``, if given, replaces the spec's budget."""
    backoff = restart.backoff
    if not budget:
        budget = {"budget_count": restart.budget.count, "budget_window_s": restart.budget.window_seconds}
    return RestartPolicy(
        restart.policy, backoff.initial_seconds, backoff.factor, backoff.max_seconds, backoff.jitter, **budget
    )


def source_file(stored: StoredObject) -> str | None:
    """Return the manifest's file, or None."""
    return next((file for layer in stored.layers if layer.source and (file := layer.source.get("file"))), None)


def secret_of(key_from: Any, stored: StoredObject) -> str:
    """Resolve ``{env|file}`` when a process is started. The value is passed in a 0600 file, never by argv or state."""
    for _, message, hint in secret_fault((), {"env": key_from.env, "file": key_from.file}):
        raise ArealError(f"{stored.ref}: {message}", hint=hint)
    return str(os.environ[key_from.env] if key_from.env else Path(key_from.file).expanduser().read_text().strip())


Fault = tuple[FieldPath, str, str | None]
"""A field of a spec, the message, the hint."""


def secret_faults(env_from: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the faults of secrets in a sparse spec's ``envFrom`` that cannot be read."""
    for name, source in env_from.items():
        yield from secret_fault(("envFrom", name), source)


def secret_fault(path: FieldPath, source: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the fault of a secret that cannot be read. ``source``: ``{env: NAME}`` or ``{file: PATH}``, at ``path``."""
    variable, secret = source.get("env"), source.get("file")
    if variable and not os.environ.get(variable):
        message, hint = f"environment variable {variable} is not set", f"export {variable}=... and apply again"
        yield (*path, "env"), message, hint
    file = Path(secret or os.devnull).expanduser()
    if file.is_fifo() or file.is_char_device():  # what is read here would be gone
        return
    try:
        if not file.read_text(errors="replace").strip():
            yield (*path, "file"), f"the secret's file {secret} is empty", "write it, and apply again"
    except OSError as error:
        message = f"the secret's file {secret} cannot be read: {error.strerror}"
        yield (*path, "file"), message, "write it, readable by you alone, and apply again"


def key_path(home: Home, service: StoredObject) -> Path:
    """Return the file that holds the service's admin key. It need not exist yet."""
    declared = _declared(service).get("file")
    return Path(str(declared)).expanduser() if declared else admin_key_path(home, service.name, service.kind)


def _lost(path: Path) -> str:
    """Return why the file has no key; "" if it has one, or must not be read."""
    try:
        read_key(path)
    except ArealError as error:
        return "" if isinstance(error.__cause__, PermissionError) else error.message
    return ""


def require_usable_key(home: Home, service: StoredObject) -> None:
    """Check a declared key before any process is started. Read-only.

    Raises InvalidManifest if it is missing, malformed, or too short for an address that other machines reach.
    """
    declared = _declared(service)
    if not declared:
        return  # generated
    host = str((service.spec.get("gateway") or {}).get("host") or LOOPBACK)
    secret = _from_environment(declared).encode() or _from_file(home, service)
    if fault := key_fault(secret, host):
        raise InvalidManifest(
            Wording(f"{service.ref}: the key of ", _key_source(declared), f" cannot be used: {fault}"),
            hint="write a long random key (openssl rand -hex 32), or drop adminKeyFrom to have one generated",
        )


def ensure_key(home: Home, service: StoredObject) -> Path:
    """Return the service's key file, after writing it if needed. Raises InvalidManifest if the declared source has no
    key."""
    declared, path = _declared(service), key_path(home, service)
    if not declared:
        return ensure_admin_key(home, service.name, service.kind)
    value = _from_environment(declared)
    if not value:
        _from_file(home, service)
    elif not path.exists() or path.read_text().strip() != value:
        write_atomic(path, value + "\n")
    return path


def _declared(service: StoredObject) -> dict[str, object]:
    found = (service.spec.get("auth") or {}).get("adminKeyFrom")
    return {name: value for name, value in found.items() if value} if isinstance(found, dict) else {}


def _from_environment(declared: Mapping[str, object]) -> str:
    return os.environ.get(str(declared["env"]), "").strip() if declared.get("env") else ""


def _from_file(home: Home, service: StoredObject) -> bytes:
    """Return the content of the declared key file. Raises InvalidManifest if there is none."""
    declared, path = _declared(service), key_path(home, service)
    try:
        return path.read_bytes().strip()
    except FileNotFoundError as error:
        absent = "does not exist" if declared.get("file") else "is not set here"
        hint = "write the key there" if declared.get("file") else f"export {declared['env']}=... and run it again"
        message = Wording(f"{service.ref}: ", _key_source(declared), f" {absent}")
        raise InvalidManifest(message, hint=f"{hint}, or drop adminKeyFrom to have one generated") from error
    except OSError as error:
        raise explain(error, path, "read the key in") from error


def _key_source(declared: Mapping[str, object]) -> Wording:
    source, value = next(iter(declared.items()))
    return Wording(FieldName(f"spec.auth.adminKeyFrom.{source}"), f" {value}")
