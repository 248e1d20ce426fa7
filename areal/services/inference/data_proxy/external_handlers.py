"""The model routes before an external API, by what is spoken over there."""

from __future__ import annotations

from areal.services.inference.data_proxy.dialects import anthropic, responses
from areal.services.inference.data_proxy.external_calls import ExternalCalls
from areal.services.inference.engines.clients.dialect import Dialect
from areal.services.web.service import Handler


def external_handlers(calls: ExternalCalls, dialect: Dialect) -> dict[str, Handler]:
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
