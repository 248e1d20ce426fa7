"""Warnings about a training run, from the numbers of its steps. Pure: the trainer's log, the status of a job and alerts
share the rules."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
_GREATEST = 1e100  # of greater values the variance overflows
WITHOUT_SPREAD = "groups/without_spread"
"""The metric: the share of groups whose samples have equal rewards."""
_KLS = ("approx_kl", "ref_kl", "mismatch_kl")
_HOLDS = 10  # steps that NaN or a spike is a warning for
_SPIKE = 10.0  # times the median of the steps before
_BEFORE = 50  # steps
_LEAST_KL = 0.1  # nats a token: less is no spike
_COLLAPSED = 0.3  # of the range of a sample's reward
_FEWEST_POINTS = 40

NO_WAIT = "training"
"""What a step is reported to wait for where no wait took a quarter of it."""


class TrainingWarning(NamedTuple):
    """``steps``: how many in a row, up to the newest; ``least``: the number that makes it a warning. ``step``: where it
    began. ``is_error``: the run learns nothing more."""

    rule: str
    message: str
    cause: str
    steps: int
    least: int
    step: int | None = None
    is_error: bool = False

    def is_due(self, held: Collection[str]) -> bool:
        """Return whether a log should report it now: when its rule begins to hold, and each time that the number of
        its steps has doubled. ``held``: the rules that held at the step before."""
        times, rest = divmod(self.steps, self.least)
        return self.rule not in held or (times > 1 and rest == 0 and times & (times - 1) == 0)


def warnings_of(steps: Sequence[Step]) -> list[TrainingWarning]:
    """Return the warnings that hold at the newest of ``steps``, which are in order."""
    rules = (_not_finite, _kl_spike, _no_spread, _reward_collapse, _still_reward)
    return [warning for rule in rules if (warning := rule(steps)) is not None]


def _no_spread(steps: Sequence[Step]) -> TrainingWarning | None:
    count = _newest(steps, lambda step: step.get("grad_norm") == 0)
    alike = _newest(steps, lambda step: step.get(WITHOUT_SPREAD) == 1)
    if max(count, alike) < NO_GRADIENT_STEPS:
        return None
    cause = (
        "the samples of each group have equal rewards: prompts that are all too easy or too hard, or a constant reward"
    )
    if count < alike:
        message, count = f"no group with spread for {alike} steps", alike
    elif "reward/mean" in steps[-1]:
        message = f"no gradient: all groups alike for {count} steps"
    else:
        message, cause = (
            f"no gradient: all are zero for {count} steps",
            "no token is trained on, or nothing is left to learn",
        )
    return TrainingWarning("no-spread", message, cause, count, NO_GRADIENT_STEPS, _number_of(steps[-count]))


def _still_reward(steps: Sequence[Step]) -> TrainingWarning | None:
    reward = steps[-1].get("reward/mean") if steps else None
    if not _is_number(reward):
        return None
    newest, least = reward, STILL_REWARD_STEPS
    count = _newest(steps, lambda step: _is_same(step.get("reward/mean"), newest))
    if count < least and (mean := _flat_reward(steps)) is not None:
        reward, count, least = mean, len(steps), FLAT_REWARD_STEPS
    if count < least or _is_solved(reward, *_range(_some(steps))):
        return None
    cause = "a reward that is too rare to learn from, too low a learning rate, or a reward function that always fails"
    message = f"the reward does not move: {reward:.3g} for {count} steps"
    return TrainingWarning("flat-reward", message, cause, count, least, _number_of(steps[-count]))


def _not_finite(steps: Sequence[Step]) -> TrainingWarning | None:
    """Return a warning for NaN or infinity in one of the newest steps."""
    for step in _last(steps, _HOLDS):
        names = sorted(name for name, value in step.items() if isinstance(value, float) and not math.isfinite(value))
        if names:
            found = step[names[0]]
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            number = _number_of(step)
            where = "" if number is None else f" at step {number}"
            message = f"{names[0]} is {'NaN' if math.isnan(found) else 'infinite'}{others}{where}"
            cause = "a loss or a gradient overflowed (learning rate, precision), or a reward is not finite"
            return TrainingWarning("not-finite", message, cause, 1, 1, number, is_error=True)
    return None


def _kl_spike(steps: Sequence[Step]) -> TrainingWarning | None:
    """Return a KL divergence that is many times its median of the steps before."""
    for ago, step in enumerate(_last(steps, _HOLDS), 1):
        for name in _KLS:
            value = step.get(name)
            if not _is_number(value) or value < _LEAST_KL:
                continue
            end = len(steps) - ago
            before = [steps[place].get(name) for place in range(max(0, end - _BEFORE), end)]
            known = [abs(each) for each in before if _is_number(each)]
            usual = statistics.median(known) if len(known) >= _HOLDS else math.inf
            if value > _SPIKE * usual:
                number = _number_of(step)
                where = "" if number is None else f" at step {number}"
                message = f"{name} is {value:.3g}{where}, where {usual:.2g} is usual"
                cause = "one update moved the policy far: an outlier in the batch, or too high a learning rate"
                return TrainingWarning("kl-spike", message, cause, 1, 1, number)
    return None


def _reward_collapse(steps: Sequence[Step]) -> TrainingWarning | None:
    """Return whether the reward has fallen from its best by much of the range of a sample's reward, and by more than
    its noise."""
    chosen = _some(steps)
    rewards = [value for step in chosen if _is_number(value := step.get("reward/mean"))]
    size = max(10, len(rewards) // 10)
    low, high = _range(chosen)
    if len(rewards) < _FEWEST_POINTS or not 0.0 < high - low < math.inf:
        return None
    now = [value for step in _last(steps, size) if _is_number(value := step.get("reward/mean"))]
    windows = [rewards[place : place + size] for place in range(0, len(rewards) - 2 * size + 1, max(1, size // 2))]
    best = max(windows, key=statistics.fmean, default=[])
    if not now or not best:
        return None
    before, after = statistics.fmean(best), statistics.fmean(now)
    error = math.sqrt((_variance(best) + _variance(now)) / size)
    if before - after <= _COLLAPSED * (high - low) + _CERTAIN * error:
        return None
    message = f"the reward has collapsed: {after:.3g}, where it was {before:.3g}"
    cause = "the policy has lost what it had learnt: learning rate, too weak a KL term, or answers that became too long"
    return TrainingWarning("reward-collapse", message, cause, len(now), len(now), _number_of(steps[-1]), is_error=True)


def _flat_reward(steps: Sequence[Step]) -> float | None:
    """Return the mean reward if it has not moved since the first step; None if it has, or might have.

    It has not if the means of the run's four quarters differ by less than a tenth of the range of a sample's reward,
    three standard errors of such a difference added. So noise around a mean is flat once there are enough steps to
    tell; a run that learns slowly, or returns to where it began, is not.
    """
    if len(steps) < FLAT_REWARD_STEPS:
        return None
    chosen = _some(steps)
    rewards = [value for step in chosen if _is_number(value := step.get("reward/mean"))]
    if len(rewards) < len(chosen):
        return None
    size = len(rewards) // 4
    quarters = [rewards[size * number :][:size] for number in range(4)]
    means = [statistics.fmean(quarter) for quarter in quarters]
    variance = statistics.fmean(map(_variance, quarters))
    error = math.sqrt(2 * variance / (size - 1))
    low, high = _range(chosen)
    is_flat = max(means) - min(means) + _CERTAIN * error < _MOVED * (high - low)
    return statistics.fmean(means) if is_flat else None


def _variance(values: Sequence[float]) -> float:
    """Return the variance. That of ``statistics``, which adds fractions, takes ten times as long."""
    mean = statistics.fmean(values)
    return statistics.fmean([(value - mean) ** 2 for value in values])


def _some(steps: Sequence[Step]) -> list[Step]:
    every = max(1, -(-len(steps) // _MOST_POINTS))
    return [steps[place] for place in range(0, len(steps), every)]


def _range(steps: Sequence[Step]) -> tuple[float, float]:
    """Return the lowest and the highest reward of a sample; equal if no step has them."""
    lowest = [value for step in steps if _is_number(value := step.get("reward/min"))]
    highest = [value for step in steps if _is_number(value := step.get("reward/max"))]
    return (min(lowest), max(highest)) if lowest and highest else (0.0, 0.0)


def _last(steps: Sequence[Step], count: int) -> Iterator[Step]:
    """Return the newest steps, newest first."""
    return (steps[-place] for place in range(1, min(count, len(steps)) + 1))


def _number_of(step: Step) -> int | None:
    number = step.get("step")
    return number if isinstance(number, int) else None


def _is_solved(reward: float, low: float, high: float) -> bool:
    """Return whether nearly all samples have the highest reward that any had, and some had less."""
    return low < high and reward >= low + _SOLVED * (high - low)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and -_GREATEST <= value <= _GREATEST


def _newest(steps: Sequence[Step], holds: Callable[[Step], bool]) -> int:
    """Return how many of the newest steps in a row meet the condition."""
    return next((count for count, step in enumerate(reversed(steps)) if not holds(step)), len(steps))


def _is_same(value: Any, other: float) -> bool:
    return isinstance(value, int | float) and bool(abs(value - other) <= _SAME)
