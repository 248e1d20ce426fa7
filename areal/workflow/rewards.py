"""A workflow's reward function, looked at before the first episode: one that is not there would fail every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from areal.api.registry import load_attr
from areal.api.reward_api import AsyncRewardWrapper
from areal.errors import UsageFault


def rewarded_by(reward_fn: Callable[..., Any] | str, timeout_s: float) -> AsyncRewardWrapper:
    """``reward_fn`` may be a name. Raises UsageFault for what is not there, or cannot be called in another process."""
    found = load_attr(reward_fn, "reward") if isinstance(reward_fn, str) else reward_fn
    if not callable(found):
        raise UsageFault(f"reward {reward_fn!r} is no function, but {type(found).__name__}")
    try:
        return AsyncRewardWrapper(reward_fn, timeout_seconds=timeout_s)
    except ValueError as error:
        raise UsageFault(str(error)) from error
