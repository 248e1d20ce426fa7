"""Commands run in order, or their caller is told that they never will."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from areal.services.inference.engines.embedded.engine import CommandQueue


def test_calls_run_in_order_and_return_what_they_did() -> None:
    mailbox = CommandQueue()
    done: list[int] = []

    def act(number: int) -> int:
        done.append(number)
        return number

    futures = [mailbox.call(partial(act, number)) for number in range(3)]
    while not mailbox.is_empty:
        mailbox.run_next(wait=False)
    assert done == [0, 1, 2]
    assert [future.result(0) for future in futures] == [0, 1, 2]


def test_call_that_raises_tells_its_caller_and_nobody_else() -> None:
    mailbox = CommandQueue()

    def fail() -> None:
        raise KeyError("x")

    failed, fine = mailbox.call(fail), mailbox.call(lambda: 1)
    mailbox.run_next(wait=True)
    mailbox.run_next(wait=True)
    with pytest.raises(KeyError):
        failed.result(0)
    assert fine.result(0) == 1


def test_close_refuses_pending_and_later_calls_but_not_cancelled_ones() -> None:
    mailbox = CommandQueue()
    pending, cancelled = mailbox.call(lambda: 1), mailbox.call(lambda: 2)
    assert cancelled.cancel()
    mailbox.close(RuntimeError("over"))
    with pytest.raises(RuntimeError, match="over"):
        pending.result(0)
    with pytest.raises(RuntimeError, match="over"):
        mailbox.call(lambda: 3)
    assert cancelled.cancelled()


def test_calls_racing_with_close_are_all_answered() -> None:
    mailbox = CommandQueue()
    answers: list[object] = []

    def ask() -> None:
        for _ in range(200):
            try:
                answers.append(mailbox.call(lambda: 1).exception(10))
            except RuntimeError as refusal:
                answers.append(refusal)

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for thread in asking:
        thread.start()
    for _ in range(50):
        mailbox.run_next(wait=True)
    mailbox.close(RuntimeError("over"))
    for thread in asking:
        thread.join(20)
    assert len(answers) == 4 * 200
    assert answers.count(None) == 50
