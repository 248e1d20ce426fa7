"""Group commit: what several threads want to make durable at once is made durable together.

The first thread to come is the leader: it commits its own item, then whatever has queued up meanwhile, as one batch,
until nothing is left. A caller returns when its own item is durable, never before, so nothing is weaker than writing
one by one; only the number of fsyncs is smaller. A batch that fails is tried again item by item, so that nobody is
told of somebody else's failure: ``commit`` must do no harm when it is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Entry(Generic[T]):
    item: T
    ended: Event = field(default_factory=Event)
    error: BaseException | None = None


class GroupCommit(Generic[T]):
    """``commit`` makes a batch durable, in the order in which its items came. It is never called by two threads."""

    def __init__(self, commit: Callable[[Sequence[T]], None]) -> None:
        self._commit = commit
        self._queue: list[_Entry[T]] = []
        self._led = False
        self._mutex = Lock()

    def submit(self, item: T) -> None:
        """Return when ``item`` is durable. Raises what ``commit`` raised for it."""
        entry = _Entry(item)
        with self._mutex:
            self._queue.append(entry)
            leads, self._led = not self._led, True
        if leads:
            self._lead()
        entry.ended.wait()
        if entry.error is not None:
            raise entry.error

    def _lead(self) -> None:
        while True:
            with self._mutex:
                batch, self._queue = self._queue, []
                if not batch:
                    self._led = False
                    return
            self._end(batch)

    def _end(self, batch: list[_Entry[T]]) -> None:
        try:
            self._commit([entry.item for entry in batch])
        except BaseException as error:  # noqa: BLE001 - every waiting thread is told, the leader too
            for entry in batch:
                entry.error = error if len(batch) == 1 else self._alone(entry.item)
        for entry in batch:
            entry.ended.set()

    def _alone(self, item: T) -> BaseException | None:
        try:
            self._commit([item])
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for it
            return error
        return None
