"""What is recorded, by whomever, is reported once, as its mean over everything that was recorded."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from areal.api.stats import ReduceType, StatsTracker, merged, numbers_of
from areal.utils import stats_tracker


def test_scalars_are_exported_as_mean_then_reset() -> None:
    tracker = StatsTracker("rollout")
    for reward in (0.0, 1.0, 1.0, 0.0):
        tracker.scalar(reward=reward)
    assert tracker.export() == {"rollout/reward": 0.5}
    assert tracker.export() == {}


def test_values_count_where_denominator_is_true() -> None:
    tracker = StatsTracker()
    tracker.denominator(answered=torch.tensor([[True, True, False], [False, True, False]]))
    tracker.stat("answered", loss=torch.tensor([[1.0, 2.0, 99.0], [99.0, 6.0, float("nan")]]))
    assert tracker.export() == {"answered": 3.0, "loss/avg": 3.0, "loss/min": 1.0, "loss/max": 6.0}


@pytest.mark.parametrize(
    ("how", "reported"), [(ReduceType.AVG, 2.5), (ReduceType.SUM, 5.0), (ReduceType.MIN, 2.0), (ReduceType.MAX, 3.0)]
)
def test_reduce_type_returns_single_recorded_number(how: ReduceType, reported: float) -> None:
    tracker = StatsTracker()
    tracker.denominator(rows=torch.tensor([True, False, True]))
    tracker.stat(denominator="rows", reduce_type=how, length=torch.tensor([2.0, 7.0, 3.0]))
    assert tracker.export(key="length") == {"length": reported}
    assert tracker.export() == {"rows": 2.0}


def test_stat_with_all_false_mask_is_not_reported() -> None:
    tracker = StatsTracker()
    tracker.denominator(none=torch.tensor([False, False]))
    tracker.stat("none", loss=torch.tensor([1.0, 2.0]))
    assert tracker.export() == {"none": 0.0}


def test_nested_scopes_see_outer_denominators() -> None:
    tracker = StatsTracker()
    with tracker.scope("actor"):
        tracker.denominator(tokens=torch.tensor([True]))
        with tracker.scope("update"), tracker.record_timing("step"):
            tracker.stat("tokens", loss=torch.tensor([2.0]))
    reported = tracker.export()
    assert reported.pop("timeperf/actor/update/step") >= 0.0
    assert reported == {"actor/tokens": 1.0} | {f"actor/update/loss/{name}": 2.0 for name in ("avg", "min", "max")}


async def test_tasks_have_separate_scopes() -> None:
    tracker, both_inside = StatsTracker(), asyncio.Barrier(2)

    async def record(name: str, value: float) -> None:
        with tracker.scope(name):
            await both_inside.wait()
            tracker.scalar(value=value)

    await asyncio.gather(record("a", 1.0), record("b", 2.0))
    assert tracker.export() == {"a/value": 1.0, "b/value": 2.0}


def test_concurrent_threads_lose_no_values() -> None:
    tracker = StatsTracker()

    def record() -> None:
        for n in range(500):
            tracker.scalar(one=float(n))

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(record)
    (sums,) = tracker.taken().values()
    assert (sums.count, sums.total) == (2000.0, 4 * sum(range(500)))


def test_merged_ranks_report_overall_mean() -> None:
    few, many = StatsTracker(), StatsTracker()
    few.scalar(loss=4.0)
    for _ in range(3):
        many.scalar(loss=0.0)
    assert numbers_of(merged([few.taken(), many.taken()])) == {"loss": 1.0}


@pytest.mark.parametrize(
    ("mask", "values", "message"),
    [
        (torch.tensor([1, 0]), torch.tensor([1.0, 2.0]), "must be a mask of booleans"),
        (torch.tensor([True, False]), torch.tensor([1.0]), "they must have the same shape"),
    ],
)
def test_mask_of_the_wrong_shape_is_refused_at_once(mask: torch.Tensor, values: torch.Tensor, message: str) -> None:
    tracker = StatsTracker()
    with pytest.raises(ValueError, match=message):
        tracker.denominator(rows=mask)
        tracker.stat("rows", loss=values)


def test_missing_denominator_is_named() -> None:
    with pytest.raises(ValueError, match=r"no denominator 'x/rows'; there is none"):
        StatsTracker("x").stat("rows", loss=torch.ones(1))


def test_module_functions_use_default_tracker() -> None:
    stats_tracker.export_all()
    with stats_tracker.scope("own"):
        stats_tracker.scalar(seen=1.0)
    stats_tracker.get("rollout").scalar(reward=2.0)

    @stats_tracker.scope_func_wrapper("wrapped")
    def work() -> None:
        stats_tracker.scalar(seen=3.0)

    work()
    assert stats_tracker.export_all() == {"own/seen": 1.0, "wrapped/seen": 3.0, "rollout/reward": 2.0}
