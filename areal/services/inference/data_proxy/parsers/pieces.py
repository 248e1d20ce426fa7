"""The pieces of an answer: content, reasoning, tool calls.

A tool call is its start, fragments of its arguments (JSON text, to be joined), and its end, unless that was not seen.
Calls are numbered from 0 and come one after the other.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)  # not frozen: there is one for each step of each stream, and freezing doubles its cost
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """``id`` is the one that later messages refer to."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int


Piece = Content | Reasoning | CallStart | CallArguments | CallEnd


def joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same in as few pieces as can be."""
    out: list[Piece] = []
    for piece in pieces:
        match out[-1] if out else None, piece:
            case Content(before), Content(text):
                out[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                out[-1] = Reasoning(before + text)
            case CallArguments(index, before), CallArguments(_, text):
                out[-1] = CallArguments(index, before + text)
            case _:
                out.append(piece)
    return tuple(out)


@dataclass
class ToolCall:
    id: str
    name: str
    arguments: str = ""


@dataclass
class Reply:
    """Pieces, joined. Equal texts give equal replies, however they were split."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        content, reasoning = [], []
        for piece in pieces:
            match piece:
                case Content(text):
                    content.append(text)
                case Reasoning(text):
                    reasoning.append(text)
                case CallStart(_, call_id, name):
                    self.calls.append(ToolCall(call_id, name))
                case CallArguments(index, fragment):
                    self.calls[index].arguments += fragment
                case CallEnd():
                    pass
        self.content += "".join(content)
        self.reasoning += "".join(reasoning)


# The parsers' output: numbers calls and handles white space. White space between content and a call, between calls, and
# after the last one belongs to the markup and is dropped; all other text is unchanged.

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
        """The end of the answer."""
        self.end()
        if self._space and not self._calls:
            self._pieces.append(Content(self._space))
        self._space = ""


# The tools of a request, as the parsers need to know them: their names, and the types of their
# parameters.

_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def is_name_char(char: str) -> bool:
    return char.isalnum() or char in "_-.:/"


class Tools:
    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for function in (tool["function"] for tool in tools):
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            self._parameters[function["name"]] = properties if isinstance(properties, Mapping) else {}

    def knows(self, name: str) -> bool:
        return name in self._parameters

    def is_text(self, tool: str, parameter: str) -> bool:
        """Whether this parameter can only be a string."""
        schema = self._parameters.get(tool, {}).get(parameter)
        return isinstance(schema, Mapping) and schema.get("type") in ("string", ["string"])


def json_of_text(text: str) -> str:
    """A parameter's value as JSON: valid JSON stays as it is, any other text becomes a string."""
    if text.strip() in _PYTHON_WORDS:
        return json.dumps(_PYTHON_WORDS[text.strip()])
    try:
        return _compact(json.loads(text))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def json_of_python(text: str) -> str:
    """A Python literal as JSON; other text as ``json_of_text`` reads it."""
    try:
        return _compact(ast.literal_eval(text.strip()))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json_of_text(text)


def _compact(value: object) -> str:
    """Raises ValueError for values that JSON cannot write."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


# Arguments in other markup than JSON, written as a JSON object while they arrive.


class ArgumentsWriter:
    """Writes into the open call. Strings are written as they arrive, other values once they are complete.

    ``framed``: a value's first and last line break are the markup's.
    """

    def __init__(self, output: Output, *, framed: bool) -> None:
        self._output = output
        self._framed = framed
        self._empty = True
        self._as_text = False
        self._begun = False
        self._held = ""

    def key(self, name: str, *, as_text: bool) -> None:
        self._output.arguments(("{" if self._empty else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
        self._empty = False
        self._as_text = as_text
        self._begun = not self._framed
        self._held = ""
        if as_text:
            self._output.arguments('"')

    def text(self, text: str) -> None:
        """More of the value."""
        self._held += text
        if not self._begun:
            self._begun = True
            self._held = self._held.removeprefix("\n")
        if self._as_text:
            kept = len(self._held) - 1 if self._framed and self._held.endswith("\n") else len(self._held)
            self._output.arguments(json.dumps(self._held[:kept], ensure_ascii=False)[1:-1])
            self._held = self._held[kept:]

    def end_value(self) -> None:
        text = self._held.removesuffix("\n") if self._framed else self._held
        self._output.arguments('"' if self._as_text else json_of_text(text))

    def written(self, name: str, value: str) -> None:
        """A whole argument, its value JSON already."""
        self.key(name, as_text=False)
        self._output.arguments(value)

    def close(self) -> None:
        self._output.arguments("{}" if self._empty else "}")
