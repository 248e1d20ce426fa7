"""Recorded sessions, as handles on the client that started them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal.client.trajectories import Trajectories

if TYPE_CHECKING:
    from areal.client.inference import AsyncInferenceClient

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Rewarded:
    """``interaction_count`` is that of the trajectory; ``ready_transition``: this reward made it ready."""

    session_id: str
    trajectory_id: int
    trajectory_ready: bool
    ready_transition: bool
    interaction_count: int


@dataclass(frozen=True)
class AsyncSession:
    """One recorded session. Its model calls carry its key: what the engine samples for them is recorded."""

    client: AsyncInferenceClient = field(repr=False)
    session_id: str
    api_key: str = field(repr=False)
    group_id: str | None = None

    async def chat(self, messages: Sequence[Message], **fields: Any) -> dict[str, Any]:
        return await self.client.chat(messages, key=self.api_key, **fields)

    def stream_chat(
        self, messages: Sequence[Message], **fields: Any
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]:
        return self.client.stream_chat(messages, key=self.api_key, **fields)

    async def reward(self, value: float, interaction_id: str | None = None) -> Rewarded:
        """Without ``interaction_id``, of the newest interaction: the trajectory is sealed."""
        return await self.client.set_reward(value, key=self.api_key, interaction_id=interaction_id)

    async def end(self) -> list[int]:
        """The ids of its trajectories that are ready. Ending it again changes nothing."""
        return await self.client.end_session(key=self.api_key)

    async def export(self, **options: Any) -> Trajectories:
        return await self.client.export([self.session_id], **options)


@dataclass(frozen=True)
class AsyncGroup:
    """Sessions that answer one prompt; they may share a replica, and so its prefix cache."""

    client: AsyncInferenceClient = field(repr=False)
    group_id: str
    sessions: tuple[AsyncSession, ...]

    async def export(self, **options: Any) -> Trajectories:
        return await self.client.export([each.session_id for each in self.sessions], group_id=self.group_id, **options)
