"""``ArealOpenAI``: an OpenAI client for episodes that reward and export their calls themselves.

Each client is one recorded session, started by its first call. ``export_interactions`` lists the calls at once; their
rows are fetched after the episode has returned them. An episode may return those of several clients in one dict.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import openai

from areal.dataclasses import dataclass, field
from areal.rollout.sessions import reward_session
from areal.rollout.workflows import export_session, shared_http_client

if TYPE_CHECKING:
    from areal.client.inference import AsyncSession, Style


class ArealOpenAI(openai.AsyncOpenAI):
    """An OpenAI client whose calls are one recorded session of ``engine``, the episode's engine. The model's data proxy
    tokenizes and parses tools and reasoning, so ``tokenizer``, the parsers, ``chat_template_type`` and
    ``engine_max_tokens`` are accepted and ignored."""

    def __init__(
        self,
        engine: Any,
        tokenizer: Any = None,
        *,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        chat_template_type: str = "hf",
        engine_max_tokens: int | None = None,
        **options: Any,
    ) -> None:
        options.setdefault("http_client", shared_http_client())
        os.environ.setdefault("OPENAI_DEFAULT_MODEL", "default")  # the OpenAI Agents SDK requires a model
        super().__init__(base_url=engine.base_url, api_key=self._key, **options)
        self.engine = engine
        self._session: AsyncSession | None = None
        self._starting = asyncio.Lock()
        self._calls: dict[str, Sequence[Any]] = {}  # the messages of each
        self._rewards: dict[str, float] = {}
        self._discount = 0.0  # each call has only its own reward

    async def _key(self) -> str:
        async with self._starting:
            if self._session is None:
                (self._session,) = (await self.engine.start_sessions(1)).sessions
        return self._session.api_key

    @cached_property
    def chat(self) -> Any:
        """Chat completions. ``model`` defaults to the trained model."""
        chat = openai.resources.chat.AsyncChat(self)
        self._name_model(chat.completions)
        return chat

    @cached_property
    def responses(self) -> Any:
        """Responses, recorded like completions. ``model`` defaults to the trained model."""
        from openai.resources.responses import AsyncResponses

        return self._name_model(AsyncResponses(self))

    def _name_model(self, calls: Any) -> Any:
        calls.create = partial(calls.create, model=self.engine.model or "default")
        return calls

    async def post(self, path: str, **kwargs: Any) -> Any:
        body = kwargs.get("body")
        if isinstance(body, dict) and body.get("seed") is not None:  # members of a group differ
            kwargs["body"] = {**body, "seed": self.engine.next_seed(body["seed"])}
        answer: Any = await super().post(path, **kwargs)
        if isinstance(name := getattr(answer, "id", None), str):
            self._calls[name] = (body if isinstance(body, dict) else {}).get("messages") or ()
        return answer

    def set_reward(self, completion_id: str, reward: float) -> None:
        """Set the reward of one call. Raises KeyError for a call of another client."""
        if completion_id not in self._calls:
            raise KeyError(f"{completion_id!r} is no call of this client")
        self._rewards[completion_id] = float(reward)

    def set_last_reward(self, reward: float) -> None:
        """Set the reward of the newest call."""
        if not self._calls:
            raise KeyError("this client has made no call that could be rewarded")
        self._rewards[next(reversed(self._calls))] = float(reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """Set each call's return: its reward plus ``turn_discount`` times the return of the next call."""
        self._discount = turn_discount

    def export_interactions(self, style: Style = "individual") -> dict[str, InteractionWithTokenLogpReward]:
        """Return the value that ``arun_episode`` returns: with ``individual`` a row for each call, with ``concat`` a
        row for each conversation, under the id of its last call."""
        names = [name for name in self._calls if style == "individual" or not self._is_continued(name)]
        return {name: InteractionWithTokenLogpReward(name, self._rewards.get(name), self, style) for name in names}

    def _is_continued(self, name: str) -> bool:
        """Return whether another call's messages begin with this one's."""
        own = self._calls[name]
        longer = (each for each in self._calls.values() if len(each) > len(own))
        return bool(own) and any(each[: len(own)] == own for each in longer)

    async def rows(self, style: Style) -> Any:
        """Reward and export the session. Raises ValueError if no call was rewarded."""
        assert self._session is not None, "it has calls, so it has a session"
        if not self._rewards:
            raise ValueError("no call of the episode was rewarded: set_reward(completion.id, reward)")
        await reward_session(self._session, self._rewards)
        return await export_session(self._session, discount=self._discount, style=style)


@dataclass(frozen=True)
class InteractionWithTokenLogpReward:
    """A call and its own reward, if it has one."""

    interaction_id: str
    reward: float | None
    client: ArealOpenAI = field(repr=False)
    style: Style = "individual"
