"""A service on a real Slurm and on a real Ray: what either refuses, an update under load, its command killed at every
point of the journal, and fifty kills at random of the command and of what runs on the nodes. No job is left that no run
has, no record that a client received is lost, and one more apply converges."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest
import yaml

from areal.runtime import procfs
from areal.runtime.procfs import RUN_UID_VARIABLE
from areal.state.files import CRASH_POINTS
from tests.cluster.ray import GPUS as RAY_GPUS
from tests.cluster.ray import RayCluster, ray_cluster
from tests.cluster.slurm import GPUS as SLURM_GPUS
from tests.cluster.slurm import SlurmCluster
from tests.e2e.conftest import MODEL, ROOT, Box, make_box, tear_down
from tests.e2e.load import Broken, Client, Load, Reply

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
CLUSTERS = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("ray", "slurm")]
DATA = ROOT / "examples" / "reverse_digits" / "train.jsonl"
KILLS = 50
T = TypeVar("T")
_PATIENCE_S = 240.0


@dataclass
class ClusterBox:
    """A home whose runs are jobs. ``jobs``: the uids of those that wait or run."""

    box: Box
    scheduler: str
    jobs: Callable[[], list[str]]

    def manifest(self, model: str = "replicas: 2", name: str = "manifest.yaml") -> str:
        return self.box.manifest(service=f"scheduler: {self.scheduler}", model=model, name=name)

    def service(self, level: str) -> str:
        return self.box.write(
            "apiVersion: areal.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: default}\n"
            f"spec: {{gateway: {{port: {self.box.port}}}, logLevel: {level}, scheduler: {self.scheduler}}}\n",
            f"service-{level}.yaml",
        )

    def with_settings(self, settings: str) -> str:
        """The scheduler with some settings beside its own."""
        found = yaml.safe_load(self.scheduler)
        kind = found["type"]
        return json.dumps({**found, kind: {**found.get(kind, {}), **yaml.safe_load(settings)}})

    def follow(self) -> dict[str, dict[str, Any]]:
        """What runs; clients ask the gateway where it is now."""
        rows = self.box.processes()
        if "gateway/0" in rows:
            self.box.host = str(urlsplit(rows["gateway/0"]["url"]).hostname)
        return rows

    def converge(self, file: str, components: list[str]) -> None:
        """One more apply, every job is a run's, and `doctor` finds nothing."""
        self.box.ok("apply", "-f", file, "--yes")
        rows = self.follow()
        assert sorted(rows) == components
        assert sorted(self.jobs()) == sorted(str(row["uid"]) for row in rows.values())
        assert self.box.areal("diff", "-f", file).code == 0
        found = self.box.areal("doctor")
        assert found.code == 0, found.text


@pytest.fixture(scope="module")
def ray_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray")) as running:
        yield running


@pytest.fixture(params=CLUSTERS)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ClusterBox]:
    box = make_box(tmp_path)
    if request.param == "ray":
        ray: RayCluster = request.getfixturevalue("ray_nodes")
        scheduler = f"{{type: ray, ray: {{address: '{ray.address}'}}}}"
        made = ClusterBox(box, scheduler, lambda: [job.partition(".")[0] for job in ray.live_jobs()])
    else:
        slurm = request.getfixturevalue("slurm_cluster")
        box.env |= slurm.env
        made = ClusterBox(box, "{type: slurm}", lambda: [line.split()[1] for line in slurm.jobs()])
    yield made
    tear_down(box)
    assert made.jobs() == []


# -- what is refused


def only_error(box: Box, *command: str, env: dict[str, str] | None = None) -> str:
    """The one error of a command that fails, with its quotation and hint."""
    result = box.areal(*command, env=env)
    assert result.code not in (0, 130, 137), result.text
    assert "Traceback" not in result.text
    assert len([line for line in result.err.splitlines() if line.startswith("error: ")]) == 1, result.text
    return result.err


def on(name: str, settings: str, model: str, words: str) -> Any:
    return pytest.param(name, settings, model, words, marks=getattr(pytest.mark, name), id=f"{name} {settings} {model}")


@pytest.mark.parametrize(
    ("cluster", "settings", "model", "words"),
    [
        on("slurm", "{partition: nope}", "", "invalid partition specified: nope"),
        on("slurm", "{}", f"resources: {{gpus: {SLURM_GPUS + 1}}}", "9 GPUs.*at most 8"),
        on("slurm", "{}", "resources: {cpus: 65}", "65 CPUs asked for.*64 CPUs"),
        on("slurm", "{containerImage: /a.sif, containerType: apptainer}", "", "apptainer.*No such file"),
        on("slurm", "{containerImage: no/such}", "", "container-image"),
        on("ray", "{}", f"resources: {{gpus: {RAY_GPUS + 1}}}", "no node has GPU 5: the most is 4"),
        on("ray", "{}", "resources: {cpus: 999}", "no node has CPU 999"),
        on("ray", "{resources: {h900: 1}}", "", "no node has h900 1"),
        on("ray", "{runtimeEnv: {image_uri: no/such}}", "", "podman"),
        on("ray", "{python: /no/such/python}", "", "/no/such/python: (not found|No such file)"),
    ],
    indirect=["cluster"],
)
def test_impossible_cluster_request_is_one_error_without_job(
    cluster: ClusterBox, settings: str, model: str, words: str
) -> None:
    cluster.scheduler = cluster.with_settings(settings)
    file = cluster.manifest(model) if model else cluster.service("info")

    error = only_error(cluster.box, "apply", "-f", file)

    assert re.search(words, error), error
    assert cluster.jobs() == []


def test_layout_not_dividing_nodes_is_refused(cluster: ClusterBox) -> None:
    file = cluster.box.write(
        "apiVersion: areal.dev/v1alpha1\nkind: TrainJob\nmetadata: {name: learn}\nspec:\n"
        f"  scheduler: {cluster.scheduler}\n  resources: {{nodes: 2}}\n"
        "  config:\n    experiment_name: e\n    trial_name: t\n    trainer: {type: sft}\n"
        f"    actor: {{backend: 'fsdp:d3', path: {MODEL}}}\n    train_dataset: {{path: {DATA}}}\n",
        "job.yaml",
    )

    error = only_error(cluster.box, "apply", "-f", file)

    assert "fsdp:d3 cannot be spread over spec.resources.nodes 2" in error
    assert cluster.jobs() == []


@pytest.mark.ray
def test_unreachable_ray_is_one_error(tmp_path: Path) -> None:
    box = make_box(tmp_path)
    file = box.manifest(service="scheduler: {type: ray, ray: {address: 'http://127.0.0.1:9'}}")

    assert "the Ray cluster at http://127.0.0.1:9 does not answer: [Errno 111]" in only_error(box, "apply", "-f", file)

    assert box.ok("get", "processes", "-o", "name").out == ""
    tear_down(box)


@pytest.mark.slurm
def test_wrong_munge_key_is_one_error(
    slurm_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = make_box(tmp_path)
    with slurm_cluster.other_key(tmp_path) as env:
        error = only_error(box, "apply", "-f", box.manifest(service="scheduler: {type: slurm}"), env=env)

    assert re.search(r"Slurm does not answer: .*(Zero Bytes|authentication error)", error), error
    assert slurm_cluster.jobs() == []
    box.env |= slurm_cluster.env
    tear_down(box)


# -- under load, and killed


def test_rolling_update_under_load_breaks_and_loses_nothing(cluster: ClusterBox) -> None:
    box = cluster.box
    box.ok("apply", "-f", cluster.manifest())
    before = cluster.follow()

    with Load(box) as load:
        box.ok("apply", "-f", cluster.manifest("replicas: 2\nengineArgs: {max-batch-size: 8}", "rolling.yaml"))
        load.wait_for_all(2)

    assert load.broken == []
    after = box.processes()
    assert {name for name in before if before[name]["jobId"] != after[name]["jobId"]} >= {"engine/0", "engine/1"}
    assert before["gateway/0"]["jobId"] == after["gateway/0"]["jobId"]


def test_apply_killed_at_any_journal_point_leaves_no_stray_job(cluster: ClusterBox) -> None:
    died = 0
    for number, point in enumerate(CRASH_POINTS):
        file = cluster.service(("info", "warning")[number % 2])
        result = cluster.box.areal("apply", "-f", file, "--yes", env={"AREAL_CRASH_AT": point})
        assert result.code in (0, 137), f"{point}: {result.text}"
        died += result.code == 137
        cluster.converge(file, ["gateway/0", "router/0"])
    assert died > len(CRASH_POINTS) // 2


# -- kills at random


class Talker(threading.Thread):
    """A client that has its session's turns recorded, one trajectory a session, and compares the export with what it
    received. Whatever fails is tried again: only what was answered with 200 is acknowledged, and has to be there."""

    def __init__(self, box: Box, number: int) -> None:
        super().__init__(name=f"talker-{number}", daemon=True)
        self._box, self._number, self._ended = box, number, threading.Event()
        self.trajectories = 0
        self.failed = 0
        self.lost: str | None = None

    def run(self) -> None:
        try:
            while not self._ended.is_set():
                self._trajectory()
        except Exception as error:  # noqa: BLE001 - the end of a thread: whatever it is, the test gets it
            self.lost = f"{self.name}: {error!r}"

    def end(self) -> None:
        self._ended.set()
        self.join(2 * _PATIENCE_S)
        assert not self.is_alive()

    def _trajectory(self) -> None:
        admin = Client(self._box, self._box.key)
        asked = {"task_id": f"talker-{self._number}"}
        (session,) = self._insist(lambda: admin.post("/rl/start_session", asked, expect=201))["sessions"]
        client = Client(self._box, session["session_api_key"])
        told = [self._insist(partial(client.chat, _question(turn), stream=False)) for turn in range(3)]
        done = self._insist(lambda: client.post("/rl/set_reward", {"reward": 1.0}))
        chosen = {"session_ids": [session["session_id"]], "trajectory_id": done["trajectory_id"]}
        export = {**chosen, "remove_session": False}
        found = self._insist(lambda: admin.post("/export_trajectories", export))
        _require_told(told, found)
        self._insist(lambda: client.post("/rl/end_session", {}))
        self.trajectories += 1

    def _insist(self, act: Callable[[], T]) -> T:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return act()
            except (Broken, OSError, http.client.HTTPException, ValueError):
                self.failed += 1
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


def _question(turn: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{turn}234"}]


def _require_told(told: list[Reply], found: dict[str, Any]) -> None:
    ids = [row["interaction_id"] for row in found["rows"]]
    for reply in told:
        assert reply.interaction_id in ids, f"{reply.interaction_id} was acknowledged, and {ids} are exported"
        row, traj = ids.index(reply.interaction_id), found["traj"]
        length = sum(traj["attention_mask"][row])
        assert traj["input_ids"][row][:length][-len(reply.token_ids) :] == reply.token_ids


def pids_of(uid: str) -> list[int]:
    """All processes of a run on its node: its node program, its supervisor, its component."""
    shims = [stat for stat in procfs.processes() if procfs.environment(stat.pid).get(RUN_UID_VARIABLE) == uid]
    parents = {stat.ppid for stat in shims} - {stat.pid for stat in shims}
    programs = [pid for pid in parents if "areal.runtime.backends.node" in procfs.command_line(pid)]
    return [*programs, *(stat.pid for stat in shims)]


def kill_on_a_node(chance: random.Random, rows: dict[str, dict[str, Any]]) -> str:
    """One process of one run, or all of them at once."""
    name = chance.choice(sorted(rows))
    pids = pids_of(str(rows[name]["uid"]))
    chosen = pids if chance.random() < 0.4 else [chance.choice(pids)] if pids else []
    for pid in chosen:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return f"{len(chosen)} of {len(pids)} processes of {name}"


def kill_a_command(chance: random.Random, box: Box, commands: list[tuple[str, ...]]) -> str:
    command = chance.choice(commands)
    process = box.start(*command)
    try:
        process.wait(chance.uniform(0.3, 6.0))
    except subprocess.TimeoutExpired:
        process.kill()
    process.communicate()
    return f"areal {' '.join(command)} ({process.returncode})"


def test_50_random_kills_lose_no_record_and_leave_no_stray_job(cluster: ClusterBox) -> None:
    box, chance = cluster.box, random.Random(50)
    one = cluster.manifest()
    other = cluster.manifest("replicas: 2\nengineArgs: {max-batch-size: 8}", "other.yaml")
    commands: list[tuple[str, ...]] = [
        ("apply", "-f", one, "--yes"),
        ("apply", "-f", other, "--yes"),
        ("apply", "-f", cluster.manifest("replicas: 1", "fewer.yaml"), "--yes"),
        ("restart", "inferenceservice/default"),
        ("reconcile",),
    ]
    box.ok("apply", "-f", one)
    cluster.follow()
    talkers = [Talker(box, number) for number in range(2)]
    for talker in talkers:
        talker.start()
    kills = []
    try:
        for number in range(KILLS):
            if chance.random() < 0.5:
                kills.append(kill_a_command(chance, box, commands))
            else:
                kills.append(kill_on_a_node(chance, cluster.follow()))
            if number % 5 == 4:
                cluster.converge(
                    (one, other)[number % 2],
                    ["data-proxy/0", "data-proxy/1", "engine/0", "engine/1", "gateway/0", "router/0"],
                )
                assert [talker.lost for talker in talkers if talker.lost] == [], kills
    finally:
        print(json.dumps(kills, indent=1))
        for talker in talkers:
            talker.end()
    assert [talker.lost for talker in talkers if talker.lost] == []
    assert all(talker.trajectories for talker in talkers)
