"""Reading a request field by field: each one is honoured, refused by name, or reported as ignored.

``null`` is as good as absent. What no reader asked for at the end is unknown to the API and named in
``x-areal-ignored``; nothing is dropped silently.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from areal.services.web.errors import ApiError, bad_request

_MOST_IGNORED_NAMES = 50


def unsupported(name: str, why: str) -> ApiError:
    return bad_request(f"{name} is not supported: {why}", param=name, code="unsupported_parameter")


class Fields:
    """The fields of one request body, struck off as they are read."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in data.items() if value is not None}

    def take(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def given(self, name: str) -> bool:
        return name in self._left

    @property
    def is_empty(self) -> bool:
        return not self._left

    def has_none(self, names: frozenset[str]) -> bool:
        """Whether none of ``names`` is given: most calls say little, and asking for each field costs its share."""
        return names.isdisjoint(self._left)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise bad_request(f"{name} must be a number", param=name)
        if not low <= value <= high:
            raise bad_request(f"{name} must be between {low:g} and {high:g}", param=name)
        return float(value)

    def whole(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad_request(f"{name} must be a whole number", param=name)
        if not low <= value <= high:
            raise bad_request(f"{name} must be between {low} and {high}", param=name)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise bad_request(f"{name} must be true or false", param=name)
        return value

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise bad_request(f"{name} must be a string", param=name)
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.take(name, {})
        if not isinstance(value, dict):
            raise bad_request(f"{name} must be an object", param=name)
        return value

    def texts(self, name: str, at_most: int) -> tuple[str, ...]:
        """One string, or a list of them; none of them empty."""
        value = self.take(name, [])
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
            raise bad_request(f"{name} must be a string or a list of strings, not empty ones", param=name)
        if len(items) > at_most:
            raise bad_request(f"{name} may hold at most {at_most} strings", param=name)
        return tuple(items)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        value = self.take(name, [])
        if not is_token_ids(value, vocab_size):
            raise bad_request(f"{name} must be a list of token ids below {vocab_size}", param=name)
        return tuple(value)

    def accept(self, names: Iterable[str]) -> None:
        """Known fields that change nothing in the answer."""
        for name in names:
            self.take(name)

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Known fields that cannot be honoured. Raises 400 for the first that is given."""
        for name, why in reasons.items():
            if name in self._left:
                raise unsupported(name, why)

    def ignored(self) -> tuple[str, ...]:
        """What nobody asked for, as it can stand in a header."""
        if not self._left:
            return ()
        names = sorted(quote(name, safe="") for name in self._left)
        more = len(names) - _MOST_IGNORED_NAMES
        return tuple(names) if more <= 0 else (*names[:_MOST_IGNORED_NAMES], f"and {more} more")


def is_token_ids(value: object, vocab_size: int) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < vocab_size for item in value)
