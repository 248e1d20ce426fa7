"""Assembles a data proxy process: its journals, its registration with the router, its routes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

from areal.errors import UsageFault
from areal.http.client import ENGINE_IDLE_S, HttpClient
from areal.resources.addresses import UrlError
from areal.services.http.auth import Access
from areal.services.http.lease import RouterLease
from areal.services.http.messages import Request, Response
from areal.services.http.process import ServeOptions
from areal.services.http.service import Handler, Service, json_response
from areal.services.http.tasks import background
from areal.services.inference.data_proxy.control import EngineControl, WeightTracker, refuse_controls
from areal.services.inference.data_proxy.engine_watch import EngineWatch, PauseState
from areal.services.inference.data_proxy.external_models import ExternalModels, ExternalRegistration, open_external
from areal.services.inference.data_proxy.generation import Generator
from areal.services.inference.data_proxy.model_calls import ModelCalls, TokenMetrics, adapter_of
from areal.services.inference.data_proxy.openai import load_parsers
from areal.services.inference.data_proxy.session_routes import JournalSessionRoutes, TrajectoryRoutes
from areal.services.inference.data_proxy.sessions import CallerResolver, CallRecorders
from areal.services.inference.data_proxy.tokenizer import load_codec
from areal.services.inference.data_proxy.weights import WeightRoutes, WeightSync
from areal.services.inference.engines import open_engine
from areal.services.inference.engines.base import TokenEngine
from areal.services.inference.recorder.journal import open_journal
from areal.services.inference.recorder.session import TrajectoryPhase
from areal.services.inference.recorder.storage import REGISTRATIONS
from areal.services.inference.recorder.store import TrajectoryStore
from areal.services.journal.store import RUN_UID, JournalRoutes, serve_journals, store_details
from areal.wire.processes import DataProxyConfig
from areal.wire.stage import report_stage

_log = logging.getLogger(__name__)


_EXTERNAL_PERIOD_S = 5.0
_SCRAPED = ("embedded", "vllm")  # engines that serve /metrics without a flag

Build = Callable[[ServeOptions, TrajectoryStore | None], AbstractAsyncContextManager[Service]]


def data_proxy(config: DataProxyConfig, options: ServeOptions) -> AbstractAsyncContextManager[Service]:
    """Return the service of a data proxy, to be entered. Raises UsageFault at once for flags that conflict."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    build = _external(config) if config.engine == "external" else _token_engine(config)

    @contextlib.asynccontextmanager
    async def wired() -> AsyncIterator[Service]:
        journals: AbstractAsyncContextManager[TrajectoryStore | None] = contextlib.nullcontext()
        if config.state_dir is not None:
            open_own = partial(open_journal, retention=config)
            journals = serve_journals(config.state_dir, open_own, config.adopt_after)
        async with journals as store, build(options, store) as service, HttpClient() as http:
            if config.registration is not None:
                headers = options.headers
                lease = RouterLease(config.registration, service, http, headers, config.model)
                service.add_lifespan(lambda: background("registration", lease.run))
            yield service

    return wired()


def _token_engine(config: DataProxyConfig) -> Build:
    if config.tokenizer_path is None:
        raise UsageFault(f"--engine {config.engine} needs --tokenizer-path")
    report_stage("reading the tokenizer")
    codec = load_codec(config.tokenizer_path, config.chat_template)
    template = codec.tool_chat.template if codec.tool_chat is not None else None
    parsers = load_parsers(config.tool_call_parser, config.reasoning_parser, template.source if template else None)
    if parsers.tools is None and config.tool_call_parser is None and template and template.uses("tools"):
        _log.warning("the chat template has tools in no known format: calls stay in the content (spec.toolCallParser)")

    @contextlib.asynccontextmanager
    async def build(options: ServeOptions, store: TrajectoryStore | None) -> AsyncIterator[Service]:
        headers, http = options.headers, HttpClient(idle_s=ENGINE_IDLE_S, on_lost=lambda: watch.suspect())
        engine_headers = headers
        if config.attached:
            engine_key = _provider_key(config.engine_key_file, "AREAL_ENGINE_API_KEY")
            engine_headers = {"Authorization": f"Bearer {engine_key}"} if engine_key else {}

        def engine_at(url: str) -> TokenEngine:
            client = open_engine(config.engine, http, url, engine_headers)
            client.capabilities.vocab_size = codec.vocab_size
            return client

        engine = engine_at(config.engine_url)
        pause = PauseState()
        generator = Generator(engine, pause)
        watch = EngineWatch(
            engine.state, pause=pause, on_progress=generator.activity.mark, busy=lambda: calls.tokens_in_flight > 0
        )

        def details() -> dict[str, object]:
            return {
                "in_flight_tokens": calls.tokens_in_flight,
                "max_model_len": calls.max_model_len,
                "root": config.model_path or watch.state.root,  # SGLang's moves to the folder of an update
                "engine_url": control.engine_url if config.engine in _SCRAPED else None,
                "adapters": list(watch.state.adapters),
                "paused": pause.active,
                "models": models.names,
                "awaits_version": tracker.behind.version if control.engine_is_available and tracker.behind else None,
                "weights": tracker.about(),
                "weights_not_kept": tracker.not_kept or None,
                "weights_lack_room": tracker.lacks_room,
                **(store_details(store) if store is not None else {}),
            }

        tracker = WeightTracker(watch, store.root if store is not None else None, config.model_path)
        service = _service(config, options, watch, lambda: control.not_ready, details)

        def engine_changed() -> None:
            service.lifetime.news.set()
            tracker.failed.set()  # the weights' loader looks at once

        watch.on_change = engine_changed
        pause.on_change = tracker.on_change = service.lifetime.news.set
        control = EngineControl(config, engine, engine_at, watch, pause, lambda: service.lifetime.in_flight, tracker)
        control.on_change = service.lifetime.news.set
        held = service.metrics.gauge("areal_tokens_in_flight", "Prompt and longest answer of the calls being answered.")
        held.set_function(lambda: calls.tokens_in_flight)
        paused = service.metrics.gauge("areal_paused", "1 while generation is held still.")
        paused.set_function(lambda: float(pause.active))
        recorders = CallRecorders(store, options.key, engine.capabilities)
        calls = ModelCalls(
            config, codec, parsers, generator, engine.capabilities, recorders, TokenMetrics(service.metrics), control
        )
        control.add_to(service)
        service.add_lifespan(lambda: background("engine-control", control.run))
        weight_routes = WeightRoutes(engine, control, tracker, http)
        weight_routes.add_to(service)
        service.add_lifespan(lambda: background("abandoned-updates", weight_routes.run))
        weight_sync = WeightSync(tracker, engine, control, http, headers, lambda: service.address, config.model)
        service.add_lifespan(lambda: background("published-weights", weight_sync.run))
        handlers, adapters = calls.handlers(), lambda: watch.state.adapters
        models = _add_model_routes(service, config, options, recorders, store, handlers, adapters)
        try:
            yield service
        finally:
            http.close()

    return build


def _external(config: DataProxyConfig) -> Build:
    key = _provider_key(config.provider_key_file, "AREAL_PROVIDER_API_KEY")
    name = config.provider_model or config.model
    wanted = ExternalRegistration(config.model, config.engine_url, name, key, config.provider_api, config.allow_private)
    try:
        _ = wanted.parsed_url
    except UrlError as error:
        raise UsageFault(f"--engine-url {config.engine_url!r} {error}") from error

    @contextlib.asynccontextmanager
    async def build(options: ServeOptions, store: TrajectoryStore | None) -> AsyncIterator[Service]:
        recorders = CallRecorders(store, options.key)
        external = open_external(wanted, recorders, config)
        watch = EngineWatch(external.api.state, period_s=_EXTERNAL_PERIOD_S)

        def details() -> dict[str, object]:
            about = {"root": name, "models": models.names, "calls_refused": external.api.refusal}
            return {**about, **(store_details(store) if store is not None else {})}

        async with external.http:
            service = _service(config, options, watch, lambda: watch.state.not_ready, details)
            watch.on_change = service.lifetime.news.set
            refuse_controls(service)
            models = _add_model_routes(service, config, options, recorders, store, external.handlers)
            yield service

    return build


def _provider_key(key_file: str | None, variable: str) -> str | None:
    """Return the API key of an external server, from the file or else the environment. Raises UsageFault."""
    if key_file is None:
        key, source = os.environ.get(variable, ""), f"${variable}"
    else:
        source = f"the key file {key_file}"
        try:
            key = Path(key_file).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise UsageFault(f"cannot read {source}: {error}") from error
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UsageFault(f"{source} holds more than a key")
    return key or None


def _service(
    config: DataProxyConfig,
    options: ServeOptions,
    watch: EngineWatch,
    not_ready: Callable[[], str | None],
    details: Callable[[], dict[str, object]],
) -> Service:
    def about() -> dict[str, object]:
        state = watch.state
        return {
            "model": config.model,
            "engine": config.engine,
            "version": state.version,
            "fault": state.fault,
            "advice": state.advice,
            **details(),
        }

    service = Service("data-proxy", key=options.key, loopback=options.loopback, not_ready=not_ready, details=about)
    service.add_lifespan(lambda: background("engine-watch", watch.run))
    version = service.metrics.gauge("areal_weight_version", "Version of the weights that sample now; -1: none is set.")
    version.set_function(lambda: -1 if watch.state.version is None else watch.state.version)
    return service


def _add_model_routes(
    service: Service,
    config: DataProxyConfig,
    options: ServeOptions,
    recorders: CallRecorders,
    store: TrajectoryStore | None,
    handlers: Mapping[str, Handler],
    adapters: Callable[[], Collection[str]] = tuple,
) -> ExternalModels:
    """Add the model routes, and with a store the session routes. Return the external models."""
    uid = os.environ.get(RUN_UID)
    file = store.root / f"{uid}{REGISTRATIONS}" if store is not None and uid else None
    models = ExternalModels(config, recorders, file)

    def check_name(name: str | None) -> None:
        if name not in models.names:
            adapter_of(name, config.model, adapters())

    if store is not None:
        JournalRoutes(store).add_to(service)
        resolver = CallerResolver(store, options.key)
        sessions = JournalSessionRoutes(store, resolver, options.key, check_name, recorders.seeds)
        sessions.add_to(service)
        TrajectoryRoutes(store, sessions.rewards).add_to(service)
        service.metrics.gauge("areal_trajectories_ready", "Trajectories that wait to be exported.").set_function(
            lambda: sum(journal.count_trajectories(TrajectoryPhase.READY) for journal in store)
        )
    else:
        resolver = None
    # Without a journal there are no session keys.
    access = Access.INFERENCE if store is None else Access.SESSION
    models.add_to(service)
    for path, handler in handlers.items():
        routed = models.route_of(path, handler)
        service.route("POST", path, routed, access)
        service.route("POST", path.removeprefix("/v1"), routed, access)

    async def listed(request: Request) -> Response:
        if resolver is not None:
            resolver.resolve_active(request)
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "areal"} for name in models.names]
        return json_response({"object": "list", "data": data, "models": models.names})

    service.route("GET", "/v1/models", listed, access)
    service.route("GET", "/models", listed, access)
    return models
