"""Prompts as token ids, the end tokens of turns, and the continuation of a recorded response."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from areal.conversation.messages import Conversation, ConversationError
from areal.conversation.template import PROBE, Template
from areal.dataclasses import dataclass

_THOUGHT = f"{PROBE}Thought"
_SHORTEST_OVERLAP = 4  # characters of what closes a thought
_CUT = "\ufffd"  # the last character of a text whose last token ends within a character
_MOST_TRIES = 32  # renderings that look for thoughts; enough for 16 messages in any case


@dataclass(frozen=True)
class Branch:
    """The template does not continue the recorded tokens. The conversation becomes a new prompt."""

    reason: str


@dataclass(frozen=True)
class Chat:
    """A chat template and its tokenizer.

    ``encode`` adds no special tokens, ``decode`` omits none. ``eos_ids``: the end tokens of the tokenizer and of the
    generation configuration. ``added_ids``: the added tokens, which the tokenizer never merges from other text.
    ``bytewise``: a decoded text is the concatenation of the bytes of its tokens.
    """

    template: Template
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    eos_ids: Collection[int]
    added_ids: Collection[int]
    bytewise: bool = False

    def prompt(self, conversation: Conversation, **variables: Any) -> list[int]:
        """Return the tokens of a prompt for the next response. Raises ConversationError."""
        return list(self.encode(self.template.render(conversation, True, **variables)))

    # The end of a turn.

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Return all tokens that end an assistant's turn: those of the tokenizer and the generation configuration, and
        the token that the template writes after an assistant's message (for GLM, the token of the next role)."""
        return frozenset(self.eos_ids) | self.turn_ends(False) | self.turn_ends(True)

    def turn_ends(self, with_calls: bool) -> frozenset[int]:
        """Return the tokens that come after a response, with calls or without. One that is also within it ends none."""
        return frozenset(end for end in self._ends[with_calls] if end is not None)

    def following_end(self, with_calls: bool) -> int | None:
        """Return the token that begins the next message, if the template writes none at the end of a response."""
        return self._ends[with_calls][1]

    @cached_property
    def _ends(self) -> tuple[tuple[int | None, int | None], tuple[int | None, int | None]]:
        none = None, None
        return self._end_after(0) or none, self._end_after(2) or self._end_after(
            1
        ) or none  # some templates take only one call

    def _end_after(self, calls: int) -> tuple[int | None, int | None] | None:
        """Return (token that the template writes at the end of a response with ``calls`` calls, None), or (None, first
        token of the next message). None if the template refuses such a response."""
        asked = Conversation(({"role": "user", "content": "x"},))
        function = {"name": "x", "arguments": {"x": "x"}}
        made = [{"id": f"probecal{n}", "type": "function", "function": function} for n in range(calls)]
        answer: dict[str, object] = {"role": "assistant", "content": "", "tool_calls": made}
        following: dict[str, object] = {"role": "tool", "tool_call_id": "probecal0", "content": "x"}
        if not calls:
            answer, following = {"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}
        answered = asked.then(answer)
        given = ((asked, False), (asked, True), (answered, False), (answered.then(following), False))
        try:
            *prompts, text, after = (self.template.plain(*each).rstrip() for each in given)
        except ConversationError:
            return None
        already = [list(self.encode(each)) for each in prompts]
        ids, longer = list(self.encode(text)), list(self.encode(after))
        shared = ids[: in_common(ids, longer)]
        while shared and not self.decode(shared[-1:]).strip():
            shared.pop()
        known = [token for token in shared[in_common(shared, already[1]) :] if token in self.eos_ids]
        if known:
            return known[-1], None
        if already[0] == already[1] and ids[-1:] == already[0][-1:]:  # the next response is begun in any case
            return None
        for end in (*shared[-1:], *ids[-1:]):
            if end in self.added_ids and ids.count(end) == 1 + max(each.count(end) for each in already):
                return end, None
        rest = self.encode(after[len(text) :].lstrip()) if after.startswith(text) else ()
        return None, rest[0] if rest and rest[0] in self.added_ids else None

    # A sampled response, and its continuation.

    def message(self, asked: Conversation, sampled: Sequence[int], **variables: Any) -> dict[str, object]:
        """Convert a sampled response to the message that the template renders as this text: without its end token, and
        without the text that the template adds around each content (for gpt-oss, the channel)."""
        tokens = list(sampled)
        while tokens and tokens[-1] in self.end_ids:
            tokens.pop()
        text = self.decode(tokens)
        prompt = self.template.plain(asked, True, **variables)
        written = self.template.plain(asked.then({"role": "assistant", "content": PROBE}), **variables)
        before, _, after = written.partition(PROBE)
        for end in map(self.decode, ([token] for token in self.end_ids)):
            after = after.partition(end)[0]
        opening = before[len(prompt) :] if before.startswith(prompt) else ""
        if text.startswith(opening):
            text = text[len(opening) :]
        elif opening.strip() in text and opening.strip():  # after other text, such as a thought
            text = text.rpartition(opening.strip())[2]
        return {"role": "assistant", "content": text.removesuffix(after) if after.strip() else text}

    def continuation(
        self,
        recorded: Sequence[int],
        before: Conversation,
        after: Conversation,
        *,
        text: str | None = None,
        reasoning: bool = True,
        **variables: Any,
    ) -> list[int] | Branch:
        """Return the tokens that must be appended to ``recorded``, the tokens of a prompt and its response, to form the
        next prompt. ``text``: the text of the recorded tokens, if it is known.

        ``before``: the conversation of the recorded prompt. ``after``: the same conversation, followed by the response
        and further messages. The recorded tokens are reused only if the text that the template renders for ``after``
        begins with their text. One exception: sampled reasoning that is missing in ``after`` is kept at the place where
        the template writes the reasoning of that message; white space around it may differ. With ``reasoning`` false,
        reasoning is part of the content, and there is no exception. Raises ConversationError.
        """
        count = len(before.messages)
        if after.head(count) != before or len(after.messages) <= count:
            return Branch("the conversation before the response is another one")
        if after.messages[count]["role"] != "assistant":
            return Branch("the message after the prompt is not the assistant's")
        text = self.decode(recorded) if text is None else text
        whole = self.template.render(after, True, **variables)
        rest = _rest([whole], text, ())
        if rest is None and reasoning:
            rest = self._rest_around_thoughts(text, after, count, variables)
        if rest is None:  # for tokenizers that change a text
            rest = _rest([self.decode(self.encode(whole))], text, ())
        if rest is None:
            at = slice(start := in_common(whole, text), start + 40)
            return Branch(f"the template goes on with {whole[at]!r}, the recorded tokens with {text[at]!r}")
        added = list(self.encode(rest))
        if self.bytewise and self.decode(added) == rest and not text.endswith(_CUT):
            return added
        added = self.encode_after(rest)
        if self.more_text(text, recorded, added) != text + rest:
            return Branch("the tokenizer cannot continue the text in the middle")
        return added

    def more_text(self, text: str, before: Sequence[int], added: Sequence[int]) -> str:
        """Return the text of the tokens ``before`` and ``added``. ``text``: the text of ``before``."""
        if self.bytewise and not text.endswith(_CUT):
            return text + self.decode(added)
        return self.decode([*before, *added])

    def _rest_around_thoughts(
        self, recorded: str, after: Conversation, count: int, variables: Mapping[str, Any]
    ) -> str | None:
        """Return the text of ``after`` that follows the recorded text, if the two differ only in reasoning."""
        opened, pieces = self._around_thoughts(recorded, after, count, variables)
        rest = _rest(pieces, recorded, self._end_texts)
        if rest is None:
            return None
        # Equal answers cannot be told apart: the added text must come after the message that the last one answers.
        whole = _THOUGHT.join(pieces)
        try:
            asked = in_common(whole, self.template.plain(opened.head(count), **variables))
        except ConversationError:
            return rest
        return rest if len(rest) <= len(whole) - asked else None

    def _around_thoughts(
        self, recorded: str, after: Conversation, count: int, variables: Mapping[str, object]
    ) -> tuple[Conversation, list[str]]:
        """Split the text of ``after`` where the recorded text has reasoning that the messages lack. Returns ``after``
        with marks as the reasoning of those messages, and the pieces of its text.

        All messages without reasoning are tried at once, because a long conversation has many; if that does not fit,
        halves are tried, the oldest messages first. After ``_MOST_TRIES`` renderings, no pieces are returned.
        """
        pieces = [""]
        places = [
            index
            for index, message in enumerate(after.messages[: count + 1])
            if message["role"] == "assistant" and "reasoning_content" not in message
        ]
        waiting = [places] if places else []
        for _ in range(_MOST_TRIES):
            if not waiting:
                break
            group = waiting.pop()
            opened = after
            for index in group:
                opened = opened.replaced(index, {**opened.messages[index], "reasoning_content": _THOUGHT})
            try:
                found = self.template.plain(opened, True, **variables).split(_THOUGHT)
            except ConversationError:  # one message is refused: gpt-oss takes no reasoning beside a content and a call
                found = []
            if found and len(found) <= len(pieces):  # the template writes none of them
                continue
            if found and _end_of(found[:-1], recorded, self._end_texts) is not None:
                after, pieces = opened, found
            elif len(group) > 1:
                half = len(group) // 2
                waiting += (group[half:], group[:half])
        return after, [""] if waiting else pieces

    @cached_property
    def _end_texts(self) -> tuple[str, ...]:
        return tuple(self.decode([token]) for token in sorted(self.end_ids))

    def encode_after(self, text: str) -> list[int]:
        """Return the tokens of a text that follows other text. Some encode a text's first word differently."""
        ids = list(self.encode(text))
        if self.bytewise and self.decode(ids) == text:
            return ids
        anchor = min(self.end_ids, default=None)
        if anchor is None or self.decode([anchor, *ids]) == (start := self.decode([anchor])) + text:
            return ids
        first, *rest = self.encode(start + text)
        return rest if first == anchor and self.decode([anchor, *rest]) == start + text else ids


def _end_of(pieces: Sequence[str], text: str, ends: Sequence[str]) -> int | None:
    """Return the position in ``text`` where the last piece ends; None if the pieces do not fit. ``text`` begins with
    the first piece. Between pieces it has reasoning without any of ``ends``. White space around may differ."""
    first = pieces[0].rstrip()
    if not text.startswith(first):
        return None
    end = len(first)
    for piece in pieces[1:]:
        at = text.find(piece.strip(), end)
        if at < 0 or _has_any(text[end:at], ends):
            return None
        end = at + len(piece.strip())
    return end


def _has_any(text: str, parts: Sequence[str]) -> bool:
    return any(part in text for part in parts)


def _rest(pieces: Sequence[str], text: str, ends: Sequence[str]) -> str | None:
    """Return the part of the pieces after ``text``, which may have reasoning between them. None if it does not fit."""
    *others, last = pieces
    if not others:
        return last[len(text) :] if last.startswith(text) else None
    at, last = _end_of(others, text, ends), last.lstrip()
    shared = 0 if at is None else _overlap(text[at:], last)
    if shared < min(_SHORTEST_OVERLAP, len(last)) or _has_any(text[at : len(text) - shared], ends):
        return None
    return last[shared:]


def _overlap(text: str, start: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a prefix of ``start`` (Knuth, Morris, Pratt)."""
    start = start[: len(text)]
    borders, length = [0] * len(start), 0
    for place, character in enumerate(start + "\0" + text):
        while length and (length == len(start) or start[length] != character):
            length = borders[length - 1]
        if place and length < len(start) and start[length] == character:
            length += 1
        if place < len(start):
            borders[place] = length
    return length


def in_common(left: Sequence[object], right: Sequence[object]) -> int:
    """Return the length of the common prefix."""
    low, high = 0, min(len(left), len(right))
    while low < high:  # binary search, because Python compares slices fast
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
