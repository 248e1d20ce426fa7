"""The contract of the agents that an agent service runs.

An agent answers one message of a session. It is a class whose instances have

    async def run(self, request: AgentRequest, *, emitter: EventEmitter) -> AgentResponse | StreamResponse

A worker has one instance, which serves all sessions and many turns at once: it must keep the state of sessions apart,
by ``request.session_key``. It may have ``async close_session(session_key)`` and ``async close_all_sessions()``.

``run`` may also return a string (the summary), a dict (the metadata), or None. The default summary is the text of the
deltas since the last tool call. Other forms of an agent: ``areal.services.agent.worker``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable


@dataclass(frozen=True)
class AgentRequest:
    """One message to the agent. ``history``: OpenAI chat messages of the session's earlier turns, without this message:
    the emitted events of each turn, then its summary. If these repeat the model's text, tool calls and call ids
    unchanged, the model's next answer continues the recorded trajectory. ``metadata``: the caller's; if the session has
    a recorded model, also its base_url (without ``/v1``), api_key and model, as ``areal_inference``."""

    message: str
    session_key: str
    run_id: str
    history: list[dict[str, Any]] = field(default_factory=list)
    queue_mode: Literal["collect", "followup"] = "collect"
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AgentResponse:
    """The answer. An empty ``summary`` means the text of the deltas since the last tool call. ``metadata``: JSON."""

    summary: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StreamResponse:
    """An HTTP response that is forwarded unchanged to callers of ``/v1/chat/completions``."""

    status_code: int
    headers: Mapping[str, str]
    body: AsyncIterator[bytes]


class EventEmitter(Protocol):
    """Sends the events of one turn to its caller. A call waits while the caller reads more slowly than events come."""

    async def emit_delta(self, text: str) -> None:
        """Emit text. The text before a tool call is part of the same chat message as the call."""

    async def emit_tool_call(self, name: str, args: str | Mapping[str, Any], call_id: str | None = None) -> None:
        """Emit a tool call. ``args``: the model's text unchanged, valid JSON or not; or a mapping. ``call_id``: the
        model's; None generates one."""

    async def emit_tool_result(self, name: str, result: Any, call_id: str | None = None) -> None:
        """Emit the result of the call ``call_id``; None: of the oldest call of ``name`` without a result. A result that
        is not a string is serialized as JSON."""


class Tool(Protocol):
    """A tool of an MCP server. An agent whose constructor or ``run`` has a parameter ``tools`` gets a list of tools.
    For an agent that runs on a thread, ``call`` is synchronous."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def input_schema(self) -> Mapping[str, Any]: ...

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Call the tool. Returns the result's text. Raises ToolError if the tool or the call of its server fails."""


class ToolError(Exception):
    """A call of a tool failed. The message is the tool's, or describes the failure of its server."""


@runtime_checkable
class AgentRunnable(Protocol):
    """The interface of an agent."""

    async def run(self, request: AgentRequest, *, emitter: EventEmitter) -> AgentResponse | StreamResponse: ...
