"""An agent that asks the model of its session once and streams what it says."""

from __future__ import annotations

from areal.api.agent import AgentRequest, AgentResponse, EventEmitter
from areal.client.inference import AsyncInferenceClient


class Reverser:
    async def run(self, request: AgentRequest, *, emitter: EventEmitter) -> AgentResponse:
        access, question = request.metadata["areal_inference"], {"role": "user", "content": request.message}
        async with AsyncInferenceClient(**access) as client, client.stream_chat([question]) as chunks:
            async for chunk in chunks:
                for choice in chunk["choices"]:
                    await emitter.emit_delta(choice["delta"].get("content") or "")
        return AgentResponse()
