"""Text on a terminal. Text from other sources must not control the terminal; text of areal may use colours and move the
cursor.

Models, engines, gateways, logs, names and error bodies contain text from other sources. ``safe`` replaces each
character that a terminal would interpret or hide by its escape. areal's own text uses the mark ``ESCAPE`` for the
escape character; no other text can contain this mark. A ``Screen``, through which everything is written, escapes the
rest and replaces the mark by the escape character.
"""

from __future__ import annotations

import errno
import os
import re
import select
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

# U+FDD0 and U+FDD1 stand for no character, and are none of which a text is made.
ESCAPE = f"\ufdd0{os.urandom(8).hex()}\ufdd1"

_KEPT = frozenset("\n\t\u200c\u200d")  # joiners: Persian words and emoji are made with them
_HIDDEN = ("Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn")
_OBEYED_ASCII = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def safe(text: str) -> str:
    """Return the text with every character escaped that a terminal would interpret: escapes, bells, direction
    overrides, line ends that hide text."""
    if text.isascii():
        return _OBEYED_ASCII.sub(lambda found: _spelled(found[0]), text)
    return "".join(
        _spelled(each) if unicodedata.category(each) in _HIDDEN and each not in _KEPT else each for each in text
    )


def without_colours(text: str) -> str:
    """Return a log line without the colours of its program."""
    return _COLOUR.sub("", text)


def spelled(text: str, escape: str = ESCAPE) -> str:
    """Return the text with foreign characters escaped, and with areal's mark kept, or replaced by ``escape``."""
    return escape.join(safe(part.replace("\r\n", "\n")) for part in text.split(ESCAPE))


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{{{code:x}}}"


def fancy(stream: Any) -> bool:
    """Return whether ``stream`` may get colours and redrawn lines (https://no-color.org)."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def can_move(stream: Any) -> bool:
    """Return whether ``stream`` is a terminal whose whole screen can be redrawn, with or without colours."""
    return bool(stream.isatty()) and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def style(text: str, **look: Any) -> str:
    """Return ``text`` in a colour, for a ``Screen``."""
    import click

    return click.style(safe(text), **look).replace("\x1b", ESCAPE)


class OutputLost(Exception):
    """Standard output cannot be written, although a reader may wait for it. ``reader_left``: it is a pipe whose reader
    has exited."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        self.reader_left = isinstance(error, BrokenPipeError)


@contextmanager
def guarded() -> Iterator[None]:
    """Write through a ``Screen`` in the block: standard error always, standard output if it is a terminal. Output to
    standard error is dropped once its reader has exited."""
    before = sys.stdout, sys.stderr
    sys.stderr = cast(TextIO, Screen(sys.stderr, optional=True))
    sys.stdout = cast(TextIO, (Screen if sys.stdout.isatty() else Outlet)(sys.stdout))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def outlive_readers() -> None:
    """Also drop output to standard output once its reader has exited, for commands whose effect matters more than their
    output."""
    if isinstance(sys.stdout, Outlet):
        sys.stdout.optional = True


def pause(seconds: float) -> None:
    """Sleep between two looks. Raises OutputLost at once when the reader of standard output exits, because the next
    output may be hours away; not for optional output."""
    if not isinstance(sys.stdout, Outlet) or sys.stdout.optional:
        return time.sleep(seconds)
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)  # only errors and hangups
    if reader.poll(seconds * 1000):
        raise OutputLost(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)))
    return None


class Outlet:
    """A stream whose reader may exit. All methods except writing are those of the stream. ``optional``: output that
    cannot be written is dropped; otherwise OutputLost is raised."""

    def __init__(self, stream: TextIO, *, optional: bool = False) -> None:
        self._stream = stream
        self.optional = optional

    def write(self, text: str) -> int:
        if text != "":  # click writes nothing to learn what kind of stream it is
            self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            self._discard()
            if not self.optional:
                raise OutputLost(error) from error

    def _discard(self) -> None:
        """Redirect buffered and later output to /dev/null, so that the interpreter's last flush does not fail."""
        with suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Screen(Outlet):
    """A stream for people."""

    def write(self, text: str) -> int:
        super().write(spelled(text, "\x1b"))
        return len(text)
