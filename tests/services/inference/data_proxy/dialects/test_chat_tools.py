"""Tools and reasoning in chat completions: the official client, unchanged, and what cannot be had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.services.inference.data_proxy.dialects.talks import CALL, ROME, THOUGHT, TWO_CALLS, WEATHER, prompts, sampled
from tests.services.inference.running_service import Service
from tests.services.processes import chat_text, script

TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
USER: Any = {"role": "user", "content": "How is Rome?"}


def deltas(events: list[Any]) -> list[dict[str, Any]]:
    chunks = [event["choices"][0] for event in events if isinstance(event, dict) and event.get("choices")]
    return [chunk["delta"] for chunk in chunks if chunk["delta"]]


def test_a_conversation_with_tools(client: openai.OpenAI, service: Service, talking_tokenizer: Path) -> None:
    script(service.engine, text=f"{THOUGHT}I look.\n{TWO_CALLS}")
    first = client.chat.completions.create(model="tiny", messages=[USER], tools=TOOLS)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls" and message.content == "I look."
    assert message.reasoning_content == "The user wants\nthe weather."  # type: ignore[attr-defined]
    assert message.tool_calls is not None
    calls = [(call.type, call.function.name, call.function.arguments) for call in message.tool_calls]  # type: ignore[union-attr]
    assert calls == [("function", "get_weather", ROME), ("function", "now", "{}")]
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == 2 and all(each.startswith("call_") for each in ids)
    assert first.usage is not None and first.usage.completion_tokens_details is not None
    assert 0 < (first.usage.completion_tokens_details.reasoning_tokens or 0) < first.usage.completion_tokens

    script(service.engine, text="Sunny.")
    results: Any = [{"role": "tool", "tool_call_id": each, "content": "sun"} for each in ids]
    second = client.chat.completions.create(model="tiny", messages=[USER, message, *results], tools=TOOLS)  # type: ignore[list-item]
    assert second.choices[0].message.content == "Sunny." and second.choices[0].finish_reason == "stop"
    assert second.choices[0].message.tool_calls is None

    before, after = prompts(service, talking_tokenizer)
    reply = f"{THOUGHT}I look.\n{TWO_CALLS}<|im_end|>\n"
    assert after.startswith(before + reply)  # what the model wrote comes back to it token for token
    assert after.count("<tool_response>\nsun\n</tool_response>") == 2


def test_a_streamed_conversation_with_tools(client: openai.OpenAI, service: Service) -> None:
    script(service.engine, text=f"{THOUGHT}I look.\n{TWO_CALLS}")
    with client.chat.completions.stream(model="tiny", messages=[USER], tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    message = final.choices[0].message
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls or []] == [
        ("get_weather", ROME), ("now", "{}"),
    ]  # fmt: skip
    assert message.content == "I look." and final.choices[0].finish_reason == "tool_calls"


def test_streamed_deltas_have_the_name_first_then_the_arguments(service: Service) -> None:
    script(service.engine, text=f"{THOUGHT}Hm.\n{CALL}")
    stream = service.stream_chat(tools=TOOLS)
    events = list(stream.events())
    assert events[-1] == "[DONE]" and chat_text(events) == "Hm."
    reply = deltas(events)
    assert reply[0] == {"role": "assistant", "content": ""}
    assert "".join(each.get("reasoning_content", "") for each in reply) == "The user wants\nthe weather."
    calls = [each["tool_calls"][0] for each in reply if "tool_calls" in each]
    assert calls[0]["function"] == {"name": "get_weather", "arguments": ""} and calls[0]["id"] and len(calls) > 1
    assert all(set(call) == {"index", "function"} and call["index"] == 0 for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == ROME
    assert "tool_call" not in json.dumps([each.get("content") for each in reply])


@pytest.mark.parametrize("flush", [1, 3, 7, 1000])
def test_streamed_reply_is_independent_of_engine_chunks(service: Service, flush: int) -> None:
    script(service.engine, text=f"{THOUGHT}Hm.\n{TWO_CALLS}", flush=flush)
    reply = deltas(list(service.stream_chat(tools=TOOLS, logprobs=True, return_token_ids=True).events()))
    names = [each["tool_calls"][0]["function"].get("name") for each in reply if "tool_calls" in each]
    assert [name for name in names if name] == ["get_weather", "now"]
    arguments = [each["tool_calls"][0]["function"]["arguments"] for each in reply if "tool_calls" in each]
    assert "".join(arguments) == ROME + "{}"


def test_logprobs_and_token_ids_are_complete_beside_calls(service: Service) -> None:
    script(service.engine, text=f"{THOUGHT}Hm.\n{CALL}")
    whole = service.chat(tools=TOOLS, logprobs=True, return_token_ids=True).json()
    events = list(service.stream_chat(tools=TOOLS, logprobs=True, return_token_ids=True).events())[:-1]
    choices = [event["choices"][0] for event in events if event["choices"]]
    streamed = [token for choice in choices for token in choice.get("token_ids", [])]
    assert streamed == whole["choices"][0]["token_ids"]
    assert len(streamed) == whole["usage"]["completion_tokens"]
    assert sum(len((choice["logprobs"] or {"content": []})["content"]) for choice in choices) == len(streamed)


def test_choices_are_parsed_separately(service: Service) -> None:
    script(service.engine, text=CALL)
    choices = service.chat(tools=TOOLS, n=2).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls"] * 2
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in choices}
    assert len(ids) == 2


def test_tool_choice_none_leaves_text_unparsed(service: Service, talking_tokenizer: Path) -> None:
    script(service.engine, text=CALL)
    choice = service.chat(tools=TOOLS, tool_choice="none").json()["choices"][0]
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
    assert "# Tools" not in prompts(service, talking_tokenizer)[0]


def test_calls_without_tools_are_text(service: Service) -> None:
    script(service.engine, text=CALL)
    assert service.chat().json()["choices"][0]["message"]["content"] == CALL


def test_call_cut_by_length_keeps_partial_arguments(service: Service) -> None:
    script(service.engine, text=CALL)
    choice = service.chat(tools=TOOLS, max_tokens=60).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert arguments and ROME.startswith(arguments) and arguments != ROME


def test_named_tool_choice_begins_the_call_for_the_model(service: Service, talking_tokenizer: Path) -> None:
    script(service.engine, text=f" {ROME}}}\n</tool_call>")
    choice = service.chat(tools=TOOLS, tool_choice=NAMED).json()["choices"][0]
    call = choice["message"]["tool_calls"][0]["function"]
    assert call == {"name": "get_weather", "arguments": ROME} and choice["finish_reason"] == "tool_calls"
    assert prompts(service, talking_tokenizer)[0].endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments":'
    )


def test_named_tool_choice_streams_the_name_at_once(service: Service) -> None:
    script(service.engine, text=f" {ROME}}}\n</tool_call>")
    reply = deltas(list(service.stream_chat(tools=TOOLS, tool_choice=NAMED).events()))
    calls = [each["tool_calls"][0] for each in reply if "tool_calls" in each]
    assert calls[0]["function"]["name"] == "get_weather"
    assert "".join(call["function"]["arguments"] for call in calls) == ROME


def test_required_tool_choice_lets_model_choose_tool(service: Service, talking_tokenizer: Path) -> None:
    script(service.engine, text=' "now", "arguments": {}}\n</tool_call>')
    choice = service.chat(tools=TOOLS, tool_choice="required").json()["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]
    assert prompts(service, talking_tokenizer)[0].endswith('<tool_call>\n{"name":')


def test_required_with_single_tool_fills_in_its_name(service: Service, talking_tokenizer: Path) -> None:
    script(service.engine, text=" {}}\n</tool_call>")
    service.chat(tools=TOOLS[1:], tool_choice="required")
    assert prompts(service, talking_tokenizer)[0].endswith('{"name": "now", "arguments":')


def test_a_forced_call_closes_reasoning_first(service: Service, talking_tokenizer: Path) -> None:
    script(service.engine, text=" {}}\n</tool_call>")
    answer = service.chat(tools=TOOLS, tool_choice=NAMED, chat_template_kwargs={"think_first": True})
    assert "<think>\n\n</think>\n\n<tool_call>" in prompts(service, talking_tokenizer)[0]
    assert answer.json()["choices"][0]["message"]["tool_calls"]


def test_reasoning_opened_by_prompt_is_reasoning(service: Service) -> None:
    script(service.engine, text=f"Hm.\n</think>\n\n{CALL}")
    message = service.chat(tools=TOOLS, chat_template_kwargs={"think_first": True}).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm." and message["content"] is None and len(message["tool_calls"]) == 1


def test_allowed_tools_are_the_ones_in_the_prompt(service: Service, talking_tokenizer: Path) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
    service.chat(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    prompt = prompts(service, talking_tokenizer)[0]
    assert '"now"' in prompt and "get_weather" not in prompt


def test_parallel_tool_calls_false_stops_after_first_call(service: Service) -> None:
    script(service.engine, text=TWO_CALLS)
    answer = service.chat(tools=TOOLS, parallel_tool_calls=False).json()
    choice = answer["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    assert choice["finish_reason"] == "tool_calls"
    script(service.engine, text=CALL)
    alone = service.chat(tools=TOOLS, parallel_tool_calls=True).json()
    assert answer["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"] - 1  # but for the end token


def test_a_last_message_of_the_assistant_is_continued(service: Service, talking_tokenizer: Path) -> None:
    messages = [USER, {"role": "assistant", "content": "It is "}]
    answer = service.chat(messages=messages, continue_final_message=True)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello there, friend!"
    assert prompts(service, talking_tokenizer)[0].endswith("<|im_start|>assistant\nIt is ")
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert service.chat(**both).json()["error"]["param"] == "add_generation_prompt"
    assert service.chat(**{**both, "add_generation_prompt": False}).status == 200


def test_stop_strings_apply_before_parsing(service: Service) -> None:
    script(service.engine, text=f"Hm.\n{CALL}")
    choice = service.chat(tools=TOOLS, stop=["<tool_call>"]).json()["choices"][0]
    assert choice["message"]["content"] == "Hm.\n" and choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 7}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_rejects_invalid_field_by_name(service: Service, body: dict[str, Any], param: str) -> None:
    answer = service.chat(**body)
    assert answer.status == 400 and answer.json()["error"]["param"] == param


def test_sampling_fields_reach_engine_with_tools(service: Service) -> None:
    service.chat(tools=TOOLS, temperature=0.5)
    assert sampled(service)["temperature"] == 0.5


# Custom tools, whose input is a text.

GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /x/"}}
PATCH: Any = {"type": "custom", "custom": {"name": "patch", "description": "Edits a file.", "format": GRAMMAR}}
INPUT = "*** Begin\n+a"
PATCH_CALL = f'<tool_call>\n{{"name": "patch", "arguments": {json.dumps({"input": INPUT})}}}\n</tool_call>'


def test_custom_tool_call_and_result_round_trip(
    client: openai.OpenAI, service: Service, talking_tokenizer: Path
) -> None:
    script(service.engine, text=f"{CALL}\n{PATCH_CALL}")
    tools = [*TOOLS, PATCH]
    first = client.chat.completions.create(model="tiny", messages=[USER], tools=tools)
    message = first.choices[0].message
    plain, custom = calls = message.tool_calls or []
    assert plain.type == "function" and plain.function.arguments == ROME
    assert custom.type == "custom" and (custom.custom.name, custom.custom.input) == ("patch", INPUT)

    script(service.engine, text="Done.")
    results: Any = [{"role": "tool", "tool_call_id": each.id, "content": "ok"} for each in calls]
    second = client.chat.completions.create(model="tiny", messages=[USER, message, *results], tools=tools)  # type: ignore[list-item]
    assert second.choices[0].message.content == "Done."
    before, after = prompts(service, talking_tokenizer)
    assert after.startswith(before + f"{CALL}\n{PATCH_CALL}<|im_end|>\n")
    assert "The input follows this lark grammar:" in before


@pytest.mark.parametrize("flush", [1, 7, 1000])
def test_streamed_custom_call_sends_name_then_input(service: Service, flush: int) -> None:
    script(service.engine, text=f"{CALL}\n{PATCH_CALL}", flush=flush)
    reply = deltas(list(service.stream_chat(tools=[*TOOLS, PATCH], logprobs=True).events()))
    calls = [each["tool_calls"][0] for each in reply if "tool_calls" in each]
    custom = [call for call in calls if call["index"] == 1]
    assert custom[0].pop("id").startswith("call_")
    assert custom == [
        {"index": 1, "type": "custom", "custom": {"name": "patch", "input": ""}},
        {"index": 1, "custom": {"input": INPUT}},
    ]


def test_truncated_custom_call_keeps_partial_input(service: Service) -> None:
    script(service.engine, text=PATCH_CALL)
    asked = {"tools": [PATCH], "max_tokens": 60}
    choice = service.chat(**asked).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    script(service.engine, text=PATCH_CALL)
    reply = deltas(list(service.stream_chat(**asked).events()))
    inputs = [each["tool_calls"][0]["custom"]["input"] for each in reply if "tool_calls" in each]
    assert "".join(inputs) == call["custom"]["input"] != ""


def test_forced_custom_tool_call_is_prefilled(service: Service, talking_tokenizer: Path) -> None:
    choice = {"type": "custom", "custom": {"name": "patch"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [choice]}}
    for forced in (choice, allowed):
        script(service.engine, text=f" {json.dumps({'input': INPUT})}}}\n</tool_call>")
        answer = service.chat(tools=[*TOOLS, PATCH], tool_choice=forced).json()["choices"][0]
        assert answer["message"]["tool_calls"][0]["custom"] == {"name": "patch", "input": INPUT}
    assert prompts(service, talking_tokenizer)[0].endswith('{"name": "patch", "arguments":')
