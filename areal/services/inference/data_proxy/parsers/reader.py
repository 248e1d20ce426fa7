"""Reads a response's text, as it arrives, into pieces: content, reasoning, tool calls.

A parser is a generator over a ``TextSource``: it reads with ``yield from`` and is suspended whenever it needs text that
has not arrived. It decides by the text alone, never by where a chunk ended, so its result does not depend on how the
text was split.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from areal.dataclasses import dataclass
from areal.services.dialects import CallArguments, CallEnd, CallStart, Content, Piece, Reasoning

NewId = Callable[[], str]


class Output:
    """Collects the pieces that parsers write, numbers calls and handles white space. White space between content and a
    call, between calls, and after the last call belongs to the markup and is dropped; all other text is unchanged."""

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
        """Add content. Trailing white space is held: it is content only if more content follows."""
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
        """End the open call, if there is one."""
        if self._open:
            self._pieces.append(CallEnd(self._calls - 1))
            self._open = False

    def finish(self) -> None:
        """End the response."""
        self.end()
        if self._space and not self._calls:
            self._pieces.append(Content(self._space))
        self._space = ""


def is_name_char(char: str) -> bool:
    return char.isalnum() or char in "_-.:/"


class Tools:
    """The tools of a request, by name, and the schemas of their parameters."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [tool["function"] for tool in tools]
        self._parameters = {function["name"]: function.get("parameters") for function in functions}

    def knows(self, name: str) -> bool:
        return name in self._parameters

    def types(self, tool: str, *path: str) -> frozenset[str]:
        """Return the JSON types of this parameter, ``integer`` as ``number``; empty if its schema does not say.
        ``path``: the name of the parameter, and of the value within it; ``item`` is an item of a list too."""
        root = schema = self._parameters.get(tool)
        for name in path:
            schema = _resolved(schema, root)
            inner = _within(schema, "properties", name)
            schema = _within(schema, "items") if inner is None and name == "item" else inner
        return _types_of(schema, root)


def _within(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _resolved(schema: Any, root: object) -> Any:
    """Return the schema that this one refers to by a JSON pointer (RFC 6901); itself if it refers to none."""
    if not isinstance(name := _within(schema, "$ref"), str):
        return schema
    return _within(root, *(each.replace("~1", "/").replace("~0", "~") for each in name.split("/")[1:]))


def _types_of(schema: object, root: object, seen: Sequence[str] = ()) -> frozenset[str]:
    """Return the types of a schema. ``root`` has the schemas that a ``$ref`` names (``#/$defs/NAME``)."""
    if not isinstance(schema, Mapping):
        return frozenset()
    if isinstance(name := schema.get("$ref"), str) and name not in seen:
        return _types_of(_resolved(schema, root), root, (*seen, name))
    choices = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if isinstance(choices, list):
        found = [_types_of(each, root, seen) for each in choices]
        return frozenset[str]().union(*found) if all(found) else frozenset()
    types, values = schema.get("type"), schema.get("enum")
    if types is None and isinstance(values, list):
        types = [json_type(json.dumps(value)) for value in values]
    names = types if isinstance(types, list) else [types]
    return frozenset("number" if name == "integer" else name for name in names if isinstance(name, str))


def json_type(text: str) -> str:
    """Return the type of a JSON value."""
    kinds = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
    return kinds.get(text[0], "number")


_T = TypeVar("_T")

Steps = Generator[None, None, _T]
"""A parsing step that may be suspended; its value is the parsed result."""

OnText = Callable[[str], None]


class Extent(Protocol):
    """Finds the end of an element that starts at the source's position."""

    def feed(self, text: str) -> int | None:
        """Return how many characters of ``text`` still belong to the element; None: all, and later text may too."""


class _Characters:
    """The extent of consecutive characters for which ``belongs`` is true."""

    def __init__(self, belongs: Callable[[str], bool]) -> None:
        self._belongs = belongs

    def feed(self, text: str) -> int | None:
        return next((position for position, char in enumerate(text) if not self._belongs(char)), None)


class Quotes:
    """Tracks quoted text. ``open``: the quotation mark that will end it; empty outside quotes."""

    def __init__(self, marks: str) -> None:
        self._marks = marks
        self._escaped = False
        self.open = ""

    def covers(self, char: str) -> bool:
        """Return whether the next character is quoted or a quotation mark."""
        if not self.open:
            self.open = char if char in self._marks else ""
            return bool(self.open)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self.open:
            self.open = ""
        return True


def discard(text: str) -> None:
    """Drop text that is only markup."""


class TextSource:
    """The text of a response as it arrives, and the position of the parser that reads it."""

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
        """End the text, which is complete."""
        self._ended = True

    def mark(self) -> None:
        """Remember this position, so that ``since_mark`` can return the text from here on."""
        self._mark = self._at

    def since_mark(self) -> str:
        """Return the text from the mark to the position, and forget the mark."""
        assert self._mark is not None
        text, self._mark = self._text[self._mark : self._at], None
        return text

    def forget_mark(self) -> None:
        self._mark = None

    def peek(self) -> Steps[str]:
        """Return the next character without passing it; empty at the end."""
        while self._at >= len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def accept(self, literal: str) -> Steps[bool]:
        """Pass ``literal`` and return True if it is next."""
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
        yield from self.span(_Characters(str.isspace), discard)

    def newlines(self) -> Steps[None]:
        yield from self.span(_Characters("\n\r".__contains__), discard)

    def until(self, markers: Sequence[str], on_text: OnText) -> Steps[str | None]:
        """Give the text before the first marker to ``on_text``, pass the marker and return it; None at the end of text.

        The marker that is complete first wins, and of several the longest. Text that may start a marker is held back.
        """
        while True:
            found = first_marker(self._text, self._at, markers)
            if found is not None:
                start, marker = found
                self._emit_text(start, on_text)
                self._at += len(marker)
                return marker
            held = 0 if self._ended else possible_start(self._text, self._at, markers)
            self._emit_text(len(self._text) - held, on_text)
            if self._ended:
                return None
            yield

    def span(self, extent: Extent, on_text: OnText) -> Steps[bool]:
        """Give the text that ``extent`` covers to ``on_text``. Return False if the text ended before the extent."""
        while True:
            covered = extent.feed(self._text[self._at :])
            self._emit_text(len(self._text) if covered is None else self._at + covered, on_text)
            if covered is not None:
                return True
            if self._ended:
                return False
            yield

    def _emit_text(self, end: int, on_text: OnText) -> None:
        if end > self._at:
            text = self._text[self._at : end]
            self._at = end
            on_text(text)


def read_run(source: TextSource, belongs: Callable[[str], bool]) -> Steps[str]:
    parts: list[str] = []
    yield from source.span(_Characters(belongs), parts.append)
    return "".join(parts)


def first_marker(text: str, at: int, markers: Sequence[str]) -> tuple[int, str] | None:
    """Return where the marker that is complete first starts, and the marker: the longest of several."""
    found = [(start + len(marker), start, marker) for marker in markers if (start := text.find(marker, at)) >= 0]
    if not found:
        return None
    _, start, marker = min(found)
    return start, marker


def possible_start(text: str, at: int, markers: Sequence[str]) -> int:
    """Return the length of the longest suffix of ``text`` with which a marker starts."""
    longest = min(len(text) - at, max(map(len, markers), default=1) - 1)
    for length in range(longest, 0, -1):
        tail = text[len(text) - length :]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers around reasoning, which is at the beginning of a response or nowhere. The end of the prompt shows
    whether the chat template has written the start marker already, or the model writes it.

    ``always``: a response begins with reasoning, with the start marker or without, unless the prompt has closed it.
    ``breaks``: other markers that end reasoning; they belong to the text after it. ``special``: tokens within
    ``start``."""

    start: str
    end: str
    always: bool = False
    breaks: tuple[str, ...] = ()
    special: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return self.start, self.end, *self.special

    def opened_by(self, prompt_tail: str) -> bool:
        """Return whether a response to a prompt with this end begins within reasoning."""
        tail = prompt_tail.rstrip()
        return tail.endswith(self.start) or (self.always and not tail.endswith(self.end))

    def parse(self, source: TextSource, on_reasoning: OnText, on_content: OnText, *, inside: bool) -> Steps[None]:
        source.mark()
        yield from source.space()
        begins = yield from source.accept(self.start)
        if not inside and not begins and (yield from source.accept(self.end)):  # there is no reasoning
            source.forget_mark()
            yield from source.newlines()
        elif begins or inside:
            source.forget_mark()
            yield from source.newlines()
            marker = yield from source.until((self.end, *self.breaks), on_reasoning)
            if marker == self.end:
                yield from source.newlines()
            elif marker is not None:
                on_content(marker)
        else:
            on_content(source.since_mark())
        yield from source.until((), on_content)


Parse = Callable[[TextSource, Output, Tools], Steps[None]]


class _ParserStage:
    """A parser and the text it reads."""

    def __init__(self, parse: Callable[[TextSource], Steps[None]]) -> None:
        self._source = TextSource()
        self._steps = parse(self._source)

    def feed(self, text: str) -> None:
        self._source.feed(text)
        next(self._steps, None)

    def end(self) -> None:
        self._source.end()
        next(self._steps, None)


class ResponseReader:
    """Reads the text of one choice into pieces as soon as they are certain. Without formats all text is content.

    ``inside``: the response begins within reasoning. ``primer``: the start of the response that the prompt already
    contains; its pieces come with the first push. ``one_call``: text after the first call is dropped. ``done``: that
    call is complete.
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
        self._calls: _ParserStage | None = None
        self._reasoning: _ParserStage | None = None
        self._before_content = reasoning is not None
        if parse is not None:
            output, known = self._output, tools or Tools([])
            self._calls = _ParserStage(lambda source: parse(source, output, known))
        if reasoning is not None:
            form = reasoning
            self._reasoning = _ParserStage(lambda source: form.parse(source, self._think, self._answer, inside=inside))
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
        """Return the remaining pieces at the end of the response. A call without an end marker stays open: the finish
        reason shows whether it is complete."""
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


PLAIN = ResponseReader()
"""The reader of all choices without formats, which share it because it has no state."""
