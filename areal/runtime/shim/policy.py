"""Restart decisions: pure, without a clock or randomness of their own.

A failed component is restarted at once; if it fails again, after ``initial * factor**n`` seconds (at most ``max``),
spread by ``jitter`` so that replicas that fail together do not restart together. After ``reset_after`` healthy seconds,
however long its start took, the back-off begins again. More than ``budget_count`` restarts within ``budget_window``
seconds, or that many in a row without becoming healthy, are a crash loop: the shim gives up and releases the GPU.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

RESTART = "restart"
FINISHED = "finished"
CRASHLOOP = "crashloop"
_A_YEAR_S = 365 * 86400.0
_HEALTHY_S = 30.0  # a component that dies of its first request was healthy for only a moment


class Exit:
    """The end of one start of the component. ``line``: the line of its log that names the error."""

    __slots__ = ("at", "code", "line", "reason", "signal")

    def __init__(self, code: int | None, signal: int | None, at: float, reason: str) -> None:
        self.code = code
        self.signal = signal
        self.at = at
        self.reason = reason
        self.line = ""

    def to_record(self) -> dict[str, object]:
        return {"code": self.code, "signal": self.signal, "at": self.at, "reason": self.reason, "line": self.line}


class RestartDecision:
    __slots__ = ("action", "delay_s", "reason")

    def __init__(self, action: str, delay_s: float = 0.0, reason: str = "") -> None:
        self.action = action
        self.delay_s = delay_s
        self.reason = reason


class RestartBudget:
    """The history needed for a decision: when restarts were decided, and how many quick ones happened in a row."""

    def __init__(self, policy: Mapping[str, Any]) -> None:
        self._policy = str(policy["policy"])
        self._initial = float(policy["initial_backoff_s"])
        self._factor = float(policy["factor"])
        self._max = float(policy["max_backoff_s"])
        self._jitter = float(policy["jitter"])
        self._count = int(policy["budget_count"])
        self._window = float(policy["budget_window_s"])
        self._reset_after = float(policy["reset_after_s"])
        self._success_codes = frozenset(int(code) for code in policy["success_exit_codes"])
        self._final_codes = frozenset(int(code) for code in policy.get("final_exit_codes", ()))
        self._streak = 0
        self._unhealthy = 0  # starts in a row that never became healthy
        self._restarts: list[float] = []

    def reset(self) -> None:
        """Count from zero, because a person asked for a restart."""
        self._streak = self._unhealthy = 0
        self._restarts = []

    def decide(
        self, exit: Exit, ran_s: float, now: float, spread: float, healthy_s: float | None = None
    ) -> RestartDecision:
        """Decide after an exit. ``healthy_s``: how long the component was healthy; None without a probe. ``now``: any
        monotonic clock in seconds; ``spread``: uniform in [0, 1)."""
        if not self._wants_restart(exit):
            return RestartDecision(FINISHED, reason=exit.reason)
        self._unhealthy = 0 if healthy_s is None or healthy_s >= _HEALTHY_S else self._unhealthy + 1
        if (ran_s if healthy_s is None else healthy_s) >= self._reset_after:
            self._streak = 0
        self._restarts = [at for at in self._restarts if now - at < self._window]
        if len(self._restarts) >= self._count:
            times = f"{len(self._restarts)} restart{'s' * (len(self._restarts) != 1)}"
            within = f" within {self._window:g} s" if self._window < _A_YEAR_S else ""  # a job's restarts never expire
            return RestartDecision(CRASHLOOP, reason=f"{times}{within} were not enough: {exit.reason}")
        if self._unhealthy > self._count:
            times = f"{self._unhealthy} starts in a row"
            return RestartDecision(CRASHLOOP, reason=f"{times} ended before it was healthy: {exit.reason}")
        self._restarts.append(now)
        delay = min(self._max, self._initial * self._factor ** (self._streak - 1)) if self._streak else 0.0
        self._streak += 1
        return RestartDecision(RESTART, delay_s=delay * (1 + self._jitter * (2 * spread - 1)), reason=exit.reason)

    def _wants_restart(self, exit: Exit) -> bool:
        if self._policy == "Never" or (exit.code is not None and exit.code in self._final_codes):
            return False
        return self._policy != "OnFailure" or not self.is_success(exit)

    def is_success(self, exit: Exit) -> bool:
        return exit.code is not None and exit.code in self._success_codes
