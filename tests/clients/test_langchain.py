"""LangChain's models of the two APIs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers
from tests.clients.shapes import SAY, TOKENS, TOOL, Mood

APIS = ("openai", "anthropic")


def model(served: Served, api: str, retries: int = 0, name: str = MODEL, tokens: int = TOKENS) -> Any:
    if api == "openai":
        made = pytest.importorskip("langchain_openai").ChatOpenAI
        url = served.v1
    else:
        made = pytest.importorskip("langchain_anthropic").ChatAnthropic
        url = served.url
    return made(model=name, base_url=url, api_key=served.key, max_retries=retries, max_tokens=tokens)


@covers("langchain", "chat", "usage")
@pytest.mark.parametrize("api", APIS)
def test_chat_and_usage(served: Served, api: str) -> None:
    answer = model(served, api).invoke(SAY)
    assert answer.usage_metadata["output_tokens"] > 0 and answer.type == "ai"


@covers("langchain", "streaming", "async")
@pytest.mark.parametrize("api", APIS)
async def test_streaming(served: Served, api: str) -> None:
    assert [chunk async for chunk in model(served, api).astream(SAY)]
    assert list(model(served, api).stream(SAY))


@covers("langchain", "tools")
@pytest.mark.parametrize("api", APIS)
def test_tools(served: Served, api: str) -> None:
    answer = model(served, api, tokens=200).bind_tools([TOOL], tool_choice="any").invoke(SAY)
    (call,) = answer.tool_calls
    assert call["name"] == "set_light" and call["args"]["state"] in ("on", "off")


@covers("langchain", "structured output")
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(served: Served, method: Any) -> None:
    asked = model(served, "openai", tokens=200).with_structured_output(Mood, method=method)
    assert isinstance(asked.invoke(SAY), Mood)


@covers("langchain", "errors", "retries")
@pytest.mark.parametrize("api", APIS)
def test_errors_and_retries(served: Served, flaky: Served, api: str) -> None:
    absent = model(served, api, name="absent")
    errors = pytest.importorskip(api)
    with pytest.raises(errors.NotFoundError):
        absent.invoke(SAY)
    with pytest.raises(errors.AuthenticationError):
        model(Served(served.url, "wrong", ""), api).invoke(SAY)
    assert model(flaky, api, retries=2).invoke(SAY).type == "ai"
