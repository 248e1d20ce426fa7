r"""Session and trajectory state, its transitions as pure functions, and identifiers. No I/O, no clock.

A session is a sequence of trajectories, numbered from 0. A model call joins the last trajectory, or opens the next one
if the last is sealed::

    OPEN --reward on its newest interaction--> SEALING --finish timeout, next chat or end--> READY --export--> TAKEN
      \______________(no finish timeout)_______________________________________________^
      \______________________________end: unrewarded______________________________________^

An interaction belongs to the trajectory that is open when it is recorded, that is, when its answer is complete. A
trajectory has calls of token models or of external models, never both: a change of kind opens the next trajectory, and
leaves the last one open until it is rewarded or the session ends.

Each journal has a random tag. The ids of sessions, groups, exports, leases and answers, and session keys, contain the
tag of their journal (``areal.services.journal.keys``). So a relay that knows which data proxy serves which journal can
route them all without a table of sessions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import ClassVar, Self

from areal.dataclasses import dataclass, replace
from areal.http.headers import unique_id
from areal.services.http.errors import ApiError, bad_field, bad_request
from areal.services.journal.keys import TAG
from areal.wire.bodies import LARGEST_F32


class TrajectoryPhase(IntEnum):
    OPEN = 0
    SEALING = 1
    READY = 2
    TAKEN = 3


class TrajectoryKind(IntEnum):
    """Whether a trajectory has tokens of an engine or messages of an external model."""

    TOKENS = 0
    TEXT = 1


class SealReason(IntEnum):
    """The event that made a trajectory ready."""

    NONE = 0
    REWARD = 1
    TIMEOUT = 2
    CHAT = 3
    END = 4


class SessionState(IntEnum):
    ACTIVE = 0
    ENDED = 1
    REMOVED = 2  # its key is void; the rows stay until its exports are released


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session. ``hitl``: the human-in-the-loop session, which never ends. ``online``: its trajectories are offered in
    online mode. ``next_trajectory``: the least number of a new trajectory, so that no number is used twice."""

    number: int
    task: str
    group: str
    created: float
    state: SessionState = SessionState.ACTIVE
    online: bool = True
    hitl: bool = False
    next_trajectory: int = 0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A trajectory. ``first``: the sequence number of its first interaction. ``due``: when it becomes READY if it is
    SEALING, in Unix seconds. ``sealed``: why it became READY."""

    number: int
    first: int
    phase: TrajectoryPhase = TrajectoryPhase.OPEN
    due: float | None = None
    sealed: SealReason = SealReason.NONE
    ready_at: float | None = None


@dataclass(frozen=True, slots=True)
class TurnPlacement:
    """The trajectory of a new interaction. ``before``: the previous trajectory, if the interaction made it READY."""

    trajectory: Trajectory
    opened: bool
    before: Trajectory | None = None


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """A trajectory after a reward. ``changed`` is false for a repeated request, which writes nothing. ``transition``:
    this reward made the trajectory READY."""

    trajectory: Trajectory
    changed: bool
    transition: bool

    @property
    def ready(self) -> bool:
        return self.trajectory.phase >= TrajectoryPhase.READY


def apply_timeout(trajectory: Trajectory, now: float) -> Trajectory:
    """Return the trajectory at ``now``: READY if it was SEALING and its finish timeout has passed."""
    if trajectory.phase is TrajectoryPhase.SEALING and trajectory.due is not None and trajectory.due <= now:
        return _ready(trajectory, SealReason.TIMEOUT, trajectory.due)
    return trajectory


def _ready(trajectory: Trajectory, how: SealReason, at: float) -> Trajectory:
    return replace(trajectory, phase=TrajectoryPhase.READY, due=None, sealed=how, ready_at=at)


def place_turn(
    session: SessionRecord, last: Trajectory | None, seq: int, now: float, limit: int | None, *, same_kind: bool = True
) -> TurnPlacement:
    """Return the trajectory of the new interaction ``seq``.

    ``limit``: the most interactions of a trajectory in the human-in-the-loop session. If the open trajectory is full or
    of another kind, it stays open and the next one is opened. Raises 409 if the session has ended.
    """
    if session.state is not SessionState.ACTIVE:
        raise ApiError(409, "the session has ended", code="session_ended")
    if last is None:
        return TurnPlacement(Trajectory(session.next_trajectory, seq), opened=True)
    last = apply_timeout(last, now)
    if last.phase is TrajectoryPhase.OPEN and same_kind and (limit is None or seq - last.first < limit):
        return TurnPlacement(last, opened=False)
    following = Trajectory(max(last.number + 1, session.next_trajectory), seq)
    sealed = _ready(last, SealReason.CHAT, now) if last.phase is TrajectoryPhase.SEALING else None
    return TurnPlacement(following, opened=True, before=sealed)


def parse_kind(text: str | None) -> TrajectoryKind | None:
    """Return the trajectory kind of a query parameter. Raises 400."""
    if text is None:
        return None
    try:
        return {"tokens": TrajectoryKind.TOKENS, "text": TrajectoryKind.TEXT}[text]
    except KeyError:
        raise bad_field("kind", "must be tokens or text") from None


def check_reward(value: object) -> float:
    """Return a reward as a number that fits a training row. Raises 400."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_field("reward", "must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or abs(number) > LARGEST_F32:
        raise bad_field("reward", "must be finite, within the range of float32")
    return number


def apply_reward(
    trajectory: Trajectory, value: float, now: float, finish_timeout_s: float, *, newest: bool, before: float | None
) -> RewardOutcome:
    """Return the trajectory after a reward for one of its interactions. ``newest``: it is the newest interaction.
    ``before``: the interaction's present reward. Raises 409 if the trajectory is sealed and ``value`` differs from
    ``before``."""
    trajectory = apply_timeout(trajectory, now)
    if trajectory.phase >= TrajectoryPhase.READY:
        check_sealed(value, before)
        return RewardOutcome(trajectory, changed=False, transition=trajectory.sealed is SealReason.REWARD and newest)
    if not newest and trajectory.phase is TrajectoryPhase.OPEN:
        return RewardOutcome(trajectory, changed=True, transition=False)
    if finish_timeout_s > 0 or not newest:
        sealing = replace(trajectory, phase=TrajectoryPhase.SEALING, due=now + finish_timeout_s)
        return RewardOutcome(sealing, changed=True, transition=False)
    return RewardOutcome(_ready(trajectory, SealReason.REWARD, now), changed=True, transition=True)


def check_sealed(value: float, before: float | None) -> None:
    """Raise 409 if a reward for an interaction of a sealed trajectory differs from its present reward, ``before``."""
    if before != value:
        what = "without a reward on it" if before is None else f"with reward {before:g}"
        raise ApiError(409, f"the trajectory is sealed, {what}", code="trajectory_sealed", param="reward")


def end_session(
    session: SessionRecord, trajectories: Sequence[Trajectory], now: float
) -> tuple[SessionRecord, list[Trajectory]]:
    """Return the session and its trajectories after its end: all trajectories are READY or TAKEN. Ending it again
    changes nothing. The human-in-the-loop session stays active and continues with its next trajectory."""
    ended = [apply_timeout(each, now) for each in trajectories]
    ended = [each if each.phase >= TrajectoryPhase.READY else _ready(each, SealReason.END, now) for each in ended]
    if session.hitl or session.state is not SessionState.ACTIVE:
        return session, ended
    return replace(session, state=SessionState.ENDED), ended


def holds_key(session: SessionRecord, trajectories: Sequence[Trajectory], now: float) -> bool:
    """Return whether this session reserves its key: no other session may use the key until its first trajectory is
    ready."""
    if session.state is not SessionState.ACTIVE or session.next_trajectory > 0:
        return False
    return not any(apply_timeout(each, now).phase >= TrajectoryPhase.READY for each in trajectories)


HITL = "__hitl__"
_ANSWER = re.compile(rf"[a-z]+-(?P<tag>{TAG})[0-9a-f]{{24}}(-[0-9]+)?")


class Name:
    """An id that contains the tag of its journal: ``str()`` is the text that clients see. ``form``: its regular
    expression, with a group for each field."""

    kind: ClassVar[str]
    form: ClassVar[re.Pattern[str]]

    @classmethod
    def parse(cls, text: object) -> Self | None:
        met = cls.form.fullmatch(text) if isinstance(text, str) else None
        if met is None:
            return None
        return cls(**{name: int(part) if name in _NUMBERS else part for name, part in met.groupdict().items()})

    @classmethod
    def require(cls, text: object, param: str | None = None) -> Self:
        """Parse an id. Raises 404 if it is malformed."""
        name = cls.parse(text)
        if name is None:
            raise cls.unknown(text, param)
        return name

    @classmethod
    def unknown(cls, text: object, param: str | None = None) -> ApiError:
        param = param or f"{cls.kind}_id"
        return ApiError(404, f"no {cls.kind} {text!r}", code=f"{cls.kind}_not_found", param=param)


_NUMBERS = ("number", "first", "size", "session", "trajectory")


@dataclass(frozen=True)
class SessionName(Name):
    kind = "session"
    form = re.compile(rf"(?P<task>.{{1,256}})-(?P<tag>{TAG})-(?P<number>[0-9]{{1,9}})", re.DOTALL)
    task: str
    tag: str
    number: int

    def __str__(self) -> str:
        return f"{self.task}-{self.tag}-{self.number}"


@dataclass(frozen=True)
class GroupName(Name):
    """The sessions of one group have consecutive numbers, from ``first``."""

    kind = "group"
    form = re.compile(rf"grp-(?P<tag>{TAG})-(?P<first>[0-9]{{1,9}})-(?P<size>[0-9]{{1,4}})")
    tag: str
    first: int
    size: int

    def __str__(self) -> str:
        return f"grp-{self.tag}-{self.first}-{self.size}"

    def check_members(self, session_ids: Iterable[str]) -> None:
        """Raise 400 for a session of another group, 404 for an invalid session id."""
        for session_id in session_ids:
            name = SessionName.require(session_id, "session_ids")
            if name.tag != self.tag or not self.first <= name.number < self.first + self.size:
                raise bad_request(f"session {session_id!r} is not in group {self}", param="group_id")


@dataclass(frozen=True)
class ExportName(Name):
    kind = "export"
    form = re.compile(rf"exp-(?P<tag>{TAG})-(?P<number>[0-9]{{1,12}})-(?P<nonce>[0-9a-f]{{8}})")
    tag: str
    number: int
    nonce: str

    def __str__(self) -> str:
        return f"exp-{self.tag}-{self.number}-{self.nonce}"


@dataclass(frozen=True)
class LeaseName(Name):
    kind = "lease"
    form = re.compile(rf"lse-(?P<tag>{TAG})-(?P<session>[0-9]{{1,9}})-(?P<trajectory>[0-9]{{1,9}})")
    tag: str
    session: int
    trajectory: int

    def __str__(self) -> str:
        return f"lse-{self.tag}-{self.session}-{self.trajectory}"


def read_leases(data: Mapping[str, object]) -> list[LeaseName]:
    """Return the ``lease_ids`` of a request. Raises 400."""
    given = data.get("lease_ids")
    leases = [lease for item in given if (lease := LeaseName.parse(item))] if isinstance(given, list) else []
    if not isinstance(given, list) or len(leases) < len(given):
        raise bad_field("lease_ids", "must be a list of lease ids")
    return leases


def new_answer_id(prefix: str, tag: str | None) -> str:
    """Return a random id with ``prefix`` (such as ``chatcmpl-``) and, if the answer is recorded, the journal's tag."""
    return unique_id(prefix + (tag or ""))


def tag_of_answer(answer_id: str) -> str | None:
    met = _ANSWER.fullmatch(answer_id)
    return met["tag"] if met else None
