"""Conversion of OpenAI's Responses and Chat Completions request bodies to a turn's message and metadata.

The session stores the conversation, so the message is only the newest user message. The rest of the body is available
to the agent as metadata: a chat completion's body as ``chat_request``; ``input``, ``instructions`` and ``tools`` of a
Responses request under these names. The header ``x-areal-ignored`` of the answer lists fields without effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import quote

from areal.services.agent.gateway.sessions import ROUTING_FIELDS, caller_metadata
from areal.services.dialects import joined_text
from areal.services.http.errors import bad_request, unsupported
from areal.services.http.messages import body_as
from areal.wire.agents import session_key

_NOT_KEPT = "a session keeps its conversation: name it by X-AReaL-Session-Key"
_REFUSED = {
    "previous_response_id": _NOT_KEPT,
    "conversation": _NOT_KEPT,
    "prompt": "there are no stored prompts",
    "functions": "it is the old form of tools",
    "function_call": "it is the old form of tool_choice",
}
_MOST_IGNORED = 50


@dataclass(frozen=True, kw_only=True)
class _Common:
    model: str | None = None
    user: str | None = session_key(None)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False


@dataclass(frozen=True, kw_only=True)
class _ResponsesBody(_Common):
    input: Any
    instructions: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    background: bool = False


@dataclass(frozen=True, kw_only=True)
class _ChatBody(_Common):
    messages: tuple[Mapping[str, Any], ...]
    n: int = 1


@dataclass(frozen=True)
class TurnBody:
    """A parsed request body. ``metadata`` goes to the agent; ``asked``: request fields that the answer repeats;
    ``ignored``: names of fields that have no effect."""

    message: str
    metadata: Mapping[str, Any]
    user: str | None
    model: str | None
    stream: bool
    asked: Mapping[str, Any]
    ignored: tuple[str, ...] = ()


def read_responses(data: Mapping[str, Any]) -> TurnBody:
    """Parse a body of the Responses API. Raises 400, which names the field."""
    _refuse(data)
    body = body_as(_ResponsesBody, data)
    if body.background:
        raise unsupported("background", "a response is not kept")
    items = body.input
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise bad_request("input must be a string or a list of items, not empty", param="input")
    message = _last_message(items, "input")
    more: dict[str, Any] = {"input": body.input} if len(items) > 1 else {}
    more |= {"instructions": body.instructions} if body.instructions is not None else {}
    more |= {"tools": data["tools"]} if body.tools else {}
    metadata = caller_metadata(body.metadata)
    if twice := sorted(more.keys() & metadata.keys()):
        message = f"metadata.{twice[0]} is reserved: the request's {twice[0]} is there"
        raise bad_request(message, param=f"metadata.{twice[0]}", code="reserved_metadata")
    asked = {
        "instructions": body.instructions,
        "metadata": metadata,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": data.get("tools") or [],
        "top_p": None,
        "user": body.user,
    }
    names = sorted(name for name in data.keys() - _KNOWN if data[name] is not None)
    ignored = tuple(quote(name, safe="") for name in names[:_MOST_IGNORED])
    return TurnBody(message, {**metadata, **more}, body.user, body.model, body.stream, asked, ignored)


def read_chat(data: Mapping[str, Any]) -> TurnBody:
    """Parse a body of the Chat Completions API. Raises 400, which names the field."""
    _refuse(data)
    body = body_as(_ChatBody, data)
    if body.n != 1:
        raise unsupported("n", "a turn has one answer")
    if not body.messages:
        raise bad_request("messages must not be empty", param="messages")
    message = _last_message(body.messages, "messages")
    request = {name: value for name, value in data.items() if name not in (*ROUTING_FIELDS, "user", "metadata")}
    metadata = {**caller_metadata(body.metadata), "chat_request": request}
    return TurnBody(message, metadata, body.user, body.model, body.stream, {})


def _refuse(data: Mapping[str, Any]) -> None:
    for name in data.keys() & _REFUSED.keys():
        if data[name] is not None:
            raise unsupported(name, _REFUSED[name])


_KNOWN = {each.name for each in fields(_ResponsesBody)} | set(ROUTING_FIELDS)


def _last_message(items: Any, where: str) -> str:
    """The user's newest message: all user messages after the last one of another role. Raises 400."""
    said: list[str] = []
    for place, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise bad_request(f"{where}[{place}] must be an object", param=f"{where}[{place}]")
        if item.get("type", "message") == "message" and item.get("role") == "user":
            said.append(joined_text(item.get("content"), f"{where}[{place}].content", "\n"))
        else:
            said.clear()
    if not said:
        raise bad_request(f"{where} must end with a message of the user", param=where)
    return "\n\n".join(said)
