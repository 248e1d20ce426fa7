"""Where the parsers put what they find: the one place that numbers calls and keeps white space in order.

White space between content and a call, between calls, and after the last one belongs to the markup and is left out;
all other text comes out as it went in.
"""

from __future__ import annotations

from collections.abc import Callable

from areal.services.inference.data_proxy.parsers.pieces import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    Reasoning,
)

NewId = Callable[[], str]


class Output:
    def __init__(self, new_id: NewId) -> None:
        self._new_id = new_id
        self._pieces: list[Piece] = []
        self._space = ""
        self._calls = 0
        self._open = False
        self.in_reasoning = False

    def drain(self) -> tuple[Piece, ...]:
        pieces, self._pieces = tuple(self._pieces), []
        return pieces

    def reasoning(self, text: str) -> None:
        self.in_reasoning = True
        self._pieces.append(Reasoning(text))

    def text(self, text: str) -> None:
        """Content. White space at its end waits: it counts only where more content follows."""
        text = self._space + text
        solid = text.rstrip()
        self._space = text[len(solid) :]
        self.in_reasoning = False
        if solid:
            self._pieces.append(Content(solid))

    def start(self, name: str, call_id: str | None = None) -> None:
        self.end()
        self._space = ""
        self.in_reasoning = False
        self._pieces.append(CallStart(self._calls, call_id or self._new_id(), name))
        self._calls += 1
        self._open = True

    def arguments(self, fragment: str) -> None:
        assert self._open
        if fragment:
            self._pieces.append(CallArguments(self._calls - 1, fragment))

    def end(self) -> None:
        """The call that is open, if one is, is complete."""
        if self._open:
            self._pieces.append(CallEnd(self._calls - 1))
            self._open = False

    def finish(self) -> None:
        """No more comes."""
        self.end()
        if self._space and not self._calls:
            self._pieces.append(Content(self._space))
        self._space = ""
