"""Loads YAML text into nodes with positions, and dumps plain values as YAML.

Nodes are built from parser events: PyYAML's composer recurses in C, and a few thousand brackets crash the interpreter.
Here, depth is bounded; an alias shares the node of its anchor, but counts with its expanded size. Rejected are
duplicate keys, non-core tags, keys that are not scalars, recursive aliases and alias bombs. ``<<`` merges maps, since
many existing files use it. Loading continues after a fault if the rest can be parsed.

Scalars follow the YAML 1.2 core schema. PyYAML resolves by 1.1: ``yes``, ``on`` and ``no`` become booleans, ``1:30``
becomes 90, ``1e-3`` stays text. Here only ``true`` and ``false`` are booleans, ``1:30`` is text, ``1e-3`` a number.

``load(dump(value)) == value`` for readers of YAML 1.1 and 1.2: text that either would read as another type is quoted.
In manifests, a literal ``${{`` is escaped.
"""

# ruff: noqa: E402

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

_UNPRINTABLE = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
_NOT_PRINTABLE = "[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
# PyYAML compiles the same set in this form when it is imported, which takes ten times as long: 4 ms.
getattr(re, "_cache", {})[str, _NOT_PRINTABLE, 0] = _UNPRINTABLE

import yaml

from areal.dataclasses import dataclass, field
from areal.errors import Wording
from areal.resources.nodes import MappingNode, Node, Pos, Problems, ScalarNode, SequenceNode, Value, unreadable

MAX_FILE_BYTES = 16 * 2**20
MAX_DEPTH = 64
MAX_DOCUMENT_NODES = 200_000

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DROPPED = "\0"  # not a valid anchor: marks a list or map in place of a key, which is dropped when it closes
_CONTAINER_TAGS = {None, "!", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}
_MARK = re.compile("^\ufeff", re.MULTILINE)  # a byte order mark, which files that are joined each begin with
_PAIR = re.compile(r"(?<!\\)((?:\\\\)*)\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})", re.IGNORECASE)
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_WORDS: dict[str, Value] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
# First characters of numbers. Most text fails this test, and no regular expression is tried.
_NUMBER_START = frozenset("0123456789+-.")
_MAX_DIGITS = 19
_TAGS: dict[str, tuple[type, ...]] = {
    "!!int": (int,),
    "!!float": (int, float),
    "!!bool": (bool,),
    "!!null": (type(None),),
}


class BadScalar(ValueError):
    """A scalar that JSON or 64 bits cannot hold, that does not match its tag, or whose tag is not allowed."""


def resolve_plain(text: str) -> Value:
    """Return the value of an unquoted scalar. Raises BadScalar for numbers that JSON or 64 bits cannot hold."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in _NUMBER_START:
        return text
    if _INT.fullmatch(text):
        fits = len(text) <= _MAX_DIGITS + 1
        number = int(text, 0 if text[:2] in ("0o", "0x") else 10) if fits else 0
        if not fits or not -(2**63) <= number < 2**64:
            shown = text if fits else f"{text[:20]}..."
            raise BadScalar(f"{shown} does not fit in 64 bits; quote it if text is meant")
        return number
    if _FLOAT.fullmatch(text):
        value = float(text)
        if not math.isfinite(value):
            raise BadScalar(f"{text[:30]} is too large for a number; quote it if text is meant")
        return value
    if _NOT_FINITE.fullmatch(text):
        raise BadScalar(f"{text} is not a finite number; quote it if text is meant")
    return text


def resolve_tagged(text: str, tag: str) -> Value:
    """Return the value of a scalar with an explicit tag such as ``!!str`` or ``!!int``. Raises BadScalar."""
    name = short_tag(tag)
    if name in ("!!str", "!"):
        return text
    if name not in _TAGS:
        raise BadScalar(f"the tag {name} is not allowed: plain YAML only")
    value = resolve_plain(text)
    if type(value) not in _TAGS[name]:
        raise BadScalar(f'"{text}" is not of type {name}')
    return float(value) if name == "!!float" and isinstance(value, int) else value


def short_tag(tag: str) -> str:
    """Return a tag as it is written: ``!!int`` for ``tag:yaml.org,2002:int``."""
    prefix = "tag:yaml.org,2002:"
    return f"!!{tag.removeprefix(prefix)}" if tag.startswith(prefix) else tag


def _joined(pair: re.Match[str]) -> str:
    halves = "".join(chr(int(half, 16)) for half in pair.group(2, 3))
    return pair[1] + halves.encode("utf-16", "surrogatepass").decode("utf-16")


def load_documents(text: str, file: str, problems: Problems, *, at: Pos | None = None) -> list[Node]:
    """Return the non-empty documents of ``text``. Faults are added to ``problems``; loading stops at a syntax error.
    ``at``: position of the text on a command line, which is then a single line."""
    builder = _Builder(file, problems, at)
    text = _MARK.sub("", text)
    if text.lstrip()[:1] in ("{", "["):  # JSON, whose characters beyond U+FFFF may be two escapes
        text = _PAIR.sub(_joined, text)
    unprintable = _UNPRINTABLE.search(text)
    if unprintable is not None:
        offset = unprintable.start()
        column = offset - (text.rfind("\n", 0, offset) + 1)
        pos = builder.pos(yaml.Mark(file, offset, text.count("\n", 0, offset), column, None, 0))
        problems.add(pos, "", f"binary data: the character U+{ord(unprintable[0]):04X} is not allowed in YAML")
        return []
    try:
        take = {
            yaml.ScalarEvent: builder.scalar,
            yaml.MappingStartEvent: builder.open,
            yaml.SequenceStartEvent: builder.open,
            yaml.MappingEndEvent: builder.close,
            yaml.SequenceEndEvent: builder.close,
            yaml.AliasEvent: builder.alias,
            yaml.DocumentStartEvent: builder.begin,
        }
        for event in iter(_Loader(text).get_event, None):  # `yaml.parse` asks for each event twice
            if handle := take.get(type(event)):
                handle(event)
    except yaml.MarkedYAMLError as error:
        _report_syntax(error, text, builder, problems)
    except _TooLarge as error:
        problems.add(error.pos, "", str(error))
    return builder.documents


def load_value(text: str, pos: Pos, problems: Problems) -> Node | None:
    """Load one YAML value at ``pos`` of a command line; None after a fault. Empty text is an empty string."""
    before = problems.met
    documents = load_documents(text, pos.file, problems, at=pos)
    if len(documents) > 1:
        problems.add(pos, "", "several YAML documents where one value belongs")
    if problems.met > before:
        return None
    return documents[0] if documents else ScalarNode(None if text.strip() else "", pos)


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
    merging: bool = False  # the key is an unquoted "<<"; a quoted one is an ordinary key
    size: int = 1

    @property
    def expects_key(self) -> bool:
        return self.is_map and self.key is None


class _Builder:
    """Builds documents from parser events. The size of an alias is that of its anchor's node."""

    def __init__(self, file: str, problems: Problems, at: Pos | None) -> None:
        self.documents: list[Node] = []
        self._file = file
        self._at = at
        self._problems = problems
        self._stack: list[_Frame] = []
        self._anchors: dict[str, tuple[Node, int]] = {}

    def begin(self, event: Any) -> None:
        self._anchors.clear()

    def pos(self, mark: Any) -> Pos:
        if self._at is not None:
            return self._at._replace(col=self._at.col + mark.index)
        return Pos(self._file, mark.line + 1, mark.column + 1)

    def scalar(self, event: Any) -> None:
        pos = self.pos(event.start_mark)
        frame = self._stack[-1] if self._stack else None
        if "\0" in event.value:  # escaped; no name, path or variable of the system can hold it
            self._problems.add(pos, "", "the character U+0000 is not allowed in text")
        if frame is not None and frame.is_map and frame.key is None:
            key = event.value
            if "${{" in key:
                self._problems.add(pos, "", "an expression cannot be a key, only a value")
            if key in frame.keys:
                first = frame.keys[key]
                message = f'duplicate key "{key}": first at line {first.line}, column {first.col}'
                self._problems.add(pos, "", message)
            frame.key, frame.key_pos, frame.merging = key, pos, key == "<<" and event.implicit[0]
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
            node = ScalarNode(value, pos, _text_column(event, pos.col))
        if event.anchor is not None:
            self._anchors[event.anchor] = (node, 1)
        self._place(node, 1)

    def open(self, event: Any) -> None:
        pos = self.pos(event.start_mark)
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
        """Report the key, and read its value under an empty key."""
        hint = 'quote a value that begins with "{"'
        if (pos.line, pos.col) == (frame.pos.line, frame.pos.col + 1):  # {{
            hint = "a template is ${{ values.NAME }}; for Helm's: helm template CHART | areal apply -f -"
        self._problems.add(pos, "", f"a key must be a word, not {what}", hint=hint)
        frame.key, frame.key_pos, frame.merging = "", pos, False

    def close(self, event: Any) -> None:
        frame = self._stack.pop()
        if frame.anchor == _DROPPED:
            return
        node: Node = self._mapping(frame) if frame.is_map else SequenceNode(tuple(frame.items), frame.pos)
        if frame.anchor is not None:
            self._anchors[frame.anchor] = (node, frame.size)
        self._place(node, frame.size)

    def _mapping(self, frame: _Frame) -> MappingNode:
        for source in frame.merges:
            maps = source.items if isinstance(source, SequenceNode) else (source,)
            for merged in maps:
                if not isinstance(merged, MappingNode):
                    self._problems.add(merged.pos, "", '"<<" merges a map, or a list of maps')
                    continue
                for key, value in merged.entries.items():
                    if key not in frame.entries:
                        frame.entries[key] = value
                        frame.keys[key] = merged.keys[key]
        return MappingNode(frame.entries, frame.keys, frame.pos)

    def alias(self, event: Any) -> None:
        pos, anchor = self.pos(event.start_mark), event.anchor
        node, size = self._anchors.get(anchor, (unreadable(pos), 1))
        if any(frame.anchor == anchor for frame in self._stack):
            self._problems.add(pos, "", f"the alias *{anchor} is inside its own anchor")
        elif anchor not in self._anchors:
            self._problems.add(pos, "", f"unknown alias *{anchor}: no &{anchor} before it in this document")
        if self._stack and self._stack[-1].expects_key:
            self._bad_key(self._stack[-1], pos, "an alias")
        else:
            self._place(node, size, pos)

    def _place(self, node: Node, size: int, at: Pos | None = None) -> None:
        """Add ``node`` at the current position: as a document, a list item, or the value of the pending key."""
        if not self._stack:
            if not (isinstance(node, ScalarNode) and node.value is None):
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


def _text_column(event: Any, column: int) -> int:
    """Return the column of the scalar's first character if its text is verbatim on one line; else 0."""
    start, end = event.start_mark, event.end_mark
    if start.line != end.line or event.anchor is not None or event.tag is not None:
        return 0
    quotes = 0 if event.implicit[0] else 1
    return column + quotes if end.column - start.column == len(event.value) + 2 * quotes else 0


def _report_syntax(error: yaml.MarkedYAMLError, text: str, builder: _Builder, problems: Problems) -> None:
    mark = error.problem_mark or error.context_mark or yaml.Mark("", 0, 0, 0, None, 0)
    lines = text.splitlines()
    before = lines[mark.line][: mark.column + 1] if mark.line < len(lines) else ""
    if "\t" in before and not before.strip():
        problems.add(builder.pos(mark), "", "a tab cannot indent YAML: use spaces")
        return
    message = error.problem or error.context or "not YAML"
    if error.context and error.context_mark is not None and error.context_mark.line != mark.line:
        message += f", {error.context} that begins at line {error.context_mark.line + 1}"
    near = "\n".join(lines[max(0, mark.line - 1) : mark.line + 1])
    hint = 'quote "${{ }}" inside { } or [ ]' if "${{" in near else None
    problems.add(builder.pos(mark), "", message, hint=hint)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


class _ManifestDumper(_Dumper):
    pass


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """PyYAML quotes text that a YAML 1.1 reader would misread, except for line breaks. This function also quotes text
    that a YAML 1.2 reader would misread, and control characters, so that they are escaped."""
    lines = text.split("\n")
    try:
        plain_text = text != "<<" and isinstance(resolve_plain(text), str) and all(map(str.isprintable, lines))
    except BadScalar:
        plain_text = False
    literal = len(lines) > 1 and all(line == line.rstrip() for line in lines)
    style = '"' if not plain_text else "|" if literal else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(Wording, _represent_text)
_ManifestDumper.add_representer(str, lambda dumper, text: _represent_text(dumper, text.replace("${{", "$${{")))


def dump_documents(documents: Iterable[Any], *, manifests: bool = False) -> str:
    """Return the documents as a YAML stream, with keys in their order. ``manifests``: escapes a literal ``${{``, so
    that the text can be applied."""
    dumper = _ManifestDumper if manifests else _Dumper
    return yaml.dump_all(
        documents, Dumper=dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120
    )
