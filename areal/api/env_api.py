"""Agents and environments. An environment is gymnasium's (https://gymnasium.farama.org/api/env/), so any of theirs
will do; an agent makes its actions with a model. ``areal.workflow.environment`` composes the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, SupportsFloat, runtime_checkable


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
