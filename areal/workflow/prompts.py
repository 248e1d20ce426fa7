"""From a row of a data set to the token ids of its prompt."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from areal.dataset.tokenizers import templated
from areal.errors import UsageFault


def resolved_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer, or the one in a model's folder."""
    if not isinstance(tokenizer, str):
        return tokenizer
    from areal.dataset.tokenizers import load_hf_tokenizer

    return load_hf_tokenizer(tokenizer)


def prompt_ids(tokenizer: Any, data: Mapping[str, Any], thinking: bool | None = None) -> list[int]:
    """Of ``input_ids``, ``messages`` (by the chat template) or ``prompt`` (a text as it is). Raises UsageFault."""
    if data.get("input_ids") is not None:
        return [int(token) for token in data["input_ids"]]
    if data.get("messages") is not None:
        return chat_ids(tokenizer, data["messages"], thinking)
    if isinstance(data.get("prompt"), str):
        return list(tokenizer.encode(data["prompt"]))
    raise UsageFault(f"a row needs messages, prompt or input_ids; this one has {', '.join(data) or 'nothing'}")


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]], thinking: bool | None = None) -> list[int]:
    """The prompt of a chat, up to where the assistant begins. ``thinking`` None: as the template has it."""
    variables = {} if thinking is None else {"enable_thinking": thinking}
    return templated(tokenizer, messages, add_generation_prompt=True, **variables)


class Prompts:
    """Token ids and text of prompts; those of rows that come again, in the next epoch, are not made again. Bounded by
    ``most`` tokens that are remembered."""

    def __init__(self, tokenizer: Any, thinking: bool | None = None, most: int = 1 << 20) -> None:
        self._tokenizer = tokenizer
        self._thinking = thinking
        self._most = most
        self._size = 0
        self._made: dict[bytes, tuple[tuple[int, ...], str]] = {}
        self._lock = threading.Lock()  # long prompts are made beside the loop, and by members of a group at once

    def of(self, data: Mapping[str, Any]) -> tuple[list[int], str]:
        """As ``prompt_ids``; the text is that of the tokens."""
        key = _key(data)
        if key is not None and (known := self._made.get(key)) is not None:
            return list(known[0]), known[1]
        ids = prompt_ids(self._tokenizer, data, self._thinking)
        text = self._tokenizer.decode(ids)
        if key is not None:
            self._remember(key, tuple(ids), text)
        return ids, text

    def _remember(self, key: bytes, ids: tuple[int, ...], text: str) -> None:
        with self._lock:
            if key in self._made:
                return
            self._made[key] = ids, text
            self._size += len(ids)
            while self._size > self._most:
                gone, _ = self._made.pop(next(iter(self._made)))
                self._size -= len(gone)


def _key(data: Mapping[str, Any]) -> bytes | None:
    """Of what the token ids are made from; None for what they are not worth remembering of."""
    if data.get("input_ids") is not None:
        return None
    try:
        return orjson.dumps((data.get("messages"), data.get("prompt")))
    except TypeError:  # no plain data
        return None
