"""What depends on what, as text, Graphviz or Mermaid. Deterministic: kinds in order, then names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from areal.resources.crosscheck import place_references
from areal.resources.kinds import Ref
from areal.resources.resource import PlacedReference, Resource

Format = Literal["dot", "mermaid", "text"]


def graph(resources: Iterable[Resource], format: Format | str = "dot") -> str:
    """An edge goes from a resource to what it needs. What the files only refer to is dashed, or marked ``?``."""
    found = list(resources)
    references = place_references(found)
    if format == "dot":
        return _dot(found, references)
    if format == "mermaid":
        return _mermaid(found, references)
    if format == "text":
        return _text(found, references)
    raise ValueError(f'"{format}" is no graph format: dot, mermaid or text')


def _text(resources: Sequence[Resource], references: Sequence[PlacedReference]) -> str:
    lines = []
    for resource in sorted(resources, key=lambda item: item.ref.sort_key):
        needs = _targets(resource.ref, references)
        marks = [str(target) if declared else f"{target}?" for target, declared in needs]
        inline = " (inline)" if resource.owned_by is not None else ""
        lines.append(f"{resource.ref}{inline}" + (f" -> {', '.join(marks)}" if marks else ""))
    return "".join(f"{line}\n" for line in lines)


def _dot(resources: Sequence[Resource], references: Sequence[PlacedReference]) -> str:
    lines = ["digraph areal {", "  rankdir=LR;", "  node [shape=box];"]
    for ref, declared in _nodes(resources, references):
        lines.append(f"  {json.dumps(str(ref))}{'' if declared else ' [style=dashed]'};")
    for source, target, label in _edges(references):
        lines.append(f"  {json.dumps(str(source))} -> {json.dumps(str(target))} [label={json.dumps(label)}];")
    return "\n".join([*lines, "}"]) + "\n"


def _mermaid(resources: Sequence[Resource], references: Sequence[PlacedReference]) -> str:
    lines = ["flowchart LR"]
    ids: dict[Ref, str] = {}
    for ref, declared in _nodes(resources, references):
        ids[ref] = f"n{len(ids)}"
        lines.append(f'  {ids[ref]}["{ref}"]' + ("" if declared else ":::elsewhere"))
    lines += [f"  {ids[source]} -->|{label}| {ids[target]}" for source, target, label in _edges(references)]
    if any(not declared for _, declared in _nodes(resources, references)):
        lines.append("  classDef elsewhere stroke-dasharray: 5 5")
    return "\n".join(lines) + "\n"


def _nodes(resources: Sequence[Resource], references: Sequence[PlacedReference]) -> Iterator[tuple[Ref, bool]]:
    """Declared resources, then those referred to only."""
    yield from ((ref, True) for ref in sorted({item.ref for item in resources}, key=lambda ref: ref.sort_key))
    others = {reference.target for reference in references if not reference.declared}
    yield from ((ref, False) for ref in sorted(others, key=lambda ref: ref.sort_key))


def _edges(references: Sequence[PlacedReference]) -> list[tuple[Ref, Ref, str]]:
    """Each pair once, labelled by the field that makes it: ``service``, ``model``, ``dependsOn``."""
    labels: dict[tuple[Ref, Ref], str] = {}
    for reference in references:
        label = reference.path.rpartition(".")[2].partition("[")[0]
        labels.setdefault((reference.source, reference.target), label)
    ordered = sorted(labels.items(), key=lambda item: (item[0][0].sort_key, item[0][1].sort_key))
    return [(source, target, label) for (source, target), label in ordered]


def _targets(source: Ref, references: Sequence[PlacedReference]) -> list[tuple[Ref, bool]]:
    found = {reference.target: reference.declared for reference in references if reference.source == source}
    return sorted(found.items(), key=lambda item: item[0].sort_key)
