"""Agents as workflows: an object with ``async run`` talks to the base URL of a recorded session, an agent acts in an
environment, or a user talks to the model; what the engine sampled comes back as training rows.

The session's key is the only thing that ties a call to an episode, so any client of any framework will do. A turn's
reward may be given by its id; the newest turn's is given last, because it seals the trajectory. In an environment a
step's reward goes to the newest model call before it, so the rows of earlier turns have returns by the discount along
the conversation, as in any other reinforcement learning.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from areal.api.env_api import Agent, Environment
from areal.api.workflow_api import AgentWorkflow, RolloutWorkflow, Trajectory
from areal.errors import ArealError, UsageFault
from areal.rollout.sealing import seal

if TYPE_CHECKING:
    from areal.client.inference import AsyncSession
    from areal.client.trajectories import Trajectories


_log = logging.getLogger(__name__)
_CLEAN_UP_S = 10.0
_ONLINE_WAIT_S = 30.0


class SharedHttpClient:
    """The HTTP client that agents' SDKs share, so that each episode does not open connections of its own."""

    def __init__(self) -> None:
        self._client: Any = None
        self._looked = False

    def client(self) -> Any:
        """None where no such library is installed."""
        if not self._looked:
            self._looked = True
            with contextlib.suppress(ImportError):
                import openai

                self._client = openai.DefaultAsyncHttpxClient()
        return self._client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


class SessionWorkflow(RolloutWorkflow):
    """One recorded session an episode: run, reward, export, acknowledge. Without a reward (None) it is rejected."""

    def __init__(self, *, discount: float = 1.0, style: Literal["individual", "concat"] = "individual") -> None:
        self._discount = discount
        self._style = style

    async def play(self, session: AsyncSession, engine: Any, data: dict[str, Any]) -> Any:
        """The episode itself; its reward: one number, some by interaction, or None."""
        raise NotImplementedError

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        (session,) = (await engine.start_sessions(1)).sessions
        try:
            reward = await self.play(session, engine, data)
            if reward is None:
                await _discard(session)
                return None
            await reward_session(session, reward)
        except BaseException:
            await _discard_quietly(session)
            raise
        return await export_session(session, discount=self._discount, style=self._style)


async def export_session(session: AsyncSession, **how: Any) -> Trajectory | dict[str, Any]:
    """Everything of a session that is sealed, taken out of the service. ``how``: ``discount`` and ``style``."""
    try:
        taken = await session.export(**how)
    except ArealError as error:
        if getattr(error, "param", None) != "format":
            raise
        taken = await session.export(**how, format="json")  # an external model's: text, no columns
    await session.client.acknowledge(taken)
    return trajectory_rows(taken) if taken.columns else {"interactions": list(taken.interactions)}


def trajectory_rows(exported: Trajectories) -> Trajectory:
    """The columns as tensors, which rows ended because there was no more room, and which row each continues."""
    import torch

    rows = exported.token_rows
    places = {about["interaction_id"]: place for place, about in enumerate(rows)}
    columns: Trajectory = exported.torch()
    return {
        **columns,
        "truncated": torch.tensor([bool(about["truncated"]) for about in rows]),
        "parents": torch.tensor([places.get(about.get("parent_id"), -1) for about in rows], dtype=torch.int32),
    }


async def reward_session(session: AsyncSession, reward: float | Mapping[str, float]) -> None:
    """Reward the episode and seal it, whatever time the service leaves for further rewards."""
    steps, answer = seal(reward), None
    with contextlib.suppress(StopIteration):
        while True:
            call = steps.send(answer)  # type: ignore[arg-type]  # None starts it
            if call.kind == "describe":
                answer = await session.client.session(session.session_id)
            elif call.kind == "reward":
                answer = vars(await session.reward(call.reward, call.interaction_id))
            else:
                await session.end()


async def _discard(session: AsyncSession) -> None:
    """Leave nothing of the session in the service."""
    if await session.end():
        await session.client.acknowledge(await session.export(format="json"))


async def _discard_quietly(session: AsyncSession) -> None:
    """After a failure, which the caller gets. What is left in the service expires."""
    with contextlib.suppress(ArealError, TimeoutError):
        async with asyncio.timeout(_CLEAN_UP_S):
            await _discard(session)


class OnlineEpisodes(RolloutWorkflow):
    """Trajectories of real users: whatever session has one ready. An episode waits until there is one."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Trajectory:
        while True:
            leases = await engine.client.lend(1, wait_s=_ONLINE_WAIT_S, kind="tokens")
            if leases:
                trajectory = trajectory_rows(leases[0].trajectories)
                await engine.client.acknowledge_leases(leases)
                return trajectory


class AgentEpisodes(SessionWorkflow):
    """``agent.run(data, base_url=, api_key=, model=, http_client=)``. The base URL is the service's root: what OpenAI's
    client needs for chat, and Anthropic's for messages; OpenAI responses are below ``/v1`` of it."""

    def __init__(self, agent: AgentWorkflow, http: SharedHttpClient, **how: Any) -> None:
        super().__init__(**how)
        self._agent = agent
        self._http = http
        os.environ.setdefault("OPENAI_DEFAULT_MODEL", "default")  # of the OpenAI Agents SDK: its session's, not theirs

    async def play(self, session: AsyncSession, engine: Any, data: dict[str, Any]) -> Any:
        return await self._agent.run(
            data,
            base_url=engine.base_url,
            api_key=session.api_key,
            model=engine.model,
            http_client=self._http.client(),
        )


@dataclass
class _SessionChat:
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
    """``agent`` and ``environment`` make a new one each episode; the environment gets the row as ``options``. Its
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
        agent, chat = self._make_agent(), _SessionChat(session, engine.model)
        environment = await asyncio.to_thread(self._make_environment)
        try:
            observation, _ = await asyncio.to_thread(environment.reset, seed=data.get("seed"), options=data)
            for _ in range(self._max_steps):
                action = await agent.act(observation, chat)
                observation, reward, terminated, truncated, _ = await asyncio.to_thread(environment.step, action)
                chat.reward(float(reward))
                if terminated or truncated:
                    break
        finally:
            await asyncio.to_thread(environment.close)
        return chat.rewards
