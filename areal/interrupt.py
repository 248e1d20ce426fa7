"""Handling of Ctrl-C while one of areal's programs imports its modules: one line and status 130 instead of a traceback.

The first module that these programs import; it imports nothing. Other programs are not affected.
"""

from __future__ import annotations

import sys

STATUS = 130
_SET_S = 1.0
TYPE_CHECKING = False  # typing's own costs an import
if TYPE_CHECKING:
    import threading
    from types import TracebackType


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether an interrupt caused the error, directly or where a library has wrapped it in another error."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def set_in_handler(event: threading.Event) -> None:
    """Set an event from a signal handler, in another thread: the handler may run while its own thread holds the event's
    lock in ``wait``, and would deadlock. On return the event is set, except in that case."""
    import _thread
    import time

    _thread.start_new_thread(event.set, ())
    deadline = time.monotonic() + _SET_S
    while not event.is_set() and time.monotonic() < deadline:
        time.sleep(0.001)


def is_ours(words: list[str]) -> bool:
    """Return whether an interpreter with these arguments runs one of areal's programs."""
    module = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    program = module[0].partition(".")[0] if module else words[1:][:1]
    return program == "areal" if module else any(word.rpartition("/")[2] == "areal" for word in program)


def install() -> None:
    if not is_ours(sys.orig_argv):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not is_interrupt(error):
            before(kind, error, trace)
            return
        import os

        try:
            sys.stdout.flush()
            sys.stderr.write("interrupted\n")
            sys.stderr.flush()
        finally:
            os._exit(STATUS)

    sys.excepthook = hook
