"""AutoGen's client for OpenAI-compatible services."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers
from tests.clients.shapes import SAY, TOKENS, Mood


def model(served: Served, name: str = MODEL, tokens: int = TOKENS, retries: int = 0) -> Any:
    pytest.importorskip("autogen_ext")
    from autogen_core.models import ModelInfo
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    able = {"function_calling": True, "json_output": True, "structured_output": True}
    info = ModelInfo(vision=False, family="unknown", **able)
    settings = {"model_info": info, "max_retries": retries, "max_tokens": tokens}
    return OpenAIChatCompletionClient(model=name, base_url=served.v1, api_key=served.key, **settings)


def asked() -> list[Any]:
    from autogen_core.models import UserMessage

    return [UserMessage(content=SAY, source="user")]


@covers("autogen", "chat", "usage", "async")
async def test_chat_and_usage(served: Served) -> None:
    answer = await model(served).create(asked())
    assert answer.content and answer.usage.completion_tokens > 0


@covers("autogen", "streaming")
async def test_streaming(served: Served) -> None:
    ours = model(served)
    assert len([part async for part in ours.create_stream(asked())]) > 1


@covers("autogen", "tools")
async def test_tools(served: Served) -> None:
    ours = model(served, tokens=200)
    from autogen_core.tools import FunctionTool

    def set_light(on: bool) -> str:
        return "done"

    light = FunctionTool(set_light, description="Switch the light.", strict=True)
    (call,) = (await ours.create(asked(), tools=[light], tool_choice="required")).content
    assert call.name == "set_light"


@covers("autogen", "structured output")
async def test_structured_output(served: Served) -> None:
    ours = model(served, tokens=200)
    Mood.model_validate_json((await ours.create(asked(), json_output=Mood)).content)


@covers("autogen", "errors", "retries")
async def test_errors_and_retries(served: Served, flaky: Served) -> None:
    ours = model(served, "absent")
    with pytest.raises(Exception, match="absent"):
        await ours.create(asked())
    assert (await model(flaky, retries=2).create(asked())).content
