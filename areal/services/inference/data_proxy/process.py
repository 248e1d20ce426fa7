"""One data proxy process, wired together."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

from areal.errors import UsageFault
from areal.services.inference.data_proxy.control import EngineControl
from areal.services.inference.data_proxy.counts import TokenCounts
from areal.services.inference.data_proxy.engine_watch import EngineWatch
from areal.services.inference.data_proxy.generation import Generator
from areal.services.inference.data_proxy.keeping import keeping, keeping_details
from areal.services.inference.data_proxy.model_calls import ModelCalls, ProxyLimits
from areal.services.inference.data_proxy.reading import load_parsers
from areal.services.inference.data_proxy.serving import (
    Build,
    add_model_routes,
    add_session_routes,
    model_access,
    open_service,
)
from areal.services.inference.data_proxy.suspension import Suspension
from areal.services.inference.data_proxy.tokenizer import CodecPool, load_codec
from areal.services.inference.data_proxy.visits import Visits
from areal.services.inference.data_proxy.weights import WeightRoutes
from areal.services.inference.engines.clients import open_engine
from areal.services.inference.recording.vault import Vault
from areal.services.web.client import HttpClient
from areal.services.web.options import ServeOptions, serve_options
from areal.services.web.serve import run_service, serve
from areal.services.web.service import Service
from areal.services.web.stage import report_stage


def run_data_proxy(args: argparse.Namespace) -> None:
    """Serve until told to stop. Raises UsageFault for flags that do not fit together."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    options = serve_options(args)
    if args.engine == "external":
        from areal.services.inference.data_proxy.external_process import (
            external_model,  # with an HTTP client of its own
        )

        build = external_model(args)
    else:
        build = _token_engine(args)

    async def run() -> None:
        async with keeping(args) as vault, build(options, vault) as service:
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
        headers, http = options.key.bearer() if options.key else {}, HttpClient()
        engine = open_engine(args.engine, http, args.engine_url, headers)
        suspension = Suspension()
        watch = EngineWatch(engine.state, suspension=suspension)

        def context() -> int | None:
            """The least of what we and the engine were told: what the engine would cut short is refused here."""
            told = [length for length in (args.max_model_len, watch.state.max_model_len) if length]
            return min(told, default=codec.max_positions)

        def details() -> dict[str, Any]:
            return {
                "in_flight_tokens": calls.tokens_in_flight,
                "max_model_len": context(),
                "root": watch.state.root,
                "adapters": list(watch.state.adapters),
                "paused": suspension.active,
                **keeping_details(vault),
            }

        def not_ready() -> str | None:
            return "the engine's memory is released" if control.memory_released else watch.state.not_ready

        limits = ProxyLimits(args.max_body_bytes, args.request_timeout, context, lambda: watch.state.adapters)
        pool = CodecPool(args.tokenizer_threads)
        service = open_service(args, options, watch, not_ready, details)
        control = EngineControl(engine, watch, suspension, lambda: service.lifetime.in_flight)
        counts = TokenCounts(service.metrics)
        held = service.metrics.gauge("areal_tokens_in_flight", "Prompt and longest answer of the calls being answered.")
        held.set_function(lambda: calls.tokens_in_flight)
        paused = service.metrics.gauge("areal_paused", "1 while generation is held still.")
        paused.set_function(lambda: float(suspension.active))
        generator = Generator(engine, suspension)
        visits = Visits(vault, options.key)
        calls = ModelCalls(args.model, codec, pool, generator, engine.capabilities, limits, counts, parsers, visits)
        control.add_to(service)
        WeightRoutes(engine, control).add_to(service)
        add_session_routes(service, args.model, vault, options.key)
        handlers = {
            "/v1/chat/completions": calls.chat,
            "/v1/completions": calls.completion,
            "/v1/responses": calls.responses,
            "/v1/messages": calls.messages,
            "/v1/messages/count_tokens": calls.count_tokens,
        }
        admitted = {path: control.admitting(each) for path, each in handlers.items()}
        add_model_routes(service, args.model, admitted, model_access(vault))
        try:
            yield service
        finally:
            http.close()

    return build
