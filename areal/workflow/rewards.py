"""A workflow's reward function, looked at before the first episode: one that is not there would fail every one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from areal.api.registry import load_attr
from areal.api.reward_api import AsyncRewardWrapper
from areal.errors import UsageFault
from areal.reward.functions import Parameters

Call = tuple[tuple[Any, ...], dict[str, Any]]


class RowReward:
    """``reward_fn`` (or its name) for answers to rows of a data set: it gets prompt, completion, their token ids, and
    those of the row's own columns that it takes. Raises UsageFault for what is not there or cannot be called."""

    def __init__(self, reward_fn: Callable[..., Any] | str, timeout_s: float = 15.0) -> None:
        found = load_attr(reward_fn, "reward") if isinstance(reward_fn, str) else reward_fn
        try:
            self._wrapper = AsyncRewardWrapper(found, timeout_seconds=timeout_s)
        except ValueError as error:
            raise UsageFault(f"reward {reward_fn!r}: {error}") from error
        self._parameters = Parameters.of(found)

    def check(self, row: Mapping[str, Any]) -> None:
        """Before anything is sampled. Raises UsageFault for a row without a column that the function needs."""
        self._parameters.call(("", "", [], []), row)

    async def __call__(
        self, prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], row: Mapping[str, Any]
    ) -> float:
        args, kwargs = self._parameters.call((prompt, completion, prompt_ids, completion_ids), row)
        return await self._wrapper(*args, **kwargs)

    async def each(
        self, prompt: str, prompt_ids: list[int], answers: list[tuple[str, list[int]]], row: Mapping[str, Any]
    ) -> list[float | Exception]:
        """Of several answers (text, token ids) to one prompt the reward, or what kept it."""
        return await self._wrapper.each(
            [self._parameters.call((prompt, text, prompt_ids, ids), row) for text, ids in answers]
        )
