"""When to save, to evaluate, to checkpoint: every so many steps, epochs or seconds, whichever comes first."""

from __future__ import annotations

from dataclasses import dataclass


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
