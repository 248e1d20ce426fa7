"""The base of agents that answer a row's question: a reward function scores the answer."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from areal.dataclasses import dataclass, field
from areal.errors import UsageFault
from areal.reward.gsm8k import gsm8k_reward_fn
from areal.rollout.rows import RowReward


@dataclass(frozen=True)
class EpisodeModel:
    """The model of an episode: what the caller gave, else OpenAI's environment variables. ``http_client`` is shared by
    episodes; None: the agent's own."""

    base_url: str | None
    api_key: str | None = field(repr=False)
    model: str
    http_client: Any = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> EpisodeModel:
        return cls(
            given.get("base_url") or os.environ.get("OPENAI_BASE_URL"),
            given.get("api_key") or os.environ.get("OPENAI_API_KEY"),
            given.get("model") or "default",
            given.get("http_client"),
        )


class AnsweringAgent(ABC):
    """``reward_fn`` scores the last answer, by default by its final number. ``max_turns`` bounds the calls of the
    model. Raises UsageFault for invalid arguments."""

    def __init__(self, reward_fn: Any = gsm8k_reward_fn, max_turns: int = 10) -> None:
        if max_turns < 1:
            raise UsageFault(f"max_turns must be at least 1, not {max_turns}")
        self.max_turns = max_turns
        self._reward = RowReward(reward_fn)

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        self._reward.check(data)
        answer = await self.answer(data["messages"], EpisodeModel.of(extra_kwargs))
        return await self._reward(str(data["messages"][-1]["content"]), answer, [], [], data)

    @abstractmethod
    async def answer(self, messages: list[dict[str, Any]], access: EpisodeModel) -> str:
        """Return the text of the answer."""
