"""Runs on Ray as values: requests, and Ray's answers read; none of it starts a Ray."""

from __future__ import annotations

import json
import shlex
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import ArealError, InvalidManifest
from areal.runtime.backends import ray
from areal.runtime.backends.base import Cause, Job, JobState, Phase, RunState
from areal.runtime.backends.ray import RayApi, RayBackend, pack
from areal.runtime.backends.ray_job import (
    DEFAULT_ADDRESS,
    NODE_LOST_STATUS,
    RayEntry,
    RayNode,
    RayWants,
    brief,
    is_lost,
    job_request,
    parse_job,
    parse_load,
    resolve_address,
    wants_of,
    why_impossible,
)

from .support import run_spec, unhurried

FOLDER = "/home/me/.areal/clusters/ray/runs/r1"


def request(folder: str = FOLDER, working_dir: str | None = None, **changes: Any) -> dict[str, Any]:
    return job_request(run_spec(**changes), folder, "h1", working_dir)


# -- requests


def test_request_runs_node_program_with_resources() -> None:
    resources = {"cpus": 4, "memory": "64Gi"}
    body = request(
        gpus=("gpu-0", "gpu-1"), spec={"resources": resources}, scheduler={"ray": {"resources": {"h100": 2}}}
    )

    assert body["submission_id"] == "r1.h1"
    assert shlex.split(body["entrypoint"])[-5:] == ["-P", "-m", "areal.runtime.backends.node", FOLDER, "--watch"]
    assert (body["entrypoint_num_cpus"], body["entrypoint_num_gpus"]) == (4.0, 2.0)
    assert (body["entrypoint_memory"], body["entrypoint_resources"]) == (64 * 2**30, {"h100": 2})
    assert body["runtime_env"]["env_vars"]["AREAL_HOME"] == "/home/me/.areal"


def test_request_covers_all_processes_on_node() -> None:
    resources = {"cpus": 4, "memory": "1Gi", "processesPerNode": 8}
    body = request(component="driver", spec={"resources": resources})

    assert (body["entrypoint_num_cpus"], body["entrypoint_memory"]) == (32.0, 8 * 2**30)


def test_request_of_front_process_takes_few_resources() -> None:
    body = request(component="gateway", spec={"resources": {"cpus": 4}})

    assert 0 < body["entrypoint_num_cpus"] < 1
    assert body["entrypoint_num_gpus"] == 0 and "entrypoint_memory" not in body


def test_request_over_several_nodes_is_driver_without_resources() -> None:
    settings = {"ray": {"placementStrategy": "SPREAD", "namespace": "team", "python": "/opt/python"}}
    body = request(nodes=3, gpus=("gpu-0",), scheduler=settings)

    assert not [name for name in body if name.startswith("entrypoint_")]
    words = shlex.split(body["entrypoint"])
    driver = next(number for number, word in enumerate(words) if word.endswith("ray_driver.py"))
    folder, nodes, bundle, strategy, namespace, python = [word.rstrip(";") for word in words[driver + 1 : driver + 7]]
    assert (folder, nodes, strategy, namespace, python) == (FOLDER, "3", "SPREAD", "team", "/opt/python")
    assert json.loads(bundle) == {"CPU": 0.1, "GPU": 1.0}


def test_request_merges_runtime_environment_and_copied_folder() -> None:
    settings = {"ray": {"runtimeEnv": {"pip": ["areal"], "env_vars": {"A": "b"}}}}
    body = request(scheduler=settings, working_dir="gcs://_ray_pkg_1.zip")

    environment = body["runtime_env"]
    assert (environment["pip"], environment["working_dir"]) == (["areal"], "gcs://_ray_pkg_1.zip")
    assert environment["env_vars"]["A"] == "b"
    assert "exec python -P -m" in body["entrypoint"]  # the environment's own, not this command's


@unhurried
@given(st.text(max_size=20), st.text(max_size=20))
def test_request_quotes_any_values(folder: str, python: str) -> None:
    folder = "/a/b/c/d/" + folder.replace("\0", "")
    python = python.replace("\0", "") or "p"
    body = request(folder, scheduler={"ray": {"python": python}})

    assert shlex.split(body["entrypoint"]) == [
        "exec",
        python,
        "-P",
        "-m",
        "areal.runtime.backends.node",
        folder,
        "--watch",
    ]


@pytest.mark.parametrize(
    ("address", "environ", "found"),
    [
        ("auto", {}, DEFAULT_ADDRESS),
        ("auto", {"RAY_ADDRESS": "10.0.0.1:6379"}, DEFAULT_ADDRESS),  # of its GCS
        ("auto", {"RAY_ADDRESS": "http://a:1", "RAY_API_SERVER_ADDRESS": "http://b:2"}, "http://b:2"),
        ("head:8265", {}, "http://head:8265"),
        ("https://ray.example/x/", {}, "https://ray.example/x"),
    ],
)
def test_address_is_dashboard_address(address: str, environ: dict[str, str], found: str) -> None:
    assert resolve_address(address, environ) == found


@pytest.mark.parametrize(
    "address",
    [
        *("ray://head:10001", "http://", "http://head:port", "http://head:99999", "http://[::1", "http://he ad:8265"),
        *("http://head:8265/a b", " http://head:8265", "http://user:word@head:8265"),
    ],
)
def test_address_without_dashboard_url_is_refused(address: str) -> None:
    with pytest.raises(InvalidManifest, match="not the URL of a Ray dashboard"):
        resolve_address(address, {})


def test_pack_omits_caches_and_is_deterministic(tmp_path: Path) -> None:
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_text("x")
    (tmp_path / "a.py").write_text("a = 1")

    package = pack(tmp_path)

    assert zipfile.ZipFile(BytesIO(package)).namelist() == ["a.py"]
    assert pack(tmp_path) == package
    with pytest.raises(InvalidManifest, match="not a folder"):
        pack(tmp_path / "nowhere")


def test_package_of_a_folder_is_compressed(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("areal " * 10_000)

    assert len(pack(tmp_path)) < 1_000


# -- answers


def entry(status: str, **changes: Any) -> RayEntry:
    wants = json.dumps({"resources": {"CPU": 0.1, "GPU": 4.0}, "nodes": 1})
    found: dict[str, Any] = {"submission_id": "r1", "status": status, "message": ""}
    found["metadata"] = {"areal_wants": wants}
    found |= {"start_time": 1000, "end_time": None, "driver_agent_http_address": None, **changes}
    answer: RayEntry = json.loads(json.dumps(found))
    return answer


def test_waiting_job_names_its_demand() -> None:
    load = parse_load(
        {"data": {"clusterStatus": {"loadMetricsReport": {"resourceDemand": [[{"CPU": 0.1, "GPU": 4.0}, 2]]}}}}
    )

    job = parse_job(entry("PENDING"), load)

    assert (job.state, job.queued_at) == (JobState.QUEUED, 1.0)
    assert job.reason == "Resources: CPU 0.1, GPU 4 (2 pending demands of this size)"
    assert parse_job(entry("PENDING")).reason == "Ray sets up its environment"
    assert parse_load({}) == parse_load({"data": {"clusterStatus": None}}) == []


def test_running_job_has_node_address() -> None:
    job = parse_job(entry("RUNNING", driver_agent_http_address="http://10.0.0.7:52365"))

    assert job == Job(JobState.RUNNING, "r1", "10.0.0.7", queued_at=1.0)


DIED = "JOB_SUPERVISOR_ACTOR_DIED"
NODE_DIED = (
    "Job supervisor actor died: The actor died unexpectedly before finishing this task.\n\tclass_name: JobSupervisor\n"
    "The actor died because its node has died. Node Id: a9\n"
    "\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"
)
KILLED = "Job supervisor actor died: ...\nThe actor is dead because it was killed by `ray.kill`."
FAILED_IN_LOG = (
    "Job entrypoint command failed with exit code 78, last available logs (truncated to 20,000 chars):\n"
    "Running entrypoint for job r1: exec python\nareal: run r1 has no record in /h on n1: $AREAL_HOME has to be a "
    "folder that every node sees\n"
)
NO_PYTHON = (
    "Job entrypoint command failed with exit code 127, last available logs (truncated to 20,000 chars):\n"
    "2026-11-23 23:55:19,606\tINFO job_manager.py:581 -- Runtime env is setting up.\n"
    "Running entrypoint for job r1: exec /no/python -m areal.runtime.backends.node /h/r1 --watch\n"
    "/bin/sh: 1: exec: /no/python: not found\n"
)
NO_IMAGE = (
    "runtime_env setup failed: Failed to set up runtime environment.\n"
    "[Node 10.0.0.7] Traceback (most recent call last):\n"
    '  File "runtime_env_agent.py", line 561, in _create\n    context = await asyncio.wait_for(\n              ^^^^^^\n'
    "FileNotFoundError: [Errno 2] No such file or directory: 'podman'\n"
)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            NODE_DIED.replace("\tclass", "\tactor_id: a1\n\tpid: 7\n\tnamespace: N\n\tip: 10.0.0.7\n\tclass"),
            "Job supervisor actor died: The actor died unexpectedly before finishing this task. "
            "The actor died because its node has died. Node Id: a9 the actor's node was terminated unexpectedly: "
            "health check failed due to missing too many heartbeats",
        ),
        (NO_PYTHON, "/bin/sh: 1: exec: /no/python: not found"),
        (
            NO_IMAGE,
            "runtime_env setup failed: Failed to set up runtime environment. "
            "FileNotFoundError: [Errno 2] No such file or directory: 'podman'",
        ),
        (NO_PYTHON.partition(")")[0] + "):\n", "Job entrypoint command failed with exit code 127"),
    ],
)
def test_brief_omits_ray_frames_and_notes(message: str, words: str) -> None:
    assert brief(message) == words


@pytest.mark.parametrize(
    ("changes", "cause", "reason"),
    [
        ({"status": "SUCCEEDED", "message": "Job finished successfully."}, Cause.NONE, ""),
        ({"status": "STOPPED", "message": "Job was intentionally stopped."}, Cause.CANCELLED, "intentionally"),
        ({"status": "FAILED", "error_type": DIED, "message": NODE_DIED}, Cause.NODE_LOST, "node has died"),
        ({"status": "FAILED", "error_type": DIED, "message": KILLED}, Cause.CANCELLED, "ray.kill"),
        ({"status": "FAILED", "error_type": DIED, "message": "the node was preempted"}, Cause.PREEMPTED, "preempted"),
        (
            {"status": "FAILED", "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR", "message": FAILED_IN_LOG},
            Cause.NONE,
            "areal: run r1 has no record in /h on n1: $AREAL_HOME has to be a folder that every node sees",
        ),
        ({"status": "FAILED", "driver_exit_code": NODE_LOST_STATUS, "message": "..."}, Cause.NODE_LOST, "..."),
        ({"status": "FAILED", "error_type": "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"}, Cause.NONE, ""),
    ],
)
def test_ended_job_has_cause_and_reason(changes: dict[str, Any], cause: Cause, reason: str) -> None:
    job = parse_job(entry(changes.pop("status"), end_time=5000, **changes))

    assert (job.state, job.cause, job.ended_at) == (JobState.ENDED, cause, 5.0)
    assert reason in job.reason


statuses = st.sampled_from(["PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED", "PAUSED"])
maybe_text = st.none() | st.text(max_size=30)


@unhurried
@given(
    statuses,
    st.fixed_dictionaries(
        {
            "message": maybe_text,
            "error_type": maybe_text,
            "metadata": st.none() | st.dictionaries(st.just("areal_wants"), st.text(max_size=9)),
            "driver_agent_http_address": st.none() | st.just("http://a:1"),
            "driver_exit_code": st.none() | st.integers(-9, 255),
            "end_time": st.none() | st.integers(0, 10**13),
        }
    ),
)
def test_ray_answer_without_end_state_is_not_an_end(status: str, changes: dict[str, Any]) -> None:
    job = parse_job(entry(status, **changes))

    assert (job.state is JobState.ENDED) == (status in ("STOPPED", "SUCCEEDED", "FAILED"))
    assert job.cause is Cause.NONE or job.state is JobState.ENDED
    assert len(job.reason) <= 600


@unhurried
@given(st.text(max_size=2000))
def test_brief_is_short_and_one_line(message: str) -> None:
    assert len(brief(message)) <= 600 and "\n" not in brief(message)


# -- capacity


NODES = [RayNode("a", {"CPU": 8, "GPU": 4}), RayNode("b", {"CPU": 8, "GPU": 4}), RayNode("c", {"CPU": 64})]


@pytest.mark.parametrize(
    ("wants", "strategy", "why"),
    [
        (RayWants({"GPU": 4}), "PACK", ""),
        (RayWants({"GPU": 8}), "PACK", "no node has GPU 8: the most is 4"),
        (RayWants({"tpu": 1}), "PACK", "no node has tpu 1: the most is 0"),
        (RayWants({"GPU": 1, "CPU": 32}), "PACK", "no node has CPU 32, GPU 1"),
        (RayWants({"GPU": 4}, 2), "STRICT_SPREAD", ""),
        (RayWants({"GPU": 4}, 3), "STRICT_SPREAD", "3 nodes with GPU 4 on each are wanted, and 2 can have that"),
        (RayWants({"GPU": 1}, 3), "PACK", ""),
    ],
)
def test_impossible_demand_is_explained(wants: RayWants, strategy: str, why: str) -> None:
    assert why_impossible(NODES, wants, strategy) == why


def test_wants_include_custom_resources() -> None:
    spec = run_spec(scheduler={"ray": {"resources": {"h100": 1.0}}}, gpus=("gpu-0",))

    assert wants_of(spec).custom == {"h100": 1.0}


@pytest.mark.parametrize(
    ("submitted", "now_is", "age_s", "lost"),
    [("s1", "s1", 9.0, False), ("s1", "s2", 9.0, None), ("s1", "s2", 900.0, True)],
)
def test_jobs_of_former_cluster_are_lost_after_grace(
    submitted: str, now_is: str, age_s: float, lost: bool | None
) -> None:
    assert is_lost(submitted, now_is, 1000.0, 1000.0 + age_s) is lost


# -- an address that does not answer


def test_start_without_ray_leaves_no_run(tmp_path: Path) -> None:
    backend = RayBackend(tmp_path)
    nowhere = {"ray": {"address": "http://127.0.0.1:9"}}

    with pytest.raises(ArealError, match=r"Ray cluster at http://127.0.0.1:9 does not answer: .*refused"):
        backend.require_possible(nowhere, gpus=1, nodes=1)
    with pytest.raises(ArealError, match="does not answer"):
        backend.start(run_spec(scheduler=nowhere))

    assert backend.observe() == {}


def test_runs_are_unknown_while_ray_is_unreachable(tmp_path: Path) -> None:
    backend = RayBackend(tmp_path)
    run = backend.store.create(run_spec())
    Path(backend.store.folder("r1"), "ray.json").write_text('{"address": "http://127.0.0.1:9", "session": "s"}')

    state = backend.observe()["r1"]

    assert run and state.phase is Phase.UNKNOWN and "does not answer" in state.reason
    with pytest.raises(ArealError, match="does not answer"):
        backend.stop("r1")


# -- a stop


@pytest.mark.parametrize(("demands", "posts"), [([], ["stop"]), ([{"CPU": 0.1}], ["stop", "cancel"])])
def test_stop_of_slowly_starting_job_submits_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demands: list[dict[str, float]], posts: list[str]
) -> None:
    body = request()
    pending = {"status": "PENDING", "message": "", "metadata": body["metadata"], "submission_id": "r1.h1"}
    answers = [*[pending] * 4, {**pending, "status": "STOPPED"}]
    posted: list[str] = []

    def call(api: RayApi, method: str, path: str, sent: Any = None, **_: Any) -> Any:
        if method == "POST":
            posted.append("stop" if path.endswith("/stop") else "cancel")
            return None
        if path.endswith("/cluster_status"):
            return {"data": {"clusterStatus": {"loadMetricsReport": {"resourceDemand": [[d, 1] for d in demands]}}}}
        return answers.pop(0)

    monkeypatch.setattr(RayApi, "call", call)
    monkeypatch.setattr(ray, "_STARTING_S", 0.0)
    backend = RayBackend(tmp_path)
    backend.store.create(run_spec())
    Path(backend.store.folder("r1"), "ray.json").write_text('{"address": "http://127.0.0.1:9", "session": "s"}')

    backend.end_job("r1", RunState(run_spec(), Phase.QUEUED), 0.5)

    assert posted == posts
