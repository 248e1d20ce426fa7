"""Text that comes in pieces, read as if it were all there.

A parser is a generator over a ``Source``: it reads with ``yield from`` and is suspended wherever it needs text that has
not come yet. It decides by what it reads only, never by where a piece ended, so its outcome does not depend on how the
text was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar

_T = TypeVar("_T")

Steps = Generator[None, None, _T]
"""A reading that may be suspended; its value is what was read."""

OnText = Callable[[str], None]


class Extent(Protocol):
    """Finds where something ends that starts at the source's place."""

    def feed(self, text: str) -> int | None:
        """How many characters of ``text`` still belong to it; None: all, and there may be more."""
        ...


class _Run:
    """The extent of the characters that ``belongs`` holds for."""

    def __init__(self, belongs: Callable[[str], bool]) -> None:
        self._belongs = belongs

    def feed(self, text: str) -> int | None:
        return next((position for position, char in enumerate(text) if not self._belongs(char)), None)


def discard(text: str) -> None:
    """For text that is markup and nothing else."""


class Source:
    """``feed`` what came; a parser reads on from there."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self._ended = False

    def feed(self, text: str) -> None:
        keep = self._at if self._mark is None else self._mark
        self._text = self._text[keep:] + text
        self._at -= keep
        if self._mark is not None:
            self._mark = 0

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True

    def mark(self) -> None:
        """Remember this place, so that what is read from here on can be had again."""
        self._mark = self._at

    def since_mark(self) -> str:
        """The text from the mark on, as it was written; the mark is forgotten."""
        assert self._mark is not None
        text, self._mark = self._text[self._mark : self._at], None
        return text

    def forget_mark(self) -> None:
        self._mark = None

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        while self._at >= len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def accept(self, literal: str) -> Steps[bool]:
        """Pass ``literal`` if it is what comes next."""
        while True:
            ahead = self._text[self._at : self._at + len(literal)]
            if ahead == literal:
                self._at += len(literal)
                return True
            if self._ended or not literal.startswith(ahead):
                return False
            yield

    def space(self) -> Steps[None]:
        """Pass white space."""
        yield from self.span(_Run(str.isspace), discard)

    def newlines(self) -> Steps[None]:
        yield from self.span(_Run("\n\r".__contains__), discard)

    def until(self, markers: Sequence[str], on_text: OnText) -> Steps[str | None]:
        """Hand on the text before the first marker, pass the marker and return it; None at the end of all text.

        The marker that is complete first counts, the longest of those. What may be the beginning of one waits.
        """
        while True:
            found = _first(self._text, self._at, markers)
            if found is not None:
                start, marker = found
                self._hand_on(start, on_text)
                self._at += len(marker)
                return marker
            held = 0 if self._ended else _possible_beginning(self._text, self._at, markers)
            self._hand_on(len(self._text) - held, on_text)
            if self._ended:
                return None
            yield

    def span(self, extent: Extent, on_text: OnText) -> Steps[bool]:
        """Hand on what ``extent`` covers. False when the text ended before it did."""
        while True:
            covered = extent.feed(self._text[self._at :])
            self._hand_on(len(self._text) if covered is None else self._at + covered, on_text)
            if covered is not None:
                return True
            if self._ended:
                return False
            yield

    def _hand_on(self, end: int, on_text: OnText) -> None:
        if end > self._at:
            text = self._text[self._at : end]
            self._at = end
            on_text(text)


def read_run(source: Source, belongs: Callable[[str], bool]) -> Steps[str]:
    parts: list[str] = []
    yield from source.span(_Run(belongs), parts.append)
    return "".join(parts)


def _first(text: str, at: int, markers: Sequence[str]) -> tuple[int, str] | None:
    found = [(start + len(marker), start, marker) for marker in markers if (start := text.find(marker, at)) >= 0]
    if not found:
        return None
    _, start, marker = min(found)
    return start, marker


def _possible_beginning(text: str, at: int, markers: Sequence[str]) -> int:
    """Length of the longest end of ``text`` with which some marker begins."""
    longest = min(len(text) - at, max(map(len, markers), default=1) - 1)
    for length in range(longest, 0, -1):
        tail = text[len(text) - length :]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0
