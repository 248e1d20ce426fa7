"""Named instants at which a test may kill the process: before and after every durable step.

``AREAL_CRASH_AT=name`` ends the process there as SIGKILL would (no cleanup, no flush, exit status 137);
``name:N`` the N-th time it is passed, and ``any:N`` at the N-th point passed whatever its name, so that a harness can
walk a whole command without knowing its steps. Unset, a point costs one dictionary look-up.
"""

from __future__ import annotations

import os
import re
from threading import Lock

from areal.errors import UsageFault

VARIABLE = "AREAL_CRASH_AT"

CRASH_POINTS: tuple[str, ...] = (
    # areal.state: one small file
    "write-before",
    "write-synced",
    "write-after",
    # areal.state: removing an object
    "delete-before",
    "delete-after",
    # areal.state: the journal
    "journal-open-before",
    "journal-open-after",
    "journal-append-before",
    "journal-append-after",
    "journal-commit-before",
    "journal-commit-after",
    # areal.runtime: one process
    "intent-before",
    "intent-after",
    "lease-after",
    "fork-after",
    "pid-after",
    "go-after",
    "ack-after",
    "stop-before",
    "stop-signalled",
    "stop-after",
    "forget-before",
    "forget-after",
)

_WANTED = re.compile(r"(?P<name>[a-z-]+)(?::(?P<at>[1-9]\d*))?")
_passed: dict[str, int] = {}
_lock = Lock()


def crash_point(name: str) -> None:
    """Die here if the environment says so. Raises UsageFault when it names no registered point."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    target, at = _parsed(wanted)
    if name not in CRASH_POINTS:
        raise ValueError(f'"{name}" is not registered in CRASH_POINTS')
    if target not in ("any", name):
        return
    with _lock:
        _passed[target] = _passed.get(target, 0) + 1
        if _passed[target] == at:
            os._exit(137)


def _parsed(wanted: str) -> tuple[str, int]:
    """The name and which passage of it is meant, counted from 1."""
    match = _WANTED.fullmatch(wanted)
    if match is None or match["name"] not in ("any", *CRASH_POINTS):
        raise UsageFault(f'{VARIABLE}="{wanted}" names no crash point', hint=f"one of: any, {', '.join(CRASH_POINTS)}")
    return match["name"], int(match["at"] or "1")
