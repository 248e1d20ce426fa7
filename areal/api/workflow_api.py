"""Contracts of user code that samples episodes: a workflow, an agent, an environment.

A *workflow* samples through the engine and returns training rows itself. An *agent* is any object with ``async run``:
it talks to an OpenAI or Anthropic base URL with whatever client it likes, and returns its reward. An *environment* is
gymnasium's (https://gymnasium.farama.org/api/env/), so any of theirs will do; ``areal.workflow.environment`` composes
it with an object that makes its actions with a model.
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

    input_ids i64 [B, S], attention_mask bool [B, S]                                                          needed
    loss_mask i64, logprobs f32, versions i64 (-1 on prompt), turn_ids i32 (-1 on prompt) [B, S]
    rewards f32, original_rewards f32 (before discounts), truncated bool (its last answer was cut off)            [B]
    temperatures f32 (of the sampling, and of ``logprobs``)                                                       [B]
    token_temperatures f32 (instead, where the turns of a row differ)                                          [B, S]
    sample_ids i32 (which of the group's samples), parents i32 (the row whose conversation it continues, else -1) [B]

Rows without a temperature have that of ``gconfig``.
"""

Reward: TypeAlias = float | Mapping[str, float] | None
"""The reward of the whole episode, by interaction (``completion.id``), or None: the episode is rejected."""


class RolloutWorkflow(ABC):
    """Runs as one asyncio task beside many others: await everywhere, block nowhere. One instance serves them all. A
    controller that made it from its class awaits its ``async close()``, where it has one, at the end."""

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory | None:
        """``data`` is one row of the data set. None: the episode is rejected, and replaced by another prompt's."""


@runtime_checkable
class AgentWorkflow(Protocol):
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Reward:
        """``extra_kwargs``: ``base_url`` and ``api_key`` of this episode's session, ``model``, and ``http_client`` (a
        shared ``httpx.AsyncClient``) where httpx is installed."""
        ...


@runtime_checkable
class Environment(Protocol):
    """One per episode. Its methods may block: they run on a thread."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The first observation, and info. ``options`` is the row of the data set."""
        ...

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Observation, reward, terminated, truncated, info."""
        ...

    def close(self) -> None: ...


class ChatModel(Protocol):
    """A recorded session of the model that is trained."""

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """An OpenAI chat completion."""
        ...


@runtime_checkable
class Agent(Protocol):
    """One per episode, so it may keep its conversation."""

    async def act(self, observation: Any, model: ChatModel) -> Any:
        """The next action, made with any number of model calls."""
        ...
