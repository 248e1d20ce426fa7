"""Checks of the home for ``areal doctor``: damaged files, leftovers of crashes, files that others can read.

Only ``set_aside``, ``sweep`` and ``tighten`` change anything.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from areal.dataclasses import dataclass
from areal.resources.kinds import KINDS, Ref, name_problem
from areal.state.files import explain, is_temp, names_in, quarantine
from areal.state.home import Home
from areal.state.locks import lock_store
from areal.state.objects import ObjectStore, is_trash, read_serial, serial_path, sweep_trash

STALE_TEMP_S = 900.0  # no write of a small file lasts this long: its writer is gone


@dataclass(frozen=True)
class Defect:
    """A file that cannot be read, and why. ``ref`` is the object to restore, None for any other file."""

    path: Path
    reason: str
    ref: Ref | None = None


def defects(home: Home) -> tuple[Defect, ...]:
    """Return the serial, objects and revisions that are unreadable; the serial first, as restored objects need one."""
    store = ObjectStore(home)
    found = [Defect(serial_path(home), "it does not hold a number")] if read_serial(home) < 0 else []
    found += [Defect(path, reason, ref_of(path)) for path, reason in store.list().unreadable]
    for ref in _folders(home):
        found += [Defect(path, reason) for path, reason in store.revisions(ref).unreadable]
    return tuple(found)


def set_aside(home: Home, defect: Defect) -> Path | None:
    """Quarantine a damaged file that is not an object; its new path, None when there was nothing to move. Objects are
    set aside by ``ObjectStore.restore``, which puts something in their place."""
    with lock_store(home.ensure()):
        return quarantine(defect.path) if defect.path.exists() else None


def leftovers(home: Home) -> tuple[Path, ...]:
    """Return files that are never read again: unfinished writes, removed folders of crashes, holders of locks."""
    now = time.time()
    found = [path for path in _walk(home) if is_temp(path.name) and now - _modified(path) > STALE_TEMP_S]
    found += home.locks.rglob("*.holder.json")  # of earlier versions; now the lock's file names its holder
    for kind in KINDS:
        folder = home.objects / kind.lower()
        found += [folder / name for name in names_in(folder) if is_trash(name)]
    return tuple(sorted(found))


def sweep(home: Home) -> tuple[Path, ...]:
    """Remove the leftovers; the paths removed. Quarantined files among them are kept."""
    found = leftovers(home)
    if not found:
        return ()
    home.ensure()
    with lock_store(home):
        for kind in KINDS:
            sweep_trash(home, home.objects / kind.lower())
    for path in found:
        with contextlib.suppress(OSError):
            path.unlink()
    return tuple(path for path in found if not path.exists())


def exposed(home: Home) -> tuple[tuple[Path, int], ...]:
    """Folders and files that others than their owner may read or write, with their modes: the home's own folders,
    the keys, the objects, and the secrets of runs."""
    paths = [home.root, *home.folders, home.config, *home.credentials.glob("*"), *home.runs.glob("*/secret.json")]
    found = []
    for path in [*paths, *_walk(home)]:
        with contextlib.suppress(OSError):
            mode = stat.S_IMODE(path.lstat().st_mode)
            if mode & 0o077 and not path.is_symlink():
                found.append((path, mode))
    return tuple(dict(found).items())


def tighten(path: Path) -> None:
    """Take from others every right to ``path``. Raises ArealError."""
    try:
        path.chmod(stat.S_IMODE(path.stat().st_mode) & 0o700)
    except OSError as error:
        raise explain(error, path, "change the mode of") from error


def filesystem(home: Home) -> tuple[str, frozenset[str]]:
    """Return the home's type of file system (``ext4``, ``nfs4``, ... or ``unknown``) and its mount options."""
    place = os.path.realpath(home.root)
    best, kind, options = "", "unknown", ""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            left, right = line.split(" - ", 1)
            fields, (found, _, of_server) = left.split(), right.split(maxsplit=2)
            point = fields[4].encode().decode("unicode_escape")
            if len(point) >= len(best) and (place == point or place.startswith(point.rstrip("/") + "/")):
                best, kind, options = point, found, f"{fields[5]},{of_server}"
    return kind, frozenset(options.split(","))


def locks_hold_between_machines(kind: str, options: Collection[str]) -> bool | None:
    """Return whether ``flock`` on a file system keeps other machines out; None where its type and options do not tell,
    and for those of one machine. See nfs(5) (``local_lock``) and mount.lustre(8)."""
    if kind in ("nfs", "nfs4"):
        return not {"nolock", "local_lock=all", "local_lock=flock"}.intersection(options)
    if kind == "lustre":
        return "flock" in options or (False if {"localflock", "noflock"}.intersection(options) else None)
    return None


_OF_NETWORKS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "9p", "virtiofs", "beegfs", "afs")
_OF_ONE_MACHINE = ("fuseblk", "fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.gocryptfs", "fuse.encfs")


def may_span_machines(kind: str) -> bool:
    """Return whether other machines may have the same file system mounted: most of FUSE are clients of a network."""
    return kind in _OF_NETWORKS or (kind.partition(".")[0] == "fuse" and kind not in _OF_ONE_MACHINE)


def _walk(home: Home) -> Iterator[Path]:
    for top in (home.objects, home.journal, home.locks, home.credentials):
        for folder, _, names in os.walk(top):
            yield from (Path(folder, name) for name in names)


def _folders(home: Home) -> Iterator[Ref]:
    for kind in KINDS:
        for path in sorted((home.objects / kind.lower()).glob("*/revisions")):
            if name_problem(path.parent.name) is None:  # a folder that is being removed has another name
                yield Ref(kind, path.parent.name)


def ref_of(path: Path) -> Ref:
    """Return the object of a file that cannot be read."""
    kind = next(kind for kind in KINDS if kind.lower() == path.parent.parent.name)
    return Ref(kind, path.parent.name)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()
