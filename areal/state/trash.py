"""Removing an object at once: its folder is renamed out of sight first, and emptied afterwards.

A crash leaves an object that is there or gone, and at worst a folder to sweep. Files that were quarantined are never
removed with it: they move to ``objects/.quarantine``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from areal.state.crash import crash_point
from areal.state.files import QUARANTINED, explain, make_folder, sync_folder
from areal.state.home import Home

_TRASH = ".trash-"


def is_trash(name: str) -> bool:
    """Whether a folder of this name is a removed object."""
    return name.startswith(_TRASH)


def discard(home: Home, folder: Path) -> None:
    """Make an object's folder vanish. Needs the store's lock. Raises ArealError."""
    crash_point("delete-before")
    target = folder.with_name(f"{_TRASH}{folder.name}-{os.urandom(4).hex()}")
    try:
        folder.rename(target)
        sync_folder(folder.parent)
    except OSError as error:
        raise explain(error, folder, "remove") from error
    crash_point("delete-after")
    sweep(home, folder.parent)


def sweep(home: Home, kind_folder: Path) -> int:
    """Empty what earlier removals left; how many folders. Needs the store's lock."""
    leftovers = sorted(kind_folder.glob(f"{_TRASH}*"))
    for leftover in leftovers:
        with contextlib.suppress(OSError):
            _keep_quarantined(home, leftover)
            shutil.rmtree(leftover)
    return len(leftovers)


def _keep_quarantined(home: Home, leftover: Path) -> None:
    for path in sorted(leftover.rglob(f"*{QUARANTINED}*")):
        kept = home.objects / ".quarantine"
        make_folder(kept)
        name = leftover.name.removeprefix(_TRASH)
        path.rename(kept / f"{leftover.parent.name}.{name}.{path.name}")
