"""A workflow's reward function, looked at before the first episode: one that is not there would fail every one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from areal.api import stats
from areal.api.registry import load_attr
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_context import stat_scope
from areal.errors import UsageFault
from areal.reward.functions import Parameters

RewardFn: TypeAlias = "Callable[..., Any] | str | Sequence[Callable[..., Any] | str]"
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


class WeightedRewards:
    """Several rewards, each times its weight, added up. The mean of each is in the metrics, by its function's name."""

    def __init__(
        self,
        reward_fns: Sequence[Callable[..., Any] | str],
        timeout_s: float = 15.0,
        weights: Sequence[float] | None = None,
    ) -> None:
        self._weights = [1.0] * len(reward_fns) if weights is None else [float(weight) for weight in weights]
        if not reward_fns or len(self._weights) != len(reward_fns):
            raise UsageFault(
                f"reward_weights has {len(self._weights)} numbers, and reward_fn {len(reward_fns)} functions"
            )
        if not all(math.isfinite(weight) for weight in self._weights):
            raise UsageFault(f"reward_weights must be finite numbers, not {self._weights}")
        self._rewards = [RowReward(each, timeout_s) for each in reward_fns]
        self._names = [_name_of(each) for each in reward_fns]
        if len(set(self._names)) < len(self._names):
            raise UsageFault(f"reward_fn has functions of one name, which metrics cannot tell apart: {self._names}")

    def check(self, row: Mapping[str, Any]) -> None:
        for reward in self._rewards:
            reward.check(row)

    async def __call__(
        self, prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], row: Mapping[str, Any]
    ) -> float:
        call = (prompt, completion, prompt_ids, completion_ids, row)
        return self._sum(await asyncio.gather(*(reward(*call) for reward in self._rewards)))

    async def each(
        self, prompt: str, prompt_ids: list[int], answers: list[tuple[str, list[int]]], row: Mapping[str, Any]
    ) -> list[float | Exception]:
        """An answer that one function has no reward for has none."""
        found = await asyncio.gather(*(reward.each(prompt, prompt_ids, answers, row) for reward in self._rewards))
        result: list[float | Exception] = []
        for values in zip(*found, strict=True):
            errors = [value for value in values if isinstance(value, Exception)]
            result.append(errors[0] if errors else self._sum([v for v in values if not isinstance(v, Exception)]))
        return result

    def _sum(self, values: Sequence[float]) -> float:
        numbers = {f"reward/{name}": value for name, value in zip(self._names, values, strict=True)}
        stats.get(stat_scope()).scalar(**numbers)
        return sum(weight * value for weight, value in zip(self._weights, values, strict=True))


def row_reward(
    reward_fn: RewardFn,
    timeout_s: float = 15.0,
    weights: Sequence[float] | None = None,
) -> RowReward | WeightedRewards:
    """Of one function, or of a list of them with ``weights`` (1 each)."""
    if isinstance(reward_fn, list | tuple):
        return WeightedRewards(reward_fn, timeout_s, weights)
    if weights is not None:
        return WeightedRewards([reward_fn], timeout_s, weights)  # type: ignore[list-item]
    return RowReward(reward_fn, timeout_s)  # type: ignore[arg-type]


def _name_of(reward_fn: Callable[..., Any] | str) -> str:
    if isinstance(reward_fn, str):
        return reward_fn.replace(":", ".").rpartition(".")[2]
    return str(getattr(reward_fn, "__name__", type(reward_fn).__name__))
