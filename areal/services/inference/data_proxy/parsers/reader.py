"""Reads one answer: text in as it comes, pieces out as soon as they are certain."""

from __future__ import annotations

from collections.abc import Callable

from areal.services.inference.data_proxy.parsers.output import NewId, Output
from areal.services.inference.data_proxy.parsers.pieces import CallEnd, Content, Piece
from areal.services.inference.data_proxy.parsers.reasoning import ReasoningFormat
from areal.services.inference.data_proxy.parsers.source import OnText, Source, Steps
from areal.services.inference.data_proxy.parsers.tools import Tools

Parse = Callable[[Source, Output, Tools], Steps[None]]


class _Stage:
    """A parser and the text it reads."""

    def __init__(self, parse: Callable[[Source], Steps[None]]) -> None:
        self._source = Source()
        self._steps = parse(self._source)

    def feed(self, text: str) -> None:
        self._source.feed(text)
        next(self._steps, None)

    def end(self) -> None:
        self._source.end()
        next(self._steps, None)


class Reader:
    """Text to pieces for one choice. Without a format every text is content.

    ``inside``: the answer begins within reasoning. ``primer``: text that the prompt already has of the answer; its
    pieces come with the first push. ``one_call``: what follows the first call does not count; ``done`` says that it is
    complete.
    """

    def __init__(
        self,
        *,
        reasoning: ReasoningFormat | None = None,
        inside: bool = False,
        parse: Parse | None = None,
        tools: Tools | None = None,
        new_id: NewId = str,
        primer: str = "",
        one_call: bool = False,
    ) -> None:
        self._one_call = one_call
        self.done = False
        self._output = Output(new_id)
        self._thought = ""  # white space that is part of the reasoning only if more of it follows
        self._calls: _Stage | None = None
        self._reasoning: _Stage | None = None
        self._before_content = reasoning is not None
        if parse is not None:
            output, known = self._output, tools or Tools([])
            self._calls = _Stage(lambda source: parse(source, output, known))
        if reasoning is not None:
            form = reasoning
            self._reasoning = _Stage(lambda source: form.parse(source, self._think, self._answer, inside=inside))
        self.plain = self._calls is None and self._reasoning is None
        if primer:
            self._feed(primer)

    @property
    def reasoning_open(self) -> bool:
        return self._before_content or self._output.in_reasoning

    def push(self, text: str) -> tuple[Piece, ...]:
        if self.plain:
            return (Content(text),) if text else ()
        self._feed(text)
        return self._drain()

    def flush(self) -> tuple[Piece, ...]:
        """The rest, once no more comes. A call whose end was not seen stays open: why the text ended says whether it is
        whole."""
        if self.plain:
            return ()
        if self._reasoning is not None:
            self._reasoning.end()
        if self._calls is not None:
            self._calls.end()
        self._output.finish()
        pieces = self._drain()
        return pieces[:-1] if pieces and isinstance(pieces[-1], CallEnd) else pieces

    def _drain(self) -> tuple[Piece, ...]:
        pieces = self._output.drain()
        if not self._one_call:
            return pieces
        if self.done:
            return ()
        end = next((index for index, piece in enumerate(pieces) if isinstance(piece, CallEnd)), None)
        self.done = end is not None
        return pieces if end is None else pieces[: end + 1]

    def _feed(self, text: str) -> None:
        on_text: OnText = self._answer if self._reasoning is None else self._reasoning.feed
        on_text(text)

    def _think(self, text: str) -> None:
        text = self._thought + text
        solid = text.rstrip()
        self._thought = text[len(solid) :]
        if solid:
            self._output.reasoning(solid)

    def _answer(self, text: str) -> None:
        self._before_content = False
        if self._calls is None:
            self._output.text(text)
        else:
            self._calls.feed(text)


PLAIN = Reader()
"""For every answer without a format: it has nothing to remember."""
