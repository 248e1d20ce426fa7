"""From a request's source to wanted resources: render, then check references against what is recorded."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal.hub import is_id
from areal.reconcilers.desired import Wanted
from areal.reconcilers.requests import Source
from areal.resources.crosscheck import served_as, served_twice
from areal.resources.diagnostics import Diagnostic, ManifestError
from areal.resources.kinds import Ref
from areal.resources.paths import looks_local, resolve_model_path, with_absolute_paths
from areal.resources.render import RenderRequest, render
from areal.resources.resource import Rendered, Resource
from areal.resources.suggest import did_you_mean
from areal.state.records import StoredObject


def rendered(source: Source) -> Rendered:
    """Raises ManifestError with every diagnostic of every file."""
    return render(render_request(source))


def render_request(source: Source) -> RenderRequest:
    return RenderRequest(
        files=source.files or (("-",) if source.manifests else ()),
        recursive=source.recursive,
        overlay=source.overlay,
        sets=source.sets,
        values_files=source.values_files,
        profile=source.profile,
        stdin=_as_text(source.manifests) if source.manifests else source.stdin,
    )


def _as_text(manifests: Sequence[Mapping[str, Any]]) -> str:
    """JSON is YAML: what an imperative verb built goes through the same loader as a file."""
    return "\n---\n".join(json.dumps(manifest, indent=1) for manifest in manifests)


def wanted_of(resource: Resource) -> Wanted:
    source = resource.source.to_json()
    file = Path(resource.source.file)
    if file.exists():
        source["file"] = str(file.absolute())
    return Wanted(
        ref=str(resource.ref),
        kind=resource.kind,
        name=resource.name,
        spec=with_absolute_paths(resource.kind, resource.spec, resource.source.file),
        labels=resource.labels,
        annotations=resource.annotations,
        depends_on=tuple(resource.depends_on),
        owner=str(resource.owned_by) if resource.owned_by else None,
        source=source,
        where=str(resource.pos),
    )


def check_against_state(found: Rendered, stored: Sequence[StoredObject]) -> None:
    """Raises ManifestError with every fault of every object."""
    known = {item.ref for item in stored}
    faults = [fault for each in faults_against_state(found, stored, known).values() for fault in each]
    if faults:
        raise ManifestError(faults)


def faults_against_state(
    found: Rendered, stored: Sequence[StoredObject], known: Collection[Ref]
) -> dict[Ref, list[Diagnostic]]:
    """References to nothing, model folders that do not exist, and served names that another model of the service has,
    with positions, by the object that has them. ``known``: what may be referred to."""
    faults: dict[Ref, list[Diagnostic]] = {}
    declared = {resource.ref for resource in found.resources}
    taken = {served_as(item.name, item.spec): item.ref for item in stored if _is_other_model(item.ref, declared)}
    for reference in found.unresolved:
        if reference.target not in known:
            message = (
                f"{reference.target} does not exist: neither in these manifests nor recorded"
                f"{did_you_mean(reference.target.name, names_of(known, reference.target.kind))}"
            )
            faults.setdefault(reference.source, []).append(Diagnostic(reference.pos, reference.path, message))
    for resource in found.resources:
        if missing := _missing_folders(resource):
            faults.setdefault(resource.ref, []).extend(missing)
        if resource.kind == "Model" and (other := taken.get(served_as(resource.name, resource.spec))) is not None:
            faults.setdefault(resource.ref, []).append(Diagnostic(*served_twice(resource, str(other))))
    return faults


def _is_other_model(ref: Ref, declared: Collection[Ref]) -> bool:
    return ref.kind == "Model" and ref not in declared


def names_of(known: Iterable[Ref], kind: str) -> list[str]:
    return sorted(ref.name for ref in known if ref.kind == kind)


def _missing_folders(resource: Resource) -> list[Diagnostic]:
    if resource.kind != "Model":
        return []
    problems = []
    for name in ("path", "tokenizerPath"):
        path = resource.spec.get(name)
        if not isinstance(path, str) or resolve_model_path(path, resource.source.file) is not None:
            continue
        if looks_local(path) or not is_id(path):
            message = f"model folder {path!r} does not exist (looked in the working directory and beside the manifest)"
            problems.append(Diagnostic(resource.pos_of((name,)), resource.text_of((name,)), message))
    return problems
