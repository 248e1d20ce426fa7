"""Learning rates over the steps of a run."""

from __future__ import annotations

import math
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
