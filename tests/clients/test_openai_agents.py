"""OpenAI's Agents SDK, by chat completions and by responses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers
from tests.clients.shapes import ENOUGH, SAY, Mood

APIS = ("OpenAIChatCompletionsModel", "OpenAIResponsesModel")


def agent(served: Served, api: str, retries: int = 0, model: str = MODEL, **more: Any) -> Any:
    agents, openai = pytest.importorskip("agents"), pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    speaks = openai.AsyncOpenAI(base_url=served.v1, api_key=served.key, max_retries=retries)
    settings = agents.ModelSettings(max_tokens=more.pop("max_tokens", ENOUGH), tool_choice=more.pop("choice", None))
    chosen = getattr(agents, api)(model=model, openai_client=speaks)
    return agents.Agent(name="tester", model=chosen, model_settings=settings, **more)


@covers("openai-agents", "chat", "usage", "async")
@pytest.mark.parametrize("api", APIS)
async def test_chat_and_usage(served: Served, api: str) -> None:
    ours = agent(served, api)
    from agents import Runner

    result = await Runner.run(ours, SAY)
    assert isinstance(result.final_output, str) and result.context_wrapper.usage.output_tokens > 0


@covers("openai-agents", "streaming")
@pytest.mark.parametrize("api", APIS)
async def test_streaming(served: Served, api: str) -> None:
    ours = agent(served, api, max_tokens=ENOUGH)
    from agents import Runner

    result = Runner.run_streamed(ours, SAY)
    kinds = {event.type async for event in result.stream_events()}
    assert "raw_response_event" in kinds and isinstance(result.final_output, str)


@covers("openai-agents", "tools")
@pytest.mark.parametrize("api", APIS)
async def test_tools(served: Served, api: str) -> None:
    agents = pytest.importorskip("agents")
    called: list[bool] = []

    @agents.function_tool
    def set_light(on: bool) -> str:
        """Switch the light."""
        called.append(on)
        return "done"

    ours = agent(served, api, choice="required", max_tokens=ENOUGH, tools=[set_light])
    await agents.Runner.run(ours, SAY, max_turns=3)
    assert called


@covers("openai-agents", "structured output")
@pytest.mark.parametrize("api", APIS)
async def test_structured_output(served: Served, api: str) -> None:
    ours = agent(served, api, max_tokens=ENOUGH, output_type=Mood)
    from agents import Runner

    assert isinstance((await Runner.run(ours, SAY)).final_output, Mood)


@covers("openai-agents", "errors", "retries")
@pytest.mark.parametrize("api", APIS)
async def test_errors_and_retries(served: Served, flaky: Served, api: str) -> None:
    absent = agent(served, api, model="absent")
    import openai
    from agents import Runner

    with pytest.raises(openai.NotFoundError):
        await Runner.run(absent, SAY)
    with pytest.raises(openai.AuthenticationError):
        await Runner.run(agent(Served(served.url, "wrong", ""), api), SAY)
    assert isinstance((await Runner.run(agent(flaky, api, retries=2), SAY)).final_output, str)
