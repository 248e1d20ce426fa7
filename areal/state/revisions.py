"""The last accepted specs of an object: ``revisions/N.json``, numbered from 1, the newest ``KEEP`` kept.

A revision is written before the object that refers to it; a crash between the two leaves a revision that the retry
finds to be the newest and equal, and uses.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from areal.resources.kinds import Ref
from areal.resources.tree import changes
from areal.state.files import Unreadable, explain, names_in, quarantine, read_json, write_json
from areal.state.home import Home
from areal.state.records import Listing, Revision, StoredObject, decode_revision, encode_revision

KEEP = 20


def revisions(home: Home, ref: Ref) -> Listing[Revision]:
    """Oldest first; what cannot be read is in ``.unreadable``. Writes nothing."""
    found: Listing[Revision] = Listing()
    for number in _numbers(home, ref):
        path = _path(home, ref, number)
        try:
            found.append(decode_revision(read_json(path), path))
        except FileNotFoundError:
            continue  # dropped by another command since the folder was listed
        except Unreadable as error:
            found.unreadable.append((path, error.reason))
    return found


def newest(home: Home, ref: Ref) -> Revision | None:
    """The newest revision that can be read."""
    for number in reversed(_numbers(home, ref)):
        path = _path(home, ref, number)
        try:
            return decode_revision(read_json(path), path)
        except (FileNotFoundError, Unreadable):
            continue
    return None


def add_revision(home: Home, revision: Revision) -> int:
    """Record one, unless the newest says the same; its number. ``revision.number`` is ignored: the store counts."""
    ref = revision.object.ref
    last = newest(home, ref)
    if last is not None and same(last.object, revision.object):
        return last.number
    number = max(_numbers(home, ref), default=0) + 1
    numbered = replace(revision, number=number, object=replace(revision.object, revision=number, status={}))
    write_json(_path(home, ref, number), encode_revision(numbered))
    for old in _numbers(home, ref)[:-KEEP]:
        _drop(_path(home, ref, old))
    return number


def same(a: StoredObject, b: StoredObject) -> bool:
    """Whether two objects ask for the same: who asked, when, generation and status aside."""

    def asked(obj: StoredObject) -> dict[str, object]:
        return {
            "uid": obj.uid,
            "labels": obj.labels,
            "annotations": obj.annotations,
            "depends_on": list(obj.depends_on),
            "owner": obj.owner,
            "set_name": obj.set_name,
            "protected": obj.protected,
            "layers": [[layer.manager, layer.spec] for layer in obj.layers],
        }

    return not changes(asked(a), asked(b))


def _path(home: Home, ref: Ref, number: int) -> Path:
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
    except Unreadable as error:
        if error.damaged:
            quarantine(path)
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise explain(error, path, "remove") from error
