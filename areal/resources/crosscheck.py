"""What can only be seen with all resources together: duplicates, references, cycles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal.resources import registry
from areal.resources.diagnostics import Pos, Problems
from areal.resources.kinds import SERVED, Ref, parse_ref, served_name
from areal.resources.nodes import locate
from areal.resources.resource import PlacedReference, Resource


def unique(resources: Sequence[Resource], problems: Problems) -> None:
    """One resource for each (kind, name), across all files."""
    first: dict[Ref, Resource] = {}
    for resource in resources:
        earlier = first.setdefault(resource.ref, resource)
        if earlier is not resource:
            path = "metadata.name" if resource.owned_by is None else resource.text_of(("name",))
            message = f"{resource.ref} is declared twice: first at {earlier.pos}{_item(earlier)}"
            problems.add(resource.pos, path, message + (f", again by {resource.origin}" if resource.origin else ""))


def served_as(name: str, spec: Mapping[str, Any]) -> tuple[str, str]:
    """The service of a Model, and what its gateway calls it: no two models have the same."""
    return str(spec.get("service", "default")), served_name(name, spec)


def served_twice(resource: Resource, other: str) -> tuple[Pos, str, str]:
    """Place, field and fault of a Model whose served name ``other`` has."""
    service, name = served_as(resource.name, resource.spec)
    said = SERVED in resource.spec
    pos, path = (resource.pos_of((SERVED,)), resource.text_of((SERVED,))) if said else (resource.pos, "metadata.name")
    return pos, path, f'"{name}" is what clients of InferenceService/{service} call {other}: give one of them another'


def served_once(resources: Sequence[Resource], problems: Problems) -> None:
    """One Model for each name that a service's clients send."""
    first: dict[tuple[str, str], Resource] = {}
    for resource in (each for each in resources if each.kind == "Model"):
        earlier = first.setdefault(served_as(resource.name, resource.spec), resource)
        if earlier.ref != resource.ref:
            pos, path, message = served_twice(resource, f"{earlier.ref} ({earlier.pos})")
            problems.add(pos, path, message)


def _item(resource: Resource) -> str:
    return f" by {resource.origin}" if resource.origin else ""


def place_references(resources: Sequence[Resource]) -> tuple[PlacedReference, ...]:
    """Every reference of every resource, ``dependsOn`` included, in file order."""
    declared = {resource.ref for resource in resources}
    return tuple(
        PlacedReference(resource.ref, target, path, pos, target in declared)
        for resource in resources
        for target, path, pos in _references(resource)
    )


def acyclic(references: Sequence[PlacedReference], problems: Problems) -> None:
    """Reports each cycle once, every edge with the place that makes it."""
    edges: dict[Ref, list[PlacedReference]] = {}
    for reference in references:
        if reference.declared:
            edges.setdefault(reference.source, []).append(reference)
    done: set[Ref] = set()
    for start in edges:
        for cycle in _cycles_from(start, edges, done):
            steps = " -> ".join(f"{edge.target} ({edge.pos})" for edge in cycle)
            problems.add(cycle[0].pos, cycle[0].path, f"dependency cycle: {cycle[0].source} -> {steps}")


def _references(resource: Resource) -> Iterator[tuple[Ref, str, Pos]]:
    for index, text in enumerate(resource.depends_on):
        pos = locate(resource.metadata_node, ("dependsOn", index))
        yield parse_ref(text), f"metadata.dependsOn[{index}]", pos
    for reference in registry.references(resource.kind, resource.spec):
        yield reference.ref, resource.text_of(reference.path), resource.pos_of(reference.path)


def _cycles_from(
    start: Ref, edges: dict[Ref, list[PlacedReference]], done: set[Ref]
) -> Iterator[list[PlacedReference]]:
    """Depth first without recursion: a chain of references may be as long as the files are."""
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
