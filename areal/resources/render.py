"""Files to resources: a pure function of the files, the values and the environment variables it says it read.

``read -> template -> overlay -> set -> assemble -> cross-check``; every stage adds to one list of faults, and nothing
is returned when there is any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from areal.resources import crosscheck
from areal.resources.assemble import assemble, is_active
from areal.resources.diagnostics import Pos, Problems
from areal.resources.documents import Document, read_documents
from areal.resources.resource import PlacedReference, Rendered, Resource
from areal.resources.sources import read_sources


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
    documents = _documents(request, problems)
    active = [document for document in documents if is_active(document, request.profile, problems)]
    resources = [resource for document in active for resource in assemble(document, problems)]
    references = _cross_check(resources, problems)
    problems.raise_if_any()
    return Rendered(tuple(resources), references)


def _documents(request: RenderRequest, problems: Problems) -> list[Document]:
    sources = read_sources(request.files, request.recursive, request.stdin, problems)
    documents = [document for source in sources for document in read_documents(source, problems)]
    if request.files and not documents and not problems:
        problems.add(Pos(request.files[0], 1, 1), "", "no resources: every manifest in this folder is empty")
    return documents


def _cross_check(resources: list[Resource], problems: Problems) -> tuple[PlacedReference, ...]:
    crosscheck.unique(resources, problems)
    references = crosscheck.place_references(resources)
    crosscheck.acyclic(references, problems)
    return references
