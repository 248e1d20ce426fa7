"""A customer service agent for tau2-bench: it answers one message of the user, with the tools of the domain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import openai

from areal.api.agent import AgentRequest, AgentResponse, EventEmitter
from examples.agents.tau2.domains import Message, Who, load_domain


class Tau2Agent:
    """Which domain and task a turn is of, its caller says: ``metadata["tau2"]`` has ``domain``, ``task``, ``steps``
    (how many more there may be), ``sampling`` (fields of the model calls) and ``user_calls``: by the number of a turn,
    the messages of the user's own tool calls before it. The answer's metadata has the turn's chat ``messages``. The
    agent keeps nothing itself, so that its sessions may move to another process."""

    def __init__(self) -> None:
        self._http = openai.DefaultAsyncHttpxClient()

    async def run(self, request: AgentRequest, *, emitter: EventEmitter) -> AgentResponse:
        if not {"tau2", "areal_inference"} <= request.metadata.keys():
            raise ValueError("this agent needs a task (metadata.tau2) and an agent service with `inference`")
        episode, model = request.metadata["tau2"], request.metadata["areal_inference"]
        domain = await asyncio.to_thread(load_domain, episode["domain"])
        history = [*request.history, {"role": "user", "content": request.message}]
        opening = domain.tasks()[episode["task"]].opening
        conversation = [*opening, *_with_user_calls(history, episode["user_calls"])]
        environment = await asyncio.to_thread(domain.replay, episode["task"], conversation)
        messages: list[Any] = [{"role": "system", "content": domain.agent_prompt}, *said_to("assistant", conversation)]
        before = len(messages)
        client = openai.AsyncOpenAI(
            base_url=f"{model['base_url']}/v1", api_key=model["api_key"], http_client=self._http
        )
        tools: Any = domain.tools("assistant")
        for _ in range(0, episode["steps"], 2):  # a call and its result are two
            completion = await client.chat.completions.create(
                model=model["model"], messages=messages, tools=tools, extra_body=episode["sampling"]
            )
            answer = completion.choices[0].message
            if not answer.tool_calls:
                if not (answer.content or "").strip():
                    raise ValueError("the model answered nothing and called no tool")
                messages.append({"role": "assistant", "content": answer.content})
                return AgentResponse(answer.content or "", {"messages": messages[before:]})
            calls = [call.model_dump() for call in answer.tool_calls]
            messages.append({"role": "assistant", "content": answer.content, "tool_calls": calls})
            await emitter.emit_delta(answer.content or "")
            for call in calls:
                await emitter.emit_tool_call(call["function"]["name"], call["function"]["arguments"], call["id"])
            for call in calls:
                name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"] or "{}")
                result = await asyncio.to_thread(environment.call, "assistant", name, arguments)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
                await emitter.emit_tool_result(name, result, call["id"])
        return AgentResponse(metadata={"messages": messages[before:]})  # without an answer: there are no more steps

    async def close_all_sessions(self) -> None:
        await self._http.aclose()


def _with_user_calls(history: Sequence[Message], user_calls: Mapping[str, Sequence[Message]]) -> list[Message]:
    found: list[Message] = []
    turn = 0
    for message in history:
        if message["role"] == "user":
            found += user_calls.get(str(turn), ())
            turn += 1
        found.append(message)
    return found


def said_to(who: Who, conversation: Sequence[Message]) -> list[Message]:
    """What one side has seen: not the other's tool calls, and not their results."""
    found: list[Message] = []
    caller = who
    for message in conversation:
        if message["role"] != "tool":
            caller = message["role"]
        own = caller == who
        if own or not (message["role"] == "tool" or message.get("tool_calls")):
            found.append(message)
    return found
