"""A run in Slurm's terms (script, ``sbatch`` options), and the output of ``squeue`` and ``sacct`` as values. Pure.

squeue's JSON differs between versions: Slurm 22.05 has plain values, 23.02 and later write a state as a list and a
number as ``{"set": true, "infinite": false, "number": 5}``. Both are read; missing values are empty.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from areal.dataclasses import dataclass
from areal.runtime.backends.base import FIRST_NODE_VARIABLE, Cause, Job, JobState, RunSpec, reserved

if TYPE_CHECKING:
    from areal.resources.scheduling import Slurm

JOB_LOG = "job.log"  # in the run's log folder: what Slurm and the set-up commands say
_NODE_PROGRAM = ("-P", "-m", "areal.runtime.backends.node")


def batch_script(spec: RunSpec, options: Slurm, run_dir: str, home: str, python: str) -> str:
    """Return the script of the run's job: set-up commands, then the node program on each node."""
    if options.container_image:
        python = "python3"  # the image's own
    program = [python, *_NODE_PROGRAM]
    lines = ["#!/bin/bash", *options.setup_commands]
    if spec.nodes > 1:
        address = shlex.join([*_launcher(options, 1, home), *program, "--address"])
        lines += [f'{FIRST_NODE_VARIABLE}="$({address})" || exit', f"export {FIRST_NODE_VARIABLE}"]
    launcher = _launcher(options, spec.nodes, home) if in_steps(spec, options) else []
    return "\n".join([*lines, "exec " + shlex.join([*launcher, *program, run_dir]), ""])


def in_steps(spec: RunSpec, options: Slurm) -> bool:
    """Return whether the node programs are a step of the job; else one is the batch script's own process."""
    return spec.nodes > 1 or bool(options.container_image)


def _launcher(options: Slurm, nodes: int, home: str) -> list[str]:
    if nodes == 1 and not options.container_image:
        return []
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    if not options.container_image:
        return words
    mounts = [f"{home}:{home}", *options.container_mounts]
    if options.container_type == "pyxis":
        return [*words, f"--container-image={options.container_image}", f"--container-mounts={','.join(mounts)}"]
    binds = [word for mount in mounts for word in ("--bind", mount)]
    gpu_flag = ["--nv"]  # harmless on a node without GPUs: it warns
    return [*words, "apptainer", "exec", *gpu_flag, *binds, options.container_image]


def submit_options(spec: RunSpec, options: Slurm, run_dir: str, home: str) -> list[str]:
    """Return the options of ``sbatch``. The manifest's own extra ones come last, so they win."""
    cpus, memory_bytes = reserved(spec.component, spec.spec)
    return [
        "--parsable",
        f"--job-name={spec.uid}",
        f"--comment={comment(home)}",
        f"--output={run_dir.replace('%', '%%')}/log/{JOB_LOG}",
        "--open-mode=append",
        "--chdir=/",
        "--no-requeue",  # areal starts its successor
        *resource_options(gpus=len(spec.gpus), nodes=spec.nodes, cpus=cpus, memory_bytes=memory_bytes),
        *placement_options(options),
    ]


def resource_options(*, gpus: int, nodes: int, cpus: float = 0, memory_bytes: float = 0) -> list[str]:
    """Return the resource options. All values except ``nodes`` are per node; 0 is the cluster's default."""
    found = [f"--nodes={nodes}", "--ntasks-per-node=1"]
    if cpus:
        found.append(f"--cpus-per-task={math.ceil(cpus)}")
    if memory_bytes:
        found.append(f"--mem={math.ceil(memory_bytes / 2**20)}M")
    return [*found, f"--gres=gpu:{gpus}"] if gpus else found


def placement_options(options: Slurm) -> list[str]:
    names = ("partition", "account", "qos", "nodelist", "exclude", "constraint")
    found = [f"--{name}={value}" for name in names if (value := getattr(options, name))]
    if seconds := math.ceil(options.time_limit_seconds or 0):
        found.append(f"--time={seconds // 60}:{seconds % 60:02}")
    return [*found, *options.extra_args]


def comment(home: str) -> str:
    """Return the comment by which a home recognizes its own jobs."""
    return f"areal:{home}"


_QUEUED = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
NOT_RUNNING = _QUEUED | {"CONFIGURING", "SUSPENDED"}
"""States of a job whose processes take no signal."""
_ENDED = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
        *("PREEMPTED", "REVOKED", "TIMEOUT", "LAUNCH_FAILED", "RECONFIG_FAIL"),
    }
)
_CAUSES = {
    "NODE_FAIL": Cause.NODE_LOST,
    "BOOT_FAIL": Cause.NODE_LOST,
    "PREEMPTED": Cause.PREEMPTED,
    "TIMEOUT": Cause.TIME_LIMIT,
    "DEADLINE": Cause.TIME_LIMIT,
    "CANCELLED": Cause.CANCELLED,
}
IMPOSSIBLE = frozenset(
    {
        *("BadConstraints", "InvalidAccount", "InvalidQOS", "PartitionConfig", "PartitionNodeLimit"),
        *("PartitionTimeLimit", "AccountNotAllowed", "QOSNotAllowed", "AssocMaxWallDurationPerJobLimit"),
        *("QOSMaxWallDurationPerJobLimit", "QOSMaxNodePerJobLimit", "QOSMaxCpuPerJobLimit", "QOSMaxGRESPerJob"),
        *("QOSMaxMemoryPerJob", "QOSMinCpuNotSatisfied", "QOSMinGRES", "QOSMinMemory", "AssocMaxNodePerJobLimit"),
        *("AssocMaxCpuPerJobLimit", "AssocMaxGRESPerJob", "AssocMaxMemPerJob", "DependencyNeverSatisfied"),
    }
)
"""Reasons for which a queued job never starts."""


@dataclass(frozen=True)
class SlurmJob:
    """A job as Slurm shows it; times in seconds since the epoch. ``completing``: ended, and processes may be left."""

    job_id: str
    name: str
    state: str
    comment: str = ""
    completing: bool = False
    reason: str = ""
    node: str = ""
    gpus: tuple[str, ...] = ()
    requeues: int = 0
    submitted_at: float | None = None
    ended_at: float | None = None
    exit_code: int = 0

    @property
    def is_over(self) -> bool:
        return self.state in _ENDED and not self.completing

    def job(self, last_words: str = "") -> Job:
        """Return the job in the backend's form. ``last_words``: the last log line of a job that failed."""
        if self.state in _QUEUED:
            cause = Cause.REQUEUED if self.requeues else Cause.NONE
            # The estimate is not the scheduler's reason: "None" is what Slurm says before it has looked at a job.
            reason = self.reason if self.reason not in ("", "None") else "submitted"
            return Job(JobState.QUEUED, self.job_id, reason=reason, cause=cause, queued_at=self.submitted_at)
        if not self.is_over:
            held = self.state in ("SUSPENDED", "STOPPED")
            return Job(
                JobState.RUNNING,
                self.job_id,
                self.node,
                self.gpus,
                f"Slurm job {self.job_id} is {self.state} (scontrol resume {self.job_id})" if held else "",
                queued_at=self.submitted_at,
                requeues=self.requeues,
                suspended=held,
            )
        where = f" on {self.node}" if self.node else ""
        status = f", exit {self.exit_code}" if self.state == "FAILED" and self.exit_code else ""
        if self.reason == "JobLaunchFailure":  # its exit code is slurmstepd's
            status = f", {self.reason}"
        words = f": {last_words}" if last_words and self.state in ("FAILED", "OUT_OF_MEMORY") else ""
        return Job(
            JobState.ENDED,
            self.job_id,
            self.node,
            self.gpus,
            f"Slurm job {self.job_id} is {self.state}{where}{status}{words}",
            _CAUSES.get(self.state, Cause.NONE),
            self.submitted_at,
            self.ended_at,
        )


def parse_squeue(text: str) -> list[SlurmJob]:
    """Return the jobs of ``squeue --json``. Raises ValueError if squeue failed, which its exit status 0 may hide."""
    answer = json.loads(text)
    if not isinstance(answer, Mapping):
        raise ValueError("squeue --json is not an object")
    if errors := [error for error in answer.get("errors") or () if isinstance(error, Mapping)]:
        raise ValueError("; ".join(str(error.get("description") or error.get("error") or error) for error in errors))
    return [_of_entry(entry) for entry in answer.get("jobs") or () if isinstance(entry, Mapping)]


def _of_entry(entry: Mapping[str, object]) -> SlurmJob:
    states = _words(entry.get("job_state"))
    ended = [state for state in states if state in _ENDED]
    state = (ended or [each for each in states if each != "COMPLETING"] or ["COMPLETING"])[0]
    exit_code = entry.get("exit_code")
    if isinstance(exit_code, Mapping):  # 23.02 and later
        status, killed = _number(exit_code.get("return_code")), exit_code.get("signal")
        number = _number(killed.get("signal_id") or killed.get("id")) if isinstance(killed, Mapping) else None
        code = int(128 + number if number else status or 0)
    else:  # a wait status
        raw = int(_number(exit_code) or 0)
        code = raw >> 8 or (128 + (raw & 0x7F) if raw & 0x7F else 0)
    reason, detail = _text(entry.get("state_reason")), _text(entry.get("state_description"))
    return SlurmJob(
        job_id=str(int(_number(entry.get("job_id")) or 0)),
        name=_text(entry.get("name")),
        state=state,
        comment=_text(entry.get("comment")),
        completing="COMPLETING" in states,
        reason=f"{reason}: {detail}" if detail else reason,
        node=_text(entry.get("batch_host")) or _text(entry.get("nodes")),
        gpus=_gpus(entry.get("gres_detail")),
        requeues=int(_number(entry.get("restart_cnt")) or 0),
        submitted_at=_number(entry.get("submit_time")) or None,
        ended_at=(_number(entry.get("end_time")) or None) if state in _ENDED else None,
        exit_code=code,
    )


def parse_sacct(text: str) -> list[SlurmJob]:
    """Return the jobs of ``sacct --parsable2 --noheader --format=JobID,State,End,NodeList,ExitCode``, without steps."""
    jobs = []
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 5 or not fields[0].isdigit():
            continue
        job_id, state, end, node, code = fields
        status, _, killed = code.partition(":")
        exit_code = int(status) if status.isdigit() else 0
        if killed.isdigit() and int(killed):
            exit_code = 128 + int(killed)
        host = "" if node.startswith(("(", "None")) else node
        word = (state.split() or [""])[0].rstrip("+")  # "CANCELLED by 0"
        jobs.append(SlurmJob(job_id, "", word, node=host, ended_at=_moment(end), exit_code=exit_code))
    return jobs


def gpus_of_gres(gres: str) -> int:
    """Return the number of a node's GPUs, from ``gpu:8`` or ``gpu:a100:4(S:0-1),gpu:h100:2``."""
    counts = re.findall(r"(?:^|,)gpu(?::[^:,()]*[^:,()0-9][^:,()]*)?:([0-9]+)", gres)
    return sum(map(int, counts))


def _gpus(detail: object) -> tuple[str, ...]:
    """Return the GPU indices of the first node, from ``["gpu:a100:2(IDX:0-1)"]``."""
    first = next((each for each in detail if isinstance(each, str)), "") if isinstance(detail, list) else ""
    match = re.search(r"gpu[^(]*\(IDX:([0-9,-]+)\)", first)
    if match is None:
        return ()
    found: list[str] = []
    for part in match[1].split(","):
        low, _, high = part.partition("-")
        if low.isdigit() and (high or low).isdigit():
            found += map(str, range(int(low), min(int(high or low), int(low) + 1024) + 1))
    return tuple(found)


def _words(value: object) -> list[str]:
    if isinstance(value, str):
        return value.split("+") if value else []
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    if isinstance(value, Mapping):
        value = value.get("number") if value.get("set") else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _moment(text: str) -> float | None:
    """Return seconds since the epoch for Slurm's local time, or None for ``Unknown``."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def newest(jobs: Iterable[SlurmJob], home: str) -> dict[str, SlurmJob]:
    """Return a home's jobs by name. Of two jobs with one name, the one that has not ended, or else the later one."""
    found: dict[str, SlurmJob] = {}
    for job in sorted(jobs, key=lambda job: (not job.is_over, len(job.job_id), job.job_id)):
        if job.comment == comment(home):
            found[job.name] = job
    return found


_FAULT = re.compile(r"error|unrecognized|invalid|no such|not found|cannot|unable|denied", re.IGNORECASE)
_ECHO = re.compile(r"task [0-9,-]+: (Exited|Terminated|Killed)|Terminating StepId")  # srun repeats an earlier line


def last_words(lines: Sequence[str]) -> str:
    """Return the last line of a failed job's log that names a fault, or else its last line."""
    words = [line.strip() for line in lines if line.strip()]
    faults = [line for line in words if _FAULT.search(line) and not _ECHO.search(line)]
    return (faults or words or [""])[-1]


def error_words(stderr: str) -> str:
    """Return Slurm's error in one line, without the command's name and without repetitions."""
    lines: Sequence[str] = [re.sub(r"^\w+: (?:error: |fatal: )?", "", line.strip()) for line in stderr.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))
