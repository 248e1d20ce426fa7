"""Ready means our own component, on its own port, answering; a death while it starts is told at once."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from areal.errors import NotFound, TargetFailed, TimedOut
from areal.runtime.backends.base import Phase, RestartPolicy, RunSpec
from areal.runtime.backends.local import LocalBackend
from areal.runtime.leases import port_owner
from areal.runtime.probes import wait_ready

from .conftest import Spawn
from .support import HTTP_COMPONENT, NEVER, python, run_spec, until


def served(local: LocalBackend, uid: str = "r1", **changes: object) -> RunSpec:
    (port,) = local.claim_ports(1, owner="Model/qwen")
    argv = (sys.executable, "-c", HTTP_COMPONENT, str(port))
    return run_spec(uid, argv=argv, ports=(port,), url=f"http://127.0.0.1:{port}", **changes)


def test_wait_ready_returns_when_the_component_answers(local: LocalBackend) -> None:
    started = local.start(served(local))
    waits: list[float] = []

    state = wait_ready(local, "r1", timeout_s=30, on_wait=lambda state, elapsed_s: waits.append(elapsed_s))

    assert state == started
    assert waits == sorted(waits)


def test_wait_ready_of_a_run_without_url_needs_only_its_life(local: LocalBackend) -> None:
    local.start(run_spec())

    assert wait_ready(local, "r1", timeout_s=30).phase is Phase.RUNNING


def test_wait_ready_of_a_component_that_dies_fails_at_once_and_quotes_it(local: LocalBackend) -> None:
    local.start(served(local))
    local.stop("r1")
    spec = run_spec(
        "r2",
        argv=python("print('loading'); raise ValueError('no such model')"),
        url="http://127.0.0.1:9",
    )
    local.start(spec)

    with pytest.raises(TargetFailed) as caught:
        wait_ready(local, "r2", timeout_s=1000)

    assert caught.value.message == "Model/qwen: engine[0] failed: exited 1"
    assert "ValueError: no such model" in (caught.value.detail or "")
    assert caught.value.hint == "areal logs Model/qwen -c engine -r 0"


def test_wait_ready_tolerates_as_many_restarts_as_it_is_told(local: LocalBackend, tmp_path: Path) -> None:
    flaky = f"import os, sys\nif not os.path.exists({str(tmp_path / 'once')!r}):\n"
    flaky += f"    open({str(tmp_path / 'once')!r}, 'w').close(); sys.exit(1)\n"
    spec = served(local, restart=RestartPolicy(initial_backoff_s=0.01))
    argv = (spec.argv[0], "-c", flaky + HTTP_COMPONENT, *spec.argv[3:])
    local.start(RunSpec(**{**spec.__dict__, "argv": argv}))

    assert wait_ready(local, "r1", timeout_s=30, tolerated_restarts=1).restarts == 1


def test_wait_ready_past_the_deadline_says_what_is_missing(local: LocalBackend) -> None:
    local.start(served(local))
    wait_ready(local, "r1", timeout_s=30)

    with pytest.raises(TimedOut, match="/missing answers 404"):
        wait_ready(local, "r1", path="/missing", timeout_s=0.05)


@pytest.fixture
def impostor(local: LocalBackend, spawn: Spawn) -> str:
    """Somebody else's server: its URL."""
    (port,) = local.claim_ports(1, owner="Model/other")
    spawn([sys.executable, "-c", HTTP_COMPONENT, str(port)], stdout=subprocess.DEVNULL)
    until(lambda: port_owner(port), "the impostor to listen")
    return f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("path", "why"),
    [("/ready", r"another process \(pid \d+\) still answers on its port"), ("/plain", r"port \d+ belongs to pid \d+")],
)
def test_wait_ready_takes_nobody_elses_answer(local: LocalBackend, impostor: str, path: str, why: str) -> None:
    local.start(run_spec(url=impostor))

    with pytest.raises(TimedOut, match=why):
        wait_ready(local, "r1", path=path, timeout_s=0.2)


def test_wait_ready_accepts_an_answer_that_names_no_pid_on_the_own_port(local: LocalBackend) -> None:
    local.start(served(local))

    assert wait_ready(local, "r1", path="/plain", timeout_s=30).phase is Phase.RUNNING


def test_wait_ready_of_a_stopped_run_fails(local: LocalBackend) -> None:
    local.start(run_spec(restart=NEVER))
    local.stop("r1")

    with pytest.raises(TargetFailed):
        wait_ready(local, "r1", timeout_s=1000)
    with pytest.raises(NotFound):
        wait_ready(local, "nobody", timeout_s=1000)


def test_wait_ready_stops_when_interrupted(local: LocalBackend) -> None:
    local.start(run_spec(url="http://127.0.0.1:9"))
    interrupted = threading.Event()
    interrupted.set()

    with pytest.raises(KeyboardInterrupt):
        wait_ready(local, "r1", timeout_s=1000, interrupted=interrupted)
