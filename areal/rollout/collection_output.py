"""The output folder of a collection, consistent after a kill at any moment::

    run.json             the settings; a run is resumed only with the same
    trajectories.jsonl   an episode a line, on disk before it is acknowledged
    trajectories-N.parquet   the same, with --parquet: made from the lines of each run when it ends
    journal.jsonl        sessions started, dropped, acknowledged; gone when a run is complete
    failures.jsonl       each failed attempt, with its kind
    summary.json

A killed writer may leave an incomplete last line. It is cut off on resume, and its session is exported again.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from areal.dataclasses import dataclass, field
from areal.errors import ArealError, Conflict, Locked
from areal.files import parse_json, try_lock, write_all
from areal.rollout.evaluation_files import FORMAT, RUN, read_settings
from areal.rollout.failures import EpisodeFailed
from areal.state.files import UnreadableFile, explain, write_atomic
from areal.trajectories.reading import JSONL, PARQUET, TRAJECTORIES, each_once, read_folder, read_lines
from areal.trajectories.record import Episode


@dataclass(frozen=True)
class PreviousRun:
    """What the journal of earlier runs says. ``sessions``: for each episode, the last session that was started and not
    dropped. ``acknowledged``: episodes whose export was acknowledged."""

    sessions: Mapping[str, str] = field(default_factory=dict)
    acknowledged: frozenset[str] = frozenset()


class OutputFolder:
    """The output folder, opened by ``open_folder`` for one process at a time. Any thread may call its methods."""

    def __init__(self, path: Path, run_id: str, lock: int, previous: PreviousRun, *, parquet: bool) -> None:
        self.path = path
        self._lock_fd = lock
        self.run_id = run_id
        self.parquet = parquet
        self.previous_run = previous
        self._lock = threading.Lock()
        self._lines = self._segment().open("ab", buffering=0)
        self._journal = (path / "journal.jsonl").open("ab", buffering=0)
        self._failures = (path / "failures.jsonl").open("ab", buffering=0)

    def _segment(self) -> Path:
        """Return the file for new lines; with Parquet, the one after the last converted file."""
        if not self.parquet:
            return self.path / f"{TRAJECTORIES}{JSONL}"
        done = len(list(self.path.glob(f"{TRAJECTORIES}-*{PARQUET}")))
        return self.path / f"{TRAJECTORIES}-{done:05d}{JSONL}"

    def episodes(self) -> Iterator[Episode]:
        """Yield the episodes on disk, of all runs, each once."""
        self._require_place(self._lines)
        return each_once(read_folder(self.path))

    def _require_place(self, file: io.FileIO) -> None:
        """Raise ArealError if the open file is not the one of its name: what is written into it would be lost."""
        try:
            is_there = os.path.samestat(Path(file.name).stat(), os.fstat(file.fileno()))
        except FileNotFoundError:
            is_there = False
        if not is_there:
            hint = "the same command begins anew, or goes on where the folder is now: --resume --output DIR"
            raise ArealError(f"{file.name} was moved or removed while this collection wrote into it", hint=hint)

    def write(self, episode: Episode) -> None:
        """Append the episode and sync it to disk. Values of Parquet that JSON has no form for are written as text."""
        document = episode.document()
        line = json.dumps(document, ensure_ascii=False, separators=(",", ":"), default=str)
        try:
            line.encode()
        except UnicodeEncodeError:  # an agent's answer with half of a surrogate pair
            line = json.dumps(document, default=str)
        self._append(self._lines, line)
        os.fsync(self._lines.fileno())

    def _append(self, file: io.FileIO, line: str) -> None:
        """Append a line. On a full disk the partial line is removed. Raises ArealError."""
        self._require_place(file)
        with self._lock:
            end = os.fstat(file.fileno()).st_size
            try:
                write_all(file.fileno(), line.encode() + b"\n")
            except OSError as error:
                os.ftruncate(file.fileno(), end)
                raise explain(error, file.name, "write") from error

    def started(self, episode: str, session_id: str) -> None:
        self._append(self._journal, json.dumps({"op": "started", "episode": episode, "session_id": session_id}))

    def dropped(self, episode: str, session_id: str) -> None:
        self._append(self._journal, json.dumps({"op": "dropped", "episode": episode, "session_id": session_id}))

    def acknowledged(self, episode: str) -> None:
        self._append(self._journal, json.dumps({"op": "acknowledged", "episode": episode}))

    def failed(self, episode: str, attempt: int, failure: EpisodeFailed) -> None:
        entry = {"episode": episode, "attempt": attempt, "kind": failure.kind, "message": failure.message}
        self._append(self._failures, json.dumps({**entry, "at": round(time.time(), 3)}))

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in (self._lines, self._journal, self._failures):
            file.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def finish(self, summary: Mapping[str, object], *, complete: bool) -> None:
        """Write the summary, after the last episode. ``complete``: the folder has every episode, so the journal of
        sessions is removed."""
        self._lines.close()
        if self.parquet:
            self._to_parquet()
        _write_json(self.path / "summary.json", summary)
        if complete:
            (self.path / "journal.jsonl").unlink(missing_ok=True)

    def _to_parquet(self) -> None:
        """Convert the lines to Parquet. They are removed only after the Parquet file is in place, so that a reader
        always finds one of the two complete."""
        from areal.trajectories.reading import write_parquet

        lines = Path(self._lines.name)
        if lines.stat().st_size:
            temp = lines.with_suffix(".tmp")
            write_parquet(read_lines(lines), temp)
            with temp.open("rb") as file:
                os.fsync(file.fileno())
            temp.replace(lines.with_suffix(PARQUET))
        lines.unlink()


def open_folder(path: Path, settings: Mapping[str, object], *, parquet: bool, resume: bool) -> OutputFolder:
    """Open the folder. Raises Conflict for a folder with a run (without ``resume``) or with a run of other settings
    (with it), Locked while another process writes to it, and ArealError if it cannot be written."""
    path = path.absolute()  # an agent may change the working folder
    with ExitStack() as stack:
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
            stack.callback(os.close, lock)
            run_id = _check_settings(path, {**settings, "parquet": parquet}, resume=resume)
            _repair(path)
            previous = _previous_run(path / "journal.jsonl")
            folder = OutputFolder(path, run_id, lock, previous, parquet=parquet)
        except OSError as error:
            fault = explain(error, error.filename or path, "write")
            raise ArealError(fault.message, hint="choose another --output") from error
        stack.pop_all()
    return folder


def _check_settings(path: Path, settings: Mapping[str, object], *, resume: bool) -> str:
    """Compare or write ``run.json``, and return the run's id."""
    about = path / RUN
    run_id = secrets.token_hex(4)
    if not resume:
        refuse_begun(path)
    if about.exists() and (resume or _has_begun(path)):
        before = read_settings(path)
        run_id = before["run_id"]
        differ = {name: value for name, value in settings.items() if before.get(name) != value}
        if differ:
            rows = "dataset: its rows have changed since the run began"
            detail = "\n".join(
                rows if name == "dataset" else f"{name}: {before.get(name)} there, {value} now"
                for name, value in differ.items()
            )
            raise Conflict(f"{path} contains a run with other settings", detail=detail, hint="choose another --output")
    elif _has_begun(path):
        raise Conflict(
            f"{path} contains trajectories, but no run.json that describes them", hint="choose another --output"
        )
    else:
        _write_json(about, {"format": FORMAT, "run_id": run_id, **settings})
    return str(run_id)


def refuse_begun(path: Path) -> None:
    """Raise Conflict for a folder that contains a run."""
    if (path / RUN).exists() and _has_begun(path):
        raise Conflict(
            f"{path} already contains a run", hint="add --resume to go on with it, or choose another --output"
        )


def _has_begun(path: Path) -> bool:
    """Return whether the folder has something to resume. A run that ended before its first session has not."""
    return any(each.stat().st_size for name in (f"{TRAJECTORIES}*", "journal.jsonl") for each in path.glob(name))


def _lock(path: Path) -> int:
    fd = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not try_lock(fd):
        os.close(fd)
        raise Locked(f"another collection writes into {path}", hint="wait for it, or choose another --output")
    return fd


def _repair(path: Path) -> None:
    """Cut off incomplete lines, and remove lines that were converted to Parquet and temporary files."""
    for lines in path.glob(f"{TRAJECTORIES}*{JSONL}"):
        if lines.with_suffix(PARQUET).exists():
            lines.unlink()
        else:
            _truncate(lines)
    for name in ("journal.jsonl", "failures.jsonl"):
        if (path / name).exists():
            _truncate(path / name)
    for temp in path.glob("*.tmp"):
        temp.unlink()


def _truncate(lines: Path) -> None:
    with lines.open("r+b") as file:
        if lines.stat().st_size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                end = content.rfind(b"\n") + 1
            file.truncate(end)


def _previous_run(journal: Path) -> PreviousRun:
    sessions: dict[str, str] = {}
    acknowledged: set[str] = set()
    lines = journal.read_bytes().splitlines() if journal.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            entry = parse_json(line)
            if entry["op"] == "started":
                sessions[entry["episode"]] = entry["session_id"]
            elif entry["op"] == "dropped" and sessions.get(entry["episode"]) == entry["session_id"]:
                del sessions[entry["episode"]]
            elif entry["op"] == "acknowledged":
                acknowledged.add(entry["episode"])
        except (ValueError, KeyError, TypeError) as error:
            hint = "remove the file: the episodes that are not on disk begin anew"
            raise UnreadableFile(journal, f"line {number}: {error!r}", damaged=False, hint=hint) from error
    return PreviousRun(sessions, frozenset(acknowledged))


def _write_json(path: Path, document: Mapping[str, object]) -> None:
    write_atomic(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n", mode=0o644)


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """The numbers of an episode for the summary. ``prompt_tokens`` are those of its longest interaction."""

    prompt: int
    reward: float | None
    turns: int
    prompt_tokens: int
    generated_tokens: int
    truncated: bool
    seconds: float


def outcome_of(episode: Episode) -> EpisodeOutcome:
    rows = episode.interactions
    return EpisodeOutcome(
        episode.prompt,
        episode.reward,
        len(rows),
        max((row.prompt_tokens for row in rows), default=0),
        episode.generated_tokens,
        any(row.truncated for row in rows),
        episode.seconds,
    )


@dataclass
class CollectionProgress:
    """The state of a run. ``before``: the number of ``outcomes`` from earlier runs."""

    planned: int
    outcomes: list[EpisodeOutcome] = field(default_factory=list)
    before: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    first_failure: str = ""
    retried: int = 0
    running: int = 0

    @property
    def done(self) -> int:
        return len(self.outcomes)

    @property
    def complete(self) -> bool:
        return self.done == self.planned

    @property
    def rewards(self) -> list[float]:
        return [each.reward for each in self.outcomes if each.reward is not None]


def summary(progress: CollectionProgress, seconds: float) -> dict[str, object]:
    """Return the content of ``summary.json``. Rates are of this run alone and count generated tokens."""
    outcomes = progress.outcomes
    fresh = sum(each.generated_tokens for each in outcomes[progress.before :])
    return {
        "planned": progress.planned,
        "done": progress.done,
        "done_before": progress.before,
        "failed": sum(progress.failed.values()),
        "missing": progress.planned - progress.done,
        "failures": dict(sorted(progress.failed.items())),
        "retries": progress.retried,
        "seconds": round(seconds, 3),
        "generated_tokens": sum(each.generated_tokens for each in outcomes),
        "tokens_per_second": round(fresh / seconds, 2) if seconds > 0 else None,
        "episodes_per_second": round((progress.done - progress.before) / seconds, 3) if seconds > 0 else None,
        "reward": spread(progress.rewards),
        "unrewarded": progress.done - len(progress.rewards),
        "groups": groups(outcomes),
        "turns": spread([each.turns for each in outcomes]),
        "prompt_tokens": spread([each.prompt_tokens for each in outcomes]),
        "answer_tokens": spread([each.generated_tokens for each in outcomes]),
        "episode_seconds": spread([each.seconds for each in outcomes]),
        "truncated": sum(each.truncated for each in outcomes),
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean, population standard deviation and quantiles; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered)
    deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in ordered) / len(ordered))
    return {
        "mean": round(mean, 6),
        "std": round(deviation, 6),
        "min": ordered[0],
        "p50": quantile(ordered, 0.5),
        "p90": quantile(ordered, 0.9),
        "p99": quantile(ordered, 0.99),
        "max": ordered[-1],
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that is greater than or equal to at least ``share`` of the values."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def groups(outcomes: Sequence[EpisodeOutcome]) -> dict[str, Any] | None:
    """Return statistics of the prompts with several rewarded samples; None without such a prompt. A prompt whose
    samples all have the same reward has no gradient in a group-relative method."""
    by_prompt: dict[int, list[float]] = {}
    for each in outcomes:
        if each.reward is not None:
            by_prompt.setdefault(each.prompt, []).append(each.reward)
    several = [rewards for rewards in by_prompt.values() if len(rewards) > 1]
    if not several:
        return None
    best = max(max(rewards) for rewards in several)
    agreeing = [rewards for rewards in several if min(rewards) == max(rewards)]
    return {
        "prompts": len(several),
        "all_best": sum(rewards[0] == best for rewards in agreeing),
        "all_equal": len(agreeing),
        "best_of_n": round(math.fsum(max(rewards) for rewards in several) / len(several), 6),
    }


def failed_for(failures: Mapping[str, int]) -> str:
    """Return the numbers of failures by kind as text, the most frequent first."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(failures.items(), key=lambda item: -item[1]))
