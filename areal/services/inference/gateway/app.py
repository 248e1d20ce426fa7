"""The gateway's routes and its relay process: model calls are relayed, models listed from the table, admin routes
passed to the router.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import orjson

from areal.services.http.auth import Access, presented_key
from areal.services.http.client import HttpClient
from areal.services.http.errors import ApiError
from areal.services.http.messages import AnyResponse, Request, Response
from areal.services.http.process import ServeOptions
from areal.services.http.service import Handler, Service, json_response
from areal.services.http.tasks import background
from areal.services.inference.gateway.control import Registration, WorkerControl
from areal.services.inference.gateway.exports import ExportRoutes
from areal.services.inference.gateway.relay import Admission, Relay, RelayMetrics
from areal.services.inference.gateway.routing import Follower, LiveTable, RouterClient
from areal.services.inference.gateway.sessions import JournalClient, SessionKeys, SessionRoutes
from areal.services.inference.router.app import target
from areal.wire.bodies import is_target
from areal.wire.processes import GatewayConfig
from areal.wire.routing import GatewayLimits, ModelEntry

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
        url = f"//{asked}" if is_target(asked) else self._service.address
        return json_response([*([target(url, "gateway")] if url else []), *orjson.loads(body)])


def _openai_models(model: ModelEntry) -> list[dict[str, object]]:
    """The model and its adapters: OpenAI's fields, and vLLM's where the workers told them."""
    entry: dict[str, object] = {"id": model.name, "object": "model", "created": model.created, "owned_by": "areal"}
    told = {"root": model.root, "max_model_len": model.max_model_len}
    entry |= {name: value for name, value in told.items() if value is not None}
    adapters = [{**entry, "id": f"{model.name}:{adapter}", "parent": model.name} for adapter in model.adapters]
    return [entry, *adapters]


@contextlib.asynccontextmanager
async def gateway(config: GatewayConfig, options: ServeOptions) -> AsyncIterator[Service]:
    """One relay process, wired together."""
    async with HttpClient() as http:
        yield build_relay(config.router_url, options, config.limits, http)


def build_relay(router_url: str, options: ServeOptions, limits: GatewayLimits, http: HttpClient) -> Service:
    """The relay's service; its follower starts and stops with the application."""
    table = LiveTable(limits)
    headers = options.headers
    follower = Follower(table, http, router_url, headers)
    service = Service(
        "gateway",
        key=options.key,
        loopback=options.loopback,
        not_ready=lambda: None if table.whole else "the router has not told all of its routing table yet",
        details=lambda: {"router_connected": follower.connected, "table": table.summary()},
    )
    metrics = RelayMetrics(service.metrics)
    admission = Admission(table, metrics.queued)
    relay = Relay(table, follower, admission, http, metrics)
    router = RouterClient(http, router_url, headers)
    keys = SessionKeys(table, follower, router, options.key)
    journals = JournalClient(http, table, admission, keys, headers)
    GatewayRoutes(table, relay, router, keys).add_to(service)
    SessionRoutes(table, relay, router, journals, keys).add_to(service)
    ExportRoutes(journals).add_to(service)
    WorkerControl(http, router, headers).add_to(service)
    Registration(http, router, headers).add_to(service)

    service.add_lifespan(lambda: background("router-watch", follower.run))
    return service
