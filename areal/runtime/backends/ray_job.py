"""Requests to the Jobs REST API of a Ray cluster, and its answers. Pure; ``areal.runtime.backends.ray`` sends them."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Required, TypedDict
from urllib.parse import urlsplit

from areal.dataclasses import dataclass, replace
from areal.errors import InvalidManifest
from areal.installation import DISTRIBUTION
from areal.runtime.backends.base import Cause, Job, JobState, RunSpec, reserved

if TYPE_CHECKING:
    from areal.resources.scheduling import Ray

DRIVER_FILE = str(Path(__file__).with_name("ray_driver.py"))
HOME_KEY, RUN_KEY, WANTS_KEY = "areal_home", "areal_run", "areal_wants"  # of a job's metadata
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
NODE_LOST_STATUS = 75  # of the driver
LOST_S = 90.0  # a raylet ends itself, and its jobs, 60 s after it has lost its head
_FRAMES = re.compile(r"^.*Traceback \(most recent call last\):\n(?:[ \t]+.*\n)*", re.MULTILINE)
_ACTOR = re.compile(r"^\s*(?:class_name|actor_id|pid|name|namespace|ip|repr): .*$", re.MULTILINE)
_JOB_MANAGER = re.compile(r"^(?:.*\sINFO job_manager\.py|Running entrypoint for job ).*$", re.MULTILINE)
TERMINAL = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
_SMALL_CPUS = 0.1  # of a process that declares none: without any Ray would start it on the head
_OWN_PYTHON = ("pip", "uv", "conda", "image_uri", "container")


class RayEntry(TypedDict, total=False):
    """A job, as ``GET /api/jobs/`` lists it; times in milliseconds since the epoch."""

    status: Required[str]
    submission_id: str
    message: str | None
    metadata: dict[str, str] | None
    start_time: int | None
    end_time: int | None
    driver_agent_http_address: str | None
    driver_exit_code: int | None
    error_type: str | None


@dataclass(frozen=True)
class RayWants:
    """Resources of a run on each of its nodes, by Ray's names; ``memory`` in bytes."""

    resources: Mapping[str, float]
    nodes: int = 1

    @property
    def custom(self) -> dict[str, float]:
        return {name: count for name, count in self.resources.items() if name not in ("CPU", "GPU", "memory")}


def wants_of(spec: RunSpec) -> RayWants:
    return wants(options_of(spec.scheduler), len(spec.gpus), spec.nodes, *reserved(spec.component, spec.spec))


def wants(options: Ray, gpus: int, nodes: int, cpus: float, memory_bytes: float) -> RayWants:
    wanted = {"CPU": float(cpus or _SMALL_CPUS)}
    if gpus:
        wanted["GPU"] = float(gpus)
    if memory_bytes:
        wanted["memory"] = memory_bytes
    return RayWants({**wanted, **options.resources}, nodes)


def options_of(scheduler: Mapping[str, object]) -> Ray:
    from areal.resources.scheduling import Ray

    return Ray.model_validate(scheduler.get("ray") or {})


def job_request(spec: RunSpec, folder: str, home: str, working_dir: str | None) -> dict[str, object]:
    """Return the body of ``POST /api/jobs/``. ``home``: the id of this $AREAL_HOME; ``working_dir``: a URI."""
    options, wants = options_of(spec.scheduler), wants_of(spec)
    given, variables = {"AREAL_HOME": home_of(folder)}, options.runtime_env.get("env_vars")
    given["RAY_JOB_STOP_WAIT_TIME_S"] = str(int(spec.stop_grace_s) + 5)
    environment: dict[str, object] = {**options.runtime_env, "env_vars": given}
    if isinstance(variables, dict):
        environment["env_vars"] = {**given, **variables}
    if working_dir is not None:
        environment["working_dir"] = working_dir
    python = python_of(options)
    request: dict[str, object] = {
        "submission_id": submission_id(spec.uid, home),
        "runtime_env": environment,
        "metadata": {
            "job_name": f"{spec.owner} {spec.component}/{spec.replica}",
            HOME_KEY: home,
            RUN_KEY: spec.uid,
            WANTS_KEY: json.dumps({"resources": dict(wants.resources), "nodes": wants.nodes}),
        },
    }
    here = f'ln -sfn "$PWD" {shlex.quote(f"{folder}/cwd")} && ' if working_dir is not None else ""
    if wants.nodes > 1:
        bundle = json.dumps(dict(wants.resources), separators=(",", ":"))
        order = (DRIVER_FILE, folder, str(wants.nodes), bundle, options.placement_strategy, options.namespace, python)
        return {**request, "entrypoint": here + with_ray(python, order)}
    program = shlex.join((python, "-P", "-m", "areal.runtime.backends.node", folder, "--watch"))
    request["entrypoint"] = f"{here}exec {program}"
    request["entrypoint_num_cpus"] = wants.resources["CPU"]
    request["entrypoint_num_gpus"] = wants.resources.get("GPU", 0)
    if "memory" in wants.resources:
        request["entrypoint_memory"] = int(wants.resources["memory"])
    if wants.custom:
        request["entrypoint_resources"] = wants.custom
    return request


def submission_id(uid: str, home: str) -> str:
    """Return the submission id of the run's job: two homes may have a run of the same name in one cluster."""
    return f"{uid}.{home}"


def home_of(folder: str) -> str:
    """Return $AREAL_HOME of ``$AREAL_HOME/clusters/ray/runs/<uid>``."""
    return str(Path(folder).parents[3])


def python_of(options: Ray) -> str:
    brings_one = any(name in options.runtime_env for name in _OWN_PYTHON)
    return options.python or ("python" if brings_one else sys.executable)


def with_ray(python: str, argv: Sequence[str]) -> str:
    """Return a shell command: ``argv`` by the first Python with Ray, of the one given and those of the PATH."""
    tried = " ".join(map(shlex.quote, dict.fromkeys((python, "python3", "python"))))
    return (
        f'for p in {tried}; do "$p" -c "import ray" 2>/dev/null && exec "$p" {shlex.join(argv)}; done; '
        f"echo 'areal: no Python of this node has Ray: install {DISTRIBUTION}[ray], or name one by "
        "spec.scheduler.ray.python' "
        ">&2; exit 78"
    )


_KILL = """
import sys, ray
from ray.dashboard.modules.job.common import JOB_ACTOR_NAME_TEMPLATE, SUPERVISOR_ACTOR_RAY_NAMESPACE
ray.init(log_to_driver=False)
name = JOB_ACTOR_NAME_TEMPLATE.format(job_id=sys.argv[1])
ray.kill(ray.get_actor(name, namespace=SUPERVISOR_ACTOR_RAY_NAMESPACE))
"""


def cancel_request(uid: str, home: str, python: str) -> dict[str, object]:
    """Return a job on the head that ends one which has not been placed."""
    job = submission_id(uid, home)
    return {
        "submission_id": f"cancel-{job}-{secrets.token_hex(2)}",
        "entrypoint": with_ray(python, ("-c", _KILL, job)),
        "metadata": {"job_name": f"areal: cancel {uid}", HOME_KEY: f"{home} cancel"},
    }


def resolve_address(address: str, environ: Mapping[str, str]) -> str:
    """Return the URL of the dashboard. Raises InvalidManifest for a bad address, or another of Ray's servers."""
    if address == "auto":
        named = [environ.get("RAY_API_SERVER_ADDRESS", ""), environ.get("RAY_ADDRESS", "")]
        address = next((each for each in named if each.startswith(("http://", "https://"))), DEFAULT_ADDRESS)
    if "://" not in address:
        address = f"http://{address}"
    try:
        url = urlsplit(address)
        usable = url.scheme in ("http", "https") and url.hostname and url.port != 0 and not url.username
    except ValueError:  # a port that is not a number, half an IPv6 address
        usable = False
    if not usable or re.search(r"[\s\x00-\x1f\x7f]", address):
        raise InvalidManifest(
            f"spec.scheduler.ray.address {address} is not the URL of a Ray dashboard",
            hint="write http://HEAD:8265, with the head's own name and port",
        )
    return address.rstrip("/")


def parse_job(entry: RayEntry, load: Sequence[Mapping[str, float]] = ()) -> Job:
    """Return a job. ``load``: pending demands, of which one may be this job's."""
    status = entry["status"]
    queued_at = started / 1000 if (started := entry.get("start_time")) else None
    job = Job(JobState.RUNNING, entry["submission_id"], queued_at=queued_at)
    if status == "PENDING":
        return replace(job, state=JobState.QUEUED, reason=waiting_reason(wants_in(entry), load))
    job = replace(job, node=urlsplit(entry.get("driver_agent_http_address") or "").hostname or "")
    if status == "RUNNING":
        return job
    if status not in TERMINAL:
        return replace(job, state=JobState.UNKNOWN, reason=f"Ray says that the job is {status}")
    ended_at = ended / 1000 if (ended := entry.get("end_time")) else None
    cause, reason = cause_of(entry), "" if status == "SUCCEEDED" else brief(entry.get("message") or "")
    return replace(job, state=JobState.ENDED, reason=reason, cause=cause, ended_at=ended_at)


def wants_in(entry: RayEntry) -> RayWants:
    try:
        found = json.loads((entry.get("metadata") or {})[WANTS_KEY])
        return RayWants(found["resources"], found["nodes"])
    except (KeyError, TypeError, ValueError):
        return RayWants({})


def cause_of(entry: RayEntry) -> Cause:
    """Return why a job has ended. The run's ``stop.json`` tells a stop by areal itself apart."""
    message = (entry.get("message") or "").lower()
    if entry["status"] == "STOPPED":
        return Cause.CANCELLED
    if entry["status"] == "SUCCEEDED":
        return Cause.NONE
    if entry.get("driver_exit_code") == NODE_LOST_STATUS:
        return Cause.PREEMPTED if "preempted" in message else Cause.NODE_LOST
    if entry.get("error_type") in (None, "JOB_ENTRYPOINT_COMMAND_ERROR"):
        return Cause.NONE
    if "preempted" in message:
        return Cause.PREEMPTED
    if "killed by `ray.kill`" in message:
        return Cause.CANCELLED
    lost = ("node has died", "node was terminated", "failed to get job supervisor", "owner has died")
    return Cause.NODE_LOST if any(words in message for words in lost) else Cause.NONE


def brief(message: str) -> str:
    """Return Ray's message without the frames of its traceback, and with the last lines of the log in it."""
    head, _, log = message.partition("last available logs")
    quoted = _JOB_MANAGER.sub("", log.partition("\n")[2]).strip() or head.removesuffix(", ")
    lines = [line.strip() for line in _ACTOR.sub("", _FRAMES.sub("", quoted)).splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("areal: ")] if log else lines
    return " ".join(own[-4:] if own else lines[-3:])[-600:]


def waits_for_resources(wants: RayWants, load: Sequence[Mapping[str, float]]) -> int:
    """Return how many demands of this size Ray has pending; one may be this job's."""
    return sum(dict(demand) == dict(wants.resources) for demand in load)


def waiting_reason(wants: RayWants, load: Sequence[Mapping[str, float]]) -> str:
    """Return why Ray does not start the job: pending resources, or its environment."""
    same = waits_for_resources(wants, load)
    if not same:
        return "Ray sets up its environment"
    asked = ", ".join(f"{name} {count:g}" for name, count in sorted(wants.resources.items()))
    return f"Resources: {asked} ({same} pending demand{'s' * (same > 1)} of this size)"


def parse_load(answer: Mapping[str, Any]) -> list[Mapping[str, float]]:
    """Return the pending demands of ``GET /api/cluster_status``, each as many times as it is pending."""
    report = ((answer.get("data") or {}).get("clusterStatus") or {}).get("loadMetricsReport") or {}
    return [demand for demand, count in report.get("resourceDemand") or () for _ in range(int(count))]


@dataclass(frozen=True)
class RayNode:
    address: str
    resources: Mapping[str, float]
    is_head: bool = False
    started_at: float = 0.0  # seconds since the epoch


def parse_nodes(answer: Mapping[str, Any]) -> list[RayNode]:
    """Return the living nodes of ``GET /api/v0/nodes``."""
    return [
        RayNode(
            str(node["node_ip"]),
            node.get("resources_total") or {},
            bool(node.get("is_head_node")),
            (node.get("start_time_ms") or 0) / 1000,
        )
        for node in answer["data"]["result"]["result"]
        if node["state"] == "ALIVE"
    ]


def why_impossible(nodes: Sequence[RayNode], wants: RayWants, strategy: str) -> str:
    """Return why no placement on these nodes can ever be found, or nothing. Only one bundle is looked at."""
    able = [node for node in nodes if all(node.resources.get(name, 0) >= n for name, n in wants.resources.items())]
    apart = wants.nodes if strategy == "STRICT_SPREAD" else 1
    if len(able) >= apart:
        return ""
    asked = ", ".join(f"{name} {count:g}" for name, count in sorted(wants.resources.items()))
    if able:
        return f"{wants.nodes} nodes with {asked} on each are wanted, and {len(able)} can have that"
    for name, count in sorted(wants.resources.items()):
        most = max((node.resources.get(name, 0) for node in nodes), default=0)
        if most < count:
            return f"no node has {name} {count:g}: the most is {most:g}"
    return f"no node has {asked}"


def is_lost(submitted_session: str, session: str, head_started_at: float, now: float) -> bool | None:
    """Return whether a job that its cluster does not know is gone with a cluster that was there before: None where its
    processes may live still, False where the cluster is the same."""
    if submitted_session == session:
        return False
    return True if now - head_started_at > LOST_S else None
