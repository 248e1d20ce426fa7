"""What areal knows of each object: one folder each, ``objects/<kind>/<name>/``; ``object.json`` makes it exist.

Every change of what is asked for bumps the store's serial, under one short lock, before the object is written; changes
that come from several threads at once are written together, under one lock and one serial.
Writing what is already there writes nothing. An object whose file cannot be read is an error to whoever asks for it,
never an absent object, and whatever replaces the file keeps the damaged one beside it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal.errors import NotFound
from areal.resources.kinds import KINDS, Ref, name_problem, resolve_kind
from areal.resources.tree import changes
from areal.state import revisions as _revisions
from areal.state import trash
from areal.state.files import Unreadable, names_in, quarantine, quarantined, read_json, read_raw, seal, write_together
from areal.state.group_commit import GroupCommit
from areal.state.home import Home
from areal.state.layers import Layer
from areal.state.locks import lock_store, share_store
from areal.state.records import Listing, Revision, StoredObject, decode, encode, new_uid
from areal.state.serial import bump_serial, read_serial

__all__ = ["Layer", "Listing", "ObjectStore", "Revision", "Snapshot", "StoredObject", "Unreadable", "new_uid"]

_FILE = "object.json"


@dataclass(frozen=True)
class Snapshot:
    """All objects, and the serial at which they were read: one instant, never half of another command's change."""

    serial: int
    objects: Listing[StoredObject]


@dataclass(frozen=True)
class _Put:
    """An object to be written as it is given, but for the parts of its status that ``keeps`` names: those stay."""

    obj: StoredObject
    keeps: tuple[str, ...] = ()

    @property
    def ref(self) -> Ref:
        return self.obj.ref

    def over(self, before: StoredObject | None) -> StoredObject:
        if before is None or before.uid != self.obj.uid:
            return self.obj
        kept = {name: before.status[name] for name in self.keeps if name in before.status}
        return replace(self.obj, status={**self.obj.status, **kept}) if kept else self.obj


@dataclass(frozen=True)
class _PutStatus:
    """A status to be written into the object as it then is."""

    ref: Ref
    status: dict[str, Any]

    def over(self, before: StoredObject | None) -> StoredObject:
        if before is None:
            raise _missing(self.ref)
        return replace(before, status=self.status)


class ObjectStore:
    """The objects of one home. Reading methods write nothing and need nothing to exist."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._writes: GroupCommit[Sequence[_Put | _PutStatus]] = GroupCommit(self._commit)

    def get(self, ref: Ref) -> StoredObject | None:
        """None when there is no such object. Raises Unreadable when there is one and it cannot be read."""
        return _load(str(self._path(ref)), ref)

    def list(self, kind: str | None = None) -> Listing[StoredObject]:
        """By kind order and name; what cannot be read is in ``.unreadable``, and was not taken as absent."""
        found: Listing[StoredObject] = Listing()
        for known in KINDS if kind is None else (resolve_kind(kind),):
            folder = str(self.home.objects / known.lower())
            for name in _names(folder):
                path = f"{folder}/{name}/{_FILE}"
                try:
                    obj = _load(path, Ref(known, name))
                except Unreadable as error:
                    found.unreadable.append((error.path, error.reason))
                else:
                    if obj is not None:
                        found.append(obj)
        return found

    def require_readable(self, ref: Ref) -> None:
        """Raises Unreadable when there is such an object and it cannot be read."""
        self.get(ref)

    def snapshot(self) -> Snapshot:
        """The serial and every object as of one instant: what a plan is made from."""
        with share_store(self.home):
            return Snapshot(self.serial(), self.list())

    def serial(self) -> int:
        """How many changes of what is asked for this store has seen."""
        return read_serial(self.home)

    def put(self, obj: StoredObject, *, keeps: tuple[str, ...] = ()) -> bool:
        """Record an object as it is given, but for the parts of its status that ``keeps`` names, which stay; whether
        anything had to be written. A damaged file that stands in its place is set aside; one of a newer format is
        refused with Unreadable."""
        if _holds(self._path(obj.ref), seal(encode(obj))):
            return False
        self._writes.submit([_Put(obj, keeps)])
        return True

    def put_status(self, ref: Ref, status: dict[str, Any]) -> bool:
        """Record what was observed; whether it had changed. Raises NotFound, Unreadable."""
        return bool(self.put_statuses({ref: status}))

    def put_statuses(self, statuses: Mapping[Ref, dict[str, Any]]) -> int:
        """Record what was observed of many; how many had changed. Raises NotFound, Unreadable."""
        changed = [_PutStatus(ref, status) for ref, status in statuses.items() if self._expect(ref).status != status]
        if changed:
            self._writes.submit(changed)
        return len(changed)

    def _commit(self, batch: Sequence[Sequence[_Put | _PutStatus]]) -> None:
        """Write what one or several callers want written."""
        self.home.ensure()
        with lock_store(self.home):
            written: dict[Ref, StoredObject] = {}
            asked_before: dict[Ref, StoredObject | None] = {}
            for write in (write for writes in batch for write in writes):
                before = written.get(write.ref) or self._before(write)
                asked_before.setdefault(write.ref, before)
                written[write.ref] = write.over(before)
            if any(_asks_otherwise(asked_before[ref], obj) for ref, obj in written.items()):
                bump_serial(self.home)
            write_together([(self._path(ref), seal(encode(obj))) for ref, obj in written.items()])

    def _before(self, write: _Put | _PutStatus) -> StoredObject | None:
        """What is there now. What is damaged makes room for an object, and not for a status."""
        try:
            return self.get(write.ref)
        except Unreadable as error:
            if isinstance(write, _PutStatus):
                raise
            _set_aside(error)
            return None

    def delete(self, ref: Ref) -> bool:
        """Forget an object with its revisions and events, all at once; whether there was one. Damaged files of it are
        kept, in ``objects/.quarantine``."""
        folder = self.home.object_folder(ref)
        if not folder.is_dir():
            return False
        with lock_store(self.home.ensure()):
            try:
                existed = self.get(ref) is not None
            except Unreadable as error:
                existed = True
                _set_aside(error)
            if existed:
                bump_serial(self.home)
            trash.discard(self.home, folder)
        return existed

    def revisions(self, ref: Ref) -> Listing[Revision]:
        """The last accepted specs, oldest first."""
        return _revisions.revisions(self.home, ref)

    def add_revision(
        self,
        obj: StoredObject,
        *,
        actor: str | None = None,
        at: float | None = None,
        source: dict[str, Any] | None = None,
    ) -> StoredObject:
        """Record ``obj`` as accepted, unless its newest revision says the same; ``obj`` with the revision's number, to
        be ``put``. Who, when and from which file are those of the layer that was set last, unless given."""
        last = max(obj.layers, key=lambda layer: layer.at, default=Layer("", {}))
        moment = at if at is not None else last.at or time.time()
        revision = Revision(0, actor or last.actor, moment, source or last.source, obj)
        self.home.ensure()
        return replace(obj, revision=_revisions.add_revision(self.home, revision))

    def restore(self, ref: Ref) -> StoredObject:
        """Bring an unreadable object back from its newest readable revision, the damaged file set aside. One that can
        be read is returned as it is. Raises NotFound, or Unreadable when there is nothing to restore from."""
        try:
            return self._expect(ref)
        except Unreadable as error:
            if not error.damaged:
                raise
            revision = _revisions.newest(self.home, ref)
            if revision is None:
                hint = f"apply its manifest again, or forget it: areal delete {ref}"
                raise Unreadable(error.path, f"{error.reason}; no revision is left", damaged=True, hint=hint) from error
        restored = replace(revision.object, revision=revision.number)
        self.put(restored)
        return restored

    def _path(self, ref: Ref) -> Path:
        return self.home.object_folder(ref) / _FILE

    def _expect(self, ref: Ref) -> StoredObject:
        obj = self.get(ref)
        if obj is None:
            raise _missing(ref)
        return obj


def _missing(ref: Ref) -> NotFound:
    return NotFound(f"{ref} does not exist", hint=f"areal get {ref.kind.lower()}")


def _asks_otherwise(before: StoredObject | None, after: StoredObject) -> bool:
    """Whether more than what was observed has changed."""
    return before is None or bool(changes(encode(replace(before, status={})), encode(replace(after, status={}))))


def _load(path: str, ref: Ref) -> StoredObject | None:
    try:
        obj = decode(read_json(path), path)
    except FileNotFoundError:
        copies = quarantined(path)
        if not copies:
            return None
        raise Unreadable(path, f"it was damaged, and set aside as {copies[-1]}", damaged=True) from None
    if (obj.kind, obj.name) != (ref.kind, ref.name):
        hint = f"move the folder back, or remove it: {Path(path).parent}"
        raise Unreadable(path, f"it describes {obj.ref}, not {ref}", damaged=False, hint=hint)
    return obj


def _names(folder: str) -> list[str]:
    """The names of the objects in a kind's folder; whatever else lies there is none."""
    return [name for name in names_in(folder) if name_problem(name) is None]


def _holds(path: Path, content: bytes) -> bool:
    with contextlib.suppress(FileNotFoundError, Unreadable):
        return read_raw(path) == content
    return False


def _set_aside(error: Unreadable) -> None:
    """Make room for a good file where a damaged one is. Raises ``error`` when the file must be left alone."""
    if not error.damaged:
        raise error
    if error.path.exists():
        quarantine(error.path)
