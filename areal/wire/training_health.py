"""Warnings about a training run, from the numbers of its steps. Pure: the trainer's log, the status of a job and alerts
share the rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Step = Mapping[str, Any]

NO_GRADIENT_STEPS = 10
STILL_REWARD_STEPS = 30
_SAME = 1e-9


class TrainingWarning(NamedTuple):
    """``steps``: how many in a row, up to the newest; ``least``: from how many on it is a warning."""

    message: str
    steps: int
    least: int

    @property
    def is_due(self) -> bool:
        """Whether a log should repeat it now: at the first step, and each time that their number has doubled."""
        times, rest = divmod(self.steps, self.least)
        return rest == 0 and times & (times - 1) == 0


def warnings_of(steps: Sequence[Step]) -> list[TrainingWarning]:
    """The warnings that hold at the newest of ``steps``, which are in order."""
    found = []
    count = _newest(steps, lambda step: step.get("grad_norm") == 0)
    if count >= NO_GRADIENT_STEPS:
        why = "all groups alike" if "reward/mean" in steps[-1] else "all are zero"
        found.append(TrainingWarning(f"no gradient: {why} for {count} steps", count, NO_GRADIENT_STEPS))
    reward = steps[-1].get("reward/mean") if steps else None
    if isinstance(reward, int | float):
        count = _newest(steps, lambda step: _is_same(step.get("reward/mean"), reward))
        if count >= STILL_REWARD_STEPS:
            message = f"the reward does not move: {reward:g} for {count} steps"
            found.append(TrainingWarning(message, count, STILL_REWARD_STEPS))
    return found


def _newest(steps: Sequence[Step], holds: Callable[[Step], bool]) -> int:
    """How many of the newest steps in a row meet the condition."""
    return next((count for count, step in enumerate(reversed(steps)) if not holds(step)), len(steps))


def _is_same(value: Any, other: float) -> bool:
    return isinstance(value, int | float) and abs(value - other) <= _SAME
