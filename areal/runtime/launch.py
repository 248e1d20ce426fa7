"""Start a shim behind its gate.

    caller                                     shim
    fork, exec with a gate and an ack pipe --> imports, then blocks on the gate
    on_pid (the caller journals the pid)
    write "G"                              --> id.json, component, child.json
    read the ack                           <-- "A"

A caller that dies before the "G" closes the gate: the shim leaves with status 70 and nothing was started. One that
dies after it leaves a complete record.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from areal.errors import ArealError, TimedOut
from areal.runtime import records
from areal.runtime.shim import ACK, GO
from areal.runtime.sweep import RUN_DIR_VARIABLE, RUN_UID_VARIABLE

SHIM_PATH = str(Path(__file__).with_name("shim") / "__main__.py")
_ACK_TIMEOUT_S = 60.0
_NOT_INHERITED = ("AREAL_CRASH_AT",)


class Shim:
    """A shim between fork and ack. ``process`` is kept so that a long-lived caller can reap it."""

    def __init__(self, uid: str, run_dir: str, process: subprocess.Popen[bytes], gate: int, ack: int) -> None:
        self.uid = uid
        self.run_dir = run_dir
        self.process = process
        self._gate = gate
        self._ack = ack

    def go(self) -> None:
        with suppress(BrokenPipeError):  # it is dead already: the ack will say so
            os.write(self._gate, GO)
        self._close_gate()

    def close(self) -> None:
        """Let go of the pipes, at any time. A shim that was not told to go leaves by itself."""
        self._close_gate()
        self._close_ack()

    def wait_ack(self, timeout_s: float = _ACK_TIMEOUT_S) -> None:
        """Return once the shim has recorded itself and started the component."""
        try:
            answer = self._read_ack(timeout_s)
        finally:
            self._close_ack()
        if answer == ACK:
            return
        code = self.process.wait(10)
        raise ArealError(
            f"the supervisor of run {self.uid} failed to start (exit {code})",
            detail=_read_text(f"{self.run_dir}/{records.LOG_FOLDER}/{records.SHIM_LOG}"),
            hint="free space, or check the file modes of the home folder",
        )

    def _read_ack(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._ack, select.POLLIN)
        while not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            if time.monotonic() >= deadline:
                raise TimedOut(f"the supervisor of run {self.uid} did not start within {timeout_s:g} s")
        return os.read(self._ack, 1)

    def _close_gate(self) -> None:
        if self._gate >= 0:
            os.close(self._gate)
            self._gate = -1

    def _close_ack(self) -> None:
        if self._ack >= 0:
            os.close(self._ack)
            self._ack = -1


def fork_shim(uid: str, run_dir: str, held_fds: Sequence[int], environment: Mapping[str, str]) -> Shim:
    """A shim that waits at its gate. ``held_fds`` (the life lock first) are its own from here on."""
    gate_read, gate_write = os.pipe()
    ack_read, ack_write = os.pipe()
    log = os.open(f"{run_dir}/{records.LOG_FOLDER}/{records.SHIM_LOG}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    kept = {key: value for key, value in environment.items() if key not in _NOT_INHERITED}
    passed = (gate_read, ack_write, *held_fds)
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", SHIM_PATH, run_dir, *map(str, passed)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=passed,
            start_new_session=True,
            env={**kept, RUN_UID_VARIABLE: uid, RUN_DIR_VARIABLE: run_dir},
        )
    except OSError as error:
        os.close(gate_write)
        os.close(ack_read)
        raise ArealError(f"cannot start a supervisor for run {uid}: {error.strerror}")
    finally:
        for fd in (gate_read, ack_write, log):
            os.close(fd)
    return Shim(uid, run_dir, process, gate_write, ack_read)


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace").strip()[-4000:]
    except OSError:
        return ""
