"""The values of the state and their form on disk: layers, objects, revisions, and lists with their
unreadable files.

The effective spec of an object is its layers merged in order, later over earlier; defaults are never stored. The
``apply`` layer (the manifest as written) comes first, the others follow in the order in which they were first set.
Applying replaces the apply layer whole, so a field that a manifest drops is gone without a comparison with the past. A
leaf that a manifest sets and that a later layer holds at another value is a conflict; a leaf that the manifest does not
mention is left to the layer that holds it. Invariants: one layer a manager; every leaf of the effective spec has
exactly one origin; no layer but ``apply`` is empty (an empty manifest still says who applied it, and from where).

Decoding trusts nothing: a body of another shape, of a newer format or of another object is refused with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, TypeVar

from areal.dataclasses import dataclass, field, fields, replace
from areal.resources.kinds import Ref
from areal.resources.tree import ABSENT, FieldPath, bracketed, changes, delete_path, get_path, leaves, merge, path_text
from areal.state.files import NEWER, UnreadableFile

APPLY = "apply"
JOB = "job"  # of the service that a job created: the job is at rest
AWAITING = "dependsOn"  # of an object that starts when a job has succeeded, which its ``source`` names


class LayerSource(TypedDict, total=False):
    """Where a layer came from: a manifest, of which ``derived`` fields were filled in when it was applied, or the job
    that the object waits for."""

    file: str
    line: int
    sha256: str
    derived: list[str]
    job: str


@dataclass(frozen=True)
class Layer:
    """The fields that one manager set, ``at`` seconds since the epoch."""

    manager: str
    spec: dict[str, Any]
    source: LayerSource | None = None
    actor: str = ""
    at: float = 0.0


Layers: TypeAlias = tuple[Layer, ...]


@dataclass(frozen=True)
class FieldConflict:
    """A conflict. ``mine``: the new value; ``theirs``: the value that ``manager`` set at ``at``, at the path
    ``theirs_path``."""

    path: FieldPath
    mine: Any
    theirs: Any
    manager: str
    actor: str
    at: float
    theirs_path: FieldPath = field(default=(), compare=False)


def effective(layers: Layers) -> dict[str, object]:
    """Return the layers merged in order: the user's spec, without defaults."""
    merged: dict[str, object] = {}
    for layer in layers:
        merged = merge(merged, layer.spec)
    return merged


def replace_layer(layers: Layers, layer: Layer) -> Layers:
    """``layers`` with the manager's layer replaced whole. One that says the same as before keeps its place in history
    (who, when, from where), so that applying twice changes nothing."""
    current = next((held for held in layers if held.manager == layer.manager), None)
    if current is not None and not changes(current.spec, layer.spec):
        return layers
    if current is not None:
        updated = tuple(layer if held is current else held for held in layers)
    else:
        updated = (layer, *layers) if layer.manager == APPLY else (*layers, layer)
    return _without_empty(updated)


def conflicts(layers: Layers, new: Layer) -> tuple[FieldConflict, ...]:
    """Return every leaf of ``new`` that a layer after its place would change, in the order of ``new``'s leaves."""
    found = [
        (path, FieldConflict(path, value, theirs, layer.manager, layer.actor, layer.at, held_at))
        for layer in _after(layers, new.manager)
        for path, value, held_at, theirs in _overridden(new.spec, layer.spec)
    ]
    rank = {path: index for index, path in enumerate(leaves(new.spec))} if found else {}
    return tuple(conflict for _, conflict in sorted(found, key=lambda pair: rank[pair[0]]))


def take_leaves(layers: Layers, found: Iterable[FieldConflict]) -> Layers:
    """``layers`` after the conflicting leaves were taken from the layers that held them."""
    taken: dict[str, list[FieldPath]] = {}
    for conflict in found:
        taken.setdefault(conflict.manager, []).append(conflict.theirs_path or conflict.path)
    return _without_empty(
        tuple(replace(layer, spec=_strip(layer.spec, taken.get(layer.manager, []))) for layer in layers)
    )


def origins(layers: Layers) -> dict[FieldPath, Layer]:
    """Return the layer that decides each leaf of the effective spec: the last one that holds it."""
    holder = {path: layer for layer in layers for path in leaves(layer.spec)}
    return {path: holder[path] for path in leaves(effective(layers))}


def origin(layers: Layers) -> dict[str, str]:
    """``origins`` as text: path to manager."""
    return {path_text(path): layer.manager for path, layer in origins(layers).items()}


def _after(layers: Layers, manager: str) -> Layers:
    """Return the layers that are merged after the place that ``manager`` has, or would get."""
    for index, layer in enumerate(layers):
        if layer.manager == manager:
            return layers[index + 1 :]
    return layers if manager == APPLY else ()


def _without_empty(layers: Layers) -> Layers:
    return tuple(layer for layer in layers if layer.spec or layer.manager == APPLY)


def _overridden(mine: dict[str, object], theirs: dict[str, object]) -> Iterator[tuple[FieldPath, Any, FieldPath, Any]]:
    """Leaves of ``mine`` that ``theirs`` merged over it changes: (path, value, where theirs is held, theirs)."""
    merged = merge(mine, theirs)
    after = leaves(merged)
    held = {path[:size] for path in leaves(theirs) for size in range(1, len(path) + 1)}  # and every beginning of one
    for path, value in leaves(mine).items():
        if value == {} and isinstance(get_path(merged, path), dict):
            continue  # an empty map leaves its entries open
        if changes({"": value}, {"": after.get(path, ABSENT)}):
            held_at = next(path[:size] for size in range(len(path), 0, -1) if path[:size] in held)
            yield path, value, held_at, get_path(theirs, held_at)


def _strip(spec: dict[str, object], paths: Iterable[FieldPath]) -> dict[str, object]:
    """``spec`` without ``paths``, nor keyed items of which only the name is left."""
    for path in paths:
        spec = delete_path(spec, path)
        for size in range(len(path) - 1, 0, -1):
            item = get_path(spec, path[:size])
            if bracketed(path[size - 1]) is not None and isinstance(item, dict) and item.keys() == {"name"}:
                spec = delete_path(spec, path[:size])
    return spec


FORMAT = 1
T = TypeVar("T")


@dataclass(frozen=True)
class StoredObject:
    """One object as recorded. ``spec`` is what the user asked for, without defaults; times since the epoch.

    A value: the dicts in it are never changed in place. ``generation`` counts changes of the effective spec,
    ``revision`` is the number of the last accepted one.
    """

    kind: str
    name: str
    uid: str
    generation: int = 1
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    depends_on: tuple[str, ...] = ()
    owner: str | None = None
    set_name: str | None = None
    layers: tuple[Layer, ...] = ()
    status: dict[str, Any] = field(default_factory=dict)
    created_at: float = 0.0
    revision: int = 0
    protected: bool = False

    @cached_property
    def spec(self) -> dict[str, Any]:
        return effective(self.layers)

    @cached_property
    def ref(self) -> Ref:
        return Ref(self.kind, self.name)

    @property
    def applied(self) -> Layer | None:
        """The applied manifest."""
        return next((layer for layer in self.layers if layer.manager == APPLY), None)

    @property
    def awaits(self) -> str:
        """The job that must succeed before the object starts; "" for an object that waits for none, or that would not
        start then either."""
        layer = next((layer for layer in self.layers if layer.manager == AWAITING), None)
        if layer is None or not self.spec.get("suspend"):
            return ""
        others = effective(tuple(each for each in self.layers if each is not layer))
        return "" if others.get("suspend") else (layer.source or {}).get("job", "")


@dataclass(frozen=True)
class Revision:
    """One accepted spec: the object as it was asked for, by whom, when, and from which file. No status."""

    number: int
    actor: str
    at: float
    source: LayerSource | None
    object: StoredObject

    @property
    def spec(self) -> dict[str, Any]:
        """The effective spec, all layers merged."""
        return self.object.spec


class Listing(list[T]):
    """Values that could be read, and the files that could not: (path, reason). ``presumed``: the newest revision of an
    object whose file could not be read, by that file."""

    def __init__(self) -> None:
        super().__init__()
        self.unreadable: list[tuple[Path, str]] = []
        self.presumed: dict[Path, T] = {}


def new_uid() -> str:
    """Return an identity that no other object, of any name, has had or will have."""
    return os.urandom(8).hex()


_FIELDS = tuple(each.name for each in fields(StoredObject))
_LAYER_FIELDS = tuple(each.name for each in fields(Layer))


def encode(obj: StoredObject) -> dict[str, object]:
    """Return an object as plain JSON values, in a fixed order: equal objects have equal bytes."""
    values = {name: getattr(obj, name) for name in _FIELDS}
    layers = [{name: getattr(layer, name) for name in _LAYER_FIELDS} for layer in obj.layers]
    return {"format": FORMAT, **values, "depends_on": list(obj.depends_on), "layers": layers}


def decode(body: Any, path: Path | str) -> StoredObject:
    """Return the inverse of ``encode``. Raises UnreadableFile."""
    _check_format(body, path)
    try:
        values = {**body, "depends_on": tuple(body["depends_on"])}
        values["layers"] = tuple(Layer(**layer) for layer in body["layers"])
        del values["format"]
        return StoredObject(**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise UnreadableFile(path, f"it does not describe an object ({error})", damaged=True) from error


def encode_revision(revision: Revision) -> dict[str, object]:
    body = {"format": FORMAT, "number": revision.number, "actor": revision.actor, "at": revision.at}
    return {**body, "source": revision.source, "object": encode(revision.object)}


def decode_revision(body: Any, path: Path | str) -> Revision:
    """Return the inverse of ``encode_revision``. Raises UnreadableFile."""
    _check_format(body, path)
    try:
        obj = decode(body["object"], path)
        return Revision(body["number"], body["actor"], body["at"], body["source"], obj)
    except KeyError as error:
        raise UnreadableFile(path, f"it does not describe a revision ({error} is missing)", damaged=True) from error


def _check_format(body: Any, path: Path | str) -> None:
    number = body.get("format") if isinstance(body, dict) else None
    if not isinstance(number, int):
        raise UnreadableFile(path, "it does not describe an object", damaged=True)
    if number > FORMAT:
        reason = f"{NEWER} (format {number}, this one knows {FORMAT})"
        raise UnreadableFile(path, reason, damaged=False, hint="upgrade areal")
