"""Inspect's models of the two APIs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers
from tests.clients.shapes import SAY, TOKENS, Mood


def model(served: Served, api: str = "openai", name: str = MODEL, retries: int = 0, **config: Any) -> Any:
    ai = pytest.importorskip("inspect_ai.model")
    pytest.importorskip(api, minversion={"openai": "3.4.0"}.get(api))  # which Inspect asks for
    url = served.v1 if api == "openai" else served.url
    settings = ai.GenerateConfig(**{"max_tokens": TOKENS, "max_retries": retries, **config})
    return ai.get_model(f"{api}/{name}", base_url=url, api_key=served.key, config=settings, memoize=False)


@covers("inspect-ai", "chat", "usage", "async")
@pytest.mark.parametrize("api", ["openai", "anthropic"])
async def test_chat_and_usage(served: Served, api: str) -> None:
    answer = await model(served, api).generate(SAY)
    assert answer.stop_reason in ("stop", "max_tokens") and answer.usage.output_tokens > 0


@covers("inspect-ai", "tools")
async def test_tools(served: Served) -> None:
    tools = pytest.importorskip("inspect_ai.tool")
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    light = tools.ToolInfo(name="set_light", description="Switch it.", parameters=tools.ToolParams(**schema))
    answer = await model(served, max_tokens=200).generate(SAY, tools=[light], tool_choice="any")
    (call,) = answer.message.tool_calls
    assert call.function == "set_light" and isinstance(call.arguments["on"], bool)


@covers("inspect-ai", "structured output")
async def test_structured_output(served: Served) -> None:
    ai = pytest.importorskip("inspect_ai.model")
    from inspect_ai.util import json_schema

    schema = ai.ResponseSchema(name="mood", json_schema=json_schema(Mood))
    answer = await model(served, max_tokens=200, response_schema=schema).generate(SAY)
    Mood.model_validate_json(answer.completion)


@covers("inspect-ai", "errors", "retries")
async def test_errors_and_retries(served: Served, flaky: Served) -> None:
    with pytest.raises(Exception, match="absent"):
        await model(served, name="absent").generate(SAY)
    with pytest.raises(Exception, match=r"401|key"):
        await model(Served(served.url, "wrong", "")).generate(SAY)
    assert (await model(flaky, retries=3).generate(SAY)).completion is not None
