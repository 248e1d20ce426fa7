"""The contract between the reconcilers and the places where processes live.

A *run* is one supervised process: a shim and the component it starts. Its whole record is the folder
``runs/<uid>/``; a backend answers questions about it and acts on it, and decides nothing.

Invariants every backend keeps (``tests/runtime/test_backend_conformance.py``):

* ``start`` returns only after the run has recorded its own identity; a caller that dies at any instant leaves
  either no process or a process with a record.
* ``stop`` is idempotent, and returns only when no process of the run's session is left.
* ``observe`` has no effects, never raises for a single unreadable run, and never reports dead on a guess:
  what cannot be seen is ``UNKNOWN``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class Phase(StrEnum):
    """Where a run is, as proved by its record and /proc."""

    INTENDED = "intended"  # intent on disk, no identity: nothing runs, or has not begun to
    STARTING = "starting"  # the shim lives, the child has not been seen to answer (readiness is the caller's)
    RUNNING = "running"  # the shim and its child live
    BACKOFF = "backoff"  # the child exited; the shim waits before starting it again
    CRASHLOOP = "crashloop"  # the restart budget is spent; the shim has given up and released everything
    EXITED = "exited"  # the run ended: stopped, finished, or its policy forbids a restart
    DEAD = "dead"  # the shim is gone without an exit record
    UNKNOWN = "unknown"  # another machine, another pid namespace, an unreadable record


@dataclass(frozen=True)
class RestartPolicy:
    """When and how the shim starts its child again. Times in seconds."""

    policy: str = "Always"  # Always | OnFailure | Never
    initial_backoff_s: float = 10.0
    factor: float = 2.0
    max_backoff_s: float = 300.0
    jitter: float = 0.25
    budget_count: int = 5
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

    ``spec`` is the sparse slice of the owner's spec that this run was started for and ``inputs`` what it was told
    about other runs (URLs, ports): keep or recreate is decided by comparing these, never by a hash.
    ``secret_env`` values are written to a 0600 file that only the shim reads, never to argv or ``intent.json``.
    """

    uid: str
    owner: str  # "Model/qwen"
    component: str  # router | gateway | engine | data-proxy
    replica: int  # 0-based; 0 for singletons
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    ports: tuple[int, ...] = ()  # leased by this run
    shared_ports: tuple[int, ...] = ()  # leased together with other runs of the same owner (SO_REUSEPORT)
    gpus: tuple[str, ...] = ()  # GPU UUIDs leased by this run
    url: str | None = None  # where the component answers /health, http://host:port
    generation: int = 0
    spec: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    liveness: HttpProbe | None = None
    stop_grace_s: float = 10.0
    on_end: tuple[str, ...] = ()  # a command, started once the component has ended for good without being told to
    log_max_bytes: int = 100 << 20  # of one file; the shim rotates
    log_files: int = 5


@dataclass(frozen=True)
class LastExit:
    code: int | None  # exit status, None when a signal ended it
    signal: int | None
    at: float  # seconds since the epoch
    reason: str = ""  # "exited 1", "killed by SIGKILL", "liveness probe failed", "stopped"


@dataclass(frozen=True)
class RunState:
    """What is known about one run at one moment. ``spec`` is the intent as it was written."""

    spec: RunSpec
    phase: Phase
    pid: int | None = None  # the component, not the shim
    shim_pid: int | None = None
    started_at: float | None = None  # of the present child, seconds since the epoch
    restarts: int = 0
    last_exit: LastExit | None = None
    reason: str = ""  # why UNKNOWN or DEAD or CRASHLOOP, in words
    halted: bool = False  # the component lives, stopped by a signal (SIGSTOP) or a debugger


@dataclass(frozen=True)
class StopReport:
    uid: str
    was_alive: bool
    swept_pids: tuple[int, ...] = ()  # session members that outlived the component and were killed
    note: str = ""  # what the caller should know, such as GPU memory that did not come back


@dataclass(frozen=True)
class Capacity:
    """What a plan may count on. ``gpus`` are free UUIDs; ``squatters`` maps a busy UUID to who holds it."""

    gpus: tuple[str, ...] = ()
    squatters: Mapping[str, str] = field(default_factory=dict)


class Backend(Protocol):
    """Where processes live. ``local`` now; Ray and Slurm implement the same methods."""

    name: str

    def capacity(self) -> Capacity: ...

    def claim_ports(self, count: int, *, owner: str, prefer: Sequence[int] = ()) -> tuple[int, ...]:
        """Choose ``count`` free ports (``prefer`` first, so that ports stay sticky). ``start`` leases them;
        between the two the choice is held by this process. Raises NoCapacity."""
        ...

    def claim_gpus(self, count: int, *, owner: str, prefer: Sequence[str] = ()) -> tuple[str, ...]:
        """As ``claim_ports`` for free GPUs, by UUID: two starts in parallel never choose the same one."""
        ...

    def start(self, spec: RunSpec, *, on_pid: Callable[[int], None] = lambda pid: None) -> RunState:
        """Write the intent, lease ports and GPUs, start the shim through the gate; ``on_pid`` is called (and may
        journal) between the fork and the "go". Raises NoCapacity (a lease is held: by whom is said), ArealError."""
        ...

    def observe(self, uids: Sequence[str] | None = None) -> dict[str, RunState]:
        """All runs of this home, or those named. Read-only."""
        ...

    def kick(self, uid: str) -> None:
        """End a back-off at once: start the child again now, with a fresh budget."""
        ...

    def stop(self, uid: str, *, grace_s: float | None = None) -> StopReport:
        """SIGTERM, wait ``grace_s`` (the spec's when None), sweep the session, release leases. Idempotent."""
        ...

    def forget(self, uid: str) -> None:
        """Delete the record of an ended run. Raises Conflict when it lives."""
        ...

    def log_paths(self, uid: str) -> tuple[str, ...]:
        """Log files of the run, oldest first, the one being written last."""
        ...
