"""The little that a relay reads of a request: the model, a guess of its size, and what its prompt begins with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from areal.services.inference.router.picking import CallKey
from areal.services.web.body import decode_object
from areal.services.web.errors import bad_request

_BYTES_PER_TOKEN = 4
_DEFAULT_ANSWER_TOKENS = 256
_MOST_ANSWER_TOKENS = 131_072  # a call that asks for more should not keep a worker empty
_PREFIX_CHARS = 4096
_PREFIX_TOKENS = 512


@dataclass(frozen=True)
class Envelope:
    model: str | None
    key: CallKey


def read_envelope(body: bytes, journal: str | None = None, *, with_prefix: bool) -> Envelope:
    """``journal``: that of the caller's session. Raises 400 for a body that is no JSON object, or whose model is no
    string."""
    data = decode_object(body)
    model = data.get("model")
    if model is not None and not isinstance(model, str):
        raise bad_request("model must be a string", param="model")
    prefix = prompt_prefix(data) if with_prefix else None
    tokens = len(body) / _BYTES_PER_TOKEN + _answer_tokens(data)
    return Envelope(model, CallKey(tokens, prefix, journal))


def _answer_tokens(data: dict[str, Any]) -> float:
    names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
    asked = next((data[name] for name in names if data.get(name) is not None), None)
    if type(asked) is not int or asked <= 0:
        return _DEFAULT_ANSWER_TOKENS
    return float(min(asked, _MOST_ANSWER_TOKENS))


def prompt_prefix(data: dict[str, Any]) -> bytes | None:
    """A digest that equal beginnings share. None where there is no prompt to speak of.

    For a chat: everything up to and with the first user message, so that each later turn of a conversation, and
    each sample of a group, has the same one. For a completion: the first characters, or the first token ids.
    """
    messages, prompt = _messages(data), data.get("prompt")
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(messages, list) and messages:
        for message in messages:
            if not isinstance(message, dict):
                return None
            digest.update(f"{message.get('role')}\0{message.get('content')}"[:_PREFIX_CHARS].encode())
            if message.get("role") == "user":
                break
    elif isinstance(prompt, str):
        digest.update(prompt[:_PREFIX_CHARS].encode())
    elif isinstance(prompt, list) and prompt:
        first = prompt[0] if isinstance(prompt[0], list | str) else prompt
        digest.update(repr(first[:_PREFIX_TOKENS]).encode())
    else:
        return None
    return digest.digest()


def _messages(data: dict[str, Any]) -> object:
    """A chat's messages; for the other APIs, with what comes before them, and from where they have them."""
    before = data.get("system", data.get("instructions"))
    messages = data.get("messages", data.get("input"))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if before is None or not isinstance(messages, list):
        return messages
    return [{"role": "system", "content": before}, *messages]
