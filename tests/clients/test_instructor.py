"""Instructor: answers as objects, by a tool, by JSON and by a JSON schema."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers
from tests.clients.shapes import SAY, Mood

USER: Any = [{"role": "user", "content": SAY}]


def client(served: Served, mode: str = "TOOLS", retries: int = 0, kind: str = "OpenAI") -> Any:
    instructor, openai = pytest.importorskip("instructor"), pytest.importorskip("openai")
    speaks = getattr(openai, kind)(base_url=served.v1, api_key=served.key, max_retries=retries)
    return instructor.from_openai(speaks, mode=getattr(instructor.Mode, mode))


def asked(model: str = MODEL) -> dict[str, Any]:
    return {"model": model, "messages": USER, "response_model": Mood, "max_tokens": 200, "max_retries": 1}


@covers("instructor", "chat", "tools", "structured output", "usage")
@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_objects(served: Served, mode: str) -> None:
    ours = client(served, mode)
    mood, answer = ours.chat.completions.create_with_completion(**asked())
    assert isinstance(mood, Mood) and answer.usage.completion_tokens > 0


@covers("instructor", "errors", "retries")
def test_errors_and_retries(served: Served, flaky: Served) -> None:
    ours, stranger = client(served), client(Served(served.url, "wrong", ""))
    with pytest.raises(Exception, match="absent"):
        ours.chat.completions.create(**asked("absent"))
    with pytest.raises(Exception, match="401"):
        stranger.chat.completions.create(**asked())
    assert isinstance(client(flaky, retries=2).chat.completions.create(**asked()), Mood)


@covers("instructor", "async")
async def test_async(served: Served) -> None:
    ours = client(served, kind="AsyncOpenAI")
    assert isinstance(await ours.chat.completions.create(**asked()), Mood)
