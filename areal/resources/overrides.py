"""``key=value``, ``+key=value``, ``~key``: changes of a job's configuration from a command line or a manifest.

``key=value`` sets a key; ``+key=value`` (or ``++``) one that may be new; ``~key`` removes a key, ``~key=value`` only
where it has that value. Keys are dotted, list items are numbers: ``actor.optimizer.lr=1e-4``,
``rollout.scheduling_spec.0.gpu=1``. A value is YAML: ``[1, 2]``, ``null``, ``'text'``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

KeyPath = tuple[str | int, ...]
_OVERRIDE = re.compile(r"(?P<op>\+\+|\+|~)?(?P<key>[^=+~\s][^=\s]*)(?P<eq>=(?P<value>.*))?", re.S)


@dataclass(frozen=True)
class Override:
    """``op`` is "", "+" or "~". ``value`` is text in YAML, None where none was given."""

    text: str
    op: str
    path: KeyPath
    value: str | None


class BadOverride(ValueError):
    pass


def parse_override(text: str) -> Override:
    """Raises BadOverride."""
    match = _OVERRIDE.fullmatch(text)
    if match is None:
        raise BadOverride(f"{text!r} is no override: write key=value, +key=value or ~key")
    op = "+" if match["op"] == "++" else match["op"] or ""
    if op != "~" and match["eq"] is None:
        raise BadOverride(f"{text!r} has no value: write {match['key']}=value")
    parts = match["key"].split(".")
    if not all(parts):
        raise BadOverride(f"{text!r}: a part of the key is empty")
    return Override(text, op, tuple(int(part) if part.isdecimal() else part for part in parts), match["value"])


def apply(tree: Any, override: Override, value: Any) -> None:
    """Change ``tree``; ``value`` is the decoded one. Raises BadOverride."""
    if override.op == "~":
        _remove(tree, override.path, value, only_this=override.value is not None)
    else:
        _set(tree, override.path, value)


def _set(tree: Any, path: KeyPath, value: Any) -> None:
    """Set ``path`` in ``tree``, making the maps on its way. Raises BadOverride where something else is there."""
    *way, last = path
    node = tree
    for depth, part in enumerate(way):
        below = _child(node, part, path[:depth])
        if below is None:
            below = {}
            _put(node, part, below, path[:depth])
        node = below
    _put(node, last, value, tuple(way))


def _remove(tree: Any, path: KeyPath, value: Any, *, only_this: bool) -> None:
    """Remove ``path``; with ``only_this``, where it has that value. Raises BadOverride."""
    *way, last = path
    node = tree
    for depth, part in enumerate(way):
        node = _child(node, part, path[:depth]) if node is not None else None
    if not isinstance(node, dict) or last not in node:
        raise BadOverride(f"~{dotted(path)}: the file has no such key")
    if only_this and node[last] != value:
        raise BadOverride(f"~{dotted(path)}: the file says {node[last]!r} there")
    del node[last]


def _child(node: Any, part: str | int, at: KeyPath) -> Any:
    if isinstance(node, list) and isinstance(part, int):
        if part >= len(node):
            raise BadOverride(f"{dotted(at)} has {len(node)} items, there is none with number {part}")
        return node[part]
    if not isinstance(node, dict):
        raise BadOverride(f"{dotted(at)} is {node!r}, it has no keys")
    return node.get(str(part))


def _put(node: Any, part: str | int, value: Any, at: KeyPath) -> None:
    if isinstance(node, list) and isinstance(part, int):
        if part >= len(node):
            raise BadOverride(f"{dotted(at)} has {len(node)} items, there is none with number {part}")
        node[part] = value
    elif isinstance(node, dict):
        node[str(part)] = value
    else:
        raise BadOverride(f"{dotted(at)} is {node!r}, it has no keys")


def dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))
