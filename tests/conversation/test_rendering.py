"""A rendering is that of ``apply_chat_template`` of transformers, or a refusal of the template's own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from areal.conversation import ConversationError, normalise
from areal.dataset.tokenizers import chat_of
from tests.conversation.families import Case, cases, families


@pytest.mark.parametrize("name", sorted(families()))
@given(case=cases(), begins=st.booleans())
@settings(max_examples=12, deadline=None)
def test_rendering_is_that_of_transformers(name: str, case: Case, begins: bool) -> None:
    tokenizer: Any = families()[name].tokenizer
    chat, conversation = chat_of(tokenizer, bool(case.tools)), normalise(case.messages, case.tools)
    messages, tools = chat.template.shaped(conversation), list(conversation.tools) or None

    def theirs() -> str:
        return str(tokenizer.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=begins))

    try:
        text = chat.template.plain(conversation, begins)
    except ConversationError:
        with pytest.raises((TemplateError, TypeError, ValueError)):
            theirs()
        return
    assert text == theirs()


@pytest.mark.parametrize("name", sorted(families()))
@given(case=cases())
@settings(max_examples=6, deadline=None)
def test_rendering_shows_each_text_or_is_refused(name: str, case: Case) -> None:
    chat, conversation = chat_of(families()[name].tokenizer, bool(case.tools)), normalise(case.messages, case.tools)
    try:
        text = chat.template.render(conversation, True)
    except ConversationError:
        return
    for message in conversation.messages:
        for call in message.get("tool_calls", ()):
            assert call["function"]["name"] in text
    for tool in conversation.tools:
        assert tool["function"]["name"] in text
