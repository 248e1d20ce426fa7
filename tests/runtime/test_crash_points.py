"""A command that dies anywhere leaves no process without a record, no record without an explanation, no lease
without a process; and the next command puts everything right."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from areal.errors import Conflict
from areal.runtime.backends.base import Phase, RunState
from areal.runtime.backends.local import LocalBackend
from areal.state.files import CRASH_POINTS

from .conftest import MakeBackend
from .support import PATIENCE_S, processes_under, run_spec, until

SCRIPT = str(Path(__file__).with_name("crashing_cli.py"))
RUN_POINTS = CRASH_POINTS[CRASH_POINTS.index("intent-before") :]
VERB_POINTS = [
    ("start" if point.split("-")[0] not in ("stop", "forget") else point.split("-")[0], point) for point in RUN_POINTS
]


def command(verb: str, tmp_path: Path, uid: str, *more: str) -> list[str]:
    return [sys.executable, SCRIPT, verb, str(tmp_path / "home"), str(tmp_path / "leases"), uid, *more]


def held_leases(local: LocalBackend) -> set[str]:
    return {name for name in local.leases.names() if local.leases.is_held(name)}


def settle(local: LocalBackend) -> None:
    """Wait until no shim is between its fork and either its end or its component."""

    def under_way(state: RunState) -> bool:
        waiting = state.phase is Phase.INTENDED and local.store.is_held(state.spec.uid)
        return waiting or state.phase is Phase.STARTING

    until(lambda: not any(map(under_way, local.observe().values())), "shims to leave or to start")


def check_nothing_leaked(local: LocalBackend, tmp_path: Path) -> None:
    settle(local)
    states = local.observe()
    living = {uid for uid, state in states.items() if state.phase is Phase.RUNNING}
    explained = {Phase.RUNNING, Phase.INTENDED, Phase.EXITED}
    assert {state.phase for state in states.values()} <= explained
    folders = {Path(_run_dir(pid)).name for pid in processes_under(tmp_path)}
    assert folders == living
    expected = {f"port-{port}" for uid in living for port in states[uid].spec.ports}
    assert held_leases(local) == expected


def _run_dir(pid: int) -> str:
    from areal.runtime import procfs
    from areal.runtime.procfs import RUN_DIR_VARIABLE

    return procfs.environment(pid)[RUN_DIR_VARIABLE]


@pytest.mark.parametrize(("verb", "point"), VERB_POINTS)
def test_crash_point_leaks_nothing_and_next_command_repairs(
    make_local: MakeBackend, tmp_path: Path, verb: str, point: str
) -> None:
    local = make_local()
    if verb != "start":
        local.start(run_spec(ports=local.claim_ports(1, owner="Model/qwen")))
    if verb == "forget":
        local.stop("r1")

    died = subprocess.run(command(verb, tmp_path, "r1", point), timeout=PATIENCE_S, check=False)

    assert died.returncode == 137
    if point == "stop-signalled":  # the shim finishes what it was asked
        until(lambda: local.observe()["r1"].phase is Phase.EXITED, "the stop to be finished")
        until(lambda: not processes_under(tmp_path), "the shim to leave")
    check_nothing_leaked(local, tmp_path)

    local.stop("r1")
    local.forget("r1")
    assert local.observe() == {}
    assert processes_under(tmp_path) == []
    assert held_leases(local) == set()
    again = subprocess.run(command("start", tmp_path, "r1"), timeout=PATIENCE_S, check=False)
    assert again.returncode == 0
    assert local.observe()["r1"].phase is Phase.RUNNING


@pytest.mark.parametrize("point", ["intent-after", "lease-after"])
def test_death_before_fork_leaves_forgettable_intent(make_local: MakeBackend, tmp_path: Path, point: str) -> None:
    local = make_local()

    subprocess.run(command("start", tmp_path, "r1", point), timeout=PATIENCE_S, check=False)

    assert local.observe()["r1"].phase is Phase.INTENDED
    local.forget("r1")
    assert local.observe() == {}


def test_forget_of_starting_run_is_refused(local: LocalBackend) -> None:
    refused: list[str] = []

    def on_pid(pid: int) -> None:
        with pytest.raises(Conflict, match="being started") as caught:
            local.forget("r1")
        refused.append(caught.value.message)

    local.start(run_spec(), on_pid=on_pid)

    assert refused
    assert local.observe()["r1"].phase is Phase.RUNNING


def kill_at_random(local: LocalBackend, tmp_path: Path, times: int) -> None:
    """SIGKILL a starting command at a random moment, again and again, and look for what it left."""
    chance = random.Random(2024)
    ran = 0
    for number in range(times):
        process = subprocess.Popen(command("start", tmp_path, f"r{number}"), stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"starting\n"
        try:
            process.wait(chance.uniform(0, 0.06))
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        ran += process.returncode == 0
        check_nothing_leaked(local, tmp_path)
        for uid in local.observe():
            local.stop(uid)
            local.forget(uid)
        assert processes_under(tmp_path) == []
    assert ran < times


def test_12_random_kills_during_start_leak_nothing(make_local: MakeBackend, tmp_path: Path) -> None:
    kill_at_random(make_local(), tmp_path, 12)


@pytest.mark.crash
def test_150_random_kills_during_start_leak_nothing(make_local: MakeBackend, tmp_path: Path) -> None:
    kill_at_random(make_local(), tmp_path, 150)


@pytest.mark.crash
def test_60_random_kills_during_stop_are_finished_by_next(make_local: MakeBackend, tmp_path: Path) -> None:
    local = make_local()
    chance = random.Random(7)
    for number in range(60):
        uid = f"r{number}"
        local.start(run_spec(uid))
        process = subprocess.Popen(command("stop", tmp_path, uid))
        try:
            process.wait(chance.uniform(0.05, 0.15))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        local.stop(uid)
        local.forget(uid)
        assert processes_under(tmp_path) == []
