"""Bodies of the dialects, and the chats that they are."""

from __future__ import annotations

from typing import Any

import pytest

from areal.services.inference.data_proxy import anthropic, responses
from areal.services.inference.data_proxy.fields import Fields

CALL = {"id": "t1", "type": "function", "function": {"name": "now", "arguments": '{"zone":"é"}'}}
RESULT = {"role": "tool", "tool_call_id": "t1", "content": "noon"}
HI = {"role": "user", "content": "Hi"}


def text(message: str) -> dict[str, str]:
    return {"type": "text", "text": message}


def use(call_id: str = "t1") -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "now", "input": {"zone": "é"}}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content, **more}


def chat_of_anthropic(**body: Any) -> dict[str, Any]:
    translation = anthropic.translate(
        Fields({"max_tokens": 9, "messages": [HI], **body}), lambda name: name == "enable_thinking"
    )
    return {name: value for name, value in translation.chat.items() if value not in (None, [], False)}


def chat_of_responses(**body: Any) -> dict[str, Any]:
    translation = responses.translate(Fields({"input": "Hi", **body}), lambda name: name == "reasoning_effort")
    return {name: value for name, value in translation.chat.items() if value not in (None, [], {}, False)}


@pytest.mark.parametrize(
    ("messages", "chat"),
    [
        ([HI], [HI]),
        ([{"role": "user", "content": [text("a"), text("b")]}], [{"role": "user", "content": "a\nb"}]),
        ([HI, HI], [{"role": "user", "content": "Hi\nHi"}]),
        (
            [HI, {"role": "assistant", "content": [text("a"), use()]}, {"role": "user", "content": [result("noon")]}],
            [HI, {"role": "assistant", "content": "a", "tool_calls": [CALL]}, RESULT],
        ),
        (
            [
                HI,
                {"role": "assistant", "content": [use()]},
                {"role": "user", "content": [text("b"), result([text("noon")])]},
            ],
            [HI, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, {"role": "user", "content": "b"}],
        ),
        (
            [HI, {"role": "assistant", "content": [use()]}, {"role": "user", "content": [result("x", is_error=True)]}],
            [
                HI,
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {**RESULT, "content": "x", "is_error": True},
            ],
        ),
        (
            [
                HI,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm", "signature": ""},
                        {"type": "redacted_thinking", "data": "?"},
                        text("a"),
                        text("b"),
                    ],
                },
                HI,
            ],
            [HI, {"role": "assistant", "content": "ab", "reasoning_content": "Hm"}, HI],
        ),
    ],
)
def test_anthropic_messages_translate_to_chat(messages: list[Any], chat: list[Any]) -> None:
    assert chat_of_anthropic(messages=messages)["messages"] == chat


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"stop_sequences": ["a"]}, {"stop": ["a"]}),
        ({"top_k": 5, "top_p": 0.5, "temperature": 0.2}, {"top_k": 5, "top_p": 0.5, "temperature": 0.2}),
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {"tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True}},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"thinking": {"type": "adaptive"}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"metadata": {"user_id": "u"}}, {"metadata": {"user_id": "u"}}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}},
                }
            },
        ),
        (
            {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
                ]
            },
        ),
        ({"messages": [HI, {"role": "assistant", "content": "It"}]}, {"continue_final_message": True}),
    ],
)
def test_anthropic_fields_translate_to_chat(body: dict[str, Any], chat: dict[str, Any]) -> None:
    assert chat_of_anthropic(**body).items() >= chat.items()


def item(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, **more}


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"input": "Hi"}, [HI]),
        ({"input": [HI], "instructions": "Be brief."}, [{"role": "system", "content": "Be brief."}, HI]),
        (
            {"input": [item("message", role="user", content=[item("input_text", text=each) for each in "ab"])]},
            [{"role": "user", "content": "a\nb"}],
        ),
        (
            {
                "input": [
                    HI,
                    item("reasoning", id="rs", summary=[], content=[item("reasoning_text", text="Hm")]),
                    item("message", role="assistant", content=[item("output_text", text=each) for each in "ab"]),
                    item("function_call", call_id="t1", name="now", arguments='{"zone":"é"}'),
                    item("function_call_output", call_id="t1", output="noon"),
                ]
            },
            [HI, {"role": "assistant", "content": "ab", "reasoning_content": "Hm", "tool_calls": [CALL]}, RESULT],
        ),
        (
            {
                "input": [
                    HI,
                    item("function_call", call_id="t1", name="now", arguments='{"zone":"é"}'),
                    item("function_call_output", call_id="t1", output=[item("input_text", text="noon")]),
                    item("message", role="assistant", content="Noon."),
                ]
            },
            [
                HI,
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                RESULT,
                {"role": "assistant", "content": "Noon."},
            ],
        ),
    ],
)
def test_response_items_translate_to_chat(body: dict[str, Any], chat: list[Any]) -> None:
    assert chat_of_responses(**body)["messages"] == chat


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"max_output_tokens": 7}, {"max_tokens": 7}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}}},
        ),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True}]},
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}]},
        ),
        (
            {"tool_choice": {"type": "function", "name": "f"}},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
    ],
)
def test_response_fields_translate_to_chat(body: dict[str, Any], chat: dict[str, Any]) -> None:
    assert chat_of_responses(**body).items() >= chat.items()
