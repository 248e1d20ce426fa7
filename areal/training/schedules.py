"""Schedules over the steps of a run: learning rates; when to save, evaluate and checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Shape = Literal["constant", "linear", "cosine"]


def learning_rate_factor(
    step: int, *, total_steps: int, warmup_proportion: float, shape: Shape, min_ratio: float
) -> float:
    """The share of the full learning rate in the update number ``step`` (from 0) of ``total_steps``.

    It rises linearly over the warm-up, reaching 1 with its last update, and then falls to ``min_ratio`` by ``shape``,
    reached with the last one. Beyond ``total_steps`` it stays there.
    """
    warmup = min(total_steps, math.ceil(warmup_proportion * total_steps)) if warmup_proportion > 0 else 0
    if step < warmup:
        return (step + 1) / warmup
    if shape == "constant":
        return 1.0
    left = total_steps - warmup
    done = min(1.0, (step - warmup) / max(1, left - 1))
    if shape == "linear":
        return 1.0 - (1.0 - min_ratio) * done
    return min_ratio + (1.0 - min_ratio) * (1.0 + math.cos(math.pi * done)) / 2


# -- every N steps, epochs or seconds, whichever comes first


@dataclass(frozen=True)
class Frequency:
    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None

    @property
    def never(self) -> bool:
        return self.steps is None and self.epochs is None and self.seconds is None


@dataclass
class Timer:
    """Asked once after every step. ``now`` is a monotonic clock of the caller's, of the first rank's where there are
    several: all have to fire together."""

    frequency: Frequency
    steps: int = 0  # since it fired
    epochs: int = 0
    fired_at: float | None = None

    def due(self, *, epoch_ended: bool, now: float) -> bool:
        if self.fired_at is None:
            self.fired_at = now
        self.steps += 1
        self.epochs += epoch_ended
        every = self.frequency
        fires = (
            (every.steps is not None and self.steps >= every.steps)
            or (every.epochs is not None and self.epochs >= every.epochs)
            or (every.seconds is not None and now - self.fired_at >= every.seconds)
        )
        if fires:
            self.steps, self.epochs, self.fired_at = 0, 0, now
        return fires

    def state(self) -> dict[str, int]:
        return {"steps": self.steps, "epochs": self.epochs}

    def restore(self, state: dict[str, int]) -> None:
        self.steps, self.epochs, self.fired_at = state["steps"], state["epochs"], None
