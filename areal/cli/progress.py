"""Progress of long work, on stderr: one moving line a target on a terminal, one line a change elsewhere."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from typing import TYPE_CHECKING, TextIO

from areal.cli.invocation import fancy
from areal.cli.output.units import age, size
from areal.terminal import ESCAPE, safe

if TYPE_CHECKING:
    from areal.reconcilers.context import Progress

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_TICK_S = 0.1
_BYTES = 1 << 20  # a total above this is shown as bytes: nothing else here counts so far


class ProgressPrinter:
    """Shows ``Progress`` values as they come; safe to call from many threads. Use as a context manager.

    On a terminal every unfinished target keeps one line at the bottom, redrawn in place; a finished one is printed
    once above them and let go. Elsewhere a line is written when a target's stage changes, and only then (``verbose``:
    also when its count does; work that says how long it takes: also at each tenth of it).
    """

    def __init__(self, *, quiet: bool = False, verbose: bool = False, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._verbose = verbose
        self._moving = not quiet and fancy(self._stream)
        self._lock = threading.Lock()
        self._live: dict[str, tuple[Progress, float]] = {}
        self._drawn = 0
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)

    def __enter__(self) -> ProgressPrinter:
        if self._moving:
            self._ticker.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._moving:
            self._ticker.join()
            with self._lock:
                self._erase()
                for progress, _ in self._live.values():
                    self._stream.write(_line(progress) + "\n")
                self._stream.flush()

    def __call__(self, progress: Progress) -> None:
        if self._quiet:
            return
        with self._lock:
            before = self._live.get(progress.ref)
            self._live[progress.ref] = (progress, time.monotonic())
            if not self._moving and (before is None or self._differs(before[0], progress)):
                self._stream.write(_line(progress) + "\n")
                self._stream.flush()

    def _differs(self, before: Progress, now: Progress) -> bool:
        changed = before.stage != now.stage or _tenth(before) < _tenth(now)
        return changed or (self._verbose and before.done != now.done)

    def _tick(self) -> None:
        turn = 0
        while not self._stop.wait(_TICK_S):
            turn += 1
            with self._lock:
                self._erase()
                self._draw(_FRAMES[turn % len(_FRAMES)])

    def _draw(self, frame: str) -> None:
        width, height = shutil.get_terminal_size()
        now = time.monotonic()
        shown = list(self._live.values())[-max(1, height - 2) :]
        for progress, seen_at in shown:
            text = "  ".join(filter(None, (f"{frame} {_line(progress, waited=now - seen_at)}", progress.detail)))
            self._stream.write(safe(text)[: width - 1] + "\n")
        self._drawn = len(shown)
        self._stream.flush()

    def _erase(self) -> None:
        if self._drawn:
            self._stream.write(f"{ESCAPE}[{self._drawn}A{ESCAPE}[J")
        self._drawn = 0


def _line(progress: Progress, *, waited: float = 0.0) -> str:
    parts = [f"{progress.ref}: {progress.stage}" if progress.ref else progress.stage]
    if progress.done is not None and progress.total:
        parts.append(_counted(progress.done, progress.total))
    elapsed = progress.elapsed_s + waited
    times = [age(elapsed)] if elapsed >= 1 else []
    if progress.eta_s is not None:
        times.append(f"ETA {age(max(0.0, progress.eta_s - waited))}")
    if times:
        parts.append(f"({', '.join(times)})")
    return " ".join(parts)


def _tenth(progress: Progress) -> int:
    """How many tenths are done, of work that says how long it takes."""
    if progress.eta_s is None or not progress.total:
        return 0
    return 10 * (progress.done or 0) // progress.total


def _counted(done: int, total: int) -> str:
    if total >= _BYTES:
        return f"{size(done)}/{size(total)} {100 * done // total}%"
    return f"{done}/{total}"
