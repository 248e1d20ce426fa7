"""LiteLLM, which speaks both APIs by the model's prefix."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers
from tests.clients.shapes import SAY, TOKENS, TOOL, Mood

APIS = ("openai", "anthropic")
USER: Any = [{"role": "user", "content": SAY}]


@pytest.fixture
def litellm() -> Any:
    return pytest.importorskip("litellm")


def asked(served: Served, api: str = "openai", model: str = MODEL, **more: Any) -> dict[str, Any]:
    url = served.v1 if api == "openai" else served.url
    given = {"model": f"{api}/{model}", "api_base": url, "api_key": served.key, "messages": USER, "max_tokens": TOKENS}
    return {**given, "max_retries": 0, **more}


@covers("litellm", "chat", "usage")
@pytest.mark.parametrize("api", APIS)
def test_chat_and_usage(served: Served, litellm: Any, api: str) -> None:
    answer = litellm.completion(**asked(served, api))
    assert answer.choices[0].finish_reason in ("stop", "length") and answer.usage.completion_tokens > 0


@covers("litellm", "streaming", "async")
@pytest.mark.parametrize("api", APIS)
async def test_streaming(served: Served, litellm: Any, api: str) -> None:
    stream = await litellm.acompletion(**asked(served, api, stream=True, stream_options={"include_usage": True}))
    chunks = [chunk async for chunk in stream]
    assert any(chunk.choices and chunk.choices[0].finish_reason for chunk in chunks)


@covers("litellm", "tools")
@pytest.mark.parametrize("api", APIS)
def test_tools(served: Served, litellm: Any, api: str) -> None:
    answer = litellm.completion(**asked(served, api, tools=[TOOL], tool_choice="required", max_tokens=200))
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["state"] in ("on", "off")


@covers("litellm", "structured output")
def test_structured_output(served: Served, litellm: Any) -> None:
    answer = litellm.completion(**asked(served, response_format=Mood, max_tokens=200))
    Mood.model_validate_json(answer.choices[0].message.content)


@covers("litellm", "errors", "retries")
@pytest.mark.parametrize("api", APIS)
def test_errors_and_retries(served: Served, flaky: Served, litellm: Any, api: str) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**asked(served, api, model="absent"))
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**asked(Served(served.url, "wrong", ""), api))
    assert litellm.completion(**asked(flaky, api, num_retries=2)).choices
