"""What is learned is exactly the assistant's, and the end of its turn, or the row is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.conversation import Chat, ConversationError, normalise
from areal.conversation.learning import TRAIN_ON, TrainedTokens, TrainOn, trained_tokens
from areal.dataset.tokenizers import chat_of
from tests.conversation.families import Case, cases, families
from tests.conversation.small import chat, decode

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
USER = {"role": "user", "content": "Oslo?"}
SUN, RAIN = ({"role": "assistant", "content": text} for text in ("Sun.", "Rain."))


def runs(tokens: TrainedTokens, decode: Any) -> list[str]:
    """The texts of the learned tokens that are next to each other."""
    found: list[list[int]] = [[]]
    for token, mask in zip(tokens.ids, tokens.mask, strict=True):
        if mask:
            found[-1].append(token)
        elif found[-1]:
            found.append([])
    return [decode(run) for run in found if run]


def learned(source: str, messages: Sequence[dict[str, Any]], train_on: TrainOn = "last") -> list[str]:
    return runs(trained_tokens(chat(source), normalise(messages), train_on), decode)


def test_learned_tokens_are_the_responses_and_their_ends() -> None:
    assert learned(CHATML, [USER, SUN, USER, RAIN]) == ["Rain.<|im_end|>"]
    assert learned(CHATML, [USER, SUN, USER, RAIN], "assistant") == ["Sun.<|im_end|>", "Rain.<|im_end|>"]
    assert learned(CHATML, [SUN, USER, RAIN], "assistant") == ["Sun.<|im_end|>", "Rain.<|im_end|>"]


def test_end_of_turn_left_to_next_role_is_learned() -> None:
    source = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert learned(source, [USER, SUN, USER, RAIN], "assistant") == ["Sun.<|user|>", "Rain.<|user|>"]


def test_first_of_two_ends_closes_the_response() -> None:
    source = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
        "{{ '<|assistant|>' if add_generation_prompt else '<|im_end|>' }}"
    )
    assert learned(source, [USER, SUN, USER, RAIN], "assistant") == ["Sun.<|end|>", "Rain.<|end|>"]


@pytest.mark.parametrize(
    "kept", ["m.content", "m.content.split('</think>')[-1]", "m.content.split('</think>')[-1].lstrip()"]
)
@pytest.mark.parametrize("opened", ["<think>\n", ""])
def test_reasoning_after_an_opened_thought_is_learned_as_it_is_sampled(opened: str, kept: str) -> None:
    """As DeepSeek R1's: the prompt opens the thought, which the template leaves out of earlier turns."""
    source = CHATML.replace("m.content", kept).replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
    content = f"{opened}hm</think>\n\nRain."
    assert learned(source, [USER, {**RAIN, "content": content}]) == ["hm</think>\n\nRain.<|im_end|>"]


def test_prompt_and_learned_tokens_are_those_around_the_mask() -> None:
    row = TrainedTokens([5, 6, 7, 8, 9], [0, 0, 1, 1, 0])
    assert (row.prompt_length, row.learned_ids) == (2, [5, 6, 7, 8])
    assert TrainedTokens([5, 6], [1, 1]).learned_ids == [5, 6]


# As Gemma 4's (31B) and Command R7B's: the prompt closes an empty thought, which the template writes nowhere else.
EMPTY = CHATML.replace("<|im_start|>assistant\\n' }}", "<|im_start|>assistant\\n<think>\\n</think>\\n' }}")


def test_response_after_empty_thought_is_learned_as_it_is_served() -> None:
    row = trained_tokens(chat(EMPTY), normalise([USER, SUN, USER, RAIN]), "assistant")
    assert runs(row, decode) == ["Sun.<|im_end|>", "Rain.<|im_end|>"]
    assert decode(row.ids).count("<think>") == 1 and decode(row.ids).endswith("</think>\nRain.<|im_end|>\n")
    last = trained_tokens(chat(EMPTY), normalise([USER, SUN, USER, RAIN]))
    assert last.ids[: last.prompt_length] == chat(EMPTY).prompt(normalise([USER, SUN, USER]))
    spaced = CHATML.replace("assistant\\n' }}", "assistant\\n\\n' }}")  # as vLLM's for DeepSeek V3
    row = trained_tokens(chat(spaced), normalise([USER, SUN, USER, RAIN]), "assistant")
    assert runs(row, decode) == ["Sun.<|im_end|>", "Rain.<|im_end|>"]
    assert decode(row.ids).endswith("assistant\n\nRain.<|im_end|>\n")
    for content in ("<think>hm</think>Rain.", "</think>Rain."):
        with pytest.raises(ConversationError, match="is written after another prompt than the one that is served"):
            trained_tokens(chat(EMPTY), normalise([USER, {**RAIN, "content": content}]))


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        (CHATML, [USER], r"messages\[0\].role is 'user': a row ends with the assistant's message"),
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}",
            [USER, SUN],
            r"messages\[1\] is followed by no token that ends a turn",
        ),
        (
            CHATML.replace("<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>"),
            [USER, SUN],
            r"messages\[1\] is written after another prompt than the one that is served, which ends with '<think>'",
        ),
        (
            "{{ messages | length }}" + CHATML,
            [USER, SUN],
            r"messages\[1\] is written after another prompt than the one that is served",
        ),
        (
            CHATML.replace("m.content", "m.content.split('</think>')[-1]"),
            [USER, {**SUN, "content": "<think>hm</think>Sun."}],
            r"messages\[1\].content is not in the text that the chat template writes: 'hm'",
        ),
    ],
)
def test_row_learning_other_text_is_refused(source: str, messages: Any, message: str) -> None:
    with pytest.raises(ConversationError, match=message):
        trained_tokens(chat(source), normalise(messages))


# The chat templates of real models, with conversations of every kind.


def marked(case: Case) -> Case:
    """The conversation with a mark in each message that is not the assistant's."""
    return Case(
        [
            each if each["role"] == "assistant" else {**each, "content": f"Nolearn {each['content']} Nolearn"}
            for each in case.messages
        ],
        case.tools,
    )


def learned_or_refused(made: Chat, case: Case, train_on: TrainOn) -> TrainedTokens | None:
    try:
        return trained_tokens(made, normalise(case.messages, case.tools), train_on)
    except ConversationError:
        return None


@pytest.mark.parametrize("name", sorted(families()))
@given(case=cases(answered=True).map(marked), train_on=st.sampled_from(TRAIN_ON))
@settings(max_examples=12, deadline=None)
def test_learned_tokens_of_any_template_are_the_assistants(name: str, case: Case, train_on: TrainOn) -> None:
    made = chat_of(families()[name].tokenizer, bool(case.tools))
    found = learned_or_refused(made, case, train_on)
    if found is None:
        return
    conversation = normalise(case.messages, case.tools)
    last = conversation.messages[-1]
    texts = runs(found, made.decode)
    count = sum(message["role"] == "assistant" for message in conversation.messages)
    assert len(texts) == (1 if train_on == "last" else count)
    assert not any("Nolearn" in text for text in texts)
    assert last["content"].strip() in texts[-1]
    assert found.learned_ids[-1] in made.end_ids
    if train_on == "last":
        prompt = made.prompt(conversation.head(len(conversation.messages) - 1))
        assert found.ids[: found.prompt_length] == prompt, "the prompt that is served"


def masked_by_the_template(name: str, made: Chat, case: Case) -> str:
    """The text in the ``generation`` blocks of a template for training, by transformers."""
    conversation = normalise(case.messages, case.tools)
    tokenizer: Any = families()[name].tokenizer
    encoded = tokenizer.apply_chat_template(
        made.template.shaped(conversation),
        tools=list(conversation.tools) or None,
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    return made.decode([token for token, mask in pairs if mask])


@pytest.mark.parametrize("name", sorted(name for name in families() if name.endswith("_training")))
@given(case=cases(answered=True))
@settings(max_examples=12, deadline=None)
def test_learned_text_matches_training_templates(name: str, case: Case) -> None:
    made = chat_of(families()[name].tokenizer, bool(case.tools))
    found = learned_or_refused(made, case, "assistant")
    if found is None:
        return
    marked = masked_by_the_template(name, made, case)
    if "\ufffd" in marked:  # transformers marks a character, which is several tokens here
        return
    ends = [made.decode([end]) for end in made.end_ids]
    at = 0
    for run in runs(found, made.decode):
        if run not in marked[at:]:  # an end token of the next role's, which the marks leave out
            run = next(run.removesuffix(end) for end in ends if run.endswith(end))
        at = marked.index(run, at) + len(run)  # between them: what the generation prompt has
    assert marked[at:].strip() in ("", families()[name].ends.eos)  # Phi-3 closes a document with it
