"""``-k DIR``: the manifests that an overlay builds on, changed as it says.

Bases are read with this overlay's values (an overlay above wins), then patched, labelled and renamed, in that order:
a patch targets the names that the bases use. Loading is the only I/O; the rest works on nodes, so that what the
overlay wrote has the overlay's positions and everything else its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from collections.abc import Mapping as AnyMapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from areal.resources import validation
from areal.resources.diagnostics import Pos
from areal.resources.documents import Document
from areal.resources.loader import load_documents
from areal.resources.nodes import Mapping, Node, Scalar, Sequence, child, item_name, locate, mapping, plain, with_entry
from areal.resources.overlay_file import Overlay, OverlaySection, Patch
from areal.resources.patching import patched
from areal.resources.reading import Reading
from areal.resources.rename import prefixed
from areal.resources.sources import OVERLAY_FILE, read_sources, read_text
from areal.resources.suggest import did_you_mean
from areal.resources.templating import substitute
from areal.resources.tree import Path as TreePath
from areal.resources.tree import merge, path_text

MAX_OVERLAYS = 1_000
MAX_CHAIN = 32


@dataclass(frozen=True)
class _Section:
    """A part of an overlay file that applies, with the node it was read from."""

    spec: OverlaySection
    node: Mapping
    path: TreePath


@dataclass
class _Chain:
    """The overlays being read, outermost first, and how many were read in all."""

    folders: list[Path]
    count: int = 0


def overlay_documents(folder: str, values: AnyMapping[str, Any], reading: Reading) -> list[Document]:
    """The documents of the overlay in ``folder``; ``values`` win over those the overlay sets."""
    path = Path(folder)
    if not (path / OVERLAY_FILE).is_file():
        what = "no such folder" if not path.is_dir() else f"no {OVERLAY_FILE} in this folder"
        hint = f"use -f {folder} for plain manifests" if path.is_dir() else None
        reading.problems.add(Pos(folder, 1, 1), "", what, hint=hint)
        return []
    return _build(path, values, reading, _Chain([]))


def _build(folder: Path, outer: AnyMapping[str, Any], reading: Reading, chain: _Chain) -> list[Document]:
    sections = _sections(folder, reading)
    values: dict[str, Any] = {}
    for section in sections:
        values = merge(values, section.spec.values)
    values = merge(values, dict(outer))
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
    """The overlay file, and the profile's part of it. Empty after reporting what is wrong with it."""
    source = read_text(folder / OVERLAY_FILE, reading.problems)
    nodes = load_documents(source.text, source.file, reading.problems) if source is not None else []
    if source is None or len(nodes) != 1 or not isinstance(nodes[0], Mapping):
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
        path: TreePath = ("profiles", str(reading.profile))
        profile = child(node.entries["profiles"], str(reading.profile))
        assert isinstance(profile, Mapping)
        sections.append(_Section(overlay.profiles[str(reading.profile)], profile, path))
    return sections


def _bases(
    section: _Section, folder: Path, values: AnyMapping[str, Any], reading: Reading, chain: _Chain
) -> Iterator[Document]:
    for index, base in enumerate(section.spec.bases):
        pos = locate(section.node, ("bases", index))
        text = path_text((*section.path, "bases", index))
        path = _tidy(folder / base)
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


def _tidy(path: Path) -> Path:
    """``prod/../base`` as ``base``, unless a link makes those two places."""
    tidy = Path(os.path.normpath(path))
    return tidy if tidy.resolve() == path.resolve() else path


def _patch(
    documents: list[Document], section: _Section, values: AnyMapping[str, Any], reading: Reading
) -> list[Document]:
    for index, patch in enumerate(section.spec.patches):
        path = (*section.path, "patches", index)
        node = child(child(section.node.entries["patches"], index) or section.node, "merge")
        assert node is not None
        node = substitute(node, reading.context(values), (*path, "merge"))
        matching = [at for at, document in enumerate(documents) if _matches(document, patch)]
        if not matching:
            pos = locate(section.node, ("patches", index, "target"))
            message, hint = _unmatched(documents, patch)
            reading.problems.add(pos, path_text((*path, "target")), message, hint=hint)
        for at in matching:
            changed = patched(documents[at].node, node, reading.problems)
            if isinstance(changed, Mapping):
                documents[at] = documents[at]._replace(node=changed)
    return documents


def _matches(document: Document, patch: Patch) -> bool:
    target, name = patch.target, _name(document)
    labels = child(document.node.get("metadata") or document.node, "labels")
    carried = plain(labels) if isinstance(labels, Mapping) else {}
    return (
        target.kind in (None, _kind(document))
        and (target.name is None or fnmatchcase(name, target.name))
        and all(carried.get(key) == value for key, value in target.labels.items())
    )


def _unmatched(documents: list[Document], patch: Patch) -> tuple[str, str | None]:
    """Why a patch found nothing: a slip in the name, or a model that is inline in its service."""
    target = patch.target
    for document in documents:
        models = child(document.node.get("spec") or document.node, "models")
        inline = models.items if isinstance(models, Sequence) else ()
        if target.kind == "Model" and any(item_name(item) == target.name for item in inline):
            service = f"InferenceService/{_name(document)}"
            return (
                f"Model/{target.name} is inline in {service}",
                f"target {service} with merge: {{spec: {{models: [{{name: {target.name}, ...}}]}}}}",
            )
    names = [_name(document) for document in documents if target.kind in (None, _kind(document))]
    near = did_you_mean(target.name, names) if target.name else ""
    return f"matches no resource of the bases{near}", None


def _decorated(document: Document, section: _Section) -> Document:
    """The section's labels and annotations on the document, over its own."""
    node = document.node
    for field, entries in (("labels", section.spec.labels), ("annotations", section.spec.annotations)):
        metadata = node.get("metadata")
        if not entries or not isinstance(metadata, Mapping):
            continue
        written = section.node.entries[field]
        assert isinstance(written, Mapping)
        own = metadata.get(field)
        merged: Node = own if isinstance(own, Mapping) else mapping({}, written.pos)
        for key, value in written.entries.items():
            assert isinstance(merged, Mapping)
            merged = with_entry(merged, key, value, written.keys[key])
        node = with_entry(node, "metadata", with_entry(metadata, field, merged))
    return document._replace(node=node)


def _kind(document: Document) -> str:
    node = document.node.get("kind")
    return str(node.value) if isinstance(node, Scalar) else ""


def _name(document: Document) -> str:
    return item_name(document.node.get("metadata") or document.node) or ""
