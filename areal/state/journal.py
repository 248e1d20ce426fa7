"""Intent before effect: each operation of a command is on disk before it begins.

One file a command, ``journal/<time>-<pid>-<random>.jsonl``, held by a kernel lock for as long as the command lives: a
file whose lock is free is an *orphan*, whose command died, and the next mutating command finishes or rolls back what it
finds there. A line is one entry and its CRC-32, synced before the caller goes on; a tail that cannot be read is an
entry that was not written. A file appears under its name only when it is locked and its first entry is whole.
Threads that append at once share one sync.

Effects belong between ``begin`` and ``end``, and are keyed so that doing them twice does no harm. A journal is removed
by ``commit``, which refuses while an operation is open; ``abort`` keeps the file while one is.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Required, TypedDict

from areal.dataclasses import dataclass, field
from areal.files import parse_json, still_named, sync_folder, try_lock, write_all
from areal.state.files import GroupCommit, crash_point, explain, make_folder, names_in
from areal.state.home import Home
from areal.state.locks import actor

# Lines as entries, entries as operations. A line is one JSON entry with the CRC-32 of its own bytes. An unreadable
# tail was not written; an unreadable line before readable ones is damage, and counted.

_HEAD = b'{"crc": "'
_JOINT = b'", "entry": '
_BODY = len(_HEAD) + 8 + len(_JOINT)


class OperationData(TypedDict, total=False):
    """What is recorded of an operation: of several that are one change, ``ref`` is the first object, ``also`` names the
    others."""

    ref: str
    target: str
    run: str
    also: list[str]
    pid: int
    failed: bool


class JournalEntry(TypedDict, total=False):
    """A line: ``type`` open | begin | note | end | abort."""

    type: Required[str]
    n: int
    op: str
    data: OperationData
    reason: str
    command: str
    actor: str
    at: float
    pid: int
    objects: list[str]


@dataclass(frozen=True)
class Operation:
    """One ``begin`` with its later notes: ``data`` has all fields, later values over earlier ones."""

    n: int
    op: str
    data: OperationData
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
    entries: tuple[JournalEntry, ...]
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
    """Return a journal's bytes as far as they can be trusted, line by line. Pure."""
    entries: list[JournalEntry] = []
    damaged = unread = 0
    for line in raw.split(b"\n"):
        entry = decode_line(line)
        if entry is not None:
            entries.append(entry)
            damaged += unread
            unread = 0
        elif line:
            unread += 1
    head: JournalEntry = entries[0] if entries and entries[0]["type"] == "open" else {"type": ""}
    aborted = next((str(entry["reason"]) for entry in entries if entry["type"] == "abort"), None)
    return OpenTransaction(
        path=path,
        command=head.get("command", "unknown"),
        at=head.get("at", 0.0),
        actor=head.get("actor", "unknown"),
        pid=head.get("pid", 0),
        objects=tuple(head.get("objects", ())),
        entries=tuple(entries[1:] if head["type"] else entries),
        damaged=damaged,
        aborted=aborted,
    )


def encode_line(entry: Mapping[str, object]) -> bytes:
    """Return one entry as a JSON line with the CRC-32 of its own bytes. Raises TypeError for other values than
    JSON's."""
    body = json.dumps(entry).encode()
    return _HEAD + b"%08x" % zlib.crc32(body) + _JOINT + body + b"}\n"


def decode_line(line: bytes) -> JournalEntry | None:
    """Return the entry of a line, None when it is not whole."""
    body = line[_BODY:-1]
    if not line.startswith(_HEAD) or line[len(_HEAD) : _BODY] != b"%08x" % zlib.crc32(body) + _JOINT:
        return None
    try:
        entry: JournalEntry = parse_json(body)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "type" in entry else None


_SUFFIX = ".jsonl"


@dataclass
class Transaction:
    """A journal being written by this process, which holds its lock. Safe to use from several threads."""

    path: Path
    _fd: int
    _next: int = 1
    _open: set[int] = field(default_factory=set)
    _size: int = 0
    _mutex: Lock = field(default_factory=Lock)
    closed: bool = False

    def __post_init__(self) -> None:
        self._appends: GroupCommit[bytes] = GroupCommit(self._write)

    @classmethod
    def open(cls, home: Home, command: str, objects: Iterable[object] = ()) -> Transaction:
        """Return a new transaction, on disk and locked on return. Raises ArealError when it cannot be written."""
        crash_point("journal-open-before")
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        path = home.journal / f"{stamp}-{os.getpid()}-{os.urandom(4).hex()}{_SUFFIX}"
        head = {"type": "open", "command": command, "actor": actor(), "at": time.time(), "pid": os.getpid()}
        line = encode_line({**head, "objects": [str(item) for item in objects]})
        try:
            make_folder(home.journal)
            fd = _create(path, line)
        except OSError as error:
            raise explain(error, path, "write") from error
        crash_point("journal-open-after")
        return cls(path, fd, _size=len(line))

    @classmethod
    def resume(cls, orphan: OpenTransaction) -> tuple[OpenTransaction, Transaction] | None:
        """Take over an orphan. Return its content, read again under its lock, and the transaction in which to end its
        operations; None if another command took it first. A torn tail is cut, so that new entries are on lines of their
        own."""
        try:
            fd = os.open(orphan.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise explain(error, orphan.path, "take over") from error
        try:
            if not (try_lock(fd) and still_named(fd, orphan.path)):
                os.close(fd)
                return None
            raw = _read(fd)
            size = _cut_tail(fd, raw)
        except OSError as error:
            os.close(fd)
            raise explain(error, orphan.path, "take over") from error
        found = parse(orphan.path, raw)
        still_open = {operation.n for operation in found.unfinished}
        following = max((operation.n for operation in found.operations), default=0) + 1
        return found, cls(orphan.path, fd, following, still_open, size)

    def begin(self, op: str, **data: Any) -> int:
        """Record that ``op`` is about to be done; durable on return. The number names it from now on."""
        with self._mutex:
            n = self._next
            self._next += 1
        self._append({"type": "begin", "n": n, "op": op, "data": data})
        with self._mutex:
            self._open.add(n)
        return n

    def note(self, n: int, **data: Any) -> None:
        """Record something learnt while doing operation ``n`` (a pid, an address); durable on return."""
        self._append({"type": "note", "n": n, "data": data})

    def end(self, n: int, **data: Any) -> None:
        """Record that operation ``n`` has had its effect, or that its failure was dealt with; durable on return."""
        with self._mutex:
            if n not in self._open:
                raise ValueError(f"operation {n} is not open")
        self._append({"type": "end", "n": n, "data": data})
        with self._mutex:
            self._open.discard(n)

    def commit(self) -> None:
        """Remove the journal when all operations are done. Raises ValueError while an operation is open."""
        with self._mutex:
            if self._open:
                raise ValueError(f"operations {sorted(self._open)} are still open")
            self._remove()

    def abort(self, reason: str) -> None:
        """Give up: remove the journal, or leave it to the next mutating command when an operation is open."""
        with self._mutex:
            if self.closed:
                return
            if not self._open:
                self._remove()
                return
            try:
                self._append({"type": "abort", "reason": reason})
            finally:
                self._close()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.closed:
            return
        if error is None:
            self.commit()
        else:
            self.abort(str(error) or type(error).__name__)

    def _append(self, entry: dict[str, object]) -> None:
        self._appends.submit(encode_line(entry))

    def _write(self, lines: Sequence[bytes]) -> None:
        if self.closed:
            raise ValueError(f"the transaction {self.path.name} is closed")
        crash_point("journal-append-before")
        try:
            write_all(self._fd, b"".join(lines))
            os.fdatasync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise explain(error, self.path, "append to") from error
        self._size += sum(map(len, lines))
        crash_point("journal-append-after")

    def _remove(self) -> None:
        if self.closed:
            raise ValueError(f"the transaction {self.path.name} is closed")
        crash_point("journal-commit-before")
        try:
            self.path.unlink(missing_ok=True)
            sync_folder(self.path.parent)
        except OSError as error:
            raise explain(error, self.path, "remove") from error
        crash_point("journal-commit-after")
        self._close()

    def _close(self) -> None:
        self.closed = True
        os.close(self._fd)


def orphans(home: Home) -> list[OpenTransaction]:
    """Return the journals whose command is gone, oldest first. Writes nothing."""
    found = []
    names = [name for name in names_in(home.journal) if name.endswith(_SUFFIX) and not name.startswith(".")]
    for path in (home.journal / name for name in names):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise explain(error, path, "read") from error
        try:
            if try_lock(fd, shared=True) and still_named(fd, path):
                found.append(parse(path, _read(fd)))
        except OSError as error:
            raise explain(error, path, "read") from error
        finally:
            os.close(fd)
    return sorted(found, key=lambda transaction: (transaction.at, transaction.path))


def _create(path: Path, line: bytes) -> int:
    """Return the descriptor of a new journal, locked and whole before it gets its name."""
    temp = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        try_lock(fd)
        write_all(fd, line)
        os.fsync(fd)
        temp.rename(path)
        sync_folder(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            temp.unlink()
        os.close(fd)
        raise
    return fd


def _cut_tail(fd: int, raw: bytes) -> int:
    """Truncate a journal after its last whole line, and return its new size."""
    last = raw[raw.rfind(b"\n") + 1 :]
    if decode_line(last) is not None:
        os.write(fd, b"\n")
        return len(raw) + 1
    os.ftruncate(fd, len(raw) - len(last))
    return len(raw) - len(last)


def _read(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)
