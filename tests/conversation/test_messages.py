from __future__ import annotations

import json
from typing import Any

import pytest

from areal.conversation import ConversationError, field_as_given, normalise

USER = {"role": "user", "content": "Weather in Oslo?"}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def answer(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call(arguments)], **more}


def arguments_of(value: Any) -> Any:
    return normalise([USER, answer(value)]).messages[1]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('{"city": "Oslo"}', {"city": "Oslo"}),
        ({"city": "Oslo"}, {"city": "Oslo"}),
        ("", {}),
        (" \n", {}),
        ("null", {}),
        (None, {}),
        ('{"city": "Os', '{"city": "Os'),
        ("[1]", "[1]"),
        ('"Oslo"', '"Oslo"'),
        ('{"x": NaN}', '{"x": NaN}'),
        ('{"x": "\\ud800"}', '{"x": "\\ud800"}'),
        ('{"x": 100000000000000000001}', {"x": 100000000000000000001}),
    ],
)
def test_arguments_become_mapping_or_stay_model_text(value: object, expected: object) -> None:
    assert arguments_of(value) == expected


def test_nested_nulls_become_absent() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "enum": ["a", None]}, "query": None}}
    tool = {"type": "function", "function": {"name": "weather", "description": None, "parameters": schema}}
    found = normalise([{**USER, "name": None, "tool_calls": None}, answer({"city": {"query": None}})], [tool])
    assert found.messages[0] == USER
    assert found.messages[1] == {"role": "assistant", "tool_calls": [call({"city": {}})]}
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    function["parameters"]["properties"]["city"]["enum"] = ["a", None]  # type: ignore[index]
    assert found.tools == ({"type": "function", "function": function},)


def test_tools_as_json_text_are_parsed() -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert normalise([USER], json.dumps(tools)) == normalise([USER], tools)
    assert normalise([USER], "") == normalise([USER], []) == normalise([USER], "null") == normalise([USER])


def test_bare_functions_are_wrapped_as_tools_and_calls() -> None:
    bare = {"name": "weather", "parameters": {"type": "object"}}
    assert normalise([USER], [bare]).tools == ({"type": "function", "function": bare},)
    found = normalise([USER, {"role": "assistant", "tool_calls": [{"id": "1", "name": "weather", "arguments": "{}"}]}])
    function = {"name": "weather", "arguments": {}}
    assert found.messages[1]["tool_calls"] == [{"type": "function", "id": "1", "function": function}]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_field_names_are_unified(name: str) -> None:
    message = {"role": "assistant", "content": "Rain.", name: "Hm."}
    assert normalise([USER, message]).messages[1]["reasoning_content"] == "Hm."


def test_function_call_of_the_older_api_is_a_tool_call() -> None:
    call = {"name": "weather", "arguments": '{"city": "Bern"}'}
    result = {"role": "function", "name": "weather", "content": "Rain"}
    older = [USER, {"role": "assistant", "content": None, "function_call": call}, result, {**result, "name": None}]
    function = {"name": "weather", "arguments": {"city": "Bern"}}
    _, called, *results = normalise(older).messages
    assert called == {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    assert results == [{**result, "role": "tool"}, {"role": "tool", "content": "Rain"}]
    assert normalise([{"role": "function", "content": "Rain"}]).messages == ({"role": "tool", "content": "Rain"},)
    for malformed in ("weather", {"arguments": "{}"}):
        with pytest.raises(ConversationError, match="must be an object with a name") as caught:
            normalise([USER, {"role": "assistant", "content": "So.", "function_call": malformed}])
        assert caught.value.field == "messages[1].function_call"


@pytest.mark.parametrize(
    ("message", "field", "given_as"),
    [
        ({"function_call": {"name": "f"}}, "messages[1].tool_calls[0].function.name", "messages[1].function_call.name"),
        ({"function_call": {"name": "f"}}, "messages[1].tool_calls[0]", "messages[1].function_call"),
        ({"function_call": {"name": "f"}}, "messages[1].content", "messages[1].content"),
        ({"tool_calls": [{}]}, "messages[1].tool_calls[0].function.name", "messages[1].tool_calls[0].function.name"),
        (
            {"function_call": {"name": "f"}, "tool_calls": [{}]},
            "messages[1].tool_calls[0]",
            "messages[1].tool_calls[0]",
        ),
        ({}, "messages[1].tool_calls[0]", "messages[1].tool_calls[0]"),
    ],
)
def test_fault_names_the_field_that_was_given(message: dict[str, Any], field: str, given_as: str) -> None:
    assert field_as_given(field, [USER, message]) == given_as


def test_refusal_without_content_is_the_content() -> None:
    refusal = {"role": "assistant", "content": None, "refusal": "I cannot."}
    assert normalise([USER, refusal]).messages[1] == {"role": "assistant", "content": "I cannot."}


def test_text_parts_of_any_api_are_text_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    expected = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normalise([{"role": "user", "content": parts}]).messages[0]["content"] == expected


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (None, "messages"),
        ("hi", "messages"),
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([USER, {"role": "assistant", "tool_calls": []}], "messages[1].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "content": "x", "tool_calls": 7}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "content": "x", "reasoning": 7}], "messages[0].reasoning_content"),
    ],
)
def test_malformed_messages_are_refused_by_field(messages: object, field: str) -> None:
    with pytest.raises(ConversationError) as caught:
        normalise(messages)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        (7, "tools"),
        ("[", "tools"),
        ({}, "tools"),
        ([7], "tools[0].function"),
        ([{}], "tools[0].function"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"name": "weather", "input_schema": {"type": "object"}}], "tools[0].input_schema"),
        ([{"name": "weather", "inputSchema": {"type": "object"}}], "tools[0].inputSchema"),
    ],
)
def test_malformed_tools_are_refused_by_field(tools: object, field: str) -> None:
    with pytest.raises(ConversationError) as caught:
        normalise([USER], tools)
    assert caught.value.field == field


def test_tools_nested_too_deep_are_an_error() -> None:
    with pytest.raises(ConversationError, match="tools must be a list"):
        normalise([{"role": "user", "content": "x"}], "[" * 200_000)
