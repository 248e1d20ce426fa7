"""Pydantic AI."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers
from tests.clients.shapes import SAY, TOKENS, Mood

APIS = ("OpenAIChatModel", "OpenAIResponsesModel", "AnthropicModel")


def agent(served: Served, api: str, *, retries: int = 0, name: str = MODEL, tokens: int = TOKENS, **more: Any) -> Any:
    ai = pytest.importorskip("pydantic_ai")
    if api == "AnthropicModel":
        import anthropic
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        speaks = anthropic.AsyncAnthropic(base_url=served.url, api_key=served.key, max_retries=retries)
        model: Any = AnthropicModel(name, provider=AnthropicProvider(anthropic_client=speaks))
    else:
        import openai
        from pydantic_ai.models import openai as models
        from pydantic_ai.providers.openai import OpenAIProvider

        client = openai.AsyncOpenAI(base_url=served.v1, api_key=served.key, max_retries=retries)
        model = getattr(models, api)(name, provider=OpenAIProvider(openai_client=client))
    return ai.Agent(model, model_settings={"max_tokens": tokens}, retries=0, **more)


@covers("pydantic-ai", "chat", "usage", "async")
@pytest.mark.parametrize("api", APIS)
async def test_chat_and_usage(served: Served, api: str) -> None:
    result = await agent(served, api).run(SAY)
    assert isinstance(result.output, str) and result.new_messages()[-1].usage.output_tokens > 0  # type: ignore[union-attr]


@covers("pydantic-ai", "streaming")
@pytest.mark.parametrize("api", APIS)
async def test_streaming(served: Served, api: str) -> None:
    async with agent(served, api).run_stream(SAY) as result:
        assert [text async for text in result.stream_text(debounce_by=None)]


@covers("pydantic-ai", "tools", "structured output")
@pytest.mark.parametrize("api", APIS)
async def test_output_by_a_tool(served: Served, api: str) -> None:
    """A type of output is a tool that has to be called."""
    result = await agent(served, api, tokens=200, output_type=Mood).run(SAY)
    assert isinstance(result.output, Mood)


@covers("pydantic-ai", "structured output")
@pytest.mark.parametrize("api", APIS[:2])
async def test_native_output(served: Served, api: str) -> None:
    ai = pytest.importorskip("pydantic_ai")
    result = await agent(served, api, tokens=200, output_type=ai.NativeOutput(Mood)).run(SAY)
    assert isinstance(result.output, Mood)


@covers("pydantic-ai", "errors", "retries")
@pytest.mark.parametrize("api", APIS)
async def test_errors_and_retries(served: Served, flaky: Served, api: str) -> None:
    ai = pytest.importorskip("pydantic_ai")
    for status, ours in (
        (404, agent(served, api, name="absent")),
        (401, agent(Served(served.url, "wrong", ""), api)),
    ):
        with pytest.raises(ai.exceptions.ModelHTTPError) as failed:
            await ours.run(SAY)
        assert failed.value.status_code == status
    assert isinstance((await agent(flaky, api, retries=2).run(SAY)).output, str)
