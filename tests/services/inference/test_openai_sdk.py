"""The official client, unchanged, against the gateway."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.services.inference.running_service import Service
from tests.services.processes import script


def test_sdk_chat_completion(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=1, seed=1
    )
    choice = answer.choices[0]
    assert choice.message.content == "Hello there, friend!" and choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert answer.usage is not None and len(choice.logprobs.content) == answer.usage.completion_tokens


def test_sdk_chat_completion_streamed(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello there, friend!"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0


def test_sdk_extra_body_is_applied(client: openai.OpenAI, service: Service) -> None:
    client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        extra_body={"chat_template_kwargs": {"enable_thinking": False}, "top_k": 5},
    )
    assert service.engine_saw()["sampling"]["top_k"] == 5


def test_sdk_completion_and_models(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=50, logprobs=1)
    assert answer.choices[0].text == "Hello there, friend!"
    assert [model.id for model in client.models.list()] == ["tiny"]


@pytest.mark.parametrize("component", ["gateway", "proxy"])
def test_sdks_work_with_root_base_url(service: Service, component: str) -> None:
    root = getattr(service, component).url
    with openai.OpenAI(base_url=root, api_key=service.key, max_retries=0) as client:
        chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
        assert chat.choices[0].message.content == "Hello there, friend!"
        assert client.completions.create(model="tiny", prompt=[5, 6, 7]).choices[0].text == "Hello there, friend!"
        assert client.responses.create(model="tiny", input="Hi").output_text == "Hello there, friend!"
        assert [model.id for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="tiny", input=3)  # type: ignore[call-overload]
    ask = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    for path in ("/messages", "/v1/messages"):
        answer = getattr(service, component).call("POST", path, ask, key=service.key).json()
        assert answer["content"][0]["text"].startswith("Hello")
        refused = getattr(service, component).call("POST", path, {**ask, "messages": 3}, key=service.key).json()
        assert refused["type"] == "error", "Anthropic's form"


def test_errors_map_to_sdk_exceptions(client: openai.OpenAI, service: Service) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "Hi"}])
    assert missing.value.code == "model_not_found" and missing.value.request_id
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=[])
    assert bad.value.param == "messages"
    with openai.OpenAI(base_url=f"{service.gateway.url}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()


def test_sdk_raises_on_error_event_in_stream(client: openai.OpenAI, service: Service) -> None:
    script(service.engine, error_after=3)
    stream = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True)
    seen: list[Any] = []
    with pytest.raises(openai.APIError, match="scripted error line"):
        seen.extend(chunk for chunk in stream)
    assert stream.response.status_code == 200
