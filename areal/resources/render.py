"""Files to resources: a pure function of the files, the values and the environment variables it says it read.

``read -> template -> overlay -> set -> assemble -> cross-check``; every stage adds to one list of faults. ``render``
returns nothing when there is any; ``render_valid`` leaves out the documents that have one.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from areal.resources import crosscheck
from areal.resources.assemble import assemble
from areal.resources.diagnostics import Diagnostic, ManifestError, Pos, Problems
from areal.resources.documents import Document
from areal.resources.expressions import Environment
from areal.resources.kinds import KINDS, Ref, name_problem
from areal.resources.nodes import Mapping as MappingNode
from areal.resources.nodes import Scalar
from areal.resources.overlay import overlay_documents
from areal.resources.reading import Reading
from areal.resources.resource import PlacedReference, Rendered, Resource
from areal.resources.sets import apply_settings, parse_settings, set_values
from areal.resources.sources import SourceText, read_sources
from areal.resources.values import read_values


@dataclass(frozen=True)
class RenderRequest:
    """What to render. ``"-"`` among ``files`` is the text in ``stdin``; ``env`` None means this process's."""

    files: tuple[str, ...] = ()
    recursive: bool = False
    overlay: str | None = None
    sets: tuple[str, ...] = ()
    values_files: tuple[str, ...] = ()
    profile: str | None = None
    stdin: str | None = None
    env: Mapping[str, str] | None = field(default=None, repr=False)


def render(request: RenderRequest) -> Rendered:
    """The resources in file order, an inline model after its service. Raises ManifestError with every fault."""
    valid = _rendered(request)
    if valid.faults:
        raise ManifestError(valid.faults)
    return valid.rendered


@dataclass(frozen=True)
class ValidPart:
    """What ``render`` would give without the documents that have a fault. ``spoiled``: the objects that those declare,
    as far as they say, each with the faults of its document; ``faults``: all there are, in file order."""

    rendered: Rendered
    faults: tuple[Diagnostic, ...] = ()
    spoiled: Mapping[Ref, tuple[Diagnostic, ...]] = field(default_factory=dict)


def render_valid(request: RenderRequest) -> ValidPart:
    """Raises ManifestError for faults that touch every document: of flags, values, overlays."""
    return _rendered(request, partly=True)


def _rendered(request: RenderRequest, *, partly: bool = False) -> ValidPart:
    problems = Problems()
    env = Environment(os.environ if request.env is None else request.env)
    sources = list(read_sources(request.files, request.recursive, request.stdin, problems))
    manifests = tuple(problems.files)
    documents = _documents(request, sources, Reading(problems, env, request.profile))
    made = [(document, assemble(document, problems)) for document in documents]
    resources = [resource for _, each in made for resource in each]
    references = _cross_check(resources, problems)
    faults = tuple(problems.diagnostics())
    spoiled: dict[Ref, tuple[Diagnostic, ...]] = {}
    if faults and partly:
        places = _Places(sources, manifests)
        by_place = places.of(faults)
        kept = []
        for document, each in made:
            here = by_place.get(places.at(document.source.file, document.node.pos.line))
            if here is None:
                kept += each
            else:
                spoiled |= {ref: tuple(here) for ref in (*_named(document), *(item.ref for item in each))}
        resources = [item for item in kept if item.ref not in spoiled]
        references = crosscheck.place_references(resources)
    return ValidPart(Rendered(tuple(resources), references, dict(sorted(env.read.items()))), faults, spoiled)


class _Places:
    """Which YAML document of which file a line belongs to. ``---`` at a line's start begins one wherever it stands."""

    def __init__(self, sources: Iterable[SourceText], manifests: Iterable[str]) -> None:
        self._begins: dict[str, list[int]] = {file: [] for file in manifests}  # also those that could not be read
        self._begins |= {
            source.file: [
                number for number, line in enumerate(source.text.split("\n"), 1) if re.match(r"---(\s|$)", line)
            ]
            for source in sources
        }

    def at(self, file: str, line: int) -> tuple[str, int]:
        return file, bisect_right(self._begins.get(file, ()), line)

    def of(self, faults: tuple[Diagnostic, ...]) -> dict[tuple[str, int], list[Diagnostic]]:
        """Raises ManifestError with all of them where one is of no document."""
        found: dict[tuple[str, int], list[Diagnostic]] = {}
        for fault in faults:
            if fault.pos.file not in self._begins:
                raise ManifestError(faults)
            found.setdefault(self.at(fault.pos.file, fault.pos.line), []).append(fault)
        return found


def _named(document: Document) -> list[Ref]:
    """What a document with faults says that it is, when it does."""
    metadata = document.node.get("metadata")
    kind, name = document.node.get("kind"), metadata.get("name") if isinstance(metadata, MappingNode) else None
    if not (isinstance(kind, Scalar) and isinstance(name, Scalar)) or kind.value not in KINDS:
        return []
    if not isinstance(name.value, str) or name_problem(name.value) is not None:
        return []
    return [Ref(str(kind.value), name.value)]


def _documents(request: RenderRequest, sources: list[SourceText], reading: Reading) -> list[Document]:
    problems = reading.problems
    settings = parse_settings(request.sets, problems)
    values = set_values(read_values(request.values_files, problems), settings, problems)
    documents = reading.documents(sources, values)
    if request.files and not documents and not reading.seen and not problems:
        problems.add(Pos(request.files[0], 1, 1), "", "no resources: every manifest in this folder is empty")
    if request.overlay is not None:
        documents += overlay_documents(request.overlay, values, reading)
    reading.check_profile()
    return apply_settings(documents, settings, problems)


def _cross_check(resources: list[Resource], problems: Problems) -> tuple[PlacedReference, ...]:
    crosscheck.unique(resources, problems)
    crosscheck.served_once(resources, problems)
    references = crosscheck.place_references(resources)
    crosscheck.acyclic(references, problems)
    return references
