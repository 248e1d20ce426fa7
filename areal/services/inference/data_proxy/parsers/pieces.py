"""What an answer's text turns out to be: content, reasoning, tool calls.

A tool call is its start, fragments of its arguments (JSON text, to be joined), and its end, unless that was not seen.
Calls are numbered from 0 and come one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


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
    """Pieces, joined. What is the same text in other cuts is the same reply."""

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
