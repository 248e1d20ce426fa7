"""An episode of tau2-bench: a model plays the user, an agent service the agent, and the conversation is scored.

Everything that either side has written and done is in the conversation: the agent's tool calls with their results come
with its response. An agent, a user or a service that fails gives no reward (the episode fails). A reward of 0 is what
the task's own rules say, also for an episode that did not end within ``max_steps``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import openai

from areal.api.cli_args import GenerationHyperparameters
from areal.client.errors import ClientError
from areal.rollout.agents import AgentEpisodeFailed, AgentServiceWorkflow
from areal.wire.agents import ModelAccess
from examples.agents.tau2.agent import said_to
from examples.agents.tau2.domains import Domain, Ended, Message, Task, load_domain

if TYPE_CHECKING:
    from areal.client.inference import AsyncSession

STOPS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")

Say = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Sends the user's words and the turn's metadata to the agent: its response."""


@dataclass
class Tau2EnvConfig:
    """``domain``: one, or several with commas between them. ``tasks``: some of theirs; empty: all. The user is the
    model ``user_llm`` of any OpenAI server, with further fields of its calls in ``user_llm_args``; its key is in the
    environment variable ``user_llm_key_env``. ``max_steps``: messages and tool results of one episode."""

    domain: str = "mock"
    tasks: list[str] = field(default_factory=list)
    max_steps: int = 100
    user_llm_base_url: str = ""
    user_llm: str = ""
    user_llm_args: dict[str, Any] = field(default_factory=dict)
    user_llm_key_env: str = "OPENAI_API_KEY"

    def __post_init__(self) -> None:
        if self.max_steps < 2:
            raise ValueError(f"max_steps must be at least 2, not {self.max_steps}")


@dataclass(frozen=True)
class Played:
    conversation: list[Message]
    ended: Ended
    reward: float


class EpisodeFailed(Exception):
    """The episode has no reward."""


class User:
    """The model that plays the user."""

    def __init__(self, config: Tau2EnvConfig) -> None:
        key = os.environ.get(config.user_llm_key_env) or "none"
        self._client = openai.AsyncOpenAI(base_url=config.user_llm_base_url or None, api_key=key)
        self._fields = {**config.user_llm_args, "model": config.user_llm}

    async def reply(self, domain: Domain, task: Task, conversation: Sequence[Message]) -> Message:
        messages: list[Any] = [{"role": "system", "content": task.user_prompt}]
        other = {"user": "assistant", "assistant": "user"}
        for each in said_to("user", conversation):
            messages.append({**each, "role": other.get(each["role"], each["role"])})
        offered = domain.tools("user")
        fields = {**self._fields, "tools": offered} if offered else self._fields
        completion = await self._client.chat.completions.create(messages=messages, **fields)
        answer = completion.choices[0].message
        if answer.tool_calls:
            return {"role": "user", "content": None, "tool_calls": [call.model_dump() for call in answer.tool_calls]}
        if not (answer.content or "").strip():
            raise EpisodeFailed("the user's model answered nothing")
        return {"role": "user", "content": answer.content}

    async def close(self) -> None:
        await self._client.close()


async def play(
    say: Say, user: User, domain_name: str, task_id: str, *, max_steps: int, sampling: Mapping[str, Any]
) -> Played:
    """``sampling``: fields of the agent's model calls. Raises EpisodeFailed, and what ``say`` and the user raise."""
    domain = await asyncio.to_thread(load_domain, domain_name)
    if (task := domain.tasks().get(task_id)) is None:
        raise EpisodeFailed(f"the domain {domain_name} has no task {task_id!r}")
    conversation, user_calls = [*task.opening], dict[str, list[Message]]()
    ended: Ended = "max_steps"
    for turn in range(max_steps):
        before = len(conversation)
        message = await _user_turn(user, domain, task, conversation, max_steps)
        user_calls[str(turn)] = conversation[before:]
        conversation.append(message)
        if any(stop in (message["content"] or "") for stop in STOPS):
            ended = "user_stop"
            break
        steps = max_steps - _steps(task, conversation)
        if steps < 1 or message["content"] is None:
            break
        about = {"domain": domain_name, "task": task_id, "steps": steps, "user_calls": user_calls, "sampling": sampling}
        response = await say(message["content"], {"tau2": about})
        conversation += response["agent_metadata"]["messages"]
        if conversation[-1]["role"] != "assistant":  # its steps are used up
            break
    reward = await asyncio.to_thread(domain.score, task_id, conversation, ended)
    return Played(conversation, ended, reward)


async def _user_turn(user: User, domain: Domain, task: Task, conversation: list[Message], max_steps: int) -> Message:
    """What the user says next. The tool calls that it makes before are added to the conversation."""
    while (message := await user.reply(domain, task, conversation)).get("tool_calls"):
        environment = await asyncio.to_thread(domain.replay, task.id, conversation)
        conversation.append(message)
        for call in message["tool_calls"]:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"] or "{}")
            result = await asyncio.to_thread(environment.call, "user", name, arguments)
            conversation.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if _steps(task, conversation) >= max_steps:
            return {"role": "user", "content": None}
    return message


def _steps(task: Task, conversation: Sequence[Message]) -> int:
    """As tau2-bench counts: a message is one, the results of its tool calls are another."""
    spoken = (each for each in conversation[len(task.opening) :] if each["role"] != "tool")
    return sum(2 if each.get("tool_calls") else 1 for each in spoken)


def sampling_of(gconfig: GenerationHyperparameters) -> dict[str, Any]:
    return {**gconfig.request_fields(gconfig.seed), "max_tokens": gconfig.max_new_tokens}


class Tau2Workflow(AgentServiceWorkflow):
    """Episodes of a TrainJob with ``rollout.agents``: a row of the data set has ``domain`` and ``task``. ``econfig``:
    fields of Tau2EnvConfig; its ``domain`` and ``tasks`` are the rows'."""

    def __init__(self, *, econfig: Mapping[str, Any], gconfig: GenerationHyperparameters, **how: Any) -> None:
        super().__init__(**how)
        self._config = Tau2EnvConfig(**econfig)
        self._sampling = sampling_of(gconfig)

    async def run_session(self, session: AsyncSession, engine: Any, data: dict[str, Any]) -> float:
        access = ModelAccess(base_url=engine.base_url, api_key=session.api_key, model=engine.model)
        user = User(self._config)
        agent = await self._client.start_session(metadata={"task_id": data["task"]}, inference=access)
        try:
            played = await play(
                lambda text, metadata: agent.respond(text, metadata=metadata),
                user,
                data["domain"],
                data["task"],
                max_steps=self._config.max_steps,
                sampling=self._sampling,
            )
        except ClientError as error:
            if error.code == "agent_failed":
                raise AgentEpisodeFailed(str(error)) from None
            raise
        finally:
            await user.close()
            with contextlib.suppress(ClientError):  # it expires
                await agent.close()
        return played.reward
