"""Anthropic's Messages API: their official client, unchanged, against the gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.services.inference.data_proxy.dialects.talks import CALL, ROME, THOUGHT, TWO_CALLS, WEATHER, prompts, sampled
from tests.services.inference.running_service import Service
from tests.services.processes import Answer, script

MESSAGES = "/v1/messages"
TOOLS: Any = [
    {"name": "get_weather", "description": "Weather", "input_schema": WEATHER},
    {"name": "now", "input_schema": {"type": "object"}},
]
USER: Any = {"role": "user", "content": "How is Rome?"}


@pytest.fixture
def client(service: Service) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=service.gateway.url, api_key=service.key, max_retries=0) as client:
        yield client


def post(service: Service, **body: Any) -> Answer:
    full = {"model": "tiny", "max_tokens": 500, "messages": [USER], **body}
    full = {name: value for name, value in full.items() if value is not ...}
    return service.gateway.call("POST", MESSAGES, full, key=service.key)


def stream(service: Service, **body: Any) -> list[tuple[str, Any]]:
    text = post(service, stream=True, **body).body.decode()
    events = []
    for block in text.strip().split("\n\n"):
        kind, data = block.split("\n")
        assert kind.startswith("event: ") and data.startswith("data: ")
        events.append((kind[7:], json.loads(data[6:])))
        assert events[-1][1]["type"] == events[-1][0]
    return events


def test_a_conversation_with_tools(client: anthropic.Anthropic, service: Service, talking_tokenizer: Path) -> None:
    script(service.engine, text=f"{THOUGHT}I look.\n{TWO_CALLS}")
    first = client.messages.create(model="tiny", max_tokens=500, system="Be brief.", messages=[USER], tools=TOOLS)
    thinking, text, weather, now = first.content
    assert thinking.type == "thinking" and thinking.thinking == "The user wants\nthe weather."
    assert text.type == "text" and text.text == "I look."
    assert weather.type == "tool_use" and (weather.name, weather.input) == ("get_weather", json.loads(ROME))
    assert now.type == "tool_use" and now.input == {}
    assert first.stop_reason == "tool_use" and first.id.startswith("msg_") and first._request_id
    assert first.usage.input_tokens > 0 and first.usage.output_tokens > 0

    script(service.engine, text="Sunny.")
    results: Any = [
        {"type": "tool_result", "tool_use_id": weather.id, "content": [{"type": "text", "text": "sun"}]},
        {"type": "tool_result", "tool_use_id": now.id, "content": "noon"},
        {"type": "text", "text": "And?"},
    ]
    second = client.messages.create(
        model="tiny",
        max_tokens=500,
        system="Be brief.",
        messages=[USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}],
        tools=TOOLS,
    )
    assert second.stop_reason == "end_turn" and second.content[0].text == "Sunny."  # type: ignore[union-attr]
    before, after = prompts(service, talking_tokenizer)
    assert after.startswith(f"{before}{THOUGHT}I look.\n{TWO_CALLS}<|im_end|>\n")
    reply = (
        "<tool_response>\nsun\n</tool_response><|im_end|>\n<|im_start|>user\n<tool_response>\nnoon\n</tool_response>"
    )
    assert f"{reply}<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>" in after and "<|im_start|>system\nBe brief." in before


def test_a_streamed_conversation_with_tools(client: anthropic.Anthropic, service: Service) -> None:
    script(service.engine, text=f"{THOUGHT}I look.\n{TWO_CALLS}")
    with client.messages.stream(model="tiny", max_tokens=500, messages=[USER], tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert {"text", "thinking", "input_json", "content_block_stop", "message_stop"} <= set(kinds)
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert final.content[2].input == json.loads(ROME) and final.stop_reason == "tool_use"  # type: ignore[union-attr]
    assert final.usage.output_tokens > 10


def test_events_come_in_their_sequence(service: Service) -> None:
    script(service.engine, text=f"{THOUGHT}Hm.\n{CALL}")
    events = stream(service, tools=TOOLS)
    kinds = [kind for kind, _ in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    message = events[0][1]["message"]
    assert message["content"] == [] and message["stop_reason"] is None and message["usage"]["input_tokens"] > 0
    starts = [data["content_block"] for kind, data in events if kind == "content_block_start"]
    assert [start["type"] for start in starts] == ["thinking", "text", "tool_use"] and starts[2]["input"] == {}
    open_block = None
    for kind, data in events:
        if kind == "content_block_start":
            assert open_block is None
            open_block = data["index"]
        elif kind.startswith("content_block"):
            assert data["index"] == open_block
            open_block = None if kind == "content_block_stop" else open_block
    deltas = [data["delta"] for kind, data in events if kind == "content_block_delta"]
    assert "".join(delta.get("partial_json", "") for delta in deltas) == ROME
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize(
    ("body", "text", "reason", "stop"),
    [
        ({}, "Hello there, friend!", "end_turn", None),
        ({"stop_sequences": ["there"]}, "Hello ", "stop_sequence", "there"),
        ({"max_tokens": 2}, "Hello", "max_tokens", None),
    ],
)
def test_stop_reasons(service: Service, body: dict[str, Any], text: str, reason: str, stop: str | None) -> None:
    message = post(service, **body).json()
    assert message["content"] == [{"type": "text", "text": text}]
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
    events = stream(service, **body)
    assert events[-2][1]["delta"] == {"stop_reason": reason, "stop_sequence": stop}


def test_truncated_call_has_partial_input(service: Service) -> None:
    script(service.engine, text=CALL)
    message = post(service, tools=TOOLS, max_tokens=60).json()
    assert message["stop_reason"] == "max_tokens" and message["content"][0]["type"] == "tool_use"
    assert isinstance(message["content"][0]["input"], dict)


@pytest.mark.parametrize(
    ("choice", "end"),
    [
        ({"type": "any"}, '<tool_call>\n{"name":'),
        ({"type": "tool", "name": "now"}, '<tool_call>\n{"name": "now", "arguments":'),
        ({"type": "auto"}, "<|im_start|>assistant\n"),
    ],
)
def test_tool_choice_is_honoured(service: Service, talking_tokenizer: Path, choice: Any, end: str) -> None:
    assert post(service, tools=TOOLS, tool_choice=choice).status == 200
    assert prompts(service, talking_tokenizer)[0].endswith(end)


def test_disable_parallel_tool_use_returns_one_call(service: Service) -> None:
    script(service.engine, text=TWO_CALLS)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    content = post(service, tools=TOOLS, tool_choice=choice).json()["content"]
    assert [block["name"] for block in content] == ["get_weather"]


def test_last_assistant_message_is_prefilled(service: Service, talking_tokenizer: Path) -> None:
    answer = post(service, messages=[USER, {"role": "assistant", "content": "It is"}])
    assert answer.json()["content"][0]["text"] == "Hello there, friend!"
    assert prompts(service, talking_tokenizer)[0].endswith("<|im_start|>assistant\nIt is")


def test_consecutive_turns_of_one_role_are_merged(service: Service, talking_tokenizer: Path) -> None:
    post(service, messages=[USER, {"role": "user", "content": [{"type": "text", "text": "Tell!"}]}])
    assert "<|im_start|>user\nHow is Rome?\nTell!<|im_end|>" in prompts(service, talking_tokenizer)[0]


@pytest.mark.parametrize("field", ["tool_choice", "thinking"])
def test_choice_without_type_is_refused(service: Service, field: str) -> None:
    answer = post(service, tools=TOOLS, **{field: {"name": "weather"}})
    assert answer.status == 400 and field in answer.json()["error"]["message"]
    assert post(service, tools=TOOLS, **{field: {}}).status == 200


@pytest.mark.parametrize(("kind", "closed"), [("disabled", True), ("enabled", False), ("adaptive", False)])
def test_thinking_sets_the_templates_switch(service: Service, talking_tokenizer: Path, kind: str, closed: bool) -> None:
    answer = post(service, thinking={"type": kind, "budget_tokens": 1024})
    assert prompts(service, talking_tokenizer)[0].endswith("</think>\n\n") is closed
    assert "thinking.budget_tokens" in answer.headers["x-areal-ignored"]


def test_unknown_fields_are_listed_as_ignored(service: Service) -> None:
    blocks = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
    answer = post(
        service,
        system=blocks,
        messages=[{"role": "user", "content": blocks}],
        service_tier="auto",
        speed="fast",
        n=2,
        top_k=5,
    )
    assert answer.status == 200 and answer.headers["x-areal-ignored"] == "n, speed"
    assert sampled(service)["top_k"] == 5 and "n" not in sampled(service)


def test_count_tokens_does_not_call_engine(client: anthropic.Anthropic, service: Service) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=[USER], tools=TOOLS, system="Be brief.")
    assert service.engine.call("GET", "/calls").json()["calls"] == []
    message = client.messages.create(model="tiny", max_tokens=9, messages=[USER], tools=TOOLS, system="Be brief.")
    assert counted.input_tokens == message.usage.input_tokens


def test_beta_client_and_version_header_are_taken(client: anthropic.Anthropic) -> None:
    message = client.beta.messages.create(
        model="tiny", max_tokens=99, messages=[USER], betas=["interleaved-thinking-2025-05-14"]
    )
    assert message.content[0].text == "Hello there, friend!"  # type: ignore[union-attr]


CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "now", "input": {}}]}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"max_tokens": ...}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens must be between"),
        ({"messages": ...}, "messages must be a list"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": [7]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content must be"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content must not be empty"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages is 'image_url': this model takes text only"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [USER, CALLED]}, "no tool_result"),
        (
            {"messages": [USER, CALLED, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2"}]}]},
            "messages[2].content[0].tool_use_id",
        ),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use"}]}]}, "input must be an object"),
        ({"system": 7}, "system must be"),
        ({"tools": {}}, "tools must be a list"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].input_schema must be an object"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice must be of type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice: 'f' is not among tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"stop_sequences": [""]}, "stop_sequences must be"),
        ({"temperature": 1.5}, "temperature must be between 0 and 1"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format is not supported"),
        ({"max_tokens": 100_000}, "context is 4096 tokens"),
        ({"stream": "yes"}, "stream must be true or false"),
    ],
)
def test_bad_input_is_refused_in_anthropics_shape(service: Service, body: dict[str, Any], text: str) -> None:
    answer = post(service, **body)
    error = answer.json()
    assert answer.status == 400 and error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert text in error["error"]["message"] and set(error["error"]) == {"type", "message"}
    assert error["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


def test_errors_map_to_sdk_exceptions(client: anthropic.Anthropic, service: Service) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="nope", max_tokens=9, messages=[USER])
    assert missing.value.body["error"]["type"] == "not_found_error" and missing.value.request_id  # type: ignore[index]
    with anthropic.Anthropic(base_url=service.gateway.url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            stranger.messages.create(model="tiny", max_tokens=9, messages=[USER])
    script(service.engine, fail=500)
    with pytest.raises(anthropic.InternalServerError, match="api_error"):
        client.messages.create(model="tiny", max_tokens=9, messages=[USER])


@pytest.mark.parametrize(("method", "path", "status"), [("GET", MESSAGES, 405), ("POST", f"{MESSAGES}/batches", 404)])
def test_wrong_method_or_path_uses_anthropic_error_shape(service: Service, method: str, path: str, status: int) -> None:
    answer = service.gateway.call(method, path, key=service.key)
    assert answer.status == status and answer.json()["type"] == "error"


def test_malformed_json_uses_anthropic_error_shape(service: Service) -> None:
    answer = service.gateway.call("POST", MESSAGES, b"{", key=service.key)
    assert answer.status == 400 and answer.json()["type"] == "error"


def test_failed_stream_ends_with_error_event(client: anthropic.Anthropic, service: Service) -> None:
    script(service.engine, error_after=3)
    events = stream(service)
    assert events[-1][0] == "error" and "scripted error line" in events[-1][1]["error"]["message"]
    with pytest.raises(anthropic.APIStatusError, match="scripted error line"):
        with client.messages.stream(model="tiny", max_tokens=9, messages=[USER]) as broken:
            broken.until_done()
