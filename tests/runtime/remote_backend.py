"""A cluster of one node: jobs wait for a while, then run on this machine at another address.

A job is a process that holds a lock while it lives; it waits until its node is free, and becomes the node program. The
backend asks the lock, never /proc. ``$AREAL_TEST_CLUSTER`` may name a JSON file: ``address`` of the node, ``delay_s``
of a placement, ``held`` (jobs wait for as long as it is true), ``away`` (the scheduler does not answer), ``cause`` of
jobs that ended, ``gpus`` of the node.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from areal.errors import ArealError, NoCapacity, TimedOut
from areal.runtime import records
from areal.runtime.backends.base import NODE_ADDRESS_VARIABLE, Capacity, Cause, Job, JobState, RunSpec, RunState
from areal.runtime.backends.cluster import ClusterBackend
from areal.runtime.lifecycle import sweep_run
from areal.runtime.observation import read_identity

NAME = "remote"
NODE = "node-7"
SETTINGS_VARIABLE = "AREAL_TEST_CLUSTER"
REASON = "Resources"
_MARGIN_S = 10.0


def settings() -> dict[str, Any]:
    file = os.environ.get(SETTINGS_VARIABLE)
    given = json.loads(Path(file).read_text()) if file else {}
    return {"address": "127.0.0.2", "delay_s": 0.05, "held": False, "away": False, "cause": "", "gpus": 2, **given}


class RemoteBackend(ClusterBackend):
    name = NAME

    def __init__(self, home_root: Path, lease_dir: Path | None, crash: Callable[[str], None]) -> None:
        super().__init__(home_root, lease_dir, crash)
        self._folder_of_jobs = self.home / "clusters" / NAME / "jobs"

    def capacity(self) -> Capacity:
        if settings()["away"]:
            raise ArealError("the remote cluster does not answer")
        return Capacity(queued={NAME: settings()["gpus"]})

    def require_possible(
        self, scheduler: Mapping[str, Any], *, gpus: int, nodes: int, cpus: float = 0, memory_bytes: float = 0
    ) -> None:
        if gpus > settings()["gpus"] or nodes > 1:
            raise NoCapacity(f"no node has {gpus} GPUs" if nodes == 1 else f"there are not {nodes} nodes")

    def submit(self, spec: RunSpec, folder: str) -> Job | None:
        self._folder_of_jobs.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._folder_of_jobs / spec.uid, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                argv = [sys.executable, "-m", __name__, str(self._folder_of_jobs / spec.uid), str(lock), folder]
                with open(f"{folder}/{records.LOG_FOLDER}/job.log", "ab") as log:
                    job = subprocess.Popen(
                        argv, pass_fds=(lock,), start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                    )
                record = {"pid": job.pid, "at": time.time()}
                (self._folder_of_jobs / f"{spec.uid}.json").write_text(json.dumps(record))
                self._children.append(job)
        finally:
            os.close(lock)
        return None

    _children: list[subprocess.Popen[bytes]] = []

    def jobs(self, uids: Collection[str]) -> Mapping[str, Job]:
        if settings()["away"]:
            raise ArealError("the remote cluster does not answer")
        for child in self._children:
            child.poll()
        names = [path.stem for path in self._folder_of_jobs.glob("*.json")]
        return {uid: self._job(uid) for uid in names}

    def _job(self, uid: str) -> Job:
        placed = (self._folder_of_jobs / f"{uid}.placed").exists()
        if self._is_over(uid):
            cause = Cause(settings()["cause"])
            return Job(JobState.ENDED, f"job-{uid}", NODE, reason=str(cause), cause=cause)
        if placed:
            return Job(JobState.RUNNING, f"job-{uid}", NODE)
        return Job(JobState.QUEUED, f"job-{uid}", reason=REASON)

    def _is_over(self, uid: str) -> bool:
        lock = os.open(self._folder_of_jobs / uid, os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
        return True

    def _pid(self, uid: str) -> int:
        return int(json.loads((self._folder_of_jobs / f"{uid}.json").read_text())["pid"])

    def kick_job(self, uid: str, state: RunState) -> None:
        os.kill(self._pid(uid), signal.SIGUSR1)

    def end_job(self, uid: str, state: RunState, grace_s: float) -> None:
        until = time.monotonic() + grace_s + _MARGIN_S
        with suppress(ProcessLookupError):
            os.kill(self._pid(uid), signal.SIGTERM)
        while not self._is_over(uid):
            if time.monotonic() > until:
                raise TimedOut(f"job of run {uid} does not end")
            time.sleep(0.01)
        folder = self.store.folder(uid)
        if os.path.lexists(folder):
            sweep_run(read_identity(folder), folder)


def main(file: str, lock: str, folder: str) -> None:
    """The job: wait for the node, then be its program."""
    began = time.monotonic()
    while settings()["held"] or time.monotonic() - began < settings()["delay_s"]:
        time.sleep(0.01)
    Path(f"{file}.placed").touch()
    os.environ[NODE_ADDRESS_VARIABLE] = settings()["address"]
    os.execv(sys.executable, [sys.executable, "-m", "areal.runtime.backends.node", folder])


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[2]), True)
    main(*sys.argv[1:])
