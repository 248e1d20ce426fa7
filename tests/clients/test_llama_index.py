"""LlamaIndex's model for OpenAI-compatible services."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers
from tests.clients.shapes import SAY, TOKENS


def model(served: Served, name: str = MODEL, tokens: int = TOKENS, retries: int = 0) -> Any:
    like = pytest.importorskip("llama_index.llms.openai_like")
    settings = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": retries, "max_tokens": tokens}
    return like.OpenAILike(model=name, api_base=served.v1, api_key=served.key, **settings)


def asked() -> list[Any]:
    from llama_index.core.llms import ChatMessage

    return [ChatMessage(role="user", content=SAY)]


@covers("llama-index", "chat", "usage")
def test_chat_and_usage(served: Served) -> None:
    answer = model(served).chat(asked())
    assert answer.message.content and answer.additional_kwargs["completion_tokens"] > 0


@covers("llama-index", "streaming")
def test_streaming(served: Served) -> None:
    ours = model(served)
    assert any(part.delta for part in ours.stream_chat(asked()))


@covers("llama-index", "tools")
def test_tools(served: Served) -> None:
    tools = pytest.importorskip("llama_index.core.tools")

    def set_light(on: bool) -> str:
        """Switch the light."""
        return "done"

    ours, light = model(served, tokens=200), tools.FunctionTool.from_defaults(set_light)
    answer = ours.chat_with_tools([light], user_msg=SAY, tool_required=True)
    (call,) = ours.get_tool_calls_from_response(answer)
    assert call.tool_name == "set_light" and isinstance(call.tool_kwargs["on"], bool)


@covers("llama-index", "errors", "retries")
def test_errors_and_retries(served: Served, flaky: Served) -> None:
    ours = model(served, "absent")
    with pytest.raises(Exception, match="absent"):
        ours.chat(asked())
    assert model(flaky, retries=3).chat(asked()).message.content


@covers("llama-index", "async")
async def test_async(served: Served) -> None:
    ours = model(served)
    assert (await ours.achat(asked())).message.content
