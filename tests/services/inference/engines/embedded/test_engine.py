"""The engine's life: pause, abort, close, commands, and what a failing step leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.errors import ArealError, Conflict
from areal.services.inference.engines.embedded.decoder import RowSpan
from areal.services.inference.engines.embedded.engine import CommandQueue
from areal.services.inference.engines.embedded.runner import Adapters, DecoderRunner
from areal.services.inference.engines.embedded.scheduler import Finish

from .support import Harness, gap, open_runner

Start = Callable[..., Harness]


def test_pause_under_load_freezes_until_resume(llama: tuple[Path, Any], start: Start) -> None:
    folder, model = llama
    harness = start(folder)
    running = [harness.submit([5 + index], max_new_tokens=100) for index in range(4)]
    harness.wait(*running, tokens=2)
    harness.engine.pause().result(10)
    frozen = [sequence.produced for sequence in running]
    waiting = harness.submit([9, 9], max_new_tokens=3)
    for _ in range(20):  # commands are obeyed while paused, and none of them lets a step through
        stats = harness.engine.stats().result(10)
    assert [sequence.produced for sequence in running] == frozen
    assert (stats.paused, stats.running, stats.waiting, waiting.produced) == (True, 4, 1, 0)
    harness.engine.resume().result(10)
    harness.wait(*running, waiting)
    assert max(gap(model, sequence) for sequence in [*running, waiting]) < 1e-4


def test_abort_frees_running_and_waiting_slots(llama: tuple[Path, Any], start: Start) -> None:
    folder, model = llama
    harness = start(folder)
    sequences = [harness.submit([5, 6], max_new_tokens=120, index=index) for index in range(12)]
    harness.wait(*sequences[:8], tokens=3)
    harness.engine.pause().result(10)
    harness.engine.abort([sequences[0], sequences[5], sequences[11]]).result(10)
    stats = harness.engine.stats().result(10)
    assert (stats.running, stats.waiting) == (6, 3)
    assert stats.kv_used == sum(len(each.prompt) + each.produced - 1 for each in sequences[:8] if not each.finish)
    assert [sequences[index].finish for index in (0, 5, 11)] == [Finish.ABORT] * 3
    harness.engine.resume().result(10)
    harness.wait(*sequences)
    assert all(each.finish is Finish.LENGTH for index, each in enumerate(sequences) if index not in (0, 5, 11))
    assert max(gap(model, each) for each in sequences if each.produced) < 1e-4
    assert harness.engine.stats().result(10).kv_used == 0


def test_waiting_batch_runs_when_no_more_requests_come(
    llama: tuple[Path, Any], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = llama
    harness = start(folder)
    alone = harness.run([5, 6], max_new_tokens=3, more_coming=True)
    monkeypatch.setattr("areal.services.inference.engines.embedded.engine._MOMENT_S", 0.2)
    before = harness.engine.stats().result(10).counters.prefill_steps
    batch = [harness.submit([7, index], max_new_tokens=3, index=index, more_coming=True) for index in range(4)]
    harness.wait(*batch)
    assert harness.engine.stats().result(10).counters.prefill_steps == before + 1
    assert max(gap(model, each) for each in [*alone, *batch]) < 1e-4


def test_abort_of_ended_sequence_changes_nothing(llama: tuple[Path, Any], start: Start) -> None:
    harness = start(llama[0])
    (sequence,) = harness.run([5, 6], max_new_tokens=2)
    harness.engine.abort([sequence]).result(10)
    assert sequence.finish is Finish.LENGTH


def test_stop_token_ends_sequence_and_is_included(llama: tuple[Path, Any], start: Start) -> None:
    harness = start(llama[0])
    (free,) = harness.run([5, 6], max_new_tokens=20, temperature=0.0)
    stop = free.output[6]
    (stopped,) = harness.run([5, 6], max_new_tokens=20, temperature=0.0, stop_token_ids=(stop,))
    assert (stopped.finish, stopped.stop_token) == (Finish.STOP, stop)
    assert stopped.output == free.output[: free.output.index(stop) + 1]
    assert len(stopped.logprobs) == len(stopped.versions) == stopped.produced


def test_min_new_tokens_delays_stop_tokens(llama: tuple[Path, Any], start: Start) -> None:
    harness = start(llama[0])
    every = tuple(range(10, 97))
    (sequence,) = harness.run([5, 6], max_new_tokens=20, min_new_tokens=5, stop_token_ids=every, seed=3)
    assert all(token < 10 for token in sequence.output[:5])
    assert sequence.produced >= 5


def test_sequence_at_context_end_finishes_with_length(llama: tuple[Path, Any], start: Start) -> None:
    folder, model = llama
    (sequence,) = start(folder).run(range(3, 90), max_new_tokens=128 - 87)
    assert (sequence.length, sequence.finish) == (128, Finish.LENGTH)
    assert gap(model, sequence) < 1e-4


def test_close_ends_running_calls_and_refuses_new_ones(llama: tuple[Path, Any], start: Start) -> None:
    harness = start(llama[0])
    running = harness.submit([5], max_new_tokens=120)
    harness.engine.pause().result(10)
    harness.close()
    assert running.finish is Finish.LOST
    with pytest.raises(Conflict, match="shutting down"):
        harness.engine.resume()


def test_cancelled_command_is_not_run(llama: tuple[Path, Any], start: Start) -> None:
    harness = start(llama[0])
    held, released = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        released.wait(10)

    harness.engine._commands.call(hold)
    assert held.wait(10)
    pause = harness.engine.pause()
    assert pause.cancel()
    released.set()
    (sequence,) = harness.run([5], max_new_tokens=3)
    assert sequence.finish is Finish.LENGTH


class _Breaking(DecoderRunner):
    """Its fifth step fails, as one does that runs out of memory."""

    steps = 0

    def decode(
        self, tokens: torch.Tensor, positions: torch.Tensor, spans: Sequence[RowSpan], adapters: Adapters = ()
    ) -> torch.Tensor:
        self.steps += 1
        if self.steps == 5:
            raise MemoryError("no room")
        return super().decode(tokens, positions, spans, adapters)


def test_failing_step_ends_all_calls_and_is_reported(llama: tuple[Path, Any]) -> None:
    runner = open_runner(llama[0])
    runner.__class__ = _Breaking
    harness = Harness(runner)
    harness.engine.pause().result(10)  # all are there before the first step
    sequences = [harness.submit([5, index], max_new_tokens=50) for index in range(10)]
    harness.engine.resume()
    harness.wait(*sequences)
    assert {sequence.finish for sequence in sequences} == {Finish.LOST}
    harness.engine._thread.join(10)
    assert [type(failure) for failure in harness.failures] == [MemoryError]
    with pytest.raises(ArealError, match="the engine failed: MemoryError"):
        harness.engine.stats()


def test_failing_weight_load_ends_engine(llama: tuple[Path, Any], start: Start) -> None:
    harness = start(llama[0])

    def install() -> None:
        raise MemoryError("no room")

    running = harness.submit([5], max_new_tokens=120)
    harness.engine._runner.prepare = lambda *_: install  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        harness.engine.load_weights(llama[0], 1)
    harness.wait(running)
    assert running.finish is Finish.LOST
    assert [type(failure) for failure in harness.failures] == [MemoryError]


# -- commands


def test_calls_run_in_order_and_return_results() -> None:
    commands = CommandQueue()
    done: list[int] = []

    def act(number: int) -> int:
        done.append(number)
        return number

    futures = [commands.call(partial(act, number)) for number in range(3)]
    while not commands.is_empty:
        commands.run_next(wait=False)
    assert done == [0, 1, 2]
    assert [future.result(0) for future in futures] == [0, 1, 2]


def test_raising_call_reports_only_to_its_caller() -> None:
    commands = CommandQueue()

    def fail() -> None:
        raise KeyError("x")

    failed, fine = commands.call(fail), commands.call(lambda: 1)
    commands.run_next(wait=True)
    commands.run_next(wait=True)
    with pytest.raises(KeyError):
        failed.result(0)
    assert fine.result(0) == 1


def test_close_refuses_pending_calls_but_not_cancelled_ones() -> None:
    commands = CommandQueue()
    pending, cancelled = commands.call(lambda: 1), commands.call(lambda: 2)
    assert cancelled.cancel()
    commands.close(RuntimeError("over"))
    with pytest.raises(RuntimeError, match="over"):
        pending.result(0)
    with pytest.raises(RuntimeError, match="over"):
        commands.call(lambda: 3)
    assert cancelled.cancelled()


def test_calls_racing_with_close_are_all_answered() -> None:
    commands = CommandQueue()
    answers: list[object] = []

    def ask() -> None:
        for _ in range(200):
            try:
                answers.append(commands.call(lambda: 1).exception(10))
            except RuntimeError as refusal:
                answers.append(refusal)

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for thread in asking:
        thread.start()
    for _ in range(50):
        commands.run_next(wait=True)
    commands.close(RuntimeError("over"))
    for thread in asking:
        thread.join(20)
    assert len(answers) == 4 * 200
    assert answers.count(None) == 50
