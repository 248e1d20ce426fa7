"""Calls that a real model's chat template writes are read back as they were, by the parser that the template shows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from areal.conversation import ConversationError, in_common, normalise
from areal.dataset.tokenizers import chat_of
from areal.services.inference.data_proxy.parsers.reader import ResponseReader, Tools
from areal.services.inference.data_proxy.parsers.registry import detect_tool_format, reasoning_format
from tests.conversation.families import families
from tests.services.inference.data_proxy.parsers.reading import TOOLS, calls_of, cut, read
from tests.services.inference.data_proxy.parsers.test_properties import places, plain

SHOWN = [name for name, family in families().items() if family.takes_tools and detect_tool_format(family.source)]
DESCRIBED = [
    {**tool, "function": {"description": "x", "parameters": {"type": "object"}, **tool["function"]}} for tool in TOOLS
]  # as some templates want them
NO_FORMAT = {"lfm2", "lfm2_training"}  # they write no calls
ONE_CALL = ("llama3", "gptoss")  # of several, the template refuses or leaves out the others
NO_ESCAPES = ("lfm2_2_5", "lfm2_2_5_vl")  # a text with a quotation mark or a backslash is ambiguous

nested = st.recursive(
    plain | st.integers(-99, 99) | st.booleans(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "city": plain,
        "days": st.integers(-99, 99),
        "exact": st.booleans(),
        "where": st.dictionaries(st.sampled_from("ab"), nested, max_size=2),
    },
)


def test_every_tool_template_is_detected() -> None:
    assert set(SHOWN) | NO_FORMAT == {name for name, family in families().items() if family.takes_tools}


@pytest.mark.parametrize("name", SHOWN)
@settings(max_examples=settings().max_examples // 5, deadline=None)
@given(given=st.lists(arguments, min_size=1, max_size=2), content=st.just("") | plain.map(str.strip), places=places)
def test_calls_written_by_template_are_parsed_back(
    name: str, given: list[dict[str, Any]], content: str, places: list[int]
) -> None:
    family = families()[name]
    form, chat = detect_tool_format(family.source), chat_of(family.tokenizer, True)
    assert form is not None
    if name.startswith(ONE_CALL):
        del given[1:]
    content = "" if name.startswith("gptoss") else content  # there it is reasoning
    assume(not name.removesuffix("_training").endswith(NO_ESCAPES) or not set("'\\") & set(json.dumps(given)))
    calls = [
        {"id": f"call{place:05}", "type": "function", "function": {"name": "get_weather", "arguments": each}}
        for place, each in enumerate(given)
    ]
    asked = normalise([{"role": "user", "content": "x"}], DESCRIBED)
    answer = normalise([{"role": "assistant", "content": content, "tool_calls": calls}]).messages[0]
    prompt = chat.template.plain(asked, True)
    try:
        text = chat.template.render(asked.then(answer))
    except ConversationError as error:
        assert error.field == "messages[1].content"  # beside calls, the template has no place for it
        return
    text = text[in_common(text, prompt) :]  # nemotron closes an empty thought at once
    for end in chat.turn_ends(True):
        text = text.partition(chat.decode([end]))[0]
    thoughts = None if form.whole else reasoning_format("qwen3")
    inside = thoughts is not None and thoughts.opened_by(prompt)
    reader = ResponseReader(reasoning=thoughts, inside=inside, parse=form.parse, tools=Tools(TOOLS), new_id=form.new_id)
    found = read(reader, cut(text, places))
    assert calls_of(found) == [("get_weather", each) for each in given]
    assert found.content.strip() == content
