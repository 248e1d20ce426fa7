"""An agent that does what a message says: ``tools``, ``call`` (one without a result), ``metadata``, ``fail``, ``lose``,
``stream``, ``json``, ``many``, ``wait`` (until some turn says ``release``), ``block``; any other message is repeated
word by word."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

from areal.api.agent import AgentRequest, AgentResponse, EventEmitter, StreamResponse

PARTS = 20_000
PART = "x" * 1000


class TalkingAgent:
    def __init__(self) -> None:
        self._released = asyncio.Event()

    async def run(self, request: AgentRequest, *, emitter: EventEmitter) -> AgentResponse | StreamResponse:
        match request.message:
            case "tools":
                for city in ("Rome", "Oslo"):
                    await emitter.emit_tool_call("weather", {"city": city})
                for number in (1, 2):
                    await emitter.emit_tool_result("weather", f"sun {number}")
                await emitter.emit_delta("Sunny.")
            case "call":
                await emitter.emit_tool_call("weather", {})
                return AgentResponse(summary="I called.")
            case "metadata":
                return AgentResponse(summary=json.dumps(request.metadata))
            case "fail":
                raise ValueError("no")
            case "lose":
                await emitter.emit_delta("half")
                raise ConnectionError("the model is away")
            case "stream":
                return StreamResponse(200, {"Content-Type": "text/event-stream", "X-Own": "1"}, _parts())
            case "json":
                return StreamResponse(200, {"Content-Type": "application/json"}, _json())
            case "stream much":
                return StreamResponse(200, {"Content-Type": "text/event-stream"}, _parts(5000))
            case "many":
                for _ in range(PARTS):
                    await emitter.emit_delta(PART)
                return AgentResponse(summary="x")
            case "wait":
                await emitter.emit_delta("waiting")
                await self._released.wait()
            case "block":
                await emitter.emit_delta("blocking")
                threading.Event().wait()
            case "release":
                self._released.set()
                self._released = asyncio.Event()
            case message:
                for number, word in enumerate(f"You said: {message}".split(" ")):
                    await emitter.emit_delta(f" {word}" if number else word)
        return AgentResponse()


async def _parts(padding: int = 0) -> AsyncIterator[bytes]:
    yield b"data: one\n\n"
    yield b"data: two\n\n"
    for _ in range(padding):
        yield b": " + b"x" * 1024 + b"\n\n"


async def _json() -> AsyncIterator[bytes]:
    yield b'{"mine":'
    yield b" 1}"


async def summarise(request: AgentRequest, *, emitter: EventEmitter) -> Any:
    """Asks the session's recorded model."""
    from openai import AsyncOpenAI

    access = request.metadata["areal_inference"]
    client = AsyncOpenAI(base_url=f"{access['base_url']}/v1", api_key=access["api_key"])
    asked: Any = [*request.history, {"role": "user", "content": request.message}]
    answer = await client.chat.completions.create(model=access["model"], messages=asked)
    return answer.choices[0].message.content


TOOLS: Any = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "now")]


async def using_tools(request: AgentRequest, *, emitter: EventEmitter) -> None:
    """Asks the session's recorded model until it calls no tool any more."""
    from openai import AsyncOpenAI

    access = request.metadata["areal_inference"]
    client = AsyncOpenAI(base_url=f"{access['base_url']}/v1", api_key=access["api_key"])
    messages: Any = [*request.history, {"role": "user", "content": request.message}]
    calls: Any = True
    while calls:
        answer = await client.chat.completions.create(model=access["model"], messages=messages, tools=TOOLS)
        reply = answer.choices[0].message
        messages.append(reply)
        await emitter.emit_delta(reply.content or "")
        calls = reply.tool_calls or ()
        for call in calls:
            await emitter.emit_tool_call(call.function.name, call.function.arguments, call.id)
        for call in calls:
            await emitter.emit_tool_result(call.function.name, "sun", call.id)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sun"})


def __getattr__(name: str) -> Any:
    if name != "sdk_agent":
        raise AttributeError(name)
    from agents import Agent, function_tool

    def get_weather(city: str, days: int) -> str:
        return "sun"

    def now() -> str:
        return "sun"

    return Agent(name="tools", tools=[function_tool(get_weather), function_tool(now)])
