"""Histories of arrivals, steps, ends and cancellations keep the scheduler's invariants."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal.services.inference.engines.embedded.scheduler import Decode, Limits, Move, Prefill, Scheduler
from areal.services.inference.engines.embedded.sequence import Sequence

from .support import make_sequence

LENGTH = 40


class History(RuleBasedStateMachine):
    """Executes what the scheduler says on a model of the cache: for each row, which positions of whom it holds."""

    @initialize(
        rows=st.integers(1, 5),
        kv_tokens=st.integers(LENGTH, 4 * LENGTH),
        prefill_tokens=st.sampled_from([1, 5, 16, 64]),
    )
    def begin(self, rows: int, kv_tokens: int, prefill_tokens: int) -> None:
        self.limits = Limits(rows, LENGTH, kv_tokens, prefill_tokens)
        self.scheduler = Scheduler(self.limits)
        self.cache: dict[int, list[tuple[int, int]]] = {}
        self.arrived: list[Sequence] = []
        self.begun: list[int] = []  # arrivals, in order of their first admission
        self.ended: list[Sequence] = []
        self.idle_prefills = 0

    @rule(length=st.integers(1, LENGTH - 1), output=st.integers(1, LENGTH))
    def arrive(self, length: int, output: int) -> None:
        sequence = make_sequence([1] * length, max_new_tokens=min(output, LENGTH - length))
        self.scheduler.add(sequence)
        self.arrived.append(sequence)

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
            sequence.output.append(1)
        over = [
            sequence
            for index, sequence in enumerate(sampled)
            if index in ends or len(sequence.output) >= sequence.allowance
        ]
        self.apply(self.scheduler.remove(over))
        self.ended += over

    def prefill(self, step: Prefill) -> list[Sequence]:
        lengths = [chunk.stop - chunk.start for chunk in step.chunks]
        assert min(lengths) > 0
        assert len(lengths) * max(lengths) <= max(self.limits.prefill_tokens, 1)
        for offset, chunk in enumerate(step.chunks):
            sequence = chunk.sequence
            assert sequence.row == step.first_row + offset
            held = self.cache.get(sequence.row, [])[: chunk.start]
            assert held == [(id(sequence), position) for position in range(chunk.start)]
            self.cache[sequence.row] = held + [(id(sequence), p) for p in range(chunk.start, chunk.stop)]
            assert chunk.stop <= step.width
            if sequence.arrival not in self.begun:
                self.begun.append(sequence.arrival)
        assert all(chunk.completes for chunk in step.chunks[:-1])
        return [chunk.sequence for chunk in step.chunks if chunk.completes]

    def decode(self, step: Decode) -> list[Sequence]:
        assert step.longest == max(sequence.length for sequence in step.sequences)
        for row, sequence in enumerate(step.sequences):
            position = sequence.length - 1
            assert self.cache[row][:position] == [(id(sequence), each) for each in range(position)]
            self.cache[row] = [*self.cache[row][:position], (id(sequence), position)]
        return list(step.sequences)

    def apply(self, moves: tuple[Move, ...]) -> None:
        for move in moves:
            assert len(self.cache[move.source]) >= move.length
            self.cache[move.target] = self.cache[move.source][: move.length]

    @precondition(lambda self: any(each not in self.ended for each in self.arrived))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        live = [each for each in self.arrived if each not in self.ended]
        gone = data.draw(st.lists(st.sampled_from(live), unique_by=id, min_size=1))
        self.apply(self.scheduler.remove(gone))
        self.ended += gone

    @invariant()
    def rows_are_dense_and_unshared(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        running = self.scheduler.running
        assert [sequence.row for sequence in running] == list(range(len(running)))
        assert len(running) <= self.limits.max_rows

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        held = [*self.scheduler.running, *self.scheduler.waiting]
        assert sorted(map(id, held)) == sorted(id(each) for each in self.arrived if each not in self.ended)

    @invariant()
    def admission_is_in_order_of_arrival(self) -> None:
        if hasattr(self, "scheduler"):
            assert self.begun == sorted(self.begun)

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
TestHistory.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_prefill_of_mixed_prompts_is_never_more_than_half_padding(lengths: list[int]) -> None:
    scheduler = Scheduler(Limits(max_rows=20, max_length=LENGTH, kv_tokens=20 * LENGTH, prefill_tokens=200))
    for length in lengths:
        scheduler.add(make_sequence([1] * length))
    step = scheduler.schedule()
    assert isinstance(step, Prefill)
    sizes = [chunk.stop - chunk.start for chunk in step.chunks]
    assert len(sizes) * max(sizes) <= 2 * sum(sizes)


def test_queue_of_prompts_beside_running_sequences_alternates_with_decoding() -> None:
    scheduler = Scheduler(Limits(max_rows=8, max_length=LENGTH, kv_tokens=8 * LENGTH, prefill_tokens=10))
    for _ in range(4):
        scheduler.add(make_sequence([1] * 9))
    kinds = []
    for _ in range(8):
        step = scheduler.schedule()
        assert step is not None
        kinds.append(type(step))
        scheduler.commit(step)
        for sequence in scheduler.decoding:
            if sequence.cached == sequence.length:
                sequence.output.append(1)
    assert kinds == [Prefill, Decode] * 4
