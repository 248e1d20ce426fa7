"""What every backend must do. A new backend joins by a fixture that opens it, named in ``BACKENDS``."""

from __future__ import annotations

import os
import signal

import pytest

from areal.errors import Conflict, NotFound
from areal.runtime.backends.base import Backend, Phase, RestartPolicy, RunSpec, RunState, StopReport

from .support import NEVER, alive, kill_until_backoff, log_text, python, run_spec, until, until_phase

CLUSTERS = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("ray", "slurm")]
BACKENDS = ["local", "second", "remote", *CLUSTERS]


def started(backend: Backend, spec: RunSpec) -> RunState:
    """Start it, and wait until its component runs: a scheduler has to place it first."""
    first = backend.start(spec)
    assert first.phase in (Phase.QUEUED, Phase.STARTING, Phase.RUNNING), first
    return until_phase(backend, spec.uid, Phase.RUNNING)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    made: Backend = request.getfixturevalue(request.param)
    return made


def test_start_returns_a_running_process_with_a_record(backend: Backend) -> None:
    state = started(backend, run_spec("r1"))

    assert state.pid is not None and alive(state.pid)
    assert backend.observe()["r1"] == state


def test_start_calls_on_pid_once_before_anything_runs(backend: Backend) -> None:
    seen: list[tuple[int, Phase]] = []

    def on_pid(pid: int) -> None:
        seen.append((pid, backend.observe(["r1"])["r1"].phase))

    state = backend.start(run_spec("r1"), on_pid=on_pid)

    assert seen == [(state.shim_pid or 0, Phase.INTENDED)]


def test_start_with_failing_on_pid_leaves_no_run(backend: Backend) -> None:
    def on_pid(pid: int) -> None:
        raise OSError("the journal is full")

    with pytest.raises(OSError, match="the journal is full"):
        backend.start(run_spec("r1"), on_pid=on_pid)

    assert backend.observe() == {}


def test_start_of_used_uid_is_refused_without_change(backend: Backend) -> None:
    first = started(backend, run_spec("r1"))

    with pytest.raises(Conflict, match="exists already"):
        backend.start(run_spec("r1"))

    assert backend.observe()["r1"] == first


def test_start_passes_environment_and_folder(backend: Backend, tmp_path: os.PathLike[str]) -> None:
    spec = run_spec(
        argv=("sh", "-c", "echo $PLAIN $SECRET $AREAL_RUN_UID; pwd"),
        env={"PLAIN": "plain"},
        secret_env={"SECRET": "hush"},
        cwd=str(tmp_path),
        restart=NEVER,
    )

    backend.start(spec)
    until_phase(backend, "r1", Phase.EXITED)

    assert f"plain hush r1\n{tmp_path}\n" in log_text(backend, "r1")


def test_start_passes_configuration_as_file(backend: Backend) -> None:
    spec = run_spec(
        argv=("sh", "-c", 'echo "$1"; cat "$2"', "sh"), config={"router_url": "r", "relays": 2}, restart=NEVER
    )

    state = backend.start(spec)
    until_phase(backend, "r1", Phase.EXITED)

    assert '--config\n{"router_url":"r","relays":2}' in log_text(backend, "r1")
    assert state.spec.config == spec.config


def test_start_keeps_secrets_out_of_the_observed_spec(backend: Backend) -> None:
    state = backend.start(run_spec(secret_env={"SECRET": "hush"}))

    assert "hush" not in repr(state) + repr(backend.observe())


def test_observe_returns_spec_as_started(backend: Backend) -> None:
    spec = run_spec(
        spec={"path": "Qwen/Qwen3-0.6B", "engineArgs": {"x": [1, 2]}},
        inputs={"router": "http://127.0.0.1:1"},
        env={"A": "b"},
        cwd="/",
        generation=7,
        url="http://127.0.0.1:9",
        restart=RestartPolicy(budget_count=2, success_exit_codes=(0, 3)),
    )

    backend.start(spec)

    assert backend.observe()["r1"].spec == spec


def test_observe_of_unknown_uids_is_empty(backend: Backend) -> None:
    assert backend.observe() == {}
    assert backend.observe(["absent"]) == {}


def test_observe_after_exit_reports_status_and_reason(backend: Backend) -> None:
    backend.start(run_spec(argv=("sh", "-c", "exit 3"), restart=NEVER))

    state = until_phase(backend, "r1", Phase.EXITED)

    assert state.last_exit is not None
    assert (state.last_exit.code, state.last_exit.signal, state.last_exit.reason) == (3, None, "exited 3")


def test_observe_after_kill_reports_signal_and_backoff(backend: Backend) -> None:
    started(backend, run_spec())

    state = kill_until_backoff(lambda: backend.observe(["r1"])["r1"])

    assert state.last_exit is not None
    assert (state.last_exit.code, state.last_exit.signal) == (None, signal.SIGKILL)
    assert state.pid is None


def test_observe_reports_missing_program(backend: Backend) -> None:
    state = backend.start(run_spec(argv=("/no/such/program",), restart=NEVER))

    state = until_phase(backend, "r1", Phase.EXITED)

    assert state.last_exit is not None
    assert "cannot start /no/such/program" in state.last_exit.reason


def test_kick_in_backoff_restarts_component_at_once(backend: Backend) -> None:
    run = started(backend, run_spec())
    kill_until_backoff(lambda: backend.observe(["r1"])["r1"])

    backend.kick("r1")
    state = until_phase(backend, "r1", Phase.RUNNING)

    assert state.restarts == 2
    assert state.pid != run.pid


def test_kick_while_running_changes_nothing(backend: Backend) -> None:
    run = started(backend, run_spec())

    backend.kick("r1")
    backend.kick("r1")

    assert backend.observe()["r1"] == run


def test_kick_of_an_ended_run_is_refused(backend: Backend) -> None:
    started(backend, run_spec())
    backend.stop("r1")

    with pytest.raises(Conflict, match="has ended"):
        backend.kick("r1")
    with pytest.raises(NotFound):
        backend.kick("absent")


def test_stop_ends_component_and_reports_was_alive(backend: Backend) -> None:
    run = started(backend, run_spec())
    assert run.pid is not None and run.shim_pid is not None

    report = backend.stop("r1")

    assert report == StopReport("r1", was_alive=True)
    assert not alive(run.pid) and not alive(run.shim_pid)
    state = backend.observe()["r1"]
    assert (state.phase, state.reason) == (Phase.EXITED, "stopped")


def test_stop_is_idempotent_without_process(backend: Backend) -> None:
    started(backend, run_spec())
    backend.stop("r1")

    assert backend.stop("r1") == StopReport("r1", was_alive=False)
    assert backend.stop("absent") == StopReport("absent", was_alive=False)


def test_stop_kills_component_ignoring_sigterm_after_grace(backend: Backend) -> None:
    source = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    )
    run = started(backend, run_spec(argv=python(source)))
    until(lambda: "up" in log_text(backend, "r1"), "the component to ignore SIGTERM")

    backend.stop("r1", grace_s=0.1)

    assert run.pid is not None and not alive(run.pid)
    last_exit = backend.observe()["r1"].last_exit
    assert last_exit is not None and last_exit.signal == signal.SIGKILL


def test_stop_lets_a_component_finish_its_work(backend: Backend) -> None:
    source = (
        "import os, signal\n"
        "def finish(*_): os.write(1, b'drained'); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, finish); print('up', flush=True); signal.pause()"
    )
    backend.start(run_spec(argv=python(source)))
    until(lambda: "up" in log_text(backend, "r1"), "the component to be up")

    backend.stop("r1")

    assert "drained" in log_text(backend, "r1")


def test_stop_in_backoff_ends_the_run(backend: Backend) -> None:
    backend.start(run_spec(argv=("false",)))
    until_phase(backend, "r1", Phase.BACKOFF)

    assert backend.stop("r1").was_alive

    assert backend.observe()["r1"].phase is Phase.EXITED


def test_forget_of_an_ended_run_deletes_it(backend: Backend) -> None:
    started(backend, run_spec())
    backend.stop("r1")

    backend.forget("r1")
    backend.forget("r1")

    assert backend.observe() == {}
    assert backend.log_paths("r1") == ()


@pytest.mark.parametrize("argv", [("sleep", "1000"), ("false",)])
def test_forget_of_a_living_run_is_refused(backend: Backend, argv: tuple[str, ...]) -> None:
    backend.start(run_spec(argv=argv))

    with pytest.raises(Conflict, match="alive"):
        backend.forget("r1")

    assert "r1" in backend.observe()


def test_log_paths_hold_the_output_of_the_component(backend: Backend) -> None:
    backend.start(run_spec(argv=("sh", "-c", "echo out; echo err >&2"), restart=NEVER))
    until_phase(backend, "r1", Phase.EXITED)

    text = log_text(backend, "r1")

    assert "out\nerr\n" in text


def test_claim_ports_prefers_old_ports_and_never_repeats(backend: Backend) -> None:
    first = backend.claim_ports(3, owner="Model/a")
    second = backend.claim_ports(3, owner="Model/a", prefer=first)

    assert len({*first, *second}) == 6


def test_claim_ports_after_run_ended_returns_same_ports(backend: Backend) -> None:
    ports = backend.claim_ports(2, owner="Model/a")
    backend.start(run_spec(ports=ports))
    backend.stop("r1")

    assert backend.claim_ports(2, owner="Model/a", prefer=ports) == ports


def test_runs_started_from_threads_all_exist(backend: Backend) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def start(number: int) -> RunState:
        ports = backend.claim_ports(1, owner=f"Model/m{number}")
        return started(backend, run_spec(f"r{number}", ports=ports))

    with ThreadPoolExecutor(4) as pool:
        states = list(pool.map(start, range(8)))

    assert {state.phase for state in states} == {Phase.RUNNING}
    assert len({port for state in states for port in state.spec.ports}) == 8
    assert set(backend.observe()) == {f"r{number}" for number in range(8)}
