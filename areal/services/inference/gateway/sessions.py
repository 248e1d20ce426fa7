"""``/rl/*`` at the gateway: sessions are started where the router says, and spoken to where they are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson

from areal.services.inference.gateway.human import Human
from areal.services.inference.gateway.journal_client import JournalClient, Said
from areal.services.inference.gateway.live_table import LiveTable
from areal.services.inference.gateway.relay import Relay
from areal.services.inference.gateway.router_client import ROUTER_AWAY, RouterClient
from areal.services.inference.gateway.session_keys import SessionKeys
from areal.services.inference.recording.names import HITL, GroupName, SessionName, tag_of_answer
from areal.services.web.access import Access
from areal.services.web.body import decode_object, read_body
from areal.services.web.errors import ApiError, bad_request
from areal.services.web.server import AnyResponse, Request, Response
from areal.services.web.service import Service, json_response

_BODY_BYTES = 1024 * 1024
_LOOK_AGAIN_S = 0.5


class SessionRoutes:
    def __init__(
        self, table: LiveTable, relay: Relay, router: RouterClient, journals: JournalClient, keys: SessionKeys
    ) -> None:
        self._table = table
        self._relay = relay
        self._router = router
        self._journals = journals
        self._keys = keys
        self._human = Human(table, journals)

    def add_to(self, service: Service) -> None:
        service.route("POST", "/rl/start_session", self.start, Access.ADMIN)
        service.route("POST", "/rl/set_reward", self._of_a_session("/rl/set_reward"), Access.SESSION)
        service.route("POST", "/rl/end_session", self._of_a_session("/rl/end_session"), Access.SESSION)
        service.route("GET", "/rl/sessions", self.sessions, Access.ADMIN)
        service.route("GET", "/rl/sessions/{session_id}", self.session, Access.ADMIN)

    async def start(self, request: Request) -> Response:
        data = decode_object(await read_body(request, _BODY_BYTES))
        name, key = data.get("model"), data.get("api_key")
        if name is not None and not isinstance(name, str):
            raise bad_request("model must be a string", param="model")
        model = (await self._relay.resolve(name)).name
        status, answer = await self._started(orjson.dumps({**data, "model": model}), model, request.id)
        if isinstance(key, str):
            self._keys.forget(key.encode("utf-8", "surrogatepass"))
        return Response(status, answer, content_type="application/json")

    async def _started(self, body: bytes, model: str, request_id: str) -> tuple[int, bytes]:
        """The router's answer, as soon as there is a data proxy to take the sessions: 503 says that nothing began, and
        404 of a model that we know that the router has yet to hear of it again."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._table.limits.request_timeout_seconds
        while True:
            try:
                said = await self._router.send("POST", "/register_session", body, request_id)
                forgot = b'"model_not_found"' in said[1] and model in self._table.snapshot.models
                away = said[0] == 503 or (said[0] == 404 and forgot)
                if not away or loop.time() >= deadline:
                    return said
            except ApiError as error:
                if error.code != ROUTER_AWAY or loop.time() >= deadline:
                    raise
            await self._table.changed(_LOOK_AGAIN_S)

    def _of_a_session(self, path: str) -> Any:
        async def handle(request: Request) -> AnyResponse:
            tag = await self._keys.journal_of(request.headers)
            body = await read_body(request, _BODY_BYTES) or b"{}"
            if tag is None:
                data = await self._named(decode_object(body), self._journals.for_admin(request))
                tag, body = _tag_of(data), orjson.dumps(data)
            return passed_on(await self._journals.ask(tag, "POST", path, self._journals.for_caller(request), body))

        return handle

    async def _named(self, data: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """What an admin says, with the session that is meant: where none is named, the human in the loop's."""
        if data.get("session_id") not in (None, HITL) or data.get("group_id") is not None:
            return data
        interaction, model = data.get("interaction_id"), data.get("model")
        if isinstance(interaction, str) and (tag := tag_of_answer(interaction)) is not None:
            return {**data, "session_id": str(SessionName(HITL, tag, 0))}
        return {**data, "session_id": await self._human.session(model if isinstance(model, str) else None, headers)}

    async def sessions(self, request: Request) -> Response:
        """One page over all data proxies, in the order of journals and numbers. ``journals_away``: those of which
        nobody serves the sessions just now."""
        limit = read_limit(request.query.get("limit"), default=100, most=1000)
        answers = await self._journals.each(f"/rl/sessions?{request.query_string}", self._journals.for_admin(request))
        found: list[dict[str, Any]] = []
        more = False
        for said in answers.values():
            if said.status != 200:
                return passed_on(said)
            page = orjson.loads(said.body)
            found += page["sessions"]
            more = more or page["next"] is not None
        found.sort(key=_place)
        more = more or len(found) > limit
        found = found[:limit]
        following = found[-1]["session_id"] if more and found else None
        away = self._journals.away(answers)
        return json_response({"sessions": found, "next": following, "journals_away": away})

    async def session(self, request: Request) -> Response:
        session_id = request.match_info["session_id"]
        headers = self._journals.for_admin(request)
        if session_id == HITL:
            session_id = await self._human.session(None, headers)
            path = request.target.replace(HITL, session_id, 1)
            return passed_on(await self._journals.ask(tag_of_session(session_id), "GET", path, headers))
        return passed_on(await self._journals.ask(tag_of_session(session_id), "GET", request.target, headers))


def _place(session: Mapping[str, Any]) -> tuple[str, int]:
    name = SessionName.parse(session["session_id"])
    return (name.tag, name.number) if name is not None else ("", 0)


def _tag_of(data: Mapping[str, Any]) -> str:
    """The journal of what an admin names. Raises 400, 404."""
    session_id, group_id = data.get("session_id"), data.get("group_id")
    if session_id is not None:
        if not isinstance(session_id, str):
            raise bad_request("session_id must be a string", param="session_id")
        return tag_of_session(session_id)
    group = GroupName.parse(group_id) if isinstance(group_id, str) else None
    if group is None:
        raise ApiError(404, f"no group {group_id!r}", code="group_not_found", param="group_id")
    return group.tag


def read_limit(text: str | None, *, default: int, most: int) -> int:
    """Raises 400."""
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= most:
        raise bad_request(f"limit must be a whole number from 1 to {most}", param="limit")
    return int(text)


def tag_of_session(session_id: str) -> str:
    """Raises 404."""
    name = SessionName.parse(session_id)
    if name is None:
        raise ApiError(404, f"no session {session_id!r}", code="session_not_found", param="session_id")
    return name.tag


def passed_on(said: Said) -> Response:
    again = {"Retry-After": said.headers["Retry-After"]} if "Retry-After" in said.headers else {}
    return Response(said.status, said.body, headers={"Content-Type": said.content_type, **again})
