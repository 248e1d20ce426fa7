"""What every data proxy serves, whatever engine is behind it."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from areal.services.inference.data_proxy.callers import Callers
from areal.services.inference.data_proxy.engine_watch import EngineWatch
from areal.services.inference.data_proxy.export_routes import ExportRoutes
from areal.services.inference.data_proxy.keeping_metrics import count_journals
from areal.services.inference.data_proxy.session_routes import SessionRoutes
from areal.services.inference.recording.vault import Vault
from areal.services.web.access import Access
from areal.services.web.keys import AdminKey
from areal.services.web.options import ServeOptions
from areal.services.web.server import Request, Response
from areal.services.web.service import Handler, Service, json_response
from areal.services.web.tasks import background

Build = Callable[[ServeOptions, Vault | None], AbstractAsyncContextManager[Service]]


def open_service(
    args: argparse.Namespace,
    options: ServeOptions,
    watch: EngineWatch,
    not_ready: Callable[[], str | None],
    details: Callable[[], dict[str, Any]],
) -> Service:
    def about() -> dict[str, Any]:
        return {"model": args.model, "engine": args.engine, "version": watch.state.version, **details()}

    service = Service(
        "data-proxy",
        key=options.key,
        loopback=options.loopback,
        not_ready=not_ready,
        details=about,
    )

    @contextlib.asynccontextmanager
    async def watching() -> AsyncIterator[None]:
        async with background("engine-watch", watch.run):
            yield

    service.beside(watching)
    version = service.metrics.gauge("areal_weight_version", "Version of the weights that sample now; -1: none is set.")
    version.set_function(lambda: -1 if watch.state.version is None else watch.state.version)
    return service


def model_access(vault: Vault | None) -> Access:
    """Who may call a model: without a journal there are no session keys."""
    return Access.CALLER if vault is None else Access.SESSION


def add_session_routes(service: Service, model: str, vault: Vault | None, key: AdminKey | None) -> None:
    if vault is not None:
        SessionRoutes(vault, Callers(vault, key), key, model).add_to(service)
        ExportRoutes(vault).add_to(service)
        count_journals(service.metrics, vault)


def add_model_routes(service: Service, model: str, handlers: Mapping[str, Handler], access: Access) -> None:
    async def models(request: Request) -> Response:
        entry = {"id": model, "object": "model", "created": 0, "owned_by": "areal"}
        return json_response({"object": "list", "data": [entry], "models": [model]})

    for path, handler in handlers.items():
        service.route("POST", path, handler, access)
    service.route("POST", "/chat/completions", handlers["/v1/chat/completions"], access)
    service.route("GET", "/v1/models", models, Access.CALLER)
