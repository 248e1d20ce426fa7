"""End every process of a run, also those that outlived or left their parents.

Engines fork workers that survive them and rename themselves. A run's processes are the members of its shim's
session, and those that carry the run's unique id in the environment they were started with (they left the session
by ``setsid``). Each one is held by a pidfd, frozen so that it cannot fork past us, and only then killed.

Imported by the shim: no ``dataclasses``, no ``typing``.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from areal.runtime import procfs

RUN_DIR_VARIABLE = "AREAL_RUN_DIR"
RUN_UID_VARIABLE = "AREAL_RUN_UID"
NO_SESSION = -1
_UNSTEADY_SCANS = 16  # a busy machine may never hold still: then that many must do


def open_verified(pid: int, start_ticks: int) -> int | None:
    """A pidfd of exactly that process, or None when it is gone or its number was given to another.

    The ticks are read again after the descriptor was opened: from then on it can mean no other process.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    stat = procfs.read_stat(pid)
    if stat is None or not stat.alive or stat.start_ticks != start_ticks:
        os.close(fd)
        return None
    return fd


def wait_gone(fds: list[int], timeout_s: float) -> bool:
    """Wait until every process behind these pidfds is dead."""
    deadline = time.monotonic() + timeout_s
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    waiting = set(fds)
    while waiting:
        remaining = deadline - time.monotonic()
        ready = poller.poll(max(0.0, remaining) * 1000)
        for fd, _ in ready:
            poller.unregister(fd)
            waiting.discard(fd)
        if not ready and remaining <= 0:
            return False
    return True


def run_members(sid: int, run_dir: str, exclude: frozenset[int]) -> Callable[[procfs.Stat], bool]:
    """Tells whether a process belongs to a run: by session, or by the run's folder in its first environment."""

    def belongs(stat: procfs.Stat) -> bool:
        if stat.pid in exclude or stat.pid == 1:
            return False
        if stat.session == sid:
            return True
        return stat.session != 0 and procfs.environment(stat.pid).get(RUN_DIR_VARIABLE) == run_dir

    return belongs


def sweep(belongs: Callable[[procfs.Stat], bool], timeout_s: float = 10.0) -> tuple[list[int], list[int]]:
    """Kill every process that ``belongs``. Returns the pids killed, and those still there at the deadline."""
    deadline = time.monotonic() + timeout_s
    killed: list[int] = []
    while True:
        held, refused = _freeze(belongs)
        if not held:
            return killed, refused
        try:
            for fd in held.values():
                _send(fd, signal.SIGKILL)
            wait_gone(list(held.values()), max(0.0, deadline - time.monotonic()))
            killed += [pid for pid in held if pid not in killed]
        finally:
            for fd in held.values():
                os.close(fd)
        if time.monotonic() >= deadline:
            return killed, sorted({*refused, *(stat.pid for stat in procfs.processes() if belongs(stat))})


def _freeze(belongs: Callable[[procfs.Stat], bool]) -> tuple[dict[int, int], list[int]]:
    """Stop members until a scan finds no new one; returns pidfds by pid, and the pids we may not signal.

    A process that forks and leaves during a scan is in neither its old place nor, yet, in its new one: only a scan
    in which nobody vanished and no member has become a zombie since the last proves that there is nobody.
    """
    held: dict[int, int] = {}
    refused: list[int] = []
    unsteady_scans = 0
    zombies: set[int] = set()
    while True:
        found = vanished = 0
        for pid in procfs.pids():
            if pid in held or pid in refused:
                continue
            stat = procfs.read_stat(pid)
            vanished += stat is None
            if stat is None or not belongs(stat):
                continue
            if not stat.alive:
                vanished += pid not in zombies
                zombies.add(pid)
                continue
            found += 1
            fd = _hold(stat, refused)
            if fd is not None:
                held[pid] = fd
        unsteady_scans += vanished > 0
        if not found and (not vanished or unsteady_scans > _UNSTEADY_SCANS):
            return held, refused


def _hold(stat: procfs.Stat, refused: list[int]) -> int | None:
    """A pidfd of the process, now stopped; None when it is gone or may not be signalled."""
    fd = open_verified(stat.pid, stat.start_ticks)
    if fd is None:
        return None
    try:
        _send(fd, signal.SIGSTOP)
    except PermissionError:
        os.close(fd)
        refused.append(stat.pid)
        return None
    return fd


def _send(fd: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it died first
        signal.pidfd_send_signal(fd, number)
