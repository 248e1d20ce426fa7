"""Runs as jobs of a real Slurm: deaths of the caller, of nodes and of slurmctld, and what Slurm refuses."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal.errors import ArealError, Conflict, InvalidManifest, NoCapacity
from areal.runtime.backends.base import NODE_HOST, Cause, JobState, Phase, ProblemKind, RunState
from areal.runtime.backends.slurm import SlurmBackend

from ..cluster.slurm import GPUS, NODES, SlurmCluster
from .support import NEVER, PATIENCE_S, alive, log_text, processes_under, python, run_spec, until, until_phase

pytestmark = pytest.mark.slurm
SCRIPT = str(Path(__file__).with_name("slurm_cli.py"))
START_POINTS = ["intent-before", "intent-after", "pid-after", "ack-after", "go-after"]
STOP_POINTS = ["stop-before", "stop-signalled", "stop-after"]
FORGET_POINTS = ["forget-before", "forget-after"]
MINUTES_S = 150.0


def placed_by(**settings: Any) -> dict[str, Any]:
    return {"scheduler": {"type": "slurm", "slurm": settings}}


def started(slurm: SlurmBackend, uid: str = "r1", **changes: Any) -> RunState:
    slurm.start(run_spec(uid, **changes))
    return until_phase(slurm, uid, Phase.RUNNING)


def until_state(slurm: SlurmBackend, condition: Callable[[RunState], bool], what: str) -> RunState:
    def reached() -> RunState | None:
        state = slurm.observe(["r1"])["r1"]
        return state if condition(state) else None

    return until(reached, what)


# -- what a run gets, and what is seen of it


def test_component_gets_node_address_and_slurm_gpus(slurm: SlurmBackend) -> None:
    argv = ("sh", "-c", f"echo at {NODE_HOST} with $CUDA_VISIBLE_DEVICES; exec sleep 1000")

    state = started(slurm, argv=argv, url=f"http://{NODE_HOST}:9", gpus=("a", "b"), **placed_by(nodelist="n2"))

    assert (state.node, state.gpus) == ("n2", ("0", "1"))
    assert state.spec.url == f"http://{NODES['n2']}:9"
    until(lambda: f"at {NODES['n2']} with 0,1\n" in log_text(slurm, "r1"), "the component's words")


def test_waiting_job_has_slurm_reason(slurm: SlurmBackend) -> None:
    names = tuple(map(str, range(GPUS)))
    started(slurm, "first", gpus=names)
    started(slurm, "second", gpus=names)

    slurm.start(run_spec("r1", gpus=names))

    state = until_state(slurm, lambda state: state.reason == "Resources", "Slurm's reason")
    assert state.phase is Phase.QUEUED and state.queued_at is not None
    assert slurm.stop("r1").was_alive
    assert slurm.observe()["r1"].phase is Phase.EXITED


def test_two_node_run_has_component_on_each_and_ends_as_one(slurm: SlurmBackend) -> None:
    source = (
        "import os, time\n"
        "rank, here, first = (os.environ[f'AREAL_{name}'] for name in ('NODE_RANK', 'NODE_ADDRESS', 'FIRST_NODE'))\n"
        "print('rank', rank, 'here', here, 'first', first, flush=True)\n"
        "time.sleep(1000)"
    )
    state = started(slurm, argv=python(source), nodes=2)

    first, second = NODES.values()
    until(lambda: f"rank 1 here {second} first {first}\n" in log_text(slurm, "r1"), "the second node")
    until(lambda: f"rank 0 here {first} first {first}\n" in log_text(slurm, "r1"), "the first node")
    slurm.stop("r1")

    assert state.pid is not None and not alive(state.pid)
    assert slurm.observe()["r1"].reason == "stopped"


def test_exit_of_one_node_ends_run(slurm: SlurmBackend) -> None:
    source = (
        "import os, sys, time; time.sleep(0.5)\nsys.exit(3) if os.environ['AREAL_NODE_RANK'] == '1' else time.sleep(99)"
    )

    slurm.start(run_spec("r1", argv=python(source), nodes=2, restart=NEVER))

    ended = (Phase.EXITED, Phase.DEAD)
    until_state(slurm, lambda state: state.phase in ended, "the end of the run")
    until(lambda: slurm.jobs([])["r1"].state is JobState.ENDED, "the end of the job")


def test_set_up_commands_run_first_and_their_failure_is_reason(slurm: SlurmBackend) -> None:
    slurm.start(run_spec("r1", **placed_by(setupCommands=["echo no such module >&2; exit 4"])))

    state = until_phase(slurm, "r1", Phase.DEAD)

    assert "FAILED on n1, exit 4: no such module" in state.reason
    assert "no such module" in log_text(slurm, "r1")


def test_job_of_moved_home_is_ended_by_home_not_copy(slurm: SlurmBackend, tmp_path: Path) -> None:
    started(slurm, "r1")
    shutil.copytree(tmp_path / "home", tmp_path / "copy")
    copy = SlurmBackend(tmp_path / "copy")
    assert copy.observe()["r1"].phase is Phase.UNKNOWN
    with pytest.raises(Conflict, match="this is a copy"):
        copy.stop("r1", grace_s=0)
    shutil.rmtree(tmp_path / "copy")
    (tmp_path / "home").rename(tmp_path / "moved")
    moved = SlurmBackend(tmp_path / "moved")

    assert moved.observe()["r1"].phase is Phase.RUNNING
    assert moved.stop("r1", grace_s=0.5).was_alive
    until(lambda: moved.jobs([]) == {} or moved.jobs(["r1"])["r1"].state is JobState.ENDED, "the end of the job")
    (tmp_path / "moved").rename(tmp_path / "home")


# -- what Slurm refuses


@pytest.mark.parametrize(
    ("settings", "gpus", "nodes", "error", "words"),
    [
        ({"partition": "nope"}, 0, 1, InvalidManifest, "invalid partition specified: nope"),
        ({"nodelist": "n9"}, 0, 1, InvalidManifest, "Invalid node name specified"),
        ({"constraint": "h900"}, 0, 1, InvalidManifest, "Invalid feature specification"),
        ({"extraArgs": ["--no-such-option"]}, 0, 1, InvalidManifest, "unrecognized option '--no-such-option'"),
        ({}, GPUS + 1, 1, NoCapacity, f"1 node with {GPUS + 1} GPUs asked for.*2 nodes with at most {GPUS}"),
        ({}, 1, 3, NoCapacity, "3 nodes with 1 GPUs asked for"),
    ],
)
def test_unplaceable_job_is_refused_with_slurm_message(
    slurm: SlurmBackend,
    slurm_cluster: SlurmCluster,
    settings: dict[str, Any],
    gpus: int,
    nodes: int,
    error: type[ArealError],
    words: str,
) -> None:
    with pytest.raises(error, match=words):
        slurm.require_possible({"type": "slurm", "slurm": settings}, gpus=gpus, nodes=nodes)
    with pytest.raises(NoCapacity):
        slurm.start(run_spec("r1", gpus=tuple(map(str, range(gpus))), nodes=nodes, **placed_by(**settings)))

    assert slurm.observe() == {}
    assert slurm_cluster.jobs() == []


@pytest.mark.parametrize(
    ("reserves", "words"),
    [
        (
            {"cpus": 65},
            "1 node with 0 GPUs, 65 CPUs asked for, .* 2 nodes with at most 8 GPUs, 64 CPUs",
        ),
        ({"memory_bytes": 2**40}, "1 node with 0 GPUs, 1048576 MiB asked for, .* at most 8 GPUs, 64000 MiB"),
    ],
)
def test_demand_over_node_cpus_or_memory_is_refused(
    slurm: SlurmBackend, reserves: dict[str, float], words: str
) -> None:
    with pytest.raises(NoCapacity, match=words):
        slurm.require_possible({"type": "slurm"}, gpus=0, nodes=1, **reserves)


def test_partition_with_temporarily_missing_nodes_is_accepted(slurm: SlurmBackend, slurm_cluster: SlurmCluster) -> None:
    # A node that is only DOWN returns by itself once it registers again, and RESUME is then refused.
    for state in ("DRAIN", "DOWN"):
        slurm_cluster.command("scontrol", "update", "NodeName=n1,n2", f"State={state}", "Reason=test")
    try:
        for settings in ({"partition": "main,urgent"}, {"extraArgs": ["--partition=urgent"]}, {}):
            slurm.require_possible({"type": "slurm", "slurm": settings}, gpus=1, nodes=2)
    finally:
        slurm_cluster.command("scontrol", "update", "NodeName=n1,n2", "State=RESUME")
        slurm_cluster.until(lambda: slurm_cluster.node_states().count("idle") == len(NODES), "both nodes to be idle")


def test_sbatch_option_submitting_nothing_is_an_error(slurm: SlurmBackend) -> None:
    with pytest.raises(NoCapacity, match="sbatch took no job for run r1 of Model/qwen: Usage: sbatch"):
        slurm.start(run_spec("r1", **placed_by(extraArgs=["--help"])))

    assert slurm.observe() == {}


def test_busy_cluster_is_not_refused(slurm: SlurmBackend) -> None:
    started(slurm, "first", gpus=tuple(map(str, range(GPUS))))

    slurm.require_possible({"type": "slurm"}, gpus=GPUS, nodes=2)
    assert slurm.capacity().queued == {"slurm": 2 * GPUS}


def test_unusable_image_ends_run_with_srun_message(slurm: SlurmBackend) -> None:
    slurm.start(run_spec("r1", **placed_by(containerImage="no-such-image")))  # this Slurm has no pyxis

    state = until_phase(slurm, "r1", Phase.DEAD)

    assert "container-image" in log_text(slurm, "r1")
    assert "FAILED" in state.reason


def test_wrong_munge_key_is_one_error_and_nothing_is_queued(
    slurm: SlurmBackend, slurm_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slurm_cluster.other_key(tmp_path) as env, monkeypatch.context() as patch:
        patch.setenv("SLURM_CONF", env["SLURM_CONF"])
        with pytest.raises(ArealError, match=r"Slurm does not answer: .*(Zero Bytes|authentication error)"):
            slurm.start(run_spec())

    assert slurm_cluster.jobs() == []
    slurm._forget_jobs()
    assert [state.phase for state in slurm.observe().values()] in ([], [Phase.INTENDED])


def test_missing_slurm_commands_are_reported(slurm: SlurmBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(ArealError, match="is not installed on this machine"):
            slurm.capacity()


# -- a user's own environment


def test_users_slurm_defaults_hide_no_job(
    slurm: SlurmBackend, slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("SQUEUE_PARTITION", "urgent")
        patch.setenv("SBATCH_ARRAY_INX", "1-2")
        started(slurm)
    assert len(slurm_cluster.jobs()) == 1

    with monkeypatch.context() as patch:
        patch.setenv("SCANCEL_STATE", "PENDING")
        assert slurm.stop("r1").was_alive
    assert slurm_cluster.jobs() == []


def test_two_node_run_can_be_started_inside_job(slurm: SlurmBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"JOB_ID": "1", "MEM_PER_CPU": "100", "NTASKS": "3", "CPUS_PER_TASK": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)

    started(slurm, nodes=2, spec={"resources": {"memory": "1Gi"}}, component="driver")


def test_job_with_undecodable_name_hides_no_other(slurm: SlurmBackend, slurm_cluster: SlurmCluster) -> None:
    other = slurm_cluster.command("sbatch", "--parsable", "--hold", "--job-name=caf\udce9", "--wrap=true").strip()
    try:
        started(slurm)
        assert slurm.stop("r1").was_alive
    finally:
        slurm_cluster.command("scancel", other)


# -- slurmctld away


@pytest.mark.slow
def test_missing_slurmctld_makes_runs_unknown(slurm: SlurmBackend, slurm_cluster: SlurmCluster) -> None:
    running = started(slurm)
    slurm_cluster.end_daemon("slurmctld")
    try:
        state = until_state(slurm, lambda state: state.phase is not Phase.RUNNING, "the answer to fail")
        assert state.phase is Phase.UNKNOWN
        assert "Unable to contact slurm controller" in state.reason
        with pytest.raises(Conflict, match="cannot be stopped: Slurm does not answer"):
            slurm.stop("r1")
        with pytest.raises(Conflict, match="may be alive"):
            slurm.forget("r1")
        with pytest.raises(ArealError, match="Slurm does not answer"):
            slurm.start(run_spec("r2"))
        assert running.pid is not None and alive(running.pid)
    finally:
        slurm_cluster.start_controller()

    again = until_state(slurm, lambda state: state.phase is Phase.RUNNING, "slurmctld to be back")
    assert again.pid == running.pid


# -- ends that Slurm brings about


def test_cancelled_job_reports_cancellation(slurm: SlurmBackend, slurm_cluster: SlurmCluster) -> None:
    job_id = started(slurm).job_id

    slurm_cluster.command("scancel", job_id)

    state = until_state(slurm, lambda state: state.cause is Cause.CANCELLED, "the cause")
    assert state.phase in (Phase.EXITED, Phase.DEAD)
    assert state.last_exit is not None and state.last_exit.reason == f"Slurm job {job_id} is CANCELLED on {state.node}"


@pytest.mark.parametrize("state", ["SUSPENDED", "SPECIAL_EXIT"])
def test_held_job_is_stopped_at_once(slurm: SlurmBackend, slurm_cluster: SlurmCluster, state: str) -> None:
    job_id = started(slurm, **placed_by(extraArgs=["--requeue"])).job_id
    held = ("suspend",) if state == "SUSPENDED" else ("requeuehold", "State=SpecialExit")
    slurm_cluster.command("scontrol", *held, job_id)
    until(lambda: state in "".join(slurm_cluster.jobs()), "Slurm to hold it")
    if state == "SUSPENDED":
        seen = until_state(slurm, lambda seen: seen.halted, "the run to be held")
        assert (seen.phase, seen.reason) == (
            Phase.RUNNING,
            f"Slurm job {job_id} is SUSPENDED (scontrol resume {job_id})",
        )
    began = time.monotonic()

    assert slurm.stop("r1").was_alive

    assert time.monotonic() - began < 10
    assert slurm_cluster.jobs() == []


def test_requeued_job_waits_and_runs_again(slurm: SlurmBackend, slurm_cluster: SlurmCluster) -> None:
    first = started(slurm, **placed_by(extraArgs=["--requeue"]))

    slurm_cluster.command("scontrol", "requeue", first.job_id)

    waiting = until_state(slurm, lambda state: state.cause is Cause.REQUEUED, "the job to wait again")
    assert waiting.phase is Phase.QUEUED
    assert first.pid is not None and not alive(first.pid)
    slurm_cluster.command("scontrol", "update", f"JobId={first.job_id}", "StartTime=now")
    again = _within(MINUTES_S, lambda: slurm.observe(["r1"])["r1"], lambda state: state.phase is Phase.RUNNING)
    assert (again.job_id, again.pid != first.pid) == (first.job_id, True)


@pytest.mark.slow
def test_preempted_job_reports_preemption(slurm: SlurmBackend, slurm_cluster: SlurmCluster) -> None:
    names = tuple(map(str, range(GPUS)))
    started(slurm, gpus=names)
    started(slurm, "r2", gpus=names)

    slurm.start(run_spec("urgent", gpus=names, **placed_by(partition="urgent")))

    until_phase(slurm, "urgent", Phase.RUNNING)
    states = slurm.observe()
    assert [state.cause for state in states.values()].count(Cause.PREEMPTED) == 1


@pytest.mark.slow
def test_timed_out_job_reports_time_limit(slurm: SlurmBackend) -> None:
    started(slurm, **placed_by(timeLimitSeconds=60))

    state = _within(MINUTES_S, lambda: slurm.observe(["r1"])["r1"], lambda state: state.cause is not Cause.NONE)

    assert (state.phase, state.cause) == (Phase.EXITED, Cause.TIME_LIMIT)


@pytest.mark.slow
def test_dead_node_loses_its_job(slurm: SlurmBackend, slurm_cluster: SlurmCluster) -> None:
    run = started(slurm, **placed_by(nodelist="n2"))
    slurm_cluster.kill_node("n2")
    try:
        state = _within(MINUTES_S, lambda: slurm.observe(["r1"])["r1"], lambda state: state.cause is not Cause.NONE)
        assert (state.phase, state.cause) == (Phase.DEAD, Cause.NODE_LOST)
        assert "NODE_FAIL" in state.reason
        assert run.pid is not None and not alive(run.pid)
        assert slurm.stop("r1").was_alive is False
    finally:
        slurm_cluster.start_node("n2")
        _within(MINUTES_S, slurm_cluster.node_states, lambda states: states.count("idle") == len(NODES))


@pytest.mark.slow
def test_home_invisible_to_node_ends_run_with_clear_error(slurm: SlurmBackend, slurm_cluster: SlurmCluster) -> None:
    slurm.home.mkdir(exist_ok=True)
    slurm_cluster.end_daemon("n2")
    slurm_cluster.start_node("n2", unseen=slurm.home)
    try:
        slurm.start(run_spec("r1", **placed_by(nodelist="n2")))

        state = until_phase(slurm, "r1", Phase.DEAD)

        assert "FAILED on n2, JobLaunchFailure: its node could not write to" in state.reason
        assert "$AREAL_HOME has to be a folder that every node sees" in state.reason
    finally:
        slurm_cluster.end_daemon("n2")
        slurm_cluster.start_node("n2")
        slurm_cluster.until(lambda: slurm_cluster.node_states().count("idle") == len(NODES), "both nodes to be idle")


def test_run_with_all_processes_killed_is_dead(slurm: SlurmBackend, tmp_path: Path) -> None:
    started(slurm, restart=NEVER)

    for pid in processes_under(tmp_path):
        os.kill(pid, signal.SIGKILL)

    until_phase(slurm, "r1", Phase.DEAD, Phase.EXITED)
    assert not slurm.stop("r1").was_alive


def _within(patience_s: float, look: Callable[[], Any], condition: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + patience_s
    while not condition(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    return found


# -- deaths of the caller


def command(verb: str, tmp_path: Path, uid: str, *more: str) -> list[str]:
    return [sys.executable, SCRIPT, verb, str(tmp_path / "home"), uid, *more]


def check_nothing_leaked(slurm: SlurmBackend, slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """Every job has its record, every process its job, and every living run its job."""
    slurm._forget_jobs()
    states = slurm.observe()
    living = {uid for uid, state in states.items() if state.phase in (Phase.QUEUED, Phase.STARTING, Phase.RUNNING)}
    assert {line.split()[1] for line in slurm_cluster.jobs()} <= living
    explained = {Phase.QUEUED, Phase.STARTING, Phase.RUNNING, Phase.INTENDED, Phase.EXITED}
    assert {state.phase for state in states.values()} <= explained


def end_all(slurm: SlurmBackend, slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    for uid in slurm.observe():
        slurm.stop(uid, grace_s=1.0)
        slurm.forget(uid)
    assert slurm.observe() == {}
    until(lambda: slurm_cluster.jobs() == [], "no job to be left")
    until(lambda: not processes_under(tmp_path), "no process to be left")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "point"),
    [
        *(("start", point) for point in START_POINTS),
        *(("stop", point) for point in STOP_POINTS),
        *(("forget", point) for point in FORGET_POINTS),
    ],
)
def test_crash_point_leaks_nothing_and_next_command_repairs(
    slurm: SlurmBackend, slurm_cluster: SlurmCluster, tmp_path: Path, verb: str, point: str
) -> None:
    if verb != "start":
        started(slurm)
    if verb == "forget":
        slurm.stop("r1")

    died = subprocess.run(command(verb, tmp_path, "r1", point), timeout=PATIENCE_S, check=False)

    assert died.returncode == 137
    check_nothing_leaked(slurm, slurm_cluster, tmp_path)
    if point in ("ack-after", "go-after"):  # submitted and not known to be: it is adopted
        assert until_phase(slurm, "r1", Phase.RUNNING).job_id
    end_all(slurm, slurm_cluster, tmp_path)
    again = subprocess.run(command("start", tmp_path, "r1"), timeout=PATIENCE_S, check=False)
    assert again.returncode == 0
    until_phase(slurm, "r1", Phase.RUNNING)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_50_random_kills_during_start_leak_nothing(
    slurm: SlurmBackend, slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    chance = random.Random(2026)
    finished = 0
    for number in range(50):
        process = subprocess.Popen(command("start", tmp_path, f"r{number}"), stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"starting\n"
        try:
            process.wait(chance.uniform(0, 2))
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        finished += process.returncode == 0
        check_nothing_leaked(slurm, slurm_cluster, tmp_path)
        if number % 10 == 9:
            end_all(slurm, slurm_cluster, tmp_path)
    assert 0 < finished < 50


def test_job_without_a_record_is_found_and_ended_by_doctor(
    slurm: SlurmBackend, slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    started(slurm)
    slurm.store.remove("r1")
    slurm._forget_jobs()

    (problem,) = slurm.inspect()
    advice = slurm.repair(problem)

    assert (problem.trouble, problem.subject) == (ProblemKind.STRAY_PROCESS, "r1")
    assert "cancelled" in advice
    assert slurm.inspect() == ()
    until(lambda: not processes_under(tmp_path), "its processes to be gone")
