"""A tokenizer of characters and a few special tokens, for templates of the tests' own."""

from __future__ import annotations

import re
from collections.abc import Sequence

from areal.conversation import Chat, Template

_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|return|>", "<|end|>", "<think>", "</think>")
_SPLIT = re.compile("(" + "|".join(map(re.escape, _SPECIAL)) + ")")
_BASE = 0x110000


def encode(text: str) -> list[int]:
    ids: list[int] = []
    for piece in _SPLIT.split(text):
        ids += [_BASE + _SPECIAL.index(piece)] if piece in _SPECIAL else map(ord, piece)
    return ids


def decode(ids: Sequence[int]) -> str:
    return "".join(_SPECIAL[token - _BASE] if token >= _BASE else chr(token) for token in ids)


def chat(source: str, eos: str = "<|im_end|>") -> Chat:
    added = range(_BASE, _BASE + len(_SPECIAL))
    return Chat(Template(source, {"eos_token": eos}), encode, decode, encode(eos), added)
