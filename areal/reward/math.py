"""The reward of math problems: 1 if the final answer is mathematically equal to the reference."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from areal.reward.answers import final_answer, right_answer, same_expression, same_number

T = TypeVar("T")

_STOP_S = 1.0


class Expired(BaseException):
    """Raised in code that exceeds its time limit. It is not an Exception, so that the code does not handle it."""


class _InterruptibleCall(threading.Thread, Generic[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__(name="deadline", daemon=True)
        self._function = function
        self.value: list[T] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value.append(self._function())
        except BaseException as error:  # noqa: BLE001 - raised again on the caller's thread
            self.error = error

    def interrupt(self) -> None:
        if self.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(Expired))


def call_within(seconds: float, function: Callable[[], T]) -> T:
    """Call ``function`` on a daemon thread, and return its result or raise its exception. After ``seconds``, raises
    TimeoutError and interrupts the function at its next bytecode. A function that hangs in C code keeps running."""
    call = _InterruptibleCall(function)
    call.start()
    call.join(seconds)
    if call.is_alive():
        call.interrupt()
        call.join(_STOP_S)
        raise TimeoutError(f"not done within {seconds:g} s")
    if call.error is not None:
        raise call.error
    return call.value[0]


_log = logging.getLogger(__name__)
_DEADLINE_S = 10.0


def math_verify_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int] | None = None,
    completion_ids: list[int] | None = None,
    answer: Any = "",
    **data: Any,
) -> float:
    """Compares expressions, fractions, sets and intervals; numbers as ``areal.reward.gsm8k`` does. An answer that takes
    over 10 s to compare is wrong. Raises ImportError without latex2sympy2_extended, ValueError for a row without an
    answer."""
    right = right_answer(answer)
    answer = final_answer(completions)
    if answer is None:
        return 0.0
    if same_number(answer, right):
        return 1.0
    with contextlib.suppress(ImportError):  # no part of the deadline: a busy machine takes seconds for it
        importlib.import_module("latex2sympy2_extended")
    try:
        return float(call_within(_DEADLINE_S, lambda: same_expression(answer, right)))
    except TimeoutError:
        _log.warning(
            "%.80r could not be compared with %.80r within %g s: it is taken as wrong", answer, right, _DEADLINE_S
        )
        return 0.0


class MathVerifyWorker:
    """AReaL's interface of ``math_verify_reward_fn``."""

    def verify(self, response: str, ground_truth: str) -> float:
        """1 if the final answer of ``response`` equals ``ground_truth``, else 0."""
        return math_verify_reward_fn("", response, answer=ground_truth)


def get_math_verify_worker() -> MathVerifyWorker:
    return MathVerifyWorker()
