"""Histories of arrivals, steps, ends, cancellations and weight swaps keep the scheduler's invariants."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal.services.inference.engines.embedded.scheduler import (
    BatchScheduler,
    Copy,
    Decode,
    Drop,
    Keep,
    Move,
    Prefill,
    PrefixCache,
    Restore,
    SchedulerLimits,
    Spread,
    TokenSequence,
    common_prefix,
    merge_moves,
)

from .support import STEADY, make_sequence

LENGTH = 40
# A cached position: the tokens up to it, and whose it is: those of anybody under the weights of that number, or, when
# its row lived through a swap, of that sequence alone.
Cell = tuple[tuple[int, ...], object]


class History(RuleBasedStateMachine):
    """Executes what the scheduler says on a model of the cache, in which a position knows what it was computed from."""

    @initialize(
        rows=st.integers(1, 5),
        kv_tokens=st.integers(LENGTH, 4 * LENGTH),
        prefill_tokens=st.sampled_from([1, 5, 16, 64]),
        kept_tokens=st.sampled_from([0, 30, 200]),
    )
    def begin(self, rows: int, kv_tokens: int, prefill_tokens: int, kept_tokens: int) -> None:
        self.limits = SchedulerLimits(rows, LENGTH, kv_tokens, prefill_tokens, kept_tokens, shortest_share=3)
        self.scheduler = BatchScheduler(self.limits)
        self.cache: dict[int, list[Cell]] = {}
        self.kept: dict[int, list[Cell]] = {}
        self.epoch = 0
        self.arrived: list[TokenSequence] = []
        self.begun: list[int] = []  # arrivals, in order of their first admission
        self.ended: list[TokenSequence] = []

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=LENGTH - 1), output=st.integers(1, LENGTH))
    def arrive(self, prompt: list[int], output: int) -> None:
        sequence = make_sequence(prompt, max_new_tokens=min(output, LENGTH - len(prompt)))
        self.scheduler.add(sequence)
        self.arrived.append(sequence)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=LENGTH - 1), count=st.integers(2, 4))
    def arrive_as_a_group(self, prompt: list[int], count: int) -> None:
        for _ in range(count):
            self.arrive(prompt, 3)

    @precondition(lambda self: any(each.output for each in self.arrived))
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def take_another_turn(self, data: st.DataObject, more: list[int]) -> None:
        before = data.draw(st.sampled_from([each for each in self.arrived if each.output]))
        self.arrive((before.prompt + before.output + more)[: LENGTH - 1], 3)

    @rule()
    def swap_weights(self) -> None:
        self.epoch += 1
        self.apply(self.scheduler.forget_cache())

    @precondition(lambda self: self.scheduler.has_work)
    @rule(ends=st.sets(st.integers(0, 5)))
    def step(self, ends: set[int]) -> None:
        step = self.scheduler.schedule()
        assert step is not None
        self.apply(step.moves)
        assert step.rows <= self.limits.max_rows
        assert step.rows * step.width <= self.limits.kv_tokens
        sampled = self.prefill(step) if isinstance(step, Prefill) else self.decode(step)
        self.scheduler.commit(step)
        for sequence in sampled:
            sequence.output.append(len(sequence.output) % 2)
        over = [
            sequence
            for index, sequence in enumerate(sampled)
            if index in ends or len(sequence.output) >= sequence.allowance
        ]
        self.apply(self.scheduler.remove(over))
        self.ended += over

    @precondition(lambda self: any(each not in self.ended for each in self.arrived))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        live = [each for each in self.arrived if each not in self.ended]
        gone = data.draw(st.lists(st.sampled_from(live), unique_by=id, min_size=1))
        self.apply(self.scheduler.remove(gone))
        self.ended += gone

    def prefill(self, step: Prefill) -> list[TokenSequence]:
        lengths = [chunk.stop - chunk.start for chunk in step.chunks]
        assert min(lengths) > 0
        assert len(lengths) * max(lengths) <= self.limits.prefill_tokens
        assert all(chunk.completes for chunk in step.chunks[:-1])
        self.apply(step.fills)
        for offset, chunk in enumerate(step.chunks):
            assert chunk.sequence.row == step.first_row + offset
            assert chunk.stop <= step.width
            self.compute(chunk.sequence, chunk.start, chunk.stop)
        held = [*(chunk.sequence for chunk in step.chunks), *(copy.sequence for copy in step.copies)]
        assert step.rows == step.first_row + len(held)
        self.begun += sorted(sequence.arrival for sequence in held if sequence.arrival not in self.begun)
        if step.spread is not None:
            self.apply((step.spread,))
        for sequence, place in step.completed:  # what its logits and its next tokens rest on
            self.compute(sequence, step.chunks[place].stop, sequence.length)
        return [sequence for sequence, _ in step.completed]

    def decode(self, step: Decode) -> list[TokenSequence]:
        assert step.width >= max(sequence.length for sequence in step.sequences)
        for row, sequence in enumerate(step.sequences):
            assert sequence.row == row
            self.compute(sequence, sequence.length - 1, sequence.length)
        return list(step.sequences)

    def compute(self, sequence: TokenSequence, start: int, stop: int) -> None:
        """Each position sees the sequence's own tokens, all computed by the weights of now."""
        assert sequence.row is not None
        tokens = tuple(sequence.tokens(0, stop))
        held = self.cache.get(sequence.row, [])[:start]
        assert [cell[0] for cell in held] == [tokens[: position + 1] for position in range(start)]
        assert {cell[1] for cell in held} <= {self.epoch}
        self.cache[sequence.row] = held + [(tokens[: position + 1], self.epoch) for position in range(start, stop)]

    def apply(self, copies: tuple[Copy, ...]) -> None:
        for copy in copies:
            match copy:
                case Move(source, target, length):
                    assert len(self.cache[source]) >= length
                    self.cache[target] = self.cache[source][:length]
                case Spread(sources, targets, length):
                    assert not set(sources) & set(targets)
                    self.cache |= {
                        target: self.cache[source][:length] for source, target in zip(sources, targets, strict=True)
                    }
                case Keep(row, length, number):
                    assert len(self.cache[row]) >= length
                    assert number not in self.kept
                    self.kept[number] = self.cache[row][:length]
                case Restore(number, target, length):
                    assert len(self.kept[number]) >= length
                    self.cache[target] = self.kept[number][:length]
                case Drop(number):
                    del self.kept[number]

    @invariant()
    def rows_are_dense_and_unshared(self) -> None:
        if hasattr(self, "scheduler"):
            running = self.scheduler.running
            assert [sequence.row for sequence in running] == list(range(len(running)))
            assert len(running) <= self.limits.max_rows

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "scheduler"):
            held = [*self.scheduler.running, *self.scheduler.waiting]
            assert sorted(map(id, held)) == sorted(id(each) for each in self.arrived if each not in self.ended)

    @invariant()
    def admission_is_in_order_of_arrival(self) -> None:
        if hasattr(self, "scheduler"):
            assert self.begun == sorted(self.begun)

    @invariant()
    def what_is_kept_is_bounded_and_of_these_weights(self) -> None:
        if hasattr(self, "scheduler"):
            assert sum(map(len, self.kept.values())) == self.scheduler.prefixes.size <= self.limits.kept_tokens
            assert {owner for cells in self.kept.values() for _, owner in cells} <= {self.epoch}

    def teardown(self) -> None:
        """Whatever came before, all that is left gets done."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20_000):
            if not self.scheduler.has_work:
                return
            self.step(set())
        raise AssertionError("the scheduler starves a sequence")


TestHistory = History.TestCase
TestHistory.settings = settings(STEADY, max_examples=60, stateful_step_count=40)


def complete(scheduler: BatchScheduler) -> Prefill | Decode:
    """Take one step, in which every sampled token is a 1."""
    step = scheduler.schedule()
    assert step is not None
    scheduler.commit(step)
    for sequence in scheduler.decoding:
        if sequence.cached == sequence.length:
            sequence.output.append(1)
    return step


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20))
@settings(STEADY, max_examples=50)
def test_mixed_prefill_is_at_most_half_padding(lengths: list[int]) -> None:
    scheduler = BatchScheduler(
        SchedulerLimits(max_rows=20, max_length=LENGTH, kv_tokens=20 * LENGTH, prefill_tokens=200)
    )
    for number, length in enumerate(lengths):
        scheduler.add(make_sequence([number] * length))
    step = scheduler.schedule()
    assert isinstance(step, Prefill)
    sizes = [chunk.stop - chunk.start for chunk in step.chunks]
    assert len(sizes) * max(sizes) <= 2 * sum(sizes)


def test_prefill_alternates_with_decoding() -> None:
    scheduler = BatchScheduler(SchedulerLimits(max_rows=8, max_length=LENGTH, kv_tokens=8 * LENGTH, prefill_tokens=10))
    for number in range(4):
        scheduler.add(make_sequence([number] * 9))
    assert [type(complete(scheduler)) for _ in range(8)] == [Prefill, Decode] * 4


def test_group_prefills_its_prompt_once() -> None:
    limits = SchedulerLimits(max_rows=8, max_length=LENGTH, kv_tokens=8 * LENGTH, shortest_share=4)
    scheduler = BatchScheduler(limits)
    for _ in range(5):
        scheduler.add(make_sequence(range(20)))
    first = complete(scheduler)
    assert isinstance(first, Prefill)
    assert [(chunk.start, chunk.stop) for chunk in first.chunks] == [(0, 20)]
    assert first.spread == Spread((0,) * 4, (1, 2, 3, 4), 20)
    assert [len(sequence.output) for sequence in scheduler.decoding] == [1] * 5
    assert scheduler.shared_tokens == 4 * 20


def test_several_groups_prefill_in_one_step() -> None:
    scheduler = BatchScheduler(SchedulerLimits(max_rows=8, max_length=LENGTH, kv_tokens=8 * LENGTH))
    for number in range(6):
        scheduler.add(make_sequence([number // 3] * 5))
    step = complete(scheduler)
    assert isinstance(step, Prefill)
    assert [chunk.sequence.prompt[0] for chunk in step.chunks] == [0, 1]
    assert step.spread == Spread((0, 0, 1, 1), (2, 3, 4, 5), 5)
    assert isinstance(complete(scheduler), Decode)


def test_group_prefills_per_row_when_rows_cannot_be_copied() -> None:
    scheduler = BatchScheduler(SchedulerLimits(max_rows=8, max_length=LENGTH, kv_tokens=8 * LENGTH, copies_rows=False))
    for _ in range(3):
        scheduler.add(make_sequence([1] * 5))
    step = complete(scheduler)
    assert isinstance(step, Prefill)
    assert (len(step.chunks), step.copies) == (3, ())


rows_of_moves = st.integers(0, 5)


@given(st.lists(st.tuples(rows_of_moves, rows_of_moves).filter(lambda pair: pair[0] != pair[1]), max_size=12))
def test_joined_moves_equal_separate_moves(pairs: list[tuple[int, int]]) -> None:
    copies: list[Copy] = [Move(source, target, 1) for source, target in pairs]
    copies.insert(len(copies) // 2, Drop(7))
    one_by_one, at_once = list(range(6)), list(range(6))
    for source, target in pairs:
        one_by_one[target] = one_by_one[source]
    given = list(merge_moves(copies))
    for copy in given:
        if isinstance(copy, Spread):
            read = [at_once[source] for source in copy.sources]
            for target, value in zip(copy.targets, read, strict=True):
                at_once[target] = value
    assert at_once == one_by_one
    assert given.count(Drop(7)) == 1 and len(given) <= 3


def test_next_turn_restores_cached_prefix() -> None:
    limits = SchedulerLimits(max_rows=2, max_length=LENGTH, kv_tokens=2 * LENGTH, kept_tokens=100, shortest_share=4)
    scheduler = BatchScheduler(limits)
    first = make_sequence(range(10))
    scheduler.add(first)
    for _ in range(3):
        complete(scheduler)
    (keep,) = scheduler.remove([first])
    assert isinstance(keep, Keep)
    assert keep.length == 12  # the newest token was not computed yet
    scheduler.add(make_sequence([*first.prompt, *first.output, 8, 9]))
    step = complete(scheduler)
    assert isinstance(step, Prefill)
    assert step.fills == (Restore(keep.number, 0, 12),)
    assert [(chunk.start, chunk.stop) for chunk in step.chunks] == [(12, 15)]


# -- kept prefixes

TOKENS = st.lists(st.integers(0, 1), max_size=12)


def reference(one: list[int], other: list[int]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


@given(TOKENS, TOKENS, st.integers(1, 5))
@settings(STEADY)
def test_common_prefix_of_any_lists_equals_reference(one: list[int], other: list[int], shortest: int) -> None:
    expected = reference(one, other)
    assert common_prefix(one, other, shortest) == (expected if expected >= shortest else 0)


@given(st.lists(TOKENS, max_size=25), TOKENS)
@settings(STEADY, max_examples=300)
def test_prefix_cache_finds_longest_within_bound(added: list[list[int]], wanted: list[int]) -> None:
    prefixes = PrefixCache(capacity=30, shortest=3)
    model: dict[int, list[int]] = {}
    for tokens in added:
        number, dropped = prefixes.add(tokens)
        for each in dropped:
            del model[each]
        if number is not None:
            model[number] = tokens
        assert sum(map(len, model.values())) == prefixes.size <= 30
        held = list(model.values())
        assert not any(a is not b and reference(a, b) == len(a) for a in held for b in held)
    number, length = prefixes.find(wanted)
    best = max((reference(tokens, wanted) for tokens in model.values()), default=0)
    assert length == (best if best >= 3 else 0)
    assert length == 0 or reference(model[number], wanted) == length


def test_full_prefix_cache_drops_least_recently_used() -> None:
    prefixes = PrefixCache(capacity=9, shortest=3)
    numbers = [prefixes.add([start] * 3)[0] for start in (1, 2, 3)]
    prefixes.find([1, 1, 1, 5])
    assert prefixes.add([4] * 3)[1] == [numbers[1]]


def test_clear_returns_all_cached_numbers() -> None:
    prefixes = PrefixCache(capacity=9, shortest=3)
    numbers = [prefixes.add([start] * 3)[0] for start in (1, 2)]
    assert prefixes.clear() == numbers
    assert prefixes.find([1, 1, 1]) == (0, 0)
    assert prefixes.size == 0
