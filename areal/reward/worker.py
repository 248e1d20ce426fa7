"""The process that runs reward functions: reads jobs from stdin, writes results to stdout. Functions print to stderr.

Only a pool starts it, as ``python -m areal.reward.worker``. It exits with its parent, and at the end of its input.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, BinaryIO

from areal.errors import where_raised
from areal.reward.frames import HEAD, Done, FunctionTarget, RewardJob, pack, unpack

_LONGEST_TEXT = 1000  # characters of an error
_PR_SET_PDEATHSIG = 1


def main() -> None:
    with contextlib.suppress(OSError, AttributeError):  # not on Linux: there the end of the input ends the process
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    jobs = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a reward that reads it, as breakpoint() does, gets no jobs
    given = unpack(_frame(jobs) or pack([])[HEAD:])  # the parent's, in its order
    sys.path[:] = [*given, *(path for path in sys.path if path not in given)]
    while (data := _frame(jobs)) is not None:
        out.write(_answer(data))
        out.flush()


def _frame(stream: BinaryIO) -> bytes | None:
    head = stream.read(HEAD)
    return stream.read(int.from_bytes(head, "big")) if len(head) == HEAD else None


def _answer(data: bytes) -> bytes:
    """Run a job and return its packed result, which carries any exception of the reward function."""
    try:
        job: RewardJob = unpack(data)
        function = _function(job.target)
        return pack(Done([_done(function, args, kwargs) for args, kwargs in job.calls]))
    except BaseException as error:  # noqa: BLE001 - the process boundary of user code
        return pack(Done(error=_error_text(error)))


def _done(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, object]) -> Done:
    began = time.perf_counter()
    try:
        value = function(*args, **kwargs)
        if isinstance(value, Awaitable):
            import asyncio  # imported here: few rewards need it, and it takes as long as all other imports together

            value = asyncio.run(_awaited(value))
        if type(value) not in (float, int, bool, str):
            _require_picklable(value)
    except BaseException as error:  # noqa: BLE001 - the process boundary of user code
        return Done(error=_error_text(error))
    return Done(value, seconds=time.perf_counter() - began)


def _require_picklable(value: Any) -> None:
    """Raise TypeError for a result that cannot be passed on, such as a generator: it must not fail the whole job."""
    try:
        pack(value)
    except Exception as error:  # noqa: BLE001 - pickling calls the methods of the value
        raise TypeError(f"its result {value!r:.200} cannot be passed on: {error}") from None


def _error_text(error: BaseException) -> str:
    """Return the error with its place in the user's code: ``ValueError: no such unit (rewards.py:12, in parse)``."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return (text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}...") + where_raised(error, __file__)


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


@lru_cache(maxsize=32)  # bounded: an object that changes is pickled anew, as another target
def _function(target: FunctionTarget) -> Callable[..., Any]:
    if target.file is not None:
        _become_main(target.file)
    if target.copy is not None:
        return unpack(target.copy)
    found: Any = sys.modules["__main__"] if target.file is not None else importlib.import_module(target.module)
    for part in target.qualname.split("."):
        found = getattr(found, part)
    return found if target.argument is None else found(target.argument)


@cache
def _become_main(file: str) -> None:
    """Load the parent's main script as ``__main__``, where pickles look up its names, without what that name guards."""
    main = ModuleType("__main__")
    main.__dict__.update(runpy.run_path(file, run_name="__areal_main__"))
    sys.modules["__main__"] = main


if __name__ == "__main__":
    main()
