"""The table of ``docs/conversations.md``: what each chat template of TRL's wheel shows, learns and continues.

``python -m tests.conversation.family_table --write`` writes it anew; a test compares.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal.conversation import Branch, Chat, Conversation, ConversationError, normalise
from areal.conversation.learning import trained_tokens
from areal.dataset.tokenizers import chat_of
from tests.conversation.families import Family, families

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conversations.md"
BEGIN, END = "<!-- templates: begin -->\n", "<!-- templates: end -->\n"

_USER = {"role": "user", "content": "Weather in Oslo?"}
_RAIN = {"role": "assistant", "content": "Rain."}
_THOUGHT = {**_RAIN, "reasoning_content": "Hm."}
_SYSTEM = {"role": "system", "content": "Be brief."}
_CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "A city"}}, "required": ["city"]}
_TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": _CITY}}
_CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
_CALLS = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "weather", "content": "rain"}

HEAD = (
    "| template | a turn ends with | system | tools | learns | learns a thought | question after a response"
    " | question after a thought | result after a call |"
)


def _chat(family: Family, tools: bool) -> Chat:
    return chat_of(family.tokenizer, tools)


def _shown(chat: Chat, conversation: Conversation) -> str:
    try:
        chat.template.render(conversation, True)
    except ConversationError:
        return "refused"
    return "shown"


def _sampled(chat: Chat, conversation: Conversation) -> list[int] | None:
    """The tokens of the last message as the model samples them; None where the template does not say."""
    try:
        found = trained_tokens(chat, conversation)
    except ConversationError:
        return None
    return found.learned_ids[found.prompt_length :]


def _learns_thought(chat: Chat, row: Conversation) -> str:
    if _sampled(chat, row) is not None:
        return "yes"
    *asked, _ = row.messages
    written = normalise([*asked, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nRain."}])
    prompt, sampled = chat.template.plain(row.head(1), True), _sampled(chat, written)
    return "in the content" if prompt.rstrip().endswith("<think>") and sampled is not None else "refused"


def _goes_on(chat: Chat, conversation: Conversation, following: dict[str, Any]) -> str:
    """Whether the sampled last message is continued; what a client sends back has no reasoning."""
    asked = conversation.head(len(conversation.messages) - 1)
    answer = conversation.messages[-1]
    try:
        sampled = _sampled(chat, conversation)
        prompt = chat.prompt(asked)
        if sampled is None and chat.decode(prompt).endswith("<think>\n"):
            sampled = [*chat.encode(f"Hm.\n</think>\n\n{answer['content']}"), min(chat.turn_ends(False))]
        if sampled is None:
            return "-"
        sent = {name: value for name, value in answer.items() if name != "reasoning_content"}
        found = chat.continuation([*prompt, *sampled], asked, asked.then(sent, *normalise([following]).messages))
    except ConversationError:
        return "refused"
    return "branches" if isinstance(found, Branch) else "continues"


def _ends(chat: Chat) -> str:
    texts = [chat.decode([token]) for calls in (False, True) for token in sorted(chat.turn_ends(calls))]
    return ", ".join(f"`{text}`".replace("|", "\\|") for text in dict.fromkeys(texts))


def cells(family: Family) -> tuple[str, ...]:
    plain, with_tools = _chat(family, False), _chat(family, True)
    rows = {name: normalise([_USER, answer]) for name, answer in (("plain", _RAIN), ("thought", _THOUGHT))}
    called = normalise([_USER, _CALLS], [_TOOL])
    return (
        _ends(plain),
        _shown(plain, normalise([_SYSTEM, _USER])),
        _shown(with_tools, called.head(1)),
        "refused" if _sampled(plain, rows["plain"]) is None else "yes",
        _learns_thought(plain, rows["thought"]),
        *(_goes_on(plain, row, _USER) for row in rows.values()),
        _goes_on(with_tools, called, _RESULT),
    )


def table() -> str:
    """Templates of the same row share a line."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, family in sorted(families().items()):
        groups.setdefault(cells(family), []).append(name)
    return "".join(f"{line}\n" for line in _lines(groups))


def _lines(groups: dict[tuple[str, ...], list[str]]) -> Iterator[str]:
    yield HEAD
    yield "|---" * HEAD.count(" | ") + "|---|"
    for row, names in sorted(groups.items(), key=lambda each: each[1]):
        yield f"| {', '.join(names)} | {' | '.join(row)} |"


def page(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    made = page(PAGE.read_text(encoding="utf-8"))
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(made, encoding="utf-8")
    else:
        sys.stdout.write(table())
