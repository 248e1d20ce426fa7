"""Names for what a configuration chooses: registered ones, else ``module:attr`` (or ``module.attr``) of anything that
can be imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from areal.errors import UsageFault, did_you_mean
from areal.loading import load_attr

__all__ = ["Registry", "load_attr"]

T = TypeVar("T")


class Registry(Generic[T]):
    """``kind`` is what its entries are called in errors: workflow, reward, dataset."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator. Registering another thing under a taken name is a mistake."""

        def keep(entry: T) -> T:
            if self._entries.setdefault(name, entry) is not entry:
                raise ValueError(f"{self.kind} {name!r} is registered already")
            return entry

        return keep

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def resolve(self, name: str) -> T:
        """Raises UsageFault naming what was looked for."""
        if name in self._entries:
            return self._entries[name]
        if ":" not in name and "." not in name:
            raise UsageFault(
                f"there is no {self.kind} {name!r}{did_you_mean(name, self._entries)}",
                hint=f"register it, or write module:attr; there is {', '.join(self._entries) or 'none'}",
            )
        found: T = load_attr(name, self.kind)
        return found
