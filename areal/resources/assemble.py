"""A plain document to resources: the envelope, the metadata and the spec checked, inline models taken out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from areal.resources import validation
from areal.resources.diagnostics import Pos, Problems
from areal.resources.documents import Document
from areal.resources.kinds import API_VERSION, KINDS, Ref
from areal.resources.metadata import Metadata
from areal.resources.nodes import (
    Mapping,
    Node,
    Scalar,
    Sequence,
    at_path,
    is_unreadable,
    item_name,
    locate,
    plain,
    without_entry,
)
from areal.resources.resource import Resource, Source
from areal.resources.suggest import did_you_mean
from areal.resources.tree import Path, path_text
from areal.resources.validation import Fault

ENVELOPE = ("apiVersion", "kind", "metadata", "spec", "profiles")


def assemble(document: Document, problems: Problems) -> list[Resource]:
    """The resource of a document, its inline models after it. Empty, or incomplete, after reporting faults."""
    kind = _kind(document, problems)
    _envelope(document, problems)
    metadata = _metadata(document, problems)
    spec_node = _spec(document, problems)
    if kind is None or spec_node is None:
        return []
    spec = plain(spec_node)
    _, faults = validation.check_spec(kind, spec)
    _report(faults, document, spec_node, ("spec",), problems)
    if metadata is None:
        return []
    resource = _resource(document, kind, metadata, spec, spec_node)
    if kind != "InferenceService" or "models" not in spec:
        return [resource]
    return [_without_models(resource), *_inline_models(resource)]


def _kind(document: Document, problems: Problems) -> str | None:
    node = document.node.get("kind")
    if node is None:
        keys = list(document.node.entries)
        hint = "values go in with --values" if keys and not set(keys) & {*ENVELOPE, "template"} else None
        document.report(problems, document.node.pos, "", 'required field "kind" is missing', hint=hint)
        return None
    text = node.value if isinstance(node, Scalar) else None
    if not isinstance(text, str):
        document.report(problems, node.pos, "kind", f"expected text, got {validation.describe(plain(node))}")
        return None
    if text in KINDS:
        return text
    message = f'unknown kind "{text}"{did_you_mean(text, KINDS)}'
    document.report(problems, node.pos, "kind", message, hint=f"kinds: {', '.join(KINDS)}")
    return None


def _envelope(document: Document, problems: Problems) -> None:
    node = document.node
    version = node.get("apiVersion")
    if version is None:
        document.report(problems, node.pos, "", f'required field "apiVersion" is missing: write {API_VERSION}')
    elif plain(version) != API_VERSION:
        message = f"unknown version {validation.describe(plain(version))}: this areal reads {API_VERSION}"
        document.report(problems, version.pos, "apiVersion", message)
    for key in node.entries:
        if key == "status":
            hint = "`areal get -o manifest` prints only what can be applied again"
            document.report(problems, node.keys[key], key, "status is written by areal: remove it", hint=hint)
        elif key not in ENVELOPE:
            message = f"unknown field{did_you_mean(key, (*ENVELOPE, 'generate', 'template'))}"
            document.report(problems, node.keys[key], key, message)


def _metadata(document: Document, problems: Problems) -> Metadata | None:
    node = document.node.get("metadata")
    if node is None:
        document.report(problems, document.node.pos, "", 'required field "metadata" is missing: it holds the name')
        return None
    metadata, faults = validation.check_model(Metadata, plain(node))
    _report(faults, document, node, ("metadata",), problems)
    return metadata if isinstance(metadata, Metadata) else None


def _spec(document: Document, problems: Problems) -> Mapping | None:
    node = document.node.get("spec")
    if node is None or (isinstance(node, Scalar) and node.value is None):
        return Mapping({}, {}, document.node.key_pos("spec"))
    if isinstance(node, Mapping):
        return node
    document.report(problems, node.pos, "spec", f"expected a map, got {validation.describe(plain(node))}")
    return None


def _report(faults: list[Fault], document: Document, node: Node, base: Path, problems: Problems) -> None:
    for fault in faults:
        if is_unreadable(at_path(node, fault.path)):
            continue
        pos = locate(node, fault.path, at_key=fault.at_key)
        if not fault.path:
            pos = document.node.key_pos(str(base[0]))
        pos, message = _at_column(node, fault, pos)
        document.report(problems, pos, path_text((*base, *fault.path)), message)


def _at_column(node: Node, fault: Fault, pos: Pos) -> tuple[Pos, str]:
    """The place inside a scalar's text when that stands in the file as it is, else the column in words."""
    if not fault.column:
        return pos, fault.message
    found = at_path(node, fault.path)
    if isinstance(found, Scalar) and found.text_col:
        return Pos(pos.file, pos.line, found.text_col + fault.column - 1), fault.message
    return pos, f"{fault.message} (column {fault.column} of the text)"


def _resource(document: Document, kind: str, metadata: Metadata, spec: dict[str, Any], spec_node: Mapping) -> Resource:
    metadata_node = document.node.entries["metadata"]
    assert isinstance(metadata_node, Mapping)
    pos = document.node.pos
    return Resource(
        kind=kind,
        name=metadata.name,
        labels=dict(metadata.labels),
        annotations=dict(metadata.annotations),
        depends_on=tuple(dict.fromkeys(metadata.depends_on)),
        spec=spec,
        source=Source(document.source.file, pos.line, document.source.sha256),
        spec_node=spec_node,
        metadata_node=metadata_node,
        pos=metadata_node.entries["name"].pos,
        origin=document.origin,
    )


def _without_models(service: Resource) -> Resource:
    node = without_entry(service.spec_node, "models")
    return replace(service, spec={key: value for key, value in service.spec.items() if key != "models"}, spec_node=node)


def _inline_models(service: Resource) -> Iterator[Resource]:
    """Each named item of ``spec.models`` as a Model of its own. It takes its service's labels."""
    items = service.spec_node.entries["models"]
    for item in items.items if isinstance(items, Sequence) else ():
        name = item_name(item)
        if name is None or not isinstance(item, Mapping):
            continue  # reported by the validation of the service
        node = without_entry(item, "name")
        yield Resource(
            kind="Model",
            name=name,
            labels=service.labels,
            annotations={},
            depends_on=(),
            spec={**plain(node), "service": service.name},
            source=Source(service.source.file, item.pos.line, service.source.sha256),
            owned_by=Ref(service.kind, service.name),
            spec_node=node,
            metadata_node=service.metadata_node,
            pos=item.entries["name"].pos,
            spec_path=("spec", "models", f"[{name}]"),
            origin=service.origin,
        )
