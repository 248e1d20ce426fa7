"""The trained tokens of a conversation: the assistant's messages and the ends of its turns, nothing else.

A row is the text that the template renders for the whole conversation. To find where a message begins and ends in it,
the conversation is rendered again with the texts of that message replaced: what stays is not part of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

from areal.conversation.chat import Chat, in_common
from areal.conversation.messages import Conversation, ConversationError, message_text, message_texts
from areal.conversation.template import THOUGHT_END, shows, swapped
from areal.dataclasses import dataclass

TrainOn = Literal["last", "assistant"]
TRAIN_ON: tuple[TrainOn, ...] = ("last", "assistant")
_THOUGHT_START = "<think>"
_IS_TRAINED = ("weight", "train", "training", "loss")  # of a message: OpenAI's, Axolotl's, ms-swift's format
_TRAINED_PARTS = ("train_detail", "training_detail")  # Axolotl's
_EMPTY_THOUGHT = re.compile(  # <think></think>, <|START_THINKING|><|END_THINKING|>, <|channel>thought <channel|>
    r"(?P<start><\W*(?:start_)?(?P<name>\w+)[^<>]*>)\w*\s*(?P<end><\W*(?:end_)?(?P=name)[^<>]*>)\s*$", re.IGNORECASE
)


@dataclass(frozen=True)
class TrainedTokens:
    """Token ids, and for each whether it is trained."""

    ids: list[int]
    mask: list[int]

    @property
    def prompt_length(self) -> int:
        """The number of tokens before the first trained token."""
        return self.mask.index(1)

    @property
    def learned_ids(self) -> list[int]:
        """The tokens up to the last trained token."""
        return self.ids[: len(self.mask) - self.mask[::-1].index(1)]


def trained_tokens(
    chat: Chat, conversation: Conversation, train_on: TrainOn = "last", **variables: Any
) -> TrainedTokens:
    """Return the tokens of a conversation. The last message, or all messages of the assistant, are trained: content,
    calls, the reasoning of the last message, earlier reasoning that the template keeps, and the end of the turn.
    Messages with ``weight`` 0 (OpenAI's format), ``train``, ``training`` (Axolotl's) or ``loss`` (ms-swift's) false
    are not trained. ``variables``: those of the template. Raises ConversationError if the template does not render a
    part that is to be trained, or renders it after another prompt than the one that is served."""
    last = len(conversation.messages) - 1
    if (role := conversation.messages[last]["role"]) != "assistant":
        raise ConversationError(f"messages[{last}].role", f"is {role!r}: a row ends with the assistant's message")
    row = _Row(chat, conversation, variables)
    learned = [last] if train_on == "last" else [at for at in range(last + 1) if row.is_assistant(at)]
    spans = [row.span(at) for at in learned if not _untrained(conversation, at)]
    if not spans:
        name = _untrained(conversation, last)
        value = conversation.messages[last][name]
        raise ConversationError(f"messages[{last}].{name}", f"is {value!r}, so nothing of the row is trained")
    for at, message in enumerate(conversation.messages):
        if at not in learned and (name := next((each for each in _IS_TRAINED if message.get(each)), "")):
            why = "with train_on: last, only the last message is trained"
            why = why if row.is_assistant(at) else "only messages of the assistant are trained"
            raise ConversationError(f"messages[{at}].{name}", f"is {message[name]!r}: {why}")
    return row.tokens(spans)


def _untrained(conversation: Conversation, index: int) -> str:
    """Return the key of a message that says that it is not trained; empty without one. Raises ConversationError."""
    message = conversation.messages[index]
    if name := next((each for each in _TRAINED_PARTS if message.get(each)), ""):
        raise ConversationError(f"messages[{index}].{name}", "is not read: a message is trained as a whole")
    for name in _IS_TRAINED:
        if (value := message.get(name, 1)) not in (0, 1):
            raise ConversationError(f"messages[{index}].{name}", f"is {value!r}: it must be 0 (not trained) or 1")
    return next((name for name in _IS_TRAINED if not message.get(name, 1)), "")


@dataclass(frozen=True)
class _Row:
    chat: Chat
    conversation: Conversation
    variables: Mapping[str, Any]

    @property
    def last(self) -> int:
        return len(self.conversation.messages) - 1

    @cached_property
    def text(self) -> str:
        prompt = self._prompt(self.last)
        if not prompt:
            return self.written
        if (at := _common_start(prompt, self.written)) is not None:
            response, closed = self.written[at:], _EMPTY_THOUGHT.search(prompt, at)
            if closed is None or not response.startswith((closed["start"], closed["end"])):
                return prompt + response
        return self._after_opened_thought(prompt)

    @cached_property
    def written(self) -> str:
        """The text that the template renders, with the end of the last turn."""
        return self.chat.template.render(self.conversation, **self.variables) + self.added_end

    def _after_opened_thought(self, prompt: str) -> str:
        """Return the text of a row whose prompt opens a thought block that the template omits in earlier turns
        (DeepSeek R1): prompt, reasoning as it would be sampled, rest of the message. Raises ConversationError."""
        content, at = message_text(self.conversation.messages[self.last]), prompt.rfind(_THOUGHT_START)
        differs = prompt[in_common(prompt, self.written) :][:60]
        why = f"is written after another prompt than the one that is served, which ends with {differs!r}"
        if prompt.rstrip().endswith(_THOUGHT_START) and self.written.startswith(prompt[:at]):
            rest = self.written[at:].removeprefix(_THOUGHT_START).lstrip()
            thought, end, response = content.rpartition(THOUGHT_END)
            if not end:
                raise ConversationError(f"messages[{self.last}]", f"{why}, and its content has no {THOUGHT_END}")
            if thought.lstrip().startswith(_THOUGHT_START):
                thought = thought.lstrip().removeprefix(_THOUGHT_START)
                thought = thought.removeprefix("\n") if prompt.endswith("\n") else thought
            if rest.startswith(f"{thought}{end}{response}".strip()):  # the template keeps it
                return prompt + rest
            if rest.startswith(response.strip()) and THOUGHT_END not in rest:
                space = response[: len(response) - len(response.lstrip())]
                return f"{prompt}{thought}{end}{space}{rest}"
        raise ConversationError(f"messages[{self.last}]", why)

    def _prompt(self, index: int) -> str | None:
        """Return the prompt that is served for this message; None if there is none."""
        try:
            return self.chat.template.plain(self.conversation.head(index), True, **self.variables) if index else ""
        except ConversationError:
            return None

    @cached_property
    def added_end(self) -> str:
        """The end of the last turn, if the template writes it only with the next message."""
        end = self.chat.following_end(bool(self.conversation.messages[self.last].get("tool_calls")))
        return "" if end is None else self.chat.decode([end])

    def is_assistant(self, index: int) -> bool:
        return bool(self.conversation.messages[index]["role"] == "assistant")

    def span(self, index: int) -> tuple[int, int]:
        """Return the positions where the message begins and where its turn ends. Raises ConversationError."""
        start, end = self._start(index), self._end(index)
        if self._opening and self.text.startswith(self._opening, start):
            why = f"is written after another prompt than the one that is served, which has no {self._opening!r}"
            raise ConversationError(f"messages[{index}]", why)
        self._check(index, self.text[start:end])
        return start, end

    @cached_property
    def _opening(self) -> str:
        """The text that begins an assistant's turn in a prompt, and is not trained."""
        asked = Conversation(({"role": "user", "content": "x"},))
        try:
            before, prompt = (self.chat.template.plain(asked, begins, **self.variables) for begins in (False, True))
        except ConversationError:
            return ""
        return prompt[len(before) :] if prompt.startswith(before) else ""

    def _start(self, index: int) -> int:
        prompt = self._prompt(index)
        at = _common_start(prompt, self.text) if prompt else None
        return self._beginning(index) if at is None else at

    def _beginning(self, index: int) -> int:
        """Return the position where the message's own text begins."""
        message = self.conversation.messages[index]
        other = {**message, "content": _other(message_text(message))}
        if "reasoning_content" in message:
            other["reasoning_content"] = _other(message["reasoning_content"])
        return in_common(self.text, self._with(index, other))

    def _end(self, index: int) -> int:
        """Return the position after the turn's end token, the first one between the message's text and the next's."""
        message = self.conversation.messages[index]
        if calls := message.get("tool_calls"):
            other = {**message, "tool_calls": swapped(calls, len(calls) - 1, _with_other_arguments(calls[-1]))}
        else:
            other = {**message, "content": _other(message_text(message))}
        changed = self._with(index, other)
        whole = self.text if index == self.last else self.written  # they differ before the last message alone
        after = len(whole) - in_common(whole[::-1], changed[::-1])
        limit = len(whole) if index == self.last else self._beginning(index + 1)
        ends = [self.chat.decode([token]) for token in self.chat.end_ids]
        found = [at + len(end) for end in ends if (at := whole.find(end, after, limit)) >= 0]
        if not found:
            raise ConversationError(f"messages[{index}]", "is followed by no token that ends a turn")
        return min(found)

    def _with(self, index: int, message: Mapping[str, object]) -> str:
        other = self.conversation.replaced(index, message)
        return self.chat.template.plain(other, **self.variables) + self.added_end

    def _check(self, index: int, learned: str) -> None:
        """Raise ConversationError unless the text has all parts of the message; reasoning of earlier turns may be
        missing."""
        message, where = self.conversation.messages[index], f"messages[{index}]"
        parts = [text.rpartition(THOUGHT_END) for text in message_texts(message)]
        wanted = [(f"{where}.content", response) for _, _, response in parts]
        if index == self.last:
            wanted += [(f"{where}.content", thought.rpartition(_THOUGHT_START)[2]) for thought, _, _ in parts]
            wanted.append((f"{where}.reasoning_content", message.get("reasoning_content", "")))
        calls = message.get("tool_calls", ())
        wanted += [(f"{where}.tool_calls[{at}]", call["function"]["name"]) for at, call in enumerate(calls)]
        for field, text in wanted:
            if not shows(learned, text.strip()):
                raise ConversationError(
                    field, f"is not in the text that the chat template writes: {text.strip()[:60]!r}"
                )
        for at, call in enumerate(calls):
            if not isinstance(call["function"]["arguments"], Mapping):
                raise ConversationError(f"{where}.tool_calls[{at}].function.arguments", "are not a JSON object")
            other = {**message, "tool_calls": swapped(calls, at, _with_other_arguments(call))}
            if call["function"]["arguments"] and self._with(index, other) == self.written:
                raise ConversationError(f"{where}.tool_calls[{at}]", "has arguments that the chat template leaves out")

    def tokens(self, spans: list[tuple[int, int]]) -> TrainedTokens:
        """Encode the text in pieces: a prompt is encoded without the response, as when it is served."""
        chat, ids, mask, at = self.chat, list[int](), list[int](), 0
        cuts = [(cut, learned) for start, end in spans for cut, learned in ((start, 0), (end, 1))]
        for cut, learned in (*cuts, (len(self.text), 0)):
            piece = self.text[at:cut]
            new = (chat.encode_after(piece) if at else list(chat.encode(piece))) if piece else []
            ids, mask, at = ids + new, mask + [learned] * len(new), cut
        whole = list(chat.encode(self.text))
        if chat.decode(ids) != chat.decode(whole):
            ids, mask = whole, [0] * len(whole)
            for start, end in spans:
                first, stop = (list(chat.encode(self.text[:cut])) for cut in (start, end))
                if whole[: len(stop)] != stop or stop[: len(first)] != first:
                    raise ConversationError("messages", "cannot be cut into tokens where the responses begin and end")
                mask[len(first) : len(stop)] = [1] * (len(stop) - len(first))
        return TrainedTokens(ids, mask)


def _common_start(prompt: str, text: str) -> int | None:
    """Return where the text goes on after this prompt, which may end with white space or an empty thought that the text
    has not. None if they differ in more."""
    at = in_common(prompt, text)
    if not prompt[at:].strip():
        return None if at < len(prompt) and prompt.rstrip().endswith(_THOUGHT_START) else at
    closed = _EMPTY_THOUGHT.search(prompt)
    return closed.start() if closed is not None and closed.start() <= at else None


def _other(text: str) -> str:
    """Return another text, with another beginning and another end."""
    text = text.strip()
    return f"{'Q' if text.startswith('Z') else 'Z'}probe{'q' if text.endswith('x') else 'x'}"


def _with_other_arguments(call: Mapping[str, Any]) -> dict[str, object]:
    return {**call, "function": {**call["function"], "arguments": {_other(""): _other("")}}}
