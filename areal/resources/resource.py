"""Turns documents into resources. Specs stay as their authors wrote them, and each value has a file and line.

``assemble`` checks the envelope, the metadata and the spec of one document, and extracts inline models. Other functions
check all resources together: duplicates, served names, references, cycles. ``graph`` draws the references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

from areal.dataclasses import dataclass, field, replace
from areal.errors import did_you_mean
from areal.resources import validation
from areal.resources.documents import Document
from areal.resources.fields import Fault, Metadata, fields_of
from areal.resources.kinds import API_VERSION, KINDS, SERVED, Ref, parse_ref, served_name
from areal.resources.nodes import (
    FLAG,
    Diagnostic,
    MappingNode,
    Node,
    Pos,
    Problems,
    ScalarNode,
    SequenceNode,
    Value,
    at_path,
    is_computed,
    is_unreadable,
    item_name,
    locate,
    plain,
    text_place,
    without_entry,
)
from areal.resources.operations import can, type_name
from areal.resources.tree import FieldPath, path_text
from areal.resources.validation import references, spec_model

_NOTHING = MappingNode({}, {}, Pos("", 1, 1))


@dataclass(frozen=True)
class Source:
    """The file a resource was read from. ``sha256`` is of the whole file; ``file`` is as named on the command line."""

    file: str
    line: int
    sha256: str


@dataclass(frozen=True)
class Resource:
    """One desired object. ``spec`` is sparse and plain: the fields as written, after templating, with YAML's names
    and no defaults. ``depends_on`` holds canonical references (``Model/qwen``); ``origin`` is the item that it was
    generated for (``each[2]``)."""

    kind: str
    name: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    depends_on: tuple[str, ...]
    spec: dict[str, Any]
    source: Source
    owned_by: Ref | None = None
    spec_node: MappingNode = field(compare=False, repr=False, default=_NOTHING)
    metadata_node: MappingNode = field(compare=False, repr=False, default=_NOTHING)
    pos: Pos = field(compare=False, default=Pos("", 1, 1))
    spec_path: FieldPath = field(compare=False, repr=False, default=("spec",))
    origin: str = field(compare=False, default="")

    @cached_property
    def ref(self) -> Ref:
        return Ref(self.kind, self.name)

    def pos_of(self, path: FieldPath) -> Pos:
        """Return the position of ``path`` (inside the spec), or of the deepest part of it that exists."""
        return locate(self.spec_node, path)

    def text_of(self, path: FieldPath) -> str:
        """Return ``path`` (inside the spec) as text relative to the document: that of an inline model begins with its
        item in the service."""
        return path_text((*self.spec_path, *path))

    def fault(self, path: FieldPath, message: str, hint: str | None = None) -> Diagnostic:
        """Return a fault at ``path`` (inside the spec)."""
        return Diagnostic(self.pos_of(path), self.text_of(path), message, hint)


class PlacedReference(NamedTuple):
    """A reference from ``resource`` to ``target``, at ``place`` in its spec or its metadata. ``declared``: the target
    is among the rendered resources; otherwise it must exist in state."""

    resource: Resource
    target: Ref
    place: FieldPath
    in_metadata: bool
    declared: bool

    @property
    def source(self) -> Ref:
        return self.resource.ref

    @property
    def path(self) -> str:
        return path_text(("metadata", *self.place)) if self.in_metadata else self.resource.text_of(self.place)

    @property
    def pos(self) -> Pos:
        return locate(self.resource.metadata_node if self.in_metadata else self.resource.spec_node, self.place)


@dataclass(frozen=True)
class Rendered:
    """The content of all files. ``env`` holds the environment variables that expressions read, with their values."""

    resources: tuple[Resource, ...]
    references: tuple[PlacedReference, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def unresolved(self) -> tuple[PlacedReference, ...]:
        """References to objects that are not in the files."""
        return tuple(reference for reference in self.references if not reference.declared)


ENVELOPE = ("apiVersion", "kind", "metadata", "spec", "profiles")


def assemble(document: Document) -> list[Resource]:
    """Return the resource of a document and then its inline models. After faults, which are reported, the result can be
    empty or incomplete."""
    kind = _kind(document)
    _check_envelope(document)
    metadata = _metadata(document)
    spec_node = _spec_node(document)
    if kind is None or spec_node is None:
        return []
    spec = plain(spec_node)
    _report(validation.spec_faults(kind, spec), document, spec_node, ("spec",))
    metadata_node = document.node.get("metadata")
    if metadata is None or not isinstance(metadata_node, MappingNode):
        return []
    resource = Resource(
        kind=kind,
        name=metadata.name,
        labels=dict(metadata.labels),
        annotations=dict(metadata.annotations),
        depends_on=tuple(dict.fromkeys(metadata.depends_on)),
        spec=spec,
        source=Source(document.source.file, document.node.pos.line, document.source.sha256),
        spec_node=spec_node,
        metadata_node=metadata_node,
        pos=metadata_node.entries["name"].pos,
        origin=document.origin,
    )
    inline = spec_model(kind).INLINE
    if inline is None or inline[0] not in spec:
        return [resource]
    spec = {key: value for key, value in spec.items() if key != inline[0]}
    bare = replace(resource, spec=spec, spec_node=without_entry(spec_node, inline[0]))
    return [bare, *_inline_objects(resource, *inline)]


def _kind(document: Document) -> str | None:
    node = document.node.get("kind")
    if node is None:
        keys = document.node.entries.keys()
        hint = "values go in with --values" if keys and not keys & {*ENVELOPE, "template"} else None
        document.report(document.node.pos, "", 'required field "kind" is missing', hint=hint)
        return None
    kind = plain(node)
    if not isinstance(kind, str):
        document.report(node.pos, "kind", f"expected text, got {validation.describe(kind)}")
        return None
    if kind in KINDS:
        return kind
    message = f'unknown kind "{kind}"{did_you_mean(kind, KINDS)}'
    document.report(node.pos, "kind", message, hint=f"kinds: {', '.join(KINDS)}")
    return None


def _check_envelope(document: Document) -> None:
    node = document.node
    version = node.get("apiVersion")
    if version is None:
        document.report(node.pos, "", f'required field "apiVersion" is missing: write {API_VERSION}')
    elif plain(version) != API_VERSION:
        message = f"unknown version {validation.describe(plain(version))}: this areal reads {API_VERSION}"
        document.report(version.pos, "apiVersion", message)
    for key in node.entries:
        if key == "status":
            hint = "`areal get -o manifest` prints only fields that can be applied again"
            document.report(node.keys[key], key, "status is written by areal: remove it", hint=hint)
        elif key not in ENVELOPE:
            message = f"unknown field{did_you_mean(key, (*ENVELOPE, 'generate', 'template'))}"
            document.report(node.keys[key], key, message)


def _metadata(document: Document) -> Metadata | None:
    node = document.node.get("metadata")
    if node is None:
        document.report(document.node.pos, "", 'required field "metadata" is missing: it holds the name')
        return None
    metadata, faults = validation.check_metadata(plain(node))
    _report(faults, document, node, ("metadata",))
    return metadata


def _spec_node(document: Document) -> MappingNode | None:
    node = document.node.get("spec")
    if node is None or (isinstance(node, ScalarNode) and node.value is None):
        return MappingNode({}, {}, document.node.key_pos("spec"))
    if isinstance(node, MappingNode):
        return node
    document.report(node.pos, "spec", f"expected a map, got {validation.describe(plain(node))}")
    return None


def _report(faults: list[Fault], document: Document, node: Node, base: FieldPath) -> None:
    for fault in faults:
        found = at_path(node, fault.path)
        if is_unreadable(found):
            continue
        pos = locate(node, fault.path, at_key=fault.at_key) if fault.path else document.node.key_pos(str(base[0]))
        where = ""
        if fault.column and isinstance(found, ScalarNode):
            pos, where = text_place(found, fault.column)
        absent, path = path_text((*base, *fault.absent)) if fault.absent else "", path_text((*base, *fault.path))
        message = fault.message + where
        if isinstance(found, ScalarNode) and is_computed(found):
            message = _of_expression(fault, found.value) or message
        elif isinstance(found, ScalarNode) and pos.file == FLAG and fault.expected == "text":
            message += f" inside the quotes of the shell: {FLAG} '{path}=\"{found.value}\"'"
        document.report(pos, path, message, absent=absent)


_CONVERSIONS: Mapping[str, tuple[Callable[[Value], bool], str]] = {
    "text": (lambda value: not isinstance(value, str), "string() makes it text"),
    "an integer": (partial(can, "int"), "int() makes it an integer"),
    "a number": (partial(can, "float"), "float() makes it a number"),
    "true or false": (lambda value: isinstance(value, str), 'compare it, as in env.NAME == "true"'),
}


def _of_expression(fault: Fault, value: Value) -> str | None:
    """Return the message for a value of an expression that can be converted to the right type; else None. It is the
    same for every item of ``generate``. Quotes around an expression change nothing."""
    fits, advice = _CONVERSIONS.get(fault.expected, (lambda value: False, ""))
    if value is None or not fits(value):
        return None
    return f"expected {fault.expected}, got {type_name(value)}: {advice}"


def _inline_objects(owner: Resource, field: str, kind: str, reference: str) -> Iterator[Resource]:
    """Yield each named item of a field as a separate object, with the labels of its owner."""
    items = owner.spec_node.entries[field]
    for item in items.items if isinstance(items, SequenceNode) else ():
        name = item_name(item)
        if name is None or not isinstance(item, MappingNode):
            continue  # reported by the validation of the owner
        node = without_entry(item, "name")
        yield replace(
            owner,
            kind=kind,
            name=name,
            annotations={},
            depends_on=(),
            spec={**plain(node), reference: owner.name},
            source=replace(owner.source, line=item.pos.line),
            owned_by=owner.ref,
            spec_node=node,
            pos=item.entries["name"].pos,
            spec_path=("spec", field, f"[{name}]"),
        )


def unique(resources: Sequence[Resource], problems: Problems) -> None:
    """Report resources of the same kind and name, across all files."""
    first: dict[Ref, Resource] = {}
    for resource in resources:
        earlier = first.setdefault(resource.ref, resource)
        if earlier is not resource:
            path = "metadata.name" if resource.owned_by is None else resource.text_of(("name",))
            first_by, again_by = (each.origin and f" by {each.origin}" for each in (earlier, resource))
            message = f"{resource.ref} is declared twice: first at {earlier.pos}{first_by}"
            problems.add(resource.pos, path, message + (again_by and f", again{again_by}"))


def served_as(name: str, spec: Mapping[str, object]) -> tuple[str, str]:
    """Return (service, served name) of a Model. The pair is unique among models."""
    return str(spec.get("service", "default")), served_name(name, spec)


def served_name_conflict(resource: Resource, other: str) -> tuple[Pos, str, str]:
    """Return position, field and message for a Model whose served name ``other`` already has."""
    service, name = served_as(resource.name, resource.spec)
    is_set = SERVED in resource.spec
    pos, path = (resource.pos_of((SERVED,)), resource.text_of((SERVED,))) if is_set else (resource.pos, "metadata.name")
    return pos, path, f'"{name}" is what clients of InferenceService/{service} call {other}: give one of them another'


def served_once(resources: Sequence[Resource], problems: Problems) -> None:
    """Report models of one service that have the same served name."""
    first: dict[tuple[str, str], Resource] = {}
    for resource in resources:
        if SERVED not in fields_of(spec_model(resource.kind)):
            continue
        earlier = first.setdefault(served_as(resource.name, resource.spec), resource)
        if earlier.ref != resource.ref:
            pos, path, message = served_name_conflict(resource, f"{earlier.ref} ({earlier.pos})")
            problems.add(pos, path, message)


def place_references(resources: Sequence[Resource]) -> tuple[PlacedReference, ...]:
    """Return all references of all resources, including ``dependsOn``, in file order."""
    declared = {resource.ref for resource in resources}
    found = []
    for resource in resources:
        for index, text in enumerate(resource.depends_on):
            target = parse_ref(text)
            found.append(PlacedReference(resource, target, ("dependsOn", index), True, target in declared))
        for path, target in references(resource.kind, resource.spec):
            found.append(PlacedReference(resource, target, path, False, target in declared))
    return tuple(found)


def acyclic(references: Sequence[PlacedReference], problems: Problems) -> None:
    """Report each dependency cycle once, with the position of each of its references."""
    edges: dict[Ref, list[PlacedReference]] = {}
    for reference in references:
        if reference.declared:
            edges.setdefault(reference.source, []).append(reference)
    done: set[Ref] = set()
    for start in edges:
        for cycle in _cycles_from(start, edges, done):
            steps = " -> ".join(f"{edge.target} ({edge.pos})" for edge in cycle)
            problems.add(cycle[0].pos, cycle[0].path, f"dependency cycle: {cycle[0].source} -> {steps}")


def _cycles_from(
    start: Ref, edges: dict[Ref, list[PlacedReference]], done: set[Ref]
) -> Iterator[list[PlacedReference]]:
    """Yield the cycles found depth first; without recursion, since a chain of references may be long."""
    if start in done:
        return
    path: list[PlacedReference] = []
    on_path = {start: 0}
    pending = [iter(edges.get(start, ()))]
    while pending:
        edge = next(pending[-1], None)
        if edge is None:
            pending.pop()
            node = path.pop().target if path else start
            done.add(node)
            on_path.pop(node)
        elif edge.target in on_path:
            yield [*path[on_path[edge.target] :], edge]
        elif edge.target not in done:
            path.append(edge)
            on_path[edge.target] = len(path)
            pending.append(iter(edges.get(edge.target, ())))


def graph(resources: Iterable[Resource], format: str = "dot") -> str:
    """Render references as ``dot``, ``mermaid`` or ``text``, sorted by kind, then name. An edge leads from a resource
    to the one that it needs, labelled with the field. Objects outside the files are dashed, or marked ``?``."""
    declared = {resource.ref: resource for resource in resources}
    references = place_references([*declared.values()])
    nodes = sorted(declared, key=lambda ref: ref.sort_key)
    others = sorted({each.target for each in references if not each.declared}, key=lambda ref: ref.sort_key)
    labels: dict[tuple[Ref, Ref], str] = {}
    for each in references:
        labels.setdefault((each.source, each.target), each.path.rpartition(".")[2].partition("[")[0])
    edges = sorted(labels, key=lambda edge: (edge[0].sort_key, edge[1].sort_key))
    match format:
        case "dot":
            lines = ["digraph areal {", "  rankdir=LR;", "  node [shape=box];"]
            lines += [f'  "{ref}";' for ref in nodes] + [f'  "{ref}" [style=dashed];' for ref in others]
            lines += [f'  "{source}" -> "{target}" [label="{labels[source, target]}"];' for source, target in edges]
            lines.append("}")
        case "mermaid":
            ids = {ref: f"n{number}" for number, ref in enumerate((*nodes, *others))}
            lines = ["flowchart LR", *(f'  {ids[ref]}["{ref}"]' for ref in nodes)]
            lines += [f'  {ids[ref]}["{ref}"]:::elsewhere' for ref in others]
            lines += [f"  {ids[source]} -->|{labels[source, target]}| {ids[target]}" for source, target in edges]
            lines += ["  classDef elsewhere stroke-dasharray: 5 5"] if others else []
        case "text":
            lines = []
            for ref in nodes:
                needs = [f"{target}{'' if target in declared else '?'}" for source, target in edges if source == ref]
                inline = " (inline)" if declared[ref].owned_by is not None else ""
                lines.append(f"{ref}{inline}" + (f" -> {', '.join(needs)}" if needs else ""))
        case _:
            raise ValueError(f'"{format}" is no graph format: dot, mermaid or text')
    return "".join(f"{line}\n" for line in lines)
