"""The agent gateway's process, and its routes for turns: OpenAI's Responses and Chat Completions APIs.

The session stores the conversation, so a turn's message is only the newest user message. The rest of the body is
available to the agent as metadata: a chat completion's body as ``chat_request``; ``input``, ``instructions`` and
``tools`` of a Responses request under these names. The answer's header ``x-areal-ignored`` lists fields without effect.
"""

from __future__ import annotations

import base64
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from areal.dataclasses import dataclass, field, fields
from areal.http.client import HttpClient
from areal.http.headers import EVENT_STREAM, IGNORED, OVERHEAD
from areal.services import dialects
from areal.services.agent.gateway.sessions import (
    ROUTING_FIELDS,
    AgentSessionRoutes,
    AgentSessions,
    caller_metadata,
    key_in_header,
    require_session_key,
)
from areal.services.agent.gateway.sockets import SocketRoutes
from areal.services.agent.gateway.turns import Event, TurnCall, TurnDispatcher, TurnMetrics, new_run_id
from areal.services.agent.own_stream import OwnStreamText
from areal.services.http.auth import Access
from areal.services.http.errors import ApiError, bad_field, bad_request, unsupported
from areal.services.http.messages import (
    AnyResponse,
    Request,
    StreamingResponse,
    body_as,
    idempotency_key,
    ignored_names,
    read_object,
)
from areal.services.http.process import ServeOptions
from areal.services.http.service import Handler, Service, json_response
from areal.services.inference.gateway.routing import LiveTable
from areal.services.inference.gateway.sessions import gateway_parts
from areal.wire.agents import SESSION_KEY_HEADER, SessionKey, StartAgentSession, TurnRequest
from areal.wire.bodies import IDEMPOTENCY_KEY
from areal.wire.processes import AgentGatewayConfig

_NOT_KEPT = "a session keeps its conversation: name it by X-AReaL-Session-Key"
_REFUSED = {
    "previous_response_id": _NOT_KEPT,
    "conversation": _NOT_KEPT,
    "prompt": "there are no stored prompts",
    "functions": "it is the old form of tools",
    "function_call": "it is the old form of tool_choice",
}
_NEUTRAL = {"function_call": ("auto", "none")}


@dataclass(frozen=True, kw_only=True)
class _Common:
    model: str | None = None
    user: SessionKey | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    stream: bool = False


@dataclass(frozen=True, kw_only=True)
class _ResponsesBody(_Common):
    input: Any
    instructions: str | None = None
    tools: tuple[Mapping[str, object], ...] = ()
    background: bool = False


@dataclass(frozen=True, kw_only=True)
class _ChatBody(_Common):
    messages: tuple[Mapping[str, object], ...]
    n: int = 1


@dataclass(frozen=True)
class TurnBody:
    """A parsed request body. ``metadata`` is passed to the agent; ``asked``: request fields that the answer repeats;
    ``ignored``: names of fields without effect."""

    message: str
    metadata: Mapping[str, object]
    user: str | None
    model: str | None
    stream: bool
    asked: Mapping[str, object]
    ignored: tuple[str, ...] = ()


def read_responses(data: Mapping[str, object]) -> TurnBody:
    """Parse a body of the Responses API. Raises 400, which names the field."""
    _refuse(data)
    body = body_as(_ResponsesBody, data)
    if body.background:
        raise unsupported("background", "a response is not kept")
    items = body.input
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise bad_field("input", "must be a string or a list of items, not empty")
    message = _last_message(items, "input")
    more: dict[str, object] = {"input": body.input} if len(items) > 1 else {}
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
    ignored = ignored_names({name for name in data.keys() - _KNOWN if data[name] is not None})
    return TurnBody(message, {**metadata, **more}, body.user, body.model, body.stream, asked, ignored)


def read_chat(data: Mapping[str, object]) -> TurnBody:
    """Parse a body of the Chat Completions API. Raises 400, which names the field."""
    _refuse(data)
    body = body_as(_ChatBody, data)
    if body.n != 1:
        raise unsupported("n", "a turn has one answer")
    if not body.messages:
        raise bad_field("messages", "must not be empty")
    message = _last_message(body.messages, "messages")
    request = {name: value for name, value in data.items() if name not in (*ROUTING_FIELDS, "user", "metadata")}
    metadata = {**caller_metadata(body.metadata), "chat_request": request}
    return TurnBody(message, metadata, body.user, body.model, body.stream, {})


def _refuse(data: Mapping[str, object]) -> None:
    for name in data.keys() & _REFUSED.keys():
        if data[name] not in (None, [], {}, "", *_NEUTRAL.get(name, ())):
            raise unsupported(name, _REFUSED[name])


_KNOWN = {each.name for each in fields(_ResponsesBody)} | set(ROUTING_FIELDS)


def _last_message(items: Any, where: str) -> str:
    """Return the user's newest message: all user messages after the last message of another role. Raises 400."""
    texts: list[str] = []
    for place, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise bad_field(f"{where}[{place}]", "must be an object")
        if item.get("type", "message") == "message" and item.get("role") == "user":
            texts.append(dialects.joined_text(item.get("content"), f"{where}[{place}].content", "\n"))
        else:
            texts.clear()
    if not texts:
        raise bad_field(where, "must end with a message of the user")
    return "\n\n".join(texts)


# Answers, whole or streamed. A Responses answer contains the agent's tool calls, their results and its text as items. A
# chat completion contains only the text, since a client would execute tool calls itself. A stream that the agent
# returns is forwarded unchanged to callers of Chat Completions; callers of Responses get its text.

_NOT_PASSED_ON = frozenset(
    ("connection", "content-encoding", "content-length", "date", "keep-alive", "server", "transfer-encoding", "upgrade")
)


class TurnAnswer(ABC):
    """The answer to one turn: ``event`` consumes the turn's events, ``end`` returns the handler's response."""

    def __init__(self, request: Request, body: TurnBody, key: str, service: str) -> None:
        self._request = request
        self._body = body
        self._service, self._model = service, body.model or service
        self._headers = {SESSION_KEY_HEADER: key} | ({IGNORED: ", ".join(body.ignored)} if body.ignored else {})
        self._out = StreamingResponse(headers={**EVENT_STREAM, **self._headers})
        self._own = OwnStreamText()

    @abstractmethod
    async def event(self, event: Event) -> None: ...

    @abstractmethod
    async def end(self, complete: Event) -> AnyResponse: ...

    def overhead(self, microseconds: int) -> None:
        """Set the header of the service's own time, unless the answer has begun."""
        if not self._out.prepared:
            self._headers[OVERHEAD] = self._out.headers[OVERHEAD] = str(microseconds)

    async def _write(self, data: bytes) -> None:
        """Write to a streamed response, and begin it if needed. Raises ConnectionResetError if the caller has left."""
        if self._out.prepared:
            await self._out.write(data)
        elif self._body.stream:
            self._out.begin(self._request, data)

    def _whole(self, data: Mapping[str, object]) -> AnyResponse:
        return json_response(data, more_headers=self._headers)


class _TurnWriter(dialects.ResponsesWriter):
    """A ResponsesWriter with calls that are not for the client: the agent ran them. They have the form of tools that
    OpenAI runs, ``mcp_call``, and ``label`` in place of an MCP server's."""

    def __init__(self, answer_id: str, model: str, label: str, echoed: Mapping[str, object]) -> None:
        super().__init__(answer_id, model, int(time.time()), echoed=echoed)
        self._label = label
        self._running: dict[str, int] = {}  # places of calls without a result, by the call's ID

    def call(self, call_id: str, name: str, arguments: str) -> bytes:
        """Return the events that begin a call."""
        done, place = self._done("completed"), len(self._items)
        item: dict[str, Any] = {"id": self._item_id("mcp_call", place), "type": "mcp_call", "status": "in_progress"}
        item |= {"server_label": self._label, "name": name, "arguments": "", "output": None, "error": None}
        item |= {"approval_request_id": None}
        at = {"item_id": item["id"], "output_index": place}
        self._running[call_id] = place
        self._items.append({**item, "arguments": arguments})
        return (
            done
            + self._event("response.output_item.added", output_index=place, item=item)
            + self._event("response.mcp_call.in_progress", **at)
            + self._event("response.mcp_call_arguments.delta", **at, delta=arguments)
            + self._event("response.mcp_call_arguments.done", **at, arguments=arguments, name=name)
        )

    def result(self, call_id: str, output: str | None) -> bytes:
        """Return the events that end a call; without ``output``, it has no result."""
        done, place = self._done("completed"), self._running.pop(call_id)
        item = self._items[place]
        item |= {"status": "incomplete" if output is None else "completed", "output": output}
        if output is not None:
            done += self._event("response.mcp_call.completed", item_id=item["id"], output_index=place)
        return done + self._event("response.output_item.done", output_index=place, item=item)

    def completed(self, summary: str, metadata: Mapping[str, object]) -> tuple[bytes, dict[str, object]]:
        """Return the last events, and the whole response. ``summary`` is added as text unless the deltas already had
        it. ``metadata`` is the agent's; the response's field ``metadata`` repeats the request's."""
        sent = self._open is not None and self._open["type"] == "message" and "".join(self._text) == summary
        last = b"" if sent or not summary else self._done("completed") + self.pieces((dialects.Content(summary),))
        done = last + self._done("completed") + b"".join(self.result(each, None) for each in list(self._running))
        response = self._response("completed", self._items, None, None) | {"agent_metadata": metadata}
        return done + self._event("response.completed", response=response), response


class ResponsesAnswer(TurnAnswer):
    """The answer as a response of the Responses API."""

    _writer: _TurnWriter

    async def event(self, event: Event) -> None:
        match event["type"]:
            case "accepted":
                answer_id = f"resp_{event['run_id'].removeprefix('run-')}"
                self._writer = _TurnWriter(answer_id, self._model, self._service, self._body.asked)
                self._writer.whole_only = not self._body.stream
                await self._write(self._writer.opening(0))
            case "delta":
                await self._say(event["text"])
            case "response" | "data":
                await self._say(self._own.take(event))
            case "tool_call":
                await self._write(self._writer.call(event["id"], event["name"], event["arguments"]))
            case "tool_result":
                await self._write(self._writer.result(event["id"], event["result"]))

    async def _say(self, text: str) -> None:
        if text:
            await self._write(self._writer.pieces((dialects.Content(text),)))

    async def end(self, complete: Event) -> AnyResponse:
        await self._say(self._own.end())
        events, response = self._writer.completed(complete["summary"], complete["metadata"])
        if not self._body.stream:
            return self._whole(response)
        await self._write(events)
        return self._out


class CompletionAnswer(TurnAnswer):
    """The answer as a chat completion. ``_sent_text``: the deltas. ``_passed_on``: the answer is the agent's stream."""

    _head: Mapping[str, object]
    _passed_on = False

    def __init__(self, request: Request, body: TurnBody, key: str, service: str) -> None:
        super().__init__(request, body, key, service)
        self._sent_text: list[str] = []

    async def event(self, event: Event) -> None:
        match event["type"]:
            case "accepted":
                answer_id = f"chatcmpl-{event['run_id'].removeprefix('run-')}"
                self._head = {"id": answer_id, "created": int(time.time()), "model": self._model}
            case "stream_lost":
                raise ApiError(410, "the agent's own stream was too long to be kept for a retry", code="stream_lost")
            case "delta":
                await self._say(event["text"])
            case "response" if not self._out.prepared:
                theirs = {n: v for n, v in event["headers"].items() if n.lower() not in _NOT_PASSED_ON}
                self._passed_on = True
                self._out = StreamingResponse(event["status"], headers={**theirs, **self._headers})
                self._out.begin(self._request)
            case "data" if self._passed_on:
                await self._write(base64.b64decode(event["data"]))
            case "response" | "data":  # after deltas
                await self._say(self._own.take(event))

    async def _say(self, text: str) -> None:
        if not self._body.stream or not text:
            return
        first = {"role": "assistant"} if not self._sent_text else {}
        self._sent_text.append(text)
        await self._write(self._chunk({**first, "content": text}))

    def _chunk(self, delta: Mapping[str, object], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return dialects.sse_data({**self._head, "object": "chat.completion.chunk", "choices": [choice]})

    async def end(self, complete: Event) -> AnyResponse:
        if self._passed_on:
            return self._out
        await self._say(self._own.end())
        summary, sent = complete["summary"], "".join(self._sent_text)
        if not self._body.stream:
            message = {"role": "assistant", "content": summary, "refusal": None}
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
            more = {"choices": [choice], "agent_metadata": complete["metadata"]}
            return self._whole({**self._head, "object": "chat.completion", **more})
        if not sent.endswith(summary):
            await self._say(f"\n\n{summary}" if sent else summary)
        await self._write(self._chunk({}, "stop") + dialects.DONE)
        return self._out


ReadBody = Callable[[Mapping[str, object]], TurnBody]


@dataclass(eq=False)
class TurnRoutes:
    """The routes of the Responses and Chat Completions APIs; each request is one turn."""

    _table: LiveTable
    _sessions: AgentSessions
    _runner: TurnDispatcher

    def add_to(self, service: Service) -> None:
        for prefix in ("/v1", ""):
            responses, chat = self._turn(read_responses, ResponsesAnswer), self._turn(read_chat, CompletionAnswer)
            service.route("POST", f"{prefix}/responses", responses, Access.ADMIN)
            service.route("POST", f"{prefix}/chat/completions", chat, Access.ADMIN)

    def _turn(self, read: ReadBody, answers: type[TurnAnswer]) -> Handler:
        async def handle(request: Request) -> AnyResponse:
            data = await read_object(request, self._table.limits.max_body_bytes)
            inference = self._sessions.model_access(data)
            body = read(data)
            key = key_in_header(request.headers) or body.user
            turn = TurnRequest(
                message=body.message,
                run_id=new_run_id(),
                idempotency_key=require_session_key(idempotency_key(request.headers), key, IDEMPOTENCY_KEY),
                metadata=body.metadata,
                inference=inference,
                stream=body.stream,
            )
            if key is None:
                start = StartAgentSession(model=self._sessions.service, inference=inference)
                key = (await self._sessions.start(start, request.id)).key
            answer = answers(request, body, key, self._sessions.service)
            call = TurnCall(key, turn, request.id)

            async def sink(event: Event) -> None:
                answer.overhead(call.overhead_us)
                await answer.event(event)

            try:
                complete = await self._runner.run(call, sink)
            except ApiError as error:
                error.headers = {**error.headers, OVERHEAD: str(call.overhead_us)}
                raise
            answer.overhead(call.overhead_us)
            return await answer.end(complete)

        return handle


@contextlib.asynccontextmanager
async def agent_gateway(config: AgentGatewayConfig, options: ServeOptions) -> AsyncIterator[Service]:
    async with HttpClient() as http:
        parts = gateway_parts(config, options, http, "Turns waiting for a pair.", service=config.service)
        service, table, router = parts.service, parts.table, parts.router
        sessions = AgentSessions(config.service, table, router, parts.keys, config.inference)
        metrics = TurnMetrics(service.metrics)
        runner = TurnDispatcher(sessions, table, parts.follower, parts.admission, http, options.headers, metrics)
        session_routes = AgentSessionRoutes(sessions, parts.journals)
        TurnRoutes(table, sessions, runner).add_to(service)
        session_routes.add_to(service)
        SocketRoutes(table, sessions, session_routes, runner).add_to(service)
        service.route("GET", "/http_sd", router.lists_targets(service, "agent-gateway"), Access.METRICS)
        yield service
