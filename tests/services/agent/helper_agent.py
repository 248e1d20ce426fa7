"""An agent that does what a message says; any other message is repeated word by word.

weather     calls a tool, and has its result
model       asks the session's recorded model
history     tells how many messages came before
wait        says a word, and never ends
fail        raises
"""

from __future__ import annotations

import asyncio
from typing import Any

from areal.api.agent import AgentRequest, AgentResponse, EventEmitter


class Helper:
    async def run(self, request: AgentRequest, *, emitter: EventEmitter) -> AgentResponse:
        match request.message:
            case "weather":
                await emitter.emit_delta("Let me look.\n")
                await emitter.emit_tool_call("weather", {"city": "Paris"})
                await emitter.emit_tool_result("weather", "21 degrees")
                await emitter.emit_delta("It is 21 degrees.")
                return AgentResponse("It is 21 degrees.")
            case "model":
                return AgentResponse(await ask_model(request.metadata["areal_inference"]))
            case "history":
                return AgentResponse(str(len(request.history)))
            case "wait":
                await emitter.emit_delta("waiting")
                await asyncio.Event().wait()
            case "fail":
                raise ValueError("this agent is to fail")
        for number, word in enumerate(request.message.split(" ")):
            await emitter.emit_delta(f" {word}" if number else word)
        return AgentResponse(request.message)


async def ask_model(access: dict[str, Any]) -> str:
    import aiohttp

    headers = {"Authorization": f"Bearer {access['api_key']}"}
    body = {"model": access["model"], "messages": [{"role": "user", "content": "Hello"}]}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(f"{access['base_url']}/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            reply: str = (await answer.json())["choices"][0]["message"]["content"]
            return reply
