"""Runs episodes as asyncio tasks on one event loop. The staleness window decides when an episode starts; each has
several attempts. A failed rollout is a result, not an exception. Not thread-safe: call it on the loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

from areal.dataclasses import dataclass, field
from areal.errors import TimedOut
from areal.http import tracing
from areal.rollout.failures import Failure, RolloutFailed, RolloutsFailed, cause_of
from areal.rollout.staleness import EpisodeSpec, Rollout, StalenessManager, is_stale

_log = logging.getLogger(__name__)
_MAX_ENDS = 4096
_WARN_FACTOR = 4  # as many times max_failures rejections in a row: a warning
_FAIL_FACTOR = 64  # as many: an error


Outcome = Rollout | Failure | None
"""None: the episode was rejected, or abandoned as too old."""


async def run_attempts(
    task_id: str,
    attempt: Callable[[int], Awaitable[Rollout | None]],
    pause_s: Callable[[Exception, int], float | None],
    about: tracing.Attributes,
    described: Callable[[Rollout], tracing.Attributes] = lambda rollout: {},
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Outcome:
    """Attempt an episode until it ends. ``pause_s`` maps the error and the number of an attempt (from 1) to the seconds
    before the next attempt, for which ``sleep`` waits; None: the episode has failed. ``about``, ``described``:
    attributes of its span."""
    with tracing.span("rollout", {"areal.task_id": task_id, **about}, root=True) as span:
        for number in itertools.count(1):
            try:
                rollout = await attempt(number)
            except Exception as error:  # noqa: BLE001 - the boundary to user code: its failure is data
                if (pause := pause_s(error, number)) is None:
                    ended = {"areal.outcome": "failed", "error.type": type(error).__name__}
                    span.set({**ended, "areal.attempts": number})
                    return Failure(task_id, cause_of(error).blame, error, number)
                await sleep(pause)
            else:
                found = described(rollout) if rollout is not None and tracing.is_on() else {}
                ended = {"areal.outcome": "rejected" if rollout is None else "accepted"}
                span.set({**ended, "areal.attempts": number, **found})
                return rollout
    raise AssertionError("unreachable")


@dataclass
class Executor:
    """Runs episodes with ``run``. ``head_of`` returns the version of a running episode's oldest token, or None before
    its first token. After ``max_failures`` consecutive failures, waiting callers get an error. ``on_failure`` is called
    with each failure."""

    staleness: StalenessManager
    run: Callable[[EpisodeSpec], Awaitable[Outcome]]
    head_of: Callable[[EpisodeSpec], int | None] = lambda item: None
    max_failures: int = 1
    on_failure: Callable[[EpisodeSpec, Failure], None] = lambda item, failure: None
    _tasks: dict[int, tuple[EpisodeSpec, asyncio.Task[None]]] = field(default_factory=dict)
    _awaited: dict[int, asyncio.Future[Outcome]] = field(default_factory=dict)
    _aborted: set[int] = field(default_factory=set)
    _ended: OrderedDict[int, Failure | None] = field(default_factory=OrderedDict)  # the newest that have no result
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _paused: bool = False

    def __post_init__(self) -> None:
        self._warn_at = _WARN_FACTOR * self.max_failures
        self.staleness.on_abandoned = lambda item: self._resolve(item, None)

    def submit(self, items: Sequence[EpisodeSpec]) -> None:
        for item in items:
            self.staleness.submit(item)
        self.admit()

    def admit(self) -> None:
        while not self._paused and (item := self.staleness.next_to_run()) is not None:
            task = asyncio.create_task(self._run(item), name=f"episode-{item.task_id}")
            self._tasks[item.number] = (item, task)
            task.add_done_callback(partial(self._forget, item.number))

    def _forget(self, number: int, ended: asyncio.Task[None]) -> None:
        """Forget a task, unless its episode runs again already: its result was too old as it ended."""
        if self._tasks[number][1] is ended:
            del self._tasks[number]

    def in_flight(self) -> list[EpisodeSpec]:
        """Return the running episodes of the staleness window."""
        return [item for item, _ in self._tasks.values() if item.number in self.staleness.running]

    def open_numbers(self) -> set[int]:
        """Return the episodes that run, and those whose results have not been taken."""
        state = self.staleness
        return {*state.running, *state.outside, *state.accepted, *self._awaited}

    def expect(self, number: int) -> asyncio.Future[Outcome]:
        """Return a future for the outcome of an episode, for ``take_one`` and ``run_all``."""
        return self._awaited.setdefault(number, asyncio.get_running_loop().create_future())

    def pause(self) -> None:
        """Start no further episode. Running ones continue."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self.admit()

    def set_version(self, version: int) -> None:
        """Set the version, and abort running episodes that are now too stale: their results would be dropped."""
        self.staleness.set_version(version)
        for item, task in list(self._tasks.values()):
            head = self.head_of(item)
            if (
                item.number in self.staleness.running
                and head is not None
                and is_stale(self.staleness.window, head, version)
            ):
                self._abort(item, task)
        self._notify()

    def _abort(self, item: EpisodeSpec, task: asyncio.Task[None]) -> None:
        if not (task.done() or task.cancelling()):
            self._aborted.add(item.number)
            task.cancel()

    async def _run(self, item: EpisodeSpec) -> None:
        try:
            outcome = await self.run(item)
        except BaseException:
            if item.number not in self._aborted:
                self.staleness.cancelled(item)
                raise
            self.staleness.aborted(item)
        else:
            if isinstance(outcome, Failure):
                self.staleness.failed(item, outcome)
                self.on_failure(item, outcome)
            else:
                self.staleness.ended(item, outcome)
                self._warn_of_rejections()
            self._resolve(item, outcome)
        finally:
            self._aborted.discard(item.number)
        self._notify()

    def _warn_of_rejections(self) -> None:
        """Log a warning about slow progress whenever the number of rejections has doubled. Sampling continues, because
        the next prompt may be accepted."""
        rejected = self.staleness.consecutive_rejections
        if not rejected:
            self._warn_at = _WARN_FACTOR * self.max_failures
        elif rejected >= self._warn_at:
            self._warn_at *= 2
            _log.warning(
                "the last %d prompts were all rejected, by the workflow or by dynamic sampling (a group whose answers "
                "have one reward gives no gradient); more are sampled",
                rejected,
            )

    def _resolve(self, item: EpisodeSpec, outcome: Outcome) -> None:
        future = self._awaited.get(item.number)
        if future is not None:
            if not future.done():
                future.set_result(outcome)
            return
        if not isinstance(outcome, Rollout):
            self._ended[item.number] = outcome
        if len(self._ended) > _MAX_ENDS:
            self._ended.popitem(last=False)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.admit()

    async def take(self, count: int, timeout_s: float, *, completed: bool, low_water: int) -> list[Rollout] | None:
        """Return a batch of ``count``; with ``completed``, the accepted ones of ``count`` ended episodes. None if fewer
        than ``low_water`` prompts are pending. Raises RolloutsFailed, TimedOut."""
        ready = self.staleness.take_completed if completed else self.staleness.take
        wanted = f"{count} rollouts"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while (taken := ready(count)) is None:
                    self.admit()
                    self._raise_if_stuck(wanted, waits_for_input=low_water > 0)
                    if len(self.staleness.pending) < low_water:
                        return None
                    await self._changed.wait()
                self.admit()
                return taken
        raise TimedOut(f"no {wanted} within {timeout_s:g} s: {self.status_line()}")

    async def take_one(self, number: int, timeout_s: float) -> Rollout | None:
        """Return the rollout of one episode; None if it was rejected or abandoned. Raises RolloutFailed, TimedOut."""
        if (found := self.staleness.take_one(number)) is not None:
            return found
        if number in self._ended:
            return _result(self._ended.pop(number))
        future = self.expect(number)
        try:
            async with asyncio.timeout(timeout_s):
                outcome = await future
        except TimeoutError as error:
            raise TimedOut(f"no result of the episode within {timeout_s:g} s: {self.status_line()}") from error
        finally:
            self._awaited.pop(number, None)
        return self.staleness.take_one(number) or _result(outcome)

    async def run_all(self, items: Sequence[EpisodeSpec], timeout_s: float | None) -> list[Outcome]:
        """Run episodes outside the staleness window and wait for all. Returns outcomes in the order of ``items``. On a
        timeout the remaining ones are aborted. Raises TimedOut."""
        futures = [self.expect(item.number) for item in items]
        self.submit(items)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait(futures)
        except TimeoutError as error:
            raise TimedOut(f"{len(items)} rollouts took longer than {timeout_s:g} s: {self.status_line()}") from error
        finally:
            self.staleness.withdraw({item.number for item in items})
            for item in items:
                self._awaited.pop(item.number, None)
                if (running := self._tasks.get(item.number)) is not None:
                    self._abort(*running)
            self.admit()
        return [future.result() for future in futures]

    async def run_each(self, items: Iterator[EpisodeSpec], at_once: int) -> None:
        """Run episodes outside the staleness window and wait for all. ``items`` is read as they start: at most
        ``at_once`` are in memory."""

        async def work() -> None:
            for item in items:
                await self.run_all([item], None)

        async with asyncio.TaskGroup() as group:
            for number in range(at_once):
                group.create_task(work(), name=f"episodes-{number}")

    def _raise_if_stuck(self, wanted: str, *, waits_for_input: bool) -> None:
        staleness = self.staleness
        if staleness.consecutive_failures >= self.max_failures:
            failed, staleness.consecutive_failures = staleness.consecutive_failures, 0
            raise RolloutsFailed(f"{failed} episodes failed one after the other", staleness.failures, failed)
        if staleness.consecutive_rejections >= _FAIL_FACTOR * self.max_failures:
            rejected, staleness.consecutive_rejections = staleness.consecutive_rejections, 0
            raise RolloutsFailed(
                f"the last {rejected} prompts were all rejected, by the workflow or by dynamic sampling",
                (),
                hint="a group with equal rewards gives no gradient: look at the rewards, or sample without it",
            )
        if staleness.idle and not waits_for_input:
            raise RolloutsFailed(f"{wanted} cannot be completed: {self.status_line()}", staleness.failures)

    def status_line(self) -> str:
        """Return current and total counts of episodes, for an error message."""
        staleness, counts = self.staleness, self.staleness.counts
        now = f"{len(staleness.running)} running, {len(staleness.accepted)} ready, {len(staleness.pending)} waiting"
        past = f"{counts.rejected} rejected, {counts.failed} failed, {counts.dropped} too old"
        held = ""
        if staleness.in_training and staleness.capacity() == 0 and not staleness.running:
            held = f"; none may start before version {staleness.version + 1}: call set_version"
        return f"{now} ({past}){'; paused' if self._paused else ''}{held}"

    async def close(self) -> None:
        """Cancel the running episodes and wait for them. An episode that is already aborted is not cancelled again,
        which would interrupt the end of its sessions."""
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            if not task.cancelling():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for future in self._awaited.values():
            future.cancel()


def _result(outcome: Outcome) -> Rollout | None:
    if isinstance(outcome, Failure):
        raise RolloutFailed(outcome)
    return outcome
