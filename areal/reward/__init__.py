"""Rewards: comparison of answers with reference answers, and the process pool that runs reward functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal.lazy import lazy

if TYPE_CHECKING:
    from areal.reward.math import MathVerifyWorker, get_math_verify_worker

__all__ = ["MathVerifyWorker", "get_math_verify_worker"]
__getattr__ = lazy(__name__, dict.fromkeys(__all__, "areal.reward.math"))
