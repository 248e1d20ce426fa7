"""One YAML document of a manifest on its way to a resource."""

from __future__ import annotations

from typing import NamedTuple

from areal.resources.diagnostics import Pos, Problems
from areal.resources.loader import load_documents
from areal.resources.nodes import Mapping, Node, Scalar, Sequence
from areal.resources.sources import SourceText


class Document(NamedTuple):
    """``origin`` says which generated item it is (``each[2]``), empty for one written out."""

    node: Mapping
    source: SourceText
    origin: str = ""

    def report(self, problems: Problems, pos: Pos, path: str, message: str, *, hint: str | None = None) -> None:
        """A fault in this document; a generated one says which item it was, since all share one position."""
        problems.add(pos, path, message, hint=hint, origin=self.origin)


def read_documents(source: SourceText, problems: Problems) -> list[Document]:
    """The documents of one file, ``kind: List`` taken apart. An empty file is a fault when it was named."""
    before = problems.met
    found: list[Document] = []
    for node in load_documents(source.text, source.file, problems):
        found += _flatten(node, source, problems)
    if not found and source.named and problems.met == before:
        problems.add(Pos(source.file, 1, 1), "", "no resources: the file is empty")
    return found


def _flatten(node: Node, source: SourceText, problems: Problems) -> list[Document]:
    if not isinstance(node, Mapping):
        problems.add(node.pos, "", "a resource is a map with apiVersion, kind, metadata and spec")
        return []
    kind = node.get("kind")
    if not (isinstance(kind, Scalar) and kind.value == "List"):
        return [Document(node, source)]
    items = node.get("items")
    if not isinstance(items, Sequence):
        problems.add(node.key_pos("items"), "items", "a List needs a list of items")
        return []
    return [document for item in items.items for document in _flatten(item, source, problems)]
