"""Agents as workflows: an object with ``async run`` talks to the base URL of a recorded session, and what the engine
saw comes back as training rows.

The session's key is the only thing that ties a call to an episode, so any client of any framework will do. A turn's
reward may be given by its id; the newest turn's is given last, because it seals the trajectory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from areal.api.workflow_api import AgentWorkflow, RolloutWorkflow, Trajectory
from areal.errors import ArealError, UsageFault

if TYPE_CHECKING:
    from areal.client.sessions import AsyncSession
    from areal.client.trajectories import Trajectories

_log = logging.getLogger(__name__)
_CLEAN_UP_S = 10.0
_ONLINE_WAIT_S = 30.0


class SharedHttp:
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
            await give(session, reward)
        except BaseException:
            await _discard_quietly(session)
            raise
        return await exported(session, discount=self._discount, style=self._style)


async def exported(session: AsyncSession, **how: Any) -> Trajectory | dict[str, Any]:
    """Everything of a session that is sealed, taken out of the service. ``how``: ``discount`` and ``style``."""
    try:
        taken = await session.export(**how)
    except ArealError as error:
        if getattr(error, "param", None) != "format":
            raise
        taken = await session.export(**how, format="json")  # an external model's: text, no columns
    await session.client.acknowledge(taken)
    return rows_of(taken) if taken.columns else {"interactions": list(taken.interactions)}


def rows_of(exported: Trajectories) -> Trajectory:
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


async def give(session: AsyncSession, reward: float | Mapping[str, float]) -> None:
    """Reward the episode and seal it, whatever time the service leaves for further rewards."""
    if not isinstance(reward, Mapping):
        given = await session.reward(float(reward))
        ready = given.trajectory_ready
        if given.trajectory_id > 0:
            await _reward_open(session, float(reward))
    else:
        ready = await _give_by_turn(session, reward)
    if not ready:
        await session.end()


async def _give_by_turn(session: AsyncSession, rewards: Mapping[str, float]) -> bool:
    """Oldest turn first; whether the trajectory is sealed by it."""
    order, ready = await _interactions(session), False
    for name in rewards:
        if name not in order:
            raise UsageFault(f"the agent rewards {name!r}, which is no interaction of its session")
    for name in sorted(rewards, key=order.index):
        given = await session.reward(float(rewards[name]), name)
        ready = given.trajectory_ready and given.trajectory_id == 0
    return ready


async def _reward_open(session: AsyncSession, reward: float) -> None:
    """The trajectories that a change between token and external models left open have the episode's reward too."""
    known = await session.client.session(session.session_id)
    for trajectory in known["trajectories"]:
        if trajectory["state"] == "open" and trajectory["interactions"]:
            await session.reward(reward, trajectory["interactions"][-1]["interaction_id"])


async def _interactions(session: AsyncSession) -> list[str]:
    """Ids of the session's interactions, oldest first."""
    known = await session.client.session(session.session_id)
    return [each["interaction_id"] for trajectory in known["trajectories"] for each in trajectory["interactions"]]


async def _discard(session: AsyncSession) -> None:
    """Leave nothing of the session in the service."""
    if await session.end():
        await session.client.acknowledge(await session.export(format="json"))


async def _discard_quietly(session: AsyncSession) -> None:
    """After a failure, which is what the caller is told. What stays behind expires."""
    with contextlib.suppress(ArealError, TimeoutError):
        async with asyncio.timeout(_CLEAN_UP_S):
            await _discard(session)


class OnlineEpisodes(RolloutWorkflow):
    """Trajectories of real users: whatever session has one ready. An episode waits until there is one."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Trajectory:
        while True:
            leases = await engine.client.lend(1, wait_s=_ONLINE_WAIT_S, kind="tokens")
            if leases:
                trajectory = rows_of(leases[0].trajectories)
                await engine.client.acknowledge_leases(leases)
                return trajectory


class AgentEpisodes(SessionWorkflow):
    """``agent.run(data, base_url=, api_key=, model=, http_client=)``. The base URL is the service's root: what OpenAI's
    client needs for chat, and Anthropic's for messages; OpenAI responses are below ``/v1`` of it."""

    def __init__(self, agent: AgentWorkflow, http: SharedHttp, **how: Any) -> None:
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
