"""Episodes as asyncio tasks on one loop, started as the ledger allows. Not thread-safe: the controller's business."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

from areal.client.rollouts.admission import is_stale
from areal.client.rollouts.episodes import EpisodeFailed, Episodes, Given
from areal.client.rollouts.ledger import Failure, Item, Ledger, Rollout
from areal.errors import ArealError, TimedOut

_REMEMBERED_ENDS = 4096
_REFUSED = 4  # times as many as may fail in a row are told
_ALL_REFUSED = 64  # times as many are the end

_HINT = "with rollout.dump_to_file, trajectories/failures.jsonl has them all; in a driver, RolloutController.failures()"
_log = logging.getLogger(__name__)


def said(error: BaseException) -> str:
    """In a line."""
    return str(error) if isinstance(error, ArealError) else f"{type(error).__name__}: {error}"


class RolloutsFailed(ArealError):
    """Episodes fail, or are refused, one after the other, or no more can come. ``failures``: the last ones; ``streak``:
    how many of them belong together."""

    def __init__(self, message: str, failures: Sequence[Failure], streak: int = 0, hint: str | None = None) -> None:
        first = failures[-min(streak or len(failures), len(failures))] if failures else None
        super().__init__(
            message
            + (f"; the first, {first.task_id}, by fault of the {first.blame}: {said(first.error)}" if first else ""),
            hint=hint or (_HINT if failures else None),
        )
        self.failures = tuple(failures)


class Executor:
    """``most_failures``: so many in a row, and whoever waits is told. ``on_failure`` hears of each."""

    def __init__(
        self,
        ledger: Ledger,
        episodes: Episodes,
        most_failures: int,
        on_failure: Callable[[Item, Failure], None] = lambda item, failure: None,
    ) -> None:
        self.ledger = ledger
        self._episodes = episodes
        self._on_failure = on_failure
        self._most_failures = most_failures
        self._say_at = _REFUSED * most_failures
        self._tasks: dict[int, tuple[Item, asyncio.Task[None]]] = {}
        self._awaited: dict[int, asyncio.Future[Rollout | None]] = {}
        self._overtaken: set[int] = set()
        self._ended: OrderedDict[int, EpisodeFailed | None] = OrderedDict()  # without a result, the last ones
        self._changed = asyncio.Event()
        self._paused = False
        self._finished = 0

    def submit(self, items: Sequence[Item]) -> None:
        for item in items:
            self.ledger.submit(item)
        self.admit()

    def admit(self) -> None:
        while not self._paused and (item := self.ledger.next_to_run()) is not None:
            task = asyncio.create_task(self._run(item), name=f"episode-{item.task_id}")
            self._tasks[item.number] = (item, task)
            task.add_done_callback(lambda _, number=item.number: self._tasks.pop(number))  # type: ignore[misc]

    def in_flight(self) -> list[Item]:
        """Those that run and are trained on."""
        return [item for item, _ in self._tasks.values() if item.number in self.ledger.running]

    def expect(self, number: int) -> None:
        """The result of this episode will be asked for by its number."""
        self._awaited.setdefault(number, asyncio.get_running_loop().create_future())

    def pause(self) -> None:
        """No episode starts; those that run go on."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self.admit()

    def set_version(self, version: int) -> None:
        """Episodes that are too old from now on are given up: they would only be dropped in the end."""
        self.ledger.set_version(version)
        for item, task in list(self._tasks.values()):
            head = self._episodes.head_of(item)
            if item.number in self.ledger.running and head is not None and is_stale(self.ledger.window, head, version):
                self._overtaken.add(item.number)
                task.cancel()
        self._note()

    async def _run(self, item: Item) -> None:
        try:
            given = await self._episodes.run(item)
        except EpisodeFailed as error:
            self.ledger.failed(item, error.failure)
            self._on_failure(item, error.failure)
            self._settle(item, error)
        except BaseException:
            if item.number not in self._overtaken:
                self.ledger.cancelled(item)
                raise
            self.ledger.overtaken(item)
        else:
            rollout = self._rollout(item, given)
            self.ledger.ended(item, rollout)
            self._say_of_refusals()
            self._settle(item, rollout)
        finally:
            self._overtaken.discard(item.number)
        self._note()

    def _say_of_refusals(self) -> None:
        """Sampling goes on, for the next prompt may do; but whoever waits is to know what for. Each time twice as
        late, until it is hopeless."""
        refused = self.ledger.rejecting
        if not refused:
            self._say_at = _REFUSED * self._most_failures
        elif refused >= self._say_at:
            self._say_at *= 2
            _log.warning(
                "the last %d prompts were all refused, by the workflow or by dynamic sampling (a group whose answers "
                "have one reward teaches nothing); more are sampled",
                refused,
            )

    def _rollout(self, item: Item, given: Given) -> Rollout | None:
        if given.trajectory is None:
            return None
        self._finished += 1
        return Rollout(
            item,
            given.trajectory,
            given.head_version,
            given.tail_version,
            self._finished,
            given.attempts,
            given.seconds,
        )

    def _settle(self, item: Item, outcome: Rollout | EpisodeFailed | None) -> None:
        future = self._awaited.get(item.number)
        if future is None:
            if not isinstance(outcome, Rollout):
                self._ended[item.number] = outcome
            if len(self._ended) > _REMEMBERED_ENDS:
                self._ended.popitem(last=False)
        elif future.done():
            return
        elif isinstance(outcome, EpisodeFailed):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _note(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.admit()

    async def take(self, count: int, timeout_s: float, *, tried: bool, low_water: int) -> list[Rollout] | None:
        """A batch; with ``tried``, what came of ``count`` episodes. None where fewer than ``low_water`` prompts wait:
        more are needed. Raises RolloutsFailed, TimedOut."""
        ready = self.ledger.take_tried if tried else self.ledger.take
        return await self._until(lambda: ready(count), f"{count} rollouts", timeout_s, low_water)

    async def take_one(self, number: int, timeout_s: float) -> Rollout | None:
        """That of one episode; None where it was rejected. Raises EpisodeFailed, TimedOut."""
        if (found := self.ledger.take_one(number)) is not None:
            return found
        if number in self._ended:
            _raise(self._ended.pop(number))
            return None
        future = self._awaited.setdefault(number, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(timeout_s):
                rollout = await future
        except TimeoutError as error:
            raise TimedOut(f"no result of the episode within {timeout_s:g} s: {self.sentence()}") from error
        finally:
            self._awaited.pop(number, None)
        return self.ledger.take_one(number) or rollout

    async def run_all(self, items: Sequence[Item], timeout_s: float) -> list[Rollout | EpisodeFailed | None]:
        """Episodes apart, awaited as a whole, in the order of ``items``."""
        loop = asyncio.get_running_loop()
        futures = [self._awaited.setdefault(item.number, loop.create_future()) for item in items]
        self.submit(items)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait(futures)
        except TimeoutError as error:
            raise TimedOut(f"{len(items)} rollouts took longer than {timeout_s:g} s: {self.sentence()}") from error
        finally:
            for item in items:
                self._awaited.pop(item.number, None)
        return [future.exception() or future.result() for future in futures]  # type: ignore[misc]

    async def _until(
        self, ready: Callable[[], list[Rollout] | None], what: str, timeout_s: float, low_water: int
    ) -> list[Rollout] | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while (taken := ready()) is None:
                    self.admit()
                    self._refuse_hopeless(what, waits_for_input=low_water > 0)
                    if len(self.ledger.pending) < low_water:
                        return None
                    await self._changed.wait()
                self.admit()
                return taken
        raise TimedOut(f"no {what} within {timeout_s:g} s: {self.sentence()}")

    def _refuse_hopeless(self, what: str, *, waits_for_input: bool) -> None:
        ledger = self.ledger
        if ledger.failing >= self._most_failures:
            failing, ledger.failing = ledger.failing, 0
            raise RolloutsFailed(f"{failing} episodes failed one after the other", ledger.failures, failing)
        if ledger.rejecting >= _ALL_REFUSED * self._most_failures:
            refused, ledger.rejecting = ledger.rejecting, 0
            raise RolloutsFailed(
                f"the last {refused} prompts were all refused, by the workflow or by dynamic sampling",
                (),
                hint="a group whose answers have one reward teaches nothing: look at the rewards, or sample without it",
            )
        if ledger.idle and not waits_for_input:
            raise RolloutsFailed(f"{what} cannot come: {self.sentence()}", ledger.failures)

    def sentence(self) -> str:
        """What is going on, for an error or a log line."""
        ledger, counts = self.ledger, self.ledger.counts
        now = f"{len(ledger.running)} running, {len(ledger.accepted)} ready, {len(ledger.pending)} waiting"
        past = f"{counts.rejected} rejected, {counts.failed} failed, {counts.dropped} too old"
        held = ""
        if ledger.in_training and ledger.capacity() == 0 and not ledger.running:
            held = f"; none may start before version {ledger.version + 1}: call set_version"
        return f"{now} ({past}){'; paused' if self._paused else ''}{held}"

    async def close(self) -> None:
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for future in self._awaited.values():
            future.cancel()


def _raise(end: EpisodeFailed | None) -> None:
    if end is not None:
        raise end
