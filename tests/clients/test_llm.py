"""``llm``, the command line tool's library."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers
from tests.clients.shapes import SAY, TOKENS, Mood


def ask(served: Served, name: str = MODEL, **more: Any) -> Any:
    pytest.importorskip("llm")
    from llm.default_plugins.openai_models import Chat

    model = Chat(name, model_name=name, api_base=served.v1, supports_schema=True)
    return model.prompt(SAY, key=served.key, **{"stream": False, "max_tokens": TOKENS, **more})


@covers("llm", "chat", "usage")
def test_chat_and_usage(served: Served) -> None:
    answer = ask(served)
    assert answer.text() and answer.usage().output > 0


@covers("llm", "streaming")
def test_streaming(served: Served) -> None:
    assert list(ask(served, stream=True))


@covers("llm", "structured output")
def test_structured_output(served: Served) -> None:
    Mood.model_validate_json(ask(served, schema=Mood, max_tokens=200).text())


@covers("llm", "errors")
def test_errors(served: Served) -> None:
    with pytest.raises(Exception, match="absent"):
        ask(served, "absent").text()
    with pytest.raises(Exception, match="401"):
        ask(Served(served.url, "wrong", "")).text()
