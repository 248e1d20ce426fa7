"""Sessions of an agent service: lookup by key, start on the data proxy that the router picks, and their routes.

A key is opaque: any text of 1 to 1024 bytes of UTF-8. In a path it is one percent-encoded segment; in the header
``X-AReaL-Session-Key`` it is the field's bytes as they are, read as UTF-8 and not percent-decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Annotated, Any, NamedTuple
from urllib.parse import quote

import orjson

from areal.dataclasses import dataclass, field
from areal.http.headers import Headers
from areal.services.http import messages
from areal.services.http.auth import Access
from areal.services.http.errors import ApiError, bad_field, bad_request, refusal
from areal.services.http.service import Handler, Service, json_response, to_response
from areal.services.inference.gateway.relay import NO_SESSION
from areal.services.inference.gateway.routing import LiveTable, RouterClient
from areal.services.inference.gateway.sessions import JournalClient, SessionKeys, WorkerReply, place_sessions
from areal.services.journal.keys import tag_of_key
from areal.wire import agents
from areal.wire.fields import Valid
from areal.wire.processes import InferenceAccess
from areal.wire.routing import NO_REPLICAS

RESERVED = ("areal_inference", "chat_request")  # metadata that the service sets
_BODY_BYTES = 1024 * 1024
_SESSION_HEADER = agents.SESSION_KEY_HEADER.lower().encode()


def path_of(key: str, verb: str) -> str:
    """Return the path of a session, or of an action on it, at a data proxy."""
    return f"/session/{quote(key, safe='')}{verb}"


def session_not_found(key: str) -> ApiError:
    message = "no session has this key"
    if tag_of_key(key) is not None:
        message += (
            ", which an agent service made: its session is gone, and no other one gets it; POST /sessions makes one"
        )
    return ApiError(404, message, code="session_not_found", param="session_key")


def key_in_header(headers: Headers) -> str | None:
    """Return the session key in the request headers, if any. Raises 400 for a malformed one."""
    if _SESSION_HEADER not in headers.raw:
        return None
    return checked_key(headers[agents.SESSION_KEY_HEADER], agents.SESSION_KEY_HEADER)


def checked_key(key: str, param: str) -> str:
    """Return ``key`` if it is a valid session key. Raises 400 naming ``param``."""
    if not agents.is_session_key(key):
        raise bad_field(param, f"{agents.KEY_PROBLEM}")
    return key


def require_session_key(idempotency_key: str | None, session: str | None, param: str) -> str | None:
    """Return ``idempotency_key`` if the request names its session. Raises 400 naming ``param``: without a session key,
    a retry would start another session instead of finding the turn."""
    if idempotency_key is not None and session is None:
        message = f"{param} needs a session key, because a retry finds its turn in the session"
        raise bad_request(message, param=param, code="session_key_required")
    return idempotency_key


def caller_metadata(metadata: Mapping[str, object]) -> Mapping[str, object]:
    """Return ``metadata`` if it has no reserved names. Raises 400."""
    for name in RESERVED:
        if name in metadata:
            message = f"metadata.{name} is reserved: the service sets it"
            raise bad_request(message, param=f"metadata.{name}", code="reserved_metadata")
    return metadata


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Request fields that name the caller's RL session. ``inf_base_url`` and ``session_api_key`` require each other;
    the key is passed on in a header."""

    inf_base_url: str | None = None
    inf_model: str | None = None
    session_api_key: Annotated[str, Valid("must be printable characters", str.isprintable)] | None = field(
        default=None, repr=False
    )


ROUTING_FIELDS = ("inf_base_url", "inf_model", "session_api_key")


class OpenedSession(NamedTuple):
    """A session. ``tag``: its journal's. ``inference_session_id``: its RL session, if the service started that."""

    key: str
    tag: str
    inference_session_id: str | None
    created: bool
    metadata: Mapping[str, object]


@dataclass(eq=False)
class AgentSessions:
    """Finds and starts the sessions of one agent service."""

    service: str
    _table: LiveTable
    _router: RouterClient
    _keys: SessionKeys
    _inference: Sequence[InferenceAccess]
    _starting: dict[str, asyncio.Task[OpenedSession]] = field(default_factory=dict, init=False)

    def model_access(self, data: Mapping[str, object]) -> agents.ModelAccess | None:
        """Return the caller's own RL session, if any. Raises 400 if it is incomplete, or not configured."""
        if all(data.get(name) is None for name in ROUTING_FIELDS):
            return None
        given = messages.body_as(Routing, data)
        for name, value in (("inf_base_url", given.inf_base_url), ("session_api_key", given.session_api_key)):
            if not value:
                message = f"{name} is required: inf_base_url and session_api_key come together"
                raise bad_request(message, param=name, code="missing_field")
        known = {_base(access.addr): access for access in self._inference}
        access = known.get(_base(str(given.inf_base_url)))
        if access is None:
            message = "inf_base_url is no inference service of this agent service"
            raise bad_request(message, param="inf_base_url", code="foreign_inference")
        model = given.inf_model or access.model
        return agents.ModelAccess(base_url=_base(access.addr), api_key=str(given.session_api_key), model=model)

    async def find(self, key: str) -> str:
        """Return the tag of the session's journal, after waiting for its pending start. Raises 404, 503."""
        if (starting := self._starting.get(key)) is not None:
            await asyncio.wait([starting])
        tag = await self._keys.journal_with(key.encode())
        if tag is None:
            self.require_pairs()
            self._table.require_readable()
            raise session_not_found(key)
        return tag

    async def find_again(self, key: str, before: str, error: ApiError) -> str:
        """Return the tag of the session's journal after ``error``, which says that the journal ``before`` is gone: a
        session with this key may have started in another journal meanwhile. Raises 404, 503, another ``error``."""
        if error.code in ("model_not_found", NO_REPLICAS):
            raise _no_pair() from error
        if error.code != NO_SESSION:
            raise error
        self.forget(key)
        tag = await self.find(key)
        if tag == before:
            raise session_not_found(key)
        return tag

    def require_pairs(self) -> None:
        """Raise 503 without a pair, or with an incomplete routing table: sessions cannot be found then."""
        self._table.require_whole()
        model = self._table.snapshot.models.get(self.service)
        if model is None or not model.workers:
            raise _no_pair()

    def forget(self, key: str) -> None:
        """Drop the cached journal of the session, which may have moved or ended."""
        self._keys.forget(key.encode())

    async def find_or_start(self, key: str, inference: agents.ModelAccess | None, request_id: str) -> str:
        """Return the session's journal tag, and start it if needed. Raises 404 for a generated key without one."""
        if (tag := await self._keys.journal_with(key.encode())) is not None:
            return tag
        start = agents.StartAgentSession(api_key=key, model=self.service, inference=inference)
        return (await self.start(start, request_id)).tag

    async def start(self, start: agents.StartAgentSession, request_id: str) -> OpenedSession:
        """Start a session, or return the one with this key. A start with a key continues if its caller disconnects, and
        ``find`` waits for it, so that the caller can close the session."""
        key = start.api_key
        if key is None:
            return await self._start(start, request_id)
        task = asyncio.create_task(self._start(start, request_id), name="start-agent-session")
        self._starting[key] = task
        task.add_done_callback(partial(self._started, key))
        return await asyncio.shield(task)

    def _started(self, key: str, task: asyncio.Task[OpenedSession]) -> None:
        if self._starting.get(key) is task:
            del self._starting[key]
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the caller may have disconnected

    async def _start(self, start: agents.StartAgentSession, request_id: str) -> OpenedSession:
        body = orjson.dumps(start)
        try:
            reply = await place_sessions(self._table, self._router, body, self.service, request_id)
        except ApiError as error:
            raise _no_pair() if error.code == NO_REPLICAS else error from None
        if reply.status == 404 and reply.error().get("code") == "model_not_found":
            raise _no_pair()
        if reply.status == 404 and start.api_key is not None:
            raise session_not_found(start.api_key)
        if reply.status != 201:
            raise refusal(reply, "a data proxy")
        document = reply.object()
        session = document["sessions"][0]
        key = session["session_api_key"]
        tag = document.get("journal") or tag_of_key(key)
        if tag is None:
            self.forget(key)
            tag = await self.find(key)
        else:
            self._keys.remember(key.encode(), tag)
        stored = session.get("metadata", start.metadata)
        return OpenedSession(key, tag, session.get("inference_session_id"), session["created"], stored)


def _no_pair() -> ApiError:
    message = "no pair of this agent service is registered"
    return ApiError(503, message, code="no_worker_available", headers={"Retry-After": "1"})


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, kw_only=True)
class _NewSession:
    session_key: agents.SessionKey | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _NamedSession:
    session_key: agents.SessionKey


@dataclass(eq=False)
class AgentSessionRoutes:
    """The session routes of the agent gateway."""

    _sessions: AgentSessions
    _journals: JournalClient

    def add_to(self, service: Service) -> None:
        service.route("POST", "/sessions", self.start, Access.ADMIN)
        service.route("GET", "/sessions", self.list, Access.ADMIN)
        service.route("POST", "/sessions/close", self.close, Access.ADMIN)
        forward, session = self._forward_handler, "/sessions/{key}"
        service.route("GET", session, forward("GET", ""), Access.ADMIN)
        service.route("DELETE", f"{session}/turn", forward("DELETE", "/turn"), Access.ADMIN)
        service.route("POST", f"{session}/reward", forward("POST", "/reward", agents.RewardSession), Access.ADMIN)
        service.route("POST", f"{session}/export", forward("POST", "/export", agents.ExportSession), Access.ADMIN)
        acknowledge = forward("POST", "/export/ack", agents.AcknowledgeExport)
        service.route("POST", f"{session}/export/ack", acknowledge, Access.ADMIN)

    async def start(self, request: messages.Request) -> messages.Response:
        """Start a session: 201. If a session with this key exists, return it unchanged: 200."""
        data = await messages.read_object(request, _BODY_BYTES)
        body = messages.body_as(_NewSession, data)
        if body.session_key is None:
            messages.refuse_idempotency_key(request, "give session_key, whose session is answered again")
        start = agents.StartAgentSession(
            api_key=body.session_key,
            model=self._sessions.service,
            metadata=caller_metadata(body.metadata),
            inference=self._sessions.model_access(data),
            reopen=True,
        )
        started = await self._sessions.start(start, request.id)
        document = {"session_key": started.key, "inference_session_id": started.inference_session_id}
        return json_response({**document, "metadata": started.metadata}, status=201 if started.created else 200)

    async def list(self, request: messages.Request) -> messages.Response:
        """Return one page of sessions, ordered by key."""
        self._sessions.require_pairs()
        return await self._journals.page(request, "/sessions", "session_key", itemgetter("session_key"))

    async def close(self, request: messages.Request) -> messages.AnyResponse:
        key = (await messages.read_body(request, _NamedSession, _BODY_BYTES)).session_key
        return to_response(await self._send(request, key, "POST", "/close"))

    def _forward_handler(self, method: str, verb: str, body: type[Any] | None = None) -> Handler:
        """Return a handler that checks the body as a ``body``, and forwards the request to the session's data proxy."""

        async def handle(request: messages.Request) -> messages.AnyResponse:
            key = checked_key(request.match_info["key"], "session_key")
            if method == "DELETE":
                messages.refuse_idempotency_key(request, "give ?idempotency_key=, that of the message to cancel")
            given = await request.read(_BODY_BYTES)
            if body is not None:
                given = given or b"{}"
                messages.body_as(body, messages.decode_object(given))
            query = f"?{request.query_string}" if request.query_string else ""
            return to_response(await self._send(request, key, method, verb + query, given))

        return handle

    async def _send(
        self, request: messages.Request, key: str, method: str, verb: str, body: bytes = b""
    ) -> WorkerReply:
        tag = await self._sessions.find(key)
        call = method, path_of(key, verb), self._journals.for_admin(request), body
        try:
            reply = await self._journals.call(tag, *call)
        except ApiError as error:
            reply = await self._journals.call(await self._sessions.find_again(key, tag, error), *call)
        if reply.status in (404, 410):
            self._sessions.forget(key)
        return reply

    async def cancel(self, key: str, idempotency_key: str | None, request: messages.Request) -> Mapping[str, object]:
        """Cancel the session's running turn; with ``idempotency_key``, the message of that request. Raises 404."""
        query = f"?idempotency_key={quote(idempotency_key, safe='')}" if idempotency_key is not None else ""
        reply = await self._send(request, key, "DELETE", f"/turn{query}")
        if reply.status != 200:
            raise refusal(reply, "a data proxy")
        return reply.object()
