"""A data proxy before an external model, wired together. Only it needs an HTTP client for the world outside."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator

from areal.services.inference.data_proxy.control import refuse_controls
from areal.services.inference.data_proxy.dialects import anthropic, responses
from areal.services.inference.data_proxy.engine_watch import EngineWatch
from areal.services.inference.data_proxy.external_calls import ExternalCalls
from areal.services.inference.data_proxy.keeping import keeping_details
from areal.services.inference.data_proxy.options import external_url, provider_key
from areal.services.inference.data_proxy.serving import (
    Build,
    add_model_routes,
    add_session_routes,
    model_access,
    open_service,
)
from areal.services.inference.data_proxy.visits import Visits
from areal.services.inference.engines.clients.dialect import Dialect
from areal.services.inference.engines.clients.external import ExternalApi
from areal.services.inference.engines.clients.outside import open_outside
from areal.services.inference.recording.vault import Vault
from areal.services.web.options import ServeOptions
from areal.services.web.service import Handler, Service

_EXTERNAL_PERIOD_S = 15.0


def external_model(args: argparse.Namespace) -> Build:
    url, key = external_url(args.engine_url, allow_private=args.allow_private), provider_key(args.provider_key_file)
    name, dialect = args.provider_model or args.model, args.provider_api

    @contextlib.asynccontextmanager
    async def build(options: ServeOptions, vault: Vault | None) -> AsyncIterator[Service]:
        async with open_outside(url, allow_private=args.allow_private) as http:
            yield build_on(ExternalApi(http, url, name, key, dialect), options, vault)

    def build_on(api: ExternalApi, options: ServeOptions, vault: Vault | None) -> Service:
        watch = EngineWatch(api.state, period_s=_EXTERNAL_PERIOD_S)
        about = lambda: {"root": name, **keeping_details(vault)}  # noqa: E731
        service = open_service(args, options, watch, lambda: watch.state.not_ready, about)
        refuse_controls(service, "an external model is not ours to pause, to resize or to version")
        visits = Visits(vault, options.key)
        calls = ExternalCalls(args.model, api, visits, max_body_bytes=args.max_body_bytes, idle_s=args.request_timeout)
        add_session_routes(service, args.model, vault, options.key)
        add_model_routes(service, args.model, _external_handlers(calls, dialect), model_access(vault))
        return service

    return build


def _external_handlers(calls: ExternalCalls, dialect: Dialect) -> dict[str, Handler]:
    if dialect is Dialect.ANTHROPIC:
        messages_only = calls.refuse("this model is behind Anthropic's API: ask it by /v1/messages")
        return {
            **dict.fromkeys(("/v1/chat/completions", "/v1/completions", "/v1/responses"), messages_only),
            "/v1/messages": calls.relay_messages,
            "/v1/messages/count_tokens": calls.relay_to("/messages/count_tokens", keeps=False),
        }
    return {
        "/v1/chat/completions": calls.relay_to("/chat/completions"),
        "/v1/completions": calls.relay_to("/completions"),
        "/v1/responses": calls.translated_by(responses.translate, "resp_"),
        "/v1/messages": calls.translated_by(anthropic.translate, "msg_"),
        "/v1/messages/count_tokens": calls.refuse("an external model's tokens are not ours to count"),
    }
