"""What becomes of a model's journals when the model is deleted: they go, but for finished trajectories that nobody has
fetched yet. Those stay where they are, and a model of the same name serves them again.

``python -m areal.services.inference.recording.disposal FOLDER`` does it and prints what it left, as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from areal.services.inference.recording.database import open_writer
from areal.services.inference.recording.folder import PUBLISHED, REGISTRATIONS, Folder, hold_soon, others

_LOOKED_AT_S = 1.0
_FINISHED = "SELECT count(*) FROM trajectories WHERE phase IN (1, 2)"


@dataclass(frozen=True)
class Remains:
    """``finished``: trajectories that were never fetched. ``unreadable`` and ``served``: journals of which nobody can
    say, and those that some process serves."""

    finished: int = 0
    unreadable: tuple[str, ...] = ()
    served: tuple[str, ...] = ()

    @property
    def anything(self) -> bool:
        return bool(self.finished or self.unreadable or self.served)


def dispose(root: Path) -> Remains:
    """Delete every journal under ``root`` from which nothing would be lost, and ``root`` itself if that is all. What
    was registered at its data proxies goes always (there may be keys in it), and what a trainer published for it."""
    for beside in (*root.glob(f"*{REGISTRATIONS}"), root / PUBLISHED):
        beside.unlink(missing_ok=True)
    finished, unreadable, served = 0, [], []
    for path in others(root, set()):
        folder = hold_soon(path, _LOOKED_AT_S)
        if folder is None:
            served.append(path.name)
            continue
        try:
            count = _finished_in(folder)
        except sqlite3.Error:
            unreadable.append(path.name)
            folder.release()
            continue
        finished += count
        if count:
            folder.leave()
        else:
            folder.remove()
    remains = Remains(finished, tuple(unreadable), tuple(served))
    if not remains.anything:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(root)
    return remains


def _finished_in(folder: Folder) -> int:
    with _opened(folder.database) as db:
        count: int = db.execute(_FINISHED).fetchone()[0]
        return count


@contextlib.contextmanager
def _opened(database: Path) -> Iterator[sqlite3.Connection]:
    db = open_writer(database)
    try:
        yield db
    finally:
        db.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="areal-recording-disposal")
    parser.add_argument("folder", type=Path, help="a model's --state-dir")
    print(json.dumps(asdict(dispose(parser.parse_args().folder))))


if __name__ == "__main__":
    main()
