"""How many episodes may start, and what is too old: properties of any history."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal.client.rollouts.admission import Window, capacity, choose, shuffled
from areal.client.rollouts.ledger import Failure, Item, Ledger, Rollout

COUNT = st.integers(0, 50)
WINDOWS = st.builds(Window, st.integers(1, 8), st.integers(0, 4), st.integers(1, 40))


def item(number: int, *, apart: bool = False) -> Item:
    return Item(number, {"row": number}, None, f"task-{number}", apart=apart)


def rollout(number: int, head: int = 0, finished: int = 0) -> Rollout:
    return Rollout(item(number), None, head, head, finished)


@given(WINDOWS, COUNT, COUNT, COUNT, COUNT)
def test_capacity_is_within_both_bounds_and_one_less_after_each_start(
    window: Window, running: int, unconsumed: int, in_training: int, outside: int
) -> None:
    free = capacity(window, running=running, unconsumed=unconsumed, in_training=in_training, outside=outside)
    assert 0 <= free <= max(0, window.concurrency - running - outside)
    assert free <= max(0, (window.staleness + 1) * window.batch - running - unconsumed - in_training)
    after = capacity(window, running=running + 1, unconsumed=unconsumed, in_training=in_training, outside=outside)
    assert after == max(0, free - 1)


def test_capacity_is_the_published_formula_where_every_batch_is_consumed_whole() -> None:
    """(v + eta + 1) * B - (accepted + running), with accepted since the start: (v + 1) * B of it are consumed while
    version v is trained on, and v * B before."""
    window, version = Window(batch=4, staleness=2, concurrency=10**6), 7
    for running in range(9):
        for unconsumed in range(9 - running):
            for in_training in (0, 4):
                accepted_ever = version * 4 + in_training + unconsumed
                published = (version + 2 + 1) * 4 - (accepted_ever + running)
                mine = capacity(window, running=running, unconsumed=unconsumed, in_training=in_training)
                assert mine == max(0, published)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 100)), max_size=20), st.integers(0, 20))
def test_oldest_are_consumed_first(finished: list[tuple[int, int]], count: int) -> None:
    rollouts = [rollout(number, head, end) for number, (head, end) in enumerate(finished)]
    chosen = choose(rollouts, count)
    left = [each for each in rollouts if each not in chosen]
    assert len(chosen) == min(count, len(rollouts))
    assert all((a.head_version, a.finished) <= (b.head_version, b.finished) for a in chosen for b in left)


@given(st.permutations(range(10)), st.integers())
def test_order_of_a_batch_is_independent_of_the_order_of_ends(order: list[int], seed: int) -> None:
    as_they_ended = [rollout(number, 0, end) for end, number in enumerate(order)]
    by_number = [each.number for each in shuffled(sorted(as_they_ended, key=lambda each: each.number), seed)]
    assert [each.number for each in shuffled(as_they_ended, seed)] == by_number


class Rollouts(RuleBasedStateMachine):
    """Any history of submissions, ends, failures, batches and versions."""

    @initialize(window=WINDOWS)
    def begin(self, window: Window) -> None:
        self.ledger = Ledger(window)
        self.numbers = 0
        self.running: list[tuple[Item, int]] = []  # with the version at their start
        self.outcome: dict[int, int] = {}  # how often each row was consumed
        self.told: list[int] = []  # rows that gave nothing to train on, as the trainer hears of them
        assert self.ledger.ends_so_far() == []

    @rule(count=st.integers(1, 20), apart=st.booleans())
    def submit(self, count: int, apart: bool) -> None:
        for _ in range(count):
            self.ledger.submit(item(self.numbers, apart=apart))
            self.numbers += 1

    @rule()
    def admit(self) -> None:
        while (started := self.ledger.next_to_run()) is not None:
            self.running.append((started, self.ledger.version))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["accept", "accept", "accept", "reject", "fail", "cancel", "overtake"]))
    def end(self, data: Any, how: str) -> None:
        ended, head = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if how == "fail":
            self.ledger.failed(ended, Failure(ended.task_id, "service", RuntimeError(), 1))
        elif how == "cancel":
            self.ledger.cancelled(ended)
        elif how == "overtake" and not ended.apart:
            self.ledger.overtaken(ended)
        else:
            found = Rollout(ended, None, head, self.ledger.version, 0) if how == "accept" else None
            self.ledger.ended(ended, found)

    @rule(whole=st.booleans())
    def train(self, whole: bool) -> None:
        batch = self.ledger.window.batch
        taken = self.ledger.take(batch) if whole else self.ledger.take_tried(batch)
        for each in taken or ():
            assert self.ledger.version - each.head_version <= self.ledger.window.staleness
            self.outcome[each.number] = self.outcome.get(each.number, 0) + 1
        if taken:
            self.ledger.set_version(self.ledger.version + 1)

    @invariant()
    def nothing_is_lost_and_nothing_is_taken_twice(self) -> None:
        if not hasattr(self, "ledger"):
            return
        ledger, counts = self.ledger, self.ledger.counts
        alive = len(ledger.pending) + len(ledger.running) + len(ledger.accepted)
        assert counts.submitted == alive + counts.consumed + counts.rejected + counts.failed + counts.abandoned
        assert counts.accepted == len(ledger.accepted)
        assert set(self.outcome.values()) <= {1}
        self.told += [end.data["row"] for end in ledger.ends_so_far()]
        assert len(self.told) == len(set(self.told)) == counts.rejected + counts.failed + counts.abandoned
        assert not set(self.told) & set(self.outcome)

    @invariant()
    def window_holds(self) -> None:
        if hasattr(self, "ledger"):
            ledger = self.ledger
            inside = len(ledger.running) + len(ledger.accepted) + ledger.in_training
            assert inside <= ledger.window.size
            assert len(ledger.running) + len(ledger.apart) <= ledger.window.concurrency


TestRollouts = Rollouts.TestCase
TestRollouts.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(WINDOWS)
def test_trainer_is_never_starved_for_good(window: Window) -> None:
    """Whatever the window: with endless prompts and episodes that end, batches keep coming, each within eta."""
    ledger, number = Ledger(window), 0
    for step in range(4):
        while (taken := ledger.take(window.batch)) is None:
            while len(ledger.pending) < window.batch:
                ledger.submit(item(number))
                number += 1
            started = ledger.next_to_run()
            assert started is not None, "no batch, and nothing may start"
            ledger.ended(started, rollout(started.number, ledger.version))
        assert len(taken) == window.batch
        ledger.set_version(step + 1)
