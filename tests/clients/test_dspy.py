"""DSPy's language model, by LiteLLM."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers
from tests.clients.shapes import SAY, TOKENS


def model(served: Served, name: str = MODEL, retries: int = 0) -> Any:
    dspy = pytest.importorskip("dspy")
    settings = {"max_tokens": TOKENS, "num_retries": retries, "cache": False}
    return dspy.LM(f"openai/{name}", api_base=served.v1, api_key=served.key, **settings)


@covers("dspy", "chat", "usage")
def test_chat_and_usage(served: Served) -> None:
    ours = model(served)
    assert ours(SAY) and ours.history[-1]["usage"]["completion_tokens"] > 0


@covers("dspy", "async")
async def test_async(served: Served) -> None:
    assert await model(served).acall(SAY)


@covers("dspy", "errors", "retries")
def test_errors_and_retries(served: Served, flaky: Served) -> None:
    with pytest.raises(Exception, match="absent"):
        model(served, "absent")(SAY)
    assert model(flaky, retries=2)(SAY)
