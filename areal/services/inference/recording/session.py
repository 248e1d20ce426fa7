"""What may happen to one session, as pure functions over values. No I/O, no clock.

A session is a row of trajectories, numbered from 0. A chat joins the last one, or opens the next when that is
sealed::

    OPEN --reward on its newest interaction--> SEALING --finish timeout, next chat or end--> READY --export--> TAKEN
      \\______________(no finish timeout)_______________________________________________^
      \\______________________________end: unrewarded______________________________________^

An interaction belongs to the trajectory that is open when it is recorded, that is when its answer is complete. A
trajectory has calls of token models or of external ones, never both: a change of kind opens the next, and leaves the
last one open until it is rewarded or the session ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from areal.services.web.errors import ApiError, bad_request

LARGEST_F32 = 3.4028234663852886e38


class Phase(IntEnum):
    OPEN = 0
    SEALING = 1
    READY = 2
    TAKEN = 3


class Kind(IntEnum):
    """What the calls of a trajectory are made of: tokens of an engine, or messages of an external model."""

    TOKENS = 0
    TEXT = 1


class Sealed(IntEnum):
    """What made a trajectory ready."""

    NOT = 0
    REWARD = 1
    TIMEOUT = 2
    CHAT = 3
    END = 4


class Life(IntEnum):
    ACTIVE = 0
    ENDED = 1
    REMOVED = 2  # its key is void; the rows stay until its exports are released


@dataclass(frozen=True, slots=True)
class Session:
    """``standing``: the human-in-the-loop session, which never ends. ``online``: its trajectories are offered to
    whoever asks for any. ``next_trajectory``: no number is used again, even when what had it is gone."""

    number: int
    task: str
    group: str
    created: float
    life: Life = Life.ACTIVE
    online: bool = True
    standing: bool = False
    next_trajectory: int = 0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """``first`` is the sequence number of its first interaction. ``due``: when a SEALING one is ready."""

    number: int
    first: int
    phase: Phase = Phase.OPEN
    due: float | None = None
    sealed: Sealed = Sealed.NOT
    ready_at: float | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """The interaction that a reward is for, within its trajectory."""

    seq: int
    newest: bool
    reward: float | None


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a new interaction goes: ``trajectory``, new or not; ``before`` is what became of the last one."""

    trajectory: Trajectory
    opened: bool
    before: Trajectory | None = None


@dataclass(frozen=True, slots=True)
class Rewarded:
    """``changed`` false: the same reward again, only answered. ``transition``: this reward made it ready."""

    trajectory: Trajectory
    changed: bool
    transition: bool

    @property
    def ready(self) -> bool:
        return self.trajectory.phase >= Phase.READY


def matured(trajectory: Trajectory, now: float) -> Trajectory:
    """The trajectory as it is at ``now``: one whose finish timeout has passed is ready."""
    if trajectory.phase is Phase.SEALING and trajectory.due is not None and trajectory.due <= now:
        return _ready(trajectory, Sealed.TIMEOUT, trajectory.due)
    return trajectory


def _ready(trajectory: Trajectory, how: Sealed, at: float) -> Trajectory:
    return replace(trajectory, phase=Phase.READY, due=None, sealed=how, ready_at=at)


def place(
    session: Session, last: Trajectory | None, seq: int, now: float, limit: int | None, *, same_kind: bool = True
) -> Placed:
    """Where the interaction with number ``seq`` goes. ``limit``: how many a trajectory of a standing session may hold.
    A fuller one, and one of another kind, is left behind, open. Raises 409 for a session that ended."""
    if session.life is not Life.ACTIVE:
        raise ApiError(409, "the session has ended", code="session_ended")
    if last is None:
        return Placed(Trajectory(session.next_trajectory, seq), opened=True)
    last = matured(last, now)
    following = Trajectory(max(last.number + 1, session.next_trajectory), seq)
    if last.phase is Phase.OPEN:
        full = limit is not None and seq - last.first >= limit
        return Placed(following, opened=True) if full or not same_kind else Placed(last, opened=False)
    if last.phase is Phase.SEALING:
        return Placed(following, opened=True, before=_ready(last, Sealed.CHAT, now))
    return Placed(following, opened=True)


def read_kind(text: str | None) -> Kind | None:
    """Of a query. Raises 400."""
    if text is None:
        return None
    try:
        return {"tokens": Kind.TOKENS, "text": Kind.TEXT}[text]
    except KeyError:
        raise bad_request("kind must be tokens or text", param="kind") from None


def check_reward(value: object) -> float:
    """A reward as a number that fits a training row. Raises 400."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_request("reward must be a number", param="reward")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or abs(number) > LARGEST_F32:
        raise bad_request("reward must be finite, within the range of float32", param="reward")
    return number


def reward(trajectory: Trajectory, target: Target, value: float, now: float, finish_timeout_s: float) -> Rewarded:
    """Raises 409 when the trajectory is sealed and the value is another one."""
    trajectory = matured(trajectory, now)
    if trajectory.phase >= Phase.READY:
        if target.reward != value:
            what = "without a reward on it" if target.reward is None else f"with reward {target.reward:g}"
            raise ApiError(409, f"the trajectory is sealed, {what}", code="trajectory_sealed", param="reward")
        return Rewarded(trajectory, changed=False, transition=trajectory.sealed is Sealed.REWARD and target.newest)
    if not target.newest and trajectory.phase is Phase.OPEN:
        return Rewarded(trajectory, changed=True, transition=False)
    if finish_timeout_s > 0 or not target.newest:
        sealing = replace(trajectory, phase=Phase.SEALING, due=now + finish_timeout_s)
        return Rewarded(sealing, changed=True, transition=False)
    return Rewarded(_ready(trajectory, Sealed.REWARD, now), changed=True, transition=True)


def end(session: Session, trajectories: Sequence[Trajectory], now: float) -> tuple[Session, list[Trajectory]]:
    """The session and its trajectories after its end: all are ready. Ending it again changes nothing. A standing
    session goes on with its next trajectory."""
    ended = [matured(each, now) for each in trajectories]
    ended = [each if each.phase >= Phase.READY else _ready(each, Sealed.END, now) for each in ended]
    if session.standing or session.life is not Life.ACTIVE:
        return session, ended
    return replace(session, life=Life.ENDED), ended


def holds_key(session: Session, trajectories: Sequence[Trajectory], now: float) -> bool:
    """Whether its key is in use, so that no other session may start with it: until its first trajectory is ready."""
    if session.life is not Life.ACTIVE or session.next_trajectory > 0:
        return False
    return not any(matured(each, now).phase >= Phase.READY for each in trajectories)
