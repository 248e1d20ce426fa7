"""Header names, the header fields of requests and responses, and request ids."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar, overload

REQUEST_ID = "x-request-id"
ANTHROPIC_REQUEST_ID = "request-id"  # where Anthropic's clients look for it
OVERHEAD = "x-areal-overhead-us"  # microseconds of a proxied response, without the engine's
IGNORED = "x-areal-ignored"  # request fields that the API does not know
ATTEMPTS = "x-areal-attempts"  # how many workers were tried
EXPORT_ID = "x-areal-export-id"  # beside an export's columns as .npz
FINAL = "x-areal-final"  # data proxy to relay: do not retry, every worker would answer the same
PROGRESS_TIMEOUT = "x-areal-progress-timeout"  # relay to data proxy: seconds without progress before a timeout
CALL = "x-areal-call"  # relay to data proxy: the call's id, the same in all attempts
JOURNAL = "x-areal-journal"  # relay to data proxy: the journal of the call's session
STARTED = "x-areal-sessions-started"  # data proxy to router: its count of started sessions, with these
AGAIN = "x-areal-again"  # relay to data proxy: an earlier attempt may have been recorded

EVENT_STREAM: Mapping[str, str] = MappingProxyType(
    {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
)
"""The headers of a response that is a stream of server-sent events."""

_SINGLE = frozenset(
    b"""host authorization x-api-key content-type content-length content-encoding expect origin upgrade idempotency-key
    anthropic-version x-stainless-retry-count sec-websocket-key sec-websocket-version""".split()
)

T = TypeVar("T")


def is_single(name: bytes) -> bool:
    """Return whether a request has at most one field of this lower-case name. Of two, another program may go by the
    other."""
    return name in _SINGLE or name.startswith(b"x-areal-")


class Headers(Mapping[str, str]):
    """Header fields by case-insensitive name. ``raw`` maps lower-case names to values; the values of a repeated field
    are joined by commas. Bytes that are not UTF-8 are decoded as surrogates."""

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

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _key(name) in self.raw

    def __iter__(self) -> Iterator[str]:
        return (name.decode("latin-1") for name in self.raw)

    def __len__(self) -> int:
        return len(self.raw)


@lru_cache(1024)
def _key(name: str) -> bytes:
    return name.lower().encode()


# Request ids are unique, not secret: a generator that is seeded once needs no system call for each.
_numbers = random.Random(secrets.randbits(128))


def unique_id(prefix: str) -> str:
    """``prefix`` and 96 random bits. Not for keys: those come from ``secrets``."""
    return f"{prefix}{_numbers.getrandbits(96):024x}"
