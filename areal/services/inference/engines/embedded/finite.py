"""Whether weights are numbers: a trainer that diverged must not be served."""

from __future__ import annotations

from torch import Tensor


def is_finite(tensor: Tensor) -> bool:
    """By the extremes, which are not finite when any value is not: at the speed of memory, unlike torch.isfinite."""
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    low, high = tensor.aminmax()
    return bool(low.isfinite()) and bool(high.isfinite())
