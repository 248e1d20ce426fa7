"""Runs as Slurm jobs: each run is one job, whose name is the run's uid and whose comment names the home.

``$AREAL_HOME`` has to be a folder that every node sees under the same path: records, configuration, secrets and logs go
by it (the node program says so where it is not). What Slurm says decides whether a run lives; the records say what its
component does. Everything is asked through Slurm's own commands, so SLURM_CONF, munge and the user's rights hold.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from areal.errors import ArealError, InvalidManifest, NoCapacity, TimedOut
from areal.files import size_of
from areal.runtime import records
from areal.runtime.backends import base, slurm_job
from areal.runtime.backends.cluster import ClusterBackend
from areal.runtime.causes import run_log_paths
from areal.runtime.environment import inherited
from areal.runtime.logs import tail
from areal.runtime.procfs import RUN_DIR_VARIABLE, RUN_UID_VARIABLE
from areal.runtime.shim import PARENT_VARIABLE

if TYPE_CHECKING:
    from areal.resources.scheduling import Slurm

_ANSWER_S = 60.0  # of one command; Slurm's own patience with a controller that is away is about ten seconds
_GONE_S = 60.0  # for Slurm to clear a job away whose processes were killed
_MARGIN_S = 10.0
_AGAIN_S = 3.0  # SIGTERM is sent again: a job that has just begun misses the first
_POLL_S = (0.05, 1.0)
_UNREACHABLE = (
    *("Unable to contact slurm controller", "Could not establish a configuration source", "Socket timed out"),
    *("Zero Bytes", "Protocol authentication error"),
)
_AT_THE_MOMENT = "Requested node configuration is not available"  # also of nodes that are down or drained for now
_NOT_PASSED = (
    *("AREAL_CRASH_AT", base.FIRST_NODE_VARIABLE, base.NODE_ADDRESS_VARIABLE, base.NODE_RANK_VARIABLE),
    *(RUN_UID_VARIABLE, RUN_DIR_VARIABLE, PARENT_VARIABLE, "CUDA_VISIBLE_DEVICES"),
    # A user's defaults for these commands would hide jobs, send no signal, or submit more than one job.
    *("SQUEUE_", "SCANCEL_", "SINFO_", "SACCT_", "SBATCH_ARRAY_INX", "SBATCH_CLUSTERS", "SBATCH_WAIT"),
)
"""Prefixes of variables of the caller that Slurm's commands do not get. Of a caller that is in a job itself, they get
nothing of that job, since srun would take it for its own."""
_OF_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")


class SlurmBackend(ClusterBackend):
    """See ``base.Backend``."""

    name = "slurm"

    def capacity(self) -> base.Capacity:
        gres = dict(line.split("|", 1) for line in _run_command("sinfo", "-h", "-N", "-o", "%N|%G").splitlines())
        return base.Capacity(queued={self.name: sum(map(slurm_job.gpus_of_gres, gres.values()))})

    def require_possible(
        self, scheduler: Mapping[str, object], *, gpus: int, nodes: int, cpus: float = 0, memory_bytes: float = 0
    ) -> None:
        options = _options(scheduler)
        wanted = slurm_job.resource_options(gpus=gpus, nodes=nodes, cpus=cpus, memory_bytes=memory_bytes)
        asked = [*wanted, *slurm_job.placement_options(options)]
        done = _run("sbatch", "--test-only", *asked, "--wrap=true")
        if done.returncode == 0:
            return
        words = slurm_job.error_words(done.stderr)
        _require_answer(words)
        if _AT_THE_MOMENT not in words:
            raise InvalidManifest(f"Slurm refuses spec.scheduler.slurm: {words}", hint="sinfo; sacctmgr show assoc")
        where, able = _nodes_of(options)
        if sum(node.gpus >= gpus and node.cpus >= cpus and node.memory_bytes >= memory_bytes for node in able) < nodes:
            amount = f"{nodes} node{'s' if nodes > 1 else ''} with {_amounts(gpus, cpus, memory_bytes)}"
            most = _NodeSize(*map(max, zip(*able, strict=True))) if able else _NodeSize(0, 0, 0)
            has = _amounts(most.gpus, cpus and most.cpus, memory_bytes and most.memory_bytes)
            raise NoCapacity(
                f"{amount} asked for, {where} has {len(able)} nodes with at most {has}: {words}",
                hint="sinfo -o '%P %D %G %c %m'",
            )

    def submit(self, spec: base.RunSpec, folder: str) -> base.Job:
        options, home = _options(spec.scheduler), str(self.home)
        script = slurm_job.batch_script(spec, options, folder, home, sys.executable)
        done = _run("sbatch", *slurm_job.submit_options(spec, options, folder, home), script=script)
        if done.returncode != 0:
            words = slurm_job.error_words(done.stderr)
            _require_answer(words)
            raise NoCapacity(f"Slurm refuses run {spec.uid} of {spec.owner}: {words}", hint="sinfo; squeue")
        job_id = (done.stdout.split() or [""])[-1].partition(";")[0]
        if not job_id.isdigit():  # such as --help
            raise NoCapacity(f"sbatch took no job for run {spec.uid} of {spec.owner}: {done.stdout.strip()[:200]}")
        self._crash("ack-after")
        state, _, reason = _run("squeue", "-h", "-j", job_id, "-o", "%T|%r").stdout.strip().partition("|")
        if reason in slurm_job.IMPOSSIBLE and state in ("PENDING", "FAILED"):
            _run("scancel", job_id)
            raise NoCapacity(f"Slurm would never start run {spec.uid} of {spec.owner}: {reason}", hint="sinfo; squeue")
        found = slurm_job.SlurmJob(job_id, spec.uid, state or "PENDING", reason=reason, submitted_at=time.time())
        return found.job()

    def jobs(self, uids: Collection[str]) -> Mapping[str, base.Job]:
        try:
            listed = slurm_job.parse_squeue(_run_command("squeue", "--json", "--me", "--states=all"))
        except ValueError as error:  # squeue says the rest of it only in plain words
            words = slurm_job.error_words(_run("squeue", "-h", "-o", "%i", "--me").stderr) or str(error)
            raise _silent(words) from None
        known = slurm_job.newest(listed, str(self.home))
        for uid in set(uids) - known.keys():
            started_in, is_copy = self.store.started_in(uid)
            former = Path(started_in).parents[3]  # where this home was when it submitted the job
            if former != self.home and not is_copy and (job := slurm_job.newest(listed, str(former)).get(uid)):
                known[uid] = job
        found = {uid: job.job(self._failure_text(uid) if job.is_over else "") for uid, job in known.items()}
        forgotten = {job_id: uid for uid in uids if uid not in found and (job_id := self._job_of_node(uid))}
        if forgotten:
            # One that accounting has as running, and slurmctld does not know, has ended without a word.
            over = [job for job in _accounted(forgotten) if job.job_id in forgotten and job.is_over]
            found |= {forgotten[job.job_id]: job.job() for job in over}
        return found

    def _job_of_node(self, uid: str) -> str:
        """Return the job of a run that had begun and has recorded no end; empty for others."""
        folder = self.store.folder(uid)
        try:
            if records.read_object(folder, records.EXIT) is None:
                return str((records.read_object(folder, records.NODE) or {}).get("job_id", ""))
        except (OSError, ValueError):
            pass
        return ""

    def _failure_text(self, uid: str) -> str:
        """Return the last log line of a job that failed. Slurm opens the log before it runs anything: without a log,
        the node could not write it."""
        if os.path.exists(self._job_log(uid)) or self._job_of_node(uid):
            return slurm_job.last_words(tail([self._job_log(uid)], 8))
        return f"its node could not write to {self.home}: $AREAL_HOME has to be a folder that every node sees"

    def _job_log(self, uid: str) -> str:
        return f"{self.store.folder(uid)}/{records.LOG_FOLDER}/{slurm_job.JOB_LOG}"

    def log_paths(self, uid: str) -> tuple[str, ...]:
        """Return the log of Slurm and of set-up commands, the logs of further nodes, then the component's log."""
        folder = Path(self.store.folder(uid))
        log = [self._job_log(uid)] if size_of(self._job_log(uid)) else []
        parts = [path for part in sorted(folder.glob(f"{uid}-node-*")) for path in run_log_paths(str(part))]
        return (*log, *parts, *run_log_paths(str(folder)))

    def kick_job(self, uid: str, state: base.RunState) -> None:
        _signal("USR1", state)

    def end_job(self, uid: str, state: base.RunState, grace_s: float) -> None:
        job_id, is_gone = state.job_id, partial(_is_gone, state.job_id)
        deadline = time.monotonic() + grace_s + _MARGIN_S
        while job_id and time.monotonic() < deadline:
            if _state_of(job_id) in slurm_job.NOT_RUNNING:  # scancel --signal would wait for a minute
                _run("scancel", job_id)
            else:
                _signal("TERM", state)
            if self._wait(is_gone, min(_AGAIN_S, deadline - time.monotonic())):
                return
        _run("scancel", "--signal=KILL", "--full", job_id)
        _run("scancel", job_id)
        if not self._wait(is_gone, _GONE_S):
            raise TimedOut(
                f"Slurm job {job_id} of run {uid} does not end: {_state_of(job_id)}",
                hint=f"scontrol show job {job_id}: a node that does not answer keeps it until it is down",
            )

    def _wait(self, condition: Callable[[], bool], patience_s: float) -> bool:
        """Wait for a condition, checking at growing intervals. Return whether it was met within ``patience_s``."""
        pause_s, most_s = _POLL_S
        deadline = time.monotonic() + patience_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(most_s, 1.5 * pause_s)
        return True


def _options(scheduler: Mapping[str, object]) -> Slurm:
    from areal.resources.scheduling import Slurm

    return Slurm.model_validate(scheduler.get("slurm") or {})


class _NodeSize(NamedTuple):
    """Configured sizes of a node, whatever its present state."""

    gpus: int
    cpus: int
    memory_bytes: int


def _nodes_of(options: Slurm) -> tuple[str, list[_NodeSize]]:
    """Return the partitions that a job may use, in words, and their nodes."""
    named = options.partition or os.environ.get("SBATCH_PARTITION", "")
    where = f"partition {named}" if named else "the default partition"
    if any(word.startswith(("-p", "--p")) for word in options.extra_args):
        where = "the cluster"
    found = {}
    for line in _run_command("sinfo", "-h", "-N", "-o", "%N|%P|%G|%c|%m").splitlines():
        name, partition, gres, cpus, memory = line.split("|")
        if where == "the cluster" or (partition.rstrip("*") in named.split(",") if named else "*" in partition):
            found[name] = _NodeSize(slurm_job.gpus_of_gres(gres), int(cpus.rstrip("+")), int(memory.rstrip("+")) << 20)
    return where, list(found.values())


def _amounts(gpus: int, cpus: float, memory_bytes: float) -> str:
    found = [f"{gpus} GPUs", *([f"{cpus:g} CPUs"] if cpus else [])]
    return ", ".join([*found, *([f"{memory_bytes / 2**20:.0f} MiB"] if memory_bytes else [])])


def _accounted(job_ids: Collection[str]) -> list[slurm_job.SlurmJob]:
    """Return jobs that slurmctld has forgotten, from accounting, else its log of completed jobs; [] without either."""
    wanted = ("--parsable2", "--noheader", "--format=JobID,State,End,NodeList,ExitCode", f"--jobs={','.join(job_ids)}")
    done = _run("sacct", "--allocations", *wanted)
    if done.returncode != 0:
        done = _run("sacct", "--completion", *wanted[:2], "--format=JobID,State,End,NodeList")
        return slurm_job.parse_sacct("\n".join(f"{line}|" for line in done.stdout.splitlines()))
    return slurm_job.parse_sacct(done.stdout)


def _signal(name: str, state: base.RunState) -> None:
    """Send a signal to the node programs: the batch script's own process, or every task of the step."""
    batch = () if slurm_job.in_steps(state.spec, _options(state.spec.scheduler)) else ("--batch",)
    done = _run("scancel", f"--signal={name}", *batch, state.job_id)
    words = slurm_job.error_words(done.stderr)
    if done.returncode != 0:
        _require_answer(words)  # else it is over, or its step has not begun: the caller looks again


def _state_of(job_id: str) -> str:
    """Return the job's state; "" if Slurm does not know it. Raises ArealError if Slurm does not answer."""
    done = _run("squeue", "-h", "--states=all", "-j", job_id, "-o", "%T")
    if done.returncode != 0 and "Invalid job id" not in done.stderr:
        raise _silent(slurm_job.error_words(done.stderr))
    return done.stdout.strip()


def _is_gone(job_id: str) -> bool:
    state = _state_of(job_id)
    return not state or slurm_job.SlurmJob(job_id, "", state).is_over


def _run(*argv: str, script: str | None = None) -> subprocess.CompletedProcess[str]:
    left_out = _NOT_PASSED if "SLURM_JOB_ID" not in os.environ else (*_NOT_PASSED, "SLURM_")
    environment = {
        name: value
        for name, value in inherited(os.environ).items()
        if name in _OF_CLUSTER or not name.startswith(left_out)
    }
    try:
        return subprocess.run(
            argv,
            input=script or "",
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",  # a job of the user may have a name that is not UTF-8
            check=False,
            timeout=_ANSWER_S,
        )
    except FileNotFoundError:
        raise ArealError(
            f"{argv[0]} is not installed on this machine", hint="run areal where Slurm's commands are: a login node"
        ) from None
    except subprocess.TimeoutExpired:
        raise _silent(f"{argv[0]} took more than {_ANSWER_S:g} s") from None


def _run_command(*argv: str) -> str:
    """Run a Slurm command and return its output. Raises ArealError with Slurm's message if it fails."""
    done = _run(*argv)
    if done.returncode != 0:
        raise _silent(slurm_job.error_words(done.stderr))
    return done.stdout


def _require_answer(words: str) -> None:
    if any(sign in words for sign in _UNREACHABLE):
        raise _silent(words)


def _silent(words: str) -> ArealError:
    return ArealError(
        f"Slurm does not answer: {words}", hint="scontrol ping; munge has to run here, with the cluster's key"
    )
