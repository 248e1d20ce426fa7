"""Small values and barriers that the two sides of a pair exchange while they set a transfer up."""

from __future__ import annotations

from typing import Any

from areal.services.web.errors import ApiError

_MOST_VALUES = 10_000  # of one pair: a transfer needs a few for each rank


class Metadata:
    def __init__(self) -> None:
        self._values: dict[str, dict[str, Any]] = {}
        self._sets: dict[str, dict[str, set[str]]] = {}

    def get(self, pair: str, key: str) -> Any:
        """Raises 404; a value that is null exists."""
        try:
            return self._values[pair][key]
        except KeyError:
            raise ApiError(404, f"pair {pair!r} has no value {key!r}", code="value_not_found") from None

    def put(self, pair: str, key: str, value: Any) -> None:
        values = self._values.setdefault(pair, {})
        if key not in values and len(values) >= _MOST_VALUES:
            raise ApiError(413, f"pair {pair!r} has {_MOST_VALUES} values already", code="too_many_values")
        values[key] = value

    def delete(self, pair: str, key: str) -> bool:
        return self._values.get(pair, {}).pop(key, self) is not self

    def add(self, pair: str, key: str, member: str) -> int:
        """The size of the set with ``member`` in it."""
        members = self._sets.setdefault(pair, {}).setdefault(key, set())
        if member not in members and len(members) >= _MOST_VALUES:
            raise ApiError(413, f"the set {key!r} has {_MOST_VALUES} members already", code="too_many_values")
        members.add(member)
        return len(members)

    def size(self, pair: str, key: str) -> int:
        return len(self._sets.get(pair, {}).get(key, ()))

    def forget(self, pair: str) -> None:
        self._values.pop(pair, None)
        self._sets.pop(pair, None)
