"""An agent for math problems that uses OpenAI's client: a minimal example to copy."""

from __future__ import annotations

from typing import Any

from areal.errors import UsageFault
from areal.reward.gsm8k import gsm8k_reward_fn
from areal.rollout.rows import RowReward
from areal.workflow.agent import EpisodeModel
from areal.workflow.multi_turn import TRY_AGAIN


class MathAgent:
    """Answers ``data["messages"]``; ``reward_fn`` scores the answer, by default by its final number. After an answer
    with a reward of 0 or less, ``feedback`` asks for another, up to ``max_turns`` answers. The result is the last
    answer's reward times ``turn_discount`` for each previous answer. Other keyword arguments go to the chat call; of
    ``max_tokens`` and ``max_completion_tokens`` the latter counts. Raises UsageFault for invalid arguments."""

    def __init__(
        self,
        reward_fn: Any = gsm8k_reward_fn,
        max_turns: int = 1,
        turn_discount: float = 1.0,
        feedback: str = TRY_AGAIN,
        **sampling: Any,
    ) -> None:
        if max_turns < 1:
            raise UsageFault(f"max_turns must be at least 1, not {max_turns}")
        if "max_completion_tokens" in sampling:
            sampling.pop("max_tokens", None)  # the older name
        self._sampling = sampling
        self._reward = RowReward(reward_fn)
        self._max_turns = max_turns
        self._discount = turn_discount
        self._feedback = feedback

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        import openai

        self._reward.check(data)

        access = EpisodeModel.of(extra_kwargs)
        client = openai.AsyncOpenAI(
            base_url=access.base_url, api_key=access.api_key, http_client=access.http_client, max_retries=2
        )
        messages, scale = list(data["messages"]), 1.0
        while True:
            answer = await client.chat.completions.create(model=access.model, messages=messages, **self._sampling)
            text = answer.choices[0].message.content or ""
            reward = await self._reward(str(data["messages"][-1]["content"]), text, [], [], data)
            turn = (len(messages) - len(data["messages"])) // 2 + 1
            if reward > 0 or turn == self._max_turns:
                return scale * reward
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": self._feedback}]
            scale *= self._discount
