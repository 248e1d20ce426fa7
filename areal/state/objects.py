"""Stored objects, one folder each: ``objects/<kind>/<name>/``; ``object.json`` makes it exist.

Every change of what is asked for bumps the store's serial, under one short lock, before the object is written; changes
that come from several threads at once are written together, under one lock and one serial. Writing what is already
there writes nothing. An object whose file cannot be read is an error to whoever asks for it, never an absent object,
and whatever replaces the file keeps the damaged one beside it.

``revisions/N.json`` hold the last ``KEEP`` accepted specs. A revision is written before the object that refers to it; a
crash between the two leaves one that the retry finds to be the newest and equal, and uses. An object is removed by
renaming its folder out of sight and emptying it afterwards; quarantined files move to ``objects/.quarantine``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal.dataclasses import dataclass, replace
from areal.errors import NotFound, did_you_mean
from areal.files import sync_folder
from areal.resources.kinds import KINDS, Ref, name_problem, resolve_kind
from areal.resources.tree import changes
from areal.state.files import (
    QUARANTINED,
    GroupCommit,
    UnreadableFile,
    crash_point,
    explain,
    make_folder,
    names_in,
    quarantine,
    quarantined,
    read_json,
    read_raw,
    seal,
    write_atomic,
    write_together,
)
from areal.state.home import Home
from areal.state.locks import lock_store, share_store
from areal.state.records import Layer, Listing, Revision, StoredObject, decode, decode_revision, encode, encode_revision

KEEP = 20


def newest_revision(home: Home, ref: Ref) -> Revision | None:
    """Return the newest revision that can be read."""
    for number in reversed(_numbers(home, ref)):
        path = _revision_path(home, ref, number)
        try:
            return decode_revision(read_json(path), path)
        except (FileNotFoundError, UnreadableFile):
            continue
    return None


def same(a: StoredObject, b: StoredObject) -> bool:
    """Return whether two objects have the same content; actors, times, generation and status are ignored."""

    def asked(obj: StoredObject) -> dict[str, object]:
        layers = tuple(Layer(layer.manager, layer.spec) for layer in obj.layers)
        return encode(replace(obj, layers=layers, generation=0, revision=0, created_at=0.0, status={}))

    return not changes(asked(a), asked(b))


def _revision_path(home: Home, ref: Ref, number: int) -> Path:
    return home.object_folder(ref) / "revisions" / f"{number}.json"


def _numbers(home: Home, ref: Ref) -> list[int]:
    folder = home.object_folder(ref) / "revisions"
    stems = (name.removesuffix(".json") for name in names_in(folder) if name.endswith(".json"))
    return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdigit())


def _drop(path: Path) -> None:
    """Remove a revision that is too old to keep; one that cannot be read is set aside instead."""
    try:
        read_json(path)
    except FileNotFoundError:
        return
    except UnreadableFile as error:
        if error.damaged:
            quarantine(path)
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise explain(error, path, "remove") from error


# The serial: a plan made at another one is stale. A crash between its bump and the change makes a plan stale for
# nothing, which costs a second look; the other order would let a stale plan pass.


def serial_path(home: Home) -> Path:
    return home.objects / "serial"


def read_serial(home: Home) -> int:
    """Return the serial, 0 for a store that never changed, -1 for one that cannot be read: the next change replaces
    it."""
    try:
        return int(read_raw(serial_path(home)))
    except FileNotFoundError:
        return 0
    except (ValueError, UnreadableFile):
        return -1


def bump_serial(home: Home) -> int:
    """Increment the serial and return it. Needs the store's lock. An unreadable serial restarts from the clock, above
    any serial that a plan was made at."""
    following = read_serial(home) + 1 or int(time.time())
    write_atomic(serial_path(home), f"{following}\n")
    return following


_TRASH = ".trash-"


def is_trash(name: str) -> bool:
    """Return whether a folder of this name is a removed object."""
    return name.startswith(_TRASH)


def discard_folder(home: Home, folder: Path) -> None:
    """Make an object's folder vanish. Needs the store's lock. Raises ArealError."""
    crash_point("delete-before")
    target = folder.with_name(f"{_TRASH}{folder.name}-{os.urandom(4).hex()}")
    try:
        folder.rename(target)
        sync_folder(folder.parent)
    except OSError as error:
        raise explain(error, folder, "remove") from error
    crash_point("delete-after")
    sweep_trash(home, folder.parent)


def sweep_trash(home: Home, kind_folder: Path) -> int:
    """Delete the folders that earlier removals left; their number. Needs the store's lock."""
    leftovers = sorted(kind_folder.glob(f"{_TRASH}*"))
    for leftover in leftovers:
        with contextlib.suppress(OSError):
            for path in sorted(leftover.rglob(f"*{QUARANTINED}*")):
                kept = home.objects / ".quarantine"
                make_folder(kept)
                name = leftover.name.removeprefix(_TRASH)
                path.rename(kept / f"{leftover.parent.name}.{name}.{path.name}")
            import shutil

            shutil.rmtree(leftover)
    return len(leftovers)


_FILE = "object.json"
_PLANNED = ("restartedAt",)  # of the status: what plans depend on


@dataclass(frozen=True)
class StoreSnapshot:
    """All objects, and the serial at which they were read: one instant, never half of another command's change."""

    serial: int
    objects: Listing[StoredObject]


@dataclass(frozen=True)
class _Put:
    """An object to write as given, except the parts of its status that ``keeps`` names, which stay."""

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
        assert before is not None, f"no object {self.ref} has a status"
        return replace(before, status=self.status)


class ObjectStore:
    """The objects of one home. Reading methods write nothing and need nothing to exist."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._writes: GroupCommit[Sequence[_Put | _PutStatus]] = GroupCommit(self._commit)

    def get(self, ref: Ref) -> StoredObject | None:
        """Return the object, None if there is no such object. Raises UnreadableFile if there is one and it cannot be
        read."""
        return _load(str(self._path(ref)), ref)

    def expect(self, ref: Ref) -> StoredObject:
        """Return the object. Raises NotFound, or UnreadableFile when there is one and it cannot be read."""
        found = self.get(ref)
        if found is None:
            raise self.missing(ref)
        return found

    def missing(self, ref: Ref) -> NotFound:
        """Return the error for an object that does not exist, with a similar name as a suggestion."""
        names = [item.name for item in self.list(ref.kind)]  # a folder without a record is left by a killed command
        hint = f"there are: {', '.join(names[:8])}" if names else f"there is no {ref.kind} in {self.home.root}"
        return NotFound(f"{ref} does not exist{did_you_mean(ref.name, names)}", hint=hint)

    def list(self, kind: str | None = None) -> Listing[StoredObject]:
        """Objects by kind order and name. UnreadableFile files are in ``.unreadable``: they are not absent."""
        found: Listing[StoredObject] = Listing()
        for known in KINDS if kind is None else (resolve_kind(kind),):
            folder = str(self.home.objects / known.lower())
            for name in names_in(folder):
                if name_problem(name) is not None:
                    continue  # not an object
                path = f"{folder}/{name}/{_FILE}"
                try:
                    obj = _load(path, Ref(known, name))
                except UnreadableFile as error:
                    found.unreadable.append((error.path, error.reason))
                    if (revision := newest_revision(self.home, Ref(known, name))) is not None:
                        found.presumed[error.path] = revision.object
                else:
                    if obj is not None:
                        found.append(obj)
        return found

    def snapshot(self) -> StoreSnapshot:
        """Return the serial and every object as of one instant, for a plan."""
        with share_store(self.home):
            return StoreSnapshot(self.serial(), self.list())

    def serial(self) -> int:
        """Return the number of changes that this store has seen of what plans depend on."""
        return read_serial(self.home)

    def put(self, obj: StoredObject, *, keeps: tuple[str, ...] = ()) -> bool:
        """Record an object, except for the parts of its status that ``keeps`` names, which stay. Return whether
        anything was written. A damaged file in its place is set aside; a file of a newer format is refused with
        UnreadableFile."""
        return self.put_all([(obj, keeps)]) == 1

    def put_all(self, objects: Sequence[tuple[StoredObject, tuple[str, ...]]]) -> int:
        """Record many objects with ``put`` as one change of the store. Return the number of objects written."""
        changed = [_Put(obj, keeps) for obj, keeps in objects if not _holds(self._path(obj.ref), obj)]
        if changed:
            self._writes.submit(changed)
        return len(changed)

    def put_statuses(self, statuses: Mapping[Ref, dict[str, Any]]) -> None:
        """Record the statuses of many objects; one that is the same is not written. Raises NotFound, UnreadableFile."""
        if statuses:
            self._writes.submit([_PutStatus(ref, status) for ref, status in statuses.items()])

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
            puts = {write.ref for writes in batch for write in writes if isinstance(write, _Put)}
            if any(_affects_plans(asked_before[ref], written[ref]) for ref in puts):
                bump_serial(self.home)
            changed = {ref: obj for ref, obj in written.items() if ref in puts or obj != asked_before[ref]}
            if changed:
                write_together([(self._path(ref), seal(encode(obj))) for ref, obj in changed.items()])

    def _before(self, write: _Put | _PutStatus) -> StoredObject | None:
        """Return the object as it is now. A damaged file makes room for an object, not for a status."""
        if isinstance(write, _PutStatus):
            return self.expect(write.ref)
        try:
            return self.get(write.ref)
        except UnreadableFile as error:
            _set_aside(error)
            return None

    def delete(self, ref: Ref) -> bool:
        """Delete an object with its revisions and events, all at once. Return whether it existed. Its damaged files are
        kept in ``objects/.quarantine``."""
        folder = self.home.object_folder(ref)
        if not folder.is_dir():
            return False
        with lock_store(self.home.ensure()):
            try:
                existed = self.get(ref) is not None
            except UnreadableFile as error:
                existed = True
                _set_aside(error)
            if existed:
                bump_serial(self.home)
            discard_folder(self.home, folder)
        return existed

    def revisions(self, ref: Ref) -> Listing[Revision]:
        """Return the last accepted specs, oldest first; files that cannot be read are in ``.unreadable``."""
        found: Listing[Revision] = Listing()
        for number in _numbers(self.home, ref):
            path = _revision_path(self.home, ref, number)
            try:
                found.append(decode_revision(read_json(path), path))
            except FileNotFoundError:
                continue  # dropped by another command since the folder was listed
            except UnreadableFile as error:
                found.unreadable.append((path, error.reason))
        return found

    def add_revision(self, obj: StoredObject, *, actor: str | None = None, at: float | None = None) -> StoredObject:
        """``add_revisions`` of one object."""
        return self.add_revisions([obj], actor=actor, at=at)[0]

    def add_revisions(
        self, objects: Sequence[StoredObject], *, actor: str | None = None, at: float | None = None
    ) -> Sequence[StoredObject]:
        """Record objects as accepted, except those whose newest revision has the same content. Return the objects with
        their revision numbers, to be ``put``. Actor and time are those of the layer that was set last, unless given."""
        accepted: list[StoredObject] = []
        written: list[tuple[Path, bytes]] = []
        for obj in objects:
            numbers = _numbers(self.home, obj.ref)
            newest = newest_revision(self.home, obj.ref) if numbers else None
            if newest is not None and same(newest.object, obj):
                accepted.append(replace(obj, revision=newest.number))
                continue
            last = max(obj.layers, key=lambda layer: layer.at, default=Layer("", {}))
            number = max(numbers, default=0) + 1
            accepted.append(replace(obj, revision=number))
            moment = at if at is not None else last.at or time.time()
            without_status = replace(accepted[-1], status={})
            revision = Revision(number, actor or last.actor, moment, last.source, without_status)
            written.append((_revision_path(self.home, obj.ref, number), seal(encode_revision(revision))))
        if written:
            self.home.ensure()
            write_together(written)
        for obj in accepted:
            if obj.revision > KEEP:
                for old in _numbers(self.home, obj.ref)[:-KEEP]:
                    _drop(_revision_path(self.home, obj.ref, old))
        return accepted

    def is_lost(self, ref: Ref) -> bool:
        """Return whether the record is damaged and no revision can restore it. Raises UnreadableFile for a record that
        is unreadable for another reason, or that a revision can restore."""
        try:
            self.get(ref)
        except UnreadableFile as error:
            if not error.damaged or newest_revision(self.home, ref) is not None:
                raise
            return True
        return False

    def restore(self, ref: Ref) -> StoredObject:
        """Restore an unreadable object from its newest readable revision, and set the damaged file aside. A readable
        object is returned unchanged. Raises NotFound, or UnreadableFile if there is no readable revision."""
        try:
            return self.expect(ref)
        except UnreadableFile as error:
            if not error.damaged:
                raise
            revision = newest_revision(self.home, ref)
            if revision is None:
                hint = f"its manifest replaces it and keeps its processes: areal apply -f FILE; or areal delete {ref}"
                raise UnreadableFile(
                    error.path, f"{error.reason}; no revision is left", damaged=True, hint=hint
                ) from error
        restored = replace(revision.object, revision=revision.number)
        self.put(restored)
        return restored

    def _path(self, ref: Ref) -> Path:
        return self.home.object_folder(ref, _FILE)


def _affects_plans(before: StoredObject | None, after: StoredObject) -> bool:
    """Return whether anything has changed except the parts of the status that no plan depends on."""

    def asked(obj: StoredObject) -> dict[str, object]:
        return encode(replace(obj, status={name: obj.status[name] for name in _PLANNED if name in obj.status}))

    return before is None or bool(changes(asked(before), asked(after)))


def _load(path: str, ref: Ref) -> StoredObject | None:
    try:
        obj = decode(read_json(path), path)
    except FileNotFoundError:
        copies = quarantined(path)
        if not copies:
            return None
        raise UnreadableFile(path, f"it was damaged, and set aside as {copies[-1]}", damaged=True) from None
    if (obj.kind, obj.name) != (ref.kind, ref.name):
        hint = f"move the folder back, or remove it: {Path(path).parent}"
        raise UnreadableFile(path, f"it describes {obj.ref}, not {ref}", damaged=False, hint=hint)
    return obj


def _holds(path: Path, obj: StoredObject) -> bool:
    with contextlib.suppress(FileNotFoundError, UnreadableFile):
        return read_raw(path) == seal(encode(obj))
    return False


def _set_aside(error: UnreadableFile) -> None:
    """Make room for a good file where a damaged one is. Raises ``error`` when the file must be left alone."""
    if not error.damaged:
        raise error
    if error.path.exists():
        quarantine(error.path)
