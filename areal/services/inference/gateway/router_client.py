"""What the gateway asks of the router beside following its table: small calls, each with a deadline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from areal.services.web import headers as names
from areal.services.web.body import read_body
from areal.services.web.client import CallFailed, HttpClient, NotConnected
from areal.services.web.errors import ApiError
from areal.services.web.server import AnyResponse, Request, Response
from areal.services.web.service import Handler

ROUTER_AWAY = "router_away"  # it has not seen the call
_ADMIN_BODY_BYTES = 1024 * 1024
_TIMEOUT_S = 35.0  # the router itself asks workers within 30


class RouterClient:
    """Admin routes that the router answers. The caller's admin key is ours already; the router gets it from us."""

    def __init__(self, http: HttpClient, router_url: str, headers: Mapping[str, str]) -> None:
        self._http = http
        self._url = router_url.rstrip("/")
        self._headers = dict(headers)

    def passes(self, method: str, path: str) -> Handler:
        async def handle(request: Request) -> AnyResponse:
            return await self._pass(request, method, path, await read_body(request, _ADMIN_BODY_BYTES))

        return handle

    def for_workers(self, path: str) -> Handler:
        """POST ``path`` for the worker in the request's path; ``all`` for every one."""

        async def handle(request: Request) -> AnyResponse:
            return await self._pass(request, "POST", path, orjson.dumps({"worker_id": request.match_info["worker_id"]}))

        return handle

    async def get(self, path: str) -> dict[str, Any]:
        """The router's answer. Raises ApiError with the router's own refusal, or 502 where there is none."""
        return _read(*await self._ask("GET", path, b""))

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return _read(*await self._ask("POST", path, orjson.dumps(body)))

    async def send(self, method: str, path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        """The router's answer as it is: status and body. Raises ApiError where there is none: 503 when it was not
        reached, 502 when it may have acted."""
        return await self._ask(method, path, body, request_id)

    async def _pass(self, request: Request, method: str, path: str, body: bytes) -> Response:
        status, answer = await self._ask(method, path, body, request.id)
        return Response(status, answer, content_type="application/json")

    async def _ask(self, method: str, path: str, body: bytes, request_id: str | None = None) -> tuple[int, bytes]:
        named = {names.REQUEST_ID: request_id} if request_id is not None else {}
        headers = {**self._headers, "Content-Type": "application/json", **named}
        try:
            said = await self._http.fetch(method, self._url, path, headers=headers, body=body, timeout_s=_TIMEOUT_S)
        except NotConnected as error:
            again = {"Retry-After": "1"}
            raise ApiError(503, f"the router is away: {error!r}", code=ROUTER_AWAY, headers=again) from error
        except (CallFailed, TimeoutError) as error:
            raise ApiError(502, f"the router does not answer: {error!r}", code="router_unavailable") from error
        return said.status, said.body


def _read(status: int, body: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(502, "the router answered no JSON", code="router_unavailable") from error
    if status == 200:
        return dict(data)
    refusal = data.get("error") or {}
    raise ApiError(status, str(refusal.get("message")), code=refusal.get("code"), param=refusal.get("param"))
