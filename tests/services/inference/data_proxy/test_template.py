from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from areal.services.http.errors import ApiError
from areal.services.inference.data_proxy.fields import Fields
from areal.services.inference.data_proxy.template import (
    ChatTemplate,
    TemplateInput,
    check_tools,
    read_messages,
    text_after_answer,
)
from tests.services.inference.data_proxy.dialects.talks import TEMPLATE
from tests.services.tokenizer_folder import CHATML

CHATML_TEMPLATE = ChatTemplate(CHATML, {"eos_token": "<|im_end|>"})
USER = {"role": "user", "content": "hi"}


def test_template_renders_as_the_model_was_trained() -> None:
    assert (
        CHATML_TEMPLATE.render_messages([USER], None, {}) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert CHATML_TEMPLATE.render_messages([USER], None, {"add_generation_prompt": False}).endswith("<|im_end|>\n")


def test_template_rendered_open_ends_with_the_last_message_as_it_was_written() -> None:
    begun = {"role": "assistant", "content": "hi there "}
    assert CHATML_TEMPLATE.render_open([USER, begun], None, {}).endswith("<|im_start|>assistant\nhi there ")
    only = ChatTemplate("{{ messages[0].content }}", {})
    assert only.render_open([USER], None, {}) == "hi", "the text may be all there is"
    with pytest.raises(ApiError, match="does not let the last message be continued"):
        only.render_open([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None, {})


def test_template_variables_reach_it() -> None:
    assert CHATML_TEMPLATE.render_messages([USER], None, {"enable_thinking": False}).endswith("<think></think>")


def test_template_writes_tools_as_plain_json() -> None:
    tools = [{"type": "function", "function": {"name": "f<x>", "description": "a & b é"}}]
    assert '"f<x>", "description": "a & b é"' in CHATML_TEMPLATE.render_messages([USER], tools, {})


def test_template_that_refuses_is_the_callers_mistake() -> None:
    with pytest.raises(ApiError, match="a tool cannot come first") as caught:
        CHATML_TEMPLATE.render_messages([{"role": "tool", "content": "x"}], None, {})
    assert caught.value.status == 400


def test_template_knows_which_variables_it_uses() -> None:
    assert CHATML_TEMPLATE.uses("tools") and not CHATML_TEMPLATE.uses("reasoning_effort")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_template_cannot_reach_into_python(source: str) -> None:
    with pytest.raises(ApiError) as caught:
        ChatTemplate(source, {}).render_messages([USER], None, {})
    assert caught.value.status == 400


def test_template_cannot_change_the_messages() -> None:
    with pytest.raises(ApiError):
        ChatTemplate("{{ messages.append(1) }}", {}).render_messages([USER], None, {})


def test_template_dialect_of_models_is_spoken() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y')|length }}"
    )
    assert ChatTemplate(source, {}).render_messages([USER, USER], None, {}) == "hi4"


def test_messages_with_text_parts_become_text() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert read_messages([message], CHATML_TEMPLATE) == [{"role": "user", "content": "a\nb"}]


def test_messages_of_developers_become_system_where_the_template_knows_no_other() -> None:
    assert read_messages([{"role": "developer", "content": "x"}], CHATML_TEMPLATE)[0]["role"] == "system"
    knowing = ChatTemplate("{{ 'developer' }}", {})
    assert read_messages([{"role": "developer", "content": "x"}], knowing)[0]["role"] == "developer"


def test_messages_tool_calls_reach_the_template_with_decoded_arguments() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = read_messages([{"role": "assistant", "content": None, "tool_calls": [call]}], CHATML_TEMPLATE)[0]
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert message["content"] == ""


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("hi", "messages"),
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "content": "x", "tool_calls": 7}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
    ],
)
def test_messages_that_are_none_are_refused_by_name(messages: object, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_messages(messages, CHATML_TEMPLATE)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(("tools", "param"), [(7, "tools"), ([7], "tools[0].function"), ([{}], "tools[0].function")])
def test_tools_that_are_none_are_refused_by_name(tools: object, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_tools(Fields({"tools": tools}).items("tools"))
    assert (caught.value.status, caught.value.param) == (400, param)


# What comes after a recorded answer: the template's own words, or nothing where the
# template rewrites the past.

END = "<|im_end|>"
# Like Qwen3's: reasoning before the last user message is dropped.
FORGETFUL = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LATE_TOOLS = """\
{%- for m in messages %}
{%- if loop.last and tools %}{{ '[tools]' + (tools | tojson) }}{% endif %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
QUESTION = {"role": "user", "content": "Rome?"}
ANSWER = {"role": "assistant", "content": "Dry."}
TOOL = {"role": "tool", "content": "31"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def follow(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    answer: str,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tools_before: Sequence[Mapping[str, Any]] | None = None,
    has_reasoning: bool = True,
) -> str | None:
    template = ChatTemplate(source, {})
    count = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    prompt = template.render_messages(messages[:count], tools_before or tools, {})
    return text_after_answer(
        template, TemplateInput(messages, tools, {}), prompt + answer + END, END, has_reasoning=has_reasoning
    )


def test_a_next_question_comes_after_the_answer_as_it_was_sampled() -> None:
    said = follow(TEMPLATE, [QUESTION, ANSWER, QUESTION], "<think>\nhm\n</think>\n\nDry.")
    assert said == "\n<|im_start|>user\nRome?<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_drops_earlier_reasoning_has_its_way() -> None:
    assert follow(FORGETFUL, [QUESTION, ANSWER, QUESTION], "<think>hm</think>Dry.") is None


def test_a_template_that_keeps_reasoning_within_a_turn_keeps_it() -> None:
    said = follow(FORGETFUL, [QUESTION, ANSWER, TOOL], "<think>hm</think>Dry.")
    assert said == "\n<|im_start|>tool\n31<|im_end|>\n<|im_start|>assistant\n"


def test_a_model_without_reasoning_goes_on_from_any_answer() -> None:
    assert follow(FORGETFUL, [QUESTION, ANSWER, QUESTION], "Dry. ", has_reasoning=False) is not None


@pytest.mark.parametrize("source", [TEMPLATE, LATE_TOOLS])
def test_other_tools_are_another_prompt(source: str) -> None:
    other = [{"type": "function", "function": {"name": "g"}}]
    assert follow(source, [QUESTION, ANSWER, QUESTION], "Dry.", tools=other, tools_before=TOOLS) is None


def test_tools_that_move_are_another_prompt() -> None:
    assert follow(LATE_TOOLS, [QUESTION, ANSWER, QUESTION], "Dry.", tools=TOOLS) is None


def test_an_end_token_that_the_template_does_not_write_is_no_place_to_go_on_from() -> None:
    template = ChatTemplate(TEMPLATE, {})
    shown = TemplateInput([QUESTION, ANSWER, QUESTION], None, {})
    spoken = template.render_messages([QUESTION], None, {}) + "Dry.<|return|>"
    assert text_after_answer(template, shown, spoken, "<|return|>", has_reasoning=False) is None


def test_a_template_that_refuses_half_a_conversation_is_no_error() -> None:
    source = "{% if messages | length == 2 %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    assert follow(source, [QUESTION, ANSWER, QUESTION], "Dry.") is None
