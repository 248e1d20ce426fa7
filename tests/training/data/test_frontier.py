"""No prompt lost, none twice, over any history of work and crashes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from areal.training.data.frontier import DataOrder, Frontier


class Run(RuleBasedStateMachine):
    """``saved`` is the newest checkpoint: a crash goes back to it, and what was trained since is forgotten weights and
    all, so it has to be trained again."""

    def __init__(self) -> None:
        super().__init__()
        self.frontier = Frontier()
        self.trained: list[int] = []
        self.saved: tuple[dict, list[int]] = (self.frontier.state(), [])

    @rule()
    def take(self) -> None:
        position = self.frontier.take()
        assert position not in self.trained

    @precondition(lambda self: self.frontier.out)
    @rule(data=st.data())
    def consume(self, data) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.frontier.out)), min_size=1, unique=True))
        self.frontier.consume(chosen)
        self.trained += chosen

    @precondition(lambda self: self.frontier.out)
    @rule(data=st.data())
    def give_back(self, data) -> None:
        self.frontier.give_back(data.draw(st.sampled_from(sorted(self.frontier.out))))

    @rule()
    def save(self) -> None:
        self.saved = (self.frontier.state(), list(self.trained))

    @rule()
    def crash(self) -> None:
        state, self.trained = self.saved[0], list(self.saved[1])
        self.frontier = Frontier.restored(state)

    @invariant()
    def every_position_below_the_unseen_is_in_one_place(self) -> None:
        places = self.trained + sorted(self.frontier.out) + self.frontier.owed
        assert sorted(places) == list(range(self.frontier.unseen))

    @invariant()
    def the_count_is_right(self) -> None:
        assert self.frontier.consumed == len(self.trained)


TestRun = Run.TestCase


def test_consume_what_is_not_out_is_an_error() -> None:
    with pytest.raises(ValueError, match="position 3 is not out"):
        Frontier().consume([3])


@given(st.integers(1, 40), st.integers(1, 10), st.booleans(), st.booleans(), st.integers(0, 5))
def test_order_each_epoch_has_every_row_at_most_once(count, batch_size, shuffle, drop_last, seed) -> None:
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


def test_order_shuffled_epochs_differ_and_are_repeatable() -> None:
    order = DataOrder(100, seed=3)
    first, second = ([order.row(epoch * 100 + n) for n in range(100)] for epoch in range(2))
    assert first != second
    assert first == [DataOrder(100, seed=3).row(n) for n in range(100)]


def test_order_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rows"):
        DataOrder(0)
