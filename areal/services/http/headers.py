"""Header names, header fields as both ends of a connection have them, and ids of requests."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TypeVar, overload

REQUEST_ID = "x-request-id"
ANTHROPIC_REQUEST_ID = "request-id"  # where clients of their API look for it
OVERHEAD = "x-areal-overhead-us"  # our own time in a proxied reply, in microseconds; the engine's is left out
IGNORED = "x-areal-ignored"  # request fields that the API does not know
ATTEMPTS = "x-areal-attempts"  # how many workers were tried
EXPORT_ID = "x-areal-export-id"  # beside an export's columns as .npz
FINAL = "x-areal-final"  # data proxy to relay: another worker would be told the same, so the caller is told
PROGRESS_TIMEOUT = "x-areal-progress-timeout"  # relay to data proxy: seconds without progress that are too many
CALL = "x-areal-call"  # relay to data proxy: which call; all attempts at it have the same
AGAIN = "x-areal-again"  # relay to data proxy: an earlier attempt at the call may be recorded


T = TypeVar("T")


class Headers(Mapping[str, str]):
    """Header fields by name, in any case. ``raw`` has them as they came, names in lower case; one that came twice has
    its values joined by commas. A value that is no UTF-8 keeps its bytes as surrogates."""

    __slots__ = ("raw",)

    def __init__(self, raw: dict[bytes, bytes]) -> None:
        self.raw = raw

    def __getitem__(self, name: str) -> str:
        return self.raw[_key(name)].decode("utf-8", "surrogateescape")

    @overload
    def get(self, key: str, /) -> str | None: ...

    @overload
    def get(self, key: str, /, default: str | T) -> str | T: ...

    def get(self, key: str, /, default: T | None = None) -> str | T | None:
        value = self.raw.get(_key(key))
        return default if value is None else value.decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (name.decode("latin-1") for name in self.raw)

    def __len__(self) -> int:
        return len(self.raw)


@lru_cache(1024)
def _key(name: str) -> bytes:
    return name.lower().encode()


def add_field(raw: dict[bytes, bytes], name: bytes, value: bytes) -> None:
    """Take one more field as a parser found it."""
    name = name.lower()
    raw[name] = value if name not in raw else raw[name] + b", " + value


# Ids that are unique, not secret: a generator seeded once costs a hundredth of a system call an id.

_numbers = random.Random(secrets.randbits(128))


def unique_id(prefix: str) -> str:
    """``prefix`` and 96 random bits. Never a capability: those come from ``secrets``."""
    return f"{prefix}{_numbers.getrandbits(96):024x}"
