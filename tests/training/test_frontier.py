"""No prompt lost, none twice, over any history of work, failures and crashes."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from areal.training.frontier import MAX_TRIES, DataOrder, FailureWindow, Frontier, rows_digest


class Run(RuleBasedStateMachine):
    """``saved`` is the newest checkpoint: a crash goes back to it, and what was trained since is forgotten weights and
    all, so it has to be trained again."""

    def __init__(self) -> None:
        super().__init__()
        self.frontier = Frontier()
        self.spent: list[int] = []
        self.failed: dict[int, int] = {}
        self.saved: tuple[dict, list[int], dict[int, int]] = (self.frontier.state(), [], {})

    @rule()
    def take(self) -> None:
        position = self.frontier.take()
        assert position not in self.spent

    @precondition(lambda self: self.frontier.in_flight)
    @rule(data=st.data())
    def consume(self, data) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.frontier.in_flight)), min_size=1, unique=True))
        self.frontier.consume(chosen)
        self.spent += chosen

    @precondition(lambda self: self.frontier.in_flight)
    @rule(data=st.data())
    def reject(self, data) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.frontier.in_flight)))
        self.frontier.reject(chosen)
        self.spent.append(chosen)

    @precondition(lambda self: self.frontier.in_flight)
    @rule(data=st.data())
    def give_back(self, data) -> None:
        self.frontier.give_back(data.draw(st.sampled_from(sorted(self.frontier.in_flight))))

    @precondition(lambda self: self.frontier.in_flight)
    @rule(data=st.data(), is_permanent=st.booleans())
    def fail(self, data, is_permanent: bool) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.frontier.in_flight)))
        self.failed[chosen] = self.failed.get(chosen, 0) + 1
        gone = self.frontier.fail(chosen, is_permanent=is_permanent)
        assert gone == (is_permanent or self.failed[chosen] == MAX_TRIES)
        if gone:
            self.spent.append(chosen)

    @rule()
    def save(self) -> None:
        self.saved = (self.frontier.state(), list(self.spent), dict(self.failed))

    @rule()
    def crash(self) -> None:
        state, self.spent, self.failed = self.saved[0], list(self.saved[1]), dict(self.saved[2])
        self.frontier = Frontier.restored(state)

    @invariant()
    def every_position_below_the_unseen_is_in_one_place(self) -> None:
        places = self.spent + sorted(self.frontier.in_flight) + self.frontier.returned
        assert sorted(places) == list(range(self.frontier.unseen))

    @invariant()
    def counts_add_up(self) -> None:
        counts = self.frontier.counts
        assert counts.taken == counts.trained + counts.rejected + counts.given_up + counts.returned + len(
            self.frontier.in_flight
        )
        assert self.frontier.spent == counts.trained + counts.rejected + counts.given_up == len(self.spent)

    @invariant()
    def owed_come_first_and_in_order(self) -> None:
        assert self.frontier.returned == sorted(self.frontier.returned)


TestRun = Run.TestCase


@given(
    st.integers(1, 6), st.integers(1, 12), st.sets(st.integers(0, 60)), st.dictionaries(st.integers(0, 60), st.just(1))
)
def test_run_with_permanently_failing_prompts_ends(batch, steps, poisoned, flaky) -> None:
    """Each step has its batch after a bounded number of tries, and what fails but once is trained on."""
    frontier, trained, failures = Frontier(), [], dict(flaky)
    for _ in range(steps):
        ready: list[int] = []
        while len(ready) < batch:
            position = frontier.take()
            if position in poisoned or failures.pop(position, 0):
                frontier.fail(position)
            else:
                ready.append(position)
            assert frontier.counts.taken <= batch * steps + len(flaky) + len(poisoned) * MAX_TRIES
        frontier.consume(ready)
        trained += ready
    assert sorted(trained) == [p for p in range(max(trained) + 1) if p not in poisoned]


def test_state_of_older_release_counts_as_trained_on() -> None:
    frontier = Frontier.restored({"frontier": 3, "beyond": [5], "unseen": 7})
    assert frontier.returned == [3, 4, 6]
    assert frontier.counts.trained == frontier.spent == 4


def test_run_is_hopeless_once_most_recent_prompts_failed() -> None:
    prospects = FailureWindow(4)
    for cause in ("first", "second"):
        prospects.given_up(cause)
    assert not prospects.is_exceeded
    prospects.ended(2)
    prospects.given_up("third")
    assert (prospects.count, prospects.is_exceeded) == (2, False)
    prospects.given_up("fourth")
    prospects.given_up("fifth")
    assert prospects.is_exceeded and prospects.first_cause == "first"


def test_failure_window_forgets_old_causes() -> None:
    prospects = FailureWindow(2)
    prospects.given_up("old")
    prospects.ended(2)
    prospects.given_up("new")
    assert prospects.first_cause == "new"


def test_consuming_unissued_position_is_an_error() -> None:
    with pytest.raises(ValueError, match="position 3 is not in flight"):
        Frontier().consume([3])


@given(st.integers(1, 40), st.integers(1, 10), st.booleans(), st.booleans(), st.integers(0, 5))
def test_each_epoch_has_every_row_at_most_once(count, batch_size, shuffle, drop_last, seed) -> None:
    if drop_last and batch_size > count:
        with pytest.raises(ValueError, match="is more than"):
            DataOrder(count, batch_size, shuffle, drop_last, seed)
        return
    order = DataOrder(count, batch_size, shuffle, drop_last, seed)
    for epoch in range(2):
        batches = [order.batch(epoch * order.batches_per_epoch + n) for n in range(order.batches_per_epoch)]
        seen = [row for batch in batches for row in batch]
        assert len(seen) == len(set(seen)) == order.epoch_size
        assert seen == [order.row(epoch * order.epoch_size + n) for n in range(order.epoch_size)]
        if not drop_last:
            assert sorted(seen) == list(range(count))


def test_shuffled_epochs_differ_and_are_repeatable() -> None:
    order = DataOrder(100, seed=3)
    first, second = ([order.row(epoch * 100 + n) for n in range(100)] for epoch in range(2))
    assert first != second
    assert first == [DataOrder(100, seed=3).row(n) for n in range(100)]


def test_order_without_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rows"):
        DataOrder(0)


def test_digest_covers_rows_with_any_key_type() -> None:
    rows = [{1: "a", "b": {(1, 2): [{3: 4, None: 5}]}}]
    assert rows_digest(rows) == rows_digest([{"b": {(1, 2): [{None: 5, 3: 4}]}, 1: "a"}])
    assert rows_digest(rows) != rows_digest([{1: "a", "b": {(1, 2): [{3: 4, None: 6}]}}])


def test_digest_of_many_rows_samples_some_and_last() -> None:
    class Rows(Sequence[int]):
        def __init__(self, count: int, last: int) -> None:
            self.size, self.last, self.read = count, last, list[int]()

        def __len__(self) -> int:
            return self.size

        def __getitem__(self, place):
            self.read.append(place)
            return self.last if place == self.size - 1 else place

    for count in (1, 2, 100_000, 100_001):
        rows = Rows(count, 7)
        assert rows_digest(rows) != rows_digest(Rows(count, 8))
        assert rows.read[0] == 0 and rows.read[-1] == count - 1 and len(set(rows.read)) == len(rows.read)
        assert len(rows.read) <= 100_001 and (count > 100_000 or len(rows.read) == count)
