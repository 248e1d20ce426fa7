from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from areal.runtime import procfs
from areal.runtime.runs import Liveness, ProcessIdentity, identify, liveness, where


@pytest.fixture
def me() -> ProcessIdentity:
    return identify(os.getpid())


def test_liveness_of_a_living_process_is_alive(me: ProcessIdentity) -> None:
    assert liveness(me) is Liveness.ALIVE


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("start_ticks", 1, Liveness.DEAD),  # the pid was given to another process
        ("boot_id", "another boot", Liveness.DEAD),
        ("machine_id", "another machine", Liveness.UNKNOWN),
        ("pid_namespace", "pid:[1]", Liveness.UNKNOWN),
    ],
)
def test_liveness_with_one_field_changed_is_what_can_be_proved(
    me: ProcessIdentity, field: str, value: object, expected: Liveness
) -> None:
    assert liveness(dataclasses.replace(me, **{field: value})) is expected  # type: ignore[arg-type]


def test_liveness_on_another_machine_is_unknown_whatever_the_boot(me: ProcessIdentity) -> None:
    elsewhere = dataclasses.replace(me, machine_id="another machine", boot_id="another boot", pid=2**22)

    assert liveness(elsewhere) is Liveness.UNKNOWN
    assert "another machine" in where(elsewhere)


def test_liveness_of_a_zombie_is_dead() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    identity = identify(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead and not reaped

    assert procfs.read_stat(process.pid) is not None
    assert liveness(identity) is Liveness.DEAD
    process.wait()
    assert liveness(identity) is Liveness.DEAD


def test_identify_of_nobody_raises() -> None:
    process = subprocess.Popen(["true"])
    process.wait()

    with pytest.raises(ProcessLookupError):
        identify(process.pid)


def test_identity_survives_its_record(me: ProcessIdentity) -> None:
    assert ProcessIdentity.from_record(dataclasses.asdict(me)) == me


@pytest.mark.parametrize("record", [{}, {"pid": "x"}, {"machine_id": "m", "boot_id": "b", "pid_namespace": "n"}])
def test_identity_from_a_damaged_record_raises(record: dict[str, object]) -> None:
    with pytest.raises((KeyError, ValueError, TypeError)):
        ProcessIdentity.from_record(record)


@pytest.mark.parametrize("name", ["a b", "a) R 1 1 1 (x", "(((", "VLLM::EngineCor"])
def test_stat_of_a_process_with_an_odd_name_is_read(name: str) -> None:
    source = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)\n"
        "print('named', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()

    stat = procfs.read_stat(process.pid)

    assert stat is not None
    assert (stat.comm, stat.ppid, stat.session) == (name[:15], os.getpid(), os.getsid(0))
    process.communicate()
