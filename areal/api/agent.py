"""The contract of the agents that an agent service runs.

An agent answers one message of a session. It is a class whose instances have

    async def run(self, request: AgentRequest, *, emitter: EventEmitter) -> AgentResponse | StreamResponse

One instance of a worker serves all its sessions, many turns at once: what it keeps of a session, it keeps under
``request.session_key``. It may have ``async close_session(session_key)`` and ``async close_all_sessions()``.

``run`` may also return a text (the summary), a dict (the metadata), or None. Without a summary it is the text of the
deltas since the last tool call. Other forms of an agent: ``areal.services.agent.worker``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable


@dataclass(frozen=True)
class AgentRequest:
    """``history``: OpenAI chat messages of the session's earlier turns, this message not among them: what the agent
    emitted, and as the last one of a turn its summary. Where that is the model's text, calls and ids unchanged, the
    model's next answer continues the recorded trajectory. ``metadata``: what the caller sent, and as
    ``areal_inference`` the base_url (without ``/v1``), api_key and model of the session's recorded model, where the
    agent service has one."""

    message: str
    session_key: str
    run_id: str
    history: list[dict[str, Any]] = field(default_factory=list)
    queue_mode: Literal["collect", "followup"] = "collect"
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AgentResponse:
    """``summary``: the answer. Empty, it is the text of the deltas since the last tool call. ``metadata`` is written as
    JSON."""

    summary: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StreamResponse:
    """An answer over HTTP that callers of ``/v1/chat/completions`` get as it is."""

    status_code: int
    headers: Mapping[str, str]
    body: AsyncIterator[bytes]


class EventEmitter(Protocol):
    """Sends the events of one turn as they happen. A call waits while the caller lags behind."""

    async def emit_delta(self, text: str) -> None:
        """Text before a tool call is in one message with it."""
        ...

    async def emit_tool_call(self, name: str, args: str | Mapping[str, Any], call_id: str | None = None) -> None:
        """``args``: the model's text as it is, valid JSON or not; or an object. ``call_id``: the model's; None: a new
        one."""
        ...

    async def emit_tool_result(self, name: str, result: Any, call_id: str | None = None) -> None:
        """Emit the result of the call ``call_id``, else of the oldest call of ``name`` that has none yet. A result that
        is not text is written as JSON."""
        ...


class Tool(Protocol):
    """A tool of an MCP server: an agent that takes ``tools``, in its constructor or in ``run``, gets a list of them.
    One that runs on a thread calls them without await."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def input_schema(self) -> Mapping[str, Any]: ...

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The text of its result. Raises ToolError where the tool reports a failure, or its server is away."""
        ...


class ToolError(Exception):
    """A tool's own message."""


@runtime_checkable
class AgentRunnable(Protocol):
    async def run(self, request: AgentRequest, *, emitter: EventEmitter) -> AgentResponse | StreamResponse: ...
