"""Server-sent events, parsed as they arrive. https://html.spec.whatwg.org/multipage/server-sent-events.html"""

from __future__ import annotations

import re

from areal.dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"
LONGEST_EVENT = 16 * 1024 * 1024


@dataclass(slots=True)  # not frozen: there is one for each step of each stream
class ServerEvent:
    """``raw``: its bytes as received, with comments and the blank line; joined, they are the stream. ``data`` is empty
    for an event that has none, which a reader ignores."""

    raw: bytes
    data: bytes = b""
    name: bytes = b""


class EventReader:
    """Cuts a stream into its events, however its bytes are split into parts."""

    def __init__(self) -> None:
        self._raw: list[bytes] = []  # of the event that is incomplete
        self._size = 0
        self._line: list[bytes] = []  # of its line that is incomplete
        self._data: list[bytes] = []
        self._name = b""
        self._first_line = True
        self._after_cr = False  # a line ended with a CR, and the LF that belongs to it may come

    def feed(self, part: bytes) -> list[ServerEvent]:
        """Return the events that ``part`` completes. Raises ValueError for one that is longer than
        ``LONGEST_EVENT``."""
        if self._raw or self._after_cr or b"\r" in part:
            return self._feed(part)
        events: list[ServerEvent] = []
        *blocks, rest = part.split(b"\n\n")
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:  # as nearly every event is
                events.append(ServerEvent(block + b"\n\n", block[6:]))
                self._first_line = False
            else:
                events += self._feed(block + b"\n\n")
        return events + self._feed(rest) if rest else events

    def _feed(self, part: bytes) -> list[ServerEvent]:
        events: list[ServerEvent] = []
        start = taken = 0
        if self._after_cr and part.startswith(b"\n"):
            start = 1
        if part:
            self._after_cr = part.endswith(b"\r")
        for match in _LINE_END.finditer(part, start):
            self._line.append(part[start : match.start()])
            start = match.end()
            if not self._take_line():
                events.append(self._event(part[taken:start]))
                taken = start
        if rest := part[taken:]:
            self._raw.append(rest)
            self._line.append(part[start:])
            self._size += len(rest)
            if self._size > LONGEST_EVENT:
                raise ValueError(f"an event of the stream is larger than {LONGEST_EVENT} bytes")
        return events

    def end(self) -> ServerEvent | None:
        """Return the event that the end of the stream leaves without its blank line. None if there are no such
        bytes."""
        if not self._raw:
            return None
        self._take_line()
        return self._event(b"")

    def _event(self, last: bytes) -> ServerEvent:
        event = ServerEvent(b"".join((*self._raw, last)), b"\n".join(self._data), self._name)
        self._raw, self._data, self._name, self._size = [], [], b"", 0
        return event

    def _take_line(self) -> bool:
        """Read the line that is complete. False for a blank one, which ends the event."""
        line = b"".join(self._line)
        self._line.clear()
        if self._first_line:
            self._first_line, line = False, line.removeprefix(_BOM)
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value
        return bool(line)
