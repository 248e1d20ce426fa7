"""The syntax tree of a shell script, in the terms of bash's manual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from areal.dataclasses import dataclass, field


class Literal(NamedTuple):
    """Characters that stand for themselves. ``quoted``: also for a pattern, or a list of words."""

    text: str
    quoted: bool


class ParameterExpansion(NamedTuple):
    """``$NAME``, or ``${NAME[INDEX]OPERATION OPERAND}``. ``prefix``: ``#`` for its length, ``!`` for the variable that
    it names or the keys of an array. ``source``: as it is written."""

    name: str
    source: str
    quoted: bool
    prefix: str = ""
    index: Word = ()  # type: ignore[assignment]  # not the method of tuples
    operation: str = ""
    operand: Word = ()


class ArithmeticExpansion(NamedTuple):
    """``$((...))``."""

    inner: Word
    quoted: bool


class CommandSubstitution(NamedTuple):
    """``$(...)``, or the same in backquotes."""

    body: list[Node]
    source: str
    quoted: bool


Part = Literal | ParameterExpansion | ArithmeticExpansion | CommandSubstitution
Word = tuple[Part, ...]


class Assignment(NamedTuple):
    """``NAME[KEY]=VALUE``, or ``+=`` if it ``extends``. An array has a list of keys, () for the next, and words."""

    name: str
    key: Word
    extends: bool
    value: Word | list[tuple[Word, Word]]


@dataclass
class Redirection:
    """``> FILE``, ``<<< WORD`` or a here-document, whose text is the target. ``channel``: the number before it."""

    channel: str
    operation: str
    target: Word = ()


@dataclass
class SimpleCommand:
    """A simple command in the lines ``first`` to ``last``. ``is_cut``: a comment after a backslash ends it."""

    assigned: list[Assignment] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    redirections: list[Redirection] = field(default_factory=list)
    source: str = ""
    first: int = 0
    last: int = 0
    is_cut: bool = False


class Pipeline(NamedTuple):
    """Commands that are connected with ``|``; a single one is negated (``!``)."""

    commands: list[Node]


class AndOrList(NamedTuple):
    """Commands, each with the ``&&`` or ``||`` before it; the first with ``""``."""

    commands: list[tuple[str, Node]]


class CompoundCommand(NamedTuple):
    """``{ ...; }``, ``( ... )``, or a compound command with redirections."""

    body: list[Node]
    in_child: bool
    redirections: Sequence[Redirection] = ()


class If(NamedTuple):
    """Conditions with their branches. The condition of ``else`` has no commands."""

    branches: list[tuple[list[Node], list[Node]]]


class For(NamedTuple):
    """``for NAME in WORDS``; without them, over the arguments."""

    name: str
    words: list[Word] | None
    body: list[Node]


class While(NamedTuple):
    """``while``, or ``until``."""

    condition: list[Node]
    body: list[Node]
    until: bool


class Case(NamedTuple):
    """``case WORD in`` with the patterns of each branch."""

    word: Word
    branches: list[tuple[list[Word], list[Node]]]


class FunctionDefinition(NamedTuple):
    """``NAME() { ...; }``."""

    name: str
    body: Node


class ArithmeticCommand(NamedTuple):
    """``((...))``."""

    inner: Word


Node = (
    SimpleCommand
    | Pipeline
    | AndOrList
    | CompoundCommand
    | If
    | For
    | While
    | Case
    | FunctionDefinition
    | ArithmeticCommand
)
