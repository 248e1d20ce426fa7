"""What a journal says: its lines as entries, its entries as operations. Pure.

A line is one JSON entry with the CRC-32 of its own bytes. A tail that cannot be read is an entry that was not written;
an unreadable line before readable ones is damage, and counted.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HEAD = b'{"crc": "'
_JOINT = b'", "entry": '
_BODY = len(_HEAD) + 8 + len(_JOINT)


@dataclass(frozen=True)
class Operation:
    """One ``begin`` with what was noted since: ``data`` is everything said about it, later over earlier."""

    n: int
    op: str
    data: dict[str, Any]
    ended: bool


@dataclass(frozen=True)
class OpenTransaction:
    """A journal as read. ``damaged`` counts unreadable lines that later lines follow: more than a torn tail."""

    path: Path
    command: str
    at: float
    actor: str
    pid: int
    objects: tuple[str, ...]
    entries: tuple[dict[str, Any], ...]
    damaged: int = 0
    aborted: str | None = None

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Every operation in the order begun."""
        found: dict[int, Operation] = {}
        for entry in self.entries:
            n, data = entry.get("n", 0), entry.get("data", {})
            if entry["type"] == "begin":
                found[n] = Operation(n, entry["op"], data, ended=False)
            elif n in found:
                held = found[n]
                found[n] = Operation(n, held.op, {**held.data, **data}, held.ended or entry["type"] == "end")
        return tuple(found.values())

    @property
    def unfinished(self) -> tuple[Operation, ...]:
        """The operations that may or may not have had their effect, in the order begun."""
        return tuple(operation for operation in self.operations if not operation.ended)


def parse(path: Path, raw: bytes) -> OpenTransaction:
    """A journal's bytes as far as they can be trusted, line by line. Pure."""
    entries: list[dict[str, Any]] = []
    damaged = unread = 0
    for line in raw.split(b"\n"):
        entry = decode_line(line)
        if entry is not None:
            entries.append(entry)
            damaged += unread
            unread = 0
        elif line:
            unread += 1
    head = entries[0] if entries and entries[0]["type"] == "open" else {}
    aborted = next((str(entry["reason"]) for entry in entries if entry["type"] == "abort"), None)
    return OpenTransaction(
        path=path,
        command=head.get("command", "unknown"),
        at=head.get("at", 0.0),
        actor=head.get("actor", "unknown"),
        pid=head.get("pid", 0),
        objects=tuple(head.get("objects", ())),
        entries=tuple(entries[1:] if head else entries),
        damaged=damaged,
        aborted=aborted,
    )


def encode_line(entry: dict[str, Any]) -> bytes:
    """One entry as a JSON line with the CRC-32 of its own bytes. Raises TypeError for what is not JSON."""
    body = json.dumps(entry).encode()
    return _HEAD + b"%08x" % zlib.crc32(body) + _JOINT + body + b"}\n"


def decode_line(line: bytes) -> dict[str, Any] | None:
    """The entry of a line, None when it is not whole."""
    body = line[_BODY:-1]
    if not line.startswith(_HEAD) or line[len(_HEAD) : _BODY] != b"%08x" % zlib.crc32(body) + _JOINT:
        return None
    try:
        entry = json.loads(body)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "type" in entry else None
