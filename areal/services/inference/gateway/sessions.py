"""``/rl/*`` at the gateway: the router places new sessions; other calls go to the data proxy with the session's
journal.

Finds the session of a caller's key, the data proxy that holds a journal, and the sessions of the human in the loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from areal.dataclasses import dataclass
from areal.http import headers as names
from areal.http.client import CallFailed, HttpClient, HttpReply
from areal.http.headers import unique_id
from areal.services.http.auth import Access, AdminKey, presented_key, unknown_key
from areal.services.http.errors import ApiError, bad_field
from areal.services.http.messages import (
    AnyResponse,
    Request,
    Response,
    decode_object,
    idempotency_key,
    query_int,
    refuse_idempotency_key,
)
from areal.services.http.process import ServeOptions
from areal.services.http.service import Service, json_response, to_response
from areal.services.http.tasks import background
from areal.services.inference.gateway.relay import NO_SESSION, Admission, Relay
from areal.services.inference.gateway.routing import ROUTER_AWAY, Follower, LiveTable, RouterClient
from areal.services.inference.recorder.session import HITL, GroupName, SessionName, tag_of_answer
from areal.services.inference.router.picking import CallKey
from areal.services.journal.keys import key_digest, tag_of_key
from areal.wire.bodies import IDEMPOTENCY_KEY
from areal.wire.processes import FollowerConfig
from areal.wire.routing import CORDONED, READY, WorkerEntry

# A session's key contains the tag of its journal. A key that a caller chose is looked up at the router, and the result
# is cached for a while, even if no data proxy has the session.

_REMEMBERED = 10_000
_FOUND_S = 60.0
_MISSED_S = 0.5
_RETRIED_CODES = ("session_away", ROUTER_AWAY)
_AWAY_S = 60.0
_RETRY_S = 0.5
_LOOKUPS_AT_ONCE = 16
_UNHEARD_S = 10.0
_REFRESH_S = 0.1


class SessionKeys:
    """Finds the journal of a key's session. ``key`` None: a service without keys; callers without a session's key are
    admins."""

    def __init__(self, table: LiveTable, follower: Follower, router: RouterClient, key: AdminKey | None) -> None:
        self._table = table
        self._follower = follower
        self._router = router
        self._key = key
        self._custom_keys: OrderedDict[bytes, tuple[str | None, float]] = OrderedDict()  # digest -> (tag, until)
        self._refreshed_at = -_REFRESH_S
        self._lookups = asyncio.Semaphore(_LOOKUPS_AT_ONCE)

    async def journal_of(self, request: Request) -> str | None:
        """Return the tag of the journal of the caller's session, None for the admin. Raises 401 for an unknown key, 503
        if the key cannot be looked up now."""
        if request.by_admin:
            return None
        try:
            key = presented_key(request.headers)
        except ApiError:
            if self._key is not None:
                raise
            return None
        tag = await self.journal_with(key)
        if tag is None and self._key is not None:
            self._table.require_whole()
            self._table.require_readable()
            raise unknown_key()
        return tag

    async def journal_with(self, key: bytes) -> str | None:
        """Return the tag of the journal with this key's session, None if there is no such session. Raises 503 if the
        key cannot be looked up now."""
        tag = tag_of_key(key.decode())
        if tag is not None and await self.is_known(tag):
            return tag
        return await self._custom_key_journal(key_digest(key)) if self._table.records else None

    async def is_known(self, tag: str) -> bool:
        """Return whether a data proxy has this journal or will have it again. Raises 503 if a data proxy that might
        have it has not reported yet."""
        if self._table.model_of_journal(tag) is not None:
            return True
        loop = asyncio.get_running_loop()
        if loop.time() - self._refreshed_at >= _REFRESH_S:  # invented keys must not overload the router
            await self._follower.refresh()  # the journal may be new
            self._refreshed_at = loop.time()
        deadline = loop.time() + _UNHEARD_S
        while self._table.model_of_journal(tag) is None:
            if self._table.all_heard:
                return False
            if (left := deadline - loop.time()) <= 0:
                message = "no data proxy has this session, but not all data proxies have reported yet"
                raise ApiError(503, message, code="session_away", headers={"Retry-After": "1"})
            await self._table.changed(left)
        return True

    async def _custom_key_journal(self, digest: bytes) -> str | None:
        loop = asyncio.get_running_loop()
        known = self._custom_keys.get(digest)
        if known is not None and known[0] is not None and self._table.model_of_journal(known[0]) is None:
            known = None  # that journal is gone; another relay may have started a session with this key since
        if known is not None and known[1] > loop.time():
            return known[0]
        try:
            tag = await self._find(digest, loop.time() + (_AWAY_S if known is None else 0.0))
        except ApiError:
            if known is None:
                raise
            tag = known[0]  # the lookup failed: use the expired result
        self._custom_keys[digest] = (tag, loop.time() + (_FOUND_S if tag is not None else _MISSED_S))
        self._custom_keys.move_to_end(digest)
        if len(self._custom_keys) > _REMEMBERED:
            self._custom_keys.popitem(last=False)
        return tag

    async def _find(self, digest: bytes, deadline: float) -> str | None:
        """Look the key up, with retries until ``deadline``. Raises 503 if the router, or a data proxy that may have the
        session, stays unavailable."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with self._lookups:
                    found = await self._router.post("/route", {"api_key_digest": digest.hex()})
                    journal = found.get("journal")
                    return journal if isinstance(journal, str) else None
            except ApiError as error:
                if error.status == 404:
                    return None
                if error.code not in _RETRIED_CODES or loop.time() >= deadline:
                    raise
            await self._table.changed(_RETRY_S)

    def remember(self, key: bytes, tag: str) -> None:
        """Cache that the session with this key is in the journal ``tag``."""
        self._custom_keys[key_digest(key)] = (tag, asyncio.get_running_loop().time() + _FOUND_S)

    def forget(self, key: bytes) -> None:
        """Drop the cached result, since another session may have the key now."""
        self._custom_keys.pop(key_digest(key), None)


# Small idempotent calls to the data proxy that holds a journal. While it is unavailable or the journal moves, a call
# waits. A call whose answer was lost is sent again.

_DEADLINE_S = 120.0
_UNREADY_S = 5.0  # for a worker that is not ready and may not answer at all
_AGAIN = (421, 503)
_AUTH = ("Authorization", "x-api-key")


def _identity(request: Request) -> dict[str, str]:
    """Return the headers that identify the request. Its Idempotency-Key, the caller's or a new one, keeps a call that
    is sent again after a lost answer from taking effect twice. Raises 400 for a malformed key."""
    key = idempotency_key(request.headers) or unique_id("call_")
    return {names.REQUEST_ID: request.id, IDEMPOTENCY_KEY: key}


@dataclass(frozen=True)
class WorkerReply(HttpReply):
    """A data proxy's reply. ``journals``: the tags of the journals that it served when it was called."""

    journals: tuple[str, ...] = ()


@dataclass(eq=False)
class JournalClient:
    """``_admin``: the headers with the admin key."""

    _http: HttpClient
    _table: LiveTable
    _admission: Admission
    _keys: SessionKeys
    _admin: Mapping[str, str]

    def for_admin(self, request: Request) -> dict[str, str]:
        """Return the headers of calls on behalf of an admin's request."""
        return {**self._admin, **_identity(request)}

    def for_caller(self, request: Request) -> dict[str, str]:
        """Return the headers of calls with the caller's key."""
        given = {name: request.headers[name] for name in _AUTH if name in request.headers}
        return {**given, **_identity(request)}

    async def call(
        self,
        tag: str,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        timeout_s: float = _DEADLINE_S,
    ) -> WorkerReply:
        """Return the answer of the data proxy with journal ``tag``. Raises 404 for an unknown journal, 503 if its
        holder stays unavailable."""
        headers = {**headers, names.JOURNAL: tag}
        since = asyncio.get_running_loop().time()
        refused: set[str] = set()
        while True:
            model = self._table.model_of_journal(tag)
            if model is None:
                if not await self._keys.is_known(tag):
                    raise ApiError(404, "no data proxy has this session", code=NO_SESSION)
                continue
            if not self._table.routable(model, even_suspects=True, tag=tag):
                # Rewards and exports need no engine: a data proxy whose engine is down can still answer.
                workers = [worker for model in self._table.snapshot.models.values() for worker in model.workers]
                for worker in {worker.addr: worker for worker in workers if tag in worker.journals}.values():
                    reply = await self.request(worker, method, path, headers, min(timeout_s, _UNREADY_S), body)
                    if reply is not None and reply.status not in _AGAIN:
                        return reply
            worker = await self._admission.worker(model, CallKey(tag=tag), refused, since)
            reply = await self.request(worker, method, path, headers, timeout_s, body)
            if reply is not None and reply.status not in _AGAIN:
                self._table.trust(worker.addr)
                return reply
            if reply is None or reply.status == 503:
                self._table.suspect(worker.addr)
            refused = {worker.addr}

    async def each(
        self, path: str, headers: Mapping[str, str], timeout_s: float = 10.0, model: str | None = None
    ) -> dict[str, WorkerReply]:
        """Return the answers of all recording data proxies to GET ``path``, by address. Silent ones are left out."""
        workers = self.recorders(model)
        replies = await asyncio.gather(*(self.request(worker, "GET", path, headers, timeout_s) for worker in workers))
        return {worker.addr: answer for worker, answer in zip(workers, replies, strict=True) if answer is not None}

    async def page(
        self, request: Request, path: str, name: str, place: Callable[[Mapping[str, object]], Any]
    ) -> Response:
        """Return a page of the sessions at GET ``path`` of all data proxies, sorted by ``place``. ``next``: the field
        ``name`` of the page's last session. ``journals_away``: journals that no data proxy serves now."""
        limit = query_int(request, "limit", 100, 1, 1000)
        answers = await self.each(f"{path}?{request.query_string}", self.for_admin(request))
        if (refusal := next((reply for reply in answers.values() if reply.status != 200), None)) is not None:
            return to_response(refusal)
        pages = [reply.object() for reply in answers.values()]
        found = sorted((session for page in pages for session in page["sessions"]), key=place)
        more = len(found) > limit or any(page["next"] is not None for page in pages)
        following = found[:limit][-1][name] if more and found else None
        return json_response({"sessions": found[:limit], "next": following, "journals_away": self.away(answers)})

    def away(self, answers: Mapping[str, WorkerReply], model: str | None = None) -> list[str]:
        """Return the tags of the journals that these answers do not cover: journals of data proxies that did not
        answer, journals without a data proxy, and journals that moved to a data proxy after it was asked."""
        models = [each for each in self._table.snapshot.models.values() if model in (None, each.name)]
        known = {tag for each in models for worker in each.workers for tag in worker.journals}
        known |= {tag for each in models for tag in each.orphans if tag not in each.damaged}
        return sorted(known - {tag for reply in answers.values() for tag in reply.journals})

    def recorders(self, model: str | None = None) -> list[WorkerEntry]:
        """Return the data proxies that record sessions and serve, each once."""
        models = self._table.snapshot.models.values()
        found = {
            worker.addr: worker
            for each in models
            for worker in each.workers
            if worker.state in (READY, CORDONED) and worker.journals and model in (None, each.name)
        }
        return list(found.values())

    async def request(
        self,
        worker: WorkerEntry,
        method: str,
        path: str,
        headers: Mapping[str, str],
        timeout_s: float,
        body: bytes | None = None,
    ) -> WorkerReply | None:
        """Return the data proxy's answer, or None if it does not answer."""
        try:
            reply = await self._http.fetch(
                method, worker.addr, path, headers=headers, body=body or b"", timeout_s=timeout_s
            )
        except (CallFailed, TimeoutError):
            return None
        return WorkerReply(reply.status, reply.headers, reply.body, tuple(worker.journals))


# The human in the loop has no session key: each journal has a session for them, and a reward applies to the session
# where they wrote last.

_CALL_S = 5.0
_PATIENCE_S = 30.0
_LATER_S = 0.5


@dataclass(eq=False)
class HitlSessions:
    _table: LiveTable
    _journals: JournalClient

    async def session(self, model: str | None, headers: Mapping[str, str]) -> str:
        """Return the id of the human's latest session. Waits for absent journals, which may hold it. Raises 503."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _PATIENCE_S
        while True:
            replies = await self._journals.each("/rl/human", headers, _CALL_S, model)
            answers = {addr: reply for addr, reply in replies.items() if reply.status == 200}
            listed = [reply.object() for reply in answers.values()]
            held = {tag for each in listed for tag in each["journals"]}
            away = {*self._journals.away(answers, model), *(tag for each in listed for tag in each["elsewhere"])} - held
            if listed and not away:
                latest = max(listed, key=lambda each: (each["spoke_at"] or 0.0, each["session_id"]))
                return str(latest["session_id"])
            if loop.time() >= deadline:
                message = (
                    "not all data proxies have reported the human's newest call: name the session or the interaction"
                )
                raise ApiError(503, message, code="session_away", headers={"Retry-After": "5"})
            await self._table.changed(_LATER_S)


_BODY_BYTES = 1024 * 1024
_LOOK_AGAIN_S = 0.5


async def place_sessions(table: LiveTable, router: RouterClient, body: bytes, model: str, request_id: str) -> HttpReply:
    """Return the router's answer once a data proxy has taken the sessions.

    Retries 503 and 421 (the journal moves), after which nothing was started, and 404 for a model in the table, which a
    restarted router does not know yet. An agent service without an inference service and a model without replicas are
    refused at once.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + table.timeout_s
    while True:
        table.require_replicas(model)
        try:
            reply = await router.send("POST", "/register_session", body, request_id)
            code = reply.error().get("code")
            away = reply.status == 421 or (reply.status == 503 and code != "inference_unavailable")
            forgot = code == "model_not_found" and model in table.snapshot.models
            if not (away or forgot) or loop.time() >= deadline:
                return reply
        except ApiError as error:
            if error.code != ROUTER_AWAY or loop.time() >= deadline:
                raise
        await table.changed(_LOOK_AGAIN_S)


class SessionRoutes:
    def __init__(
        self, table: LiveTable, relay: Relay, router: RouterClient, journals: JournalClient, keys: SessionKeys
    ) -> None:
        self._table = table
        self._relay = relay
        self._router = router
        self._journals = journals
        self._keys = keys
        self._hitl = HitlSessions(table, journals)

    def add_to(self, service: Service) -> None:
        service.route("POST", "/rl/start_session", self.start, Access.ADMIN)
        service.route("POST", "/rl/set_reward", self._session_call("/rl/set_reward"), Access.SESSION)
        service.route("POST", "/rl/end_session", self._session_call("/rl/end_session"), Access.SESSION)
        service.route("GET", "/rl/sessions", self.sessions, Access.ADMIN)
        service.route("GET", "/rl/sessions/{session_id}", self.session, Access.ADMIN)

    async def start(self, request: Request) -> Response:
        data = decode_object(await request.read(_BODY_BYTES))
        name, key = data.get("model"), data.get("api_key")
        if key is None:
            refuse_idempotency_key(request, "give api_key, whose second start is refused")
        if name is not None and not isinstance(name, str):
            raise bad_field("model", "must be a string")
        model = (await self._relay.resolve(name)).name
        body = orjson.dumps({**data, "model": model})
        reply = await place_sessions(self._table, self._router, body, model, request.id)
        if isinstance(key, str):
            self._keys.forget(key.encode("utf-8", "surrogatepass"))
        return to_response(reply)

    def _session_call(self, path: str) -> Any:
        async def handle(request: Request) -> AnyResponse:
            tag = await self._keys.journal_of(request)
            body = await request.read(_BODY_BYTES) or b"{}"
            if tag is None:
                data = await self._with_session(decode_object(body), self._journals.for_admin(request))
                tag, body = _journal_tag(data), orjson.dumps(data)
            return to_response(await self._journals.call(tag, "POST", path, self._journals.for_caller(request), body))

        return handle

    async def _with_session(self, data: dict[str, object], headers: Mapping[str, str]) -> dict[str, object]:
        """Return an admin's body with a session id: by default that of the human in the loop."""
        if data.get("session_id") not in (None, HITL) or data.get("group_id") is not None:
            return data
        interaction, model = data.get("interaction_id"), data.get("model")
        if isinstance(interaction, str) and (tag := tag_of_answer(interaction)) is not None:
            return {**data, "session_id": str(SessionName(HITL, tag, 0))}
        name = (await self._relay.resolve(model)).name if isinstance(model, str) else None
        return {**data, "session_id": await self._hitl.session(name, headers)}

    async def sessions(self, request: Request) -> Response:
        """Return a page of sessions, ordered by journal and number."""
        return await self._journals.page(request, "/rl/sessions", "session_id", _page_order)

    async def session(self, request: Request) -> Response:
        session_id, path = request.match_info["session_id"], request.target
        headers = self._journals.for_admin(request)
        if session_id == HITL:
            session_id = await self._hitl.session(None, headers)
            path = path.replace(HITL, session_id, 1)
        return to_response(await self._journals.call(SessionName.require(session_id).tag, "GET", path, headers))


def _page_order(session: Mapping[str, object]) -> tuple[str, int]:
    name = SessionName.parse(session["session_id"])
    return (name.tag, name.number) if name is not None else ("", 0)


def _journal_tag(data: Mapping[str, object]) -> str:
    """Return the journal of the session or group in an admin's body. Raises 400, 404."""
    session_id, group_id = data.get("session_id"), data.get("group_id")
    if session_id is not None:
        if not isinstance(session_id, str):
            raise bad_field("session_id", "must be a string")
        return SessionName.require(session_id).tag
    return GroupName.require(group_id).tag


@dataclass(frozen=True)
class GatewayParts:
    """The parts shared by the gateways of inference and of agents."""

    service: Service
    table: LiveTable
    follower: Follower
    router: RouterClient
    admission: Admission
    keys: SessionKeys
    journals: JournalClient


def gateway_parts(
    config: FollowerConfig, options: ServeOptions, http: HttpClient, queued: str, **details: object
) -> GatewayParts:
    """Build the shared parts of a gateway. ``queued``: the help text of the metric of waiting calls. The service
    follows the router while it runs."""
    table, headers = LiveTable(config.limits), options.headers
    follower = Follower(table, http, config.router_url, headers)
    service = Service(
        "gateway",
        key=options.key,
        loopback=options.loopback,
        not_ready=lambda: None if table.whole else "the router has not published its whole routing table yet",
        details=lambda: {"router_connected": follower.connected, "table": table.summary(), **details},
    )
    service.add_lifespan(lambda: background("router-watch", follower.run))
    router = RouterClient(http, config.router_url, headers)
    admission = Admission(table, service.metrics.gauge("areal_gateway_queued", queued))
    keys = SessionKeys(table, follower, router, options.key)
    journals = JournalClient(http, table, admission, keys, headers)
    return GatewayParts(service, table, follower, router, admission, keys, journals)
