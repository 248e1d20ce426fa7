"""``-k DIR``: applies the changes in ``areal.overlay.yaml`` to the manifests that the overlay builds on.

Bases are read with this overlay's values (values of an outer overlay win), then patched, labelled and renamed, in that
order: a patch targets the names that the bases use. Loading is the only I/O. Changes are made on nodes, so that values
from the overlay have positions in the overlay file, and all others keep theirs.

``namePrefix`` also renames the references between the documents, but not references to other objects. A reference that
a default implies is written out if its target is renamed: a Model without ``service`` still belongs to the service that
was named ``default``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field, JsonValue

from areal.dataclasses import dataclass
from areal.errors import ArealError, did_you_mean
from areal.resources import validation
from areal.resources.documents import OVERLAY_FILE, Document, Reading, read_sources, read_text, substitute
from areal.resources.fields import SpecModel, Text, worded
from areal.resources.kinds import KINDS, Ref, parse_ref
from areal.resources.nodes import (
    MappingNode,
    Node,
    Pos,
    ScalarNode,
    SequenceNode,
    at_path,
    child,
    item_name,
    locate,
    mapping,
    patched,
    plain,
    text_of,
    with_entry,
)
from areal.resources.tree import FieldPath, UpdateClass, merge_values, path_text
from areal.resources.validation import references, spec_model
from areal.resources.yaml_io import load_documents

MAX_OVERLAYS = 1_000
MAX_CHAIN = 32

if TYPE_CHECKING:
    Kind: TypeAlias = str
else:
    Kind = Literal[*KINDS]


class PatchTarget(SpecModel):
    """Selects the resources that a patch changes: those that match every field that is set."""

    kind: Annotated[Kind | None, UpdateClass.META] = None
    """Kind of the resources. Absent: any."""
    name: Annotated[Text | None, UpdateClass.META] = None
    """Name of the resources before any prefix; `*` and `?` match. Absent: any."""
    labels: Annotated[dict[str, str], UpdateClass.META] = {}
    """Labels of the resources."""


class Patch(SpecModel):
    """A change to some resources."""

    target: Annotated[PatchTarget, UpdateClass.META]
    """The resources to change. It is an error if there are none."""
    merge: Annotated[dict[str, JsonValue], UpdateClass.META]
    """The patch: maps merge, lists of named maps merge by name, other values are replaced, `null` removes. `$patch:
    delete`, `$patch: replace` and `$append: [...]` request another operation."""


_PREFIX = worded(r"^([a-z0-9][-a-z0-9]*)?$", 'be lower case letters, digits and "-", and begin with no "-"')


class OverlaySection(SpecModel):
    """The changes of an overlay, or of one of its profiles."""

    bases: Annotated[list[Text], UpdateClass.META] = []
    """Manifests, folders of manifests, and other overlays to build on, relative to this file."""
    values: Annotated[dict[str, JsonValue], UpdateClass.META] = {}
    """`values.*` for expressions, in this overlay and in its bases. An overlay that builds on this one overrides
    them."""
    name_prefix: Annotated[str, Field(pattern=_PREFIX), UpdateClass.META] = ""
    """Prefix of every name. References between the resources are changed too."""
    labels: Annotated[dict[str, str], UpdateClass.META] = {}
    """Labels that are added to every resource."""
    annotations: Annotated[dict[str, str], UpdateClass.META] = {}
    """Annotations that are added to every resource."""
    patches: Annotated[list[Patch], UpdateClass.META] = []
    """Changes, in order."""


class Overlay(OverlaySection):
    """A variation of manifests, which stay unchanged."""

    api_version: Annotated[Literal["areal.dev/v1alpha1"], UpdateClass.META]
    """Version of this format."""
    kind: Annotated[Literal["Overlay"], UpdateClass.META]
    """Marks the file as an overlay."""
    profiles: Annotated[dict[str, OverlaySection], UpdateClass.META] = {}
    """Further changes, selected with `--profile NAME`."""


def prefixed(documents: list[Document], prefix: str) -> list[Document]:
    """Return ``documents`` with ``prefix`` before every name, and with their references renamed."""
    renamed = {ref for document in documents for ref in document.declared()}
    return [document._replace(node=_prefixed_node(document.node, prefix, renamed)) for document in documents]


def _prefixed_node(node: MappingNode, prefix: str, renamed: set[Ref]) -> MappingNode:
    kind, metadata, spec = text_of(node.get("kind")), node.get("metadata"), node.get("spec")
    if isinstance(metadata, MappingNode):
        metadata = _prefixed_name(metadata, prefix)
        depends = metadata.get("dependsOn")
        if isinstance(depends, SequenceNode):
            items = tuple(_prefixed_dependency(item, prefix, renamed) for item in depends.items)
            metadata = with_entry(metadata, "dependsOn", SequenceNode(items, depends.pos))
        node = with_entry(node, "metadata", metadata)
    if kind not in KINDS:
        return node
    written = spec if isinstance(spec, MappingNode) else mapping({}, node.key_pos("spec"))
    changed = written
    for reference in references(kind, plain(written)):
        if reference.ref in renamed:
            pos = (at_path(written, reference.path) or written).pos
            changed = _replaced(changed, reference.path, ScalarNode(prefix + reference.ref.name, pos))
    inline = spec_model(kind).INLINE
    if inline is not None and isinstance(declared := changed.get(inline[0]), SequenceNode):
        items = tuple(
            _prefixed_name(item, prefix) if isinstance(item, MappingNode) else item for item in declared.items
        )
        changed = with_entry(changed, inline[0], SequenceNode(items, declared.pos))
    return node if changed is written else with_entry(node, "spec", changed)


def _prefixed_name(node: MappingNode, prefix: str) -> MappingNode:
    name = node.get("name")
    return with_entry(node, "name", ScalarNode(prefix + text_of(name), name.pos)) if name and text_of(name) else node


def _prefixed_dependency(node: Node, prefix: str, renamed: set[Ref]) -> Node:
    try:
        ref = parse_ref(text_of(node))
    except ArealError:  # reported when the document is assembled
        return node
    return ScalarNode(f"{ref.kind}/{prefix}{ref.name}", node.pos) if ref in renamed else node


def _replaced(node: MappingNode, path: FieldPath, value: Node) -> MappingNode:
    key = str(path[0])
    if len(path) > 1:
        inner = node.get(key)
        if not isinstance(inner, MappingNode):
            return node
        value = _replaced(inner, path[1:], value)
    return with_entry(node, key, value)


@dataclass(frozen=True)
class _Section:
    """The overlay, or its section for the profile, with the node that it was read from."""

    spec: OverlaySection
    node: MappingNode
    path: FieldPath


@dataclass
class _Chain:
    """``folders``: the overlays that are being read, outermost first; ``count``: the overlays read as bases so far."""

    folders: list[Path]
    count: int = 0


def overlay_documents(folder: str, values: Mapping[str, object], reading: Reading) -> list[Document]:
    """Return the documents of the overlay in ``folder``; ``values`` take precedence over the overlay's values."""
    path = Path(folder)
    if not (path / OVERLAY_FILE).is_file():
        what = "no such folder" if not path.is_dir() else f"no {OVERLAY_FILE} in this folder"
        hint = f"use -f {folder} for plain manifests" if path.is_dir() else None
        if (path / "kustomization.yaml").is_file():  # of Kustomize, whose fields differ
            hint = f"kubectl kustomize {folder} | areal apply -f -"
        reading.problems.add(Pos(folder, 1, 1), "", what, hint=hint)
        return []
    return _build(path, values, reading, _Chain([]))


def _build(folder: Path, outer: Mapping[str, object], reading: Reading, chain: _Chain) -> list[Document]:
    sections = _sections(folder, reading)
    values: dict[str, object] = {}
    for section in sections:
        values = merge_values(values, section.spec.values)
    values = merge_values(values, dict(outer))
    chain.folders.append(folder.resolve())
    documents = [found for section in sections for found in _bases(section, folder, values, reading, chain)]
    chain.folders.pop()
    for section in sections:
        documents = _patch(documents, section, values, reading)
    for section in sections:
        documents = [_decorated(document, section) for document in documents]
    prefixes = [section.spec.name_prefix for section in sections if section.spec.name_prefix]
    return prefixed(documents, prefixes[-1]) if prefixes else documents


def _sections(folder: Path, reading: Reading) -> list[_Section]:
    """Return the overlay and its section for the profile; empty if the file is invalid, after reporting its faults."""
    source = read_text(folder / OVERLAY_FILE, reading.problems)
    nodes = load_documents(source.text, source.file, reading.problems) if source is not None else []
    if source is None or len(nodes) != 1 or not isinstance(nodes[0], MappingNode):
        if source is not None and not reading.problems:
            reading.problems.add(
                Pos(source.file, 1, 1), "", "an overlay is one map, with apiVersion, kind: Overlay and bases"
            )
        return []
    node = nodes[0]
    overlay, faults = validation.check_model(Overlay, plain(node))
    for fault in faults:
        pos = locate(node, fault.path, at_key=fault.at_key)
        reading.problems.add(pos, path_text(fault.path), fault.message)
    if not isinstance(overlay, Overlay):
        return []
    reading.profiles.update(overlay.profiles)
    sections = [_Section(overlay, node, ())]
    if reading.profile in overlay.profiles:
        path: FieldPath = ("profiles", str(reading.profile))
        profile = child(node.entries["profiles"], str(reading.profile))
        assert isinstance(profile, MappingNode)
        sections.append(_Section(overlay.profiles[str(reading.profile)], profile, path))
    return sections


def _bases(
    section: _Section, folder: Path, values: Mapping[str, object], reading: Reading, chain: _Chain
) -> Iterator[Document]:
    for index, base in enumerate(section.spec.bases):
        pos = locate(section.node, ("bases", index))
        text = path_text((*section.path, "bases", index))
        # ``prod/../base`` is read as ``base``, unless symbolic links make them different folders.
        path = folder / base
        tidy = Path(os.path.normpath(path))
        path = tidy if tidy.resolve() == path.resolve() else path
        if not path.exists():
            what = "remote bases are not read: copy the files" if "://" in base else f'no such file or folder: "{path}"'
            reading.problems.add(pos, text, what)
        elif not (path / OVERLAY_FILE).is_file():
            yield from reading.documents(read_sources((str(path),), False, None, reading.problems), values)
        elif path.resolve() in chain.folders:
            reading.problems.add(pos, text, f'"{base}" leads back here: an overlay cannot build on itself')
        elif chain.count >= MAX_OVERLAYS or len(chain.folders) >= MAX_CHAIN:
            reading.problems.add(pos, text, f"more than {MAX_OVERLAYS} overlays, or {MAX_CHAIN} on top of each other")
        else:
            chain.count += 1
            yield from _build(path, values, reading, chain)


def _patch(
    documents: list[Document], section: _Section, values: Mapping[str, object], reading: Reading
) -> list[Document]:
    for index, patch in enumerate(section.spec.patches):
        path = (*section.path, "patches", index)
        node = child(child(section.node.entries["patches"], index) or section.node, "merge")
        assert node is not None
        node = substitute(node, reading.context(values), (*path, "merge"))
        matched = False
        for at, document in enumerate(documents):
            changed: Node = document.node
            if _matches(document, patch):
                matched, changed = True, patched(document.node, node, reading.problems)
            elif inline := [ref for ref in document.inline() if _matches(document, patch, ref)]:
                matched = True
                if child(node, "metadata") is not None:
                    message = f"{inline[0]} is inline in {document.kind}/{document.name}, whose metadata it has"
                    reading.problems.add(locate(node, ("metadata",)), path_text((*path, "merge", "metadata")), message)
                changed = _inline_patched(document.node, inline, node, reading)
            if isinstance(changed, MappingNode):
                documents[at] = document._replace(node=changed)
        if not matched:
            pos = locate(section.node, ("patches", index, "target"))
            names = [document.name for document in documents if patch.target.kind in (None, document.kind)]
            near = did_you_mean(patch.target.name, names) if patch.target.name else ""
            reading.problems.add(pos, path_text((*path, "target")), f"matches no resource of the bases{near}")
    return documents


def _inline_patched(node: MappingNode, refs: list[Ref], patch: Node, reading: Reading) -> MappingNode:
    """Return the document with ``patch.spec`` merged into the objects ``refs`` that it declares inline."""
    declared, spec = spec_model(text_of(node.get("kind"))).INLINE, child(patch, "spec")
    assert declared is not None
    field = declared[0]
    items = at_path(node, ("spec", field))
    if spec is None or not isinstance(items, SequenceNode):
        return node
    names = {ref.name for ref in refs}
    changed = tuple(patched(it, spec, reading.problems) if item_name(it) in names else it for it in items.items)
    return _replaced(node, ("spec", field), SequenceNode(changed, items.pos))


def _matches(document: Document, patch: Patch, inline: Ref | None = None) -> bool:
    """Return whether the patch is for the document, or for the object ``inline`` in it, which has the document's
    labels."""
    target, name = patch.target, document.name if inline is None else inline.name
    labels = child(document.node.get("metadata") or document.node, "labels")
    carried = plain(labels) if isinstance(labels, MappingNode) else {}
    return (
        target.kind in ((None, document.kind) if inline is None else (inline.kind,))
        and (target.name is None or fnmatchcase(name, target.name))
        and all(carried.get(key) == value for key, value in target.labels.items())
    )


def _decorated(document: Document, section: _Section) -> Document:
    """Return the document with the section's labels and annotations merged over its own."""
    node = document.node
    for field, entries in (("labels", section.spec.labels), ("annotations", section.spec.annotations)):
        metadata = node.get("metadata")
        if not entries or not isinstance(metadata, MappingNode):
            continue
        written = section.node.entries[field]
        assert isinstance(written, MappingNode)
        own = metadata.get(field)
        merged: Node = own if isinstance(own, MappingNode) else mapping({}, written.pos)
        for key, value in written.entries.items():
            assert isinstance(merged, MappingNode)
            merged = with_entry(merged, key, value, written.keys[key])
        node = with_entry(node, "metadata", with_entry(metadata, field, merged))
    return document._replace(node=node)
