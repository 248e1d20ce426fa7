"""Files to resources: a pure function of the files, the values and the environment variables it says it read.

``read -> template -> overlay -> set -> assemble -> cross-check``; every stage adds to one list of faults, and nothing
is returned when there is any.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from areal.resources import crosscheck
from areal.resources.assemble import assemble
from areal.resources.diagnostics import Pos, Problems
from areal.resources.documents import Document
from areal.resources.expressions import Environment
from areal.resources.overlay import overlay_documents
from areal.resources.reading import Reading
from areal.resources.resource import PlacedReference, Rendered, Resource
from areal.resources.sets import apply_settings, parse_settings, set_values
from areal.resources.sources import read_sources
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
    problems = Problems()
    env = Environment(os.environ if request.env is None else request.env)
    documents = _documents(request, Reading(problems, env, request.profile))
    resources = [resource for document in documents for resource in assemble(document, problems)]
    references = _cross_check(resources, problems)
    problems.raise_if_any()
    return Rendered(tuple(resources), references, dict(sorted(env.read.items())))


def _documents(request: RenderRequest, reading: Reading) -> list[Document]:
    problems = reading.problems
    settings = parse_settings(request.sets, problems)
    values = set_values(read_values(request.values_files, problems), settings, problems)
    sources = read_sources(request.files, request.recursive, request.stdin, problems)
    documents = reading.documents(sources, values)
    if request.files and not documents and not reading.seen and not problems:
        problems.add(Pos(request.files[0], 1, 1), "", "no resources: every manifest in this folder is empty")
    if request.overlay is not None:
        documents += overlay_documents(request.overlay, values, reading)
    reading.check_profile()
    return apply_settings(documents, settings, problems)


def _cross_check(resources: list[Resource], problems: Problems) -> tuple[PlacedReference, ...]:
    crosscheck.unique(resources, problems)
    references = crosscheck.place_references(resources)
    crosscheck.acyclic(references, problems)
    return references
