"""The changes that a session goes through, as they are written. Each decides first (``session``, pure), then writes.

Every function here runs inside one change of the journal's group commit, on the writer's ledger.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from areal.services.inference.recording import session as rules
from areal.services.inference.recording.conversation import token_digest
from areal.services.inference.recording.database import SEQUENCES
from areal.services.inference.recording.ledger import Ledger, row_id
from areal.services.inference.recording.lineage import Parent, StoredTurns, Turns, find_parent, kind_of
from areal.services.inference.recording.names import HITL, GroupName
from areal.services.inference.recording.packing import pack, runs, token_array
from areal.services.inference.recording.session import Kind, Life, Phase, Session, Target, Trajectory
from areal.services.inference.recording.values import Call, Sample, TextSample, TokenSample
from areal.services.inference.recording.warm import WarmSessions, WarmTurns
from areal.services.web.errors import ApiError, bad_request

STANDING = 0  # the number of the human-in-the-loop session
_NEXT_SESSION = "next_session"


@dataclass(frozen=True)
class Recorded:
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
class Ended:
    session_id: str
    ready: tuple[int, ...]


def start_standing(ledger: Ledger, now: float) -> None:
    if ledger.session(STANDING) is None:
        ledger.add_session(Session(STANDING, HITL, "", now, standing=True), None)
        ledger.set_counter(_NEXT_SESSION, 1)


def start(
    ledger: Ledger, warm: WarmSessions, task: str, keys: Sequence[bytes], online: bool, now: float
) -> list[Session]:
    """One session a key digest, as one group. Raises 409 when a key is in use; a key that is not moves here."""
    old = [(number, key) for key in keys if (number := ledger.session_by_key(key)) is not None]
    for number, _ in old:
        holder = _known(ledger, number)
        if rules.holds_key(holder, ledger.trajectories(number), now):
            message = f"this api_key is in use by session {ledger.name(holder)}, which has no finished trajectory yet"
            raise ApiError(409, message, code="api_key_in_use", param="api_key")
    first = ledger.counter(_NEXT_SESSION)
    group = str(GroupName(ledger.tag, first, len(keys)))
    ledger.set_counter(_NEXT_SESSION, first + len(keys))
    for number, _ in old:
        ledger.void_key(number)
    sessions = [Session(first + place, task, group, now, online=online) for place in range(len(keys))]
    for session, key in zip(sessions, keys, strict=True):
        ledger.add_session(session, key)
        warm.start(session, key)
    return sessions


def record(ledger: Ledger, warm: WarmSessions, number: int, call: Call, now: float, standing_limit: int) -> Recorded:
    """Raises 409 for a session that ended."""
    draft = warm.draft(number)
    if draft is not None:
        session, newest, last = draft.session, draft.newest, draft.last
    else:
        session = _known(ledger, number)
        newest = ledger.newest(row_id(number, 0), row_id(number + 1, 0))
        last = ledger.last_trajectory(number)
    seq = 0 if newest is None else newest % SEQUENCES + 1

    def turns_of(trajectory: Trajectory) -> Turns:
        low = row_id(number, trajectory.first)
        return StoredTurns(ledger, number, low) if draft is None else WarmTurns(draft.held, low, draft.added)

    kind = Kind.TEXT if isinstance(call.samples[0], TextSample) else Kind.TOKENS
    same_kind = last is None or last.phase is not Phase.OPEN or kind_of(turns_of(last)) is kind
    limit = standing_limit if session.standing else None
    placed = rules.place(session, last, seq, now, limit, same_kind=same_kind)
    turns = turns_of(placed.trajectory)
    rows = [_row(number, turns, seq + choice, call, choice, now) for choice in range(len(call.samples))]
    if placed.before is not None:
        ledger.save_trajectory(number, placed.before)
    if placed.opened:
        ledger.save_trajectory(number, placed.trajectory)
    ledger.db.executemany("INSERT INTO interactions VALUES (?,?,?,?,?,?,?,?,?,?)", rows)
    if draft is None:
        warm.forget(number)
    else:
        warm.follow(draft, placed.trajectory, [((row.id, row.total, row.tokens), row.after) for row in rows])
    names = tuple(call.interaction_id(choice) for choice in range(len(call.samples)))
    return Recorded(number, placed.trajectory.number, names, row_id(number, seq))


class _Row(NamedTuple):
    """As the table has it."""

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


def _row(number: int, turns: Turns, seq: int, call: Call, choice: int, now: float) -> _Row:
    sample, name = call.samples[choice], call.interaction_id(choice)
    prompt = token_array(sample.prompt_ids) if isinstance(sample, TokenSample) else None
    parent = find_parent(turns, call.conversation, prompt)
    header = {
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
    total, digest, data = _content(header, parent, prompt, sample)
    return _Row(
        row_id(number, seq), number, name, total, digest, sample.after, call.digest, call.idempotency, now, data
    )


def _content(
    header: dict[str, object], parent: Parent | None, prompt: array[int] | None, sample: Sample
) -> tuple[int, bytes | None, bytes]:
    """How many tokens the turn has in all, their digest, and its bytes."""
    if isinstance(sample, TextSample) or prompt is None:
        assert isinstance(sample, TextSample)
        header |= {"messages": sample.messages, "response": sample.response, "versions": []}
        return 0, None, pack(header, array("i"), array("i"), array("f"))
    output = token_array(sample.output_ids)
    text = [sample.text[0], sample.text[1].hex()] if sample.text else None
    header |= {"versions": runs(sample.versions), "text": text, "temperature": sample.temperature}
    rest = prompt[parent.shared :] if parent else prompt
    data = pack(header, rest, output, array("f", sample.logprobs))
    return len(prompt) + len(output), token_digest(prompt, output), data


def reward(
    ledger: Ledger, number: int, value: float, interaction_id: str | None, now: float, finish_timeout_s: float
) -> RewardAnswer:
    """Raises 400 without an interaction to reward, 409 when it is sealed with another value."""
    session = _known(ledger, number)
    low, high = row_id(number, 0), row_id(number + 1, 0)
    target = ledger.find(number, interaction_id) if interaction_id is not None else ledger.newest(low, high)
    if target is None:
        raise _no_interaction(ledger.name(session), interaction_id)
    before = ledger.trajectory_of(number, target % SEQUENCES)
    assert before is not None, "every interaction lies in a trajectory"
    low, high = ledger.bounds(number, before)
    aim = Target(target % SEQUENCES, ledger.newest(low, high) == target, ledger.reward(target))
    verdict = rules.reward(before, aim, value, now, finish_timeout_s)
    answer = _reward_answer(ledger, session, target, verdict, ledger.count(low, high))
    if verdict.changed:
        ledger.set_reward(target, value, now)
        if verdict.trajectory != before:
            ledger.save_trajectory(number, verdict.trajectory)
    return answer


def _no_interaction(session_id: str, interaction_id: str | None) -> ApiError:
    if interaction_id is None:
        return bad_request(f"session {session_id} has no interaction to reward yet", code="no_interaction")
    message = f"session {session_id} has no interaction {interaction_id!r}"
    return bad_request(message, param="interaction_id", code="interaction_not_found")


def _reward_answer(ledger: Ledger, session: Session, target: int, verdict: rules.Rewarded, count: int) -> RewardAnswer:
    (name,) = ledger.db.execute("SELECT name FROM interactions WHERE id=?", (target,)).fetchone()
    return RewardAnswer(
        message="reward set",
        interaction_count=count,
        session_id=ledger.name(session),
        trajectory_id=verdict.trajectory.number,
        interaction_id=name,
        trajectory_ready=verdict.ready,
        ready_transition=verdict.transition,
    )


def end(ledger: Ledger, number: int, now: float) -> Ended:
    """Idempotent."""
    session = _known(ledger, number)
    before = ledger.trajectories(number)
    ended, trajectories = rules.end(session, before, now)
    for old, new in zip(before, trajectories, strict=True):
        if new != old:
            ledger.save_trajectory(number, new)
    if ended != session:
        ledger.save_session(ended)
    ready = tuple(each.number for each in trajectories if each.phase is Phase.READY)
    return Ended(ledger.name(session), ready)


def note_failure(ledger: Ledger, number: int, code: str, now: float) -> None:
    """A call failed that would have been an interaction: counted beside the trajectory, never scored."""
    session = _known(ledger, number)
    last = _last(ledger, number, now)
    following = session.next_trajectory if last is None else last.number + 1
    place = last.number if last is not None and last.phase < Phase.READY else following
    query = "INSERT INTO failures VALUES (?,?,?,1) ON CONFLICT (session, trajectory, code) DO UPDATE SET count=count+1"
    ledger.db.execute(query, (number, place, code))


def release(ledger: Ledger, number: int, trajectory: Trajectory) -> None:
    """Forget a trajectory. A removed session goes with its last one."""
    session = ledger.session(number)
    if session is None:
        return
    following = max(session.next_trajectory, trajectory.number + 1)
    ledger.delete_trajectory(number, trajectory)
    if session.life is Life.REMOVED and ledger.last_trajectory(number) is None:
        ledger.delete_session(number)
    else:
        ledger.save_session(replace(session, next_trajectory=following))


def _known(ledger: Ledger, number: int) -> Session:
    session = ledger.session(number)
    if session is None or session.life is Life.REMOVED:
        raise ApiError(404, "the session is gone: it was exported, or it expired", code="session_not_found")
    return session


def _last(ledger: Ledger, number: int, now: float) -> Trajectory | None:
    last = ledger.last_trajectory(number)
    return rules.matured(last, now) if last is not None else None
