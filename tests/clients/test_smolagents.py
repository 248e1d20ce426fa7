"""smolagents' model for OpenAI-compatible services."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers
from tests.clients.shapes import ENOUGH, SAY, TOKENS

ASKED = [{"role": "user", "content": SAY}]


def model(served: Served, name: str = MODEL, **more: Any) -> Any:
    smolagents = pytest.importorskip("smolagents")
    settings = {"max_tokens": TOKENS, "client_kwargs": {"max_retries": 0}, "retry": False, **more}
    return smolagents.OpenAIModel(name, api_base=served.v1, api_key=served.key, **settings)


@covers("smolagents", "chat", "usage")
def test_chat_and_usage(served: Served) -> None:
    answer = model(served).generate(ASKED)
    assert answer.content and answer.token_usage.output_tokens > 0


@covers("smolagents", "streaming")
def test_streaming(served: Served) -> None:
    deltas = list(model(served).generate_stream(ASKED))
    assert any(delta.content for delta in deltas) and deltas[-1].token_usage.output_tokens > 0


@covers("smolagents", "tools")
def test_tools(served: Served) -> None:
    ours = model(served, max_tokens=ENOUGH)
    from smolagents import tool

    @tool
    def set_light(on: bool) -> str:
        """Switch the light.

        Args:
            on: whether it shines
        """
        return "done"

    (call,) = ours.generate(ASKED, tools_to_call_from=[set_light]).tool_calls
    assert call.function.name == "set_light"


@covers("smolagents", "errors")
def test_errors(served: Served) -> None:
    with pytest.raises(Exception, match="absent"):
        model(served, "absent").generate(ASKED)
