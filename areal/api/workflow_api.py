"""Contracts of user code that samples episodes: a workflow, an agent, an environment.

A *workflow* samples from the engine and returns training rows. An *agent* is any object with ``async run``: it calls an
OpenAI or Anthropic base URL with any client, and returns its reward. An *environment* has the interface of gymnasium
(https://gymnasium.farama.org/api/env/); ``areal.workflow.environment`` combines it with one that chooses actions by a
model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch

    from areal.api.engine_api import InferenceEngine


Trajectory: TypeAlias = "dict[str, torch.Tensor]"
"""Rows of one episode (or group), right-padded:

    input_ids i64 [B, S], attention_mask bool [B, S]                                                        required
    loss_mask i64, logprobs f32, versions i64 (-1 on prompt), turn_ids i32 (-1 on prompt)                      [B, S]
    rewards f32, original_rewards f32 (before discounts), truncated bool (the last answer was truncated)          [B]
    temperatures f32 (of the sampling, and of ``logprobs``)                                                       [B]
    token_temperatures f32 (instead, if the turns of a row have different ones)                                [B, S]
    images i64 (the row's images by areal.dataset.images.images_key, 0 for none)                                  [B]
    sample_ids i32 (index of the sample in its group), parents i32 (row whose conversation it continues, else -1) [B]

The default temperature of a row is that of ``gconfig``.
"""

Reward: TypeAlias = float | Mapping[str, float] | None
"""The episode's reward, or a mapping from interactions (``completion.id``) to rewards. None rejects the episode."""


class RolloutWorkflow(ABC):
    """Samples one episode, as an asyncio task that must not block the event loop. One instance serves all episodes. A
    controller that made it from a class awaits its ``async close()`` at the end, if it has one."""

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory | None:
        """Sample an episode for ``data``, one row of the data set. Returns its training rows. None rejects the episode:
        another prompt replaces it."""


@runtime_checkable
class AgentWorkflow(Protocol):
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Reward:
        """Run an episode and return its reward. ``extra_kwargs``: ``base_url`` and ``api_key`` of the episode's
        session, ``model``, and, if httpx is installed, ``http_client`` (a shared ``httpx.AsyncClient``)."""


@runtime_checkable
class Environment(Protocol):
    """An environment, one instance per episode. Its methods run on a thread and may block."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start the episode. Returns the first observation, and info. ``options`` is the row of the data set."""

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Take an action. Returns observation, reward, terminated, truncated, info."""

    def close(self) -> None: ...


class ChatModel(Protocol):
    """A recorded session of the model in training."""

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """Sample a chat completion. Returns OpenAI's response."""


@runtime_checkable
class Agent(Protocol):
    """Chooses the actions in an environment. There is one instance per episode, so it may keep its conversation."""

    async def act(self, observation: Any, model: ChatModel) -> Any:
        """Choose the next action, with any number of model calls."""
