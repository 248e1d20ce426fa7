"""The common parts of backends for schedulers. A run is a job, known by the run's uid before it is submitted.

A subclass talks to its scheduler in the abstract methods at the end of ``ClusterBackend``. Everything else is based on
the folders ``$AREAL_HOME/clusters/<name>/runs/<uid>/``, which the job's node program and the shim write on their node,
and on what the scheduler reports about its jobs. Nothing is read from this machine's /proc. While the scheduler does
not answer, every run is UNKNOWN, with the scheduler's error.

The guarantees of ``local`` for a caller that dies hold here, too: the intent is durable before the job is submitted, a
submitted job is found by its name, and a job whose run has no record is a stray.
"""

from __future__ import annotations

import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from areal.errors import ArealError, Conflict, NotFound
from areal.runtime import records
from areal.runtime.backends.base import (
    LIVE,
    MAY_LIVE,
    NODE_HOST,
    Backend,
    Job,
    JobState,
    Phase,
    Problem,
    ProblemKind,
    RunSpec,
    RunState,
    Stage,
    StopReport,
)
from areal.runtime.causes import run_log_paths
from areal.runtime.leases import FIRST_PORT, LAST_PORT
from areal.runtime.observation import observe_job
from areal.runtime.runs import RunStore, record_problems, repair_record

_PORTS = range(FIRST_PORT, LAST_PORT + 1)
_SUBMITTING_S = 60.0  # a younger intent may be about to be submitted
_KNOWN_S = 1.0  # a command asks a scheduler at most once in this time


class ClusterBackend(Backend, ABC):
    """One instance may be used from several threads. ``capacity`` has all GPUs of the cluster as ``queued``."""

    host = NODE_HOST

    def __init__(
        self, home_root: Path, lease_dir: Path | None = None, crash: Callable[[str], None] = lambda point: None
    ) -> None:
        """``lease_dir`` is of local runs: nothing of this machine is leased."""
        self.home = Path(home_root).resolve()
        self.store = RunStore(self.home / "clusters" / self.name / "runs")
        self._crash = crash
        self._lock = threading.Lock()
        self._jobs: tuple[float, Mapping[str, Job] | ArealError] | None = None
        self._changes = 0  # of jobs, by this command
        self._asking = threading.Lock()
        self._claiming = threading.Lock()
        self._claimed: set[int] = set()
        self._taken: frozenset[int] | None = None  # ports of runs that live; until claims are released

    def claim_ports(self, count: int, *, owner: str, prefer: Sequence[int] = ()) -> tuple[int, ...]:
        """Choose ports that no run of this home has. Whether they are free on the node is checked there."""
        with self._claiming:
            if self._taken is None:
                live = [state.spec for state in self.observe().values() if state.phase in MAY_LIVE]
                self._taken = frozenset(port for spec in live for port in (*spec.ports, *spec.shared_ports))
            taken = self._taken | self._claimed
            ports = list(dict.fromkeys(port for port in prefer if port not in taken))[:count]
            others = [port for port in _PORTS if port not in taken and port not in ports]
            if len(others) < count - len(ports):  # more runs than ports: they are spread over many nodes
                others = [port for port in _PORTS if port not in ports]
            ports += random.SystemRandom().sample(others, count - len(ports))
            self._claimed.update(ports)
        return tuple(ports)

    def claim_gpus(self, count: int, *, owner: str) -> tuple[str, ...]:
        """Return placeholder names: the scheduler assigns the GPUs on the node."""
        return tuple(f"gpu-{number}" for number in range(count))

    def release_claims(self) -> None:
        with self._claiming:
            self._claimed = set()
            self._taken = None

    def start(self, spec: RunSpec, *, on_pid: Callable[[int], None] = lambda pid: None) -> RunState:
        folder = self.store.folder(spec.uid)
        spec = self.store.with_config(spec)
        self._crash("intent-before")
        os.close(self.store.create(spec))
        self._crash("intent-after")
        try:
            on_pid(0)
            self._crash("pid-after")
            job = self.submit(spec, folder)
            self._crash("go-after")
        except BaseException:
            self._forget_jobs()
            with suppress(ArealError):  # of a scheduler that does not say whether it has the job: the record stays
                found = self.jobs([spec.uid]).get(spec.uid)
                if found is None or found.state is JobState.ENDED:
                    self.store.remove(spec.uid)
            raise
        self._forget_jobs(spec.uid, job)
        with self._claiming:  # its ports are in its record from here on
            self._claimed.difference_update(spec.ports)
            self._taken = None
        state = self.observe([spec.uid]).get(spec.uid)
        if state is None:
            raise Conflict(f"run {spec.uid} was forgotten by another command while it started")
        return state

    def observe(self, uids: Sequence[str] | None = None) -> dict[str, RunState]:
        wanted = self.store.uids() if uids is None else [uid for uid in uids if os.path.exists(self.store.folder(uid))]
        if not wanted:
            return {}
        jobs = self._known_jobs(wanted)
        found = {}
        for uid in wanted:
            job = Job(JobState.UNKNOWN, reason=jobs.message) if isinstance(jobs, ArealError) else jobs.get(uid)
            if (state := observe_job(self.store, uid, job)) is not None:
                found[uid] = state
        return found

    def _known_jobs(self, uids: Sequence[str]) -> Mapping[str, Job] | ArealError:
        """Return all jobs of this home, or the error why the scheduler does not answer. Threads share one query."""
        with self._asking:
            with self._lock:
                known, changes = self._jobs, self._changes
            now = time.monotonic()
            if known is not None and now - known[0] <= _KNOWN_S:
                return known[1]
            try:
                known = now, self.jobs(uids)
            except ArealError as error:
                known = now, error
            with self._lock:
                if changes == self._changes:  # otherwise the answer may predate a job that another thread has submitted
                    self._jobs = known
            return known[1]

    def _forget_jobs(self, uid: str = "", job: Job | None = None) -> None:
        """Drop the cached jobs after a change. With ``job``, replace that one only: a start of many queries once."""
        with self._lock:
            self._changes += 1
            known = self._jobs
            if job is None or known is None or isinstance(known[1], ArealError):
                self._jobs = None
            else:
                self._jobs = known[0], {**known[1], uid: job}

    def stage(self, uid: str) -> Stage | None:
        return self.store.stage(uid)

    def log_paths(self, uid: str) -> tuple[str, ...]:
        return run_log_paths(self.store.folder(uid))

    def kick(self, uid: str) -> None:
        state = self.observe([uid]).get(uid)
        if state is None or state.phase is Phase.INTENDED:
            raise NotFound(f"run {uid} has no living process to start again")
        if state.phase not in LIVE:
            raise Conflict(f"run {uid} has ended: it cannot be started again", hint="apply starts a new run")
        if state.phase is Phase.BACKOFF:
            self.kick_job(uid, state)

    def stop(self, uid: str, *, grace_s: float | None = None) -> StopReport:
        self._crash("stop-before")
        self._forget_jobs()
        state = self.observe([uid]).get(uid)
        if state is None or state.phase is Phase.INTENDED:
            return StopReport(uid, was_alive=False)
        if state.phase is Phase.UNKNOWN:
            raise Conflict(f"run {uid} cannot be stopped: {state.reason}", hint="try again once the scheduler answers")
        alive, jobs = state.phase in LIVE, self._known_jobs([uid])
        job = jobs.get(uid) if isinstance(jobs, Mapping) else None
        if alive or (job is not None and job.state is not JobState.ENDED):  # one that has exited may be leaving still
            grace_s = state.spec.stop_grace_s if grace_s is None else grace_s
            records.write_json(self.store.folder(uid), records.STOP, {"grace_s": grace_s}, durable=False)
            self._crash("stop-signalled")
            self.end_job(uid, state, grace_s)
        if state.phase in (*LIVE, Phase.DEAD):
            self.store.end(uid, state)
        with self._claiming:
            self._taken = None
        self._forget_jobs()
        self._crash("stop-after")
        return StopReport(uid, alive)

    def forget(self, uid: str, *, unprovable: bool = False) -> None:
        self._crash("forget-before")
        state = self.observe([uid]).get(uid)
        if state is not None:
            if state.phase in LIVE:
                raise Conflict(f"run {uid} is alive ({state.phase})", hint="stop it first")
            if state.phase is Phase.UNKNOWN and not unprovable:
                raise Conflict(f"run {uid} may be alive: {state.reason}", hint="stop it once its scheduler answers")
            self.store.remove(uid)
        self._crash("forget-after")

    def inspect(self) -> tuple[Problem, ...]:
        states = self.observe()
        jobs = self._known_jobs(list(states))
        problems = list(record_problems(self.store, states.values(), _unsubmitted))
        for uid, job in sorted(jobs.items()) if isinstance(jobs, Mapping) else ():
            if uid not in states and job.state in (JobState.QUEUED, JobState.RUNNING):
                where = f" on {job.node}" if job.node else ""
                message = f"job {job.job_id} of run {uid} is {job.state}{where}, and the run has no record"
                problems.append(Problem(ProblemKind.STRAY_PROCESS, uid, message))
        return tuple(problems)

    def repair(self, problem: Problem) -> str:
        if problem.trouble is not ProblemKind.STRAY_PROCESS:
            return repair_record(self, problem)
        job = self.jobs([problem.subject]).get(problem.subject)
        if job is not None:
            spec = RunSpec(problem.subject, "", "", 0, ())
            self.end_job(problem.subject, RunState(spec, Phase.RUNNING, job_id=job.job_id), 0.0)
            self._forget_jobs()
        return f"cancelled the job of run {problem.subject}"

    @abstractmethod
    def submit(self, spec: RunSpec, folder: str) -> Job | None:
        """Submit the job that runs the node program, under the run's uid, unless the scheduler has one of that name.
        Return the job if its answer has it. Raises ArealError with the scheduler's message."""

    @abstractmethod
    def jobs(self, uids: Collection[str]) -> Mapping[str, Job]:
        """Return all jobs of this home that the scheduler knows, by the run's uid: at least those of ``uids``, with one
        query. Raises ArealError if the scheduler does not answer."""

    @abstractmethod
    def kick_job(self, uid: str, state: RunState) -> None:
        """Send SIGUSR1 to the job's shims."""

    @abstractmethod
    def end_job(self, uid: str, state: RunState, grace_s: float) -> None:
        """Send SIGTERM to the job's shims, and kill the job if they take longer than ``grace_s``. A queued job is
        cancelled. Returns once the scheduler reports that the job is gone. Raises TimedOut, ArealError."""


def _unsubmitted(state: RunState) -> str:
    is_old = time.time() - (state.queued_at or 0.0) > _SUBMITTING_S
    return "was planned and not submitted" if is_old else ""
