"""The numbers that a training job writes, ``jobs/<name>/metrics.jsonl``: a line a step, read by every status.

A job that resumes writes some steps again, and those of its last attempt count. In an attempt a step may have several
lines, of the trainer and of its driver: their numbers are merged. A torn line of a killed job is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from areal.files import last_lines, parse_json
from areal.state.job_curves import read_curves, step_number

_TAIL_BYTES = 64 << 10  # some twenty lines


def steps_of(path: Path) -> list[dict[str, float]]:
    """Return the numbers of each step, in order."""
    return list(read_curves(path))


def last_steps(path: Path, most_bytes: int) -> list[dict[str, Any]]:
    """Return the numbers of the steps in the last ``most_bytes`` of the file, in order."""
    try:
        lines, _ = last_lines(path, most_bytes)
    except FileNotFoundError:
        return []
    by_step: dict[int, dict[str, Any]] = {}
    for line in _whole(lines):
        before = by_step.get(line["step"], {})
        by_step[line["step"]] = before | line if _is_same_step(before, line) else line
    return [by_step[step] for step in sorted(by_step)]


def newest_step(path: Path) -> dict[str, Any]:
    """Return the step that was written last: after a resume not the highest that the job ever took. Empty before the
    first."""
    try:
        lines, _ = last_lines(path, _TAIL_BYTES)
    except OSError:  # `areal train metrics` says why
        return {}
    whole = _whole(reversed(lines))
    newest = next(whole, {})
    for line in whole:
        if not _is_same_step(line, newest):
            break
        newest = line | newest
    return newest


def _is_same_step(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Return whether the lines are of one step, as one attempt took it."""
    return "attempt" in one and all(one.get(name) == other.get(name) for name in ("step", "attempt"))


def bottleneck(step: Mapping[str, object]) -> str | None:
    """Return the bottleneck that the trainer reported: "waited 71% for rollouts", or "training"."""
    found = step.get("bottleneck")
    return found if isinstance(found, str) else None


def eta_s(step: Mapping[str, object]) -> float | None:
    """Return seconds to the run's end at the pace of this step."""
    done, total, pace = (step.get(name) for name in ("step", "total_steps", "time/step"))
    if not (isinstance(done, int) and isinstance(total, int) and isinstance(pace, int | float)):
        return None
    return max(0, total - done) * float(pace)


def _whole(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            found = parse_json(line)
            found["step"] = step_number(found["step"])
        except (ValueError, KeyError, TypeError):
            continue
        # Numbers that JSON does not have are words, as the trainer writes them.
        yield {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in found.items()
        }
