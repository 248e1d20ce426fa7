"""Rewards in processes of their own: what they return, and what becomes of those that do not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.reward_api import AsyncRewardWrapper, RewardRaised, RewardTimeout
from areal.reward.pool import close_pool_of_this_loop, jobs_of, target_of
from tests.reward import rewards


@pytest.fixture(autouse=True)
async def pool() -> AsyncIterator[None]:
    yield
    await close_pool_of_this_loop()


async def test_reward_is_computed_elsewhere_from_function_or_name() -> None:
    by_function = AsyncRewardWrapper(rewards.length)
    by_name = AsyncRewardWrapper("tests.reward.rewards:length")
    assert await by_function("p", "abcd", [1], [2], scale=2.0) == 2.0
    assert await by_name("p", "abc", [1], [2]) == 3.0
    assert await AsyncRewardWrapper(rewards.process_id)() != os.getpid()


async def test_reward_that_raises_is_told_with_its_own_words_and_the_process_goes_on() -> None:
    before = await AsyncRewardWrapper(rewards.process_id, max_workers=1)()
    with pytest.raises(RewardRaised, match=r"raises raised: KeyError: 'answer' \(.*rewards.py:\d+, in raises\)$"):
        await AsyncRewardWrapper(rewards.raises)("p", "c", [], [])
    assert await AsyncRewardWrapper(rewards.process_id)() == before


async def test_reward_that_hangs_is_killed_and_is_no_zero() -> None:
    with pytest.raises(RewardTimeout, match="hangs: no reward within"):
        await AsyncRewardWrapper(rewards.hangs, timeout_seconds=0.2, max_retries=1)()
    assert await AsyncRewardWrapper(rewards.length)("p", "abc", [1], [2]) == 3.0


async def test_import_takes_its_time_and_is_not_the_answers_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_rewards.py").write_text("import time\ntime.sleep(0.5)\ndef one(*a, **k): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert await AsyncRewardWrapper("slow_rewards:one", timeout_seconds=0.3, max_retries=0)() == 1.0
    with pytest.raises(RewardRaised, match=r"cannot be imported(.|\n)*no_such_module"):
        await AsyncRewardWrapper("no_such_module:one")()


async def test_process_that_dies_is_replaced_and_the_reward_is_had(tmp_path: Path) -> None:
    reward = AsyncRewardWrapper(rewards.dies_once)
    assert await reward("p", "c", [], [], mark=str(tmp_path / "mark")) == 1.0


async def test_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(RewardRaised, match="finite"):
        await AsyncRewardWrapper(rewards.not_finite)()


async def test_coroutine_function_runs_here() -> None:
    assert await AsyncRewardWrapper(rewards.later)("p", "c", [], []) == 0.5


async def test_argument_that_cannot_travel_is_named() -> None:
    with pytest.raises(RewardRaised, match="cannot go to another process"):
        await AsyncRewardWrapper(rewards.length)("p", lambda: None, [], [])


def test_lambda_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="must be a function of a module"):
        target_of(lambda *args: 1.0)


async def test_many_rewards_share_two_processes() -> None:
    reward = AsyncRewardWrapper(rewards.process_id)
    assert len(set(await asyncio.gather(*(reward() for _ in range(20))))) <= 2


async def test_each_tells_what_kept_one_reward_and_has_the_others() -> None:
    reward = AsyncRewardWrapper(rewards.tricky, timeout_seconds=0.3, max_retries=0)
    for _ in range(2):  # one by one while nothing is known of the function, then in one job
        first, raised, last = await reward.each([((prompt,), {}) for prompt in ("1", "raises", "0.5")])
        assert (first, last) == (1.0, 0.5)
        assert isinstance(raised, RewardRaised) and "KeyError: 'answer'" in str(raised)
    first, hung, last = await reward.each([((prompt,), {}) for prompt in ("1", "hangs", "0.5")])
    assert (first, last) == (1.0, 0.5)
    assert isinstance(hung, RewardTimeout)


async def test_each_asks_a_quick_function_in_one_process_and_a_coroutine_here() -> None:
    reward = AsyncRewardWrapper(rewards.process_id)
    await reward.each([((), {})] * 8)
    assert len(set(await reward.each([((), {})] * 8))) == 1
    assert await AsyncRewardWrapper(rewards.later).each([(("p", "c", [], []), {})] * 2) == [0.5, 0.5]


async def test_each_of_one_moment_share_a_job_and_each_has_its_own() -> None:
    reward = AsyncRewardWrapper(rewards.process_id)
    await reward.each([((), {})])
    alike = await asyncio.gather(*(reward.each([((), {})] * 3) for _ in range(5)))
    assert [len(each) for each in alike] == [3] * 5
    assert len({process for each in alike for process in each}) == 1  # two would have taken what are two jobs


async def test_each_beside_one_whose_answer_hangs_has_its_rewards() -> None:
    reward = AsyncRewardWrapper(rewards.tricky, timeout_seconds=1.0, max_retries=0)
    await reward.each([(("1",), {})])
    good, bad = await asyncio.gather(reward.each([(("0.5",), {})]), reward.each([(("hangs",), {})]))
    assert good == [0.5]
    assert isinstance(bad[0], RewardTimeout)


@given(st.lists(st.integers(1, 20), max_size=30), st.floats(1e-6, 0.1))
def test_jobs_of_keeps_order_and_is_quick_or_one(counts: list[int], seconds: float) -> None:
    jobs = jobs_of(counts, seconds)
    assert [place for job in jobs for place in job] == list(range(len(counts)))
    assert all(len(job) == 1 or sum(counts[place] for place in job) * seconds <= 0.02 for job in jobs)


async def test_reward_that_always_hangs_is_told_each_time_and_tried_again_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reward = AsyncRewardWrapper(rewards.hangs, timeout_seconds=0.01, max_retries=100)
    with pytest.raises(RewardTimeout):
        await reward()
    assert caplog.records[0].message == "hangs: no reward within 0.01 s (attempt 1 of 101)"
    assert len(caplog.records) == 8
    with pytest.raises(RewardTimeout):
        await reward()
    assert len(caplog.records) == 9


async def test_rewards_that_wait_behind_one_that_always_hangs_do_not_wait_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reward = AsyncRewardWrapper(rewards.tricky, timeout_seconds=0.05, max_workers=2)
    ends = await reward.each([(("hangs",), {})] * 200)
    assert all(isinstance(end, RewardTimeout) for end in ends)
    assert len(caplog.records) < 20  # each costs a deadline
    assert await reward("0.5") == 0.5  # and what may have been a bad hour is no verdict
