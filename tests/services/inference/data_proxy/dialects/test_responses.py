"""OpenAI's Responses API: the official client, unchanged, against the gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.services.inference.data_proxy.dialects.talks import CALL, ROME, THOUGHT, TWO_CALLS, WEATHER, prompts, sampled
from tests.services.inference.running_service import Service
from tests.services.processes import Answer, script

TOOLS: Any = [
    {"type": "function", "name": "get_weather", "description": "Weather", "parameters": WEATHER, "strict": False},
    {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": False},
]
USER: Any = {"role": "user", "content": "How is Rome?"}


def post(service: Service, **body: Any) -> Answer:
    return service.gateway.call("POST", "/v1/responses", {"model": "tiny", "input": "Hi", **body}, key=service.key)


def stream(service: Service, **body: Any) -> list[dict[str, Any]]:
    events = []
    for block in post(service, stream=True, **body).body.decode().strip().split("\n\n"):
        kind, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    return events


def test_a_conversation_with_tools(client: openai.OpenAI, service: Service, talking_tokenizer: Path) -> None:
    script(service.engine, text=f"{THOUGHT}I look.\n{TWO_CALLS}")
    first = client.responses.create(model="tiny", instructions="Be brief.", input=[USER], tools=TOOLS, store=False)
    assert first.status == "completed" and first.output_text == "I look." and first.id.startswith("resp_")
    thought, message, weather, now = first.output
    assert thought.type == "reasoning" and thought.content is not None
    assert thought.content[0].text == "The user wants\nthe weather."
    assert message.type == "message" and weather.type == "function_call" and now.type == "function_call"
    assert (weather.name, weather.arguments) == ("get_weather", ROME) and now.arguments == "{}"
    assert first.usage is not None and first.usage.output_tokens_details.reasoning_tokens > 0
    assert first.instructions == "Be brief." and len(first.tools) == 2 and first.tool_choice == "auto"

    script(service.engine, text="Sunny.")
    outputs: Any = [
        {"type": "function_call_output", "call_id": weather.call_id, "output": "sun"},
        {"type": "function_call_output", "call_id": now.call_id, "output": [{"type": "input_text", "text": "noon"}]},
    ]
    history: Any = [USER, *(item.to_dict() for item in first.output), *outputs]
    second = client.responses.create(model="tiny", instructions="Be brief.", input=history, tools=TOOLS)
    assert second.output_text == "Sunny."
    before, after = prompts(service, talking_tokenizer)
    assert after.startswith(f"{before}{THOUGHT}I look.\n{TWO_CALLS}<|im_end|>\n")
    assert "<tool_response>\nnoon\n</tool_response>" in after and "<|im_start|>system\nBe brief." in before


def test_a_streamed_conversation_with_tools(client: openai.OpenAI, service: Service) -> None:
    script(service.engine, text=f"{THOUGHT}I look.\n{TWO_CALLS}")
    with client.responses.stream(model="tiny", input="How is Rome?", tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert {"response.reasoning_text.delta", "response.function_call_arguments.done"} <= set(kinds)
    assert final.output_text == "I look." and final.status == "completed"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]


def test_events_come_in_their_sequence(service: Service) -> None:
    script(service.engine, text=f"{THOUGHT}Hm.\n{CALL}")
    events = stream(service, tools=TOOLS)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = [kind for before, kind in zip(["", *kinds], kinds, strict=False) if kind != before]
    part = ["output_item.added", "content_part.added"]
    done = ["content_part.done", "output_item.done"]
    assert once == [
        "created", "in_progress",
        *part, "reasoning_text.delta", "reasoning_text.done", *done,
        *part, "output_text.delta", "output_text.done", *done,
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    finished = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    response = events[-1]["response"]
    assert response["output"] == finished and response["usage"]["output_tokens"] > 0
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2]
    assert [event["item"]["id"] for event in added] == [item["id"] for item in finished]
    assert "".join(event["delta"] for event in events if event["type"].endswith("arguments.delta")) == ROME


@pytest.mark.parametrize("streamed", [False, True])
def test_truncated_answer_is_incomplete(service: Service, streamed: bool) -> None:
    if streamed:
        events = stream(service, max_output_tokens=2)
        assert events[-1]["type"] == "response.incomplete"
        response = events[-1]["response"]
    else:
        response = post(service, max_output_tokens=2).json()
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


def test_truncated_call_is_not_reported_complete(service: Service) -> None:
    script(service.engine, text=CALL)
    for response in (
        post(service, tools=TOOLS, max_output_tokens=60).json(),
        stream(service, tools=TOOLS, max_output_tokens=60)[-1]["response"],
    ):
        (call,) = response["output"]
        assert call["status"] == "incomplete" and call["arguments"] != ROME


@pytest.mark.parametrize(
    ("choice", "end"),
    [
        ("required", '<tool_call>\n{"name":'),
        ({"type": "function", "name": "now"}, '<tool_call>\n{"name": "now", "arguments":'),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]},
            '{"name": "now", "arguments":',
        ),
        ("auto", "<|im_start|>assistant\n"),
    ],
)
def test_tool_choice_is_honoured(service: Service, talking_tokenizer: Path, choice: Any, end: str) -> None:
    answer = post(service, tools=TOOLS, tool_choice=choice)
    assert answer.status == 200 and answer.json()["tool_choice"] == choice
    assert prompts(service, talking_tokenizer)[0].endswith(end)


def test_items_of_one_answer_are_one_message(service: Service, talking_tokenizer: Path) -> None:
    items = [
        USER,
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        {"role": "developer", "content": "Shorter."},
    ]
    assert post(service, input=items).status == 200
    prompt = prompts(service, talking_tokenizer)[0]
    assert prompt.count("<|im_start|>assistant") == 2 and "I look.\n<tool_call>" in prompt
    assert "<|im_start|>system\nShorter." in prompt


def test_sampling_and_ignored_fields(service: Service) -> None:
    answer = post(service, temperature=0.5, max_output_tokens=50, reasoning={"effort": "low"}, wish=1, user="u")
    assert sampled(service)["temperature"] == 0.5 and sampled(service)["max_new_tokens"] == 50
    assert answer.headers["x-areal-ignored"] == "wish, reasoning.effort"


IMAGE = {"type": "input_image", "image_url": "https://a.example/cat.png"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input"),
        ({"input": [{"role": "user", "content": [{**IMAGE, "file_id": "f"}]}]}, "input[0].content[0].file_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": [{"type": "wish"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{"type": 7}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "input"),
        ({"temperature": 3}, "temperature"),
        ({"instructions": 7}, "instructions"),
    ],
)
def test_bad_input_is_refused_by_name(service: Service, body: dict[str, Any], param: str) -> None:
    answer = post(service, **body)
    assert answer.status == 400 and answer.json()["error"]["param"] == param
    assert answer.json()["error"]["request_id"]


def test_errors_map_to_sdk_exceptions(client: openai.OpenAI, service: Service) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="nope", input="Hi")
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model="tiny", input="Hi", previous_response_id="resp_1")
    assert bad.value.code == "unsupported_parameter"


def test_failed_stream_ends_with_error_event(client: openai.OpenAI, service: Service) -> None:
    script(service.engine, error_after=3)
    events = stream(service)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "error" and "scripted error line" in events[-1]["message"]
    with pytest.raises(openai.APIError, match="scripted error line"):
        list(client.responses.create(model="tiny", input="Hi", stream=True))
