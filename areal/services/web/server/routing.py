"""Which handler a method and a path belong to.

Paths without parameters are looked up; the few with some are tried in the order in which they were added. ``{name}``
stands for one segment, ``{name...}`` at the end for the rest of the path. A parameter is decoded after the route is
chosen, so that an encoded slash never chooses one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import unquote

from areal.services.web.errors import ApiError

T = TypeVar("T")


@dataclass
class _Pattern(Generic[T]):
    segments: tuple[str, ...]
    methods: dict[str, T] = field(default_factory=dict)

    def match(self, path: str) -> dict[str, str] | None:
        rest = self.segments[-1].endswith("...}")
        given = path.split("/", len(self.segments) - 1 if rest else -1)
        if len(given) != len(self.segments):
            return None
        found: dict[str, str] = {}
        for wanted, segment in zip(self.segments, given, strict=True):
            if wanted.startswith("{"):
                if not segment:
                    return None
                found[wanted.strip("{.}")] = unquote(segment)
            elif wanted != segment:
                return None
        return found


class RouteTable(Generic[T]):
    """A HEAD goes where the GET of its path goes."""

    def __init__(self) -> None:
        self._fixed: dict[str, dict[str, T]] = {}
        self._patterns: list[_Pattern[T]] = []

    def add(self, method: str, path: str, target: T) -> None:
        fixed = "{" not in path
        methods = self._fixed.setdefault(path, {}) if fixed else self._pattern(tuple(path.split("/"))).methods
        if method in methods:
            raise ValueError(f"{method} {path} is there already")
        methods[method] = target

    def _pattern(self, segments: tuple[str, ...]) -> _Pattern[T]:
        for pattern in self._patterns:
            if pattern.segments == segments:
                return pattern
        self._patterns.append(pattern := _Pattern[T](segments))
        return pattern

    def find(self, method: str, path: str) -> tuple[T, dict[str, str]]:
        """The target and the path's parameters. Raises 404, and 405 with the methods that the path has."""
        if (methods := self._fixed.get(path)) is not None:
            return _of_method(methods, method, path), {}
        for pattern in self._patterns:
            if (found := pattern.match(path)) is not None:
                return _of_method(pattern.methods, method, path), found
        raise ApiError(404, f"no such path: {method} {path}", code="unknown_path")


def _of_method(methods: dict[str, T], method: str, path: str) -> T:
    target = methods.get("GET" if method == "HEAD" else method)
    if target is None:
        allowed = sorted({*methods, *(("HEAD",) if "GET" in methods else ())})
        message = f"{method} is not allowed on {path}"
        raise ApiError(405, message, code="method_not_allowed", headers={"Allow": ", ".join(allowed)})
    return target
