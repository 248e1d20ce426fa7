"""One data proxy process, wired together."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from areal.errors import UsageFault
from areal.services.inference.data_proxy.adapters import adapter_of
from areal.services.inference.data_proxy.backend import BackendRoute
from areal.services.inference.data_proxy.callers import Callers
from areal.services.inference.data_proxy.control import EngineControl, refuse_controls
from areal.services.inference.data_proxy.counts import TokenCounts
from areal.services.inference.data_proxy.engine_watch import EngineWatch
from areal.services.inference.data_proxy.export_routes import ExportRoutes
from areal.services.inference.data_proxy.external_models import ExternalModels
from areal.services.inference.data_proxy.generation import Generator
from areal.services.inference.data_proxy.keeping import keeping, keeping_details, registrations_file
from areal.services.inference.data_proxy.keeping_metrics import count_journals
from areal.services.inference.data_proxy.model_calls import ModelCalls, ProxyLimits
from areal.services.inference.data_proxy.options import (
    PROVIDER_KEY_VARIABLE,
    attached_headers,
    external_url,
    others_key,
)
from areal.services.inference.data_proxy.published import CatchingUp, Standing
from areal.services.inference.data_proxy.reading import load_parsers
from areal.services.inference.data_proxy.registration import Registration, RegistrationOptions
from areal.services.inference.data_proxy.session_routes import SessionRoutes
from areal.services.inference.data_proxy.suspension import Suspension
from areal.services.inference.data_proxy.tokenizer import CodecPool, load_codec
from areal.services.inference.data_proxy.visits import Visits
from areal.services.inference.data_proxy.weights import WeightRoutes
from areal.services.inference.engines.clients import open_engine
from areal.services.inference.recording.vault import Vault
from areal.services.web.access import Access
from areal.services.web.client import ENGINE_IDLE_S, HttpClient
from areal.services.web.garbage import collect_rarely
from areal.services.web.keys import AdminKey
from areal.services.web.options import ServeOptions, serve_options
from areal.services.web.serve import run_service, serve
from areal.services.web.server import Request, Response
from areal.services.web.service import Handler, Service, json_response
from areal.services.web.stage import report_stage
from areal.services.web.tasks import background

_EXTERNAL_PERIOD_S = 5.0
_SCRAPED = ("embedded", "vllm")  # engines that answer /metrics without a flag

Build = Callable[[ServeOptions, Vault | None], AbstractAsyncContextManager[Service]]


def run_data_proxy(args: argparse.Namespace) -> None:
    """Serve until told to stop. Raises UsageFault for flags that do not fit together."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    options = serve_options(args)
    build = _external(args) if args.engine == "external" else _token_engine(args)

    registration = RegistrationOptions.of(args)
    headers = options.key.bearer() if options.key else {}

    async def run() -> None:
        async with keeping(args) as vault, build(options, vault) as service, HttpClient() as http:
            if registration is not None:
                keeping_registered = Registration(registration, service, http, headers, args.model)
                service.beside(lambda: background("registration", keeping_registered.run))
            collect_rarely()
            await serve(service, options)

    run_service(run, options.log_level)


def _token_engine(args: argparse.Namespace) -> Build:
    if args.tokenizer_path is None:
        raise UsageFault(f"--engine {args.engine} needs --tokenizer-path")
    report_stage("reading the tokenizer")
    codec = load_codec(args.tokenizer_path, args.chat_template)
    template = codec.template.source if codec.template is not None else None
    parsers = load_parsers(args.tool_call_parser, args.reasoning_parser, template)

    @contextlib.asynccontextmanager
    async def build(options: ServeOptions, vault: Vault | None) -> AsyncIterator[Service]:
        headers, http = options.key.bearer() if options.key else {}, HttpClient(idle_s=ENGINE_IDLE_S)
        engine_headers = attached_headers(args.engine_key_file) if args.attached else headers
        engine = open_engine(args.engine, http, args.engine_url, engine_headers)
        suspension = Suspension()
        generator = Generator(engine, suspension)
        watch = EngineWatch(engine.state, suspension=suspension, on_progress=generator.pulse.beat)

        def context() -> int | None:
            """The least of what we and the engine were told: what the engine would cut short is refused here."""
            told = [length for length in (args.max_model_len, watch.state.max_model_len) if length]
            return min(told, default=codec.max_positions)

        def details() -> dict[str, Any]:
            return {
                "in_flight_tokens": calls.tokens_in_flight,
                "max_model_len": context(),
                "root": watch.state.root,
                "engine_url": backend.url if args.engine in _SCRAPED else None,
                "adapters": list(watch.state.adapters),
                "paused": suspension.active,
                "models": others.names,
                "fault": watch.state.fault,
                "awaits_version": standing.behind.version if control.engine_is_there and standing.behind else None,
                **keeping_details(vault),
            }

        limits = ProxyLimits(args.max_body_bytes, args.request_timeout, context, lambda: watch.state.adapters)
        pool = CodecPool(args.tokenizer_threads)
        standing = Standing(watch, vault.root if vault is not None else None, args.model_path)
        service = _service(args, options, watch, lambda: control.not_ready, details)
        watch.on_change = suspension.on_change = service.lifetime.news.set
        control = EngineControl(engine, watch, suspension, lambda: service.lifetime.in_flight, standing)
        counts = TokenCounts(service.metrics)
        held = service.metrics.gauge("areal_tokens_in_flight", "Prompt and longest answer of the calls being answered.")
        held.set_function(lambda: calls.tokens_in_flight)
        paused = service.metrics.gauge("areal_paused", "1 while generation is held still.")
        paused.set_function(lambda: float(suspension.active))
        visits = Visits(vault, options.key)
        calls = ModelCalls(args.model, codec, pool, generator, engine.capabilities, limits, counts, parsers, visits)
        control.add_to(service)
        WeightRoutes(engine, control, standing, http).add_to(service)
        catching_up = CatchingUp(standing, engine, control, http, headers, lambda: service.address, args.model)
        service.beside(lambda: background("published-weights", catching_up.run))
        backend = BackendRoute(args.engine, engine, control, http, engine_headers, args.engine_url)
        backend.add_to(service)
        others = _external_models(args, visits, vault)
        handlers = {
            "/v1/chat/completions": calls.chat,
            "/v1/completions": calls.completion,
            "/v1/responses": calls.responses,
            "/v1/messages": calls.messages,
            "/v1/messages/count_tokens": calls.count_tokens,
        }
        admitted = {path: control.admitting(each) for path, each in handlers.items()}
        _add_routes(service, others, admitted, vault, options.key, lambda: watch.state.adapters)
        try:
            yield service
        finally:
            http.close()

    return build


def _external(args: argparse.Namespace) -> Build:
    from areal.services.inference.data_proxy.external_calls import ExternalCalls
    from areal.services.inference.data_proxy.external_handlers import external_handlers
    from areal.services.inference.engines.clients.external import ExternalApi
    from areal.services.inference.engines.clients.outside import open_outside

    url = external_url(args.engine_url, allow_private=args.allow_private)
    key = others_key(args.provider_key_file, PROVIDER_KEY_VARIABLE)
    name, dialect = args.provider_model or args.model, args.provider_api

    @contextlib.asynccontextmanager
    async def build(options: ServeOptions, vault: Vault | None) -> AsyncIterator[Service]:
        async with open_outside(url, allow_private=args.allow_private) as http:
            yield build_on(ExternalApi(http, url, name, key, dialect), options, vault)

    def build_on(api: ExternalApi, options: ServeOptions, vault: Vault | None) -> Service:
        watch = EngineWatch(api.state, period_s=_EXTERNAL_PERIOD_S)
        visits = Visits(vault, options.key)
        others = _external_models(args, visits, vault)

        def about() -> dict[str, Any]:
            return {"root": name, "models": others.names, **keeping_details(vault)}

        service = _service(args, options, watch, lambda: watch.state.not_ready, about)
        refuse_controls(service, "an external model is not ours to pause, to resize or to version")
        calls = ExternalCalls(args.model, api, visits, max_body_bytes=args.max_body_bytes, idle_s=args.request_timeout)
        _add_routes(service, others, external_handlers(calls, dialect), vault, options.key)
        return service

    return build


def _service(
    args: argparse.Namespace,
    options: ServeOptions,
    watch: EngineWatch,
    not_ready: Callable[[], str | None],
    details: Callable[[], dict[str, Any]],
) -> Service:
    def about() -> dict[str, Any]:
        state = watch.state
        return {"model": args.model, "engine": args.engine, "version": state.version, "fault": state.fault, **details()}

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


def _external_models(args: argparse.Namespace, visits: Visits, vault: Vault | None) -> ExternalModels:
    return ExternalModels(
        args.model,
        visits,
        max_body_bytes=args.max_body_bytes,
        idle_s=args.request_timeout,
        file=registrations_file(vault),
    )


def _add_routes(
    service: Service,
    models: ExternalModels,
    handlers: Mapping[str, Handler],
    vault: Vault | None,
    key: AdminKey | None,
    adapters: Callable[[], Collection[str]] = tuple,
) -> None:
    def check_name(name: str | None) -> None:
        if name not in models.names:
            adapter_of(name, models.own, adapters())

    if vault is not None:
        SessionRoutes(vault, Callers(vault, key), key, check_name).add_to(service)
        ExportRoutes(vault).add_to(service)
        count_journals(service.metrics, vault)
    # Who may call a model: without a journal there are no session keys.
    access = Access.CALLER if vault is None else Access.SESSION
    models.add_to(service)
    for path, handler in handlers.items():
        routed = models.beside(path, handler)
        service.route("POST", path, routed, access)
        service.route("POST", path.removeprefix("/v1"), routed, access)

    async def listed(request: Request) -> Response:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "areal"} for name in models.names]
        return json_response({"object": "list", "data": data, "models": models.names})

    service.route("GET", "/v1/models", listed, Access.CALLER)
    service.route("GET", "/models", listed, Access.CALLER)
