"""OpenAI's SDK."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers
from tests.clients.shapes import ENOUGH, SAY, TOKENS, TOOL, Mood

USER: Any = [{"role": "user", "content": SAY}]


def client(served: Served, retries: int = 0, kind: str = "OpenAI") -> Any:
    openai = pytest.importorskip("openai")
    return getattr(openai, kind)(base_url=served.v1, api_key=served.key, max_retries=retries)


@covers("openai", "chat", "usage")
def test_chat_and_usage(served: Served) -> None:
    answer = client(served).chat.completions.create(model=MODEL, messages=USER, max_tokens=TOKENS)
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert client(served).responses.create(model=MODEL, input=SAY, max_output_tokens=TOKENS).usage.input_tokens > 0


@covers("openai", "streaming")
def test_streaming(served: Served) -> None:
    options: Any = {"include_usage": True}
    chunks = list(
        client(served).chat.completions.create(
            model=MODEL, messages=USER, max_tokens=TOKENS, stream=True, stream_options=options
        )
    )
    assert chunks[-1].usage.completion_tokens > 0 and chunks[0].choices[0].delta.role == "assistant"
    with client(served).responses.stream(model=MODEL, input=SAY, max_output_tokens=ENOUGH) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().usage.output_tokens > 0
    assert kinds >= {"response.created", "response.output_text.delta"}


@covers("openai", "tools")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_light"}}])
def test_tools(served: Served, choice: Any) -> None:
    given: Any = {"model": MODEL, "tools": [TOOL], "tool_choice": choice, "max_tokens": 200}
    message = client(served).chat.completions.create(messages=USER, **given).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "set_light" and json.loads(call.function.arguments)["state"] in ("on", "off")
    following = [*USER, message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    again = client(served).chat.completions.create(messages=following, model=MODEL, tools=[TOOL], max_tokens=TOKENS)
    assert again.choices[0].finish_reason


@covers("openai", "structured output")
def test_structured_output(served: Served) -> None:
    parse = client(served).chat.completions.parse
    parsed = parse(model=MODEL, messages=USER, response_format=Mood, max_tokens=200).choices[0].message.parsed
    assert isinstance(parsed, Mood)


@covers("openai", "errors")
def test_errors(served: Served) -> None:
    import openai

    with pytest.raises(openai.NotFoundError):
        client(served).chat.completions.create(model="absent", messages=USER)
    with pytest.raises(openai.AuthenticationError):
        client(Served(served.url, "wrong", "")).chat.completions.create(model=MODEL, messages=USER)
    with pytest.raises(openai.BadRequestError):
        client(served).chat.completions.create(model=MODEL, messages=[])


@covers("openai", "retries")
def test_retries(flaky: Served) -> None:
    import openai

    with pytest.raises(openai.InternalServerError):
        client(flaky).chat.completions.create(model=MODEL, messages=USER, max_tokens=4)
    assert client(flaky, retries=2).responses.create(model=MODEL, input=SAY, max_output_tokens=4).output


@covers("openai", "async")
async def test_async(served: Served) -> None:
    async with client(served, kind="AsyncOpenAI") as ours:
        stream = await ours.chat.completions.create(model=MODEL, messages=USER, max_tokens=TOKENS, stream=True)
        assert [chunk async for chunk in stream]
