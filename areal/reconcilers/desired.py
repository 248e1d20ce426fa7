"""Desired state, decided without I/O: manifests and stored objects become targets.

A target is the object as it should be recorded, with what changed and why. Identity and time are not decided here
(``uid`` "" and times 0 mean "stamped when recorded"), so that equal manifests over equal state give equal targets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from areal.dataclasses import dataclass, replace
from areal.errors import Conflict, FieldName, InvalidManifest, Wording
from areal.numbers import quantity_bytes
from areal.reconcilers.plan import FieldChange
from areal.resources.backend import inference_part
from areal.resources.tree import ABSENT, FieldPath, UpdateClass, changes, get_path, merge, path_text
from areal.resources.validation import effective, references, spec_model, update_class, validate
from areal.state.files import remedy
from areal.state.records import (
    APPLY,
    FieldConflict,
    Layer,
    LayerSource,
    Listing,
    Revision,
    StoredObject,
    conflicts,
    origin,
    replace_layer,
    take_leaves,
)
from areal.wire.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS


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
    source: LayerSource | None = None
    where: str = ""  # file:line:col, for messages
    applied_in: str = ""  # the working folder of the command
    fresh: bool = False  # drop the layers of an earlier object of this name


@dataclass(frozen=True)
class Target:
    """``object`` is what to record; ``action`` create | configure | unchanged | replace | prune | delete. ``replaces``:
    the stored object that has to be deleted first, for ``replace``. ``is_expired``: its manifest limits its time.
    ``follows``: it is deleted because one that it needs is."""

    object: StoredObject
    action: str
    changes: tuple[FieldChange, ...] = ()
    taken: tuple[str, ...] = ()
    cause: str = ""
    replaces: StoredObject | None = None
    is_expired: bool = False
    follows: bool = False

    @cached_property
    def ref(self) -> str:
        return str(self.object.ref)

    @cached_property
    def spec(self) -> Any:
        """The object's spec with its defaults. Raises InvalidManifest if only an earlier version accepted it."""
        if self.fault is None:
            return self._read
        if self.is_deleted:  # leave out the refused fields
            wrong = {path[0] for path, *_ in validate(self.object.kind, self.object.spec) if path}
            return effective(self.object.kind, {k: v for k, v in self.object.spec.items() if k not in wrong})
        why, hint = self.fault
        raise InvalidManifest(f"{self.ref}: {why}", hint=hint)

    @property
    def fault(self) -> tuple[str, str] | None:
        """Why its recorded spec is refused, and the next step."""
        if not isinstance(self._read, InvalidManifest):
            return None
        return self._read.message, f"apply its manifest again without the fault, or: areal delete {self.ref}"

    @cached_property
    def _read(self) -> Any:
        """The spec with its defaults, or the error that refuses it."""
        try:
            return effective(self.object.kind, self.object.spec)
        except InvalidManifest as error:
            return error

    @property
    def is_deleted(self) -> bool:
        return self.action in ("prune", "delete")

    @property
    def ending(self) -> Target | None:
        """The deletion of this object, or of the object that it replaces; None if nothing is deleted."""
        if self.replaces is not None:
            return Target(self.replaces, "delete", cause=f"replaced: {self.cause}")
        return self if self.is_deleted else None

    @property
    def decisive(self) -> FieldChange | None:
        """The changed leaf of the highest update class, the first of its class in path order."""
        return max(self.changes, key=lambda change: change.update, default=None)


def with_derived(
    wanted: Wanted, spec: Mapping[str, object], fields: Iterable[FieldPath], earlier: StoredObject | None
) -> Wanted:
    """Return ``wanted`` with ``spec``. Those of ``fields`` that the manifest does not set are marked as derived; so are
    fields that it sets to the derived value (``get -o manifest``)."""

    def filled_in(path: FieldPath) -> bool:
        given, value = get_path(wanted.spec, path), get_path(spec, path)
        if given is ABSENT:
            return value is not ABSENT
        return (
            earlier is not None and is_derived(earlier, path, unnoted=False) and value == get_path(earlier.spec, path)
        )

    source: LayerSource = wanted.source or {}
    added = {path_text(path) for path in fields if filled_in(path)}
    return replace(wanted, spec=spec, source={**source, "derived": sorted(added.union(source.get("derived", ())))})


def is_derived(stored: StoredObject, path: FieldPath, *, unnoted: bool) -> bool:
    """Return whether a recorded field was filled in, so that it stays while manifests do not set it. ``unnoted``: the
    answer for an object of an earlier version, which did not note such fields."""
    applied = stored.applied
    source: LayerSource = (applied.source if applied is not None else None) or {}
    there = get_path(stored.spec, path) is not ABSENT
    return there and (path_text(path) in source["derived"] if "derived" in source else unnoted)


def field_changes(kind: str, old: Mapping[str, object], new: Mapping[str, object]) -> tuple[FieldChange, ...]:
    """Return the leaves that differ between two sparse specs, each with its field's update class, in path order."""
    found = [
        FieldChange(path_text(("spec", *change.path)), change.old, change.new, update_class(kind, change.path))
        for change in changes(dict(old), dict(new))
    ]
    return tuple(sorted(found, key=lambda change: change.path))


def in_full(kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec with its defaults, sizes in bytes and canonical parser names; for a Model, with the number of
    replicas separate from its backend."""
    full: dict[str, Any] = effective(kind, spec).model_dump(by_alias=True, mode="json")
    resources = full.get("resources") or {}
    if resources.get("memory"):
        resources["memory"] = quantity_bytes(resources["memory"])
    for field, names in (("toolCallParser", TOOL_CALL_PARSERS), ("reasoningParser", REASONING_PARSERS)):
        if full.get(field):
            full[field] = names.resolve(full[field])
    if full.get("backend"):
        part = inference_part(full["backend"])
        full["backend"] = str(replace(part, data=1))
        full["replicas"] = part.data if full["replicas"] is None else full["replicas"]
    return full


def _effective_changes(kind: str, old: Mapping[str, object], new: Mapping[str, object]) -> tuple[FieldChange, ...]:
    """Return ``field_changes``, each with the class of its effect: META if the value in force does not change, because
    one of the specs leaves a default out or another field decides."""
    found = field_changes(kind, old, new)
    if all(change.update is UpdateClass.META for change in found) or validate(kind, old):
        return found  # an earlier version's spec, which this one refuses, has no values in force
    moved = [change.path for change in changes(in_full(kind, old), in_full(kind, new))]

    def has_effect(path: FieldPath) -> bool:
        return any(path[: len(other)] == other[: len(path)] for other in moved)

    effects: dict[str, UpdateClass] = {}
    for path in (change.path for change in changes(dict(old), dict(new)) if not has_effect(change.path)):
        is_count = path == ("backend",) and has_effect(("replicas",))
        effects[path_text(("spec", *path))] = update_class(kind, ("replicas",)) if is_count else UpdateClass.META
    return tuple(replace(change, update=effects.get(change.path, change.update)) for change in found)


def target_for(
    wanted: Wanted,
    stored: StoredObject | None,
    *,
    set_name: str | None,
    force_conflicts: bool,
    replace_it: bool,
    recreate: Sequence[str] = (),
) -> Target:
    """Lay ``wanted`` over the stored object, or replace it if its uid is in ``recreate``. Raises Conflict for a leaf
    that a later layer owns, and for an immutable leaf."""
    layer = Layer(APPLY, dict(wanted.spec), wanted.source or None, "", 0.0)
    if stored is None:
        return Target(_new_object(wanted, layer, set_name), "create", field_changes(wanted.kind, {}, wanted.spec))
    if stored.uid in recreate:
        new = _new_object(wanted, layer, set_name or stored.set_name)
        return Target(new, "replace", field_changes(wanted.kind, stored.spec, new.spec), (), "anew", replaces=stored)
    if set_name and stored.set_name and set_name != stored.set_name and not force_conflicts:
        raise Conflict(
            f"{wanted.ref} belongs to set {stored.set_name!r}, not to {set_name!r}",
            hint=f"--set-name {stored.set_name}, or --force-conflicts to move it",
        )
    where = f"{wanted.where}: " if wanted.where else ""
    layers, taken = ((), ()) if wanted.fresh else _settle_conflicts(wanted, stored, layer, force_conflicts, where)
    if not any((old.manager, old.spec) == (layer.manager, layer.spec) for old in layers):  # moving a file is no change
        layers = replace_layer(layers, layer)
    declared = {"layers": layers, "set_name": set_name or stored.set_name, **_metadata(wanted)}
    if all(getattr(stored, name) == value for name, value in declared.items()):
        return Target(stored, "unchanged")
    after = replace(stored, **declared)
    target = compared(stored, after, taken, where, may_replace=replace_it)
    return replace(target, object=_new_object(wanted, layer, after.set_name)) if target.action == "replace" else target


def with_layer(stored: StoredObject, manager: str, spec: Mapping[str, object], cause: str) -> Target:
    """Return the target of an imperative verb that owns one layer (``scale``, ``suspend``). An empty spec drops the
    layer."""
    after = replace(stored, layers=replace_layer(stored.layers, Layer(manager, dict(spec), None, "", 0.0)))
    return replace(compared(stored, after), cause=cause)


def restored(stored: StoredObject, revision: Revision) -> Target:
    """Return the target of a rollback: the revision's manifest in place of the present one. The other layers stay above
    it."""
    then, applied = revision.object, revision.object.applied
    layers = stored.layers
    if applied is not None:
        layers = replace_layer(layers, replace(applied, actor="", at=0.0))
    metadata = {name: getattr(then, name) for name in _OF_A_MANIFEST}
    after = replace(stored, layers=layers, **metadata)
    return replace(compared(stored, after), cause=f"rolled back to revision {revision.number}")


_OF_A_MANIFEST = ("labels", "annotations", "depends_on", "protected")


def same_manifest(a: StoredObject, b: StoredObject) -> bool:
    """Return whether two states of an object have the same manifest. Other layers are ignored."""

    def declared(item: StoredObject) -> list[Any]:
        applied = item.applied
        return [applied.spec if applied is not None else {}, *(getattr(item, name) for name in _OF_A_MANIFEST)]

    return declared(a) == declared(b)


def over_applied(stored: StoredObject, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of an object after a command that sets only the fields of ``wanted``, also a manifest: other
    fields stay as they were applied. A Model that changes between an engine and an external endpoint keeps no fields.

    Applied fields have their values in force, since another command (`scale`) may have changed them.
    """
    applied = stored.applied.spec if stored.applied is not None else {}
    spec = wanted["spec"]
    if ("external" in applied) == ("external" in spec):
        spec = merge(_in_force(applied, stored.spec), spec)
    metadata: dict[str, Any] = {
        "name": stored.name,
        "labels": stored.labels,
        "annotations": stored.annotations,
        "dependsOn": [str(ref) for ref in stored.depends_on],
    }
    return {**wanted, "metadata": merge({k: v for k, v in metadata.items() if v}, wanted["metadata"]), "spec": spec}


def _in_force(applied: Mapping[str, object], spec: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of ``applied`` with their values in ``spec``."""
    return {
        name: _in_force(value, now) if isinstance(value, Mapping) and isinstance(now, Mapping) else now
        for name, value in applied.items()
        for now in [spec.get(name, value)]
    }


def _new_object(wanted: Wanted, layer: Layer, set_name: str | None) -> StoredObject:
    return StoredObject(
        kind=wanted.kind,
        name=wanted.name,
        uid="",
        generation=1,
        set_name=set_name,
        layers=(layer,),
        status={},
        created_at=0.0,
        revision=0,
        **_metadata(wanted),
    )


def _metadata(wanted: Wanted) -> dict[str, Any]:
    return {
        "labels": dict(wanted.labels),
        "annotations": dict(wanted.annotations),
        "depends_on": wanted.depends_on,
        "owner": wanted.owner,
        "protected": str(wanted.annotations.get("areal.dev/protect", "")).lower() == "true",
    }


def _settle_conflicts(
    wanted: Wanted, stored: StoredObject, layer: Layer, force: bool, where: str
) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    found = conflicts(stored.layers, layer)
    if not found:
        return stored.layers, ()

    if force:
        return take_leaves(stored.layers, found), _sentences(found)
    raise HeldFields((where, wanted.ref, found))


def _sentences(
    found: Sequence[FieldConflict], source: str = "the manifest", name: Callable[[str], str] = str
) -> tuple[str, ...]:
    def clock(at: float) -> str:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else "at an unknown time"

    return tuple(
        f"{name(path_text(('spec', *conflict.path)))}: {conflict.theirs!r} was set by {conflict.manager}"
        f" ({conflict.actor or 'unknown'}, {clock(conflict.at)}); {source} says {conflict.mine!r}"
        for conflict in found
    )


class HeldFields(Conflict):
    """Fields that other owners hold. ``parts``: the place of each manifest, the object's reference, and the fields."""

    def __init__(self, *parts: tuple[str, str, Sequence[FieldConflict]]) -> None:
        self.parts = parts
        super().__init__(
            "\n".join(f"{where}{_held(ref, found)}" for where, ref, found in parts),
            hint="remove the field from the manifest to leave it to its owner, or take it with --force-conflicts",
        )

    def worded(self, source: str, name: Callable[[str], str]) -> str:
        """Return the message. ``source``: what sets other values. ``name`` words a field such as ``spec.a.b``."""
        return "\n".join(_held(ref, found, source, name) for _, ref, found in self.parts)


def _held(ref: str, found: Sequence[FieldConflict], *words: Any) -> str:
    return f"{ref} has fields that another owner holds:\n  " + "\n  ".join(_sentences(found, *words))


def compared(
    stored: StoredObject,
    after: StoredObject,
    taken: tuple[str, ...] = (),
    where: str = "",
    *,
    may_replace: bool = False,
) -> Target:
    """Return the target that records ``after`` in place of ``stored``. ``where``: the manifest's position, for
    messages."""
    if after == stored:
        return Target(stored, "unchanged")
    _require_valid(after, where)
    found = _effective_changes(stored.kind, stored.spec, after.spec)
    frozen = [change for change in found if change.update is UpdateClass.IMMUTABLE]
    if frozen:
        replaceable = spec_model(stored.kind).REPLACEABLE
        if may_replace and replaceable:
            return Target(after, "replace", found, taken, f"{frozen[0].path} is immutable", replaces=stored)
        hint = f"delete it and apply again: areal delete {stored.ref}"
        if replaceable:
            hint = "apply with --replace to delete the object and create it again; a job then begins anew"
        listed = [part for change in frozen for part in ("; ", change.to_text())]
        raise Conflict(Wording(f"{where}{stored.ref}: immutable: ", *listed[1:]), hint=hint)
    if found:
        after = replace(after, generation=stored.generation + 1)
    return Target(after, "configure", (*_metadata_changes(stored, after), *found), taken)


def _metadata_changes(old: StoredObject, new: StoredObject) -> tuple[FieldChange, ...]:
    """Return the changes of labels, annotations, dependencies and the set."""

    def of(item: StoredObject) -> dict[str, object]:
        lists = {"dependsOn": list(item.depends_on), "set": item.set_name}
        return {"labels": dict(item.labels), "annotations": dict(item.annotations), **lists}

    return tuple(
        FieldChange(path_text(("metadata", *change.path)), change.old, change.new, UpdateClass.META)
        for change in changes(of(old), of(new))
        if change.path not in (("labels",), ("annotations",))  # emptied: its entries say so
    )


def _require_valid(after: StoredObject, where: str) -> None:
    """Raise Conflict, with the layer that set each field, if valid layers are invalid together."""
    found = validate(after.kind, after.spec)
    if not found:
        return
    lines = []
    for path, message in found:
        manager = origin(after.layers).get(path_text(tuple(path)), APPLY)
        setter = f" (set by {manager})" if manager != APPLY else ""
        lines += ["\n  ", FieldName(path_text(("spec", *path))), f": {message}{setter}"]
    raise Conflict(
        Wording(f"{where}{after.ref}: its fields contradict each other:", *lines),
        hint=f"areal get {after.ref} --show-origin; --force-conflicts takes a field for the manifest",
    )


def pruned(
    stored: Iterable[StoredObject], wanted: Sequence[Wanted], *, prune: bool, set_name: str | None
) -> list[Target]:
    """Return the objects to delete: members of the set and objects of an applied owner that the manifests no longer
    contain, and everything that those own. If an owner itself has an owner, its objects follow that owner's
    manifest."""
    refs = {item.ref for item in wanted}
    whole = {item.ref for item in wanted if item.owner is None or item.owner in refs}
    rest = {str(item.ref): item for item in stored if str(item.ref) not in refs}
    causes: dict[str, str] = {}
    if prune and set_name:
        causes = {ref: f"no longer in set {set_name}" for ref, item in rest.items() if item.set_name == set_name}
    while more := {
        ref: f"no longer declared by {item.owner}"
        for ref, item in rest.items()
        if ref not in causes and item.owner in (*whole, *causes)
    }:
        causes |= more
    return [Target(item, "prune", cause=causes[ref]) for ref, item in rest.items() if ref in causes]


def deletions(stored: Sequence[StoredObject], refs: Iterable[str], *, cascade: bool) -> list[Target]:
    """Delete ``refs`` with the objects that they own; with ``cascade`` also objects that depend on those."""
    known = {str(item.ref): item for item in stored}
    asked = {ref for ref in refs if ref in known}
    causes = dict.fromkeys(asked, "deleted")
    while True:
        more = {ref: cause for ref, cause, is_owned in _dependents(known, causes) if cascade or is_owned}
        if not more:
            return [
                Target(known[ref], "delete", cause=cause, follows=ref not in asked)
                for ref, cause in sorted(causes.items())
            ]
        causes.update(more)


def check_removals(
    stored: Sequence[StoredObject],
    targets: Sequence[Target],
    has_ended: Callable[[StoredObject], bool] = lambda item: False,
) -> None:
    """Raise Conflict if a protected object, or one that a remaining object needs, would be deleted. An object that
    ``has_ended`` needs nothing any more. One with an unreadable record counts as needing what its newest revision
    needs."""
    deleted = {target.ref: target.cause for target in targets if target.is_deleted}
    ending = [target.object if target.is_deleted else target.replaces for target in targets]
    protected = sorted(str(item.ref) for item in ending if item is not None and item.protected)
    if protected:
        raise Conflict(
            f"{', '.join(protected)}: protected by the annotation areal.dev/protect; nothing was deleted",
            hint="remove the annotation first, by applying the manifest without it",
        )
    after = {str(item.ref): item for item in stored} | {target.ref: target.object for target in targets}
    if deleted and isinstance(stored, Listing):
        for path, why in stored.unreadable:
            presumed = stored.presumed.get(path)
            if presumed is None or next(_dependents({str(presumed.ref): presumed}, deleted), None):
                known = "may depend on" if presumed is None else "depends on one of"
                raise Conflict(
                    f"{path} is unreadable ({why}), and {known} {', '.join(deleted)}; nothing was deleted",
                    hint=remedy(why),
                )
    left = sorted(f"{ref} ({cause})" for ref, cause, _ in _dependents(after, deleted) if not has_ended(after[ref]))
    if left:
        raise Conflict(
            f"other objects depend on deleted ones: {', '.join(left)}; nothing was deleted",
            hint="delete them too: `areal delete --cascade` also deletes the objects that depend on an object",
        )


def needs_of(item: StoredObject | Wanted) -> tuple[str, ...]:
    """Return the objects that ``item`` refers to or depends on."""
    return (*(str(found.ref) for found in references(item.kind, item.spec)), *item.depends_on)


def _dependents(known: Mapping[str, StoredObject], deleted: Mapping[str, str]) -> Iterator[tuple[str, str, bool]]:
    """Yield the objects that remain although an object that they need is deleted: (object, why, whether that object
    owns it)."""
    for ref, item in known.items() if deleted else ():
        if ref in deleted:
            continue
        if item.owner in deleted:
            yield ref, f"owned by {item.owner}", True
            continue
        lost = next((need for need in needs_of(item) if need in deleted), None)
        if lost is not None:
            yield ref, f"depends on {lost}", False
