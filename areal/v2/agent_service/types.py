"""AReaL's import path of the agent contract."""

from areal.api.agent import AgentRequest, AgentResponse, AgentRunnable, EventEmitter, StreamResponse

__all__ = ["AgentRequest", "AgentResponse", "AgentRunnable", "EventEmitter", "StreamResponse"]
