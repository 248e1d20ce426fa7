"""The gateway's routes: model calls are relayed, models listed from the table, admin routes passed to the router."""

from __future__ import annotations

import orjson

from areal.services.inference.gateway.live_table import LiveTable
from areal.services.inference.gateway.relay import Relay
from areal.services.inference.gateway.router_client import RouterClient
from areal.services.inference.gateway.session_keys import SessionKeys
from areal.services.inference.router.scrape_targets import TARGET, target
from areal.services.inference.router.table import ModelEntry
from areal.services.web.access import Access, presented_key
from areal.services.web.errors import ApiError
from areal.services.web.server import AnyResponse, Request, Response
from areal.services.web.service import Handler, Service, json_response

MODEL_CALLS = ("/chat/completions", "/completions", "/responses", "/messages", "/messages/count_tokens")
PREFIXES = ("/v1", "")  # clients differ in what they take for the base URL


class GatewayRoutes:
    def __init__(self, table: LiveTable, relay: Relay, router: RouterClient, keys: SessionKeys) -> None:
        self._keys = keys
        self._table = table
        self._relay = relay
        self._router = router

    def add_to(self, service: Service) -> None:
        self._service = service
        for prefix in PREFIXES:
            for path in MODEL_CALLS:
                service.route("POST", f"{prefix}{path}", self._model_call(f"/v1{path}"), Access.SESSION)
            service.route("GET", f"{prefix}/models", self.models, Access.SESSION)
            service.route("GET", f"{prefix}/models/{{name...}}", self.model, Access.SESSION)
        service.route("GET", "/workers", self._router.passes("GET", "/workers"), Access.ADMIN)
        service.route("GET", "/http_sd", self.scrape_targets, Access.METRICS)
        service.route("POST", "/http_sd", self._router.passes("POST", "/http_sd"), Access.ADMIN)
        for verb in ("drain", "undrain"):
            service.route("POST", f"/{verb}/{{worker_id}}", self._router.for_workers(f"/{verb}"), Access.ADMIN)

    def _model_call(self, path: str) -> Handler:
        async def handle(request: Request) -> AnyResponse:
            journal = None if request.by_admin else await self._keys.journal_of(request.headers)
            answer = await self._relay.forward(request, path, journal)
            if answer.status == 401 and journal is not None:
                self._keys.forget(presented_key(request.headers))  # its session is elsewhere by now, or nowhere
            return answer

        return handle

    async def models(self, request: Request) -> Response:
        await self._keys.journal_of(request.headers)
        self._table.require_whole()
        models = self._table.published()
        data = [entry for model in models for entry in _openai_models(model)]
        return json_response({"object": "list", "data": data, "models": [entry["id"] for entry in data]})

    async def model(self, request: Request) -> Response:
        await self._keys.journal_of(request.headers)
        name = request.match_info["name"]
        for model in self._table.published():
            for entry in _openai_models(model):
                if entry["id"] == name:
                    return json_response(entry)
        self._table.require_whole()
        raise ApiError(404, f"the model {name!r} does not exist", code="model_not_found", param="model")

    async def scrape_targets(self, request: Request) -> Response:
        """The router's list for Prometheus, and ourselves at the address that was asked."""
        status, body = await self._router.send("GET", "/http_sd", b"", request.id)
        if status != 200:
            return Response(status, body, content_type="application/json")
        asked = request.headers.get("Host", "")
        url = f"//{asked}" if TARGET.fullmatch(asked) else self._service.address
        return json_response([*([target(url, "gateway")] if url else []), *orjson.loads(body)])


def _openai_models(model: ModelEntry) -> list[dict[str, object]]:
    """The model and its adapters: OpenAI's fields, and vLLM's where the workers told them."""
    entry: dict[str, object] = {"id": model.name, "object": "model", "created": model.created, "owned_by": "areal"}
    told = {"root": model.root, "max_model_len": model.max_model_len}
    entry |= {name: value for name, value in told.items() if value is not None}
    adapters = [{**entry, "id": f"{model.name}:{adapter}", "parent": model.name} for adapter in model.adapters]
    return [entry, *adapters]


def not_ready(table: LiveTable) -> str | None:
    """A relay is ready once it has a whole table, and stays so while the router is away."""
    return None if table.whole else "the router has not told all of its routing table yet"
