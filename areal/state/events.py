"""Events of objects, for people: bounded, shared by all commands, and read by no decision.

One JSON line an event in ``objects/<kind>/<name>/events.jsonl``; events of objects that have no folder (refused, or
gone) are in ``objects/events.jsonl``. A line is appended with one write under a lock on the file, so that commands at
once lose nothing; a line that a crash tore is skipped. Repetitions in a row are one event with a count: they are
counted when read, and folded together when the file is cut to its last ``KEEP`` events.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

from areal.dataclasses import asdict, dataclass, replace
from areal.errors import Locked
from areal.files import parse_json, write_all
from areal.resources.kinds import KINDS, Ref
from areal.state.files import explain, make_folder, names_in, read_raw, write_atomic
from areal.state.home import Home
from areal.state.locks import acquire, flock_owner
from areal.state.locks import actor as this_actor
from areal.wire.notes import SERVES

KEEP = 1000
_SLACK = 250  # cut only this many above KEEP, so that not every append rewrites the file
_LINE_FLOOR = 90  # no event is shorter: below KEEP + _SLACK such lines there is nothing to count
_MESSAGE_LIMIT = 4096
_LOCK_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Event:
    """``count`` times the same, from ``first_at`` to ``at`` (seconds since the epoch)."""

    ref: str
    type: str
    reason: str
    message: str
    actor: str
    at: float
    count: int = 1
    first_at: float = 0.0

    @property
    def same(self) -> tuple[str, str, str, str]:
        """Only the newest note in a row of served weights is kept: a training run has one for each of its steps."""
        return self.ref, self.type, self.reason, "" if self.reason == SERVES else self.message


def events_file(home: Home, ref: Ref) -> Path:
    """Return the events of an object that is recorded."""
    return home.object_folder(ref) / "events.jsonl"


class EventLog:
    """The events of one home."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def record(self, ref: Ref, type: str, reason: str, message: str, actor: str | None = None) -> None:
        """Append one event. Raises ArealError when it cannot be written."""
        now = time.time()
        if len(message) > _MESSAGE_LIMIT:
            message = message[: _MESSAGE_LIMIT - 1] + "…"
        event = Event(str(ref), type, reason, message, actor or this_actor(), now, first_at=now)
        path = events_file(self._home, ref)
        path = path if path.parent.is_dir() else self._stray
        try:
            _append(path, _line(event))
        except OSError as error:
            raise explain(error, path, "write") from error

    def read(self, ref: Ref | None = None, limit: int | None = None) -> list[Event]:
        """Return the last ``limit`` events of an object, or of all, oldest first. Writes nothing."""
        if ref is None:
            folders = [self._home.objects / kind.lower() for kind in KINDS]
            paths = [self._stray, *(folder / name / "events.jsonl" for folder in folders for name in names_in(folder))]
            events = [event for path in paths for event in load(path)]
        else:
            own = load(events_file(self._home, ref))
            events = own + [event for event in load(self._stray) if event.ref == str(ref)]
        events.sort(key=lambda event: event.at)
        return events if limit is None else events[max(0, len(events) - limit) :]

    @property
    def _stray(self) -> Path:
        return self._home.objects / "events.jsonl"


def load(path: Path) -> list[Event]:
    """Return the events of one file, repetitions folded. Raises UnreadableFile if it exists and cannot be read."""
    try:
        raw = read_raw(path)
    except FileNotFoundError:
        return []
    return fold(event for line in raw.split(b"\n") if (event := _parse(line)) is not None)


def fold(events: Iterable[Event]) -> list[Event]:
    """Return the events with consecutive repetitions as one event with their count. Pure."""
    folded: list[Event] = []
    for event in events:
        last = folded[-1] if folded else None
        if last is not None and last.same == event.same:
            folded[-1] = replace(event, count=last.count + event.count, first_at=last.first_at)
        else:
            folded.append(event)
    return folded


def _append(path: Path, line: bytes) -> None:
    # The file is replaced when it is cut, so the name must still lead to the locked file.
    make_folder(path.parent)
    fd = acquire(path, _LOCK_TIMEOUT_S)
    if fd is None:
        pid = flock_owner(path)
        raise Locked(f"{path} is locked by pid {pid or 'unknown'}", hint="it may be stopped: continue or end it")
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        try:
            write_all(fd, b"\n" + line if torn else line)
        except OSError:
            os.ftruncate(fd, size)
            raise
        if size > (KEEP + _SLACK) * _LINE_FLOOR:
            _cut(fd, path)
    finally:
        os.close(fd)


def _cut(fd: int, path: Path) -> None:
    lines = os.pread(fd, os.fstat(fd).st_size, 0).splitlines()
    if len(lines) <= KEEP + _SLACK:
        return
    events = fold(event for line in lines if (event := _parse(line)) is not None)
    write_atomic(path, b"".join(_line(event) for event in events[-KEEP:]))


def _line(event: Event) -> bytes:
    return json.dumps(asdict(event)).encode() + b"\n"


def _parse(line: bytes) -> Event | None:
    try:
        return Event(**parse_json(line))
    except (ValueError, TypeError):
        return None
