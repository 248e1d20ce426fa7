"""``namePrefix``: new names for a set of documents, with every reference among them following.

A reference to an object outside the set stays. One that was implied by a default becomes explicit when its target is
renamed: a Model that never said ``service: default`` still belongs to the service that used to be ``default``.
"""

from __future__ import annotations

from areal.errors import ArealError
from areal.resources import registry
from areal.resources.documents import Document
from areal.resources.kinds import KINDS, Ref, parse_ref
from areal.resources.nodes import Mapping, Node, Scalar, Sequence, at_path, child, item_name, mapping, plain, with_entry
from areal.resources.tree import Path


def prefixed(documents: list[Document], prefix: str) -> list[Document]:
    """``documents`` with ``prefix`` before every name."""
    renamed = {ref for document in documents for ref in declared(document)}
    return [document._replace(node=_document(document.node, prefix, renamed)) for document in documents]


def declared(document: Document) -> list[Ref]:
    """The resource of a document and its inline models, as far as their names can be read."""
    node = document.node
    kind, name = _text(node.get("kind")), item_name(node.get("metadata") or node)
    if kind not in KINDS or name is None:
        return []
    inline = _inline(node) if kind == "InferenceService" else ()
    return [Ref(kind, name), *(Ref("Model", found) for item in inline if (found := item_name(item)) is not None)]


def _document(node: Mapping, prefix: str, renamed: set[Ref]) -> Mapping:
    kind, metadata, spec = _text(node.get("kind")), node.get("metadata"), node.get("spec")
    if isinstance(metadata, Mapping):
        metadata = _named(metadata, prefix)
        depends = metadata.get("dependsOn")
        if isinstance(depends, Sequence):
            items = tuple(_dependency(item, prefix, renamed) for item in depends.items)
            metadata = with_entry(metadata, "dependsOn", Sequence(items, depends.pos))
        node = with_entry(node, "metadata", metadata)
    if kind not in KINDS:
        return node
    spec = spec if isinstance(spec, Mapping) else mapping({}, node.key_pos("spec"))
    changed = _references(kind, spec, prefix, renamed)
    if kind == "InferenceService" and isinstance(models := changed.get("models"), Sequence):
        items = tuple(_named(item, prefix) if isinstance(item, Mapping) else item for item in models.items)
        changed = with_entry(changed, "models", Sequence(items, models.pos))
    return node if changed is spec else with_entry(node, "spec", changed)


def _references(kind: str, spec: Mapping, prefix: str, renamed: set[Ref]) -> Mapping:
    for reference in registry.references(kind, plain(spec)):
        if reference.ref in renamed:
            written = at_path(spec, reference.path)
            pos = written.pos if written is not None else spec.pos
            spec = _replaced(spec, reference.path, Scalar(prefix + reference.name, pos))
    return spec


def _named(node: Mapping, prefix: str) -> Mapping:
    name = node.get("name")
    if not isinstance(name, Scalar) or not isinstance(name.value, str):
        return node
    return with_entry(node, "name", Scalar(prefix + name.value, name.pos))


def _dependency(node: Node, prefix: str, renamed: set[Ref]) -> Node:
    try:
        ref = parse_ref(_text(node))
    except ArealError:  # reported when the document is assembled
        return node
    return Scalar(f"{ref.kind}/{prefix}{ref.name}", node.pos) if ref in renamed else node


def _inline(node: Mapping) -> tuple[Node, ...]:
    models = child(node.get("spec") or node, "models")
    return models.items if isinstance(models, Sequence) else ()


def _replaced(node: Mapping, path: Path, value: Node) -> Mapping:
    key = str(path[0])
    if len(path) == 1:
        return with_entry(node, key, value)
    inner = node.get(key)
    return with_entry(node, key, _replaced(inner, path[1:], value)) if isinstance(inner, Mapping) else node


def _text(node: Node | None) -> str:
    return node.value if isinstance(node, Scalar) and isinstance(node.value, str) else ""
