"""An agent in an environment, as a workflow: observation, action, reward, until the environment ends the episode.

A step's reward goes to the newest model call before it, so the rows of earlier turns have returns by the discount along
the conversation, as in any other reinforcement learning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal.api.env_api import Agent, Environment
from areal.errors import UsageFault
from areal.workflow.agents import SessionWorkflow

if TYPE_CHECKING:
    from areal.client.sessions import AsyncSession


@dataclass
class _Heard:
    """A session's chats, and which of them came last."""

    session: AsyncSession
    model: str | None
    newest: str | None = None
    rewards: dict[str, float] = field(default_factory=dict)

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        answer = await self.session.chat(messages, **{"model": self.model, **fields})
        self.newest = answer["id"]
        return answer

    def reward(self, value: float) -> None:
        if self.newest is None:
            raise UsageFault("the agent acted without asking the model: its reward belongs to no answer")
        self.rewards[self.newest] = self.rewards.get(self.newest, 0.0) + value


class EnvironmentWorkflow(SessionWorkflow):
    """``agent`` and ``environment`` make a new one each episode; the environment is told the row as ``options``. Its
    methods run on a thread. ``max_steps`` ends an episode that the environment does not."""

    def __init__(
        self,
        agent: Callable[[], Agent],
        environment: Callable[[], Environment],
        *,
        max_steps: int = 64,
        **how: Any,
    ) -> None:
        super().__init__(**how)
        self._make_agent = agent
        self._make_environment = environment
        self._max_steps = max_steps

    async def play(self, session: AsyncSession, engine: Any, data: dict[str, Any]) -> Any:
        agent, heard = self._make_agent(), _Heard(session, engine.model)
        environment = await asyncio.to_thread(self._make_environment)
        try:
            observation, _ = await asyncio.to_thread(environment.reset, seed=data.get("seed"), options=data)
            for _ in range(self._max_steps):
                action = await agent.act(observation, heard)
                observation, reward, terminated, truncated, _ = await asyncio.to_thread(environment.step, action)
                heard.reward(float(reward))
                if terminated or truncated:
                    break
        finally:
            await asyncio.to_thread(environment.close)
        return heard.rewards
