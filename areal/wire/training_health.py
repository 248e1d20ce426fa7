"""Warnings about a training run, from the numbers of its steps. Pure: the trainer's log, the status of a job and alerts
share the rules."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

Step = Mapping[str, Any]

NO_GRADIENT_STEPS = 10
STILL_REWARD_STEPS = 30
FLAT_REWARD_STEPS = 100
_SAME = 1e-9
_SOLVED = 0.9  # of the way from the lowest reward of a sample to the highest
_MOVED = 0.1  # of that range
_CERTAIN = 3.0  # standard errors
_MOST_POINTS = 400


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
        newest, least = reward, STILL_REWARD_STEPS
        count = _newest(steps, lambda step: _is_same(step.get("reward/mean"), newest))
        if count < least and (mean := _flat_reward(steps)) is not None:
            reward, count, least = mean, len(steps), FLAT_REWARD_STEPS
        if count >= least and not _is_solved(reward, *_range(_some(steps))):
            found.append(TrainingWarning(f"the reward does not move: {reward:.3g} for {count} steps", count, least))
    return found


def _flat_reward(steps: Sequence[Step]) -> float | None:
    """The mean reward, where it has not moved since the first step; None where it has, or might have.

    It has not if the means of the run's four quarters differ by less than a tenth of the range of a sample's reward,
    three standard errors of such a difference added. So noise around a mean is flat once there are enough steps to
    tell; a run that learns slowly, or returns to where it began, is not."""
    if len(steps) < FLAT_REWARD_STEPS:
        return None
    chosen = _some(steps)
    rewards = [value for step in chosen if _is_number(value := step.get("reward/mean"))]
    if len(rewards) < len(chosen):
        return None
    size = len(rewards) // 4
    quarters = [rewards[size * number :][:size] for number in range(4)]
    means = [statistics.fmean(quarter) for quarter in quarters]
    variance = statistics.fmean(map(statistics.pvariance, quarters, means))
    error = math.sqrt(2 * variance / (size - 1))
    low, high = _range(chosen)
    is_flat = max(means) - min(means) + _CERTAIN * error < _MOVED * (high - low)
    return statistics.fmean(means) if is_flat else None


def _some(steps: Sequence[Step]) -> list[Step]:
    every = -(-len(steps) // _MOST_POINTS)
    return [steps[place] for place in range(0, len(steps), every)]


def _range(steps: Sequence[Step]) -> tuple[float, float]:
    """The lowest and the highest reward of a sample; equal where no step has them."""
    lowest = [value for step in steps if _is_number(value := step.get("reward/min"))]
    highest = [value for step in steps if _is_number(value := step.get("reward/max"))]
    return (min(lowest), max(highest)) if lowest and highest else (0.0, 0.0)


def _is_solved(reward: float, low: float, high: float) -> bool:
    """Whether nearly all samples have the highest reward that any had, and some had less."""
    return low < high and reward >= low + _SOLVED * (high - low)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _newest(steps: Sequence[Step], holds: Callable[[Step], bool]) -> int:
    """How many of the newest steps in a row meet the condition."""
    return next((count for count, step in enumerate(reversed(steps)) if not holds(step)), len(steps))


def _is_same(value: Any, other: float) -> bool:
    return isinstance(value, int | float) and abs(value - other) <= _SAME
