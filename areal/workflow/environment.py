"""Workflow of an agent in a gymnasium-compatible environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal.api.workflow_api import Agent, Environment
from areal.dataclasses import dataclass, field
from areal.errors import UsageFault
from areal.rollout.workflows import SessionWorkflow

if TYPE_CHECKING:
    from areal.client.inference import AsyncSession


@dataclass
class _SessionChat:
    """A session's chat, and the rewards of its calls."""

    session: AsyncSession
    engine: Any
    newest: str | None = None
    rewards: dict[str, float] = field(default_factory=dict)

    async def chat(self, messages: Sequence[Mapping[str, object]], **fields: Any) -> dict[str, Any]:
        answer = await self.session.chat(messages, **{"model": self.engine.model} | fields)
        self.newest = answer["id"]
        return answer

    def reward(self, value: float) -> None:
        if self.newest is None:
            raise UsageFault("the agent acted without a model call, so no answer can get the reward")
        self.rewards[self.newest] = self.rewards.get(self.newest, 0.0) + value


class EnvironmentWorkflow(SessionWorkflow):
    """Runs an agent in an environment. ``agent`` and ``environment`` are called once per episode; ``environment.reset``
    gets the row as ``options``. The environment's methods run on a thread. ``max_steps`` limits an episode."""

    def __init__(
        self, agent: Callable[[], Agent], environment: Callable[[], Environment], *, max_steps: int = 64, **options: Any
    ) -> None:
        super().__init__(**options)
        self._make_agent = agent
        self._make_environment = environment
        self._max_steps = max_steps

    async def run_session(self, session: AsyncSession, engine: Any, data: dict[str, Any]) -> Any:
        agent, chat = self._make_agent(), _SessionChat(session, engine)
        environment = await asyncio.to_thread(self._make_environment)
        try:
            seed = engine.next_seed() if data.get("seed") is None else data["seed"]
            observation, _ = await asyncio.to_thread(environment.reset, seed=seed, options=data)
            for _ in range(self._max_steps):
                action = await agent.act(observation, chat)
                observation, reward, terminated, truncated, _ = await asyncio.to_thread(environment.step, action)
                chat.reward(float(reward))
                if terminated or truncated:
                    break
        finally:
            await asyncio.to_thread(environment.close)
        return chat.rewards
