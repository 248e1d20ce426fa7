"""YAML text to positioned nodes, with YAML's traps closed.

Built from the parser's events rather than its nodes: composing nodes recurses in C, and a few thousand brackets
crash the interpreter; here depth is bounded, an alias costs nothing, and its expanded size is counted as it is met.
Rejected: duplicate keys, tags beyond the core, keys that are no words, recursive aliases, alias bombs. ``<<`` merges,
since many existing files use it. A fault does not stop the reading when what follows can still be understood.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from areal.resources.diagnostics import Pos, Problems
from areal.resources.nodes import Mapping, Node, Scalar, Sequence, unreadable
from areal.resources.scalars import BadScalar, resolve_plain, resolve_tagged, short_tag

MAX_FILE_BYTES = 16 * 2**20
MAX_DEPTH = 64
MAX_DOCUMENT_NODES = 200_000

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DROPPED = "\0"  # no anchor can be spelt so: marks a list or map in a key's place, dropped when it closes
_CONTAINER_TAGS = {None, "!", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def load_documents(text: str, file: str, problems: Problems) -> list[Node]:
    """Every document of ``text`` that is not empty. Faults go to ``problems``; a syntax error ends the file there."""
    unprintable = _UNPRINTABLE.search(text)
    if unprintable is not None:
        pos = _position(text, unprintable.start(), file)
        problems.add(pos, "", f"binary data: the character U+{ord(unprintable[0]):04X} is not allowed in YAML")
        return []
    builder = _Builder(file, problems)
    try:
        for event in yaml.parse(text, Loader=_Loader):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        _report_syntax(error, text, file, problems)
    except _TooLarge as error:
        problems.add(error.pos, "", str(error))
    return builder.documents


def load_value(text: str, file: str, problems: Problems, *, line: int = 1, col: int = 1) -> Node | None:
    """One YAML value that stands at (``line``, ``col``) of ``file``, as on a command line. Empty text is an empty
    string."""
    inner = Problems()
    documents = load_documents(text, file, inner)
    for fault in inner.found:
        inside = fault.pos.col if fault.pos.line == 1 else len(text) + 1
        problems.add(Pos(file, line, inside + col - 1), fault.path, fault.message, hint=fault.hint)
    if inner or len(documents) > 1:
        return None
    return _moved(documents[0], line, col - 1) if documents else Scalar("", Pos(file, line, col))


class _TooLarge(Exception):
    def __init__(self, message: str, pos: Pos) -> None:
        super().__init__(message)
        self.pos = pos


@dataclass(slots=True)
class _Frame:
    """A container that is still open. ``key`` is set between a key and its value."""

    pos: Pos
    is_map: bool
    anchor: str | None
    items: list[Node] = field(default_factory=list)
    entries: dict[str, Node] = field(default_factory=dict)
    keys: dict[str, Pos] = field(default_factory=dict)
    key: str | None = None
    key_pos: Pos | None = None
    merges: list[Node] = field(default_factory=list)
    merging: bool = False  # the key is a bare "<<"; a quoted one is a word like any other
    size: int = 1

    @property
    def expects_key(self) -> bool:
        return self.is_map and self.key is None


class _Builder:
    """Events in, documents out. Sizes count an alias as what it stands for."""

    def __init__(self, file: str, problems: Problems) -> None:
        self.documents: list[Node] = []
        self._file = file
        self._problems = problems
        self._stack: list[_Frame] = []
        self._anchors: dict[str, tuple[Node, int]] = {}

    def take(self, event: Any) -> None:
        match type(event).__name__:
            case "ScalarEvent":
                self._scalar(event)
            case "MappingStartEvent" | "SequenceStartEvent":
                self._open(event)
            case "MappingEndEvent" | "SequenceEndEvent":
                self._close()
            case "AliasEvent":
                self._alias(event)
            case "DocumentStartEvent":
                self._anchors.clear()

    def _pos(self, event: Any) -> Pos:
        mark = event.start_mark
        return Pos(self._file, mark.line + 1, mark.column + 1)

    def _scalar(self, event: Any) -> None:
        pos = self._pos(event)
        frame = self._stack[-1] if self._stack else None
        if frame is not None and frame.expects_key:
            self._key(frame, event, pos)
            return
        try:
            if event.implicit[0]:
                value = resolve_plain(event.value)
            else:
                value = event.value if event.tag is None else resolve_tagged(event.value, event.tag)
        except BadScalar as error:
            self._problems.add(pos, "", str(error))
            node = unreadable(pos)
        else:
            node = Scalar(value, pos, _text_column(event))
        if event.anchor is not None:
            self._anchors[event.anchor] = (node, 1)
        self._place(node, 1)

    def _key(self, frame: _Frame, event: Any, pos: Pos) -> None:
        key = event.value
        if "${{" in key:
            self._problems.add(pos, "", "an expression cannot be a key, only a value")
        if key in frame.keys:
            first = frame.keys[key]
            message = f'duplicate key "{key}": first at line {first.line}, column {first.col}'
            self._problems.add(pos, "", message)
        frame.key, frame.key_pos, frame.merging = key, pos, key == "<<" and event.implicit[0]

    def _open(self, event: Any) -> None:
        pos = self._pos(event)
        anchor = event.anchor
        if len(self._stack) >= MAX_DEPTH:
            raise _TooLarge(f"nested more than {MAX_DEPTH} deep", pos)
        if event.tag not in _CONTAINER_TAGS:
            self._problems.add(pos, "", f"the tag {short_tag(event.tag)} is not allowed: plain YAML only")
        if self._stack and self._stack[-1].expects_key:
            self._bad_key(self._stack[-1], pos, "a list or map")
            anchor = _DROPPED
        self._stack.append(_Frame(pos, isinstance(event, yaml.MappingStartEvent), anchor))

    def _bad_key(self, frame: _Frame, pos: Pos, what: str) -> None:
        """The key is reported and its value read under an empty one."""
        self._problems.add(pos, "", f"a key must be a word, not {what}", hint='quote a value that begins with "{"')
        frame.key, frame.key_pos, frame.merging = "", pos, False

    def _close(self) -> None:
        frame = self._stack.pop()
        if frame.anchor == _DROPPED:
            return
        node: Node = self._mapping(frame) if frame.is_map else Sequence(tuple(frame.items), frame.pos)
        if frame.anchor is not None:
            self._anchors[frame.anchor] = (node, frame.size)
        self._place(node, frame.size)

    def _mapping(self, frame: _Frame) -> Mapping:
        for source in frame.merges:
            maps = source.items if isinstance(source, Sequence) else (source,)
            for merged in maps:
                if not isinstance(merged, Mapping):
                    self._problems.add(merged.pos, "", '"<<" merges a map, or a list of maps')
                    continue
                for key, value in merged.entries.items():
                    if key not in frame.entries:
                        frame.entries[key] = value
                        frame.keys[key] = merged.keys[key]
        return Mapping(frame.entries, frame.keys, frame.pos)

    def _alias(self, event: Any) -> None:
        pos, anchor = self._pos(event), event.anchor
        node, size = self._anchors.get(anchor, (unreadable(pos), 1))
        if any(frame.anchor == anchor for frame in self._stack):
            self._problems.add(pos, "", f"the alias *{anchor} is inside what it stands for")
        elif anchor not in self._anchors:
            self._problems.add(pos, "", f"unknown alias *{anchor}: no &{anchor} before it in this document")
        if self._stack and self._stack[-1].expects_key:
            self._bad_key(self._stack[-1], pos, "an alias")
        else:
            self._place(node, size, pos)

    def _place(self, node: Node, size: int, at: Pos | None = None) -> None:
        """``node`` where the parse stands: the top, a list, or the value of the pending key."""
        if not self._stack:
            if not (isinstance(node, Scalar) and node.value is None):
                self.documents.append(node)
            return
        frame = self._stack[-1]
        frame.size += size
        if frame.size > MAX_DOCUMENT_NODES:
            raise _TooLarge(
                f"more than {MAX_DOCUMENT_NODES} values in one document, aliases expanded (an alias bomb?)",
                at or node.pos,
            )
        if not frame.is_map:
            frame.items.append(node)
            return
        key, key_pos = frame.key, frame.key_pos
        frame.key = frame.key_pos = None
        if key is None or key_pos is None:  # a node where a key belongs has been reported
            return
        if frame.merging:
            frame.merges.append(node)
        elif key not in frame.keys:
            frame.entries[key] = node
            frame.keys[key] = key_pos


def _text_column(event: Any) -> int:
    """The 1-based column of the scalar's first character, when its source is the text itself on one line; else 0."""
    start, end = event.start_mark, event.end_mark
    if start.line != end.line or event.anchor is not None or event.tag is not None:
        return 0
    quotes = 0 if event.implicit[0] else 1
    return start.column + 1 + quotes if end.column - start.column == len(event.value) + 2 * quotes else 0


def _report_syntax(error: yaml.MarkedYAMLError, text: str, file: str, problems: Problems) -> None:
    mark = error.problem_mark or error.context_mark
    pos = Pos(file, mark.line + 1, mark.column + 1) if mark is not None else Pos(file, 1, 1)
    lines = text.splitlines()
    line = lines[pos.line - 1] if pos.line <= len(lines) else ""
    before = line[: pos.col]
    if "\t" in before and not before.strip():
        problems.add(pos, "", "a tab cannot indent YAML: use spaces")
        return
    message = error.problem or error.context or "not YAML"
    if error.context and error.context_mark is not None and error.context_mark.line != pos.line - 1:
        message += f", {error.context} that begins at line {error.context_mark.line + 1}"
    near = "\n".join(lines[max(0, pos.line - 2) : pos.line])
    problems.add(pos, "", message, hint='quote "${{ }}" inside { } or [ ]' if "${{" in near else None)


def _position(text: str, offset: int, file: str) -> Pos:
    line = text.count("\n", 0, offset) + 1
    return Pos(file, line, offset - (text.rfind("\n", 0, offset) + 1) + 1)


def _moved(node: Node, line: int, by: int) -> Node:
    """``node`` with its positions on ``line``, ``by`` columns to the right."""
    pos = Pos(node.pos.file, line, node.pos.col + by)
    if isinstance(node, Mapping):
        entries = {key: _moved(value, line, by) for key, value in node.entries.items()}
        return Mapping(entries, {key: Pos(at.file, line, at.col + by) for key, at in node.keys.items()}, pos)
    if isinstance(node, Sequence):
        return Sequence(tuple(_moved(item, line, by) for item in node.items), pos)
    return Scalar(node.value, pos, node.text_col + by if node.text_col else 0)
