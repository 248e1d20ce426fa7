"""Ctrl-C while the world is being changed: the first finishes the op at hand, the second leaves at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_INTERRUPTED = 130
_NOTICE = "\ninterrupted: {doing}; again to leave at once (nothing is lost either way)\n"


@contextmanager
def graceful(interrupted: threading.Event, doing: str = "finishing the operation at hand") -> Iterator[None]:
    """Within, SIGINT and SIGTERM set ``interrupted``; a second one ends the process with 130.

    Leaving at once is safe: every operation is journaled before it is done, and the next command finishes or rolls
    back what it finds.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            os._exit(EXIT_INTERRUPTED)
        interrupted.set()
        os.write(sys.stderr.fileno(), _NOTICE.format(doing=doing).encode())

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
