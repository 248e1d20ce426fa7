"""One journal's SQLite file: its tables, and how it is opened.

Why SQLite and no log of our own: a session changes state, is looked up by key, by interaction and by conversation,
and is removed. All of that needs an index that survives a crash, on disk, so that idle sessions cost no memory.
Write-ahead mode with ``synchronous=FULL`` gives exactly what is promised: a transaction is on disk when its commit
returns, a torn tail is cut off at the next open, a full disk fails the transaction and leaves nothing of it. What it
costs an interaction, ``benchmarks/recording.py`` measures: between 100 and 200 us of CPU, of which the statements
themselves are less than half.

SQLite checks its log but not its tables, so every row carries its own CRC.

``interactions.id`` is session * 2^32 + sequence number: one session's rows lie together and in order, a trajectory
is a range of them.

``rewards.value`` has no type: a REAL column stores -0.0 as the integer 0.
"""

from __future__ import annotations

import sqlite3
from functools import partial
from pathlib import Path

SEQUENCES = 2**32
_FORMAT = 1
_PAGES_A_CHECKPOINT = 1000  # a log that is written over again costs half of one that grows
_WRITER_CACHE_KB = 4096
_READER_CACHE_KB = 1024
_BUSY_S = 10.0
_text = partial(str, encoding="utf-8", errors="replace")  # damaged text is read, and fails its row's checksum

_TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
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


def open_writer(file: Path) -> sqlite3.Connection:
    """The one connection that writes, the tables made if need be. Raises sqlite3.Error."""
    db = _connect(file, _WRITER_CACHE_KB)
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version == 0:
        db.execute("PRAGMA auto_vacuum=INCREMENTAL")
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    db.execute(f"PRAGMA wal_autocheckpoint={_PAGES_A_CHECKPOINT}")
    if version == 0:
        db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={_FORMAT}; COMMIT")
    elif version != _FORMAT:
        raise sqlite3.DatabaseError(f"{file} has format {version}; this version reads format {_FORMAT}")
    return db


def open_reader(file: Path) -> sqlite3.Connection:
    """Sees what is committed, and waits for nobody."""
    db = _connect(file, _READER_CACHE_KB)
    db.execute("PRAGMA query_only=1")
    return db


def _connect(file: Path, cache_kb: int) -> sqlite3.Connection:
    # Statements run on the event loop's thread and commits in another, but never at the same time.
    db = sqlite3.connect(file, isolation_level=None, check_same_thread=False, timeout=_BUSY_S, cached_statements=128)
    db.text_factory = _text
    db.execute(f"PRAGMA cache_size=-{cache_kb}")
    return db
