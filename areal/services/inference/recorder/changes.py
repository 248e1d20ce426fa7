"""The changes that a session goes through, as they are written. Each decides first (``session``, pure), then writes.

Every function here runs inside one change of the journal's group commit, on the writer's tables.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from areal.services.http.errors import ApiError, bad_request
from areal.services.inference.recorder.cache import (
    CachedTurns,
    SessionCache,
    StoredTurns,
    TurnIndex,
    find_parent,
    kind_of,
)
from areal.services.inference.recorder.records import (
    ModelCall,
    TextSample,
    TokenSample,
    pack,
    token_array,
    token_digest,
    version_runs,
)
from areal.services.inference.recorder.session import (
    HITL,
    GroupName,
    RewardTarget,
    SessionRecord,
    SessionState,
    Trajectory,
    TrajectoryKind,
    TrajectoryPhase,
    apply_reward,
    apply_timeout,
    end_session,
    holds_key,
    place_turn,
)
from areal.services.inference.recorder.storage import SEQUENCES
from areal.services.inference.recorder.tables import SessionTables, row_id, session_rows

HITL_SESSION = 0  # the number of the human-in-the-loop session
_NEXT_SESSION = "next_session"


@dataclass(frozen=True)
class RecordedCall:
    """``first`` is the row of the first choice; the others follow it."""

    session: int
    trajectory: int
    interaction_ids: tuple[str, ...]
    first: int


@dataclass(frozen=True)
class RewardAnswer:
    message: str
    interaction_count: int
    session_id: str
    trajectory_id: int
    interaction_id: str
    trajectory_ready: bool
    ready_transition: bool


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
    """One session a key digest, as one group. Raises 409 when a key is in use; a key that is not moves here."""
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
    """Raises 409 for a session that ended."""
    pending = cache.pending(number)
    if pending is not None:
        session, newest, last = pending.session, pending.newest, pending.last
    else:
        session = _open_session(tables, number)
        newest = tables.newest(*session_rows(number))
        last = tables.last_trajectory(number)
    seq = 0 if newest is None else newest % SEQUENCES + 1

    def turns_of(trajectory: Trajectory) -> TurnIndex:
        low = row_id(number, trajectory.first)
        return StoredTurns(tables, number, low) if pending is None else CachedTurns(pending.held, low, pending.added)

    kind = TrajectoryKind.TEXT if isinstance(call.samples[0], TextSample) else TrajectoryKind.TOKENS
    same_kind = last is None or last.phase is not TrajectoryPhase.OPEN or kind_of(turns_of(last)) is kind
    limit = hitl_limit if session.hitl else None
    placed = place_turn(session, last, seq, now, limit, same_kind=same_kind)
    turns = turns_of(placed.trajectory)
    rows = [_row(number, turns, seq + choice, call, choice, now) for choice in range(len(call.samples))]
    if placed.before is not None:
        tables.save_trajectory(number, placed.before)
    if placed.opened:
        tables.save_trajectory(number, placed.trajectory)
    tables.db.executemany("INSERT INTO interactions VALUES (?,?,?,?,?,?,?,?,?,?)", rows)
    if pending is None:
        cache.forget(number)
    else:
        cache.follow(pending, placed.trajectory, [((row.id, row.total, row.tokens), row.after) for row in rows])
    names = tuple(call.interaction_id(choice) for choice in range(len(call.samples)))
    return RecordedCall(number, placed.trajectory.number, names, row_id(number, seq))


class _InteractionRow(NamedTuple):
    """In the order of the table's columns."""

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


def _row(number: int, turns: TurnIndex, seq: int, call: ModelCall, choice: int, now: float) -> _InteractionRow:
    sample, name = call.samples[choice], call.interaction_id(choice)
    prompt = token_array(sample.prompt_ids) if isinstance(sample, TokenSample) else None
    parent = find_parent(turns, call.conversation, prompt)
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
    if isinstance(sample, TokenSample) and prompt is not None:
        output = token_array(sample.output_ids)
        text = [sample.text[0], sample.text[1].hex()] if sample.text else None
        header |= {"versions": version_runs(sample.versions), "text": text, "temperature": sample.temperature}
        data = pack(header, prompt[parent.shared :] if parent else prompt, output, array("f", sample.logprobs))
        total, digest = len(prompt) + len(output), token_digest(prompt, output)
    else:
        assert isinstance(sample, TextSample)
        header |= {"messages": sample.messages, "response": sample.response, "versions": []}
        data, total, digest = pack(header, array("i"), array("i"), array("f")), 0, None
    return _InteractionRow(
        row_id(number, seq), number, name, total, digest, sample.after, call.digest, call.idempotency, now, data
    )


def reward(
    tables: SessionTables, number: int, value: float, interaction_id: str | None, now: float, finish_timeout_s: float
) -> RewardAnswer:
    """Raises 400 without an interaction to reward, 409 when it is sealed with another value."""
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
    aim = RewardTarget(target % SEQUENCES, tables.newest(low, high) == target, tables.reward(target))
    verdict = apply_reward(before, aim, value, now, finish_timeout_s)
    (name,) = tables.db.execute("SELECT name FROM interactions WHERE id=?", (target,)).fetchone()
    answer = RewardAnswer(
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


def end(tables: SessionTables, number: int, now: float) -> EndedSession:
    """Idempotent."""
    session = _open_session(tables, number)
    before = tables.trajectories(number)
    ended, trajectories = end_session(session, before, now)
    for old, new in zip(before, trajectories, strict=True):
        if new != old:
            tables.save_trajectory(number, new)
    if ended != session:
        tables.save_session(ended)
    ready = tuple(each.number for each in trajectories if each.phase is TrajectoryPhase.READY)
    return EndedSession(tables.name(session), ready)


def note_failure(tables: SessionTables, number: int, code: str, now: float) -> None:
    """A call failed that would have been an interaction: counted beside the trajectory, never scored."""
    session = _open_session(tables, number)
    last = tables.last_trajectory(number)
    if last is None:
        place = session.next_trajectory
    else:
        place = last.number + (apply_timeout(last, now).phase >= TrajectoryPhase.READY)
    query = "INSERT INTO failures VALUES (?,?,?,1) ON CONFLICT (session, trajectory, code) DO UPDATE SET count=count+1"
    tables.db.execute(query, (number, place, code))


def _open_session(tables: SessionTables, number: int) -> SessionRecord:
    session = tables.session(number)
    if session is None or session.state is SessionState.REMOVED:
        raise ApiError(404, "the session is gone: it was exported, or it expired", code="session_not_found")
    return session
