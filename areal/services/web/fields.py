"""Header fields of requests and answers, as both ends of a connection have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TypeVar, overload

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
