"""What comes after a recorded answer: the template's own words, or nothing where the template rewrites the past."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from areal.services.inference.data_proxy.going_on import Shown, after_recorded
from areal.services.inference.data_proxy.templating import ChatTemplate
from tests.services.dialects.talks import TEMPLATE

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
USER = {"role": "user", "content": "Rome?"}
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
    thinks: bool = True,
) -> str | None:
    template = ChatTemplate(source, {})
    count = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    prompt = template.render(messages[:count], tools_before or tools, {})
    return after_recorded(template, Shown(messages, tools, {}), prompt + answer + END, END, thinks=thinks)


def test_a_next_question_comes_after_the_answer_as_it_was_sampled() -> None:
    said = follow(TEMPLATE, [USER, ANSWER, USER], "<think>\nhm\n</think>\n\nDry.")
    assert said == "\n<|im_start|>user\nRome?<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_drops_earlier_reasoning_has_its_way() -> None:
    assert follow(FORGETFUL, [USER, ANSWER, USER], "<think>hm</think>Dry.") is None


def test_a_template_that_keeps_reasoning_within_a_turn_keeps_it() -> None:
    said = follow(FORGETFUL, [USER, ANSWER, TOOL], "<think>hm</think>Dry.")
    assert said == "\n<|im_start|>tool\n31<|im_end|>\n<|im_start|>assistant\n"


def test_a_model_without_reasoning_goes_on_from_any_answer() -> None:
    assert follow(FORGETFUL, [USER, ANSWER, USER], "Dry. ", thinks=False) is not None


@pytest.mark.parametrize("source", [TEMPLATE, LATE_TOOLS])
def test_other_tools_are_another_prompt(source: str) -> None:
    other = [{"type": "function", "function": {"name": "g"}}]
    assert follow(source, [USER, ANSWER, USER], "Dry.", tools=other, tools_before=TOOLS) is None


def test_tools_that_move_are_another_prompt() -> None:
    assert follow(LATE_TOOLS, [USER, ANSWER, USER], "Dry.", tools=TOOLS) is None


def test_an_end_token_that_the_template_does_not_write_is_no_place_to_go_on_from() -> None:
    template = ChatTemplate(TEMPLATE, {})
    shown = Shown([USER, ANSWER, USER], None, {})
    spoken = template.render([USER], None, {}) + "Dry.<|return|>"
    assert after_recorded(template, shown, spoken, "<|return|>", thinks=False) is None


def test_a_template_that_refuses_half_a_conversation_is_no_error() -> None:
    source = "{% if messages | length == 2 %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    assert follow(source, [USER, ANSWER, USER], "Dry.") is None
