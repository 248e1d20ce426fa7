"""Signals reach the recorded process or none; a sweep leaves nothing of a run and touches nothing else."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.errors import ArealError
from areal.runtime import lifecycle as signals
from areal.runtime import procfs
from areal.runtime.identity import ProcessIdentity, identify
from areal.runtime.observation import find_shim
from areal.runtime.procfs import RUN_DIR_VARIABLE, open_verified

from .conftest import Spawn
from .support import alive, until


@pytest.fixture
def sleeper(spawn: Spawn) -> subprocess.Popen[bytes]:
    """A session leader that has nothing to do with areal."""
    return spawn(["sleep", "1000"], start_new_session=True)


def recycled(identity: ProcessIdentity) -> ProcessIdentity:
    """A record whose pid has since been given to ``identity``: it was started earlier."""
    return dataclasses.replace(identity, start_ticks=identity.start_ticks - 1)


def test_send_reaches_the_recorded_process(sleeper: subprocess.Popen[bytes]) -> None:
    assert signals.send(identify(sleeper.pid), signal.SIGTERM)

    assert sleeper.wait(30) == -signal.SIGTERM


def test_send_to_a_recycled_pid_signals_no_process(sleeper: subprocess.Popen[bytes]) -> None:
    assert not signals.send(recycled(identify(sleeper.pid)), signal.SIGKILL)
    assert not signals.request_end(recycled(identify(sleeper.pid)))
    signals.ensure_dead(recycled(identify(sleeper.pid)), 0.0)

    assert alive(sleeper.pid)


def test_sweep_of_a_recycled_session_number_kills_no_process(sleeper: subprocess.Popen[bytes]) -> None:
    record = recycled(identify(sleeper.pid))

    assert not signals.session_is_ours(record)
    assert signals.sweep_run(record, "/no/such/run") == ()
    assert alive(sleeper.pid)


def test_open_verified_with_other_ticks_opens_nothing(sleeper: subprocess.Popen[bytes]) -> None:
    ticks = identify(sleeper.pid).start_ticks

    assert open_verified(sleeper.pid, ticks + 1) is None
    fd = open_verified(sleeper.pid, ticks)
    assert fd is not None
    os.close(fd)


def test_send_to_another_machine_is_refused(sleeper: subprocess.Popen[bytes]) -> None:
    elsewhere = dataclasses.replace(identify(sleeper.pid), machine_id="another machine")

    with pytest.raises(ArealError, match="another machine"):
        signals.send(elsewhere, signal.SIGTERM)


def test_wait_dead_returns_when_the_process_ends(sleeper: subprocess.Popen[bytes]) -> None:
    identity = identify(sleeper.pid)
    assert not signals.wait_dead(identity, 0.01)

    sleeper.kill()

    assert signals.wait_dead(identity, 30)


Leaderless = Callable[..., tuple[ProcessIdentity, int]]


@pytest.fixture
def leaderless() -> Iterator[Leaderless]:
    """The identity of a dead session leader, and the pid of a member that outlived it."""
    members: list[ProcessIdentity] = []

    def make(environment: dict[str, str] | None = None) -> tuple[ProcessIdentity, int]:
        script = "sleep 1000 > /dev/null & echo $!; read wait"  # builtins: no other process is ever in the session
        streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        leader = subprocess.Popen(["sh", "-c", script], **streams, start_new_session=True, env=environment)
        assert leader.stdout is not None
        members.append(identify(int(leader.stdout.readline())))
        identity = identify(leader.pid)
        leader.kill()
        leader.communicate()
        return identity, members[-1].pid

    yield make
    for member in members:
        signals.send(member, signal.SIGKILL)


def test_sweep_of_a_dead_leaders_session_kills_its_members(leaderless: Leaderless) -> None:
    identity, member = leaderless()

    assert signals.sweep_run(identity, "/no/such/run") == (member,)

    assert not alive(member)


@pytest.mark.parametrize(
    "changes",
    [
        {"start_ticks": 2**60},  # the member is older than the leader we recorded
        {"autogroup": "/autogroup-0"},  # the kernel counts it to another session
    ],
)
def test_sweep_of_reused_session_number_kills_no_process(leaderless: Leaderless, changes: dict[str, object]) -> None:
    identity, member = leaderless()
    if "autogroup" in changes and not identity.autogroup:
        pytest.skip("this kernel has no autogroups")

    swept = signals.sweep_run(dataclasses.replace(identity, **changes), "/no/such/run")  # type: ignore[arg-type]

    assert swept == ()
    assert alive(member)


def test_sweep_spares_member_of_other_run(leaderless: Leaderless) -> None:
    environment = {**os.environ, RUN_DIR_VARIABLE: "/another/run"}
    identity, member = leaderless(environment)

    assert signals.sweep_run(identity, "/no/such/run") == ()

    assert alive(member)
    assert signals.sweep_run(identity, "/another/run") == (member,)


def test_sweep_kills_process_outside_session(tmp_path: Path, spawn: Spawn) -> None:
    environment = {**os.environ, RUN_DIR_VARIABLE: str(tmp_path)}
    process = spawn(["sleep", "1000"], start_new_session=True, env=environment)
    until(lambda: RUN_DIR_VARIABLE in procfs.environment(process.pid), "its environment, which comes after its exec")

    assert signals.sweep_run(None, str(tmp_path)) == (process.pid,)

    assert process.wait(30) == -signal.SIGKILL


def test_sweep_outruns_forking_session(tmp_path: Path, spawn: Spawn) -> None:
    source = """
import os, time
while True:
    if os.fork():
        os._exit(0)
    time.sleep(0.003)
"""
    leader = spawn(
        [sys.executable, "-I", "-S", "-c", source],
        start_new_session=True,
        env={**os.environ, RUN_DIR_VARIABLE: str(tmp_path)},
    )
    identity = identify(leader.pid)
    leader.wait(30)

    assert signals.sweep_run(identity, str(tmp_path))

    assert signals.sweep_run(identity, str(tmp_path)) == ()


def test_sweep_is_unaffected_by_unrelated_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    strangers, scans = list(range(1000, 1100)), 0

    def pids() -> list[int]:
        nonlocal scans
        scans += 1
        return list(strangers)

    def read_stat(pid: int) -> procfs.Stat | None:
        if pid == strangers[-1]:
            strangers.pop()
            return None
        return procfs.Stat(pid, "stranger", "S", 1, pid, 1)

    monkeypatch.setattr(procfs, "pids", pids)
    monkeypatch.setattr(procfs, "read_stat", read_stat)

    assert procfs.sweep(lambda stat: False) == ([], [])

    assert scans == 3, "those that two scans have seen are not looked at again"


def test_find_shim_finds_the_session_leader_of_a_folder_only(tmp_path: Path, spawn: Spawn) -> None:
    environment = {**os.environ, RUN_DIR_VARIABLE: str(tmp_path)}
    spawn(["sleep", "1000"], env=environment)
    assert find_shim(str(tmp_path)) is None

    leader = spawn(["sleep", "1000"], start_new_session=True, env=environment)
    found = None
    while found is None and leader.poll() is None:  # for an instant of its exec a process has no environment to read
        found = find_shim(str(tmp_path))

    assert found is not None and found.pid == leader.pid
