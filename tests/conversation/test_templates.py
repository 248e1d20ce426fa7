"""Over the chat templates of TRL's wheel: what is rendered, served and continued is what the template says."""

from __future__ import annotations

import json
import re
import tempfile
from array import array
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from areal.conversation import Conversation, ConversationError, normalise
from areal.conversation.learning import trained_tokens
from areal.conversation.template import PROBE, _probe
from areal.dataset.tokenizers import chat_of
from areal.services.http.errors import ApiError
from areal.services.inference.data_proxy.prompts import ChatPrompt
from areal.services.inference.data_proxy.tokenizer import TextCodec, load_codec
from areal.services.inference.recorder.records import PrefixMatch
from tests.conversation.families import Case, Family, cases, families, full_texts

some = settings(
    max_examples=settings().max_examples // 5,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
every_family = pytest.mark.parametrize("name", families())
every_model = pytest.mark.parametrize("name", [name for name in families() if not name.endswith("_training")])


@cache
def codec_of(name: str) -> TextCodec:
    with tempfile.TemporaryDirectory() as folder:
        return load_codec(str(families()[name].write_folder(Path(folder))))


def written(family: Family, messages: Any, tools: Any, begins: bool) -> str | None:
    """What transformers writes; None where the template refuses it."""
    try:
        text = family.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=begins, tokenize=False)
    except Exception:  # noqa: BLE001 - a template can raise anything
        return None
    assert isinstance(text, str)
    return text


def shows(text: str, conversation: Conversation) -> bool:
    """Whether every content, call and tool of a conversation is in the text."""
    parts = [tool["function"]["name"] for tool in conversation.tools]
    for message in conversation.messages:
        parts.append(str(message.get("content", "")).strip())
        parts += [call["function"]["name"] for call in message.get("tool_calls", ())]
    return all(part in text or json.dumps(part, ensure_ascii=False)[1:-1] in text for part in parts)


def without(conversation: Conversation, field: str) -> Conversation:
    """The conversation with another text in the field, or without its tools."""
    if field == "tools":
        return Conversation(conversation.messages)
    index, *call = map(int, re.findall(r"\[(\d+)\]", field))
    message = conversation.messages[index]
    if not call:
        return conversation.replaced(index, {**message, "content": "Other"})
    calls = [dict(each) for each in message["tool_calls"]]
    calls[call[0]]["function"] = {**calls[call[0]]["function"], "name": "Other"}
    return conversation.replaced(index, {**message, "tool_calls": calls})


@every_family
@some
@given(case=cases(), begins=st.booleans())
def test_rendering_equals_transformers_or_is_refused(name: str, case: Case, begins: bool) -> None:
    family, chat = families()[name], codec_of(name).chat
    assert chat is not None
    conversation = normalise(case.messages, case.tools)
    tools = list(conversation.tools) or None
    plain = written(family, [dict(message) for message in conversation.messages], tools, begins)
    shaped = written(family, [dict(message) for message in chat.template.shaped(conversation)], tools, begins)
    try:
        text = chat.template.render(conversation, begins)
    except ConversationError as error:
        if "no place in the chat template" in str(error):
            other = without(conversation, error.field)
            messages = [dict(message) for message in chat.template.shaped(other)]
            assert shaped == written(family, messages, list(other.tools) or None, begins)
        else:
            assert shaped is None
        return
    assert text == shaped
    if plain is not None and shows(plain, conversation):
        assert text == plain


@every_family
@pytest.mark.parametrize(
    "kind", ["system alone", "user alone", "assistant alone", "assistant with calls", "tool alone"]
)
def test_text_in_parts_is_rendered_as_text(name: str, kind: str) -> None:
    chat, conversation = codec_of(name).chat, _probe(kind)
    assert chat is not None
    (at,) = (at for at, message in enumerate(conversation.messages) if message["content"] == PROBE)
    parts = [{"type": "text", "text": text} for text in (PROBE, "Other")]
    found = []
    for content in (PROBE, parts[:1], parts):
        message = {**conversation.messages[at], "content": content}
        try:
            found.append(chat.template.render(conversation.replaced(at, message)))
        except ConversationError:
            found.append("")
    text, single, two = ("".join(each.split()) for each in found)
    assert single == text and two.replace("Other", "").replace("\\n", "") == text  # some write JSON


def served(name: str, conversation: Conversation, recorded: PrefixMatch | None = None, **more: Any) -> list[int]:
    codec = codec_of(name)
    assert codec.chat is not None
    prompt = ChatPrompt(codec, codec.chat, conversation, {}, lambda text: "", **more)
    continued = prompt.continued(recorded, None) if recorded is not None else None
    return (continued or prompt.token_ids(None)).tolist()


@every_family
@some
@given(case=cases(content=full_texts, answered=True))
def test_served_prompt_equals_trained_prompt(name: str, case: Case) -> None:
    family = families()[name]
    conversation = normalise(case.messages, case.tools)
    asked = conversation.head(len(conversation.messages) - 1)
    chat = chat_of(family.tokenizer, bool(conversation.tools))
    try:
        prompt = chat.prompt(asked)
    except ConversationError:
        with pytest.raises(ApiError):
            served(name, asked)
        return
    assert served(name, asked) == prompt
    try:
        row = trained_tokens(chat, conversation)
    except ConversationError:
        return
    assert row.ids[: row.prompt_length] == prompt


def spoken(text: str) -> list[str]:
    """The words of a text, without thoughts that are empty: where one was sampled it stays, as any other does."""
    return re.sub(r"<think>\s*</think>", "", text).split()


@every_model
@some
@given(
    case=cases(content=full_texts, turns=4, answered=True),
    client=st.sampled_from(("sends no reasoning", "sends reasoning", "has it in the content")),
    loose=st.booleans(),
)
def test_session_is_one_row_where_template_keeps_recorded_text(name: str, case: Case, client: str, loose: bool) -> None:
    family, codec = families()[name], codec_of(name)
    assert codec.chat is not None
    template = codec.chat.template
    conversation = normalise(case.messages, case.tools)
    sent: list[dict[str, Any]] = []  # as the client knows it
    full: list[dict[str, Any]] = []  # with the reasoning that was sampled
    recorded: PrefixMatch | None = None
    for place, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            sent.append(dict(message))
            full.append(dict(message))
            continue
        asked, known = Conversation(tuple(sent), conversation.tools), Conversation(tuple(full), conversation.tools)
        try:
            prompt = served(name, asked, recorded, has_reasoning=client == "sends no reasoning")
            fresh = served(name, asked)
        except ApiError:
            return
        if recorded is not None:
            tokens = recorded.tokens.tolist()
            is_row = prompt[: len(tokens)] == tokens
            before = codec.decode(tokens, skip_special=False)
            after = codec.decode(prompt, skip_special=False)
            try:
                wanted = template.render(known, True)
            except ConversationError:
                return
            if is_row:
                assert spoken(after) == spoken(wanted)
            else:
                assert prompt == fresh
                assert not wanted.startswith(before)
        # The model answers as the template writes the message, or as the template never does.
        text = codec.decode(prompt, skip_special=False)
        try:
            whole = template.plain(known.then(message))
        except ConversationError:
            return
        fits = whole.startswith(text)
        sampled = whole[len(text) :] if fits else str(message.get("content", "")) + family.ends.eos
        ends = [at + len(end) for token in codec.end_ids if (at := sampled.find(end := codec.token_text(token))) >= 0]
        sampled = sampled[: min(ends, default=len(sampled))] + ("" if not loose or ends else " ")
        recorded = PrefixMatch(array("i", prompt + family.letters(sampled)), place)
        unthought = {name: value for name, value in message.items() if name != "reasoning_content"}
        full.append(dict(message) if fits else unthought)
        if client != "has it in the content":
            sent.append(dict(message) if fits and client == "sends reasoning" else unthought)
            continue
        if "tool_calls" not in message and (ids := family.letters(sampled)):
            end = codec.token_text(ids[-1]) if ids[-1] in codec.end_ids else ""
            unthought = {"role": "assistant", "content": sampled.removesuffix(end)}
        full[-1] = unthought
        sent.append(unthought)
