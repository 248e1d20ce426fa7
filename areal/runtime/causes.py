"""Why a component ended, from its log: the files in order, the component's starts, the first error of a start.

Lines of the shim begin with ``[areal]``; each start of the component is one of them, so that the output of different
starts can be told apart. Imported by the shim: no ``dataclasses``, no ``typing``, no ``pathlib``.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress

from areal.files import end_of_file
from areal.runtime import records
from areal.runtime.shim.log import MARK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_EXAMINED_BYTES = 8 << 20
_MAX_TRACEBACK_LINES = 60
_FOLLOWING = 6  # lines after a traceback's first line among which its process must have another line
_LONGEST_LINE = 500
_STARTED = re.compile(rf"{re.escape(MARK)}\S+ started pid \d+")
TRACEBACK = "Traceback (most recent call last):"
ERROR_LINE = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b(?::|$)|(?:fatal|FATAL|panic|PANIC|CRITICAL)\b"
    r"|.*(?<![{,])\b(?:ERROR|CRITICAL|FATAL)\b(?![,}]\S)|Segmentation fault|terminate called"
    r"|(?:[\w./-]+(?: [\w./-]+){0,2}: )?error: )"  # ours; argparse's, after a program's words
)
# "ValueError: text", "pkg.Error", "__main__.f.<locals>.Mine: text"; not "INFO 12:00 ..." of another thread
_NAMES_EXCEPTION = re.compile(r"^[A-Za-z_][\w.<>]*(?::(?: |$)|$)")
_COUNTS_FAULTS = re.compile(r"\d+ validation errors? for \w+$")
_POINTER = "For further information visit"
_MOST_LINES = 3
_GROUP = re.compile(r" *\+ Exception Group $")
_MARGIN = re.compile(r"^ *[|] ?|^ *\+[-+]*(?= )")
_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


def run_log_paths(run_dir: str) -> tuple[str, ...]:
    """Return the log files of a run, oldest first; the last one is being written."""
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


def first_exception(paths: Sequence[str]) -> str | None:
    """Return the first traceback of one start of the component, or its first line that reports an error; None if
    neither. The start is the last one with either: a component that has just restarted has not failed yet.

    The first error is the cause; later ones usually come from other parts of the engine.
    """
    return next((found for lines in reversed(starts(paths)) if (found := _first_error(lines))), None)


def failing_line(paths: Sequence[str], *, last_start: bool = False) -> str:
    """Return the line of ``first_exception`` that names the error; "" if there is none, since a traceback may be cut.
    ``last_start``: consider the last start only, because it has ended, too."""
    found = _first_error((starts(paths) or [[]])[-1]) if last_start else first_exception(paths)
    if found is None or TRACEBACK not in found:
        return (found or "").strip()[:_LONGEST_LINE]
    named = (line for line in reversed(found.splitlines()) if _NAMES_EXCEPTION.match(line))
    return next(named, "").strip()[:_LONGEST_LINE]


def _first_error(lines: Sequence[str]) -> str | None:
    for number, line in enumerate(lines):
        column = line.find(TRACEBACK)
        if column >= 0:
            return _traceback(lines[number:], line[:column])
    return next((line for line in lines if ERROR_LINE.match(line) and not line.startswith(MARK)), None)


def starts(paths: Sequence[str]) -> list[list[str]]:
    """Return the lines of each start of the component, oldest first, from the last 8 MiB."""
    groups: list[list[str]] = []
    parts: list[bytes] = []
    room = _EXAMINED_BYTES
    for path in reversed(paths):
        data = b""
        with suppress(FileNotFoundError):  # rotated away meanwhile
            data, _ = end_of_file(path, room)
        parts.insert(0, data)
        room -= len(data)
        if room <= 0:
            break
    for line in b"".join(parts).decode("utf-8", "replace").splitlines():
        if not groups or _STARTED.match(line):
            groups.append([])
        groups[-1].append(line)
    return groups


def _rest_of_message(line: str, after: Sequence[str]) -> list[str]:
    """Return the lines that say what happened if a message's first line is only a heading: pydantic's "1 validation
    error for M", which the field may follow on its own line, or torch's "Error(s) in loading state_dict for M:"."""
    of_pydantic = _COUNTS_FAULTS.search(line) is not None
    if not of_pydantic and not line.endswith(":"):
        return []
    more: list[str] = []
    for each in after[:_MOST_LINES]:
        if not each.strip() or not (each.startswith((" ", "\t")) or (of_pydantic and not more)):
            break
        if each.strip().startswith(_POINTER):
            break
        more.append(each.strip())
    return more


def _traceback(lines: Sequence[str], prefix: str) -> str:
    """Return the lines from "Traceback" to the line that names the exception, with chained exceptions; for a group, up
    to its first exception; to the end if the traceback was cut. Removes the prefix that worker processes put before
    each line, such as ``(EngineCore pid=7) ``, the margin of a group, and lines of other processes."""
    group = _GROUP.search(prefix)
    own = prefix[: group.start()] if group is not None else prefix
    if not any(each.startswith(own) for each in lines[1:_FOLLOWING]):  # of a message, which is on the first line alone
        own, lines = "", [lines[0][len(own) :], *lines[1:]]
    mine = [each[len(own) :] for each in lines if each.startswith(own)]
    block: list[str] = []
    in_frames = True
    for number, raw in enumerate(mine):
        line = _MARGIN.sub("", raw) if group is not None else raw
        if TRACEBACK in line:
            block.append(TRACEBACK)
            in_frames = True
        elif in_frames and (line.startswith((" ", "\t")) or not line):
            block.append(line)
        elif in_frames and _NAMES_EXCEPTION.match(line):
            more = _rest_of_message(line, mine[number + 1 :]) if group is None else []
            block.append(": ".join((line.rstrip(" :"), *more)) if more else line)
            following = [each.strip() for each in mine[number + 1 + len(more) : number + 3 + len(more)]]
            in_frames = any(each.startswith("+-+-") for each in following)  # the first exception of a group
            if not in_frames and not any(each in _CHAIN for each in following):
                break
        elif line.strip() in _CHAIN:
            block += ["", line, ""]
    if len(block) > _MAX_TRACEBACK_LINES:
        half = _MAX_TRACEBACK_LINES // 2
        block = [*block[:half], "    ...", *block[-half:]]
    return "\n".join(block).rstrip()
