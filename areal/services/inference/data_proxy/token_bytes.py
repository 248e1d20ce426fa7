"""The exact bytes of each token, for the families of tokenizers in use.

Byte-level BPE writes each byte as one printable character (the table of GPT-2's paper code, which every byte-level
tokenizer shares: printable Latin-1 stands for itself, the other bytes are moved up from U+0100 in order). SentencePiece
vocabularies write a space as U+2581 and a lone byte as ``<0xNN>``.
"""

from __future__ import annotations

import re
from functools import cache

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


@cache
def byte_of_char() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(256 + position): byte for position, byte in enumerate(moved)}
    return table


def byte_level_bytes(piece: str) -> bytes:
    """The bytes of a byte-level piece. An added token, written as plain text, stands for itself."""
    table = byte_of_char()
    try:
        return bytes(table[char] for char in piece)
    except KeyError:
        return piece.encode()


def sentencepiece_bytes(piece: str) -> bytes:
    lone = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(lone[1], 16)]) if lone else piece.replace(_SPACE, " ").encode()
