"""The program of a run on its node, as a scheduler's job starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.runtime import records
from areal.runtime.backends.base import NODE_HOST, NODE_RANK_VARIABLE, Job, JobState, Phase, RunState
from areal.runtime.backends.node import KICK, node_address
from areal.runtime.observation import observe_job
from areal.runtime.runs import RunStore
from areal.runtime.shim import PARENT_VARIABLE

from .conftest import Spawn
from .support import NEVER, alive, kill_until_backoff, processes_under, python, run_spec, until

ADDRESS = "127.0.0.9"
RUNNING = Job(JobState.RUNNING, "12", "n1")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    yield RunStore(tmp_path / "runs")
    until(lambda: not processes_under(tmp_path), "the run's processes to be gone")


def submit(store: RunStore, **changes: Any) -> None:
    os.close(store.create(run_spec(**{"cwd": "/", **changes})))


def start(spawn: Spawn, store: RunStore, *argv: str, **env: str) -> subprocess.Popen[bytes]:
    command = (sys.executable, "-m", "areal.runtime.backends.node", store.folder("r1"), *argv)
    return spawn(command, env={**os.environ, "AREAL_NODE_ADDRESS": ADDRESS, **env}, stderr=subprocess.PIPE)


def state(store: RunStore) -> RunState:
    found = observe_job(store, "r1", RUNNING)
    assert found is not None
    return found


def until_running(store: RunStore) -> RunState:
    until(lambda: state(store).phase is Phase.RUNNING, "the component to run")
    return state(store)


def log(store: RunStore) -> str:
    path = Path(store.folder("r1"), records.LOG_FOLDER, records.CURRENT_LOG)
    return path.read_text() if path.exists() else ""


def test_node_program_substitutes_address_and_forwards_exit(store: RunStore, spawn: Spawn) -> None:
    argv = ("sh", "-c", f"echo at {NODE_HOST} $HOST; cat config.json; exit 3")
    submit(
        store,
        argv=argv,
        cwd=store.folder("r1"),
        env={"HOST": NODE_HOST},
        config={"host": NODE_HOST},
        url=f"http://{NODE_HOST}:9",
        restart=NEVER,
    )

    node = start(spawn, store, CUDA_VISIBLE_DEVICES="2,5", SLURM_JOB_ID="12")

    assert node.wait(30) == 3
    assert state(store).phase is Phase.EXITED
    assert state(store).spec.url == f"http://{ADDRESS}:9"
    assert f"at {ADDRESS} {ADDRESS}\n" in log(store) and f'{{"host":"{ADDRESS}"}}' in log(store)
    seen = records.read_object(store.folder("r1"), records.NODE)
    assert seen is not None and (seen["gpus"], seen["job_id"], seen["address"]) == (["2", "5"], "12", ADDRESS)


def test_sigterm_to_the_node_program_stops_the_component(store: RunStore, spawn: Spawn) -> None:
    submit(store)
    node = start(spawn, store)
    running = until_running(store)

    node.send_signal(signal.SIGTERM)

    assert node.wait(30) == 0
    assert (state(store).phase, state(store).reason) == (Phase.EXITED, "stopped")
    assert running.pid is not None and not alive(running.pid)


@pytest.mark.parametrize("how", ["signal", "file"])
def test_kick_ends_backoff(store: RunStore, spawn: Spawn, how: str) -> None:
    submit(store)
    node = start(spawn, store, *(["--watch"] if how == "file" else []))
    kill_until_backoff(lambda: state(store))

    if how == "file":
        Path(store.folder("r1"), KICK).touch()
    else:
        node.send_signal(signal.SIGUSR1)

    assert until_running(store).restarts == 2
    node.send_signal(signal.SIGTERM)
    node.wait(30)


def test_killed_node_program_ends_supervisor_without_exit_record(store: RunStore, spawn: Spawn) -> None:
    submit(store)
    node = start(spawn, store)
    running = until_running(store)
    pids = [pid for pid in (running.pid, running.shim_pid) if pid is not None]

    node.kill()

    until(lambda: not any(map(alive, pids)), "the component and its supervisor to end")
    assert not Path(store.folder("r1"), records.EXIT).exists()


def test_component_does_not_see_node_program(store: RunStore, spawn: Spawn) -> None:
    """It may start runs of its own, whose supervisors have another parent."""
    submit(store, argv=("sh", "-c", "env"), restart=NEVER)

    assert start(spawn, store).wait(30) == 0

    assert PARENT_VARIABLE not in log(store) and "AREAL_RUN_UID=r1" in log(store)


def test_node_program_sweeps_after_killed_supervisor(store: RunStore, spawn: Spawn) -> None:
    submit(store)
    node = start(spawn, store)
    running = until_running(store)
    assert running.shim_pid is not None

    os.kill(running.shim_pid, signal.SIGKILL)

    assert node.wait(30) == 128 + signal.SIGKILL


def test_taken_port_on_node_ends_run_with_reason(store: RunStore, spawn: Spawn) -> None:
    with socket.create_server((ADDRESS, 0)) as taken:
        port = taken.getsockname()[1]
        submit(store, ports=(port,))

        node = start(spawn, store)

        assert node.wait(30) != 0
    ended = state(store)
    assert ended.phase is Phase.EXITED
    assert f"port {port} cannot be used on node" in ended.reason


def test_forgotten_run_starts_nothing(store: RunStore, spawn: Spawn) -> None:
    node = start(spawn, store)

    _, words = node.communicate(timeout=30)

    assert node.returncode != 0
    assert b"run r1 has no record" in words and b"has to be a folder that every node sees" in words


def test_requeued_job_restarts_at_other_address(store: RunStore, spawn: Spawn) -> None:
    submit(store, argv=("echo", NODE_HOST), restart=NEVER)
    assert start(spawn, store).wait(30) == 0

    assert start(spawn, store, AREAL_NODE_ADDRESS="127.0.0.10").wait(30) == 0

    assert state(store).spec.argv == ("echo", "127.0.0.10")
    assert f"{ADDRESS}\n" in log(store) and "127.0.0.10\n" in log(store)


def test_second_node_has_a_folder_and_a_supervisor_of_its_own(store: RunStore, spawn: Spawn) -> None:
    source = "import os; print(os.environ['AREAL_NODE_RANK'], os.environ['AREAL_FIRST_NODE'], os.environ['SECRET'])"
    submit(store, argv=python(source), nodes=2, secret_env={"SECRET": "hush"}, restart=NEVER)

    node = start(spawn, store, **{NODE_RANK_VARIABLE: "1", "AREAL_FIRST_NODE": "10.0.0.1"})

    assert node.wait(30) == 0
    output = Path(store.folder("r1"), "r1-node-1", records.LOG_FOLDER, records.CURRENT_LOG).read_text()
    assert "1 10.0.0.1 hush\n" in output


def test_address_is_configured_or_reachable() -> None:
    assert node_address({"AREAL_NODE_ADDRESS": "127.0.0.7"}) == "127.0.0.7"
    assert socket.inet_pton(socket.AF_INET, node_address({}))
