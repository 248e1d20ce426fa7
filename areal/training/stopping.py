"""SIGTERM as a stop request, so that a run can finish its step and write a checkpoint.

Outside ``deferred`` a request interrupts immediately. Inside, the run polls ``requested``; waits that may be
interrupted are ``interruptible``. A second request ends the process. The state is global to the process, as signals
are."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from areal.dataclasses import dataclass


class Stopped(KeyboardInterrupt):
    """A stop was requested."""


@dataclass
class _Requests:
    count: int = 0
    interrupts: bool = True


_requests = _Requests()


def on_sigterm() -> None:
    """Handle SIGTERM as a stop request. Call on the main thread."""
    signal.signal(signal.SIGTERM, _request)


def requested() -> bool:
    return _requests.count > 0


def _request(number: int, frame: object) -> None:
    _requests.count += 1
    if _requests.count > 1:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    if _requests.interrupts:
        _requests.interrupts = False  # cleanup is not interrupted
        raise Stopped


@contextmanager
def deferred() -> Iterator[None]:
    """Let the block finish although a stop is requested."""
    before, _requests.interrupts = _requests.interrupts, False
    try:
        yield
    finally:
        _requests.interrupts = before


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Stopped when a stop is requested in the block, or was requested before."""
    before, _requests.interrupts = _requests.interrupts, True
    try:
        if requested():
            raise Stopped
        yield
    finally:
        _requests.interrupts = before
