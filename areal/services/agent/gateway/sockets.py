"""Turns over WebSocket: requests, responses and events are JSON frames; one connection can run many turns at once.

    req    {id, method: "agent", params: {message, sessionKey?, idempotencyKey?, queueMode?, metadata?}}
    req    {id, method: "cancel", params: {sessionKey, idempotencyKey?}}
    req    {id, method: "auth", params: {token}}
    res    {id, ok, payload: {runId, sessionKey, status: accepted | complete | failed, summary?, error?}}
    event  {event: "agent", payload: {runId, delta | toolCall | toolResult}}

The messages of a session, and cancels of its turn, reach it in the order in which they arrived on the connection. An
invalid frame gets a ``res`` with the error. A caller without the admin key in a header or in ``?token=`` must send
an ``auth`` frame first. A caller that disconnects cancels its turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import orjson

from areal.dataclasses import dataclass, field
from areal.http.headers import unique_id
from areal.services.agent.gateway.sessions import (
    AgentSessionRoutes,
    AgentSessions,
    caller_metadata,
    require_session_key,
)
from areal.services.agent.gateway.turns import Event, TurnCall, TurnDispatcher, new_run_id
from areal.services.agent.own_stream import OwnStreamText
from areal.services.http.auth import Access, Authenticator
from areal.services.http.errors import ApiError, bad_field, bad_request
from areal.services.http.messages import Request, Response, body_as, decode_object
from areal.services.http.service import Service
from areal.services.http.websocket import GOING_AWAY, WebSocket, accept
from areal.services.inference.gateway.routing import LiveTable
from areal.wire.agents import QueueMode, SessionKey, StartAgentSession, TurnRequest
from areal.wire.bodies import IdempotencyKey

_UNAUTHENTICATED = 4001
_AUTH_S = 5.0
_MOST_TURNS = 64  # at once on one connection, and as many cancels
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _AgentParams:
    message: str
    sessionKey: SessionKey | None = None
    idempotencyKey: IdempotencyKey | None = None
    queueMode: QueueMode = "collect"
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _CancelParams:
    sessionKey: SessionKey
    idempotencyKey: IdempotencyKey | None = None


@dataclass(frozen=True, kw_only=True)
class _AuthParams:
    token: str = field(repr=False)


_Work = Callable[[dict[str, object], asyncio.Event], Coroutine[Any, Any, None]]
"""The work of a frame, given fields for its answers and the event to set when the session has received it."""


@dataclass(eq=False)
class SocketRoutes:
    """The WebSocket route of the agent gateway."""

    _table: LiveTable
    sessions: AgentSessions
    routes: AgentSessionRoutes
    runner: TurnDispatcher

    def add_to(self, service: Service) -> None:
        self.authenticator = service.authenticator
        service.route("GET", "/ws", self.handle, Access.SOCKET)

    async def handle(self, request: Request) -> Response:
        known = request.by_admin or self.authenticator.key is None
        token = request.query.get("token")
        if not known and token is not None:
            _check_token(self.authenticator, token)
            known = True
        socket = accept(request, self._table.limits.max_body_bytes, trusted=known)
        await _SocketTurns(self, socket, request).run(known=known)
        return Response(101)


def _check_token(authenticator: Authenticator, token: str) -> None:
    """Raise 403 if ``token`` is not the admin key."""
    if authenticator.key is not None and not authenticator.key.matches(token.encode("utf-8", "surrogatepass")):
        raise ApiError(403, "this is not the admin key", code="admin_key_required", param="token")


class _SocketTurns:
    """One connection and its running turns."""

    def __init__(self, of: SocketRoutes, socket: WebSocket, request: Request) -> None:
        self._of = of
        self._socket = socket
        self._request = request
        self._turns: set[asyncio.Task[None]] = set()
        self._cancels: set[asyncio.Task[None]] = set()
        self._newest: dict[str, asyncio.Event] = {}  # by session: set when its newest message or cancel has arrived

    async def run(self, *, known: bool) -> None:
        try:
            if not known and not await self._authenticated():
                self._socket.close(_UNAUTHENTICATED, "the first frame must be auth, with the admin key")
                return
            while (text := await self._socket.receive()) is not None:
                await self._take(text)
            if self._socket.leaving and (tasks := self._turns | self._cancels):
                await asyncio.wait(tasks)
        finally:
            tasks = self._turns | self._cancels
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._socket.leaving:
                self._socket.close(GOING_AWAY, "the service stops")
            self._socket.close()

    async def _authenticated(self) -> bool:
        try:
            async with asyncio.timeout(_AUTH_S):
                text = await self._socket.receive()
        except TimeoutError:
            return False
        return text is not None and await self._take(text, only="auth")

    async def _take(self, text: str, only: str | None = None) -> bool:
        """Handle a frame. With ``only``, other methods are refused. Return False if it was answered with an error."""
        frame_id: Any = None
        request_id = unique_id("req_")
        try:
            frame: dict[str, Any] = decode_object(text, "the frame")
            frame_id, method, params = frame.get("id"), frame.get("method"), frame.get("params") or {}
            if frame.get("type") != "req":
                raise bad_field("type", "must be req")
            if not isinstance(frame_id, str | int) or isinstance(frame_id, bool):
                raise bad_field("id", "must be a text or a whole number")
            if only is not None and method != only:
                raise ApiError(401, f"the first frame must be {only}", code="missing_api_key", param="method")
            match method:
                case "auth":
                    _check_token(self._of.authenticator, _params(_AuthParams, params).token)
                    self._socket.lingers = True
                    await self._answer(frame_id, {"status": "authenticated"})
                case "cancel":
                    given = _params(_CancelParams, params)

                    async def cancel(about: dict[str, object], reached: asyncio.Event) -> None:
                        done = self._of.routes.cancel(given.sessionKey, given.idempotencyKey, self._request)
                        await self._answer(frame_id, await done)

                    self._start(self._cancels, given.sessionKey, cancel, frame_id, request_id, 0)
                case "agent":
                    self._begin(frame_id, _params(_AgentParams, params), params, request_id, len(text.encode()))
                case _:
                    raise bad_request(f"there is no method {method!r}", param="method", code="unknown_method")
        except ApiError as error:
            await self._fail(frame_id, error, request_id)
            return False
        return True

    def _begin(
        self, frame_id: Any, given: _AgentParams, params: Mapping[str, object], request_id: str, size: int
    ) -> None:
        """Start a turn; its frame, of ``size`` bytes, is kept until the turn ends. Raises 400, 429, 503."""
        turn = TurnRequest(
            message=given.message,
            run_id=new_run_id(),
            queue_mode=given.queueMode,
            idempotency_key=require_session_key(given.idempotencyKey, given.sessionKey, "params.idempotencyKey"),
            metadata=caller_metadata(given.metadata),
            inference=self._of.sessions.model_access(params),
        )
        work = partial(self._turn, frame_id, given.sessionKey, turn, request_id)
        self._start(self._turns, given.sessionKey, work, frame_id, request_id, size)

    def _start(
        self, tasks: set[asyncio.Task[None]], key: str | None, work: _Work, frame_id: Any, request_id: str, size: int
    ) -> None:
        """Run ``work`` as one of ``tasks``, once the session has received its previous frame. Raises 429, 503."""
        if len(tasks) >= _MOST_TURNS:
            what = "turns" if tasks is self._turns else "cancels"
            raise ApiError(429, f"{_MOST_TURNS} {what} run on this connection", code="too_many_requests")
        budget = self._request.connection.budget
        budget.take(size, size)
        before, reached = None, asyncio.Event()
        if key is not None:
            before, self._newest[key] = self._newest.get(key), reached
        guarded = self._guarded(work, frame_id, request_id, before, reached)
        tasks.add(task := asyncio.create_task(guarded, name="socket-frame"))

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            budget.give(size)
            reached.set()
            if key is not None and self._newest.get(key) is reached:
                del self._newest[key]

        task.add_done_callback(ended)

    async def _guarded(
        self, work: _Work, frame_id: Any, request_id: str, before: asyncio.Event | None, reached: asyncio.Event
    ) -> None:
        about: dict[str, object] = {}
        if before is not None:
            await before.wait()
        try:
            await work(about, reached)
        except ApiError as error:
            await self._fail(frame_id, error, request_id, about)
        except ConnectionResetError:
            """The caller has left."""
        except Exception:  # noqa: BLE001 - the boundary of a request: the log gets the detail, the caller an id
            _log.exception("a frame failed [%s]", request_id)
            await self._fail(frame_id, ApiError(500, "internal error", code="internal_error"), request_id, about)

    async def _turn(
        self,
        frame_id: Any,
        key: str | None,
        turn: TurnRequest,
        request_id: str,
        about: dict[str, object],
        reached: asyncio.Event,
    ) -> None:
        """Run the turn. Set ``reached`` when its message has reached the session."""
        own = OwnStreamText()
        if key is None:
            start = StartAgentSession(model=self._of.sessions.service, inference=turn.inference)
            key = (await self._of.sessions.start(start, request_id)).key
        about |= {"runId": turn.run_id, "sessionKey": key}

        async def send(fields: Event) -> None:
            payload = {"runId": about["runId"], **fields}
            await self._send({"type": "event", "event": "agent", "payload": payload})

        async def sink(event: Event) -> None:
            if event["type"] == "accepted":
                reached.set()
                about["runId"] = event["run_id"]
                await self._answer(frame_id, {**about, "status": "accepted"})
            elif fields := _frame_fields(event, own):
                await send(fields)

        last = await self._of.runner.run(TurnCall(key, turn, request_id), sink)
        if text := own.end():
            await send({"delta": text})
        done = {"status": "complete", "summary": last["summary"], "metadata": last["metadata"]}
        await self._answer(frame_id, {**about, **done})

    async def _answer(self, frame_id: Any, payload: Mapping[str, object]) -> None:
        await self._send({"type": "res", "id": frame_id, "ok": True, "payload": payload})

    async def _fail(self, frame_id: Any, error: ApiError, request_id: str, about: Mapping[str, object] = {}) -> None:
        payload = {**about, "status": "failed", **error.body(request_id)}
        try:
            await self._send({"type": "res", "id": frame_id, "ok": False, "payload": payload})
        except ConnectionResetError:
            """The caller has left."""

    async def _send(self, frame: Mapping[str, object]) -> None:
        await self._socket.send(orjson.dumps(frame).decode())


def _params(cls: type[Any], params: object) -> Any:
    """Return ``params`` as a ``cls``. Raises 400."""
    if not isinstance(params, Mapping):
        raise bad_field("params", "must be an object")
    return body_as(cls, params, "params")


def _frame_fields(event: Event, own: OwnStreamText) -> Event:
    """Return the payload of an event frame; empty for an event without one. ``own``: parses the agent's own stream."""
    match event["type"]:
        case "delta":
            return {"delta": event["text"]}
        case "response" | "data":
            return {"delta": text} if (text := own.take(event)) else {}
        case "tool_call":
            return {"toolCall": {"id": event["id"], "name": event["name"], "args": event["arguments"]}}
        case "tool_result":
            return {"toolResult": {"id": event["id"], "name": event["name"], "result": event["result"]}}
    return {}
