"""A reference model of recorded sessions, in plain lists: no files, no processes, no clock.

A session is a list of trajectories; a call joins the last one, or opens the next one when the last is ready. The model
has no tokens: they come from the engine's log (``witness``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal.services.inference.recorder.session import SessionName
from tests.reliability.asking import CHAT, Reply
from tests.reliability.witness import Truth, Witness
from tests.services.inference.recorder.rollouts import Rollout

_BY_TOKENS = 64  # a plain completion has no messages: its parent is searched by tokens, among the newest turns


@dataclass(frozen=True)
class Call:
    """A call, with all that a retry needs."""

    path: str
    body: Mapping[str, Any]
    key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Idempotency-Key": self.key} if self.key else {}


@dataclass(eq=False, repr=False)
class Turn:
    """One interaction. ``base``: the turn that its call continues; ``parent``: the same, if it is in the same
    trajectory."""

    name: str
    call: Call
    reply: Reply
    choice: int
    base: Turn | None
    parent: Turn | None
    reward: float | None = None

    def __repr__(self) -> str:
        return self.name  # the generated one would print all of its ancestors

    @property
    def own_reward(self) -> float:
        return self.reward or 0.0

    def messages(self) -> list[dict[str, Any]]:
        """The conversation, including its answer; empty for a plain completion."""
        if self.call.path != CHAT:
            return []
        return [*self.call.body["messages"], {"role": "assistant", "content": self.reply.choices[self.choice].text}]


@dataclass
class Trajectory:
    """``held``: false once its export was acknowledged and it was deleted. ``taken``: the newest export that has it;
    others may have it too if that export is ``shared``."""

    turns: list[Turn] = field(default_factory=list)
    ready: bool = False
    taken: str | None = None
    shared: bool = False
    held: bool = True

    def returns(self, discount: float) -> dict[str, float]:
        """The discounted returns along the tree: ``r_i += discount * r_child``."""
        rewards = {turn.name: turn.own_reward for turn in self.turns}
        for turn in reversed(self.turns):
            if turn.parent is not None:
                rewards[turn.parent.name] += discount * rewards[turn.name]
        return rewards


@dataclass(repr=False)
class Session:
    rollout: Rollout
    trajectories: list[Trajectory] = field(default_factory=list)
    ended: bool = False
    removed: bool = False

    def __repr__(self) -> str:
        return f"{self.name} of {len(self.turns())} turns"

    @property
    def name(self) -> str:
        return self.rollout.session_id

    def turns(self) -> list[Turn]:
        return [turn for each in self.trajectories if each.held for turn in each.turns]

    def open(self) -> Trajectory | None:
        last = self.trajectories[-1] if self.trajectories else None
        return last if last is not None and not last.ready else None

    def holder(self, turn: Turn) -> Trajectory:
        return next(each for each in self.trajectories if turn in each.turns)

    def ready(self) -> list[int]:
        return [number for number, each in enumerate(self.trajectories) if each.ready and each.taken is None]

    def exportable(self) -> list[int]:
        shared = [number for number, each in enumerate(self.trajectories) if each.shared and each.held]
        return sorted({*self.ready(), *shared})

    def repeated(self, call: Call) -> Reply | None:
        """The recorded answer that a retry of ``call`` gets: by its key, else the newest of the same body while its
        trajectory is open. None: the retry is sampled, as the next trajectory may begin with the same body."""
        for turn in reversed(self.turns()):
            if turn.call.path == call.path:
                same = turn.call.key == call.key if call.key else turn.call.body == call.body
                if same:
                    return turn.reply if call.key or not self.holder(turn).ready else None
        return None

    def record(self, call: Call, reply: Reply, base: Turn | None) -> None:
        """Record a call. ``base``: the turn that the call's conversation, or its prompt, continues."""
        trajectory = self.open()
        if trajectory is None:
            trajectory = Trajectory()
            self.trajectories.append(trajectory)
        near = trajectory.turns if call.path == CHAT else trajectory.turns[-_BY_TOKENS:]
        parent = base if base in near else None
        for choice in range(len(reply.choices)):
            trajectory.turns.append(Turn(reply.interaction_id(choice), call, reply, choice, base, parent))

    def reward(self, turn: Turn, value: float) -> int:
        """Set the reward; return the HTTP status of the request."""
        trajectory = self.holder(turn)
        if trajectory.ready:
            return 200 if turn.reward == value else 409
        turn.reward = value
        trajectory.ready = turn is trajectory.turns[-1]
        return 200

    def end(self) -> None:
        self.ended = True
        for trajectory in self.trajectories[-1:]:
            trajectory.ready = True

    def take(self, export_id: str, *, remove: bool) -> list[int]:
        """Export the ready and the shared trajectories; return their numbers."""
        numbers = self.exportable()
        for number in numbers:
            self.trajectories[number].taken, self.trajectories[number].shared = export_id, not remove
        self.removed = remove and all(each.taken for each in self.trajectories)
        return numbers


@dataclass(frozen=True)
class Export:
    """An export: the same request gets the same answer until it is acknowledged."""

    request: Mapping[str, Any]
    answer: Mapping[str, Any]
    took: Sequence[tuple[Session, int]]


def requests_of(request: Mapping[str, Any]) -> set[tuple[object, ...]]:
    """The request to each data proxy; the answer to a repeated one is that to the first."""
    places: dict[str, list[str]] = {}
    for name in request["session_ids"]:
        places.setdefault(SessionName.require(name).tag, []).append(name)
    options = (request["remove_session"], request["style"], request["discount"])
    return {(*names, *options) for names in places.values()}


def check_rows(export: Export, witness: Witness) -> None:
    """Check that the rows have the engine's prompts and samples, once each, with the rewards that callers set."""
    turns = [turn for session, number in export.took for turn in session.trajectories[number].turns]
    returns: dict[str, float] = {}
    for session, number in export.took:
        returns |= session.trajectories[number].returns(export.request["discount"])
    truths = {turn.name: witness.truth(turn.name) for turn in turns}
    joined = {
        turn for turn in turns if turn.parent is not None and truths[turn.name].continues(truths[turn.parent.name])
    }
    for turn in turns:
        if turn.parent is not None and turn not in joined:
            assert not witness.is_plain(truths[turn.parent.name]), "a plain answer was tokenised again"
    if export.request["style"] == "individual":
        _check_individual(export, turns, truths, returns)
    else:
        _check_concat(export, turns, joined, truths, returns)


def _check_individual(export: Export, turns: list[Turn], truths: dict[str, Truth], returns: dict[str, float]) -> None:
    rows, traj = export.answer["rows"], export.answer["traj"]
    assert [row["interaction_id"] for row in rows] == [turn.name for turn in turns]
    assert [row["parent_id"] for row in rows] == [turn.parent.name if turn.parent else None for turn in turns]
    assert [row["rewarded"] for row in rows] == [turn.reward is not None for turn in turns]
    for place, turn in enumerate(turns):
        assert unpadded(traj, place) == expected_row([truths[turn.name]])
    check_close(traj["rewards"], [returns[turn.name] for turn in turns])
    assert traj["original_rewards"] == [turn.own_reward for turn in turns]


def _check_concat(
    export: Export, turns: list[Turn], joined: set[Turn], truths: dict[str, Truth], returns: dict[str, float]
) -> None:
    continued = {turn.parent for turn in joined}
    lines = [_line(turn, joined) for turn in turns if turn not in continued]
    rows, traj = export.answer["rows"], export.answer["traj"]
    assert [row["interaction_id"] for row in rows] == [line[-1].name for line in lines]
    for place, line in enumerate(lines):
        assert unpadded(traj, place) == expected_row([truths[turn.name] for turn in line])
    own = [sum(turn.own_reward for turn in line) for line in lines]
    check_close(traj["original_rewards"], own)
    from_branches = dict.fromkeys((turn.name for turn in turns), 0.0)
    for turn in turns:
        if turn.parent is not None and turn not in joined:  # it begins a row of its own
            from_branches[turn.parent.name] += export.request["discount"] * returns[turn.name]
    check_close(traj["rewards"], [sum(turn.own_reward + from_branches[turn.name] for turn in line) for line in lines])


def _line(leaf: Turn, joined: set[Turn]) -> list[Turn]:
    line = [leaf]
    while line[-1] in joined and line[-1].parent is not None:
        line.append(line[-1].parent)
    return line[::-1]


def check_close(got: Sequence[float], wanted: Sequence[float]) -> None:
    """Check that the values are equal within the precision of float32 sums."""
    assert len(got) == len(wanted)
    assert all(abs(one - other) < 1e-5 for one, other in zip(got, wanted, strict=True)), (got, wanted)


def unpadded(traj: Mapping[str, Any], place: int) -> list[tuple[int, int, float, int]]:
    """Row ``place`` as (token, loss mask, logprob, version)."""
    mask = traj["attention_mask"][place]
    length = sum(mask)
    assert mask == [True] * length + [False] * (len(mask) - length)
    columns = (traj[name][place][:length] for name in ("input_ids", "loss_mask", "logprobs", "versions"))
    return list(zip(*columns, strict=True))


def expected_row(line: Sequence[Truth]) -> list[tuple[int, int, float, int]]:
    row: list[tuple[int, int, float, int]] = []
    for truth in line:
        row += [(token, 0, 0.0, -1) for token in truth.prompt[len(row) :]]
        made = zip(truth.output.token_ids, truth.output.logprobs, truth.output.versions, strict=True)
        row += [(token, 1, logprob, version) for token, logprob, version in made]
    return row
