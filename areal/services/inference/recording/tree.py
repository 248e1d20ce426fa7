"""The conversation tree of one trajectory: who continues whom, and how reward runs along it.

Turns come in recording order, so a parent always stands before its children. A turn is *joined* to its parent when
its prompt begins with exactly the parent's tokens; only then can both stand in one training row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal.services.inference.recording.values import Turn


def own_reward(turn: Turn) -> float:
    return 0.0 if turn.reward is None else turn.reward


def discounted(turns: Sequence[Turn], discount: float) -> dict[int, float]:
    """By sequence number: ``r_i += discount * r_child``, over every child along the tree."""
    rewards = {turn.seq: own_reward(turn) for turn in turns}
    for turn in reversed(turns):
        if turn.parent is not None and turn.parent in rewards:
            rewards[turn.parent] += discount * rewards[turn.seq]
    return rewards


@dataclass(frozen=True)
class Path:
    """Joined turns from a root to a leaf: one row of the ``concat`` style.

    The row's ``reward`` is the sum of its turns' own rewards, and of what turns that continue it in other rows
    give back, discounted. With a reward on the last turn only, that is this reward.
    """

    turns: tuple[Turn, ...]
    reward: float
    own: float

    @property
    def leaf(self) -> Turn:
        return self.turns[-1]


def paths(turns: Sequence[Turn], discount: float) -> list[Path]:
    """One path a leaf, in the order of the leaves."""
    by_seq = {turn.seq: turn for turn in turns}
    continued = {turn.parent for turn in turns if turn.joined}
    returns = discounted(turns, discount)
    given_back = dict.fromkeys(by_seq, 0.0)
    for turn in turns:
        if not turn.joined and turn.parent in given_back:
            given_back[turn.parent] += discount * returns[turn.seq]
    found = []
    for leaf in turns:
        if leaf.seq in continued:
            continue
        line = [leaf]
        while line[-1].joined and line[-1].parent is not None:
            line.append(by_seq[line[-1].parent])
        line.reverse()
        own = sum(map(own_reward, line))
        found.append(Path(tuple(line), own + sum(given_back[turn.seq] for turn in line), own))
    return found
