"""Reading a run's logs: the files in order, their end, and the first thing that went wrong.

Lines of the shim begin with ``[areal]``; each start of the component is one of them, so the output of one start can
be told from that of the one before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from areal.runtime import records
from areal.runtime.shim.log import MARK

_BLOCK = 65536
_EXAMINED_BYTES = 8 << 20
_MAX_TRACEBACK_LINES = 60
_STARTED = re.compile(rf"{re.escape(MARK)}\S+ started pid \d+")
_TRACEBACK = "Traceback (most recent call last):"
_ERROR_LINE = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b(?::|$)|(?:fatal|FATAL|panic|PANIC|CRITICAL)\b"
    r"|.*\b(?:ERROR|CRITICAL|FATAL)\b|Segmentation fault|terminate called)"
)
_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


def run_log_paths(run_dir: str) -> tuple[str, ...]:
    """Log files of a run, oldest first, the one being written last."""
    folder = os.path.join(run_dir, records.LOG_FOLDER)
    numbered: list[tuple[int, str]] = []
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return ()
    for name in names:
        base, _, number = name.rpartition(".")
        if base == records.CURRENT_LOG and number.isdigit():
            numbered.append((int(number), os.path.join(folder, name)))
    older = tuple(path for _, path in sorted(numbered, reverse=True))
    current = os.path.join(folder, records.CURRENT_LOG)
    return (*older, current) if records.CURRENT_LOG in names else older


def tail(paths: Sequence[str], n: int) -> list[str]:
    """The last ``n`` lines over all files, without line ends; reads no more than it needs."""
    lines: list[str] = []
    for path in reversed(paths):
        if len(lines) >= n:
            break
        lines = _tail_of_file(path, n - len(lines)) + lines
    return lines


def first_exception(paths: Sequence[str]) -> str | None:
    """The first traceback of the component's last start, else its first line that reports an error; None if neither.

    The first is the cause; what follows it is usually other parts of the engine noticing.
    """
    lines = last_start(paths)
    for number, line in enumerate(lines):
        column = line.find(_TRACEBACK)
        if column >= 0:
            return _traceback(lines[number:], line[:column])
    return next((line for line in lines if _ERROR_LINE.match(line) and not line.startswith(MARK)), None)


def last_start(paths: Sequence[str]) -> list[str]:
    """The lines of the component's last start, its ``[areal]`` line first; at most the last 8 MiB."""
    found = starts(paths)
    return found[-1] if found else []


def previous_start(paths: Sequence[str]) -> list[str]:
    """The lines of the start before the last one; empty when there was none."""
    found = starts(paths)
    return found[-2] if len(found) > 1 else []


def starts(paths: Sequence[str]) -> list[list[str]]:
    """The lines of each start of the component, oldest first, as far as the last 8 MiB go back."""
    groups: list[list[str]] = []
    for line in _recent_text(paths).splitlines():
        if not groups or _STARTED.match(line):
            groups.append([])
        groups[-1].append(line)
    return groups


def _recent_text(paths: Sequence[str]) -> str:
    parts: list[bytes] = []
    room = _EXAMINED_BYTES
    for path in reversed(paths):
        data = _end_of_file(path, room)
        parts.insert(0, data)
        room -= len(data)
        if room <= 0:
            break
    return b"".join(parts).decode("utf-8", "replace")


def _end_of_file(path: str, size: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read(size)
    except FileNotFoundError:
        return b""  # rotated away while we looked


def _tail_of_file(path: str, n: int) -> list[str]:
    try:
        with open(path, "rb") as file:
            position = os.fstat(file.fileno()).st_size
            data = b""
            while position > 0 and data.count(b"\n") <= n:
                step = min(_BLOCK, position)
                position -= step
                file.seek(position)
                data = file.read(step) + data
    except FileNotFoundError:
        return []
    return data.decode("utf-8", "replace").splitlines()[-n:] if n > 0 else []


def _traceback(lines: Sequence[str], prefix: str) -> str:
    """From "Traceback" to the line that names the exception, chained ones included. Worker processes put a prefix
    before every line, such as ``(EngineCore pid=7) ``; it is taken off."""
    block: list[str] = []
    in_frames = False
    for raw in lines[:_MAX_TRACEBACK_LINES]:
        line = raw.removeprefix(prefix)
        block.append(line)
        if line.startswith(_TRACEBACK):
            in_frames = True
        elif in_frames and line and not line.startswith((" ", "\t")):
            in_frames = False
            if not _is_chained(lines[len(block) : len(block) + 4], prefix):
                break
    return "\n".join(block).rstrip()


def _is_chained(following: Sequence[str], prefix: str) -> bool:
    texts = [line.removeprefix(prefix).strip() for line in following]
    return any(text in _CHAIN for text in texts[:2])
