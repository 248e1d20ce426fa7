"""A run does not depend on the shell that started it: its signals, limits, mask of modes, folder and variables."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from areal.runtime.backends.base import Phase, RestartPolicy, RunState
from areal.runtime.backends.local import LocalBackend

from .support import NEVER, python, run_spec, until, until_phase

AT_ONCE = RestartPolicy("Always", 0.01, jitter=0.0)
REPORT = """
import json, os, resource, signal, sys
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
ignored = [n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN]
mask = os.umask(0)
print(json.dumps({
    "cwd": os.getcwd(), "blocked": len(blocked), "ignored": sorted(map(int, ignored)), "umask": mask,
    "fsize": resource.getrlimit(resource.RLIMIT_FSIZE), "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    "fds": sorted(map(int, os.listdir("/proc/self/fd"))), "tmp": os.environ.get("TMPDIR"),
    "inspect": os.environ.get("PYTHONINSPECT"), "safe": sys.flags.safe_path,
}), flush=True)
signal.pause()
"""


def report(local: LocalBackend, uid: str, start: int = 0) -> dict[str, Any]:
    """What the component's start of this number says about itself."""

    def lines() -> list[str]:
        text = "".join(Path(path).read_text() for path in local.log_paths(uid))
        return [line for line in text.splitlines() if line.startswith("{")]

    return dict(json.loads(until(lambda: lines()[start:], f"report {start} of {uid}")[0]))


@contextmanager
def hostile_shell() -> Iterator[None]:
    """Signals blocked and ignored, no mask of modes, a small limit of files and of their size."""
    files, size = resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1})
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGUSR2, signal.SIGTTOU)}
    mask = os.umask(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, files[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, size[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        resource.setrlimit(resource.RLIMIT_FSIZE, size)
        os.umask(mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_own_component_starts_with_default_signals_and_limits(local: LocalBackend) -> None:
    with hostile_shell():
        local.start(run_spec(argv=python(REPORT), restart=NEVER))

    found = report(local, "r1")
    assert found["blocked"] == 0
    assert set(found["ignored"]) <= {signal.SIGPIPE, signal.SIGXFSZ}  # its own interpreter's
    assert found["umask"] == 0o077
    assert found["fsize"][0] == found["fsize"][1] and found["files"] > 256
    assert found["fds"] == [0, 1, 2, 3]  # 3: the listing's own
    assert local.stop("r1", grace_s=5).was_alive  # a blocked SIGTERM would leave it to SIGKILL
    assert local.observe(["r1"])["r1"].reason == "stopped"


def test_user_program_keeps_callers_limits_and_modes(local: LocalBackend, tmp_path: Path) -> None:
    with hostile_shell():
        local.start(run_spec(argv=python(REPORT), cwd=str(tmp_path), restart=NEVER))

    found = report(local, "r1")
    assert (found["cwd"], found["umask"], found["fsize"][0], found["files"]) == (str(tmp_path), 0, 1 << 20, 256)
    assert found["blocked"] == 0


def test_own_component_restarts_after_callers_folder_is_deleted(
    local: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "tmp").mkdir(parents=True)
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("TMPDIR", str(checkout / "tmp"))
    monkeypatch.setenv("PYTHONINSPECT", "1")
    local.start(run_spec(argv=(sys.executable, "-S", "-c", REPORT), restart=AT_ONCE))
    first = report(local, "r1")
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(checkout)

    pid = until_phase(local, "r1", Phase.RUNNING).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    again = report(local, "r1", start=1)
    assert first["cwd"] == again["cwd"] == local.store.folder("r1")
    assert (first["tmp"], again["tmp"]) == (str(checkout / "tmp"), None)
    assert first["inspect"] is None and again["inspect"] is None


def test_missing_working_folder_is_named_as_cause(local: LocalBackend, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    local.start(run_spec(argv=python(REPORT), cwd=str(folder), restart=RestartPolicy("Always", 60.0)))
    pid = until_phase(local, "r1", Phase.RUNNING).pid
    assert pid is not None
    folder.rename(tmp_path / "away")
    os.kill(pid, signal.SIGKILL)
    until_phase(local, "r1", Phase.BACKOFF)
    local.kick("r1")

    state = until(
        lambda: (found := local.observe(["r1"])["r1"]).restarts and found.phase is Phase.BACKOFF and found, "a restart"
    )
    assert (
        isinstance(state, RunState) and state.death == f"there is no working folder {folder}: No such file or directory"
    )
