"""Haystack's chat generators, by chat completions and by responses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers
from tests.clients.shapes import SAY, TOKENS, TOOL

LIMITS = {"OpenAIChatGenerator": "max_tokens", "OpenAIResponsesChatGenerator": "max_output_tokens"}


def ask(served: Served, api: str = "OpenAIChatGenerator", name: str = MODEL, tokens: int = TOKENS, **more: Any) -> Any:
    chat = pytest.importorskip("haystack.components.generators.chat")
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    wanted = {LIMITS[api]: tokens, **more.pop("generation", {})}
    settings = {"api_key": Secret.from_token(served.key), "api_base_url": served.v1, "max_retries": 0}
    ours = getattr(chat, api)(model=name, generation_kwargs=wanted, **settings)
    return ours.run([ChatMessage.from_user(SAY)], **more)["replies"][0]


@covers("haystack", "chat", "usage")
@pytest.mark.parametrize("api", LIMITS)
def test_chat_and_usage(served: Served, api: str) -> None:
    answer = ask(served, api)
    usage = answer.meta["usage"]
    assert answer.text and usage.get("completion_tokens", usage.get("output_tokens")) > 0


@covers("haystack", "streaming")
@pytest.mark.parametrize("api", LIMITS)
def test_streaming(served: Served, api: str) -> None:
    chunks: list[Any] = []
    ask(served, api, streaming_callback=chunks.append)
    assert any(chunk.content for chunk in chunks)


@covers("haystack", "tools")
@pytest.mark.parametrize("api", LIMITS)
def test_tools(served: Served, api: str) -> None:
    tools = pytest.importorskip("haystack.tools")
    function = TOOL["function"]
    light = tools.Tool(function["name"], function["description"], function["parameters"], lambda state: "done")
    answer = ask(served, api, tokens=200, tools=[light], generation={"tool_choice": "required"})
    (call,) = answer.tool_calls
    assert call.tool_name == "set_light" and call.arguments["state"] in ("on", "off")


@covers("haystack", "errors")
def test_errors(served: Served) -> None:
    with pytest.raises(Exception, match="absent"):
        ask(served, name="absent")
