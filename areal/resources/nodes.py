"""YAML values that know where they were written: an immutable tree under every transformation.

Templating, generation and overlays build new nodes out of old ones, so that each leaf keeps the position of the text
it came from. Nodes are shared freely (an alias is the very node of its anchor) and never changed.
"""

from __future__ import annotations

from collections.abc import Mapping as AnyMapping
from typing import Any, NamedTuple, TypeAlias

from areal.resources.diagnostics import Pos
from areal.resources.tree import Path, bracketed

Value: TypeAlias = str | int | float | bool | None


_UNREADABLE = -1


class Scalar(NamedTuple):
    """``text_col``: the column of the value's first character when its text stands verbatim on one line, else 0."""

    value: Value
    pos: Pos
    text_col: int = 0


class Sequence(NamedTuple):
    items: tuple[Node, ...]
    pos: Pos


class Mapping(NamedTuple):
    """``keys`` holds the position of every key of ``entries``."""

    entries: dict[str, Node]
    keys: dict[str, Pos]
    pos: Pos

    def get(self, key: str) -> Node | None:
        return self.entries.get(key)

    def key_pos(self, key: str) -> Pos:
        """Where ``key`` stands; where the map stands when it has no such key."""
        return self.keys.get(key, self.pos)


Node: TypeAlias = Scalar | Sequence | Mapping


def plain(node: Node) -> Any:
    """The value without positions."""
    if isinstance(node, Mapping):
        return {key: plain(value) for key, value in node.entries.items()}
    if isinstance(node, Sequence):
        return [plain(item) for item in node.items]
    return node.value


def to_node(value: Any, pos: Pos) -> Node:
    """A plain value as nodes that all stand at ``pos``."""
    if isinstance(value, AnyMapping):
        entries = {str(key): to_node(item, pos) for key, item in value.items()}
        return Mapping(entries, dict.fromkeys(entries, pos), pos)
    if isinstance(value, (list, tuple)):
        return Sequence(tuple(to_node(item, pos) for item in value), pos)
    return Scalar(value, pos)


def unreadable(pos: Pos) -> Scalar:
    """Stands for a value whose fault has been reported, so that nobody complains of its absence too."""
    return Scalar(None, pos, _UNREADABLE)


def is_unreadable(node: Node | None) -> bool:
    """An unreadable value, or a map that holds one."""
    if isinstance(node, Mapping):
        return any(isinstance(value, Scalar) and is_unreadable(value) for value in node.entries.values())
    return isinstance(node, Scalar) and node.text_col == _UNREADABLE


def at_path(node: Node, path: Path) -> Node | None:
    """The node at ``path``, None when there is none."""
    found: Node | None = node
    for step in path:
        found = child(found, step) if found is not None else None
    return found


def mapping(entries: AnyMapping[str, Node], pos: Pos) -> Mapping:
    """A map whose keys stand where their values do."""
    return Mapping(dict(entries), {key: node.pos for key, node in entries.items()}, pos)


def with_entry(node: Mapping, key: str, value: Node, key_pos: Pos | None = None) -> Mapping:
    """``node`` with ``key`` set; the key keeps its position, or takes ``key_pos``, or its value's."""
    where = key_pos or node.keys.get(key, value.pos)
    return Mapping({**node.entries, key: value}, {**node.keys, key: where}, node.pos)


def without_entry(node: Mapping, *keys: str) -> Mapping:
    entries = {key: value for key, value in node.entries.items() if key not in keys}
    return Mapping(entries, {key: node.keys[key] for key in entries}, node.pos)


def child(node: Node, step: str | int) -> Node | None:
    """The node one path step below, None when there is none."""
    name = bracketed(step)
    if isinstance(node, Mapping):
        key = str(step).removeprefix("\\")
        found = node.entries.get(key)
        return found if found is not None or name is None else node.entries.get(name)
    if isinstance(node, Sequence):
        if name is not None:
            return next((item for item in node.items if item_name(item) == name), None)
        if isinstance(step, int) and 0 <= step < len(node.items):
            return node.items[step]
    return None


def item_name(node: Node) -> str | None:
    """The ``name`` of a list item that is a map with one."""
    name = node.entries.get("name") if isinstance(node, Mapping) else None
    return name.value if isinstance(name, Scalar) and isinstance(name.value, str) else None


def locate(node: Node, path: Path, *, at_key: bool = False) -> Pos:
    """Where ``path`` stands, or the deepest part of it that does.

    A scalar stands at its text, a list or map at the key that holds it, and so does anything when ``at_key``.
    """
    pos = node.pos
    for step in path:
        found = child(node, step)
        if found is None:
            return pos
        held = isinstance(node, Mapping) and (at_key or not isinstance(found, Scalar))
        pos = node.key_pos(str(step).removeprefix("\\")) if held and isinstance(node, Mapping) else found.pos
        node = found
    return pos
