"""The sessions in use, in memory, and the search for the turn that a call continues.

A turn of a running conversation needs no disk read. Readers see what is committed. A change also sees what its batch
has written so far (``PendingSession``); that takes its place when the batch is committed and is dropped when it is
rolled back (``settle``). A session that changes other than by a new turn is evicted then, and read again when it is
next used. The cache is bounded by turns, not by sessions.

The parent of a call is found by messages first: the longest prefix of the call's conversation that some turn's answer
completes. Where there is none (plain completions, clients that rewrite messages), by tokens: the longest turn whose
tokens the prompt begins with. A conversation without an answer in it continues nothing.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from areal.services.inference.recorder.records import ConversationDigest, TokenPrefix
from areal.services.inference.recorder.session import SessionRecord, Trajectory, TrajectoryKind, TrajectoryPhase
from areal.services.inference.recorder.storage import SEQUENCES
from areal.services.inference.recorder.tables import SessionTables, row_id, session_rows

# -- parent search

_PREFIXES_AT_A_TIME = 32
_TOKEN_CANDIDATES = 64  # by tokens alone only the newest turns are tried

Candidate = tuple[int, int, bytes | None]
"""A turn: its row id, how many tokens it has, their digest (None: it has messages only)."""


@dataclass(frozen=True)
class Parent:
    """``shared``: how many tokens the prompt has in common with it: all of the parent's, or 0."""

    seq: int
    shared: int


class TurnIndex(Protocol):
    """The turns of one trajectory that can be continued."""

    def completing(self, prefixes: Sequence[bytes]) -> list[Candidate]:
        """Every turn whose answer completes the longest prefix that any completes."""
        ...

    def newest(self, limit: int) -> list[Candidate]: ...


@dataclass(frozen=True)
class StoredTurns:
    """Those of ``session`` from row ``low`` on, on disk."""

    tables: SessionTables
    session: int
    low: int

    def completing(self, prefixes: Sequence[bytes]) -> list[Candidate]:
        for end in range(len(prefixes), 0, -_PREFIXES_AT_A_TIME):
            wanted = prefixes[max(0, end - _PREFIXES_AT_A_TIME) : end]
            marks = ",".join("?" * len(wanted))
            query = (
                f"SELECT id, total, tokens, after FROM interactions WHERE session=? AND after IN ({marks}) AND id>=?"
            )
            rows = self.tables.db.execute(query, (self.session, *wanted, self.low)).fetchall()
            if rows:
                best = max(wanted.index(after) for _, _, _, after in rows)
                return [(found, total, digest) for found, total, digest, after in rows if after == wanted[best]]
        return []

    def newest(self, limit: int) -> list[Candidate]:
        query = "SELECT id, total, tokens FROM interactions WHERE id>=? AND id<? ORDER BY id DESC LIMIT ?"
        return self.tables.db.execute(query, (self.low, row_id(self.session + 1, 0), limit)).fetchall()


def kind_of(turns: TurnIndex) -> TrajectoryKind:
    """The kind of a trajectory, from its newest turn."""
    newest = turns.newest(1)
    return TrajectoryKind.TEXT if newest and newest[0][2] is None else TrajectoryKind.TOKENS


def find_parent(turns: TurnIndex, conversation: ConversationDigest | None, prompt: array[int] | None) -> Parent | None:
    """The parent among ``turns``. ``prompt`` None: a call without tokens."""
    answered = conversation.answered if conversation is not None else ()
    if conversation is not None and not answered:
        return None
    candidates = turns.completing(answered)
    tokens = TokenPrefix(prompt) if prompt is not None else None
    if candidates:
        joined = _longest_joined(candidates, tokens)
        return joined or Parent(max(candidates)[0] % SEQUENCES, 0)
    return _longest_joined(turns.newest(_TOKEN_CANDIDATES), tokens) if tokens is not None else None


def continued_turn(turns: TurnIndex, conversation: ConversationDigest) -> int | None:
    """The row of the turn that this conversation would continue; of several with the same answer the newest."""
    candidates = turns.completing(conversation.answered)
    return max(candidates)[0] if candidates else None


def _longest_joined(candidates: Sequence[Candidate], tokens: TokenPrefix | None) -> Parent | None:
    """The candidate with the most tokens that the prompt begins with; of equals the newest."""
    if tokens is None:
        return None
    digests = tokens.digests(total for _, total, digest in candidates if digest is not None)
    joined = [(total, found) for found, total, digest in candidates if digest and digests.get(total) == digest]
    if not joined:
        return None
    total, found = max(joined)
    return Parent(found % SEQUENCES, total)


_MOST = 2**15  # sessions and turns together
LONGEST = 2**11  # turns of a session that is kept here

TurnEntry = tuple[Candidate, bytes | None]
"""A turn, and the digest of the conversation that its answer completes."""


@dataclass(slots=True, eq=False)
class CachedSession:
    """``newest`` is the row of its newest turn. ``turns`` are those of ``last`` while that is open, in order."""

    session: SessionRecord
    key: bytes | None
    last: Trajectory | None
    newest: int | None
    turns: list[Candidate] = field(default_factory=list)
    answers: dict[bytes, list[Candidate]] = field(default_factory=dict)

    @property
    def weight(self) -> int:
        return 1 + len(self.turns)

    def add(self, turns: Iterable[TurnEntry]) -> None:
        for turn, after in turns:
            self.turns.append(turn)
            if after is not None:
                self.answers.setdefault(after, []).append(turn)


@dataclass(slots=True, eq=False)
class PendingSession:
    """A cached session as a change finds it, after what its batch has added."""

    held: CachedSession
    base: int | None
    last: Trajectory | None
    newest: int | None
    added: list[TurnEntry] = field(default_factory=list)

    @property
    def session(self) -> SessionRecord:
        return self.held.session


@dataclass(frozen=True, slots=True)
class CachedTurns:
    """``TurnIndex`` of a cached session's trajectory, from row ``low`` on."""

    held: CachedSession
    low: int
    added: Sequence[TurnEntry] = ()

    def completing(self, prefixes: Sequence[bytes]) -> list[Candidate]:
        for prefix in reversed(prefixes):
            found = [turn for turn in self.held.answers.get(prefix, ()) if turn[0] >= self.low]
            found += [turn for turn, after in self.added if after == prefix and turn[0] >= self.low]
            if found:
                return found
        return []

    def newest(self, limit: int) -> list[Candidate]:
        turns = [*self.held.turns[-limit:], *(turn for turn, _ in self.added)]
        return [turn for turn in turns[-limit:] if turn[0] >= self.low]


class SessionCache:
    """By number and by the digest of their keys; the least used go first."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._weight = 0
        self._sessions: OrderedDict[int, CachedSession] = OrderedDict()
        self._keys: dict[bytes, int] = {}
        self._pending: dict[int, PendingSession | None] = {}  # None: to be forgotten
        self._started: list[CachedSession] = []

    def __iter__(self) -> Iterator[CachedSession]:
        return iter(self._sessions.values())

    # -- for readers

    def get(self, number: int) -> CachedSession | None:
        held = self._sessions.get(number)
        if held is not None:
            self._sessions.move_to_end(number)
        return held

    def by_key(self, digest: bytes) -> int | None:
        return self._keys.get(digest)

    def put(self, held: CachedSession) -> None:
        """What was read from disk."""
        self._drop(held.session.number)
        self._sessions[held.session.number] = held
        self._weight += held.weight
        if held.key is not None:
            self._keys[held.key] = held.session.number
        while self._weight > self._most and len(self._sessions) > 1:
            self._drop(next(iter(self._sessions)))

    def _drop(self, number: int) -> None:
        gone = self._sessions.pop(number, None)
        if gone is None:
            return
        self._weight -= gone.weight
        if gone.key is not None and self._keys.get(gone.key) == number:
            del self._keys[gone.key]

    # -- for changes

    def pending(self, number: int) -> PendingSession | None:
        """None for a session that is not here, or that this batch has changed otherwise: the tables know it."""
        held = self._sessions.get(number)
        pending = self._pending.get(number)
        if held is None or (pending is None and number in self._pending):
            return None
        if pending is None:
            return PendingSession(held, held.newest, held.last, held.newest)
        return pending if pending.held is held else None

    def follow(self, pending: PendingSession, last: Trajectory, turns: Sequence[TurnEntry]) -> None:
        """The session went on by ``turns``, which lie in ``last``."""
        pending.last, pending.newest = last, turns[-1][0][0]
        pending.added += turns
        self._pending[pending.session.number] = pending

    def start(self, session: SessionRecord, key: bytes | None) -> None:
        self._started.append(CachedSession(session, key, None, None))

    def forget(self, number: int) -> None:
        self._pending[number] = None

    def settle(self, *, committed: bool) -> None:
        """The batch is over."""
        pending_sessions, self._pending = self._pending, {}
        started, self._started = self._started, []
        if not committed:
            return
        for number, pending in pending_sessions.items():
            held = self._sessions.get(number)
            if held is None:
                continue
            if pending is None or pending.held is not held or held.newest != pending.base or held.weight > LONGEST:
                self._drop(number)
            else:
                self._renew(held, pending)
        for held in started:
            if held.session.number not in pending_sessions:
                self.put(held)

    def _renew(self, held: CachedSession, pending: PendingSession) -> None:
        self._weight -= held.weight
        if held.last is None or pending.last is None or held.last.number != pending.last.number:
            held.turns.clear()
            held.answers.clear()
        held.last, held.newest = pending.last, pending.newest
        low = row_id(held.session.number, pending.last.first if pending.last is not None else 0)
        held.add(each for each in pending.added if each[0][0] >= low)
        self._weight += held.weight


def read_session(tables: SessionTables, number: int) -> CachedSession | None:
    """A session from disk. None where there is none, or where it is too long."""
    session, last = tables.session(number), tables.last_trajectory(number)
    if session is None:
        return None
    newest = tables.newest(*session_rows(number))
    held = CachedSession(session, tables.key(number), last, newest)
    if last is not None and last.phase is TrajectoryPhase.OPEN:
        held.add(tables.answered(row_id(number, last.first), row_id(number + 1, 0), LONGEST + 1))
    return held if held.weight <= LONGEST else None
