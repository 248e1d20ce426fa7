"""An agent that solves a task with the tools of its service: it offers them to the model, and runs what the model calls
until the model answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import openai

from areal.api.agent import AgentRequest, AgentResponse, EventEmitter, Tool, ToolError

CONTEXT_FULL = "context_length_exceeded"


class ToolAgent:
    """One turn is one task, which is answered after at most ``max_calls`` calls of the model, or not at all, also where
    the conversation fills the model's context. ``instructions``: the system prompt, if any."""

    def __init__(
        self,
        tools: Sequence[Tool],
        max_calls: int = 4,
        max_tokens: int = 512,
        temperature: float = 1.0,
        instructions: str = "",
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._offered: list[Any] = [_function(tool) for tool in tools]
        self._max_calls = max_calls
        self._sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
        self._instructions = [{"role": "system", "content": instructions}] if instructions else []
        self._http = openai.DefaultAsyncHttpxClient()

    async def run(self, request: AgentRequest, *, emitter: EventEmitter) -> AgentResponse:
        model = request.metadata["areal_inference"]
        client = openai.AsyncOpenAI(
            base_url=f"{model['base_url']}/v1", api_key=model["api_key"], http_client=self._http
        )
        messages: list[Any] = [*self._instructions, {"role": "user", "content": request.message}]
        for _ in range(self._max_calls):
            try:
                answer = await client.chat.completions.create(
                    model=model["model"], messages=messages, tools=self._offered, **self._sampling
                )
            except openai.BadRequestError as error:
                if error.code != CONTEXT_FULL or messages[-1]["role"] == "user":
                    raise
                return AgentResponse("")  # its calls and their results have filled the context
            message = answer.choices[0].message
            if not message.tool_calls:
                return AgentResponse(message.content or "")
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                function: Any = call.function
                await emitter.emit_tool_call(function.name, function.arguments, call.id)
                result = await self._result(function.name, function.arguments)
                await emitter.emit_tool_result(function.name, result, call.id)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return AgentResponse("")

    async def _result(self, name: str, arguments: str) -> str:
        """What the tool returns. The error of a call that fails goes to the model, which may do better."""
        tool = self._tools.get(name)
        if tool is None:
            return f"error: there is no tool {name}"
        try:
            return await tool.call(json.loads(arguments))
        except (ToolError, ValueError, TypeError) as error:
            return f"error: {error}"

    async def close_all_sessions(self) -> None:
        await self._http.aclose()


def _function(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": dict(tool.input_schema),
        },
    }
