"""How a plain ``python driver.py`` tells what its user can mend: one line, a hint, and the exit status of its kind, as
the command line and jobs do; an interrupt is one line. Anything else keeps its traceback."""

from __future__ import annotations

import sys
from types import TracebackType

from areal.errors import ArealError
from areal.interrupt import STATUS, is_interrupt


def told(error: ArealError) -> str:
    return f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else "")


def tell_plainly() -> None:
    """For this process, where nobody else has said what happens to uncaught errors."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _uncaught


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if is_interrupt(error):
        sys.stderr.write("interrupted\n")
        sys.exit(STATUS)
    if not isinstance(error, ArealError):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(told(error))
    sys.exit(error.exit_code)  # the interpreter ends with it
