"""A deadline for pure Python code, on any thread: signals, which libraries use for this, reach the main thread only."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_STOP_S = 1.0


class Expired(BaseException):
    """Raised inside the code that took too long; not an Exception, so that the code does not handle it."""


class _Call(threading.Thread, Generic[T]):
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
    """The value of ``function()``, or what it raises. Raises TimeoutError after ``seconds``; the function is
    interrupted at its next bytecode. One that hangs in C code goes on in a daemon thread."""
    call = _Call(function)
    call.start()
    call.join(seconds)
    if call.is_alive():
        call.interrupt()
        call.join(_STOP_S)
        raise TimeoutError(f"not done within {seconds:g} s")
    if call.error is not None:
        raise call.error
    return call.value[0]
