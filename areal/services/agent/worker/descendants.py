"""Processes that a program leaves behind end with its turn, also those that left its group or its session.

The worker is a subreaper: a process whose parent has ended becomes the worker's child. At the end of a turn, these are
its own: a descendant with the turn's mark in its environment; and a child that the worker did not start, unless it is
younger than a turn that runs, to which it may belong. The latter ends with that turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

from areal.dataclasses import dataclass
from areal.services.http.tasks import uninterrupted

_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")
_PATIENCE_S = 5.0  # for killed processes to be gone, and for a program that forks as fast as it is killed
_AGAIN_S = 0.02


@dataclass(frozen=True)
class _Descendant:
    pid: int
    parent: int
    started: int  # in clock ticks since the boot
    zombie: bool


class ProgramFamily:
    """The programs of a worker's turns."""

    def __init__(self) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._turns: list[tuple[str, int]] = []  # the mark and the start of each
        self.started: set[int] = set()  # pids of the programs that are not reaped yet

    @contextlib.asynccontextmanager
    async def turn(self, mark: str) -> AsyncIterator[None]:
        """A turn, begun before its program starts and left after its exit: what it has left behind is gone then.
        ``mark``: ``NAME=value`` in the environment of its processes."""
        begun = (mark, int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS))
        self._turns.append(begun)
        try:
            yield
        finally:
            self._turns.remove(begun)
            await uninterrupted(asyncio.to_thread(self._kill_all, mark.encode()), "end-of-programs")

    def _kill_all(self, mark: bytes) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while self._kill(mark) and time.monotonic() < deadline:
            time.sleep(_AGAIN_S)

    def _kill(self, mark: bytes) -> bool:
        """Whether there were any."""
        oldest_turn = min((started for _, started in self._turns), default=None)
        ours = os.getpid()
        processes = _processes()
        by_parent: dict[int, list[_Descendant]] = {}
        for each in processes:
            by_parent.setdefault(each.parent, []).append(each)
        found, family = False, list(by_parent.get(ours, ()))
        while family:
            child = family.pop()
            family += by_parent.get(child.pid, ())
            if child.pid in self.started:
                continue
            left = child.parent == ours and (oldest_turn is None or child.started < oldest_turn)
            if child.zombie:
                if child.parent == ours:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(child.pid, os.WNOHANG)
            elif left or _has_mark(child.pid, mark):
                found = True
                _kill_one(child)
        return found


def _processes() -> list[_Descendant]:
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib takes three times as long
        if name.isdecimal() and (child := _read(int(name))) is not None:
            found.append(child)
    return found


def _read(pid: int) -> _Descendant | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:  # it has ended
        return None
    return _Descendant(pid, int(fields[1]), int(fields[19]), fields[0] == b"Z")


def _has_mark(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _kill_one(child: _Descendant) -> None:
    """Kill the process through a descriptor, so that the id of another one is never used."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(child.pid)
        try:
            if _read(child.pid) == child:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
