"""Conversations of agents on disk: the sessions and turns of one journal.

Every open session is in memory; its conversation is in a cache of bounded size. All of it is also on disk. Closing a
session deletes it and keeps the digest of its key, so that a client cannot start a new conversation under an old key. A
generated key leaves no digest: its tag shows that there was a session. ``turns.id`` is session * 2^32 + number, so that
a session's turns are adjacent, in order. A turn is written once, at its end, with the Idempotency-Keys of its requests.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self

import orjson

from areal.dataclasses import dataclass, field, replace
from areal.services.http.errors import ApiError
from areal.services.http.tasks import uninterrupted
from areal.services.journal import storage
from areal.services.journal.keys import key_digest, new_session_key, tag_of_key

Outcome = Literal["complete", "agent", "infra", "cancelled"]
Message = Mapping[str, object]
_SEQUENCES = 2**32
_FORMAT = 1
_TABLES = """
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, key TEXT NOT NULL, created REAL NOT NULL,
    about BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE turns (
    id INTEGER PRIMARY KEY, run_id TEXT NOT NULL, outcome TEXT NOT NULL, error TEXT, at REAL NOT NULL,
    seconds REAL NOT NULL, messages BLOB NOT NULL, metadata BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE requests (
    session INTEGER NOT NULL, key BLOB NOT NULL, message BLOB NOT NULL, turn INTEGER NOT NULL,
    PRIMARY KEY (session, key)) WITHOUT ROWID;
"""
_ENDED = "CREATE TABLE IF NOT EXISTS ended (number INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE)"
_STREAMS = "CREATE TABLE IF NOT EXISTS streams (turn INTEGER PRIMARY KEY, events BLOB NOT NULL, crc INTEGER NOT NULL)"
_CALLS = """CREATE TABLE IF NOT EXISTS calls (
    session INTEGER NOT NULL, key BLOB NOT NULL, asked BLOB NOT NULL, rl TEXT NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (session, key)) WITHOUT ROWID"""
_MOST_CALLS = 64  # of a session
_MOST_ENDED = 100_000
_FREED_PAGES = 256  # by one sweep
_CACHED_BYTES = 32 * 1024 * 1024  # of conversations


@dataclass(frozen=True)
class RlSession:
    """The RL session that records an agent session's model calls. ``session_id``: None if the caller started it."""

    base_url: str
    api_key: str = field(repr=False)
    model: str | None = None
    session_id: str | None = None


@dataclass(slots=True, eq=False)
class SessionEntry:
    """An open session. ``turns``: the number of its last turn. ``used_at``: when that turn ended. ``checked_at``
    (monotonic): when the RL session was last known to record. ``exported``: the RL session that an export has removed.
    ``exporting``: set when the running export ends; None while none runs.
    ``ran``: the worker has run a turn of the session, and its agent may hold state for it."""

    journal: AgentJournal
    number: int
    digest: bytes
    key: str
    created: float
    metadata: Mapping[str, object]
    inference: RlSession | None
    turns: int
    used_at: float
    conversation: bytes | None = None  # the messages of complete turns, as JSON with commas between
    checked_at: float = -math.inf
    exported: RlSession | None = None
    exporting: asyncio.Event | None = None
    ran: bool = False
    closing: asyncio.Task[None] | None = None


@dataclass(frozen=True)
class TurnEntry:
    """A turn that has ended. ``at``: its start, in Unix seconds. ``messages``: OpenAI chat messages, as a JSON list.
    ``metadata``: the agent's, as a JSON object. ``stream``: the events of the agent's own stream, which are kept for
    retries only; empty for one that was too long to keep. ``AgentJournal.requested`` reads it."""

    run_id: str
    outcome: Outcome
    error: str | None
    at: float
    seconds: float
    messages: bytes
    metadata: bytes = b"{}"
    stream: bytes | None = None

    def crc(self, turn_id: int) -> int:
        about = (turn_id, self.run_id, self.outcome, self.error, self.at, self.seconds)
        return zlib.crc32(self.messages, zlib.crc32(self.metadata, zlib.crc32(repr(about).encode())))


@dataclass(frozen=True)
class TurnRequestKey:
    """The digests of a request's Idempotency-Key and of its message."""

    key: bytes
    message: bytes


class AgentJournal(storage.Journal):
    """A journal of agent sessions, from ``open_agent_journal``. ``sessions``: the open ones, least used first."""

    def __init__(self, folder: storage.JournalFolder, db: sqlite3.Connection, tag: str) -> None:
        super().__init__(folder, db, tag)
        self._read = self._reader()
        self.sessions: dict[int, SessionEntry] = {}
        self._by_digest: dict[bytes, SessionEntry] = {}
        self._cached: OrderedDict[SessionEntry, int] = OrderedDict()
        self._cached_bytes = 0
        self._has_deleted = True
        self._has_ended = self._read.execute("SELECT EXISTS (SELECT * FROM ended)").fetchone() == (1,)

    def load(self) -> None:
        """Read the open sessions. Raises sqlite3.Error."""
        last = "SELECT id, at + seconds FROM turns WHERE id>? AND id<? ORDER BY id DESC LIMIT 1"
        found = []
        for number, digest, key, created, about, crc in self._read.execute("SELECT * FROM sessions"):
            if _session_crc(digest, key, created, about) != crc:
                self._note(storage.CorruptRecord(f"session {number}: the checksum does not match"))
                continue
            turn = self._read.execute(last, (number * _SEQUENCES, (number + 1) * _SEQUENCES)).fetchone()
            turns, used_at = (turn[0] % _SEQUENCES, turn[1]) if turn is not None else (0, created)
            document = orjson.loads(about)
            inference = RlSession(**document["inference"]) if document["inference"] is not None else None
            found.append(
                SessionEntry(self, number, digest, key, created, document["metadata"], inference, turns, used_at)
            )
        for session in sorted(found, key=lambda session: session.used_at):
            self._keep(session)

    def _keep(self, session: SessionEntry) -> None:
        self.sessions[session.number] = self._by_digest[session.digest] = session

    def session_by_key(self, digest: bytes) -> int | None:
        session = self._by_digest.get(digest)
        return session.number if session is not None else None

    def knows(self, digest: bytes) -> bool:
        return digest in self._by_digest or self.has_ended(digest)

    def has_ended(self, digest: bytes) -> bool:
        with self._reading():
            return self._read.execute("SELECT 1 FROM ended WHERE digest=?", (digest,)).fetchone() is not None

    def live_sessions(self) -> int:
        return len(self.sessions)

    def is_spent(self) -> bool:
        return not (self.sessions or self._use.count or self.corrupt or self._has_ended)

    async def inherit(self, other: Self) -> None:
        if other.sessions or not other._has_ended:
            return
        with other._reading():
            digests = other._read.execute("SELECT digest FROM ended ORDER BY number").fetchall()
        await self.commits.run(lambda: self._end_keys(digests))
        await other.commits.run(lambda: other._db.execute("DELETE FROM ended"))
        other._has_ended = False

    def _end_keys(self, digests: Iterable[tuple[bytes]]) -> None:
        self._has_ended = True
        self._db.executemany("INSERT OR REPLACE INTO ended VALUES (NULL,?)", digests)
        self._db.execute("DELETE FROM ended WHERE number<=(SELECT max(number) FROM ended)-?", (_MOST_ENDED,))

    async def sweep(self) -> int:
        """Return some of the disk space of deleted sessions to the file system. Returns the number of freed pages."""
        if not self._has_deleted:
            return 0
        with self._reading():
            (free,) = self._read.execute("PRAGMA freelist_count").fetchone()
        if free < 2 * _FREED_PAGES:
            self._has_deleted = False
            return 0
        await self.commits.run(lambda: self._db.execute(f"PRAGMA incremental_vacuum({_FREED_PAGES})").fetchall())
        return _FREED_PAGES

    async def start(
        self, key: str | None, metadata: Mapping[str, object], inference: RlSession | None
    ) -> tuple[SessionEntry, bool]:
        """Return the session with this key, and whether it is new. A key whose session has ended gets a new session;
        without a key, one is generated."""
        key = key if key is not None else new_session_key(self.tag)
        digest, about, now = key_digest(key.encode()), _about(metadata, inference), self.clock()

        def insert() -> tuple[int, bool]:
            row = self._db.execute("SELECT number FROM sessions WHERE digest=?", (digest,)).fetchone()
            if row is not None:
                return row[0], False
            values = (digest, key, now, about, _session_crc(digest, key, now, about))
            self._db.execute("DELETE FROM ended WHERE digest=?", (digest,))
            added = self._db.execute("INSERT INTO sessions VALUES (NULL,?,?,?,?,?)", values)
            return added.lastrowid or 0, True

        async def started() -> tuple[SessionEntry, bool]:
            with self.in_use():
                number, new = await self.commits.run(insert)
                if new:
                    self._keep(SessionEntry(self, number, digest, key, now, metadata, inference, 0, now))
                return self.sessions[number], new

        return await uninterrupted(started(), "start-session")

    async def set_inference(self, session: SessionEntry, inference: RlSession) -> None:
        about = _about(session.metadata, inference)
        crc = _session_crc(session.digest, session.key, session.created, about)
        update = "UPDATE sessions SET about=?, crc=? WHERE number=?"
        session.inference = inference  # before the write: the session uses it even if the write fails
        await self.commits.run(lambda: self._db.execute(update, (about, crc, session.number)))

    async def rl_session_of(self, session: SessionEntry, key: bytes, asked: bytes, current: RlSession) -> RlSession:
        """Return the RL session for the reward or export with this Idempotency-Key: ``current``, or for a repeated
        request that of the first one. ``key`` and ``asked`` are digests. Raises 422 if the first differed."""
        query = "SELECT asked, rl FROM calls WHERE session=? AND key=?"
        with self._reading():
            row = self._read.execute(query, (session.number, key)).fetchone()
        if row is not None:
            if row[0] != asked:
                message = "the Idempotency-Key was used with another request"
                raise ApiError(422, message, code="idempotency_key_reused", param="Idempotency-Key")
            return RlSession(**orjson.loads(row[1]))
        values = (session.number, key, asked, orjson.dumps(current).decode(), self.clock())

        def insert() -> None:
            self._db.execute("INSERT OR IGNORE INTO calls VALUES (?,?,?,?,?)", values)
            newest = "SELECT key FROM calls WHERE session=? ORDER BY at DESC LIMIT ?"
            self._db.execute(
                f"DELETE FROM calls WHERE session=? AND key NOT IN ({newest})",
                (session.number, session.number, _MOST_CALLS),
            )

        await self.commits.run(insert)
        return current

    async def record(self, session: SessionEntry, turn: TurnEntry, requests: Iterable[TurnRequestKey]) -> None:
        """Write the next turn of the session. Turns of one session must be recorded one at a time."""
        turn_id = session.number * _SEQUENCES + session.turns + 1
        row = (turn_id, turn.run_id, turn.outcome, turn.error, turn.at, turn.seconds, turn.messages, turn.metadata)

        def insert() -> None:
            self._db.execute("INSERT INTO turns VALUES (?,?,?,?,?,?,?,?,?)", (*row, turn.crc(turn_id)))
            if turn.stream is not None:
                crc = zlib.crc32(turn.stream, turn.crc(turn_id))
                self._db.execute("INSERT OR REPLACE INTO streams VALUES (?,?,?)", (turn_id, turn.stream, crc))
            for request in requests:
                values = (session.number, request.key, request.message, turn_id)
                self._db.execute("INSERT OR REPLACE INTO requests VALUES (?,?,?,?)", values)

        await self.commits.run(insert)
        session.turns += 1
        session.used_at = turn.at + turn.seconds
        self.sessions[session.number] = self.sessions.pop(session.number)
        if turn.outcome == "complete" and session.conversation is not None:
            more = turn.messages[1:-1]
            self._cache(session, session.conversation + b"," + more if session.conversation else more)

    async def delete(self, session: SessionEntry) -> None:
        number = session.number

        def delete() -> None:
            if tag_of_key(session.key) is None:
                self._end_keys([(session.digest,)])
            self._db.execute("DELETE FROM sessions WHERE number=?", (number,))
            for table in ("requests", "calls"):
                self._db.execute(f"DELETE FROM {table} WHERE session=?", (number,))
            span = (number * _SEQUENCES, (number + 1) * _SEQUENCES)
            self._db.execute("DELETE FROM streams WHERE turn>? AND turn<?", span)
            self._db.execute("DELETE FROM turns WHERE id>? AND id<?", span)

        async def deleted() -> None:
            with self.in_use():
                await self.commits.run(delete)
            del self.sessions[number], self._by_digest[session.digest]
            self._uncache(session)
            self._has_deleted = True

        await uninterrupted(deleted(), "delete-session")

    def conversation(self, session: SessionEntry) -> bytes:
        """Return the messages of complete turns, a JSON list without brackets. Raises 500 for a damaged turn."""
        if session.conversation is None:
            turns = (turn.messages[1:-1] for turn in self.turns(session) if turn.outcome == "complete")
            self._cache(session, b",".join(turns))
        else:
            self._cached.move_to_end(session)
        assert session.conversation is not None
        return session.conversation

    def turns(self, session: SessionEntry) -> list[TurnEntry]:
        """Return all turns of the session, in order. Raises 500 for a damaged turn."""
        query = "SELECT * FROM turns WHERE id>? AND id<? ORDER BY id"
        span = (session.number * _SEQUENCES, (session.number + 1) * _SEQUENCES)
        with self._reading():
            return [_turn(row) for row in self._read.execute(query, span)]

    def requested(self, session: SessionEntry, key: bytes) -> tuple[TurnRequestKey, TurnEntry] | None:
        """Return the turn recorded with this key, and its request's digests. Raises 500 for a damaged turn."""
        query = "SELECT message, turns.* FROM requests JOIN turns ON turns.id=turn WHERE session=? AND key=?"
        with self._reading():
            row = self._read.execute(query, (session.number, key)).fetchone()
            if row is None:
                return None
            turn = _turn(row[1:])
            streamed = self._read.execute("SELECT events, crc FROM streams WHERE turn=?", (row[1],)).fetchone()
        if streamed is not None:
            if zlib.crc32(streamed[0], row[-1]) != streamed[1]:
                raise _corrupt(row[1])
            turn = replace(turn, stream=streamed[0])
        return TurnRequestKey(key, row[0]), turn

    def _cache(self, session: SessionEntry, conversation: bytes) -> None:
        self._uncache(session)
        session.conversation = conversation
        self._cached[session] = len(conversation)
        self._cached_bytes += len(conversation)
        while self._cached_bytes > _CACHED_BYTES and len(self._cached) > 1:
            self._uncache(next(iter(self._cached)))

    def _uncache(self, session: SessionEntry) -> None:
        self._cached_bytes -= self._cached.pop(session, 0)
        session.conversation = None


def _about(metadata: Mapping[str, object], inference: RlSession | None) -> bytes:
    return orjson.dumps({"metadata": metadata, "inference": inference})


def _session_crc(digest: bytes, key: str, created: float, about: bytes) -> int:
    return zlib.crc32(about, zlib.crc32(repr((digest, key, created)).encode()))


def _turn(row: tuple[Any, ...]) -> TurnEntry:
    """Raise CorruptRecord."""
    turn = TurnEntry(*row[1:-1])
    if not isinstance(turn.messages, bytes) or not isinstance(turn.metadata, bytes) or turn.crc(row[0]) != row[-1]:
        raise _corrupt(row[0])
    return turn


def _corrupt(turn_id: int) -> storage.CorruptRecord:
    session, number = divmod(turn_id, _SEQUENCES)
    return storage.CorruptRecord(f"turn {number} of session {session}: the checksum does not match")


async def open_agent_journal(folder: storage.JournalFolder, clock: Callable[[], float] = time.time) -> AgentJournal:
    """Open or create the journal in ``folder``, which may be that of a killed process. Raises sqlite3.Error."""
    with storage.closed_on_error(storage.open_writer(folder.database, _TABLES, _FORMAT)) as db:
        db.execute(_ENDED)
        db.execute(_STREAMS)
        db.execute(_CALLS)
        journal = AgentJournal(folder, db, storage.journal_tag(db))
    journal.clock = clock
    try:
        journal.load()
    except BaseException:
        journal.abandon()
        raise
    return journal
