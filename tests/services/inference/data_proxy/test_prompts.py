"""A chat's prompt: the client's mistakes are named, a recorded turn is continued exactly where the template does."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal.conversation import Conversation
from areal.services.http.errors import ApiError
from areal.services.inference.data_proxy.prompts import ChatPrompt, read_conversation
from areal.services.inference.data_proxy.tokenizer import TextCodec, TooLong, load_codec
from areal.services.inference.recorder.records import PrefixMatch
from tests.services.tokenizer_folder import CHATML, write_tokenizer

USER = {"role": "user", "content": "hi"}
QUESTION = {"role": "user", "content": "Rome?"}
ANSWER = {"role": "assistant", "content": "Dry."}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "31"}
TOOLS = ({"type": "function", "function": {"name": "f"}},)
END = "<|im_end|>"


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextCodec]:
    sources = {"chatml": CHATML, "forgetful": FORGETFUL, "moving": MOVING, "plain": "{{ messages[0].content }}"}
    found = {}
    for name, source in sources.items():
        folder = tmp_path_factory.mktemp(name)
        write_tokenizer(folder)
        (folder / "chat_template.jinja").write_text(source)
        found[name] = load_codec(str(folder))
    return found


def prompt_of(
    codec: TextCodec, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **more: Any
) -> ChatPrompt:
    assert codec.chat is not None
    conversation = Conversation(read_conversation(list(messages)).messages, tuple(tools))
    return ChatPrompt(codec, codec.chat, conversation, more.pop("variables", {}), more.pop("end", _no_end), **more)


def _no_end(prompt: str) -> str:
    return ""


# Like Qwen3's: reasoning before the last user message is dropped.
FORGETFUL = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + (c.function.arguments|tojson) }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if tools %}{{ tools|tojson }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Like Mistral's: the system prompt stands in the last user message.
MOVING = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if messages[0].role == 'system' and loop.index0 == ns.last %}{{ messages[0].content + '\n' }}{% endif %}
{{- m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def text_after(
    codec: TextCodec,
    messages: Sequence[Mapping[str, Any]],
    sampled: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    tools_before: Sequence[Mapping[str, Any]] | None = None,
    **more: Any,
) -> str | None:
    """The text that is added to the first response's tokens; None for a new prompt."""
    place = next(at for at, message in enumerate(messages) if message["role"] == "assistant")
    before = prompt_of(codec, messages[:place], tools if tools_before is None else tools_before).token_ids(None)
    # A response in single bytes, as no tokenizer would write it.
    response = [codec.encode(char, add_special_tokens=False) for char in sampled] + [[codec.special_id(END) or 0]]
    tokens = array("i", [*before, *(token for ids in response for token in ids)])
    prompt = prompt_of(codec, messages, tools, **more)
    found = prompt.continued(PrefixMatch(tokens, place), None)
    if found is None:
        return None
    assert found[: len(tokens)] == tokens
    return codec.decode(found[len(tokens) :], skip_special=False)


def test_next_question_follows_sampled_answer(codecs: dict[str, TextCodec]) -> None:
    added = text_after(codecs["chatml"], [QUESTION, ANSWER, QUESTION], "Dry.")
    assert added == "\n<|im_start|>user\nRome?<|im_end|>\n<|im_start|>assistant\n"


def test_dropped_reasoning_makes_new_prompt(codecs: dict[str, TextCodec]) -> None:
    codec, sampled = codecs["forgetful"], "<think>hm</think>Dry."
    assert text_after(codec, [QUESTION, ANSWER, QUESTION], sampled, has_reasoning=True) is None
    assert text_after(codec, [QUESTION, {**ANSWER, "reasoning_content": "hm"}, QUESTION], sampled) is None


def test_kept_reasoning_stays_as_sampled(codecs: dict[str, TextCodec]) -> None:
    codec, sampled = codecs["forgetful"], "<think>hm</think><call>f{}"
    added = text_after(codec, [QUESTION, CALLED, RESULT], sampled, has_reasoning=True)
    assert added == "\n<|im_start|>tool\n31<|im_end|>\n<|im_start|>assistant\n"
    assert text_after(codec, [QUESTION, CALLED, RESULT], sampled) is None, "the model's reasoning is content"


def test_rewritten_call_makes_new_prompt(codecs: dict[str, TextCodec]) -> None:
    called = {**CALLED, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"a":1}'}}]}
    codec = codecs["forgetful"]
    assert text_after(codec, [QUESTION, called, RESULT], '<call>f{"a": 1}') is not None
    assert text_after(codec, [QUESTION, called, RESULT], '<call>f{"a":1}') is None


def test_changed_tools_make_new_prompt(codecs: dict[str, TextCodec]) -> None:
    other = [{"type": "function", "function": {"name": "g"}}]
    messages = [QUESTION, ANSWER, QUESTION]
    assert text_after(codecs["chatml"], messages, "Dry.", tools=TOOLS) is not None
    assert text_after(codecs["chatml"], messages, "Dry.", tools=other, tools_before=TOOLS) is None
    assert text_after(codecs["forgetful"], messages, "Dry.", tools=TOOLS) is None, "tools that move"


def test_moving_system_prompt_is_rendered_once(codecs: dict[str, TextCodec]) -> None:
    system, codec = {"role": "system", "content": "Be brief."}, codecs["moving"]
    messages = [system, QUESTION, ANSWER, QUESTION]
    assert text_after(codec, messages, "Dry.") is None
    assert prompt_of(codec, messages).text().count("Be brief.") == 1
    assert text_after(codec, messages[1:], "Dry.") is not None


def test_forced_call_prefix_follows_continued_turn(codecs: dict[str, TextCodec]) -> None:
    seen = []

    def end(prompt: str) -> str:
        seen.append(prompt)
        return "<call>f("

    added = text_after(codecs["chatml"], [QUESTION, ANSWER, QUESTION], "Dry.", end=end)
    assert added is not None and added.endswith("<|im_start|>assistant\n<call>f(")
    assert seen[0].endswith("<|im_start|>assistant\n")


def test_continued_prompt_beyond_limit_is_too_long(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["chatml"]
    prompt = prompt_of(codec, [USER, ANSWER, USER])
    tokens = prompt_of(codec, [USER, ANSWER], add_generation_prompt=False).token_ids(None)[:-1]
    assert (prompt.continued(PrefixMatch(tokens, 1), 4096) or tokens[:0])[: len(tokens)] == tokens
    with pytest.raises(TooLong):
        prompt.continued(PrefixMatch(tokens, 1), len(tokens))


def test_answer_of_reasoning_alone_may_be_sent_back_without_it() -> None:
    sent: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": None},
    ]
    assert read_conversation(sent).messages[1] == {"role": "assistant", "content": ""}
    without_nulls = [sent[0], {"role": "assistant"}]
    assert read_conversation(without_nulls) == read_conversation(sent)
    named = {**sent[1], "name": "bot"}
    assert read_conversation([named]).messages[0] == {"role": "assistant", "content": "", "name": "bot"}
    called = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    for kept in ({"reasoning_content": "So."}, {"tool_calls": [called]}):
        assert "content" not in read_conversation([{**sent[1], **kept}]).messages[0]


@pytest.mark.parametrize("answers", [("Dry.", "Wet."), ("D\u00fcr", "\U0001f327"), ("cut", "off")])
def test_each_turn_decodes_only_new_tokens(codecs: dict[str, TextCodec], answers: Sequence[str]) -> None:
    codec = codecs["chatml"]
    assert codec.chat is not None
    decoded: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return codec.decode(ids, skip_special=False)

    chat, messages, known = replace(codec.chat, decode=decode), [QUESTION], None
    for turn in range(12):
        prompt = ChatPrompt(codec, chat, read_conversation(messages), {}, has_reasoning=False)
        decoded.clear()
        continued = prompt.continued(known, None) if known is not None else None
        if known is not None:
            assert turn < 2 or max(decoded) < 50
            assert continued == prompt.continued(PrefixMatch(known.tokens, known.place), None), "decoded as a whole"
        ids = continued or prompt.token_ids(None)
        if known is not None:
            assert ids[: len(known.tokens)] == known.tokens
        text = answers[turn % 2]
        sampled = [token for byte in text for token in codec.encode(byte, add_special_tokens=False)]
        tokens = array("i", [*ids, *sampled, codec.special_id(END) or 0])
        known = PrefixMatch(tokens, len(messages), known.decoded if known is not None else (0, ""))
        messages = [*messages, {"role": "assistant", "content": text}, QUESTION]
    assert len(ids) > 200


def test_partial_character_is_decoded_with_preceding_text(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["chatml"]
    assert codec.chat is not None
    whole = codec.encode("\U0001f327", add_special_tokens=False)
    before = codec.encode("a", add_special_tokens=False)
    for end in range(1, len(whole) + 1):
        text = codec.chat.more_text("", (), [*before, *whole[:end]])
        rest = [*whole[end:], *before]
        wanted = codec.decode([*before, *whole, *before], skip_special=False)
        assert codec.chat.more_text(text, [*before, *whole[:end]], rest) == wanted


def test_open_prompt_ends_with_last_message_verbatim(codecs: dict[str, TextCodec]) -> None:
    for text in ("hi there ", "end", "<", "e"):  # also what is in the end token
        for content in (text, [{"type": "text", "text": text}]):
            begun = {"role": "assistant", "content": content}
            assert prompt_of(codecs["chatml"], [USER, begun], is_open=True).text().endswith(f"assistant\n{text}")
    assert prompt_of(codecs["plain"], [USER], is_open=True).text() == "hi", "the text may be all there is"
    with pytest.raises(ApiError) as caught:
        prompt_of(codecs["plain"], [USER, ANSWER], is_open=True).text()
    assert (caught.value.status, caught.value.param) == (400, "messages[1].content")


def test_template_variables_are_passed(codecs: dict[str, TextCodec]) -> None:
    assert prompt_of(codecs["chatml"], [USER], variables={"enable_thinking": False}).text().endswith("<think></think>")
    assert prompt_of(codecs["chatml"], [USER], add_generation_prompt=False).text().endswith("<|im_end|>\n")


def test_template_refusal_is_400(codecs: dict[str, TextCodec]) -> None:
    with pytest.raises(ApiError, match="a tool cannot come first") as caught:
        prompt_of(codecs["chatml"], [{"role": "tool", "content": "x"}]).text()
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_parts_unsupported_by_template_are_400(
    codecs: dict[str, TextCodec],
) -> None:
    for messages, tools, param in (([USER], TOOLS, "tools"), ([USER, ANSWER], (), "messages[1].content")):
        with pytest.raises(ApiError, match="no place in the chat template") as caught:
            prompt_of(codecs["plain"], messages, tools).text()
        assert (caught.value.status, caught.value.param) == (400, param)


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
def test_rejects_invalid_messages_naming_field(messages: object, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_conversation(messages)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_folder_without_template_has_no_chat(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"eos_token": "<|im_end|>"}')
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    assert load_codec(str(tmp_path)).chat is None
