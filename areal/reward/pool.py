"""A pool of processes that run reward functions, with a deadline for each job.

A reward function is user code: it may hang, crash, leak memory, or hold the interpreter lock for seconds. A separate
process can be killed, and never blocks the event loop that runs the episodes. One that misses a deadline is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import itertools
import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from areal.dataclasses import dataclass
from areal.errors import where_raised
from areal.installation import module_argv
from areal.reward.frames import (
    HEAD,
    Call,
    Done,
    FunctionTarget,
    RewardError,
    RewardJob,
    RewardProcessLost,
    RewardRaised,
    RewardTimeout,
    pack,
    unpack,
)
from areal.reward.functions import Parameters, float_of, is_async, target_of
from areal.wire.bodies import LARGEST_F32

_log = logging.getLogger(__name__)
T = TypeVar("T")
_PATIENCE_S = 5.0
_LOAD_S = 120.0
_QUICK_S = 0.02  # upper limit of the expected duration of a job with several calls
_MAX_MISSES = 8  # after so many consecutive misses there are no retries, and a miss fails all waiting calls too
_STOP_S = 1.0
_FORGETTING = 0.99  # decay of the longest duration, per call
_WORKERS = 2


class _RewardWorker:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._in, self._out = process.stdin, process.stdout
        self._loaded: set[FunctionTarget] = set()

    @classmethod
    async def start(cls) -> _RewardWorker:
        pipe = asyncio.subprocess.PIPE
        argv = module_argv("areal.reward.worker")
        worker = cls(await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe))
        worker._in.write(pack([path for path in sys.path if path]))
        return worker

    async def load(self, target: FunctionTarget) -> None:
        """Import the function in the process, once. Raises RewardError."""
        if target in self._loaded:
            return
        try:
            async with asyncio.timeout(_LOAD_S):
                done = await self.run(pack(RewardJob(target)))
        except TimeoutError as error:
            raise RewardTimeout(f"{target.qualname}: its module was not imported within {_LOAD_S:g} s") from error
        if done.error is not None:
            raise RewardRaised(f"{target.qualname} cannot be imported: {done.error}")
        self._loaded.add(target)

    async def run(self, job: bytes) -> Done:
        try:
            self._in.write(job)
            await self._in.drain()
            head = await self._out.readexactly(HEAD)
            done: Done = unpack(await self._out.readexactly(int.from_bytes(head, "big")))
        except (asyncio.IncompleteReadError, ConnectionError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not self._in.is_closing():  # uvloop's error for a closed pipe
                raise
            raise RewardProcessLost(f"the process that computed the reward ended{await self._status()}") from error
        return done

    def is_alive(self) -> bool:
        """Return whether the process runs, according to the kernel: the event loop learns of an exit only later."""
        if self._process.returncode is not None or self._in.is_closing():
            return False
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:  # reaped already
            return False

    async def _status(self) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                return f" with status {await self._process.wait()}"
        return ""

    async def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await self._process.wait()
        self._in.close()


class RewardPool:
    """Up to ``workers`` processes, started on demand. A pool belongs to one event loop."""

    def __init__(self, workers: int) -> None:
        self._slots = asyncio.Semaphore(workers)
        self._idle: list[_RewardWorker] = []
        self._all: set[_RewardWorker] = set()

    async def run(
        self, target: FunctionTarget, calls: Sequence[Call], timeout_s: float, before: Callable[[], None] = lambda: None
    ) -> list[Done]:
        """Call a function in one process. An exception of the function is returned in the result of its call, any other
        failure raises RewardError. The deadline starts when a process is free and has imported the function. ``before``
        is called when a process is free, and may raise."""
        try:
            frame = pack(RewardJob(target, tuple(calls)))
        except (TypeError, AttributeError, ValueError) as error:
            raise RewardRaised(f"{target.qualname}: its arguments cannot go to another process: {error}") from error
        async with self._slots:
            before()
            worker = await self._free_worker()
            try:
                await worker.load(target)
                async with asyncio.timeout(timeout_s):
                    done = await worker.run(frame)
            except BaseException as error:
                await self._discard(worker)
                if isinstance(error, TimeoutError):
                    raise RewardTimeout(f"{target.qualname}: no reward within {timeout_s:g} s") from error
                raise
            self._idle.append(worker)
        if done.error is not None:
            raise RewardRaised(f"{target.qualname} raised: {done.error}")
        results: list[Done] = done.value
        return results

    async def _free_worker(self) -> _RewardWorker:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive():
                return worker
            await self._discard(worker)  # it was killed while idle, which is no failure of this job
        worker = await _RewardWorker.start()
        self._all.add(worker)
        return worker

    async def _discard(self, worker: _RewardWorker) -> None:
        self._all.discard(worker)
        await asyncio.shield(asyncio.create_task(worker.stop(), name="stop-reward-worker"))

    async def close(self) -> None:
        workers, self._all, self._idle = list(self._all), set(), []
        await asyncio.gather(*(worker.stop() for worker in workers))


_Pools = dict[int | None, RewardPool]
_POOLS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Pools] = weakref.WeakKeyDictionary()


def open_pool_of_this_loop(workers: int) -> None:
    """Give rewards of this loop without ``max_workers`` a pool of ``workers`` processes, unless they have one."""
    _POOLS.setdefault(asyncio.get_running_loop(), {}).setdefault(None, RewardPool(workers))


def _pool_of_this_loop(workers: int | None) -> RewardPool:
    pools = _POOLS.setdefault(asyncio.get_running_loop(), {})
    if workers not in pools:
        pools[workers] = RewardPool(workers or _WORKERS)
    return pools[workers]


async def close_pools_of_this_loop() -> None:
    for pool in _POOLS.pop(asyncio.get_running_loop(), {}).values():
        await pool.close()


@dataclass(frozen=True)
class _PendingRewards:
    calls: Sequence[Call]
    done: asyncio.Future[list[Done]]


def jobs_of(counts: Sequence[int], seconds: float) -> list[list[int]]:
    """Group pending rewards into jobs; returns their indices by job. ``counts``: number of calls of each, ``seconds``:
    expected duration of a call. Neighbors share a job while its expected duration is at most ``_QUICK_S``."""
    jobs: list[list[int]] = []
    calls = 0
    for place, count in enumerate(counts):
        if jobs and (calls + count) * seconds <= _QUICK_S:
            jobs[-1].append(place)
            calls += count
        else:
            jobs.append([place])
            calls = count
    return jobs


class AsyncRewardWrapper:
    """A reward function as a coroutine: ``await wrapper(prompt, completions, prompt_ids, completion_ids, **data)``.

    Any callable. A function of a module runs in the pool, and so does an object that can be pickled (a bound method, a
    partial, an instance with ``__call__``): a copy of it as it is at the call, so what the call changes in it is lost.
    What is async runs on this event loop, and what can go to no other process (a lambda, a closure, an object with a
    lock) on a thread of this one. A deadline missed, or a process lost, is tried again up to ``max_retries`` times.
    Rewards with one ``max_workers`` share a pool of so many processes, and those without any share another one. Raises
    RewardError, and UsageFault for other arguments; the value is a finite float.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str,
        timeout_seconds: float = 15.0,
        max_workers: int | None = None,
        max_retries: int = 3,
    ) -> None:
        if not isinstance(reward_fn, str) and (not callable(reward_fn) or inspect.isclass(reward_fn)):
            raise ValueError(f"a reward is a function, an object to call, or the name of one, not {reward_fn!r}")
        self._function = reward_fn
        self._parameters = Parameters.of(reward_fn)
        self._timeout_s = timeout_seconds
        self._local = self._local_call()
        self._workers = max_workers
        self._attempts = max(1, 1 + max_retries)
        self._missed = 0  # missed deadlines and lost processes since the last reward
        self._given_up: RewardError | None = None  # the newest such error, after _MAX_MISSES
        self._longest_s = math.inf  # longest recent duration of the function
        self._waiting: list[_PendingRewards] = []
        self._sent: set[asyncio.Task[None]] = set()

    def _local_call(self) -> Callable[..., Awaitable[Any]] | None:
        """Return the coroutine function to call in this process; None for a function that runs in the pool."""
        function = self._function
        if isinstance(function, str):
            return None
        if is_async(function):
            return function
        try:
            target_of(function)
        except ValueError as error:
            _log.warning("%s: it runs on a thread of this process, which it can hold up", error)
            return partial(_on_a_thread, function, self._timeout_s)
        return None

    async def __call__(self, *args: Any, **kwargs: Any) -> float:
        self._parameters.check(args, kwargs)
        for attempt in range(1, self._attempts + 1):
            try:
                value = await self._once(args, kwargs)
            except (RewardTimeout, RewardProcessLost) as error:
                if error is self._given_up:  # the error of another call
                    raise
                self._missed += 1
                _log.warning("%s (attempt %d of %d)", error.message, attempt, self._attempts)
                if self._missed >= _MAX_MISSES:
                    self._given_up = error
                if attempt == self._attempts or self._given_up is error:
                    raise
            else:
                self._missed, self._given_up = 0, None
                return number(value)
        raise AssertionError("unreachable")

    async def each(self, calls: Sequence[Call]) -> list[float | Exception]:
        """Return the reward of every ``(args, kwargs)``, or what kept it. A function that takes no time to speak of is
        called for all in one job, also for those of others at the same moment: sending costs more than the rewards."""
        for args, kwargs in calls:
            self._parameters.check(args, kwargs)
        if self._local is None and self._longest_s * len(calls) <= _QUICK_S:
            with contextlib.suppress(RewardTimeout, RewardProcessLost):  # one call may be at fault: retry each alone
                loop = asyncio.get_running_loop()
                pending = _PendingRewards(calls, loop.create_future())
                self._waiting.append(pending)
                if len(self._waiting) == 1:
                    loop.call_soon(self._send)
                return [self._outcome(one) for one in await pending.done]
        tasks = [
            asyncio.create_task(self(*args, **kwargs), name=f"reward-{number}")
            for number, (args, kwargs) in enumerate(calls)
        ]
        try:
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for task in tasks:
                task.cancel()
        return [_or_raise(end) for end in ends]

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for part in jobs_of([len(pending.calls) for pending in waiting], self._longest_s):
            task = asyncio.create_task(self._job([waiting[place] for place in part]), name=f"rewards-{len(part)}")
            self._sent.add(task)
            task.add_done_callback(self._sent.discard)

    async def _job(self, part: Sequence[_PendingRewards]) -> None:
        try:
            ends = iter(await self._run([call for pending in part for call in pending.calls]))
        except Exception as error:  # noqa: BLE001 (each waiter gets it)
            for pending in part:
                if not pending.done.done():
                    pending.done.set_exception(error)
            return
        for pending in part:
            mine = list(itertools.islice(ends, len(pending.calls)))
            if not pending.done.done():
                pending.done.set_result(mine)

    def _outcome(self, done: Done) -> float | Exception:
        try:
            return number(self._value(done))
        except RewardError as error:
            return error

    async def _once(self, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        if self._local is None:
            (done,) = await self._run([(args, kwargs)])
            return self._value(done)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._local(*args, **kwargs)
        except TimeoutError as error:
            raise RewardTimeout(f"{self._parameters.name}: no reward within {self._timeout_s:g} s") from error
        except RewardError:
            raise
        except (Exception, SystemExit) as error:  # sys.exit() must not end this process
            text = f"{type(error).__name__}: {error}{where_raised(error)}"
            raise RewardRaised(f"{self._parameters.name} raised: {text}") from error

    def _target(self) -> FunctionTarget:
        """Return the target of the function. An object is pickled in its current state."""
        try:
            return target_of(self._function)
        except ValueError as error:  # the object could be pickled when the wrapper was created
            raise RewardRaised(str(error)) from error

    async def _run(self, calls: Sequence[Call]) -> list[Done]:
        before = self._given_up

        def still_wanted() -> None:
            if self._given_up is not None and self._given_up is not before:
                raise self._given_up

        return await _pool_of_this_loop(self._workers).run(self._target(), calls, self._timeout_s, still_wanted)

    def _value(self, done: Done) -> Any:
        if done.error is not None:
            raise RewardRaised(f"{self._parameters.name} raised: {done.error}")
        kept = 0.0 if self._longest_s == math.inf else _FORGETTING * self._longest_s
        self._longest_s = max(done.seconds, kept)
        return done.value


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


async def _on_a_thread(function: Callable[..., Any], timeout_s: float, *args: Any, **kwargs: Any) -> Any:
    value = await asyncio.to_thread(call_within, timeout_s, partial(function, *args, **kwargs))
    return await value if inspect.isawaitable(value) else value


def _or_raise(end: float | BaseException) -> float | Exception:
    if isinstance(end, BaseException) and not isinstance(end, Exception):
        raise end
    return end


def number(value: Any) -> float:
    """Return ``value`` as a float. Raises RewardRaised if it is not a number, or not finite in a row's float32."""
    try:
        found = float_of(value)
    except OverflowError:
        found = math.inf
    except (TypeError, ValueError) as error:
        raise RewardRaised(f"a reward must be a number, not {value!r}") from error
    if not abs(found) <= LARGEST_F32:  # nor NaN
        raise RewardRaised(f"a reward must be finite, within the range of float32, not {found}")
    return found


__all__ = [
    "AsyncRewardWrapper",
    "RewardError",
    "RewardPool",
    "close_pools_of_this_loop",
    "number",
    "open_pool_of_this_loop",
]
