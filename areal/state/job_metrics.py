"""The numbers that a training job writes, ``jobs/<name>/metrics.jsonl``: a line a step, read by whoever asks how it is.

A job that resumes writes some steps again, and one that is killed leaves a torn line: both are read for what they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_WAITS = {
    "time/rollout": "rollouts",
    "time/weights": "weight updates",
    "time/save": "saving",
    "time/checkpoint": "checkpoints",
    "time/eval": "evaluation",
}
_WORTH_TELLING = 0.25  # of a step
_TAIL_BYTES = 64 << 10  # some twenty lines


def steps_of(path: Path) -> list[dict[str, Any]]:
    """The last line of each step, in order."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    by_step = {int(found["step"]): found for found in _whole(content.splitlines())}
    return [by_step[step] for step in sorted(by_step)]


def newest_step(path: Path) -> dict[str, Any]:
    """Where the job is: after a resume that is not the highest step that it ever took. Empty before the first."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _TAIL_BYTES))
            tail = stream.read()
    except FileNotFoundError:
        return {}
    lines = tail.splitlines()
    if size > _TAIL_BYTES:
        del lines[0]  # its beginning is not in the tail
    return next(_whole(reversed(lines)), {})


def waiting_for(step: Mapping[str, Any]) -> str | None:
    """What took the most of a step beside training, where that is worth telling."""
    whole = float(step.get("time/step") or 0.0)
    shares = {what: float(step.get(name) or 0.0) / whole for name, what in _WAITS.items()} if whole > 0 else {}
    what = max(shares, key=lambda each: shares[each], default="")
    return f"{what} ({shares[what]:.0%} of a step)" if what and shares[what] >= _WORTH_TELLING else None


def _whole(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            found = json.loads(line)
            int(found["step"])
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
        yield found
