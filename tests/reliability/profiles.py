"""How long Hypothesis plays with real processes."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings


def profile(examples: int, steps: int, *, derandomize: bool = False) -> settings:
    """Real processes are neither quick nor all the same: no deadline, and no shrinking by the hour."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
        derandomize=derandomize,
    )
