"""Metrics that workflows, rewards and drivers record, and that the trainer writes to ``metrics.jsonl``.

A tracker aggregates the values under a key until the trainer takes them, which it does once per step. A mean covers all
values since then, of all tasks, threads and ranks. An episode's values are therefore in the line of the step during
which it ended. A named tracker prefixes its keys with its name. Scopes can be nested; each task has its own.

Tensors stay on their device until they are taken, so that recording does not synchronize with the device.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class ReduceType(Enum):
    """The reduction of the values under a key. ``AVG_MIN_MAX`` yields ``key/avg``, ``key/min`` and ``key/max``."""

    AVG_MIN_MAX = "avg_min_max"
    AVG = "avg"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    SCALAR = "scalar"


@dataclass(frozen=True)
class Sums:
    """Running aggregates of the values under a key. The first recorded value sets the reduction."""

    how: ReduceType
    total: float
    count: float
    least: float
    most: float

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.how,
            self.total + other.total,
            self.count + other.count,
            min(self.least, other.least),
            max(self.most, other.most),
        )

    def numbers(self, key: str) -> dict[str, float]:
        """Return the metrics under ``key``; empty if all values were masked out, except for a sum."""
        if self.how is ReduceType.SUM:
            return {key: self.total}
        if self.count == 0:
            return {}
        mean = self.total / self.count
        if self.how is ReduceType.AVG_MIN_MAX:
            return {f"{key}/avg": mean, f"{key}/min": self.least, f"{key}/max": self.most}
        return {key: {ReduceType.MIN: self.least, ReduceType.MAX: self.most}.get(self.how, mean)}


Recorded = dict[str, Sums]


def merged(parts: Iterable[Mapping[str, Sums]]) -> Recorded:
    """Return the aggregates of several ranks or intervals, merged by key."""
    found: Recorded = {}
    for part in parts:
        for key, sums in part.items():
            _put(found, key, sums)
    return found


def _put(recorded: Recorded, key: str, sums: Sums) -> None:
    recorded[key] = recorded[key] + sums if key in recorded else sums


def numbers_of(recorded: Mapping[str, Sums]) -> dict[str, float]:
    return {name: value for key, sums in recorded.items() for name, value in sums.numbers(key).items()}


_scopes: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("areal_stats_scopes", default=())
"""(tracker, scope), outermost first; separate for each task and thread."""


class StatsTracker:
    """Records metrics, from any thread or task. Keys are passed as keywords: ``scalar(reward=1.0)``."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._lock = threading.Lock()
        self._recorded: Recorded = {}
        self._tensors: list[tuple[str, ReduceType, Tensor]] = []  # (sum, count, least, most), not read yet
        self._masks: dict[str, Tensor] = {}

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix every key that the block records."""
        token = _scopes.set((*_scopes.get(), (self.name, name)))
        try:
            yield
        finally:
            _scopes.reset(token)

    def scalar(self, **values: float) -> None:
        """Record numbers. The metric is their mean."""
        for key, value in values.items():
            self._add(self._key(key), _one(float(value)))

    def denominator(self, **masks: Tensor) -> None:
        """Define boolean masks for later calls of ``stat``. The metric is the number of true elements. Raises
        ValueError for an empty mask or another dtype."""
        for key, mask in masks.items():
            if str(mask.dtype) != "torch.bool" or mask.numel() == 0:
                raise ValueError(
                    f"denominator {key!r} must be a mask of booleans, not {tuple(mask.shape)} {mask.dtype}"
                )
            with self._lock:
                self._masks[self._key(key)] = mask.detach()
            self._tensor(self._key(key), ReduceType.SUM, mask.float(), mask)

    def stat(self, denominator: str, reduce_type: ReduceType | None = None, **values: Tensor) -> None:
        """Record the elements of values where the mask ``denominator`` is true. Raises ValueError for an undefined
        mask, or one of another shape."""
        mask = self._mask(denominator)
        for key, value in values.items():
            if value.shape != mask.shape:
                raise ValueError(
                    f"{key} is {tuple(value.shape)}, {denominator!r} {tuple(mask.shape)}: they must have the same shape"
                )
            self._tensor(self._key(key), reduce_type or ReduceType.AVG_MIN_MAX, value.detach().float(), mask)

    @contextmanager
    def record_timing(self, key: str) -> Iterator[None]:
        """Record the duration of the block in seconds, with the key prefix ``timeperf/``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._add(f"timeperf/{self._key(key)}", _one(time.perf_counter() - began))

    def taken(self, key: str | None = None, *, reset: bool = True) -> Recorded:
        """Return the aggregates since the last call; with ``key``, only those under it. ``reset`` removes them."""
        with self._lock:
            pending, self._tensors = self._tensors, []
            for pending_key, how, sums in pending:
                _put(self._recorded, pending_key, Sums(how, *sums.tolist()))
            found = {
                name: sums
                for name, sums in self._recorded.items()
                if key is None or name == key or name.startswith(f"{key}/")
            }
            if reset:
                self._recorded = {name: sums for name, sums in self._recorded.items() if name not in found}
                self._masks = {} if key is None else self._masks
        return found

    def export(self, key: str | None = None, reduce_group: Any = None, reset: bool = True) -> dict[str, float]:
        """Return the reduced metrics. With a process group ``reduce_group``, all of its ranks must call this."""
        return numbers_of(_of_all_ranks(self.taken(key, reset=reset), reduce_group))

    def _key(self, key: str) -> str:
        inside = [name for tracker, name in _scopes.get() if tracker == self.name]
        return "/".join(filter(None, (self.name, *inside, key)))

    def _mask(self, name: str) -> Tensor:
        """Return the mask of this scope, or of the nearest enclosing scope that has one of this name."""
        key, found = self._key(name), None
        parents = key.split("/")[: -len(name.split("/"))]
        while (found := self._masks.get("/".join((*parents, name)))) is None and parents:
            parents.pop()
        if found is None:
            known = ", ".join(sorted(self._masks)) or "none"
            raise ValueError(f"there is no denominator {key!r}; there is {known}: call denominator({name}=mask) first")
        return found

    def _add(self, key: str, sums: Sums) -> None:
        with self._lock:
            _put(self._recorded, key, sums)

    def _tensor(self, key: str, how: ReduceType, values: Tensor, mask: Tensor) -> None:
        import torch

        kept = torch.where(mask, values, 0.0).sum(dtype=torch.float64), mask.sum(dtype=torch.float64)
        least = torch.where(mask, values, math.inf).min().double()
        most = torch.where(mask, values, -math.inf).max().double()
        with self._lock:
            self._tensors.append((key, how, torch.stack([*kept, least, most])))


def _one(value: float) -> Sums:
    return Sums(ReduceType.SCALAR, value, 1.0, value, value)


def _of_all_ranks(recorded: Recorded, group: Any) -> Recorded:
    if group is None:
        return recorded
    import torch.distributed as dist

    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, recorded, group=group)
    return merged(parts)


_lock = threading.Lock()
_trackers: dict[str, StatsTracker] = {}


def get(name: str = "") -> StatsTracker:
    """Return the tracker with this name, created on first use. Episodes use ``rollout`` and ``eval-rollout``."""
    with _lock:
        return _trackers.setdefault(name, StatsTracker(name))


def taken(*, reset: bool = True) -> Recorded:
    """Return the aggregates of all trackers since the last call. ``reset`` removes them."""
    with _lock:
        trackers = list(_trackers.values())
    return merged(tracker.taken(reset=reset) for tracker in trackers)


def export_all(reduce_group: Any = None, reset: bool = True) -> dict[str, float]:
    """Return the reduced metrics of all trackers, as ``StatsTracker.export`` does."""
    return numbers_of(_of_all_ranks(taken(reset=reset), reduce_group))


def scope_func_wrapper(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that runs the function in the scope ``name`` of the unnamed tracker."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def scoped(*args: P.args, **kwargs: P.kwargs) -> R:
            with get().scope(name):
                return function(*args, **kwargs)

        return scoped

    return wrap
