"""Rewards: answers compared with the right ones, and the processes that compute them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.reward.math import MathVerifyWorker, get_math_verify_worker

__all__ = ["MathVerifyWorker", "get_math_verify_worker"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from areal.reward import math

    return getattr(math, name)
