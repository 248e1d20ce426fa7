"""Faults of manifests with their positions. Standard library only.

Every fault of every file is collected before anything is raised; each reads ``file:line:col: path: message``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from areal.errors import InvalidManifest


class Pos(NamedTuple):
    """A place in a file, 1-based. A value given on the command line has its flag as the file."""

    file: str
    line: int
    col: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.col}"


@dataclass(frozen=True)
class Diagnostic:
    """``path`` is the place inside the resource (``spec.models[qwen].replicas``), empty for the file as a whole."""

    pos: Pos
    path: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        where = f"{self.pos}: {self.path}" if self.path else str(self.pos)
        return f"{where}: {self.message}"

    def to_json(self) -> dict[str, str | int | None]:
        return {
            "file": self.pos.file,
            "line": self.pos.line,
            "col": self.pos.col,
            "path": self.path,
            "message": self.message,
            "hint": self.hint,
        }


class ManifestError(InvalidManifest):
    """At least one diagnostic, in file order."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        hints = dict.fromkeys(found.hint for found in self.diagnostics if found.hint)
        super().__init__("\n".join(map(str, self.diagnostics)), hint="; ".join(hints) or None)


@dataclass
class Problems:
    """Diagnostics as they are found. A fault that is met twice (an alias, a template) is kept once, with the origins
    (``each[2]``) that met it; ``met`` counts every time. ``files`` is the order in which files were read."""

    found: dict[Diagnostic, dict[str, None]] = field(default_factory=dict)
    met: int = 0
    files: dict[str, None] = field(default_factory=dict)

    def add(self, pos: Pos, path: str, message: str, *, hint: str | None = None, origin: str = "") -> None:
        self.met += 1
        self.found.setdefault(Diagnostic(pos, path, message, hint), {})[origin] = None

    def __bool__(self) -> bool:
        return bool(self.found)

    def diagnostics(self) -> list[Diagnostic]:
        """Files in the order they were read, then by position."""
        files = {**self.files, **{diagnostic.pos.file: None for diagnostic in self.found}}
        order = {file: index for index, file in enumerate(files)}
        ordered = sorted(self.found, key=lambda found: (order[found.pos.file], found.pos[1:]))
        placed = []
        for each in ordered:
            origins = [origin for origin in self.found[each] if origin]
            more = f" and {len(origins) - 1} more" if len(origins) > 1 else ""
            placed.append(replace(each, message=f"{each.message} ({origins[0]}{more})" if origins else each.message))
        return placed

    def raise_if_any(self) -> None:
        """ManifestError with everything found so far."""
        if self.found:
            raise ManifestError(self.diagnostics())
