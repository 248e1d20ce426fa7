"""The folder of a run, and what makes it exact whenever it is killed::

    run.json             what was asked; a run goes on only with the same
    trajectories.jsonl   an episode a line, on disk before the service is told to forget it
    trajectories-N.parquet   the same, with --parquet: made from the lines of each run when it ends
    journal.jsonl        sessions started, dropped, acknowledged; gone when a run is complete
    failures.jsonl       each failed attempt, with its kind
    summary.json

A line without its end is what a killed writer left: it is cut off, its session is still there to be exported again.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal.collect.failures import EpisodeFailed
from areal.errors import Conflict, Locked
from areal.state.files import explain, write_all, write_atomic
from areal.trajectories.reading import JSONL, PARQUET, TRAJECTORIES, read_lines
from areal.trajectories.record import Episode

_FORMAT = 1


@dataclass(frozen=True)
class Left:
    """What an earlier run left behind. ``sessions``: by episode, the last one that was started and not dropped.
    ``acknowledged``: episodes of which the service has been told that they are here."""

    sessions: Mapping[str, str] = field(default_factory=dict)
    acknowledged: frozenset[str] = frozenset()


class OutputFolder:
    """Open with ``open_folder``; one process at a time. Its methods may be called from any thread."""

    def __init__(self, path: Path, run_id: str, lock: int, *, parquet: bool) -> None:
        self.path = path
        self._held = lock
        self.run_id = run_id
        self.parquet = parquet
        self.left = Left()
        self._lock = threading.Lock()
        self._lines = self._segment().open("ab", buffering=0)
        self._journal = (path / "journal.jsonl").open("a", encoding="utf-8")
        self._failures = (path / "failures.jsonl").open("a", encoding="utf-8")

    def _segment(self) -> Path:
        """Lines go to the file that follows the last one that became Parquet."""
        if not self.parquet:
            return self.path / f"{TRAJECTORIES}{JSONL}"
        done = len(list(self.path.glob(f"{TRAJECTORIES}-*{PARQUET}")))
        return self.path / f"{TRAJECTORIES}-{done:05d}{JSONL}"

    def episodes(self) -> Iterator[Episode]:
        """What is written and durable, of all runs."""
        for path in sorted(self.path.glob(f"{TRAJECTORIES}-*{PARQUET}")):
            from areal.trajectories.parquet import read_parquet

            yield from read_parquet(path)
        yield from read_lines(Path(self._lines.name), unfinished=True)

    def write(self, episode: Episode) -> None:
        """Returns when it is on disk."""
        line = json.dumps(episode.document(), ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._append(line)
        os.fsync(self._lines.fileno())

    def _append(self, line: bytes) -> None:
        """All of it or nothing: on a full disk the half that went in is taken out again, for the lines of others."""
        end = os.fstat(self._lines.fileno()).st_size
        try:
            write_all(self._lines.fileno(), line)
        except OSError as error:
            os.ftruncate(self._lines.fileno(), end)
            raise explain(error, self._lines.name, "write") from error

    def started(self, episode: str, session_id: str) -> None:
        self._note({"op": "started", "episode": episode, "session_id": session_id})

    def dropped(self, episode: str, session_id: str) -> None:
        self._note({"op": "dropped", "episode": episode, "session_id": session_id})

    def acknowledged(self, episode: str) -> None:
        self._note({"op": "acknowledged", "episode": episode})

    def _note(self, entry: Mapping[str, str]) -> None:
        with self._lock:
            self._journal.write(json.dumps(entry) + "\n")
            self._journal.flush()

    def failed(self, episode: str, attempt: int, failure: EpisodeFailed) -> None:
        entry = {"episode": episode, "attempt": attempt, "kind": failure.kind, "message": failure.message}
        with self._lock:
            self._failures.write(json.dumps({**entry, "at": round(time.time(), 3)}) + "\n")
            self._failures.flush()

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        """Let go of it, as it is."""
        for file in (self._lines, self._journal, self._failures):
            file.close()
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def finish(self, summary: Mapping[str, Any], *, complete: bool) -> None:
        """Nothing is written any more. ``complete``: every episode is here, so that nothing has to be remembered of
        sessions."""
        self._lines.close()
        if self.parquet:
            self._to_parquet()
        _write_whole(self.path / "summary.json", summary)
        if complete:
            (self.path / "journal.jsonl").unlink(missing_ok=True)

    def _to_parquet(self) -> None:
        """The lines stay until the Parquet file has its name: whoever comes between finds one of them whole."""
        from areal.trajectories.parquet import write_parquet

        lines = Path(self._lines.name)
        if lines.stat().st_size:
            temp = lines.with_suffix(".tmp")
            write_parquet(read_lines(lines), temp)
            with temp.open("rb") as file:
                os.fsync(file.fileno())
            temp.replace(lines.with_suffix(PARQUET))
        lines.unlink()


def open_folder(path: Path, asked: Mapping[str, Any], *, parquet: bool, resume: bool) -> OutputFolder:
    """Raises Conflict when the folder has a run already (without ``resume``) or one of something else (with it), Locked
    while another process writes into it."""
    path.mkdir(parents=True, exist_ok=True)
    lock = _lock(path)
    try:
        run_id = _claim(path, {**asked, "parquet": parquet}, resume=resume)
        _mend(path)
        folder = OutputFolder(path, run_id, lock, parquet=parquet)
    except BaseException:
        os.close(lock)
        raise
    folder.left = _left(path / "journal.jsonl")
    return folder


def _claim(path: Path, asked: Mapping[str, Any], *, resume: bool) -> str:
    """The id of the run that the folder is for."""
    about = path / "run.json"
    run_id = secrets.token_hex(4)
    if about.exists() and (resume or _has_begun(path)):
        if not resume:
            raise Conflict(
                f"{path} holds a run already", hint="add --resume to go on with it, or choose another --output"
            )
        before = json.loads(about.read_bytes())
        run_id = before["run_id"]
        _same(path, before, asked)
    elif _has_begun(path):
        raise Conflict(f"{path} holds trajectories, but no run.json that says of what", hint="choose another --output")
    else:
        _write_whole(about, {"format": _FORMAT, "run_id": run_id, **asked})
    return str(run_id)


def _has_begun(path: Path) -> bool:
    """Whether there is anything to go on with: a run that ended before its first episode is none."""
    return any(each.stat().st_size for name in (f"{TRAJECTORIES}*", "journal.jsonl") for each in path.glob(name))


def _lock(path: Path) -> int:
    fd = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise Locked(f"another collection writes into {path}", hint="wait for it, or choose another --output") from None
    return fd


def _same(path: Path, before: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    other = [
        f"{name}: {before.get(name)} there, {value} now" for name, value in asked.items() if before.get(name) != value
    ]
    if other:
        raise Conflict(f"{path} holds a run of something else", detail="\n".join(other), hint="choose another --output")


def _mend(path: Path) -> None:
    """Cut off what a killed writer left of a line, and forget lines that became Parquet."""
    for lines in path.glob(f"{TRAJECTORIES}*{JSONL}"):
        if lines.with_suffix(PARQUET).exists():
            lines.unlink()
            continue
        _cut(lines)
    for name in ("journal.jsonl", "failures.jsonl"):
        if (path / name).exists():
            _cut(path / name)
    for temp in path.glob("*.tmp"):
        temp.unlink()


def _cut(lines: Path) -> None:
    with lines.open("r+b") as file:
        file.truncate(_whole_lines(file.fileno()))


def _whole_lines(fd: int, step: int = 1 << 16) -> int:
    """How long the file is up to the end of its last line, read from its end."""
    at = os.fstat(fd).st_size
    while at > 0:
        start = max(0, at - step)
        newline = os.pread(fd, at - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        at = start
    return 0


def _left(journal: Path) -> Left:
    sessions: dict[str, str] = {}
    acknowledged: set[str] = set()
    if not journal.exists():
        return Left()
    for line in journal.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if entry["op"] == "started":
            sessions[entry["episode"]] = entry["session_id"]
        elif entry["op"] == "dropped" and sessions.get(entry["episode"]) == entry["session_id"]:
            del sessions[entry["episode"]]
        elif entry["op"] == "acknowledged":
            acknowledged.add(entry["episode"])
    return Left(sessions, frozenset(acknowledged))


def _write_whole(path: Path, document: Mapping[str, Any]) -> None:
    write_atomic(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n", mode=0o644)
