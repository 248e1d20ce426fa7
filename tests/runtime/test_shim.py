"""The supervisor as a real process: its gate, its record, its component, its end."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from areal.runtime import procfs, records
from areal.runtime.backends.base import HttpProbe, Phase, RestartPolicy
from areal.runtime.backends.local import LocalBackend
from areal.runtime.lifecycle import SHIM_PATH, fork_shim
from areal.runtime.shim import NOT_STARTED
from areal.runtime.shim.supervisor import describe_exit, out_of_memory_kills, spawn

from .support import (
    FORKING_COMPONENT,
    HTTP_COMPONENT,
    NEVER,
    alive,
    log_text,
    python,
    run_spec,
    until,
    until_phase,
)

FAST = RestartPolicy(initial_backoff_s=0.01, jitter=0.0, budget_count=3)


def folder(backend: LocalBackend, uid: str = "r1") -> Path:
    return Path(backend.store.folder(uid))


def test_gate_closed_without_go_exits_70_without_start(local: LocalBackend, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    life = local.store.create(run_spec(argv=("touch", str(marker)), cwd="/"))
    shim = fork_shim("r1", str(folder(local)), [life], os.environ)

    shim.close()

    assert shim.process.wait(30) == NOT_STARTED
    os.close(life)
    assert not marker.exists()
    assert not (folder(local) / records.ID).exists()


def test_gate_with_other_word_starts_nothing(local: LocalBackend) -> None:
    life = local.store.create(run_spec(cwd="/"))
    gate_read, gate_write = os.pipe()
    ack_read, ack_write = os.pipe()
    fds = (gate_read, ack_write, life)
    shim = subprocess.Popen([sys.executable, "-I", "-S", SHIM_PATH, str(folder(local)), *map(str, fds)], pass_fds=fds)

    os.write(gate_write, b"X")

    assert shim.wait(30) == NOT_STARTED
    for fd in (gate_read, gate_write, ack_read, ack_write, life):
        os.close(fd)


def test_exit_reason_names_processes_killed_by_oom() -> None:
    assert out_of_memory_kills() >= 0
    note = " (meanwhile the kernel killed a process of this machine for want of memory)"
    assert describe_exit(1 << 8, out_of_memory=True).reason == f"exited 1{note}", (
        "it may have been a worker of the engine"
    )
    assert describe_exit(signal.SIGKILL, out_of_memory=True).reason == f"killed by SIGKILL{note}"
    assert describe_exit(0, out_of_memory=True).reason == "exited 0"
    assert describe_exit(1 << 8).reason == "exited 1"


def test_shim_imports_only_light_modules() -> None:
    """Its start-up time is most of the time to start a process, and each replica pays for its memory."""
    program = (
        "import sys, runpy; sys.argv[1:] = []\n"
        f"sys.path.append({str(Path(SHIM_PATH).parents[3])!r})\n"
        "import areal.runtime.shim.supervisor, areal.runtime.shim.supervisor\n"
        "print(*sorted(sys.modules))"
    )
    output = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)

    heavy = {"dataclasses", "typing", "inspect", "subprocess", "pathlib", "socket", "threading", "random", "logging"}
    assert heavy.isdisjoint(output.stdout.split())
    ours = {name for name in output.stdout.split() if name.startswith("areal.") and ".runtime" not in name}
    assert ours <= {"areal.files", "areal.interrupt", "areal.lazy", "areal.proxies", "areal.wire", "areal.wire.notes"}


def test_record_names_shim_as_session_leader(local: LocalBackend) -> None:
    state = local.start(run_spec())

    record = json.loads((folder(local) / records.ID).read_text())

    assert record["pid"] == record["session_id"] == state.shim_pid
    assert record["pid"] != os.getsid(0)
    stat = procfs.read_stat(record["pid"])
    assert stat is not None and stat.start_ticks == record["start_ticks"]


def test_component_shares_session_but_not_process_group_of_shim(local: LocalBackend) -> None:
    state = local.start(run_spec())
    assert state.pid is not None

    assert os.getsid(state.pid) == state.shim_pid
    assert os.getpgid(state.pid) == state.pid


def test_component_killing_its_group_does_not_kill_shim(local: LocalBackend) -> None:
    local.start(run_spec(argv=python("import os, signal; os.killpg(0, signal.SIGKILL)"), restart=NEVER))

    state = until_phase(local, "r1", Phase.EXITED)

    assert state.last_exit is not None and state.last_exit.signal == signal.SIGKILL


def test_component_inherits_no_lease_and_default_signals(local: LocalBackend) -> None:
    ports = local.claim_ports(2, owner="Model/qwen")
    source = (
        "import os\n"
        "open_files = [f'/proc/self/fd/{fd}' for fd in os.listdir('/proc/self/fd') if int(fd) > 2]\n"
        "print([os.readlink(path) for path in open_files if os.path.lexists(path)])\n"
        "print([line for line in open('/proc/self/status') if line[:6] in ('SigIgn', 'SigBlk')])"
    )
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # as a script's background command begins
    try:
        local.start(run_spec(argv=python(source), ports=ports, restart=NEVER))
        until_phase(local, "r1", Phase.EXITED)
    finally:
        signal.signal(signal.SIGQUIT, before)

    text = log_text(local, "r1")

    assert "lease" not in text and "life.lock" not in text and "pipe:" not in text
    assert "SigBlk:\\t0000000000000000" in text
    ignored = int(text.split("SigIgn:\\t")[1][:16], 16)
    assert ignored & ~(1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)) == 0  # its own Python ignores these


def test_killed_shim_kills_component(local: LocalBackend) -> None:
    state = local.start(run_spec())
    assert state.shim_pid is not None and state.pid is not None

    os.kill(state.shim_pid, signal.SIGKILL)

    until(lambda: not alive(state.pid or 0), "the component to die with its shim")
    dead = local.observe()["r1"]
    assert (dead.phase, dead.reason) == (Phase.DEAD, "its supervisor died without a word")
    assert (dead.started_at, dead.pid) == (state.started_at, None)


def test_killed_shim_frees_its_leases(local: LocalBackend) -> None:
    ports = local.claim_ports(1, owner="Model/qwen")
    state = local.start(run_spec(ports=ports))
    assert state.shim_pid is not None and local.leases.is_held(f"port-{ports[0]}")

    os.kill(state.shim_pid, signal.SIGKILL)

    until(lambda: not local.leases.is_held(f"port-{ports[0]}"), "the kernel to free the lease")


def test_stop_after_killed_shim_sweeps_the_grandchildren(local: LocalBackend, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    state = local.start(run_spec(argv=python(FORKING_COMPONENT, str(pid_file), "wipe")))
    until(lambda: "forked" in log_text(local, "r1"), "the grandchild")
    grandchild = int(pid_file.read_text())
    assert state.shim_pid is not None
    os.kill(state.shim_pid, signal.SIGKILL)
    until(lambda: not alive(state.pid or 0), "the component to die")
    assert alive(grandchild)

    report = local.stop("r1")

    assert report.swept_pids == (grandchild,)
    assert not alive(grandchild)
    assert local.observe()["r1"].phase is Phase.EXITED


@pytest.mark.parametrize("how", [("wipe",), ("setsid",), ("setsid", "wipe")])
def test_stop_sweeps_renamed_grandchildren(local: LocalBackend, tmp_path: Path, how: tuple[str, ...]) -> None:
    pid_file = tmp_path / "pid"
    local.start(run_spec(argv=python(FORKING_COMPONENT, str(pid_file), *how)))
    until(lambda: "forked" in log_text(local, "r1"), "the grandchild")
    grandchild = int(pid_file.read_text())

    report = local.stop("r1")

    assert grandchild in report.swept_pids
    assert not alive(grandchild)


@pytest.mark.parametrize("how", [("wipe",), ("setsid", "wipe")])
def test_grandchild_is_swept_before_restart(local: LocalBackend, tmp_path: Path, how: tuple[str, ...]) -> None:
    pid_file = tmp_path / "pid"
    state = local.start(run_spec(argv=python(FORKING_COMPONENT, str(pid_file), *how)))
    until(lambda: "forked" in log_text(local, "r1"), "the grandchild")
    grandchild = int(pid_file.read_text())

    os.kill(state.pid or 0, signal.SIGKILL)

    until(lambda: not alive(grandchild), "the grandchild to be swept before the next start")


def test_nested_supervisor_outlives_its_starting_component(local: LocalBackend, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    argv = python(FORKING_COMPONENT, str(pid_file), "setsid", "another")
    state = local.start(run_spec(argv=argv, restart=FAST))
    until(lambda: "forked" in log_text(local, "r1"), "the grandchild")
    first = int(pid_file.read_text())
    pid_file.unlink()
    os.kill(state.pid or 0, signal.SIGKILL)
    until(lambda: log_text(local, "r1").count("forked") == 2, "the component to start again")
    second = int(pid_file.read_text())

    report = local.stop("r1")

    assert not {first, second} & set(report.swept_pids)
    for grandchild in (first, second):
        assert alive(grandchild)
        os.kill(grandchild, signal.SIGKILL)
    until(lambda: not alive(first) and not alive(second), "both to be gone")


def test_failing_component_restarts_until_budget_is_spent(local: LocalBackend) -> None:
    ports = local.claim_ports(1, owner="Model/qwen")
    local.start(run_spec(argv=("sh", "-c", "echo try; exit 4"), restart=FAST, ports=ports))

    state = until_phase(local, "r1", Phase.CRASHLOOP)

    assert state.restarts == 3
    assert state.reason == "3 restarts within 1800 s were not enough: exited 4"
    assert log_text(local, "r1").count("try\n") == 4
    assert not local.leases.is_held(f"port-{ports[0]}")


def test_never_healthy_component_is_given_up_despite_slow_starts(local: LocalBackend) -> None:
    (port,) = local.claim_ports(1, owner="Model/qwen")
    apart = replace(FAST, budget_window_s=0.001)  # as starts of minutes are for a window of half an hour
    argv = ("sh", "-c", "echo 'ValueError: no weights'; exit 4")
    probe = HttpProbe(f"http://127.0.0.1:{port}/health", 10.0, 5.0, 6)
    local.start(run_spec(argv=argv, restart=apart, ports=(port,), liveness=probe))

    state = until_phase(local, "r1", Phase.CRASHLOOP)

    assert state.restarts == 3
    assert state.reason == "4 starts in a row ended before it was healthy: exited 4"
    assert state.last_exit is not None and state.last_exit.line == "ValueError: no weights"


@pytest.mark.parametrize(("code", "line"), [(4, "error: no such reward (r.py:3)"), (0, "")])
def test_exit_record_has_error_line_of_log(local: LocalBackend, code: int, line: str) -> None:
    text = "echo loading; echo 'error: no such reward (r.py:3)'"
    local.start(run_spec(argv=("sh", "-c", f"{text}; exit {code}"), restart=RestartPolicy("Never")))

    last = until_phase(local, "r1", Phase.EXITED).last_exit

    assert last is not None and (last.code, last.line) == (code, line)


def test_exit_record_has_no_line_of_earlier_start(local: LocalBackend) -> None:
    argv = ("sh", "-c", "[ $AREAL_ATTEMPT = 1 ] && echo 'ValueError: the first' && exit 4; kill -9 $$")
    local.start(run_spec(argv=argv, restart=replace(FAST, budget_count=1)))

    last = until_phase(local, "r1", Phase.CRASHLOOP).last_exit

    assert last is not None and (last.signal, last.line) == (signal.SIGKILL, "")


def test_kick_renews_the_budget(local: LocalBackend) -> None:
    slow_last = RestartPolicy(initial_backoff_s=1000, jitter=0.0, budget_count=2)
    local.start(run_spec(argv=("false",), restart=slow_last))
    for restarts in (1, 3, 5):  # each time one at once, and the one that is asked for
        until(lambda n=restarts: local.observe()["r1"].restarts == n, "the start at once")  # type: ignore[misc]
        until_phase(local, "r1", Phase.BACKOFF)
        local.kick("r1")

    until(lambda: local.observe()["r1"].restarts == 7, "the start at once")
    assert until_phase(local, "r1", Phase.BACKOFF).restarts == 7


@pytest.mark.parametrize(("code", "phase", "restarts"), [(0, Phase.EXITED, 0), (1, Phase.BACKOFF, 1)])
def test_on_failure_restarts_only_failures(local: LocalBackend, code: int, phase: Phase, restarts: int) -> None:
    local.start(run_spec(argv=("sh", "-c", f"exit {code}"), restart=RestartPolicy("OnFailure")))

    until(lambda: (state := local.observe()["r1"]).phase is phase and state.restarts == restarts, "its end")


def test_failed_liveness_probe_restarts_hanging_component(local: LocalBackend, tmp_path: Path) -> None:
    hang = tmp_path / "hang"
    (port,) = local.claim_ports(1, owner="Model/qwen")
    url = f"http://127.0.0.1:{port}/health"
    probe = HttpProbe(url, period_s=0.05, timeout_s=1.0, failure_threshold=2)
    argv = (sys.executable, "-c", HTTP_COMPONENT, str(port), str(hang))
    first = local.start(run_spec(argv=argv, ports=(port,), liveness=probe, stop_grace_s=0.2))
    until(lambda: log_text(local, "r1").count("asked") >= 2, "the shim to have been answered once")

    hang.touch()
    state = until(lambda: found if (found := local.observe()["r1"]).restarts else None, "the next start")

    assert state.last_exit is not None and state.last_exit.reason == "liveness probe failed"
    assert not alive(first.pid or 0)


def test_liveness_probe_ignores_component_before_first_answer(local: LocalBackend) -> None:
    (port,) = local.claim_ports(1, owner="Model/qwen")
    probe = HttpProbe(f"http://127.0.0.1:{port}/health", period_s=0.01, timeout_s=0.05, failure_threshold=1)
    argv = python(
        "import time; print('loading', flush=True); time.sleep(0.5); print('loaded', flush=True); time.sleep(99)"
    )

    started = local.start(run_spec(argv=argv, ports=(port,), liveness=probe))
    until(lambda: "loaded" in log_text(local, "r1"), "many probes to have failed")

    assert local.observe()["r1"] == started


def test_stage_is_read_and_cleared_on_restart(local: LocalBackend) -> None:
    source = """
import json, os, time
if not os.path.exists(os.environ["AREAL_STAGE_FILE"] + ".seen"):
    open(os.environ["AREAL_STAGE_FILE"] + ".seen", "w").close()
    with open(os.environ["AREAL_STAGE_FILE"], "w") as file:
        json.dump({"stage": "loading weights", "done": 3, "total": 7}, file)
time.sleep(1000)
"""
    state = local.start(run_spec(argv=python(source)))
    stage = until(lambda: local.stage("r1"), "the stage")
    assert (stage.stage, stage.done, stage.total) == ("loading weights", 3, 7)

    os.kill(state.pid or 0, signal.SIGKILL)
    until(lambda: local.observe()["r1"].restarts, "the next start")

    assert local.stage("r1") is None


def test_secret_file_is_private_and_removed_at_end(local: LocalBackend) -> None:
    state = local.start(run_spec(secret_env={"API_KEY": "hush"}))
    secret = folder(local) / records.SECRET
    assert secret.stat().st_mode & 0o777 == 0o600
    assert b"hush" not in (folder(local) / records.INTENT).read_bytes()
    assert b"hush" not in Path(f"/proc/{state.shim_pid}/cmdline").read_bytes()
    assert "hush" not in procfs.environment(state.shim_pid or 0).values()

    local.stop("r1")

    assert not secret.exists()


def test_oversized_output_is_rotated_and_bounded(local: LocalBackend) -> None:
    lines = "".join(f"line {number:04d}\n" for number in range(1000))
    argv = python(f"import sys; sys.stdout.write({lines!r})")

    local.start(run_spec(argv=argv, restart=NEVER, log_max_bytes=1000, log_files=3))
    until_phase(local, "r1", Phase.EXITED)
    paths = local.log_paths("r1")

    assert [Path(path).name for path in paths] == ["current.log.2", "current.log.1", "current.log"]
    assert all(Path(path).stat().st_size <= 1000 for path in paths)
    kept = [line for line in log_text(local, "r1").splitlines() if line.startswith("line")]
    assert kept[-1] == "line 0999"
    assert kept == [f"line {number:04d}" for number in range(1000 - len(kept), 1000)]


def test_stop_of_a_frozen_shim_ends_everything(local: LocalBackend) -> None:
    state = local.start(run_spec())
    os.kill(state.shim_pid or 0, signal.SIGSTOP)

    report = local.stop("r1")

    assert report.was_alive
    assert not alive(state.pid or 0) and not alive(state.shim_pid or 0)


def test_later_stop_with_shorter_grace_takes_precedence(local: LocalBackend) -> None:
    source = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    )
    state = local.start(run_spec(argv=python(source), stop_grace_s=1000))
    until(lambda: "up" in log_text(local, "r1"), "the component to ignore SIGTERM")
    os.kill(state.shim_pid or 0, signal.SIGTERM)

    local.stop("r1", grace_s=0)

    assert not alive(state.pid or 0)


def test_stop_with_a_full_disk_still_ends_the_process(local: LocalBackend) -> None:
    state = local.start(run_spec())
    stop_file = folder(local) / records.STOP
    stop_file.mkdir()  # a rename over it fails, as on a full or read-only disk

    local.stop("r1")

    assert not alive(state.pid or 0)


@contextmanager
def full_disk(pid: int) -> Iterator[None]:
    """``RLIMIT_FSIZE`` stands for it: the process's writes to files fail."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, -1))
    yield
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


UNTIL_TOLD = 'until [ -e "$0" ]; do sleep 0.01; done'


def test_exit_on_full_disk_is_recorded_later(local: LocalBackend, tmp_path: Path) -> None:
    done, marker = tmp_path / "done", tmp_path / "ended"
    argv = ("sh", "-c", UNTIL_TOLD, str(done))
    state = local.start(run_spec(argv=argv, restart=NEVER, on_end=("touch", str(marker))))
    with full_disk(state.shim_pid or 0):
        done.touch()
        until(lambda: procfs.read_stat(state.pid or 0) is None, "the component to end")
        os.kill(state.shim_pid or 0, signal.SIGUSR1)  # starts nothing any more
        assert local.observe()["r1"].phase is Phase.BACKOFF, "not lost"

    ended = until_phase(local, "r1", Phase.EXITED, Phase.DEAD)

    assert ended.phase is Phase.EXITED and ended.last_exit is not None and ended.last_exit.code == 0
    until(marker.exists, "the command of its end")


def test_run_ended_on_full_disk_is_stopped_at_once(local: LocalBackend, tmp_path: Path) -> None:
    done, marker = tmp_path / "done", tmp_path / "ended"
    argv = ("sh", "-c", UNTIL_TOLD, str(done))
    state = local.start(run_spec(argv=argv, restart=NEVER, on_end=("touch", str(marker)), stop_grace_s=1000.0))
    with full_disk(state.shim_pid or 0):
        done.touch()
        until(lambda: procfs.read_stat(state.pid or 0) is None, "the component to end")

        report = local.stop("r1")

    assert report.was_alive
    assert not alive(state.shim_pid or 0)
    assert (local.observe()["r1"].phase, marker.exists()) == (Phase.EXITED, False)


def test_restart_on_full_disk_is_recorded_later(local: LocalBackend) -> None:
    state = local.start(run_spec(restart=FAST))
    with full_disk(state.shim_pid or 0):
        os.kill(state.pid or 0, signal.SIGKILL)
        until(lambda: {*children(state.shim_pid or 0)} - {state.pid}, "the next start")
        assert local.observe()["r1"].phase is Phase.BACKOFF

    again = until_phase(local, "r1", Phase.RUNNING)

    assert (again.restarts, again.pid) == (1, children(state.shim_pid or 0)[0])
    assert again.last_exit is not None and again.last_exit.signal == signal.SIGKILL


def children(pid: int) -> list[int]:
    return [stat.pid for stat in procfs.processes() if stat.ppid == pid]


def test_component_bypasses_proxy_for_loopback_and_no_proxy(
    local: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import http.server, os, threading, urllib.request

class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"own page")

server = http.server.HTTPServer(("127.0.0.1", 0), Page)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=10).read().decode())
print(os.environ["NO_PROXY"], os.environ["no_proxy"])
"""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "intranet.example, localhost")
    local.start(run_spec(argv=python(program), restart=NEVER))

    until_phase(local, "r1", Phase.EXITED)

    assert "own page" in log_text(local, "r1")
    listed = "intranet.example,localhost,127.0.0.1,::1"
    assert f"{listed} {listed}" in log_text(local, "r1")


def test_component_keeps_wildcard_no_proxy(local: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    local.start(
        run_spec(argv=python("import os; print(os.environ['NO_PROXY'] + os.environ['no_proxy'])"), restart=NEVER)
    )

    until_phase(local, "r1", Phase.EXITED)

    assert "**" in log_text(local, "r1")


def test_failed_fork_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as machine, pytest.raises(BlockingIOError):
        machine.setattr(os, "fork", refuse)
        spawn(("true",), {}, "/", 1)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
