"""SIGTERM as a request: a run ends where it is whole, so that it can write down where it stands.

Outside ``deferred`` a request is an interrupt at once. Inside it waits to be asked for, but where the run only waits
itself (``interruptible``). A second request ends the process there and then. Signals are the process's: so is this.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class Stopped(KeyboardInterrupt):
    """The run was told to stop."""


@dataclass
class _Requests:
    count: int = 0
    interrupts: bool = True


_requests = _Requests()


def on_sigterm() -> None:
    """Take SIGTERM as a request from now on. Runs on the main thread."""
    signal.signal(signal.SIGTERM, _request)


def requested() -> bool:
    return _requests.count > 0


def _request(number: int, frame: object) -> None:
    _requests.count += 1
    if _requests.count > 1:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    if _requests.interrupts:
        _requests.interrupts = False  # what cleans up is not interrupted
        raise Stopped


@contextmanager
def deferred() -> Iterator[None]:
    before, _requests.interrupts = _requests.interrupts, False
    try:
        yield
    finally:
        _requests.interrupts = before


@contextmanager
def interruptible() -> Iterator[None]:
    """Raises Stopped, also for a request that came before."""
    before, _requests.interrupts = _requests.interrupts, True
    try:
        if requested():
            raise Stopped
        yield
    finally:
        _requests.interrupts = before
