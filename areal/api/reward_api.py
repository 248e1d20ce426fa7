"""The contract of reward functions: any callable of this signature. It runs in a separate process with a deadline."""

from __future__ import annotations

from typing import Any, Protocol

from areal.reward.frames import RewardError, RewardProcessLost, RewardRaised, RewardTimeout
from areal.reward.pool import AsyncRewardWrapper

__all__ = ["AsyncRewardWrapper", "RewardError", "RewardFunction", "RewardProcessLost", "RewardRaised", "RewardTimeout"]


class RewardFunction(Protocol):
    """The signature of a reward, which any callable may have. ``data``: the row's other columns: ``answer``, ..."""

    def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> float: ...
