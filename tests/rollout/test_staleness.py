"""How many episodes may start, and what is too old: properties of any history."""

from __future__ import annotations

import asyncio
import heapq
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal.rollout.executor import Executor
from areal.rollout.failures import Failure
from areal.rollout.staleness import (
    EpisodeCounts,
    EpisodeSpec,
    Rollout,
    StalenessManager,
    StalenessWindow,
    capacity,
    is_stale,
    oldest_first,
    shuffled,
)

COUNT = st.integers(0, 50)
WINDOWS = st.builds(StalenessWindow, st.integers(1, 8), st.integers(0, 4), st.integers(1, 40))


def item(number: int, *, outside_window: bool = False) -> EpisodeSpec:
    return EpisodeSpec(number, {"row": number}, None, f"task-{number}", outside_window=outside_window)


def rollout(number: int, head: int = 0) -> Rollout:
    return Rollout(item(number), None, head, head)


@given(WINDOWS, COUNT, COUNT, COUNT, COUNT)
def test_capacity_respects_bounds_and_decreases_per_start(
    window: StalenessWindow, running: int, unconsumed: int, in_training: int, outside: int
) -> None:
    free = capacity(window, running=running, unconsumed=unconsumed, in_training=in_training, outside=outside)
    assert 0 <= free <= max(0, window.concurrency - running - outside)
    assert free <= max(0, (window.staleness + 1) * window.batch - running - unconsumed - in_training)
    after = capacity(window, running=running + 1, unconsumed=unconsumed, in_training=in_training, outside=outside)
    assert after == max(0, free - 1)


async def test_episode_that_runs_again_at_its_end_is_in_flight() -> None:
    """Its result was too old at once, and a caller waits: the second run begins before the end of the first is seen."""
    versions = iter((0, 5))
    executor: Executor

    async def run(item: EpisodeSpec) -> Rollout:
        version = next(versions)
        if version:
            await asyncio.sleep(0.01)
            assert executor.in_flight() == [item]
        return Rollout(item, None, version, version)

    executor = Executor(StalenessManager(StalenessWindow(1, 0, 1), version=5), run)
    executor.submit([item(1)])
    taken = await executor.take(1, 5.0, completed=False, low_water=0) or []
    await asyncio.sleep(0)
    assert ([each.head_version for each in taken], executor._tasks) == ([5], {})


async def test_run_each_reads_items_as_they_start() -> None:
    read = 0
    ended: list[int] = []

    def items():
        nonlocal read
        for read in range(1, 501):
            yield item(read, outside_window=True)

    async def run(spec: EpisodeSpec) -> Rollout | None:
        assert read - len(ended) <= 8 and len(executor._awaited) <= 8
        await asyncio.sleep(0.001 * (spec.number % 3))
        ended.append(spec.number)
        return rollout(spec.number) if spec.number % 2 else None

    executor = Executor(StalenessManager(StalenessWindow(0, 0, 8)), run)
    await executor.run_each(items(), 8)
    assert sorted(ended) == list(range(1, 501))
    assert (executor._awaited, executor._tasks, executor.staleness.idle) == ({}, {}, True)


def test_capacity_equals_published_formula_for_whole_batches() -> None:
    """(v + eta + 1) * B - (accepted + running), with accepted since the start: (v + 1) * B of it are consumed while
    version v is trained on, and v * B before."""
    window, version = StalenessWindow(batch=4, staleness=2, concurrency=10**6), 7
    for running in range(9):
        for unconsumed in range(9 - running):
            for in_training in (0, 4):
                accepted_ever = version * 4 + in_training + unconsumed
                published = (version + 2 + 1) * 4 - (accepted_ever + running)
                mine = capacity(window, running=running, unconsumed=unconsumed, in_training=in_training)
                assert mine == max(0, published)


@given(st.lists(st.integers(0, 5), max_size=20), st.integers(0, 20))
def test_oldest_are_consumed_first(heads: list[int], count: int) -> None:
    rollouts = [rollout(number, head) for number, head in enumerate(heads)]  # numbered as they ended
    chosen = oldest_first(rollouts, count)
    left = [each for each in rollouts if each not in chosen]
    assert len(chosen) == min(count, len(rollouts))
    assert all((a.head_version, a.number) <= (b.head_version, b.number) for a in chosen for b in left)


@given(st.permutations(range(10)), st.integers())
def test_batch_order_is_independent_of_completion_order(order: list[int], seed: int) -> None:
    as_they_ended = [rollout(number) for number in order]
    by_number = [each.number for each in shuffled(sorted(as_they_ended, key=lambda each: each.number), seed)]
    assert [each.number for each in shuffled(as_they_ended, seed)] == by_number


OUTCOMES = st.sampled_from(["accept", "accept", "accept", "reject", "fail", "cancel", "overtake"])


class Rollouts(RuleBasedStateMachine):
    """Any history of submissions, ends, failures, batches and versions."""

    @initialize(window=WINDOWS)
    def begin(self, window: StalenessWindow) -> None:
        self.staleness = StalenessManager(window)
        self.numbers = 0
        self.running: list[tuple[EpisodeSpec, int]] = []  # with the version at their start
        self.outcome: dict[int, int] = {}  # how often each row was consumed
        self.dropped = self.failing = self.rejecting = 0
        self.told: list[int] = []  # rows that gave nothing to train on, as the trainer hears of them
        assert self.staleness.drain_ends() == []

    @rule(count=st.integers(1, 8), outside_window=st.sampled_from([False, False, True]))
    def submit(self, count: int, outside_window: bool) -> None:
        for _ in range(count):
            self.staleness.submit(item(self.numbers, outside_window=outside_window))
            self.numbers += 1
        self.admit()

    @rule()
    def admit(self) -> None:
        while (started := self.staleness.next_to_run()) is not None:
            self.running.append((started, self.staleness.version))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), outcomes=st.lists(OUTCOMES, min_size=1, max_size=6))
    def end(self, data: Any, outcomes: list[str]) -> None:
        for how in outcomes[: len(self.running)]:
            self.end_one(*self.running.pop(data.draw(st.integers(0, len(self.running) - 1))), how)

    def end_one(self, ended: EpisodeSpec, head: int, how: str) -> None:
        if how == "fail":
            self.staleness.failed(ended, Failure(ended.task_id, "service", RuntimeError(), 1))
            self.failing += 1
        elif how == "cancel":
            self.staleness.cancelled(ended)
        elif how == "overtake" and not ended.outside_window:
            self.staleness.aborted(ended)
            self.dropped += 1
        else:
            found = Rollout(ended, None, head, self.staleness.version) if how == "accept" else None
            self.staleness.ended(ended, found)
            self.failing = 0
            if not ended.outside_window:
                self.rejecting = 0 if found else self.rejecting + 1

    @rule(whole=st.booleans())
    def train(self, whole: bool) -> None:
        batch = self.staleness.window.batch
        self.dropped += self.staleness.drop_stale()
        taken = self.staleness.take(batch) if whole else self.staleness.take_completed(batch)
        for each in taken or ():
            assert self.staleness.version - each.head_version <= self.staleness.window.staleness
            self.outcome[each.number] = self.outcome.get(each.number, 0) + 1
        if taken:
            self.staleness.set_version(self.staleness.version + 1)

    @invariant()
    def nothing_is_lost_and_nothing_is_taken_twice(self) -> None:
        if not hasattr(self, "staleness"):
            return
        staleness, counts = self.staleness, self.staleness.counts
        alive = len(staleness.pending) + len(staleness.running) + len(staleness.accepted)
        assert counts.submitted == alive + counts.consumed + counts.rejected + counts.failed + counts.abandoned
        assert counts.accepted == len(staleness.accepted) <= staleness.completed
        assert counts.dropped == self.dropped
        assert (staleness.consecutive_failures, staleness.consecutive_rejections) == (self.failing, self.rejecting)
        assert set(self.outcome.values()) <= {1}
        self.told += [end.data["row"] for end in staleness.drain_ends()]
        assert len(self.told) == len(set(self.told)) == counts.rejected + counts.failed + counts.abandoned
        assert not set(self.told) & set(self.outcome)

    @invariant()
    def window_holds(self) -> None:
        if hasattr(self, "staleness"):
            staleness = self.staleness
            inside = len(staleness.running) + len(staleness.accepted) + staleness.in_training
            assert inside <= staleness.window.size
            assert len(staleness.running) + len(staleness.outside) <= staleness.window.concurrency


TestRollouts = Rollouts.TestCase
TestRollouts.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(WINDOWS)
def test_trainer_never_starves_permanently(window: StalenessWindow) -> None:
    """Whatever the window: with endless prompts and episodes that end, batches keep coming, each within eta."""
    staleness, number = StalenessManager(window), 0
    for step in range(4):
        while (taken := staleness.take(window.batch)) is None:
            while len(staleness.pending) < window.batch:
                staleness.submit(item(number))
                number += 1
            started = staleness.next_to_run()
            assert started is not None, "no batch, and nothing may start"
            staleness.ended(started, rollout(started.number, staleness.version))
        assert len(taken) == window.batch
        staleness.set_version(step + 1)


def test_stale_prompt_is_rerun_once_then_abandoned() -> None:
    abandoned: list[EpisodeSpec] = []
    staleness = StalenessManager(StalenessWindow(batch=1, staleness=0, concurrency=1), on_abandoned=abandoned.append)
    staleness.submit(item(0))
    for run, waiting in ((1, 1), (2, 0)):
        assert abandoned == []
        started = staleness.next_to_run()
        assert started is not None and started.number == 0
        staleness.ended(started, rollout(0, staleness.version))
        staleness.set_version(staleness.version + 1)
        assert (staleness.drop_stale(), staleness.drop_stale()) == (1, 0)
        assert (staleness.counts.dropped, len(staleness.pending), staleness.completed) == (run, waiting, 0)
    assert (staleness.counts.abandoned, staleness.counts.accepted, staleness.idle) == (1, 0, True)
    assert abandoned == [item(0)]


def test_each_outcome_is_counted_once() -> None:
    manager = StalenessManager(StalenessWindow(batch=8, staleness=0, concurrency=8))
    started = []
    for number in range(6):
        manager.submit(item(number))
        started.append(manager.next_to_run() or item(-1))
    manager.ended(started[0], rollout(0))
    manager.ended(started[1], None)
    manager.failed(started[2], Failure("task-2", "service", RuntimeError(), 1))
    manager.aborted(started[3])
    manager.cancelled(started[4])
    assert manager.counts == EpisodeCounts(submitted=6, accepted=1, rejected=1, failed=1, dropped=1, abandoned=1)
    assert (len(manager.pending), manager.running, manager.completed) == (1, {5}, 2)
    assert manager.take_completed(2) == [rollout(0)]
    assert manager.counts == EpisodeCounts(6, 0, consumed=1, rejected=1, failed=1, dropped=1, abandoned=1)


def test_short_batches_include_rollouts_ended_meanwhile() -> None:
    staleness = StalenessManager(StalenessWindow(batch=4, staleness=1, concurrency=8))
    for number in range(8):
        staleness.submit(item(number))
    for number in range(8):
        started = staleness.next_to_run()
        assert started is not None
        staleness.ended(started, rollout(number) if number < 6 else None)
    sizes = []
    while (taken := staleness.take_completed(4)) is not None:
        sizes.append(len(taken))
    assert (sizes, staleness.completed) == ([4, 2], 0)


@pytest.mark.parametrize(
    ("window", "counts", "free"),
    [
        (StalenessWindow(batch=3, staleness=0, concurrency=99), {}, 3),
        (StalenessWindow(batch=3, staleness=2, concurrency=99), {}, 9),
        (StalenessWindow(batch=3, staleness=2, concurrency=99), {"running": 2}, 7),
        (StalenessWindow(batch=3, staleness=2, concurrency=99), {"unconsumed": 2}, 7),
        (StalenessWindow(batch=3, staleness=2, concurrency=99), {"in_training": 2}, 7),
        (StalenessWindow(batch=3, staleness=2, concurrency=99), {"outside": 2}, 9),
        (StalenessWindow(batch=3, staleness=2, concurrency=5), {}, 5),
        (StalenessWindow(batch=3, staleness=2, concurrency=5), {"running": 2}, 3),
        (StalenessWindow(batch=3, staleness=2, concurrency=5), {"outside": 2}, 3),
        (StalenessWindow(batch=3, staleness=2, concurrency=5), {"unconsumed": 2}, 5),
        (StalenessWindow(batch=3, staleness=2, concurrency=5), {"in_training": 8}, 1),
        (StalenessWindow(batch=1, staleness=0, concurrency=1), {"running": 3, "in_training": 3}, 0),
    ],
)
def test_capacity_is_minimum_of_both_bounds(window: StalenessWindow, counts: dict[str, int], free: int) -> None:
    given_counts = {"running": 0, "unconsumed": 0, "in_training": 0, **counts}
    assert capacity(window, **given_counts) == free


def test_managers_capacity_counts_each_place_of_the_window() -> None:
    manager = StalenessManager(StalenessWindow(batch=2, staleness=1, concurrency=3))
    for number in range(4):
        manager.submit(item(number))
    manager.submit(item(9, outside_window=True))
    assert manager.capacity() == 3, "pending episodes take no place"
    apart = manager.next_to_run()
    assert apart is not None and apart.outside_window
    assert manager.capacity() == 2
    first, second = manager.next_to_run(), manager.next_to_run()
    assert first is not None and second is not None
    assert (manager.capacity(), manager.next_to_run()) == (0, None)
    manager.ended(first, rollout(first.number))
    assert manager.capacity() == 1, "accepted: a place of the window, none of the running"
    manager.ended(apart, rollout(9))
    assert manager.capacity() == 2
    assert manager.take(1) is not None
    assert manager.capacity() == 2, "in training it is still in the window"
    manager.set_version(1)
    assert manager.capacity() == 2
    manager.failed(second, Failure("task", "workflow", ValueError(), 1))
    assert manager.capacity() == 3


def test_only_a_newer_version_ends_training_of_a_batch() -> None:
    manager = StalenessManager(StalenessWindow(batch=1, staleness=0, concurrency=1))
    manager.submit(item(0))
    running = manager.next_to_run()
    assert running is not None
    manager.ended(running, rollout(0))
    assert manager.take(1) is not None
    manager.set_version(0)
    assert manager.capacity() == 0, "the same version again"
    with pytest.raises(ValueError, match="the version is 0: it cannot become -1"):
        manager.set_version(-1)
    manager.set_version(1)
    assert manager.capacity() == 1


def test_single_result_is_taken_by_its_number() -> None:
    manager = StalenessManager(StalenessWindow(batch=2, staleness=0, concurrency=2))
    for number in range(2):
        manager.submit(item(number))
        started = manager.next_to_run()
        assert started is not None
        manager.ended(started, rollout(number))
    assert manager.take_one(7) is None
    assert manager.take_one(1) == rollout(1)
    assert (manager.take_one(1), list(manager.accepted)) == (None, [0])


def test_newest_256_failures_are_kept() -> None:
    manager = StalenessManager(StalenessWindow(batch=1, staleness=0, concurrency=1))
    for number in range(300):
        manager.failed(item(number), Failure(f"task-{number}", "service", RuntimeError(), 1))
    assert [each.task_id for each in manager.failures] == [f"task-{number}" for number in range(44, 300)]


def test_batch_order_of_a_seed_is_the_same_in_every_release() -> None:
    """A run that resumes under a newer release sees its data in the same order."""
    assert [each.number for each in shuffled([rollout(number) for number in range(8)], 1)] == [7, 0, 5, 1, 3, 2, 6, 4]
    manager = StalenessManager(StalenessWindow(batch=8, staleness=0, concurrency=8))
    for number in range(8):
        manager.submit(item(number))
        started = manager.next_to_run()
        assert started is not None
        manager.ended(started, rollout(number))
    assert [each.number for each in manager.take(8) or ()] == [3, 7, 5, 4, 2, 6, 0, 1]


@pytest.mark.parametrize("outside_window", [False, True])
def test_manager_is_idle_without_waiting_or_running_work(outside_window: bool) -> None:
    manager = StalenessManager(StalenessWindow(batch=1, staleness=0, concurrency=1))
    assert manager.idle
    manager.submit(item(0, outside_window=outside_window))
    assert not manager.idle, "it waits"
    running = manager.next_to_run()
    assert running is not None and not manager.idle, "it runs"
    manager.ended(running, rollout(0))
    assert manager.idle, "a result that was not taken is not work"


def test_manager_with_any_work_is_not_idle() -> None:
    manager = StalenessManager(StalenessWindow(batch=1, staleness=0, concurrency=2))
    manager.submit(item(0))
    assert manager.next_to_run() is not None
    manager.submit(item(1))
    manager.submit(item(2, outside_window=True))
    assert manager.next_to_run() is not None and not manager.idle
    assert (len(manager.pending), len(manager.running), len(manager.outside)) == (1, 1, 1)


# Heavy tails, by simulation: 2 % of the prompts take forty times as long, and what is too old is not trained on.

BATCH, STEP_S, STEPS = 16, 1.0, 300


class Careless(StalenessManager):
    """Takes whatever is finished, however old."""

    def drop_stale(self) -> int:
        return 0


@dataclass
class Simulation:
    """Episodes of 1 to 3 seconds before a trainer whose step takes one; ``slow``: the share of long ones."""

    manager: StalenessManager
    slow: float
    now: float = 0.0
    staleness: list[int] = field(default_factory=list)
    running: list[tuple[float, int, EpisodeSpec, int]] = field(default_factory=list)
    submitted: int = 0

    def seconds(self, number: int) -> float:
        """The prompt's own: it takes as long when it runs again."""
        chance = random.Random(number)
        return chance.uniform(1.0, 3.0) * (40.0 if chance.random() < self.slow else 1.0)

    def feed(self) -> None:
        while len(self.manager.pending) < 2 * BATCH:
            self.manager.submit(EpisodeSpec(self.submitted, {}, None, str(self.submitted)))
            self.submitted += 1
        while (item := self.manager.next_to_run()) is not None:
            heapq.heappush(
                self.running, (self.now + self.seconds(item.number), item.number, item, self.manager.version)
            )

    def end_one(self) -> None:
        end, _, item, head = heapq.heappop(self.running)
        self.now = max(self.now, end)
        self.manager.ended(item, Rollout(item, None, head, self.manager.version))

    def until(self, moment: float) -> None:
        while self.running and self.running[0][0] <= moment:
            self.end_one()
            self.feed()
        self.now = max(self.now, moment)

    def run(self) -> float:
        for step in range(STEPS):
            self.feed()
            while (taken := self.manager.take(BATCH)) is None:
                self.feed()
                self.end_one()
            self.staleness += [self.manager.version - each.head_version for each in taken]
            self.feed()
            self.until(self.now + STEP_S)
            self.manager.set_version(step + 1)
            self.give_up_stale()
        return self.now

    def give_up_stale(self) -> None:
        """As the executor does."""
        manager = self.manager
        if isinstance(manager, Careless):
            return
        for _, _, item, head in self.running:
            if is_stale(manager.window, head, manager.version):
                manager.aborted(item)
        self.running = [each for each in self.running if not is_stale(manager.window, each[3], manager.version)]
        heapq.heapify(self.running)


@pytest.mark.parametrize("eta", [0, 1, 2, 4])
def test_staleness_never_exceeds_its_bound(eta: int) -> None:
    simulation = Simulation(StalenessManager(StalenessWindow(BATCH, eta, 64)), slow=0.02)
    simulation.run()
    assert max(simulation.staleness) <= eta
    assert len(simulation.staleness) == BATCH * STEPS


def test_staleness_bound_costs_no_throughput() -> None:
    window = StalenessWindow(BATCH, 2, 64)
    careful, careless = Simulation(StalenessManager(window), 0.02), Simulation(Careless(window), 0.02)
    wall, fastest = careful.run(), careless.run()
    assert max(careless.staleness) > 10
    assert wall <= fastest


def test_slow_prompts_are_abandoned_and_do_not_fill_window() -> None:
    simulation = Simulation(StalenessManager(StalenessWindow(BATCH, 2, 64)), slow=0.25)
    simulation.run()
    counts = simulation.manager.counts
    assert counts.consumed == BATCH * STEPS
    assert counts.abandoned > 0 and counts.dropped <= 2 * simulation.submitted
    assert simulation.now < 2.5 * STEP_S * STEPS
