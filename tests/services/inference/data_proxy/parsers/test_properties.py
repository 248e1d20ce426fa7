"""What holds for every format: cuts make no difference, and what a model writes is read as it meant it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from areal.services.inference.data_proxy.parsers.reader import ReasoningFormat
from areal.services.inference.data_proxy.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from tests.services.inference.data_proxy.parsers.reading import (
    OTHER_WRITERS,
    WRITERS,
    Call,
    calls_of,
    cut,
    new_reader,
    read,
)

FORMATS = sorted(form.name for form in TOOL_FORMATS)
PAIRS: list[tuple[str, Any]] = [*WRITERS.items(), *OTHER_WRITERS]

# No line breaks at the edges of a text value, and no tags in it: there the XML formats are ambiguous by themselves.
plain = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="<>"), max_size=12)
values = st.fixed_dictionaries(
    {},
    optional={
        "city": plain,
        "days": st.integers(-99, 99),
        "exact": st.booleans(),
        "where": st.dictionaries(st.sampled_from("ab"), plain | st.none() | st.lists(st.integers(0, 9)), max_size=2),
    },
)
some_calls = st.lists(
    st.one_of(st.tuples(st.just("get_weather"), values), st.just(("now", {}))), min_size=1, max_size=3
)
places = st.lists(st.integers(0, 10_000), max_size=8)
snippets = st.lists(
    st.sampled_from(
        [
            "<tool_call>", "</tool_call>", '{"name": "get_weather", "arguments": ', '{"city": "Rome"}', "}", "{", '"',
            "\\", "[", "]", "get_weather", "now", "(", ")", "city=", "'x'", ",", ";", " ", "\n", "<function=now>",
            "</function>", "<parameter=city>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
            "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<", "</", "<tool", "<|python_tag|>", "```json\n", "Hello",
            "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "a < b",
            '"name"', ":", "null", "é", "<|channel|>", "analysis", "<|message|>", "<|end|>", " to=functions.now",
            "<|tool_call>", "call:now{", "<tool_call|>", '<|"|>', "<|tool_call_start|>", "<|tool_call_end|>", " to=now",
            "<|start|>", "<|eom|>", "<atem:function_calls>", '<atem:invoke name="now">', "</atem:invoke>",
            "<|tools_prefix|>", "<|tools_suffix|>", '{"now": {', "<|function_call|>", "<tool_calls:opensource>",
            "<tool_call:opensource>", "<tool_sep:opensource>", "<arg_key:opensource>", "<function name=",
            "<param name=",
            "<![CDATA[", "]]>", "</param>", "]<]minimax[>[<tool_call>", ']<]minimax[>[<invoke name="now">',
            "]<]minimax[>[<where>", "]<]minimax[>[</where>", "]<]minimax[>[</invoke>", "</tool_call:opensource>",
        ]
    ),
    max_size=14,
).map("".join)  # fmt: skip


@pytest.mark.parametrize(("name", "write"), PAIRS, ids=[f"{name}-{index}" for index, (name, _) in enumerate(PAIRS)])
@settings(max_examples=40, deadline=None)
@given(calls=some_calls, places=places)
def test_calls_written_by_a_model_are_read_back(name: str, write: Any, calls: list[Call], places: list[int]) -> None:
    # without a schema, MiniMax-M3 writes the text "1" like the number, and an empty list like an empty text
    assume(name != "minimax_m3" or not any("where" in arguments for _, arguments in calls))
    reply = read(new_reader(name), cut(write(calls), places))
    assert calls_of(reply) == calls
    assert reply.content == ""


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=120, deadline=None)
@given(text=snippets, places=places)
def test_tool_parsing_is_independent_of_chunking(name: str, text: str, places: list[int]) -> None:
    whole = read(new_reader(name), [text])
    assert read(new_reader(name), cut(text, places)) == whole
    assert read(new_reader(name), list(text)) == whole


@pytest.mark.parametrize("name", sorted(REASONING_FORMATS))
@pytest.mark.parametrize("inside", [False, True])
@settings(max_examples=60, deadline=None)
@given(text=snippets, places=places)
def test_reasoning_parsing_is_independent_of_chunking(name: str, inside: bool, text: str, places: list[int]) -> None:
    form: ReasoningFormat = REASONING_FORMATS[name]
    text = text.replace("<think>", form.start).replace("</think>", form.end)
    whole = read(new_reader("hermes", form, inside=inside), [text])
    assert read(new_reader("hermes", form, inside=inside), cut(text, places)) == whole


@settings(max_examples=200, deadline=None)
@given(text=snippets)
def test_without_a_format_the_text_is_the_content(text: str) -> None:
    assert read(new_reader(None), list(text)).content == text


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[{f"), max_size=60))
def test_text_without_markup_is_all_content(name: str, text: str) -> None:
    assert read(new_reader(name), list(text)).content == text


@pytest.mark.parametrize(("name", "write"), PAIRS, ids=[f"{name}-{index}" for index, (name, _) in enumerate(PAIRS)])
def test_call_streams_before_it_completes(name: str, write: Any) -> None:
    if write is WRITERS["mistral"]:
        pytest.skip("a call begins with its id, which comes last here")
    text = write([("get_weather", {"days": 1, "city": "x" * 500})])
    begun = str(new_reader(name).push(text[:300]))
    assert "get_weather" in begun
    assert name in ("pythonic", "lfm2", "olmo3") or "xxxxxxxxxx" in begun  # there, literals are converted whole
