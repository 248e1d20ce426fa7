"""The gateway's routes: model calls are relayed, models listed from the table, admin routes passed to the router."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
from aiohttp import web

from areal.services.inference.gateway.live_table import LiveTable
from areal.services.inference.gateway.relay import Relay
from areal.services.web.access import Access
from areal.services.web.body import read_body
from areal.services.web.errors import ApiError
from areal.services.web.service import Handler, Service, json_response

_ADMIN_BODY_BYTES = 1024 * 1024

MODEL_CALLS = {
    "/v1/chat/completions": "/v1/chat/completions",
    "/chat/completions": "/v1/chat/completions",
    "/v1/completions": "/v1/completions",
}


class GatewayRoutes:
    def __init__(self, table: LiveTable, relay: Relay, router: RouterProxy) -> None:
        self._table = table
        self._relay = relay
        self._router = router

    def add_to(self, service: Service) -> None:
        for public, inner in MODEL_CALLS.items():
            service.route("POST", public, self._model_call(inner), Access.CALLER)
        for path in ("/v1/models", "/models"):
            service.route("GET", path, self.models, Access.CALLER)
        service.route("GET", "/v1/models/{name:.+}", self.model, Access.CALLER)
        service.route("GET", "/workers", self._router.passes("GET", "/workers"), Access.ADMIN)
        for verb in ("drain", "undrain"):
            service.route("POST", f"/{verb}/{{worker_id}}", self._router.for_workers(f"/{verb}"), Access.ADMIN)

    def _model_call(self, path: str) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._relay.forward(request, path)

        return handle

    async def models(self, request: web.Request) -> web.Response:
        models = self._table.published()
        data = [_openai_model(model.name, model.created) for model in models]
        return json_response({"object": "list", "data": data, "models": [model.name for model in models]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        for model in self._table.published():
            if model.name == name:
                return json_response(_openai_model(name, model.created))
        raise ApiError(404, f"the model {name!r} does not exist", code="model_not_found", param="model")


def _openai_model(name: str, created: int) -> dict[str, object]:
    return {"id": name, "object": "model", "created": created, "owned_by": "areal"}


class RouterProxy:
    """Admin routes that the router answers. The caller's admin key is ours already; the router gets it from us."""

    def __init__(self, http: aiohttp.ClientSession, router_url: str, headers: Mapping[str, str]) -> None:
        self._http = http
        self._url = router_url.rstrip("/")
        self._headers = dict(headers)

    def passes(self, method: str, path: str) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await read_body(request, _ADMIN_BODY_BYTES)
            return await self._ask(method, path, data=body or None)

        return handle

    def for_workers(self, path: str) -> Handler:
        """POST ``path`` for the worker in the request's path; ``all`` for every one."""

        async def handle(request: web.Request) -> web.StreamResponse:
            worker_id = request.match_info["worker_id"]
            return await self._ask("POST", path, json={"worker_id": worker_id})

        return handle

    async def _ask(self, method: str, path: str, **content: object) -> web.Response:
        timeout = aiohttp.ClientTimeout(total=10.0)
        try:
            async with self._http.request(
                method,
                self._url + path,
                headers=self._headers,
                timeout=timeout,
                **content,  # type: ignore[arg-type]
            ) as response:
                body = await response.read()
                return web.Response(status=response.status, body=body, content_type="application/json")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(502, f"the router does not answer: {error!r}", code="router_unavailable") from error


def not_ready(table: LiveTable) -> str | None:
    """A relay is ready once it has a table, and stays so while the router is away."""
    return None if table.received.is_set() else "no routing table from the router yet"
