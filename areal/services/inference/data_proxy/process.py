"""One data proxy process: its journals, its registration at the router, its routes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson

from areal.errors import UsageFault
from areal.resources.addresses import UrlError
from areal.services.http.auth import Access
from areal.services.http.client import ENGINE_IDLE_S, CallFailed, HttpClient
from areal.services.http.messages import Request, Response
from areal.services.http.process import ServeOptions, report_stage, serve_options
from areal.services.http.serve import run_service
from areal.services.http.service import Handler, Metrics, Service, json_response
from areal.services.http.tasks import background, until_beat
from areal.services.inference.data_proxy.control import (
    EngineControl,
    EngineWatch,
    PauseState,
    WeightTracker,
    refuse_controls,
)
from areal.services.inference.data_proxy.external_models import ExternalModels, Registered, open_external
from areal.services.inference.data_proxy.generation import Generator
from areal.services.inference.data_proxy.model_calls import ModelCalls, TokenMetrics, adapter_of
from areal.services.inference.data_proxy.openai import load_parsers
from areal.services.inference.data_proxy.session_routes import JournalSessionRoutes, TrajectoryRoutes
from areal.services.inference.data_proxy.sessions import CallerResolver, CallRecorders
from areal.services.inference.data_proxy.tokenizer import load_codec
from areal.services.inference.data_proxy.weights import WeightRoutes, WeightSync
from areal.services.inference.engines import open_engine
from areal.services.inference.engines.base import TokenEngine
from areal.services.inference.recorder.session import TrajectoryPhase
from areal.services.inference.recorder.storage import REGISTRATIONS
from areal.services.inference.recorder.store import JournalStore, open_journal_store
from areal.wire.bodies import RenewLease
from areal.wire.processes import DataProxyConfig, RegistrationConfig

_COMMIT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)
_RUN_UID = "AREAL_RUN_UID"


@contextlib.asynccontextmanager
async def open_store(config: DataProxyConfig) -> AsyncIterator[JournalStore | None]:
    """The journals, maintained while the body runs; None without a state folder. Raises UsageFault."""
    if config.state_dir is None:
        yield None
        return
    root = Path(config.state_dir)
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageFault(f"cannot make the state folder {root}: {error.strerror}") from error
    # The run's uid, so that a restarted process finds its own journal again.
    uid = os.environ.get(_RUN_UID) or f"manual-{uuid4().hex[:12]}"
    store = await open_journal_store(root, uid, config, adopt_after_s=config.adopt_after)
    try:
        async with background("journal-upkeep", store.run):
            yield store
    finally:
        await store.close()


def store_details(store: JournalStore | None) -> dict[str, Any]:
    """The store as the router needs it: the journals here, those elsewhere, the number of live sessions."""
    if store is None:
        return {}
    failing = next((journal.commits.failing for journal in store if journal.commits.failing), None)
    damaged = sum(len(journal.corrupt) for journal in store) + len(store.unreadable)
    return {
        "journals": list(store.journals),
        "journals_elsewhere": list(store.elsewhere),
        "sessions": sum(journal.live_sessions() for journal in store),
        "journal_failing": failing,
        "journal_damaged": damaged,
    }


def track_journals(metrics: Metrics, store: JournalStore) -> None:
    """Gauges are computed when they are scraped."""
    commits = metrics.histogram(
        "areal_commit_seconds", "One group commit of the journal, until it is on disk.", _COMMIT_SECONDS, ()
    )
    for journal in store:  # adopted journals take it from our own
        journal.commits.observe = commits.observe
    metrics.gauge("areal_sessions_open", "Sessions that have not ended.").set_function(
        lambda: sum(journal.live_sessions() for journal in store)
    )
    metrics.gauge("areal_trajectories_ready", "Trajectories that wait to be exported.").set_function(
        lambda: sum(journal.count_trajectories(TrajectoryPhase.READY) for journal in store)
    )
    metrics.gauge("areal_journals", "Journals served: the own one and those adopted.").set_function(
        lambda: len(store.journals)
    )
    metrics.gauge("areal_journal_failing", "1 while a journal cannot be written.").set_function(
        lambda: float(any(journal.commits.failing is not None for journal in store))
    )


_log = logging.getLogger(__name__)
_POLL_S = 1.0  # for changes that the engine watch does not announce
_RETRY_S = 0.5
_TIMER_SLACK_S = 0.002  # timers fire a little early
_TIMEOUT_S = 5.0
_SENT_AT_ONCE = ("status", "fault", "model", "version", "paused", "max_model_len", "root", "adapters", "journals")


class RouterLease:
    """Keeps a data proxy registered at its router: a lease, renewed for as long as the process lives.

    The router's address is read from its state file, which it writes at each start: a router that moved is found again.
    A lease carries what /ready reports; changes of that are sent at once, the rest with the next renewal.
    """

    def __init__(
        self, config: RegistrationConfig, service: Service, http: HttpClient, headers: Mapping[str, str], model: str
    ) -> None:
        self._file = Path(config.router_file)
        self._config = config
        self._model = model
        self._service = service
        self._http = http
        self._headers = {**headers, "Content-Type": "application/json"}
        self._registered: bool | None = None

    async def run(self) -> None:
        while True:
            ready = self._service.readiness()
            again_s = await self._renew(ready)
            await self._wait_for_change(ready, again_s)

    async def _wait_for_change(self, sent: Mapping[str, Any], seconds: float) -> None:
        """Return when what was ``sent`` has changed, or after ``seconds``."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        news = self._service.lifetime.news
        while (left_s := until - loop.time()) > _TIMER_SLACK_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, until_beat(_POLL_S))):
                    await news.wait()
            news.clear()
            if loop.time() >= until - _TIMER_SLACK_S:
                return  # all of it is sent anyway
            now = self._service.readiness()
            if any(now.get(name) != sent.get(name) for name in _SENT_AT_ONCE):
                return

    async def _renew(self, ready: Mapping[str, Any]) -> float:
        """Seconds until the next renewal."""
        config, address = self._config, self._service.address
        assert address is not None, "a lease is taken by a service that listens"
        lease = RenewLease(
            worker_id=config.worker_id,
            worker_addr=address,
            model=self._model,
            expected=config.expected,
            readiness=config.readiness,
            held=config.held,
        )
        body = orjson.dumps({**ready, **asdict(lease)})
        try:
            url = json.loads(self._file.read_text())["url"]
            response = await self._http.fetch(
                "POST", url, "/lease", headers=self._headers, body=body, timeout_s=_TIMEOUT_S
            )
            answer = response.object()
            if response.status != 200:
                raise ValueError(f"the router answers {response.status}")
            registered = bool(answer["registered"])
            if registered is not self._registered:
                _log.info("%s at the router %s", "registered" if registered else "removed: not registered", url)
            self._registered = registered
            return until_beat(float(answer["renew_seconds"]))
        except (OSError, CallFailed, TimeoutError, ValueError, KeyError, TypeError) as error:
            if self._registered is not None:
                _log.warning("not registered at a router: %r", error)
            self._registered = None
            return _RETRY_S


_EXTERNAL_PERIOD_S = 5.0
_SCRAPED = ("embedded", "vllm")  # engines that answer /metrics without a flag

Build = Callable[[ServeOptions, JournalStore | None], AbstractAsyncContextManager[Service]]


def run_data_proxy(config: DataProxyConfig) -> None:
    """Serve until told to stop. Raises UsageFault for flags that do not fit together."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    options = serve_options(config)
    service = data_proxy(config, options)
    run_service(lambda: service, options)


def data_proxy(config: DataProxyConfig, options: ServeOptions) -> AbstractAsyncContextManager[Service]:
    """One data proxy, wired together. Raises UsageFault at once for flags that do not fit together."""
    build = _external(config) if config.engine == "external" else _token_engine(config)

    @contextlib.asynccontextmanager
    async def wired() -> AsyncIterator[Service]:
        async with open_store(config) as store, build(options, store) as service, HttpClient() as http:
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
    template = codec.template.source if codec.template is not None else None
    parsers = load_parsers(config.tool_call_parser, config.reasoning_parser, template)

    @contextlib.asynccontextmanager
    async def build(options: ServeOptions, store: JournalStore | None) -> AsyncIterator[Service]:
        headers, http = options.headers, HttpClient(idle_s=ENGINE_IDLE_S)
        engine_headers = headers
        if config.attached:
            engine_key = _provider_key(config.engine_key_file, "AREAL_ENGINE_API_KEY")
            engine_headers = {"Authorization": f"Bearer {engine_key}"} if engine_key else {}

        def engine_at(url: str) -> TokenEngine:
            return open_engine(config.engine, http, url, engine_headers)

        engine = engine_at(config.engine_url)
        pause = PauseState()
        generator = Generator(engine, pause)
        watch = EngineWatch(engine.state, pause=pause, on_progress=generator.activity.mark)

        def context() -> int | None:
            """The smaller of our limit and the engine's: a call that the engine would cut short is refused here."""
            limits = [length for length in (config.max_model_len, watch.state.max_model_len) if length]
            return min(limits, default=codec.max_positions)

        def details() -> dict[str, Any]:
            return {
                "in_flight_tokens": calls.tokens_in_flight,
                "max_model_len": context(),
                "root": watch.state.root,
                "engine_url": control.engine_url if config.engine in _SCRAPED else None,
                "adapters": list(watch.state.adapters),
                "paused": pause.active,
                "models": models.names,
                "fault": watch.state.fault,
                "awaits_version": tracker.behind.version if control.engine_is_available and tracker.behind else None,
                **store_details(store),
            }

        def adapters() -> Collection[str]:
            return watch.state.adapters

        tracker = WeightTracker(watch, store.root if store is not None else None, config.model_path)
        service = _service(config, options, watch, lambda: control.not_ready, details)
        watch.on_change = pause.on_change = service.lifetime.news.set
        control = EngineControl(config, engine, engine_at, watch, pause, lambda: service.lifetime.in_flight, tracker)
        held = service.metrics.gauge("areal_tokens_in_flight", "Prompt and longest answer of the calls being answered.")
        held.set_function(lambda: calls.tokens_in_flight)
        paused = service.metrics.gauge("areal_paused", "1 while generation is held still.")
        paused.set_function(lambda: float(pause.active))
        recorders = CallRecorders(store, options.key)
        calls = ModelCalls(
            config,
            codec,
            parsers,
            generator,
            engine.capabilities,
            recorders,
            TokenMetrics(service.metrics),
            check_serving=control.check_serving,
            max_model_len=context,
            adapters=adapters,
        )
        control.add_to(service)
        WeightRoutes(engine, control, tracker, http).add_to(service)
        weight_sync = WeightSync(tracker, engine, control, http, headers, lambda: service.address, config.model)
        service.add_lifespan(lambda: background("published-weights", weight_sync.run))
        models = _add_model_routes(service, config, options, recorders, store, calls.handlers(), adapters)
        try:
            yield service
        finally:
            http.close()

    return build


def _external(config: DataProxyConfig) -> Build:
    key = _provider_key(config.provider_key_file, "AREAL_PROVIDER_API_KEY")
    name = config.provider_model or config.model
    wanted = Registered(config.model, config.engine_url, name, key, config.provider_api, config.allow_private)
    try:
        _ = wanted.parsed_url
    except UrlError as error:
        raise UsageFault(f"--engine-url {config.engine_url!r} {error}") from error

    @contextlib.asynccontextmanager
    async def build(options: ServeOptions, store: JournalStore | None) -> AsyncIterator[Service]:
        recorders = CallRecorders(store, options.key)
        external = open_external(wanted, recorders, config.max_body_bytes, config.request_timeout)
        watch = EngineWatch(external.api.state, period_s=_EXTERNAL_PERIOD_S)

        def details() -> dict[str, Any]:
            return {"root": name, "models": models.names, **store_details(store)}

        async with external.http:
            service = _service(config, options, watch, lambda: watch.state.not_ready, details)
            refuse_controls(service, "an external model is not ours to pause, to resize or to version")
            models = _add_model_routes(service, config, options, recorders, store, external.handlers)
            yield service

    return build


def _provider_key(key_file: str | None, variable: str) -> str | None:
    """The key of somebody else's server, from the file or else the environment. Raises UsageFault."""
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
    details: Callable[[], dict[str, Any]],
) -> Service:
    def about() -> dict[str, Any]:
        state = watch.state
        return {
            "model": config.model,
            "engine": config.engine,
            "version": state.version,
            "fault": state.fault,
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
    store: JournalStore | None,
    handlers: Mapping[str, Handler],
    adapters: Callable[[], Collection[str]] = tuple,
) -> ExternalModels:
    """The routes that call models, and those of their sessions. Returns the models beside our own."""
    uid = os.environ.get(_RUN_UID)
    models = ExternalModels(
        config.model,
        recorders,
        max_body_bytes=config.max_body_bytes,
        timeout_s=config.request_timeout,
        file=store.root / f"{uid}{REGISTRATIONS}" if store is not None and uid else None,
    )

    def check_name(name: str | None) -> None:
        if name not in models.names:
            adapter_of(name, models.own, adapters())

    if store is not None:
        store.leaving = lambda: service.lifetime.draining
        JournalSessionRoutes(store, CallerResolver(store, options.key), options.key, check_name).add_to(service)
        TrajectoryRoutes(store).add_to(service)
        track_journals(service.metrics, store)
    # Without a journal there are no session keys.
    access = Access.INFERENCE if store is None else Access.SESSION
    models.add_to(service)
    for path, handler in handlers.items():
        routed = models.route_of(path, handler)
        service.route("POST", path, routed, access)
        service.route("POST", path.removeprefix("/v1"), routed, access)

    async def listed(request: Request) -> Response:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "areal"} for name in models.names]
        return json_response({"object": "list", "data": data, "models": models.names})

    service.route("GET", "/v1/models", listed, Access.INFERENCE)
    service.route("GET", "/models", listed, Access.INFERENCE)
    return models
