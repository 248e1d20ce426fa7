"""The agent that ``benchmarks/agents.py`` runs: one scripted model call a turn, where it has a model."""

from __future__ import annotations

import asyncio
from typing import Any

from areal.api.agent import AgentRequest, AgentResponse, EventEmitter
from areal.client.inference import AsyncInferenceClient


class Scripted:
    def __init__(self) -> None:
        self._clients: dict[str, AsyncInferenceClient] = {}

    async def run(self, request: AgentRequest, *, emitter: EventEmitter) -> AgentResponse:
        model: dict[str, Any] | None = request.metadata.get("areal_inference")
        text = "four words of answer"
        if model is not None:
            messages = [*request.history, {"role": "user", "content": request.message}]
            client = self._clients.setdefault(
                model["api_key"], AsyncInferenceClient(model["base_url"], model["api_key"], model=model["model"])
            )
            answer = await client.chat(messages, max_tokens=4)
            text = answer["choices"][0]["message"]["content"] or ""
        await emitter.emit_delta(text)
        return AgentResponse(text)

    async def close_all_sessions(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients.values()))
