"""A mathematician with OpenAI's client: the smallest agent there is, and the one to copy."""

from __future__ import annotations

import os
from typing import Any

from areal.reward.gsm8k import gsm8k_reward_fn
from areal.workflow.rewards import RowReward


class MathAgent:
    """One answer to ``data["messages"]``, rewarded by its final number. Keyword arguments go to the chat call."""

    def __init__(self, reward_fn: Any = gsm8k_reward_fn, **sampling: Any) -> None:
        self._sampling = sampling
        self._reward = RowReward(reward_fn)

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        import openai

        client = openai.AsyncOpenAI(
            base_url=extra_kwargs.get("base_url") or os.environ.get("OPENAI_BASE_URL"),
            api_key=extra_kwargs.get("api_key") or os.environ.get("OPENAI_API_KEY"),
            http_client=extra_kwargs.get("http_client"),
            max_retries=2,
        )
        model = extra_kwargs.get("model") or "default"
        answer = await client.chat.completions.create(model=model, messages=data["messages"], **self._sampling)
        text = answer.choices[0].message.content or ""
        return await self._reward(str(data["messages"][-1]["content"]), text, [], [], data)
