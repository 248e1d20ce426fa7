"""What rendering yields: resources as their authors wrote them, each value traceable to a file and line."""

from __future__ import annotations

from collections.abc import Mapping as AnyMapping
from dataclasses import dataclass, field
from typing import Any

from areal.resources.diagnostics import Pos
from areal.resources.kinds import Ref
from areal.resources.nodes import Mapping, locate
from areal.resources.tree import Path, path_text


@dataclass(frozen=True)
class Source:
    """The file a resource was read from. ``sha256`` is of the whole file; ``file`` is as named on the command line."""

    file: str
    line: int
    sha256: str

    def to_json(self) -> dict[str, str | int]:
        return {"file": self.file, "line": self.line, "sha256": self.sha256}


@dataclass(frozen=True)
class Resource:
    """One object as wished for. ``spec`` is sparse and plain: what was written, after templating, with YAML's names
    and no defaults. ``depends_on`` holds canonical references (``Model/qwen``); ``origin`` says which generated item
    it is (``each[2]``)."""

    kind: str
    name: str
    labels: AnyMapping[str, str]
    annotations: AnyMapping[str, str]
    depends_on: tuple[str, ...]
    spec: dict[str, Any]
    source: Source
    owned_by: Ref | None = None
    spec_node: Mapping = field(compare=False, repr=False, default_factory=lambda: Mapping({}, {}, Pos("", 1, 1)))
    metadata_node: Mapping = field(compare=False, repr=False, default_factory=lambda: Mapping({}, {}, Pos("", 1, 1)))
    pos: Pos = field(compare=False, default=Pos("", 1, 1))
    spec_path: Path = field(compare=False, repr=False, default=("spec",))
    origin: str = field(compare=False, default="")

    @property
    def ref(self) -> Ref:
        return Ref(self.kind, self.name)

    def pos_of(self, path: Path) -> Pos:
        """Where the field at ``path`` (inside the spec) was written, or the deepest part of the path that was."""
        return locate(self.spec_node, path)

    def text_of(self, path: Path) -> str:
        """``path`` (inside the spec) as it reads in the file: an inline model's begins with its service's."""
        return path_text((*self.spec_path, *path))


@dataclass(frozen=True)
class PlacedReference:
    """``source`` names ``target`` at ``pos``. ``declared``: the target is among the rendered resources; the others
    must exist in state."""

    source: Ref
    target: Ref
    path: str
    pos: Pos
    declared: bool


@dataclass(frozen=True)
class Rendered:
    """Everything the files say. ``env`` holds the environment variables that expressions read, with their values."""

    resources: tuple[Resource, ...]
    references: tuple[PlacedReference, ...] = ()
    env: AnyMapping[str, str] = field(default_factory=dict)

    @property
    def unresolved(self) -> tuple[PlacedReference, ...]:
        """References to objects that are not in the files."""
        return tuple(reference for reference in self.references if not reference.declared)
