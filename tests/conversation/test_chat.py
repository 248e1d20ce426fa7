from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.conversation import Branch, Chat, ConversationError, normalise
from areal.conversation.chat import _overlap
from tests.conversation.small import chat, decode, encode

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content.strip() + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# As Qwen3's: thoughts before the last question are dropped.
FORGETFUL = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# As GLM's: the next role's token ends a turn.
ROLES = """\
{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
# As gpt-oss's: the end of a turn is another token in the past.
REWRITTEN = """\
{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content }}
{{- ('<|return|>' if m.role == 'assistant' and loop.last else '<|end|>') }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
# As Mistral's: the system prompt stands at the last question.
MOVING = """\
{%- for m in messages %}{% if m.role != 'system' %}{{ '<|im_start|>' }}
{%- if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{{- m.content + '<|im_end|>' }}{% endif %}{% endfor %}"""
FOLLOWING = "\n<|im_start|>user\nOslo?<|im_end|>\n<|im_start|>assistant\n"
ASK, ANSWER, AGAIN = ({"role": role, "content": text} for role, text in
                      (("user", "Rome?"), ("assistant", "Dry."), ("user", "Oslo?")))  # fmt: skip


def continued(source: str, sampled: str, *messages: dict[str, Any], at: int = 1, **more: Any) -> str | Branch:
    """The next prompt's text, of a response ``sampled`` to the first ``at`` messages."""
    made = chat(source)
    after = normalise(messages)
    recorded = made.prompt(after.head(at)) + encode(sampled)
    found = made.continuation(recorded, after.head(at), after, **more)
    if isinstance(found, Branch):
        return found
    whole = decode([*recorded, *found])
    assert whole.startswith(decode(recorded))
    return whole


@pytest.mark.parametrize("sampled", ["Dry.<|im_end|>", "Dry.", "Dr"])
def test_continuation_of_response_matches_template(sampled: str) -> None:
    whole = chat(CHATML).template.render(normalise([ASK, ANSWER, AGAIN]), True)
    assert continued(CHATML, sampled, ASK, ANSWER, AGAIN) == whole


@pytest.mark.parametrize("sampled", ["Dry. <|im_end|>", "Wet.<|im_end|>", "Dry.<|end|>", "Dry.<|im_end|><|im_end|>"])
def test_continuation_of_other_text_branches(sampled: str) -> None:
    assert isinstance(continued(CHATML, sampled, ASK, ANSWER, AGAIN), Branch)


def test_continuation_keeps_reasoning_written_by_template() -> None:
    whole = continued(CHATML, "<think>hm </think>\n\nDry.<|im_end|>", ASK, ANSWER, AGAIN)
    assert isinstance(whole, str) and "<think>hm </think>\n\nDry.<|im_end|>\n<|im_start|>user\nOslo?" in whole
    thoughts = "<think>a</think>\n\nDry.<|im_end|>\n<|im_start|>user\nOslo?<|im_end|>\n<|im_start|>assistant\n"
    third = [ASK, ANSWER, AGAIN, ANSWER, ASK]
    made = chat(CHATML)
    prompt = made.prompt(normalise([ASK])) + encode(thoughts)
    for sampled in ("<think>b</think>\n\nDry.<|im_end|>", "Dry.<|im_end|>"):
        found = made.continuation([*prompt, *encode(sampled)], normalise(third[:3]), normalise(third))
        assert not isinstance(found, Branch), sampled


def test_continuation_drops_no_sampled_reasoning() -> None:
    assert isinstance(continued(FORGETFUL, "<think>hm</think>Dry.<|im_end|>", ASK, ANSWER, AGAIN), Branch)
    tool = {"role": "tool", "content": "31"}
    whole = continued(FORGETFUL, "<think>hm</think>Dry.<|im_end|>", ASK, ANSWER, tool)
    assert isinstance(whole, str) and "<think>hm</think>Dry.<|im_end|>\n<|im_start|>tool\n31" in whole


def test_continuation_repeats_no_turn_for_equal_answers() -> None:
    first_alone = CHATML.replace("if m.reasoning_content", "if m.reasoning_content and loop.index0 == 1")
    made, third = chat(first_alone), [ASK, ANSWER, AGAIN, ANSWER, ASK]
    thought = "<think>a</think>\n\nDry.<|im_end|>"
    recorded = [*made.prompt(normalise([ASK])), *encode(thought + "\n<|im_start|>user\nOslo?<|im_end|>\n")]
    recorded += encode("<|im_start|>assistant\n")
    kept = made.continuation([*recorded, *encode("Dry.<|im_end|>")], normalise(third[:3]), normalise(third))
    assert not isinstance(kept, Branch) and decode(kept) == FOLLOWING.replace("Oslo?", "Rome?")
    found = made.continuation([*recorded, *encode(thought)], normalise(third[:3]), normalise(third))
    assert isinstance(found, Branch)


# As Command R7B's: the next response is begun whether or not it is asked for.
BEGUN = """\
{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}<|assistant|><think></think>"""
# As zephyr-gemma's: a conversation that ends with a response ends with another token than a turn.
CLOSED = CHATML + "{% if not add_generation_prompt and messages[-1].role == 'assistant' %}<|return|>{% endif %}"


@pytest.mark.parametrize(
    ("source", "eos", "ends"),
    [
        (BEGUN, "<|end|>", {"<|end|>"}),
        (BEGUN, "<|return|>", {"<|return|>"}),
        (CLOSED, "<|return|>", {"<|return|>", "<|im_end|>"}),
    ],
)
def test_turn_ends_where_template_writes_more_after_it(source: str, eos: str, ends: set[str]) -> None:
    made = chat(source, eos)
    assert {decode([token]) for token in made.end_ids} == ends
    assert made.following_end(False) is None


_PIECES = st.lists(st.sampled_from(["a", "b", "Dry.", " ", "\n", "<think>", "user", "Oslo?"]), max_size=4).map("".join)
_TURNS = st.lists(st.tuples(_PIECES, st.none() | _PIECES.filter(str.strip), _PIECES), min_size=1, max_size=4)


@pytest.mark.parametrize("source", [CHATML, FORGETFUL])
@given(turns=_TURNS)
@settings(deadline=None)
def test_continuation_contains_each_turn_once(source: str, turns: list[tuple[str, str | None, str]]) -> None:
    made = chat(source)
    sent: list[dict[str, Any]] = []
    full: list[dict[str, Any]] = []
    recorded: list[int] | None = None
    for question, thought, answer in turns:
        before = normalise(sent) if sent else None
        for each in (sent, full):
            each.append({"role": "user", "content": question})
        after = normalise(sent)
        prompt = made.prompt(after)
        if recorded is not None and before is not None:
            found = made.continuation(recorded, before.head(len(sent) - 2), after)
            if not isinstance(found, Branch):
                prompt = [*recorded, *found]
                assert "".join(decode(prompt).split()) == "".join(made.template.render(normalise(full), True).split())
        kept = {} if thought is None else {"reasoning_content": thought}
        sent.append({"role": "assistant", "content": answer})
        full.append({"role": "assistant", "content": answer, **kept})
        opened = (
            f"<think>{thought}</think>" if source == FORGETFUL else f"<think>\n{(thought or '').strip()}\n</think>\n\n"
        )
        recorded = [*prompt, *encode(("" if thought is None else opened) + answer + "<|im_end|>")]


def test_continuation_without_reasoning_parser_branches() -> None:
    assert isinstance(continued(CHATML, "<think>hm</think>Dry.<|im_end|>", ASK, ANSWER, AGAIN, reasoning=False), Branch)


def test_continuation_does_not_repeat_next_role_token() -> None:
    assert (
        continued(ROLES, "Dry.<|user|>", ASK, ANSWER, AGAIN)
        == "<|user|>Rome?<|assistant|>Dry.<|user|>Oslo?<|assistant|>"
    )
    assert isinstance(continued(ROLES, "Dry.<|assistant|>", ASK, ANSWER, AGAIN), Branch)


def test_continuation_branches_when_template_rewrites_history() -> None:
    assert isinstance(continued(REWRITTEN, "Dry.<|return|>", ASK, ANSWER, AGAIN), Branch)
    system = {"role": "system", "content": "Be brief."}
    assert isinstance(continued(MOVING, "Dry.<|im_end|>", system, ASK, ANSWER, AGAIN, at=2), Branch)


def test_continuation_of_another_conversation_branches() -> None:
    made = chat(CHATML)
    recorded = made.prompt(normalise([ASK])) + encode("Dry.<|im_end|>")
    assert isinstance(made.continuation(recorded, normalise([AGAIN]), normalise([ASK, ANSWER, AGAIN])), Branch)
    assert isinstance(made.continuation(recorded, normalise([ASK]), normalise([ASK, AGAIN])), Branch)
    assert isinstance(made.continuation(recorded, normalise([ASK]), normalise([ASK])), Branch)
    tools = [{"type": "function", "function": {"name": "f"}}]
    other = normalise([ASK, ANSWER, AGAIN], tools)
    assert isinstance(made.continuation(recorded, normalise([ASK]), other), Branch)


@pytest.mark.parametrize(
    ("source", "ends"),
    [
        (CHATML, {"<|im_end|>"}),
        (ROLES, {"<|im_end|>", "<|user|>"}),
        (REWRITTEN, {"<|im_end|>", "<|return|>"}),
        ("{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}", {"<|im_end|>"}),
    ],
)
def test_end_ids_come_from_tokenizer_and_template(source: str, ends: set[str]) -> None:
    assert {decode([token]) for token in chat(source).end_ids} == ends


TOOL = {"type": "function", "function": {"name": "weather"}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("messages", "tools", "field"),
    [
        ([ASK], [TOOL], "tools"),
        ([ASK, CALLS], None, "messages[1].tool_calls[0]"),
        ([{"role": "system", "content": "Be brief."}, ASK], None, "messages[0].content"),
    ],
)
def test_render_of_unsupported_part_is_refused_by_field(messages: Any, tools: Any, field: str) -> None:
    source = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ConversationError, match=r"ha(s|ve) no place") as caught:
        chat(source).template.render(normalise(messages, tools))
    assert caught.value.field == field


def test_render_of_hidden_part_is_refused_despite_equal_text() -> None:
    source = (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    asked = {"role": "user", "content": "weather 31"}
    with pytest.raises(ConversationError, match=r"messages\[1\].tool_calls\[0\] has no place"):
        chat(source).template.render(normalise([asked, CALLS], [TOOL]))
    with pytest.raises(ConversationError, match=r"messages\[1\].content has no place"):
        chat(source).template.render(normalise([asked, {"role": "tool", "content": "31"}]))
    with pytest.raises(ConversationError, match="tools have no place"):
        chat("{{ messages[0].content }}").template.render(normalise([asked], [TOOL]))


def test_render_of_truncated_call_is_its_text() -> None:
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}"
        "{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}]{% endfor %}{% endfor %}"
    )
    cut = {"id": "1", "function": {"name": "weather", "arguments": '{"city": "Os'}}
    template = chat(source).template
    assert template.render(normalise([ASK, CALLS])) == "Rome?[weather]"
    found = template.render(normalise([ASK, {"role": "assistant", "content": "So:", "tool_calls": [cut]}]))
    assert found == 'Rome?So:\n{"name": "weather", "arguments": {"city": "Os'


def test_render_adapts_forms_to_template() -> None:
    parts = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    two = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert chat(parts).template.render(normalise([ASK, two])) == "Rome?ab"
    assert chat("{% for m in messages %}{{ m.content }}{% endfor %}").template.render(normalise([two])) == "a\nb"
    text = (
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert chat(text).template.render(normalise([ASK, CALLS])) == "Rome?weather{}"


@given(text=st.text("ab", max_size=9), start=st.text("ab", max_size=9))
def test_overlap_is_longest_common_suffix_and_prefix(text: str, start: str) -> None:
    ends = [length for length in range(len(text) + 1) if start.startswith(text[len(text) - length :])]
    assert _overlap(text, start) == max(ends)


def test_continuation_render_count_is_independent_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = []
    for count in (1, 20):
        made, asked = chat(CHATML), [ASK]
        text = made.template.render(normalise(asked), True)
        for turn in range(count):
            asked += [ANSWER, AGAIN]
            text += f"<think>\nhm {turn}\n</think>\n\nDry.<|im_end|>\n" + made.template.render(normalise([AGAIN]), True)
        recorded = encode(text[: text.rindex("\n<|im_start|>user")])
        plain, calls = made.template.text, list[object]()
        monkeypatch.setattr(
            made.template, "text", lambda *given, plain=plain, calls=calls: calls.append(given) or plain(*given)
        )
        found = made.continuation(recorded, normalise(asked[:-2]), normalise(asked))
        assert not isinstance(found, Branch)
        rendered.append(len(calls))
    assert rendered[0] == rendered[1]


def counted(made: Chat, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The renderings of a template from now on."""
    plain, calls = made.template.text, list[object]()

    def text(*given: Any) -> str:
        calls.append(given)
        return plain(*given)

    monkeypatch.setattr(made.template, "text", text)
    return calls


@pytest.mark.parametrize(
    ("turns", "without", "continues"), [(200, {100}, True), (16, set(range(0, 16, 2)), True), (500, None, False)]
)
def test_partial_thoughts_are_found_in_few_renderings(
    monkeypatch: pytest.MonkeyPatch, turns: int, without: set[int] | None, continues: bool
) -> None:
    made, asked = chat(CHATML), [ASK]
    text = made.template.render(normalise(asked), True)
    without = set(range(0, turns, 2)) if without is None else without
    for turn in range(turns):
        asked += [{**ANSWER, "content": f"Dry {turn}."}, AGAIN]
        text += "" if turn in without else f"<think>\nhm {turn}\n</think>\n\n"
        text += f"Dry {turn}.<|im_end|>\n" + made.template.render(normalise([AGAIN]), True)
    recorded = encode(text[: text.rindex("\n<|im_start|>user")])
    assert made.end_ids
    calls = counted(made, monkeypatch)
    found = made.continuation(recorded, normalise(asked[:-2]), normalise(asked))
    assert isinstance(found, Branch) != continues
    if not isinstance(found, Branch):
        assert decode(found) == FOLLOWING
    assert len(calls) < 40


def test_changed_messages_are_checked_in_few_renderings(monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "{% for m in messages %}{% if not (hides and loop.index0 == 70) %}"
        "{{ m.content|replace('a', '4') }}{% endif %}{% endfor %}"
    )
    made = chat(source)
    many = normalise([{"role": "user", "content": f"a{n}"} for n in range(100)])
    calls = counted(made, monkeypatch)
    made.template.render(many, hides=False)
    assert len(calls) < 10
    with pytest.raises(ConversationError, match=r"messages\[70\].content has no place"):
        made.template.render(many, hides=True)


def test_prompt_key_is_short_and_covers_all_inputs() -> None:
    template, other = chat(CHATML).template, chat(CHATML + "x").template
    keys = [
        template.key([ASK]),
        template.key([ANSWER]),
        template.key([ASK], [TOOL]),
        template.key([ASK], enable_thinking=False),
        other.key([ASK]),
    ]
    assert len(set(keys)) == len(keys) and {len(key or "") for key in keys} == {64}
    assert chat(CHATML).template.key([ASK]) == keys[0] and template.key([object()]) is None
