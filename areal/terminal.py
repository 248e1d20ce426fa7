"""Text on a terminal: that of others is shown and never obeyed, ours may colour and move the cursor.

Models, engines, gateways, logs, names and error bodies hold what others wrote. ``safe`` spells each character that a
terminal would obey or hide. Text of ours has ``ESCAPE`` in the place of the escape character, a mark that nobody else
can know; a ``Screen``, through which everything is written, spells the rest and turns the mark into the real one.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

# U+FDD0 and U+FDD1 stand for no character, and are none of which a text is made.
ESCAPE = f"\ufdd0{os.urandom(8).hex()}\ufdd1"

_KEPT = frozenset("\n\t\u200c\u200d")  # joiners: Persian words and emoji are made with them
_HIDDEN = ("Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn")
_OBEYED_ASCII = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def safe(text: str) -> str:
    """The text with every character spelled out that a terminal would obey: escapes, bells, overrides of direction,
    line ends that hide."""
    if text.isascii():
        return _OBEYED_ASCII.sub(lambda found: _spelled(found[0]), text)
    return "".join(
        _spelled(each) if unicodedata.category(each) in _HIDDEN and each not in _KEPT else each for each in text
    )


def without_colours(text: str) -> str:
    """A line of a log without the colours that its program gave it."""
    return _COLOUR.sub("", text)


def spelled(text: str, escape: str = ESCAPE) -> str:
    """The text of others spelled, the mark of ours kept, or turned into ``escape``."""
    return escape.join(safe(part.replace("\r\n", "\n")) for part in text.split(ESCAPE))


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{{{code:x}}}"


def fancy(stream: Any) -> bool:
    """Whether colour and moving lines are welcome on ``stream`` (https://no-color.org)."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def style(text: str, **look: Any) -> str:
    """``text`` in a colour, for a ``Screen``."""
    import click

    return click.style(safe(text), **look).replace("\x1b", ESCAPE)


@contextmanager
def guarded() -> Iterator[None]:
    """Within, people read through a ``Screen``: standard error always, standard output where it is a terminal."""
    before = sys.stdout, sys.stderr
    sys.stderr = cast(TextIO, Screen(sys.stderr))
    if sys.stdout.isatty():
        sys.stdout = cast(TextIO, Screen(sys.stdout))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class Screen:
    """A stream that people read. Everything but ``write`` is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(spelled(text, "\x1b"))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
