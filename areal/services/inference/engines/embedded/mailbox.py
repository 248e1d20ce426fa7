"""How other threads have something done by the engine's thread, in the order they asked for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Mailbox:
    """``call`` is for any thread, the rest for the one that owns the mailbox.

    Once ``close`` was called nobody is left waiting and nobody can begin to: pending calls and later ones get the
    refusal.
    """

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._gate = threading.Lock()  # between putting a command and refusing all further ones
        self._refusal: Exception | None = None

    def call(self, action: Callable[[], T]) -> Future[T]:
        """The future of ``action()``; cancelling it before it is begun withdraws it."""
        command = _Command(action)
        with self._gate:
            if self._refusal is not None:
                raise self._refusal
            self._commands.put(command)
        return command.future

    def obey(self, *, wait: bool) -> None:
        """Run one command if there is one; with ``wait``, wait for it."""
        if wait or not self._commands.empty():
            self._commands.get().run()

    @property
    def is_empty(self) -> bool:
        return self._commands.empty()

    def close(self, refusal: Exception) -> None:
        with self._gate:
            self._refusal = refusal
        while not self._commands.empty():
            self._commands.get().refuse(refusal)


class _Command:
    """An action, and what became of it for the thread that asked."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._action = action
        self.future: Future[Any] = Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return  # whoever asked went away before it was begun
        try:
            self.future.set_result(self._action())
        except Exception as error:  # noqa: BLE001 (the asking thread gets it)
            self.future.set_exception(error)

    def refuse(self, refusal: Exception) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(refusal)
