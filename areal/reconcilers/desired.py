"""Desired state, decided without I/O: manifests meet the stored objects and become targets.

A target is the object as it should be recorded, with what changed and why. Identity and time are not decided here
(``uid`` "" and times 0 mean "stamped when recorded"), so equal manifests over equal state give equal targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal.errors import Conflict
from areal.reconcilers.plan import FieldChange, spec_path
from areal.resources.registry import update_class
from areal.resources.tree import changes
from areal.resources.update import Update
from areal.state import layers as layering
from areal.state.layers import Layer
from areal.state.records import StoredObject

APPLY = "apply"


@dataclass(frozen=True)
class Wanted:
    """One resource as a caller declares it: a manifest's, or the one layer that an imperative verb sets."""

    ref: str
    kind: str
    name: str
    spec: Mapping[str, Any]
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    depends_on: tuple[str, ...] = ()
    owner: str | None = None
    source: Mapping[str, Any] | None = None
    where: str = ""  # file:line:col, for messages


@dataclass(frozen=True)
class Target:
    """``object`` is what to record; ``action`` create | configure | unchanged | prune | delete."""

    object: StoredObject
    action: str
    changes: tuple[FieldChange, ...] = ()
    taken: tuple[str, ...] = ()
    cause: str = ""

    @property
    def ref(self) -> str:
        return str(self.object.ref)

    @property
    def gone(self) -> bool:
        return self.action in ("prune", "delete")

    @property
    def decisive(self) -> FieldChange | None:
        """The changed leaf of the highest update class, the first of its class in path order."""
        return max(self.changes, key=lambda change: change.update, default=None)


def field_changes(kind: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[FieldChange, ...]:
    """Leaves that differ between two sparse specs, each with its update class, in path order."""
    found = [
        FieldChange(spec_path(("spec", *change.path)), change.old, change.new, update_class(kind, change.path))
        for change in changes(dict(old), dict(new))
    ]
    return tuple(sorted(found, key=lambda change: change.path))


def target_for(
    wanted: Wanted, stored: StoredObject | None, *, set_name: str | None, force_conflicts: bool, replace_it: bool
) -> Target:
    """Lay ``wanted`` over what is stored. Raises Conflict: a leaf owned by a later layer, an immutable leaf."""
    layer = Layer(APPLY, dict(wanted.spec), dict(wanted.source) if wanted.source else None, "", 0.0)
    if stored is None:
        return Target(_new_object(wanted, layer, set_name), "create", field_changes(wanted.kind, {}, wanted.spec))
    kept, taken = _settle_conflicts(wanted, stored, layer, force_conflicts)
    after = replace(
        stored,
        layers=_with_layer(kept, layer),
        labels=dict(wanted.labels),
        annotations=dict(wanted.annotations),
        depends_on=wanted.depends_on,
        owner=wanted.owner,
        set_name=set_name or stored.set_name,
        protected=_protected(wanted),
    )
    return _compared(stored, after, taken, replace_it=replace_it, where=wanted.where)


def with_layer(stored: StoredObject, manager: str, spec: Mapping[str, Any], cause: str) -> Target:
    """The target of an imperative verb that owns one layer (``scale``, ``suspend``); an empty spec drops it."""
    after = replace(stored, layers=layering.replace(stored.layers, Layer(manager, dict(spec), None, "", 0.0)))
    return replace(_compared(stored, after, (), replace_it=False, where=""), cause=cause)


def _new_object(wanted: Wanted, layer: Layer, set_name: str | None) -> StoredObject:
    return StoredObject(
        kind=wanted.kind,
        name=wanted.name,
        uid="",
        generation=1,
        labels=dict(wanted.labels),
        annotations=dict(wanted.annotations),
        depends_on=wanted.depends_on,
        owner=wanted.owner,
        set_name=set_name,
        layers=(layer,),
        status={},
        created_at=0.0,
        revision=0,
        protected=_protected(wanted),
    )


def _protected(wanted: Wanted) -> bool:
    return str(wanted.annotations.get("areal.dev/protect", "")).lower() == "true"


def _settle_conflicts(
    wanted: Wanted, stored: StoredObject, layer: Layer, force: bool
) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    found = layering.conflicts(stored.layers, layer)
    if not found:
        return stored.layers, ()
    sentences = tuple(
        f"{spec_path(('spec', *conflict.path))}: {conflict.theirs!r} was set by {conflict.manager}"
        f" ({conflict.actor or 'unknown'}, {_clock(conflict.at)}); the manifest says {conflict.mine!r}"
        for conflict in found
    )
    if force:
        return layering.take(stored.layers, found), sentences
    where = f"{wanted.where}: " if wanted.where else ""
    raise Conflict(
        f"{where}{wanted.ref} has fields that another owner holds:\n  " + "\n  ".join(sentences),
        hint="remove the field from the manifest to leave it to its owner, or take it with --force-conflicts",
    )


def _with_layer(existing: tuple[Layer, ...], layer: Layer) -> tuple[Layer, ...]:
    """Replace the apply layer, but keep the stored one when its spec is equal: moving a file is no change."""
    for old in existing:
        if old.manager == layer.manager and old.spec == layer.spec:
            return existing
    return layering.replace(existing, layer)


def _compared(
    stored: StoredObject, after: StoredObject, taken: tuple[str, ...], *, replace_it: bool, where: str
) -> Target:
    found = field_changes(stored.kind, stored.spec, after.spec)
    frozen = [change for change in found if change.update is Update.IMMUTABLE]
    if frozen and not replace_it:
        prefix = f"{where}: " if where else ""
        listed = "; ".join(change.to_text() for change in frozen)
        raise Conflict(
            f"{prefix}{stored.ref}: immutable: {listed}",
            hint="apply with --replace to delete the object and create it again",
        )
    if after == stored:
        return Target(stored, "unchanged")
    if found:
        after = replace(after, generation=stored.generation + 1)
    return Target(after, "configure", found, taken)


def _clock(at: float) -> str:
    import time

    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else "at an unknown time"


def pruned(
    stored: Iterable[StoredObject], wanted: Sequence[Wanted], *, prune: bool, set_name: str | None
) -> list[Target]:
    """Objects to delete: members of the set, and owned by an applied object, that the manifests no longer hold."""
    refs = {item.ref for item in wanted}
    found: list[Target] = []
    for candidate in stored:
        ref = str(candidate.ref)
        if ref in refs:
            continue
        if candidate.owner in refs:
            found.append(Target(candidate, "prune", cause=f"no longer declared by {candidate.owner}"))
        elif prune and set_name and candidate.set_name == set_name:
            found.append(Target(candidate, "prune", cause=f"no longer in set {set_name}"))
    protected = [target for target in found if target.object.protected]
    if protected:
        raise Conflict(
            "protected objects would be pruned: " + ", ".join(target.ref for target in protected),
            hint="remove the annotation areal.dev/protect, or leave them in the manifests",
        )
    return found
