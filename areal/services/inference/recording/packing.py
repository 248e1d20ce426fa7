"""One interaction as bytes: a checksummed header in JSON, then the arrays.

    magic (4) | crc32 of the rest (4) | header length (4) | header | prompt int32 | output int32 | logprobs float32

A prompt that begins with all the parent's tokens is stored without them: the header's ``shared`` counts them. So a
conversation of n turns takes the space of its longest prompt, not of the sum.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import orjson

_MAGIC = b"ARI1"
_FRONT = struct.Struct("<4sII")


class CorruptRecord(Exception):
    """Stored bytes that are not those that were written, or that this version cannot read. Names what they belong
    to."""

    code = "record_corrupted"


@dataclass(frozen=True)
class Packed:
    """An interaction as stored. ``prompt`` is what follows the ``shared`` tokens of the parent."""

    header: Mapping[str, Any]
    prompt: array[int]
    output: array[int]
    logprobs: array[float]

    @property
    def shared(self) -> int:
        shared: int = self.header["shared"]
        return shared

    def versions(self) -> array[int]:
        versions = array("q")
        for version, count in self.header["versions"]:
            versions.extend(array("q", [version]) * count)
        return versions


def pack(header: Mapping[str, Any], prompt: array[int], output: array[int], logprobs: array[float]) -> bytes:
    head = orjson.dumps({**header, "lengths": [len(prompt), len(output)]})
    body = b"".join((len(head).to_bytes(4, "little"), head, prompt.tobytes(), output.tobytes(), logprobs.tobytes()))
    return _MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def unpack(data: bytes, what: str) -> Packed:
    """Raises CorruptRecord, naming ``what``."""
    try:
        magic, crc, length = _FRONT.unpack_from(data)
        if magic != _MAGIC or zlib.crc32(memoryview(data)[8:]) != crc:
            raise CorruptRecord(f"{what}: the checksum does not match")
    except struct.error as error:
        raise CorruptRecord(f"{what}: cut short") from error
    at = _FRONT.size + length
    header = orjson.loads(data[_FRONT.size : at])
    asked, answered = header["lengths"]
    prompt, output, logprobs = array("i"), array("i"), array("f")
    for part, count in ((prompt, asked), (output, answered), (logprobs, answered)):
        end = at + count * part.itemsize
        part.frombytes(data[at:end])
        at = end
    return Packed(header, prompt, output, logprobs)


def token_array(values: Sequence[int]) -> array[int]:
    """As ``array("i", values)``, in a quarter of its time; an array that is one already is given back."""
    if isinstance(values, array):
        return values
    tokens = array("i")
    tokens.frombytes(struct.pack(f"{len(values)}i", *values))
    return tokens


def runs(versions: Sequence[int]) -> list[tuple[int, int]]:
    """Versions change rarely: (version, how many tokens in a row)."""
    return [(version, len(list(group))) for version, group in groupby(versions)]


def checksum(*values: object) -> int:
    """Of a control row's columns, stored beside them."""
    return zlib.crc32(repr(values).encode())
