"""Every kind of message, input item, content block, tool and tool choice that the APIs document, made from the types of
OpenAI's and Anthropic's SDKs: with its required fields, with every optional field, and with each optional field's value
that asks for nothing.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NotRequired, Required

import pytest
from anthropic.types import content_block_param, tool_choice_param, tool_union_param
from openai.types.chat import (
    chat_completion_message_param,
    chat_completion_tool_choice_option_param,
    chat_completion_tool_union_param,
)
from openai.types.responses import response_input_item_param, tool_param
from typing_extensions import is_typeddict

from tests.services.inference.data_proxy.dialects.talks import WEATHER
from tests.services.inference.data_proxy.dialects.test_documented_fields import ASKED, ignored
from tests.services.inference.running_service import Service

NO_VALUE: Any = object()


def bare(hint: Any) -> Any:
    """The type in ``Required`` and ``NotRequired``."""
    return bare(typing.get_args(hint)[0]) if typing.get_origin(hint) in (Required, NotRequired) else hint


def members(hint: Any) -> Iterator[Any]:
    """The types of a union, at every depth; another type is its own one member."""
    if typing.get_origin(bare(hint)) not in (typing.Union, types.UnionType):
        yield bare(hint)
        return
    for argument in typing.get_args(bare(hint)):
        yield from members(argument)


def fields_of(kind: Any) -> tuple[dict[str, Any], set[str]]:
    """The types of an object's fields, and which are required (``__required_keys__`` does not know it where annotations
    are texts)."""
    hints = typing.get_type_hints(kind, include_extras=True)
    ways = {name: typing.get_origin(hint) for name, hint in hints.items()}
    required = {name for name, way in ways.items() if way is Required or (kind.__total__ and way is not NotRequired)}
    return {name: bare(hint) for name, hint in hints.items()}, required


def is_list(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Iterable) and len(typing.get_args(hint)) == 1


def sample(hint: Any, optional: bool = False, depth: int = 0) -> Any:
    """A value of this type; ``optional``: with the optional fields of objects."""
    kinds = [kind for kind in members(hint) if kind is not type(None)]
    kind = str if str in kinds else kinds[0]
    if is_typeddict(kind):
        hints, required = fields_of(kind)
        wanted = hints if optional and depth < 3 else required
        return {name: sample(hints[name], optional, depth + 1) for name in hints if name in wanted}
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)[0]
    if is_list(kind):
        return [sample(typing.get_args(kind)[0], optional, depth + 1)]
    return {str: "x", int: 1, float: 1.0, bool: True}.get(kind, {})


def nothing(hint: Any) -> Any:
    """The value of this type that asks for nothing; NO_VALUE where there is none."""
    kinds = list(members(hint))
    if type(None) in kinds:
        return None
    if any(map(is_list, kinds)):
        return []
    return False if bool in kinds else NO_VALUE


def variants(kind: Any) -> list[Any]:
    """Values of this type: the least one, one with each optional field, and one with those that ask for nothing."""
    if not is_typeddict(kind):
        return list(typing.get_args(kind))
    hints, required = fields_of(kind)
    least = {name: sample(hints[name]) for name in hints if name in required or name == "type"}
    empty = {name: nothing(hints[name]) for name in hints if name not in least}
    return [
        least,
        sample(kind, optional=True),
        {**least, **{name: value for name, value in empty.items() if value is not NO_VALUE}},
    ]


class Family(NamedTuple):
    """``place``: puts a value into a body. ``taken``: the types that have an effect; others are named in
    ``x-areal-ignored`` below ``named``. ``refused``: types that a request cannot do without, and what the error
    names. ``more``: fields that a value must have, though the SDK's type lets them be absent."""

    path: str
    union: Any
    place: Callable[[Any], dict[str, Any]]
    taken: tuple[str, ...] = ()
    named: str = ""
    refused: Mapping[str, str] = {}
    more: Mapping[str, Any] = {}


CHAT_FUNCTION = {"type": "function", "function": {"name": "x", "parameters": WEATHER}}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "x", "input": {}}]}
CHAT_CALL = {"role": "assistant", "tool_calls": [{"id": "x", **CHAT_FUNCTION}]}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}
OF_USERS = ("tool_result", "image", "document", "search_result", "container_upload")


def in_blocks(block: dict[str, Any]) -> dict[str, Any]:
    if block["type"] in OF_USERS:
        messages = [*ASKED, CALL, {"role": "user", "content": [block]}]
    else:
        after = [RESULT] if block["type"] == "tool_use" else ASKED
        messages = [*ASKED, {"role": "assistant", "content": [block]}, *after]
    return {"max_tokens": 9, "messages": messages}


def with_choice(choice: Any) -> dict[str, Any]:
    tool = {"type": "custom", "custom": {"name": "x"}} if choice_is_custom(choice) else CHAT_FUNCTION
    if isinstance(choice, dict) and "allowed_tools" in choice:
        choice = {**choice, "allowed_tools": {**choice["allowed_tools"], "tools": [CHAT_FUNCTION]}}
    return {"messages": ASKED, "tools": [tool], "tool_choice": choice}


def choice_is_custom(choice: Any) -> bool:
    return isinstance(choice, dict) and choice["type"] == "custom"


TEXT_ONLY = "this model takes text only"
FAMILIES = {
    "input": Family(
        "/v1/responses",
        response_input_item_param.ResponseInputItemParam,
        lambda item: {"input": [*ASKED, item]},
        (
            *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call"),
            *("custom_tool_call_output", "additional_tools"),
        ),
        "input",
        {"item_reference": "responses are not kept: send the whole conversation as input (with store: false"},
    ),
    "tools": Family(
        "/v1/responses",
        tool_param.ToolParam,
        lambda tool: {"input": "Hello", "tools": [tool]},
        ("function", "custom", "namespace"),
        "tools",
    ),
    "messages": Family(
        "/v1/chat/completions",
        chat_completion_message_param.ChatCompletionMessageParam,
        lambda message: {"messages": [*ASKED, CHAT_CALL, message]},
        more={"content": "x"},
    ),
    "chat-tools": Family(
        "/v1/chat/completions",
        chat_completion_tool_union_param.ChatCompletionToolUnionParam,
        lambda tool: {"messages": ASKED, "tools": [tool]},
        ("function", "custom"),
    ),
    "chat-choice": Family(
        "/v1/chat/completions",
        chat_completion_tool_choice_option_param.ChatCompletionToolChoiceOptionParam,
        with_choice,
        ("function", "custom", "allowed_tools"),
    ),
    "blocks": Family(
        "/v1/messages",
        content_block_param.ContentBlockParam,
        in_blocks,
        ("text", "thinking", "tool_use", "tool_result"),
        "messages",
        dict.fromkeys(("image", "document", "search_result", "container_upload"), TEXT_ONLY),
    ),
    "message-tools": Family(
        "/v1/messages",
        tool_union_param.ToolUnionParam,
        lambda tool: {"max_tokens": 9, "messages": ASKED, "tools": [tool]},
        ("custom",),
        "tools",
    ),
    "message-choice": Family(
        "/v1/messages",
        tool_choice_param.ToolChoiceParam,
        lambda choice: {
            "max_tokens": 9,
            "messages": ASKED,
            "tools": [{"name": "x", "input_schema": WEATHER}],
            "tool_choice": choice,
        },
        ("auto", "any", "tool", "none"),
    ),
}
CASES = [
    pytest.param(family, kind, id=f"{name}-{getattr(kind, '__name__', 'values')}")
    for name, family in FAMILIES.items()
    for kind in members(family.union)
]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_item_is_taken_ignored_or_refused_per_family(service: Service, family: Family, kind: Any) -> None:
    for value in variants(kind):
        if isinstance(value, dict):
            value = {**value, **{key: given for key, given in family.more.items() if value.get(key) is None}}
        name = value.get("type", "") if isinstance(value, dict) else ""
        body = {"model": "tiny", **family.place(value)}
        answer = service.gateway.call("POST", family.path, body, key=service.key)
        if name in family.refused:
            assert answer.status == 400 and family.refused[name] in answer.json()["error"]["message"], answer.body
            continue
        assert answer.status == 200, (value, answer.body)
        if family.named:
            named = [each for each in ignored(answer) if each.split(".")[0] == family.named]
            assert named == ([] if name in family.taken else [f"{family.named}.{name}"]), value
