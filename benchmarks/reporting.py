"""What every benchmark says about where and when it was measured, how it writes its results, and how it ends."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # processes that are measured would compile all that they import

RESULTS = Path(os.environ.get("AREAL_BENCH_RESULTS") or Path(__file__).resolve().parent / "results")

_PR_SET_CHILD_SUBREAPER = 36
_STOP_S = 20.0


def _end_processes() -> None:
    """End every process that this one has started and those that they have left, which are its children by then."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deadline = time.monotonic() + _STOP_S
    while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        for pid in map(int, children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
        time.sleep(0.05)


if Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parent:  # a benchmark is the program
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    atexit.register(_end_processes)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def header(name: str, **versions: str) -> dict[str, Any]:
    return {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python_ms": python_ms(),
        },
        "versions": {"python": platform.python_version(), **versions},
    }


def python_ms() -> float:
    """CPU milliseconds of ``python -c pass``: what figures of two days are to be divided by before they are compared. A
    shared machine of one name has been 2.4 times slower on one day than on another."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-I", "-c", "pass"], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000

    return round(statistics.median(once() for _ in range(15)), 1)


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def publish(found: dict[str, Any], text: str, write: bool) -> None:
    """Print the table; with ``write`` keep it and the JSON under ``benchmarks/results``."""
    machine = found["machine"]
    speed = f"`python -c pass` takes {machine['python_ms']} ms of CPU"
    where = f"{found['date']}, {machine['cpu']}, {machine['cores']} cores; {speed}"
    title = f"# {found['benchmark']}\n\n{where}\n\n{text}\n"
    print(title)
    if write:
        RESULTS.mkdir(exist_ok=True)
        stem = RESULTS / found["benchmark"]
        stem.with_suffix(".json").write_text(json.dumps(found, indent=2) + "\n")
        stem.with_suffix(".md").write_text(title)
