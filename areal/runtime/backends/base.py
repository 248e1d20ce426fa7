"""The contract between the reconcilers and the places where processes live.

A *run* is one supervised process of a component. A backend keeps its record, answers questions about it and acts on
it, and decides nothing. Where a record is kept is the backend's own affair: ``local`` keeps a folder ``runs/<uid>/``.

A new backend implements ``Backend`` and registers a factory under its name (``areal.runtime.backends``); the name is
what a manifest says in ``spec.scheduler.type``. All methods are synchronous and thread-safe. They raise
``areal.errors.ArealError`` or a subclass, named below, for whatever a user should read; any other error is a bug.

Invariants every backend keeps (``tests/runtime/test_backend_conformance.py``):

* ``start`` returns only after the run has recorded its own identity; a caller that dies at any instant leaves
  either no process or a process with a record.
* ``stop`` is idempotent, and returns only when no process of the run's session is left.
* ``observe`` has no effects, never raises for a single unreadable run, and never reports dead on a guess:
  what cannot be seen is ``UNKNOWN``.
* A run that waits for a node is ``QUEUED``, with the scheduler's own words. Until it is placed its spec names its node
  ``NODE_HOST``; from then on ``RunState.spec`` has the node's address in that place (``areal.runtime.runs.placed``).
* Ports and GPUs that were claimed are held by the calling process until ``start`` hands them to a run, or
  ``release_claims`` gives them back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

from areal.dataclasses import dataclass, field
from areal.numbers import quantity_bytes

LOOPBACK = "127.0.0.1"
NODE_HOST = "node.areal.invalid"
"""The host of a run whose node is not known yet, in argv, env, config and URLs (RFC 6761: never resolved)."""

# The environment of a component of a remote backend: the address of the first of the run's nodes, which of the
# ``RunSpec.nodes`` this one is (from 0). ``NODE_ADDRESS`` is read by the program that starts it there.
FIRST_NODE_VARIABLE = "AREAL_FIRST_NODE"
NODE_RANK_VARIABLE = "AREAL_NODE_RANK"
NODE_ADDRESS_VARIABLE = "AREAL_NODE_ADDRESS"


class Phase(StrEnum):
    """The phase of a run, as proved by its record and /proc, or as reported by a scheduler."""

    INTENDED = "intended"  # intent on disk, no identity: nothing runs, or has not begun to
    QUEUED = "queued"  # submitted to a scheduler that has not placed it yet
    STARTING = "starting"  # the shim lives, the child has not been seen to answer (readiness is the caller's)
    RUNNING = "running"  # the shim and its child live
    BACKOFF = "backoff"  # the child exited; the shim waits before starting it again
    CRASHLOOP = "crashloop"  # the restart budget is spent; the shim has given up and released everything
    EXITED = "exited"  # the run ended: stopped, finished, or its policy forbids a restart
    DEAD = "dead"  # the shim is gone without an exit record
    UNKNOWN = "unknown"  # another machine, another pid namespace, an unreadable record


LIVE = frozenset({Phase.QUEUED, Phase.STARTING, Phase.RUNNING, Phase.BACKOFF})
MAY_LIVE = LIVE | {Phase.UNKNOWN}
ENDED = frozenset({Phase.EXITED, Phase.DEAD, Phase.CRASHLOOP})


@dataclass(frozen=True)
class RestartPolicy:
    """Restarts of the component by its shim. Times in seconds."""

    policy: str = "Always"  # Always | OnFailure | Never
    initial_backoff_s: float = 10.0
    factor: float = 2.0
    max_backoff_s: float = 300.0
    jitter: float = 0.25
    budget_count: int = 6
    budget_window_s: float = 1800.0
    reset_after_s: float = 600.0
    success_exit_codes: tuple[int, ...] = (0,)
    final_exit_codes: tuple[int, ...] = ()  # a failure that another start would only repeat


@dataclass(frozen=True)
class HttpProbe:
    """GET ``url`` answers 200. Times in seconds."""

    url: str
    period_s: float = 10.0
    timeout_s: float = 2.0
    failure_threshold: int = 3


@dataclass(frozen=True)
class RunSpec:
    """All that is needed to start one process, and to decide later whether it is still the right one.

    ``spec`` is the sparse slice of the owner's spec that this run was started for and ``inputs`` what it was given
    about other runs (URLs, ports): keep or recreate is decided by comparing these, never by a hash.
    ``config`` is written as JSON to a file of the run, which the command gets as its last words, ``--config FILE``.
    ``secret_env`` values are written to a 0600 file that only the shim reads, never to argv or ``intent.json``.
    """

    uid: str
    owner: str  # "Model/qwen"
    component: str  # router | gateway | engine | data-proxy
    replica: int  # 0-based; 0 for singletons
    argv: tuple[str, ...]
    backend: str = "local"  # the name of the backend that starts it
    scheduler: Mapping[str, object] = field(default_factory=dict)  # ``spec.scheduler`` of the owner or host
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)  # of a service process; empty: it takes none
    cwd: str | None = None  # of a user's program; None: it is ours, and depends on nothing of its caller
    ports: tuple[int, ...] = ()  # leased by this run
    shared_ports: tuple[int, ...] = ()  # leased together with other runs of the same owner (SO_REUSEPORT)
    gpus: tuple[str, ...] = ()  # GPU UUIDs leased by this run; of a cluster, as many names as it wants on each node
    url: str | None = None  # where the component answers /health, http://host:port
    nodes: int = 1  # the component runs on each of as many, with a supervisor of its own; any one's end is the run's
    generation: int = 0
    spec: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    liveness: HttpProbe | None = None
    stop_grace_s: float = 10.0
    events: str | None = None  # the file of the owner's events, to which the supervisor and the component add
    on_end: tuple[str, ...] = ()  # a command, started once the component has ended for good by itself
    log_max_bytes: int = 100 << 20  # of one file; the shim rotates
    log_files: int = 5


def reserved(component: str, spec: Mapping[str, Any]) -> tuple[float, float]:
    """Return the CPU cores and bytes of memory that a run for the owner's ``spec`` reserves on each of its nodes; 0
    where the manifest does not say. A manifest states the needs of a computing process; others are small."""
    if component not in ("engine", "driver"):
        return 0, 0
    resources = spec.get("resources") or {}
    processes = resources.get("processesPerNode") or 1
    return processes * (resources.get("cpus") or 0), processes * quantity_bytes(resources.get("memory") or "0")


STOPPED_DEAD = "stopped after its supervisor had died"  # the reason of such a run, whose end is unknown


@dataclass(frozen=True)
class LastExit:
    code: int | None  # exit status, None when a signal ended it
    signal: int | None
    at: float  # seconds since the epoch
    reason: str = ""  # "exited 1", "killed by SIGKILL", "liveness probe failed", "stopped"
    line: str = ""  # of the log, that names the error


class Cause(StrEnum):
    """The scheduler's part in the end, or the wait, of a run."""

    NONE = ""
    NODE_LOST = "node-lost"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time-limit"
    REQUEUED = "requeued"
    CANCELLED = "cancelled"  # by another program than areal


@dataclass(frozen=True)
class RunState:
    """The state of one run at one moment. ``spec`` is the intent as it was written, with the address of its node."""

    spec: RunSpec
    phase: Phase
    pid: int | None = None  # the component, not the shim
    shim_pid: int | None = None  # its supervisor, the leader of the session of the run's processes
    started_at: float | None = None  # of the present child, or a dead supervisor's last; seconds since the epoch
    restarts: int = 0
    last_exit: LastExit | None = None
    reason: str = ""  # why UNKNOWN or DEAD or CRASHLOOP, or held by its scheduler, in words
    halted: bool = False  # the component lives, stopped by a signal (SIGSTOP), a debugger or its scheduler
    node: str = ""  # the machine that the pids are of; "" is this one
    job_id: str = ""  # the scheduler's own name of it: a Slurm job, a Ray job
    gpus: tuple[str, ...] = ()  # as its node sees them; of this machine: ``spec.gpus``
    cause: Cause = Cause.NONE
    queued_at: float | None = None  # since when it waits, or waited last, for its node; seconds since the epoch
    logged_at: float | None = None  # of a run whose supervisor died: when its log was last written
    damage: str = ""  # why a record of a run that lives has to be written again
    failing: str = ""  # why the work of a component without a readiness probe fails, as it reports

    @property
    def death(self) -> str:
        """Why the run ended, in words. Where its supervisor died, ``last_exit`` is that of an earlier start."""
        if self.last_exit is None or (self.phase is Phase.DEAD and self.reason):
            return self.reason
        return self.last_exit.reason


class JobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"  # the scheduler does not answer


@dataclass(frozen=True)
class Job:
    """The scheduler's information about the job of a run. ``reason``: its text. ``ended_at``, ``queued_at`` in seconds
    since the epoch, None if unknown. ``requeues``: how often it went back into the queue; earlier records of its nodes
    belong to earlier starts. ``suspended``: it has nodes, and its processes are held."""

    state: JobState
    job_id: str = ""
    node: str = ""
    gpus: tuple[str, ...] = ()
    reason: str = ""
    cause: Cause = Cause.NONE
    queued_at: float | None = None
    ended_at: float | None = None
    requeues: int = 0
    suspended: bool = False


@dataclass(frozen=True)
class StopReport:
    uid: str
    was_alive: bool
    swept_pids: tuple[int, ...] = ()  # session members that outlived the component and were killed
    note: str = ""  # for the user, such as GPU memory that was not freed


@dataclass(frozen=True)
class Capacity:
    """Capacity that a plan may count on. ``gpus`` are free UUIDs, ``leased`` those that runs hold; ``squatters`` maps a
    busy UUID to who holds it. ``queued``: by the name of a backend whose runs wait for GPUs, all of its cluster."""

    gpus: tuple[str, ...] = ()
    leased: tuple[str, ...] = ()
    squatters: Mapping[str, str] = field(default_factory=dict)
    queued: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """Startup progress that a component reports: ``loading weights``, 3 of 7. ``failing``: why its work fails."""

    stage: str
    done: int | None = None
    total: int | None = None
    failing: str = ""


class ProblemKind(StrEnum):
    """Kinds of disagreement between records, processes and leases."""

    STRAY_PROCESS = "stray-process"  # a process of a run that has no record
    ORPHANS = "orphaned-processes"  # the supervisor is dead, parts of the component live
    DEAD_RECORD = "dead-record"  # the supervisor died without a word
    NEVER_STARTED = "never-started"  # an intent whose caller died before the "go"
    UNREADABLE = "unreadable-record"
    DAMAGED_RECORD = "damaged-record"  # of a supervisor that lives; it can be written again
    LEASE_WITHOUT_RUN = "lease-without-run"  # held on behalf of a run of this home that does not live
    LEFTOVER = "leftover-folder"  # of a start or forget that was killed


@dataclass(frozen=True)
class Problem:
    """One disagreement that ``inspect`` found. ``repair`` refuses those that are not ``repairable``."""

    trouble: ProblemKind
    subject: str  # run uid, lease name or folder
    message: str
    pids: tuple[int, ...] = ()
    repairable: bool = True
    backend: str = "local"  # the name of the backend that found it, and repairs it


class RunControl(Protocol):
    """Operations on existing runs, by uid: of one backend, or of all backends of a home."""

    def observe(self, uids: Sequence[str] | None = None) -> dict[str, RunState]:
        """Return the state of every run of this home, or of those named, by uid; a uid without a record is left out.

        Read-only and cheap: called every 0.2 s by ``areal wait``, and by every ``areal get``. ``RunState.spec`` is the
        spec as it was started, without its secrets. A run whose record cannot be read is ``UNKNOWN`` with a reason.
        Raises ArealError only if no run can be observed.
        """

    def stage(self, uid: str) -> Stage | None:
        """Startup progress that the component has reported since its last start; None when it has reported none or the
        run does not exist. Never raises for a damaged report."""

    def log_paths(self, uid: str) -> tuple[str, ...]:
        """Readable files with the run's output, oldest first, the one being written last; () without a record.

        ``areal logs --follow`` polls them: a rotation renames files and begins a new last one. Each start of the
        component is introduced by a line ``[areal] <time> started pid <pid>``."""

    def kick(self, uid: str) -> None:
        """End a back-off at once: start the component again now, with a fresh budget. No effect while it runs.
        Raises NotFound when nothing of the run lives, Conflict when it has ended for good."""

    def stop(self, uid: str, *, grace_s: float | None = None) -> StopReport:
        """End the run: SIGTERM to the component, SIGKILL to whatever is left after ``grace_s`` seconds (None: the
        spec's ``stop_grace_s``), leases released. Returns when none of its processes is left. Idempotent: an ended or
        unknown run gives a report with ``was_alive=False``. Raises Conflict when the run cannot be reached from here,
        TimedOut when it is being started by another command and does not come to an end."""

    def forget(self, uid: str, *, unprovable: bool = False) -> None:
        """Delete the record and the logs of an ended run; without a record there is nothing to do. Raises Conflict if
        it lives or may live. ``unprovable``: delete also a run that cannot be observed, whose machine is gone, as a
        person confirms."""

    def inspect(self) -> tuple[Problem, ...]:
        """Return every disagreement between records, processes and leases. Read-only."""

    def repair(self, problem: Problem) -> str:
        """Repair a problem as far as it is proved. Return a sentence about the repair. Raises ArealError."""


class Backend(RunControl, Protocol):
    """A place that runs processes. ``name`` is what ``spec.scheduler.type`` says. ``host`` is where its components
    listen and are called, ``NODE_HOST`` where each has the address of a node that is found later."""

    name: str
    host: str

    def capacity(self) -> Capacity:
        """Free GPUs, and who holds the busy ones that no run of areal holds. May take a second."""

    def require_possible(
        self, scheduler: Mapping[str, object], *, gpus: int, nodes: int, cpus: float = 0, memory_bytes: float = 0
    ) -> None:
        """Check, before anything starts, that the cluster can ever place a run of ``nodes`` nodes with ``gpus`` GPUs,
        ``cpus`` cores and ``memory_bytes`` each (0: the cluster's default) under these settings (``spec.scheduler``).
        Raises NoCapacity if it is too small, InvalidManifest for a setting that the cluster does not know, ArealError
        if the cluster does not answer."""

    def claim_ports(self, count: int, *, owner: str, prefer: Sequence[int] = ()) -> tuple[int, ...]:
        """Choose ``count`` distinct free TCP ports (``prefer`` first: ports stay sticky) for the object ``owner``
        (``Model/qwen``). ``start`` leases them; until then this process holds them. Raises NoCapacity."""

    def claim_gpus(self, count: int, *, owner: str) -> tuple[str, ...]:
        """Claim free GPUs, by UUID, as ``claim_ports`` does ports: parallel starts never choose the same one."""

    def release_claims(self) -> None:
        """Give back all claimed ports and GPUs that were not started."""

    def start(self, spec: RunSpec, *, on_pid: Callable[[int], None] = lambda pid: None) -> RunState:
        """Record the intent, lease ports and GPUs, start the supervisor and then the component.

        ``on_pid`` is called once with the supervisor's pid, when that exists and nothing of the component runs: the
        caller journals it, and an exception of it starts nothing and leaves no record. A backend that submits to a
        scheduler calls it with 0, before it submits. The returned state is ``QUEUED``, ``STARTING`` or ``RUNNING``
        (placement and readiness are the caller's affair), or the end of a component that failed at once.
        Raises Conflict when the uid is in use, NoCapacity when a lease is held (naming its holder), ArealError."""
