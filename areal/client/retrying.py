"""When a failed call is sent again, as a pure decision.

A call is *repeatable* when doing it twice is doing it once: a read, an idempotent route, or a call with an
``Idempotency-Key``. Such a call is repeated after any failure that is not its caller's. Any other one only where it
certainly did not begin: nobody listened, or the service said that it is too busy.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal.client.errors import (
    ClientError,
    DeadlineExceeded,
    InfrastructureError,
    Overloaded,
    ServiceError,
    Unreachable,
)

_NEVER_AGAIN = (500, 501, 505, 507)  # the service's own fault or its full disk: the same call meets it again


@dataclass(frozen=True)
class RetryPolicy:
    """``attempts`` counts the first one too. Pauses double from ``first_s`` up to ``longest_s``, times a jitter
    between 0.5 and 1; a ``Retry-After`` is a lower bound."""

    attempts: int = 4
    first_s: float = 0.1
    longest_s: float = 4.0

    def pause_s(self, attempt: int, error: ClientError, *, repeatable: bool, jitter: float) -> float | None:
        """Seconds to wait before the next attempt, None to give up. ``attempt`` counts those made, from 1."""
        if attempt >= self.attempts or not may_repeat(error, repeatable=repeatable):
            return None
        pause = min(self.longest_s, self.first_s * 2.0 ** (attempt - 1)) * (0.5 + 0.5 * jitter)
        return max(pause, error.retry_after_s or 0.0)


def may_repeat(error: ClientError, *, repeatable: bool) -> bool:
    if isinstance(error, DeadlineExceeded):
        return False  # the deadline is that of all attempts together
    if isinstance(error, Unreachable | Overloaded):
        return True
    if not repeatable:
        return False
    return isinstance(error, InfrastructureError) or (
        isinstance(error, ServiceError) and error.status not in _NEVER_AGAIN
    )
