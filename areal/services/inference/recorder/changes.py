"""The changes of a session, and the cache of sessions in use.

Each change first decides (``session``, pure) and then writes to the writer's tables, inside the journal's group commit.

With the cache, a turn of a running conversation needs no disk read. Readers see committed rows only; a change also sees
the turns that its batch has written so far (``PendingSession``). ``settle`` moves these to the cache when the batch is
committed, and drops them when it is rolled back. A session that changes in any other way than by a new turn is evicted
and read again at its next use. The cache is bounded by its memory.

The parent of a call is found by messages first: it is the turn whose answer completes the longest prefix of the call's
conversation. If there is none (plain completions, clients that rewrite messages), it is found by tokens: the longest
turn whose tokens begin the prompt. A conversation that contains no answer has no parent.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import orjson

from areal.dataclasses import dataclass, field
from areal.services.http.errors import ApiError, bad_request
from areal.services.inference.recorder.records import (
    ConversationDigest,
    ModelCall,
    NamedRequest,
    TextSample,
    TokenSample,
    pack,
    prefix_digests,
    token_array,
    token_digest,
    version_runs,
)
from areal.services.inference.recorder.session import (
    HITL,
    GroupName,
    SessionRecord,
    SessionState,
    Trajectory,
    TrajectoryKind,
    TrajectoryPhase,
    apply_reward,
    apply_timeout,
    check_sealed,
    end_session,
    holds_key,
    place_turn,
)
from areal.services.inference.recorder.storage import SEQUENCES
from areal.services.inference.recorder.tables import SessionTables, row_id, session_rows
from areal.wire.bodies import Rewarded

_PREFIXES_AT_A_TIME = 32
_TOKEN_CANDIDATES = 64  # by tokens alone only the newest turns are tried

Candidate = tuple[int, int, bytes | None, bytes | None]
"""A turn: its row id, its number of tokens, their digest (None if it has only messages), and the digest of the
conversation that its answer completes."""


@dataclass(frozen=True)
class Parent:
    """The turn that a call continues. ``shared``: all its tokens if the prompt begins with them, else 0."""

    seq: int
    shared: int


@dataclass(frozen=True)
class StoredTurns:
    """The turns of ``session`` from row ``low`` on, read from disk."""

    tables: SessionTables
    session: int
    low: int

    def completing(self, prefixes: Sequence[bytes]) -> list[Candidate]:
        """Return the turns whose answer completes one of ``prefixes``: all turns for the longest such prefix."""
        for end in range(len(prefixes), 0, -_PREFIXES_AT_A_TIME):
            wanted = prefixes[max(0, end - _PREFIXES_AT_A_TIME) : end]
            marks = ",".join("?" * len(wanted))
            query = (
                f"SELECT id, total, tokens, after FROM interactions WHERE session=? AND after IN ({marks}) AND id>=?"
            )
            rows = self.tables.db.execute(query, (self.session, *wanted, self.low)).fetchall()
            if rows:
                best = max(wanted.index(row[3]) for row in rows)
                return [row for row in rows if row[3] == wanted[best]]
        return []

    def newest(self, limit: int) -> list[Candidate]:
        query = "SELECT id, total, tokens, after FROM interactions WHERE id>=? AND id<? ORDER BY id DESC LIMIT ?"
        return self.tables.db.execute(query, (self.low, row_id(self.session + 1, 0), limit)).fetchall()


def kind_of(turns: StoredTurns | CachedTurns) -> TrajectoryKind:
    """Return the kind of a trajectory, from its newest turn."""
    newest = turns.newest(1)
    return TrajectoryKind.TEXT if newest and newest[0][2] is None else TrajectoryKind.TOKENS


def find_parent(
    turns: StoredTurns | CachedTurns, conversation: ConversationDigest | None, prompt: array[int] | None
) -> Parent | None:
    """Return the call's parent among ``turns``, if any. ``prompt`` is None for a call without tokens."""
    answered = conversation.answered if conversation is not None else ()
    if conversation is not None and not answered:
        return None
    candidates = turns.completing(answered)
    if candidates:
        joined = _longest_joined(candidates, prompt)
        return joined or Parent(max(candidates)[0] % SEQUENCES, 0)
    return _longest_joined(turns.newest(_TOKEN_CANDIDATES), prompt)


def continued_turn(turns: StoredTurns | CachedTurns, conversation: ConversationDigest) -> int | None:
    """Return the row id of the turn that this conversation continues; the newest if several have the same answer."""
    candidates = turns.completing(conversation.answered)
    return max(candidates)[0] if candidates else None


def _longest_joined(candidates: Sequence[Candidate], prompt: array[int] | None) -> Parent | None:
    """Return the candidate whose tokens form the longest prefix of the prompt; the newest if several are equal."""
    if prompt is None:
        return None
    digests = prefix_digests(prompt, [total for _, total, digest, _ in candidates if digest is not None])
    joined = [(total, found) for found, total, digest, _ in candidates if digest and digests.get(total) == digest]
    if not joined:
        return None
    total, found = max(joined)
    return Parent(found % SEQUENCES, total)


_MOST_BYTES = 2**23
_SESSION_BYTES, _TURN_BYTES = 1024, 300  # measured
LONGEST = 2**9  # turns of a session that are cached


@dataclass(slots=True, eq=False)
class CachedSession:
    """A session in memory.

    ``newest``: the row id of its newest turn. ``turns``: the turns of its last trajectory while that is open, in order;
    ``completed``: how many of them complete a conversation, by its digest. ``stored``: there are too many turns to
    cache, and they are read from disk.
    """

    session: SessionRecord
    key: bytes | None
    last: Trajectory | None
    newest: int | None
    turns: list[Candidate] = field(default_factory=list)
    completed: dict[bytes | None, int] = field(default_factory=dict)
    stored: bool = False

    @property
    def bytes(self) -> int:
        return _SESSION_BYTES + len(self.turns) * _TURN_BYTES

    def add(self, turns: Sequence[Candidate]) -> None:
        self.turns += turns
        for turn in turns:
            self.completed[turn[3]] = self.completed.get(turn[3], 0) + 1

    def forget_turns(self, *, stored: bool) -> None:
        self.turns.clear()
        self.completed.clear()
        self.stored = stored


@dataclass(slots=True, eq=False)
class PendingSession:
    """A cached session together with the turns that the current batch has added. ``base``: ``newest`` before them."""

    held: CachedSession
    base: int | None
    last: Trajectory | None
    newest: int | None
    added: list[Candidate] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CachedTurns:
    """``StoredTurns`` of a cached session."""

    held: CachedSession
    low: int
    added: Sequence[Candidate] = ()

    def completing(self, prefixes: Sequence[bytes]) -> list[Candidate]:
        for prefix in reversed(prefixes):
            held = (turn for turn in reversed(self.held.turns) if turn[3] == prefix)  # mostly the newest turn
            turns = [*islice(held, self.held.completed.get(prefix, 0)), *self.added]
            if found := [turn for turn in turns if turn[3] == prefix and turn[0] >= self.low]:
                return found
        return []

    def newest(self, limit: int) -> list[Candidate]:
        return [turn for turn in [*self.held.turns[-limit:], *self.added][-limit:] if turn[0] >= self.low]


class SessionCache:
    """LRU cache of sessions, by number and by the digest of their keys, bounded by its memory."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most = most_bytes
        self.held_bytes = 0
        self._sessions: OrderedDict[int, CachedSession] = OrderedDict()
        self._keys: dict[bytes, int] = {}
        self._pending: dict[int, PendingSession | None] = {}  # None: evict
        self._started: list[CachedSession] = []

    def __iter__(self) -> Iterator[CachedSession]:
        return iter(self._sessions.values())

    def get(self, number: int) -> CachedSession | None:
        held = self._sessions.get(number)
        if held is not None:
            self._sessions.move_to_end(number)
        return held

    def by_key(self, digest: bytes) -> int | None:
        return self._keys.get(digest)

    def put(self, held: CachedSession) -> None:
        """Add a session that was read from disk."""
        self._drop(held.session.number)
        self._sessions[held.session.number] = held
        self.held_bytes += held.bytes
        if held.key is not None:
            self._keys[held.key] = held.session.number
        self._shrink()

    def _shrink(self) -> None:
        """Drop the turns of the least recently used sessions first, then the sessions."""
        while self.held_bytes > self._most and len(self._sessions) > 1:
            number, held = next(iter(self._sessions.items()))
            if held.turns:
                self.held_bytes -= held.bytes
                held.forget_turns(stored=True)
                self.held_bytes += held.bytes
                self._sessions.move_to_end(number)
            else:
                self._drop(number)

    def _drop(self, number: int) -> None:
        dropped = self._sessions.pop(number, None)
        if dropped is None:
            return
        self.held_bytes -= dropped.bytes
        if dropped.key is not None and self._keys.get(dropped.key) == number:
            del self._keys[dropped.key]

    def pending(self, number: int) -> PendingSession | None:
        """Return the session with its pending turns, or None if the tables must be read: it is not cached, or this
        batch has changed it in another way."""
        held = self._sessions.get(number)
        pending = self._pending.get(number)
        if held is None or (pending is None and number in self._pending):
            return None
        if pending is None:
            return PendingSession(held, held.newest, held.last, held.newest)
        return pending if pending.held is held else None

    def follow(self, pending: PendingSession, last: Trajectory, turns: Sequence[Candidate]) -> None:
        """Note that this batch has added ``turns`` to the session, in trajectory ``last``."""
        pending.last, pending.newest = last, turns[-1][0]
        pending.added += turns
        self._pending[pending.held.session.number] = pending

    def start(self, session: SessionRecord, key: bytes | None) -> None:
        self._started.append(CachedSession(session, key, None, None))

    def forget(self, number: int) -> None:
        self._pending[number] = None

    def settle(self, *, committed: bool) -> None:
        """Apply the pending changes of a committed batch, or drop those of a batch that was rolled back."""
        pending_sessions, self._pending = self._pending, {}
        started, self._started = self._started, []
        if not committed:
            return
        for number, pending in pending_sessions.items():
            held = self._sessions.get(number)
            if held is None:
                continue
            if pending is None or pending.held is not held or held.newest != pending.base:
                self._drop(number)
            else:
                self._renew(held, pending)
        for held in started:
            if held.session.number not in pending_sessions:
                self.put(held)
        self._shrink()

    def _renew(self, held: CachedSession, pending: PendingSession) -> None:
        self.held_bytes -= held.bytes
        if held.last is None or pending.last is None or held.last.number != pending.last.number:
            held.forget_turns(stored=False)
        held.last, held.newest = pending.last, pending.newest
        low = row_id(held.session.number, pending.last.first if pending.last is not None else 0)
        if not held.stored:
            held.add([turn for turn in pending.added if turn[0] >= low])
        if len(held.turns) > LONGEST:
            held.forget_turns(stored=True)
        self.held_bytes += held.bytes


def read_session(tables: SessionTables, number: int) -> CachedSession | None:
    """Read a session from disk. Return None if it does not exist."""
    session, last = tables.session(number), tables.last_trajectory(number)
    if session is None:
        return None
    newest = tables.newest(*session_rows(number))
    held = CachedSession(session, tables.key(number), last, newest)
    if last is not None and last.phase is TrajectoryPhase.OPEN:
        first = row_id(number, last.first)
        if newest is not None and newest - first >= LONGEST:
            held.stored = True
        else:
            held.add(tables.answered(first, row_id(number + 1, 0), LONGEST))
    return held


HITL_SESSION = 0  # the number of the human-in-the-loop session
_NEXT_SESSION = "next_session"


@dataclass(frozen=True)
class RecordedCall:
    """The row ids of a recorded call. ``first``: that of the first choice, which the other choices follow. ``parents``:
    for each choice, that of the turn whose tokens begin its prompt, if any."""

    trajectory: int
    first: int
    parents: Sequence[int | None]


@dataclass(frozen=True)
class EndedSession:
    session_id: str
    ready: tuple[int, ...]


def start_hitl(tables: SessionTables, now: float) -> None:
    if tables.session(HITL_SESSION) is None:
        tables.add_session(SessionRecord(HITL_SESSION, HITL, "", now, hitl=True), None)
        tables.set_counter(_NEXT_SESSION, 1)


def start(
    tables: SessionTables, cache: SessionCache, task: str, keys: Sequence[bytes], online: bool, now: float
) -> list[SessionRecord]:
    """Start one session per key digest, as one group. A key that another session no longer needs moves to the new
    session. Raises 409 for a key that is in use."""
    old = [(number, key) for key in keys if (number := tables.session_by_key(key)) is not None]
    for number, _ in old:
        holder = _open_session(tables, number)
        if holds_key(holder, tables.trajectories(number), now):
            message = f"this api_key is in use by session {tables.name(holder)}, which has no finished trajectory yet"
            raise ApiError(409, message, code="api_key_in_use", param="api_key")
    first = tables.counter(_NEXT_SESSION)
    group = str(GroupName(tables.tag, first, len(keys)))
    tables.set_counter(_NEXT_SESSION, first + len(keys))
    for number, _ in old:
        tables.void_key(number)
    sessions = [SessionRecord(first + place, task, group, now, online=online) for place in range(len(keys))]
    for session, key in zip(sessions, keys, strict=True):
        tables.add_session(session, key)
        cache.start(session, key)
    return sessions


def record(
    tables: SessionTables, cache: SessionCache, number: int, call: ModelCall, now: float, hitl_limit: int
) -> RecordedCall:
    """Record each choice of a call as a turn. Raises 404 if the session was removed, 409 if it has ended."""
    pending = cache.pending(number)
    if pending is not None:
        session, newest, last = pending.held.session, pending.newest, pending.last
    else:
        session = _open_session(tables, number)
        newest = tables.newest(*session_rows(number))
        last = tables.last_trajectory(number)
    seq = 0 if newest is None else newest % SEQUENCES + 1

    def turns_of(trajectory: Trajectory) -> StoredTurns | CachedTurns:
        low = row_id(number, trajectory.first)
        if pending is None or pending.held.stored:
            return StoredTurns(tables, number, low)
        return CachedTurns(pending.held, low, pending.added)

    kind = TrajectoryKind.TEXT if isinstance(call.samples[0], TextSample) else TrajectoryKind.TOKENS
    turns = turns_of(last) if last is not None and last.phase is TrajectoryPhase.OPEN else None
    limit = hitl_limit if session.hitl else None
    placed = place_turn(session, last, seq, now, limit, same_kind=turns is None or kind_of(turns) is kind)
    if turns is None or placed.opened:
        turns = turns_of(placed.trajectory)
    prompts = [token_array(each.prompt_ids) if isinstance(each, TokenSample) else None for each in call.samples]
    parents = [find_parent(turns, call.conversation, prompt) for prompt in prompts]
    rows = [_row(number, seq + choice, call, choice, parent, now) for choice, parent in enumerate(parents)]
    if placed.before is not None:
        tables.save_trajectory(number, placed.before)
    if placed.opened:
        tables.save_trajectory(number, placed.trajectory)
    tables.db.executemany("INSERT INTO interactions VALUES (?,?,?,?,?,?,?,?,?,?)", rows)
    if pending is None:
        cache.forget(number)
    else:
        cache.follow(pending, placed.trajectory, [(row.id, row.total, row.tokens, row.after) for row in rows])
    joined = [row_id(number, parent.seq) if parent is not None and parent.shared else None for parent in parents]
    return RecordedCall(placed.trajectory.number, row_id(number, seq), joined)


class _InteractionRow(NamedTuple):
    """A row in the order of the table's columns."""

    id: int
    session: int
    name: str
    total: int
    tokens: bytes | None
    after: bytes | None
    call: bytes
    idempotency: bytes | None
    at: float
    data: bytes


def _row(number: int, seq: int, call: ModelCall, choice: int, parent: Parent | None, now: float) -> _InteractionRow:
    sample, name = call.samples[choice], call.interaction_id(choice)
    header: dict[str, object] = {
        "id": row_id(number, seq),
        "name": name,
        "parent": parent.seq if parent else None,
        "shared": parent.shared if parent else 0,
        "model": call.model,
        "answer": call.answer_id,
        "created": call.created,
        "finish": sample.finish_reason,
        "at": now,
        "extra": sample.extra,
    }
    if call.call_id is not None:
        header["call"] = call.call_id
    if isinstance(sample, TokenSample):
        prompt, output = token_array(sample.prompt_ids), token_array(sample.output_ids)
        header |= {"versions": version_runs(sample.versions), "temperature": sample.temperature, "place": sample.place}
        data = pack(header, prompt[parent.shared :] if parent else prompt, output, array("f", sample.logprobs))
        total, digest = len(prompt) + len(output), token_digest(prompt, output)
    else:
        header |= {"messages": sample.messages, "response": sample.response, "versions": []}
        data, total, digest = pack(header, array("i"), array("i"), array("f")), 0, None
    return _InteractionRow(
        row_id(number, seq), number, name, total, digest, sample.after, call.digest, call.idempotency, now, data
    )


def reward(
    tables: SessionTables, number: int, value: float, interaction_id: str | None, now: float, finish_timeout_s: float
) -> Rewarded:
    """Reward an interaction, by default the newest. Raises 400 if it does not exist, 404 if the session was removed,
    409 if its trajectory is sealed and the interaction has another reward."""
    session = _open_session(tables, number)
    target = tables.newest(*session_rows(number)) if interaction_id is None else tables.find(number, interaction_id)
    if target is None:
        if interaction_id is None:
            message = f"session {tables.name(session)} has no interaction to reward yet"
            raise bad_request(message, code="no_interaction")
        message = f"session {tables.name(session)} has no interaction {interaction_id!r}"
        raise bad_request(message, param="interaction_id", code="interaction_not_found")
    before = tables.trajectory_of(number, target % SEQUENCES)
    assert before is not None, "every interaction lies in a trajectory"
    low, high = tables.bounds(number, before)
    newest, given = tables.newest(low, high) == target, tables.reward(target)
    verdict = apply_reward(before, value, now, finish_timeout_s, newest=newest, before=given)
    (name,) = tables.db.execute("SELECT name FROM interactions WHERE id=?", (target,)).fetchone()
    answer = Rewarded(
        message="reward set",
        interaction_count=tables.count(low, high),
        session_id=tables.name(session),
        trajectory_id=verdict.trajectory.number,
        interaction_id=name,
        trajectory_ready=verdict.ready,
        ready_transition=verdict.transition,
    )
    if verdict.changed:
        tables.set_reward(target, value, now)
        if verdict.trajectory != before:
            tables.save_trajectory(number, verdict.trajectory)
    return answer


_REPEATABLE_S = 600.0


def reward_once(
    tables: SessionTables,
    request: NamedRequest | None,
    number: int,
    value: float,
    interaction_id: str | None,
    now: float,
    finish_timeout_s: float,
) -> Rewarded:
    """``reward``, or the answer to the earlier request of the same name: by now the session's last interaction may be
    another one. Raises also 422 if that request asked for something else."""
    if request is not None and (answer := tables.answer_of(number, request)) is not None:
        return Rewarded(**orjson.loads(answer))
    given = reward(tables, number, value, interaction_id, now, finish_timeout_s)
    if request is not None:
        tables.keep_answer(number, request, orjson.dumps(given), now + _REPEATABLE_S)
    return given


def check_exported_reward(tables: SessionTables, number: int, place: int, value: float) -> None:
    """Raise 409 if the last interaction of an exported trajectory has a reward other than ``value``."""
    trajectory = tables.trajectory(number, place)
    target = tables.newest(*tables.bounds(number, trajectory)) if trajectory is not None else None
    check_sealed(value, tables.reward(target) if target is not None else None)


def end(tables: SessionTables, number: int, now: float, request: NamedRequest | None = None) -> EndedSession:
    """End a session: all its trajectories become ready. Idempotent; of the human in the loop, whose next trajectory
    may have begun by now, by the name of the request. Raises 404 if the session was removed, 422 as ``reward_once``."""
    session = _open_session(tables, number)
    named = request if session.hitl else None
    if named is not None and (stored := tables.answer_of(number, named)) is not None:
        first = orjson.loads(stored)
        return EndedSession(first["session_id"], tuple(first["ready"]))
    before = tables.trajectories(number)
    ended, trajectories = end_session(session, before, now)
    for old, new in zip(before, trajectories, strict=True):
        if new != old:
            tables.save_trajectory(number, new)
    if ended != session:
        tables.save_session(ended)
    ready = tuple(each.number for each in trajectories if each.phase is TrajectoryPhase.READY)
    answer = EndedSession(tables.name(session), ready)
    if named is not None:
        tables.keep_answer(number, named, orjson.dumps(answer), now + _REPEATABLE_S)
    return answer


def note_failure(tables: SessionTables, number: int, code: str, now: float) -> None:
    """Count a failed call for the trajectory that it would have joined. Failures are never scored."""
    session = _open_session(tables, number)
    last = tables.last_trajectory(number)
    if last is None:
        place = session.next_trajectory
    elif apply_timeout(last, now).phase < TrajectoryPhase.READY:
        place = last.number
    else:
        place = max(last.number + 1, session.next_trajectory)
    query = "INSERT INTO failures VALUES (?,?,?,1) ON CONFLICT (session, trajectory, code) DO UPDATE SET count=count+1"
    tables.db.execute(query, (number, place, code))


def _open_session(tables: SessionTables, number: int) -> SessionRecord:
    session = tables.session(number)
    if session is None or session.state is SessionState.REMOVED:
        raise ApiError(404, "the session is gone: it was exported, or it expired", code="session_not_found")
    return session
