"""A reward that could not be had. It is never a reward of 0: the rollout is discarded, not punished."""

from __future__ import annotations

from areal.errors import ArealError


class RewardError(ArealError):
    pass


class RewardRaised(RewardError):
    """The reward function raised: the same input would raise again."""


class RewardTimeout(RewardError):
    """No reward within the deadline, in any attempt."""


class RewardProcessLost(RewardError):
    """The process that computed it ended."""
