"""The sessions in use, in memory: a turn of a running conversation looks nothing up on disk.

Readers see what is committed. A change sees what its batch has written so far as well (``Draft``); that takes its place
when the batch is committed and is dropped when it is rolled back (``settle``). A session that changes otherwise than by
a new turn is forgotten then, and read anew when it is next asked for. Bounded by turns, not by sessions: what falls out
costs a look at the disk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from areal.services.inference.recording.ledger import Ledger, row_id
from areal.services.inference.recording.lineage import Candidate
from areal.services.inference.recording.session import Phase, Session, Trajectory

_MOST = 2**15  # sessions and turns together
LONGEST = 2**11  # turns of a session that is kept here

Answered = tuple[Candidate, bytes | None]
"""A turn, and the digest of the conversation that its answer completes."""


@dataclass(slots=True, eq=False)
class WarmSession:
    """``newest`` is the row of its newest turn. ``turns`` are those of ``last`` while that is open, in order."""

    session: Session
    key: bytes | None
    last: Trajectory | None
    newest: int | None
    turns: list[Candidate] = field(default_factory=list)
    answers: dict[bytes, list[Candidate]] = field(default_factory=dict)

    @property
    def weight(self) -> int:
        return 1 + len(self.turns)

    def add(self, turns: Iterable[Answered]) -> None:
        for turn, after in turns:
            self.turns.append(turn)
            if after is not None:
                self.answers.setdefault(after, []).append(turn)


@dataclass(slots=True, eq=False)
class Draft:
    """A warm session as a change finds it, after what its batch has added."""

    held: WarmSession
    base: int | None
    last: Trajectory | None
    newest: int | None
    added: list[Answered] = field(default_factory=list)

    @property
    def session(self) -> Session:
        return self.held.session


@dataclass(frozen=True, slots=True)
class WarmTurns:
    """``lineage.Turns`` of a warm session's trajectory, from row ``low`` on."""

    held: WarmSession
    low: int
    added: Sequence[Answered] = ()

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


class WarmSessions:
    """By number and by the digest of their keys; the least used go first."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._weight = 0
        self._sessions: OrderedDict[int, WarmSession] = OrderedDict()
        self._keys: dict[bytes, int] = {}
        self._drafts: dict[int, Draft | None] = {}  # None: to be forgotten
        self._started: list[WarmSession] = []

    def __iter__(self) -> Iterator[WarmSession]:
        return iter(self._sessions.values())

    # -- for readers

    def get(self, number: int) -> WarmSession | None:
        held = self._sessions.get(number)
        if held is not None:
            self._sessions.move_to_end(number)
        return held

    def by_key(self, digest: bytes) -> int | None:
        return self._keys.get(digest)

    def put(self, held: WarmSession) -> None:
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

    def draft(self, number: int) -> Draft | None:
        """None for a session that is not here, or that this batch has changed otherwise: the ledger knows it."""
        held = self._sessions.get(number)
        draft = self._drafts.get(number)
        if held is None or (draft is None and number in self._drafts):
            return None
        if draft is None:
            return Draft(held, held.newest, held.last, held.newest)
        return draft if draft.held is held else None

    def follow(self, draft: Draft, last: Trajectory, turns: Sequence[Answered]) -> None:
        """The session went on by ``turns``, which lie in ``last``."""
        draft.last, draft.newest = last, turns[-1][0][0]
        draft.added += turns
        self._drafts[draft.session.number] = draft

    def start(self, session: Session, key: bytes | None) -> None:
        self._started.append(WarmSession(session, key, None, None))

    def forget(self, number: int) -> None:
        self._drafts[number] = None

    def settle(self, *, committed: bool) -> None:
        """The batch is over."""
        drafts, self._drafts = self._drafts, {}
        started, self._started = self._started, []
        if not committed:
            return
        for number, draft in drafts.items():
            held = self._sessions.get(number)
            if held is None:
                continue
            if draft is None or draft.held is not held or held.newest != draft.base or held.weight > LONGEST:
                self._drop(number)
            else:
                self._renew(held, draft)
        for held in started:
            if held.session.number not in drafts:
                self.put(held)

    def _renew(self, held: WarmSession, draft: Draft) -> None:
        self._weight -= held.weight
        if held.last is None or draft.last is None or held.last.number != draft.last.number:
            held.turns.clear()
            held.answers.clear()
        held.last, held.newest = draft.last, draft.newest
        low = row_id(held.session.number, draft.last.first if draft.last is not None else 0)
        held.add(each for each in draft.added if each[0][0] >= low)
        self._weight += held.weight


def read_warm(ledger: Ledger, number: int) -> WarmSession | None:
    """A session from disk. None where there is none, or where it is too long."""
    session, last = ledger.session(number), ledger.last_trajectory(number)
    if session is None:
        return None
    newest = ledger.newest(row_id(number, 0), row_id(number + 1, 0))
    held = WarmSession(session, ledger.key(number), last, newest)
    if last is not None and last.phase is Phase.OPEN:
        held.add(ledger.answered(row_id(number, last.first), row_id(number + 1, 0), LONGEST + 1))
    return held if held.weight <= LONGEST else None
