"""Which earlier turn a call continues: digests of conversations and of token prefixes.

A conversation is digested message by message, each digest including the one before, so that a turn knows the digest
of everything up to and with its answer (``after``), and a call the digests of all its prefixes that end with an
answer: the parent is the turn whose ``after`` is the longest of them. Only what a client faithfully sends back
counts: role, text, tool calls.

Tokens are digested as a whole; a turn is a token parent when the call's prompt begins with all its tokens.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

DIGEST_BYTES = 16


@dataclass(frozen=True)
class Conversation:
    """``answered``: the digests up to and with each assistant message; ``whole``: that of all messages."""

    answered: tuple[bytes, ...]
    whole: bytes

    def after(self, answer: Mapping[str, Any]) -> bytes:
        """The digest of the conversation with ``answer`` at its end."""
        return _following(self.whole, answer)


def conversation(messages: Iterable[Mapping[str, Any]]) -> Conversation:
    answered, last = [], b""
    for message in messages:
        last = _following(last, message)
        if message.get("role") == "assistant":
            answered.append(last)
    return Conversation(tuple(answered), last)


def _following(before: bytes, message: Mapping[str, Any]) -> bytes:
    return blake2b(before + _essence(message), digest_size=DIGEST_BYTES).digest()


def _essence(message: Mapping[str, Any]) -> bytes:
    calls = message.get("tool_calls") or []
    essence = [message.get("role"), _text(message.get("content")), [_call(call) for call in calls]]
    return orjson.dumps(essence, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)


def _text(content: object) -> object:
    """One text part, or several, weigh the same as their text."""
    if not isinstance(content, list):
        return content or ""
    parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else content


def _call(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(orjson.JSONDecodeError):
            arguments = orjson.loads(arguments)
    return [function.get("name"), arguments]


def body_digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=DIGEST_BYTES).digest()


class TokenPrefix:
    """Digests of a prompt's prefixes at the lengths asked for, each token hashed about once."""

    def __init__(self, tokens: array[int]) -> None:
        self._bytes = memoryview(tokens).cast("B")
        self._width = tokens.itemsize
        self._length = len(tokens)

    def digests(self, lengths: Iterable[int]) -> dict[int, bytes]:
        """By length; lengths that the prompt does not have are left out."""
        found, state, done = {}, blake2b(digest_size=DIGEST_BYTES), 0
        for length in sorted(set(lengths)):
            if length > self._length:
                break
            state.update(self._bytes[done * self._width : length * self._width])
            done = length
            found[length] = state.copy().digest()
        return found


def token_digest(*parts: array[int]) -> bytes:
    state = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(memoryview(part).cast("B"))
    return state.digest()


def text_mark(text: str) -> tuple[int, bytes]:
    """Length and digest of a text, by which a longer one is known to begin with it."""
    return len(text), blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def begins_with(text: str, mark: tuple[int, bytes]) -> bool:
    return len(text) >= mark[0] and text_mark(text[: mark[0]]) == mark
