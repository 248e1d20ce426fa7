"""Runs on a Ray cluster, by its Jobs REST API; nothing here imports Ray.

A run is one Ray job: its submission id is the run's uid and the id of this home, its entrypoint the node program, which
Ray starts where it has the GPUs, CPUs and custom resources that the run wants. A run over several nodes is a job that
wants nothing: its entrypoint (``areal.runtime.backends.ray_driver``) makes a placement group and starts the node
program in each of its bundles.

Ray's own stop signals every process of a job at once, so a run is stopped by its ``stop.json``, which the node program
watches, and by Ray where that does not help in time. Ray cannot stop a job that it has not placed: the job's supervisor
is then killed by a second, small job.

A Ray whose head was restarted without its state knows none of its jobs. Their processes end once their nodes have
noticed; for as long the runs are UNKNOWN, and afterwards their nodes are lost.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import secrets
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from areal.errors import ArealError, InvalidManifest, NoCapacity, NotFound, TimedOut
from areal.files import replace_file
from areal.runtime import records
from areal.runtime.backends import ray_job
from areal.runtime.backends.base import Capacity, Cause, Job, JobState, RunSpec, RunState
from areal.runtime.backends.cluster import ClusterBackend
from areal.runtime.runs import is_copy

RAY = "ray.json"  # of a run's folder: the address of its cluster, and the cluster's session
DRIVER = "driver.json"  # of a run over several nodes: the file that its driver waits for
_REQUEST_S, _SUBMIT_S = 10.0, 60.0
_STARTING_S = 3.0  # a job that waits for longer may wait for resources
_MARGIN_S = 15.0
_POLL_S = 0.1
_PACKAGE_BYTES = 200 << 20
_LEFT_OUT = frozenset({".git", "__pycache__", ".venv", "node_modules", ".mypy_cache", ".pytest_cache"})


class _NotJson(ArealError):
    pass


class RayApi:
    """The dashboard API of one cluster. Every call raises ArealError with the cluster's message."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._headers = {"Content-Type": "application/json"}
        token = os.environ.get("RAY_AUTH_TOKEN", "")
        file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
        if not token and os.environ.get("RAY_AUTH_MODE") == "token" and file.is_file():
            token = file.read_text().strip()
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    def call(self, method: str, path: str, body: Any = None, *, timeout_s: float = _REQUEST_S) -> Any:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, self._headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            words = error.read().decode("utf-8", "replace")
            if error.code == 404:
                raise NotFound(f"Ray at {self.address}: {ray_job.brief(words)}") from None
            answer = f"Ray at {self.address} answers {error.code}: {ray_job.brief(words)}"
            raise ArealError(answer, detail=words) from None
        except OSError as error:
            why = getattr(error, "reason", error)
            raise ArealError(
                f"the Ray cluster at {self.address} does not answer: {why}",
                hint="start it, or write the URL of its dashboard to spec.scheduler.ray.address",
            ) from None
        try:
            return json.loads(text or b"null")
        except ValueError:
            raise _NotJson(f"{self.address} is not a Ray dashboard: {path} answered no JSON") from None

    def jobs(self) -> list[ray_job.RayEntry]:
        found = self.call("GET", "/api/jobs/")
        if not isinstance(found, list):
            raise ArealError(f"{self.address} is not a Ray dashboard")
        return [entry for entry in found if entry.get("submission_id")]

    def job(self, job_id: str) -> ray_job.RayEntry | None:
        with suppress(NotFound):
            found: ray_job.RayEntry = self.call("GET", f"/api/jobs/{quote(job_id)}")
            return found
        return None

    def session(self) -> str:
        return str(self.call("GET", "/api/version")["session_name"])

    def nodes(self) -> list[ray_job.RayNode]:
        return ray_job.parse_nodes(self.call("GET", "/api/v0/nodes?detail=1"))

    def load(self) -> list[Mapping[str, float]]:
        return ray_job.parse_load(self.call("GET", "/api/cluster_status"))

    def submit(self, request: Mapping[str, object]) -> None:
        """Submit the job; do nothing if it already exists. A head that has just started is given time."""
        deadline = time.monotonic() + _SUBMIT_S
        while True:
            try:
                self.call("POST", "/api/jobs/", request, timeout_s=_SUBMIT_S)
            except ArealError as error:
                words = error.detail or ""
                if "No available agent" in words and time.monotonic() < deadline:
                    time.sleep(0.5)
                    continue
                if "already exists" not in words:
                    raise
            return

    def upload(self, folder: Path) -> str:
        """Return the URI of the folder's copy in the cluster. Raises InvalidManifest if it is unreadable or too big."""
        package = pack(folder)
        name = f"_ray_pkg_{hashlib.sha256(package).hexdigest()[:16]}.zip"
        try:
            self.call("GET", f"/api/packages/gcs/{name}")
        except NotFound:
            self.call("PUT", f"/api/packages/gcs/{name}", package, timeout_s=_SUBMIT_S)
        except _NotJson:  # it answers with an empty body
            pass
        return f"gcs://{name}"


def pack(folder: Path) -> bytes:
    """Return a ZIP archive that is identical for identical files."""
    buffer, size = io.BytesIO(), 0
    if not folder.is_dir():
        raise InvalidManifest(f"spec.scheduler.ray.workingDir {folder} is not a folder")
    with zipfile.ZipFile(buffer, "w") as archive:
        for file in sorted(folder.rglob("*")):
            name = file.relative_to(folder)
            if not file.is_file() or _LEFT_OUT.intersection(name.parts):
                continue
            size += file.stat().st_size
            if size > _PACKAGE_BYTES:
                raise InvalidManifest(
                    f"spec.scheduler.ray.workingDir {folder} has more than {_PACKAGE_BYTES >> 20} MiB",
                    hint="name a smaller folder, or the URI of an archive",
                )
            entry = zipfile.ZipInfo(str(name))
            entry.external_attr = file.stat().st_mode << 16
            archive.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


class RayBackend(ClusterBackend):
    """See ``base.Backend`` and the module."""

    name = "ray"

    def __init__(
        self, home_root: Path, lease_dir: Path | None = None, crash: Callable[[str], None] = lambda point: None
    ) -> None:
        super().__init__(home_root, lease_dir, crash)
        self._folder_of_cluster = self.home / "clusters" / self.name
        self._cluster_of: dict[str, tuple[str, str]] = {}  # uid -> address, session; as recorded
        self._seen_at: dict[str, str] = {}  # uid -> address that listed it, of runs with and without a record

    def capacity(self) -> Capacity:
        gpus = 0.0
        for address in self._addresses() or [ray_job.resolve_address("auto", os.environ)]:
            with suppress(ArealError):
                gpus += sum(node.resources.get("GPU", 0) for node in RayApi(address).nodes())
        return Capacity(queued={self.name: int(gpus)})

    def require_possible(
        self, scheduler: Mapping[str, object], *, gpus: int, nodes: int, cpus: float = 0, memory_bytes: float = 0
    ) -> None:
        options = ray_job.options_of(scheduler)
        api = RayApi(ray_job.resolve_address(options.address, os.environ))
        wanted = ray_job.wants(options, gpus, nodes, cpus, memory_bytes)
        why = ray_job.why_impossible(api.nodes(), wanted, options.placement_strategy)
        if why and not options.autoscaling:
            hint = "ask for less, or write spec.scheduler.ray.autoscaling: true where Ray adds nodes"
            raise NoCapacity(f"the Ray cluster at {api.address} cannot place it: {why}", hint=hint)

    def start(self, spec: RunSpec, *, on_pid: Callable[[int], None] = lambda pid: None) -> RunState:
        if ray_job.options_of(spec.scheduler).working_dir and spec.cwd is None:
            spec = replace(spec, cwd=f"{self.store.folder(spec.uid)}/cwd")  # a link, made on the node
        return super().start(spec, on_pid=on_pid)

    def submit(self, spec: RunSpec, folder: str) -> None:
        options = ray_job.options_of(spec.scheduler)
        api = RayApi(ray_job.resolve_address(options.address, os.environ))
        session = api.session()
        working_dir = options.working_dir
        if working_dir is not None and "://" not in working_dir:
            working_dir = api.upload(Path(working_dir).expanduser())
        self._remember_address(api.address)
        records.write_json(folder, RAY, {"address": api.address, "session": session})
        api.submit(ray_job.job_request(spec, folder, self._home_id(), working_dir))

    def _home_id(self) -> str:
        """Return a random name of this $AREAL_HOME, whose path may be another home's elsewhere. A copy gets its own."""
        if name := self._read_home_id():
            return name
        self._folder_of_cluster.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = str(self._folder_of_cluster)
        with open(f"{folder}/.home.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (name := self._read_home_id()):
                name = secrets.token_hex(4)
                replace_file(f"{folder}/home", f"{name} {os.stat(folder).st_ino} {folder}".encode(), mode=0o600)
        return name

    def _read_home_id(self) -> str:
        """Return the recorded name; empty if there is none yet, or the one of the home that this is a copy of."""
        folder = str(self._folder_of_cluster)
        try:
            name, *made = (self._folder_of_cluster / "home").read_text().split(" ", 2)
        except FileNotFoundError:
            return ""
        return "" if made and is_copy(folder, made[1], int(made[0])) else name

    def _job_id(self, uid: str) -> str:
        return ray_job.submission_id(uid, self._home_id())

    def _addresses(self) -> list[str]:
        try:
            return (self._folder_of_cluster / "addresses").read_text().split()
        except FileNotFoundError:
            return []

    def _remember_address(self, address: str) -> None:
        if address not in self._addresses():
            self._folder_of_cluster.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(self._folder_of_cluster / "addresses", "a") as file:
                file.write(f"{address}\n")

    def jobs(self, uids: Collection[str]) -> Mapping[str, Job]:
        """List the jobs with one query per cluster. A run whose cluster does not answer is UNKNOWN, with the error."""
        by_address: dict[str, list[str]] = {}
        for uid in uids:
            if (cluster := self._cluster(uid)) is not None:
                by_address.setdefault(cluster[0], []).append(uid)
        found: dict[str, Job] = {}
        for address in by_address or self._addresses():
            mine = by_address.get(address, [])
            try:
                found |= self._jobs_at(RayApi(address), mine)
            except ArealError as error:
                found |= {uid: Job(JobState.UNKNOWN, uid, reason=error.message) for uid in mine}
        return found

    def _cluster(self, uid: str) -> tuple[str, str] | None:
        if uid not in self._cluster_of:
            with suppress(OSError, ValueError, KeyError):
                record = records.read_object(self.store.folder(uid), RAY)
                if record is not None:
                    self._cluster_of[uid] = str(record["address"]), str(record["session"])
        return self._cluster_of.get(uid)

    def _jobs_at(self, api: RayApi, uids: Sequence[str]) -> dict[str, Job]:
        home = self._home_id()
        entries = [entry for entry in api.jobs() if (entry.get("metadata") or {}).get(ray_job.HOME_KEY) == home]
        load: list[Mapping[str, float]] = []
        if any(entry["status"] == "PENDING" for entry in entries):
            load = api.load()
        found = {}
        for entry in entries:
            uid = str((entry["metadata"] or {}).get(ray_job.RUN_KEY))
            self._seen_at[uid] = api.address
            found[uid] = self._with_node(uid, ray_job.parse_job(entry, load), ray_job.wants_in(entry).nodes)
        if missing := [uid for uid in uids if uid not in found]:
            found |= self._of_former_sessions(api, missing)
        return found

    def _with_node(self, uid: str, job: Job, nodes: int) -> Job:
        """Add to a running job what its node program and driver have recorded."""
        if job.state is not JobState.RUNNING:
            return job
        folder = self.store.folder(uid)
        with suppress(OSError, ValueError):
            waits = records.read_object(folder, DRIVER) if nodes > 1 else None
            if nodes > 1 and (waits is None or waits.get("reason")):
                reason = waits["reason"] if waits else "Ray starts its driver"
                return replace(job, state=JobState.QUEUED, node="", reason=reason)
            if seen := records.read_object(folder, records.NODE):
                node = str(seen["address"]) if nodes > 1 else job.node
                return replace(job, node=node, gpus=tuple(map(str, seen["gpus"])))
        return replace(job, node="") if nodes > 1 else job  # Ray tells the driver's node, which need not be the first

    def _of_former_sessions(self, api: RayApi, uids: Sequence[str]) -> dict[str, Job]:
        session = api.session()
        head_started_at = max((node.started_at for node in api.nodes() if node.is_head), default=time.time())
        found = {}
        for uid in uids:
            lost = ray_job.is_lost(self._cluster_of[uid][1], session, head_started_at, time.time())
            reason = f"the Ray cluster at {api.address} was restarted and does not know its jobs"
            if lost is None:
                reason += f"; their nodes end them within {ray_job.LOST_S:g} s"
                found[uid] = Job(JobState.UNKNOWN, uid, reason=reason)
            elif lost:
                found[uid] = Job(JobState.ENDED, uid, reason=reason, cause=Cause.NODE_LOST, ended_at=head_started_at)
        return found

    def log_paths(self, uid: str) -> tuple[str, ...]:
        """Return the run's log files, or, if it has none, Ray's log of the job: the node program could not start."""
        paths = super().log_paths(uid)
        cluster = self._cluster(uid)
        if paths or cluster is None:
            return paths
        file = Path(self.store.folder(uid), records.LOG_FOLDER, "ray.log")
        with suppress(ArealError, OSError, KeyError, TypeError):
            file.write_text(RayApi(cluster[0]).call("GET", f"/api/jobs/{quote(self._job_id(uid))}/logs")["logs"])
            return (str(file),)
        return ()

    def kick_job(self, uid: str, state: RunState) -> None:
        records.write_json(self.store.folder(uid), "kick", {}, durable=False)

    def end_job(self, uid: str, state: RunState, grace_s: float) -> None:
        cluster = self._cluster(uid)
        address = cluster[0] if cluster is not None else self._seen_at.get(uid)
        if address is None:
            return
        api, began = RayApi(address), time.monotonic()
        folder, job_id = self.store.folder(uid), self._job_id(uid)
        asked, cancel = False, ""
        while True:
            entry, waited_s = api.job(job_id), time.monotonic() - began
            if entry is None or entry["status"] in ray_job.TERMINAL:
                return
            job = ray_job.parse_job(entry)
            placed = job.state is JobState.RUNNING and self._with_node(uid, job, state.spec.nodes).node
            gentle = placed and os.path.isdir(folder) and waited_s < grace_s + _MARGIN_S
            if gentle and not os.path.exists(f"{folder}/{records.STOP}"):  # a node program that begins removes it
                records.write_json(folder, records.STOP, {"grace_s": grace_s}, durable=False)
            if not gentle and not asked:
                asked = True
                api.call("POST", f"/api/jobs/{quote(job_id)}/stop")
            waits_long = entry["status"] == "PENDING" and waited_s > _STARTING_S and not cancel
            # One that has a node ends by itself once it has begun, which takes as long as the node is busy.
            wants = ray_job.wants_in(entry)
            if waits_long and (waited_s > _MARGIN_S or ray_job.waits_for_resources(wants, api.load())):
                python = ray_job.python_of(ray_job.options_of(state.spec.scheduler))
                request = ray_job.cancel_request(uid, self._home_id(), python)
                api.submit(request)
                cancel = str(request["submission_id"])
            if waited_s > grace_s + 4 * _MARGIN_S:
                last = (api.job(cancel) if cancel else None) or entry
                raise TimedOut(f"Ray does not end the job of run {uid}: {ray_job.brief(last['message'] or '')}")
            time.sleep(_POLL_S if waited_s < _STARTING_S else 5 * _POLL_S)

    def forget(self, uid: str, *, unprovable: bool = False) -> None:
        cluster = self._cluster(uid)
        super().forget(uid, unprovable=unprovable)
        if cluster is not None:
            with suppress(ArealError):  # Ray keeps ended jobs, which are not needed
                RayApi(cluster[0]).call("DELETE", f"/api/jobs/{quote(self._job_id(uid))}")
