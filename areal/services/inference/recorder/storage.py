"""The tables of a journal of recorded model calls, and the disposal of a model's journals.

Idle sessions use no memory: they are found on disk by key, interaction or conversation. Recording an interaction costs
100 to 200 us of CPU (``benchmarks/recording.py``), of which the SQL statements are less than half.

``interactions.id`` is session * 2^32 + sequence number, so a session's rows are adjacent and in order, and a trajectory
is a range of them. ``rewards.value`` has no type: a REAL column stores -0.0 as the integer 0.

``python -m areal.services.inference.recorder.storage FOLDER`` deletes the journals of a deleted model (``dispose``) and
prints a ``DisposalReport`` as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sqlite3
from pathlib import Path

from areal.dataclasses import asdict, dataclass
from areal.services.journal import storage
from areal.services.journal.storage import other_folders, wait_for_lock

SEQUENCES = 2**32
REGISTRATIONS = ".models.json"  # a file beside each folder: the models registered at the run with this uid
PUBLISHED = "published.json"  # a file beside the folders: the weights that the model's workers are to serve
PAUSING = "pausing-"  # files beside the folders: a data proxy itself has paused the engine at that address
_FORMAT = 1

_TABLES = """
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY, task TEXT NOT NULL, grp TEXT NOT NULL, key BLOB UNIQUE, created REAL NOT NULL,
    life INTEGER NOT NULL, online INTEGER NOT NULL, standing INTEGER NOT NULL, next_trajectory INTEGER NOT NULL,
    crc INTEGER NOT NULL);
CREATE INDEX sessions_live ON sessions (number) WHERE life = 0;
CREATE TABLE trajectories (
    session INTEGER NOT NULL, number INTEGER NOT NULL, first INTEGER NOT NULL, phase INTEGER NOT NULL, due REAL,
    sealed INTEGER NOT NULL, ready_at REAL, export INTEGER, crc INTEGER NOT NULL,
    PRIMARY KEY (session, number)) WITHOUT ROWID;
CREATE INDEX trajectories_by_phase ON trajectories (phase, ready_at) WHERE phase IN (1, 2);
CREATE INDEX trajectories_by_export ON trajectories (export) WHERE export IS NOT NULL;
CREATE TABLE interactions (
    id INTEGER PRIMARY KEY, session INTEGER NOT NULL, name TEXT NOT NULL, total INTEGER NOT NULL, tokens BLOB,
    after BLOB, call BLOB NOT NULL, idempotency BLOB, at REAL NOT NULL, data BLOB NOT NULL);
CREATE INDEX interactions_after ON interactions (session, after) WHERE after IS NOT NULL;
CREATE INDEX interactions_idempotency ON interactions (session, idempotency) WHERE idempotency IS NOT NULL;
CREATE TABLE rewards (
    interaction INTEGER PRIMARY KEY, value NOT NULL, at REAL NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE failures (
    session INTEGER NOT NULL, trajectory INTEGER NOT NULL, code TEXT NOT NULL, count INTEGER NOT NULL,
    PRIMARY KEY (session, trajectory, code)) WITHOUT ROWID;
CREATE TABLE exports (
    number INTEGER PRIMARY KEY, nonce TEXT NOT NULL, digest BLOB NOT NULL UNIQUE, request TEXT NOT NULL,
    until REAL NOT NULL, crc INTEGER NOT NULL);
"""
_REQUESTS = """
CREATE TABLE IF NOT EXISTS requests (
    session INTEGER NOT NULL, key BLOB NOT NULL, asked BLOB NOT NULL, answer BLOB NOT NULL, until REAL NOT NULL,
    crc INTEGER NOT NULL, PRIMARY KEY (session, key)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS requests_until ON requests (until);
"""


def open_writer(file: Path) -> sqlite3.Connection:
    """Return the journal's only writing connection. Creates missing tables. Raises sqlite3.Error."""
    with storage.closed_on_error(storage.open_writer(file, _TABLES, _FORMAT)) as db:
        db.executescript(_REQUESTS)  # journals of earlier versions lack it
        return db


_LOOKED_AT_S = 1.0
_FINISHED = "SELECT count(*) FROM trajectories WHERE phase IN (1, 2)"


@dataclass(frozen=True)
class DisposalReport:
    """The journals that ``dispose`` did not delete. ``finished``: their number of finished trajectories that were not
    fetched. ``unreadable`` and ``served``: names of journals that cannot be read, or that a process serves."""

    finished: int = 0
    unreadable: tuple[str, ...] = ()
    served: tuple[str, ...] = ()

    @property
    def anything(self) -> bool:
        return bool(self.finished or self.unreadable or self.served)


def dispose(root: Path) -> DisposalReport:
    """Delete every free, readable journal under ``root`` without finished trajectories, and ``root`` itself if no
    journal remains. Always deletes the records of registered models, which may hold keys, and of published weights."""
    for beside in (*root.glob(f"*{REGISTRATIONS}"), *root.glob(f"{PAUSING}*"), root / PUBLISHED):
        beside.unlink(missing_ok=True)
    finished, unreadable, served = 0, [], []
    for path in other_folders(root, set()):
        folder = wait_for_lock(path, _LOOKED_AT_S)
        if folder is None:
            served.append(path.name)
            continue
        try:
            with contextlib.closing(open_writer(folder.database)) as db:
                (count,) = db.execute(_FINISHED).fetchone()
        except sqlite3.Error:
            unreadable.append(path.name)
            folder.release()
            continue
        finished += count
        if count:
            folder.leave()
        else:
            folder.remove()
    remains = DisposalReport(finished, tuple(unreadable), tuple(served))
    if not remains.anything:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(root)
    return remains


def main() -> None:
    parser = argparse.ArgumentParser(prog="areal-recording-disposal")
    parser.add_argument("folder", type=Path, help="a model's --state-dir")
    print(json.dumps(asdict(dispose(parser.parse_args().folder))))


if __name__ == "__main__":
    main()
