"""YAML values with positions, the faults found in them, and merge patches. Standard library only.

Nodes are immutable: templating, ``generate`` and overlays build new nodes from old ones, and each leaf keeps the
position of its source text. Nodes can be shared (an alias is the same object as its anchor). All faults of all files
are collected before an error is raised; each is printed as ``file:line:col: path: message``.

In a patch, maps merge, keyed lists merge by ``name``, and other values are replaced. In addition to ``tree.merge``,
``key: null`` and ``{$patch: delete}`` remove, ``$patch: replace`` (in a map, or as the first item of a list) replaces
instead of merging, and ``{$append: [...]}`` adds to a list without names. Values from the patch have positions in the
patch, all others in the base.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from areal.dataclasses import dataclass, field, replace
from areal.errors import InvalidManifest
from areal.resources.tree import FieldPath, bracketed

STDIN = "<stdin>"
FLAG = "--set"  # the "file" of a value on the command line


class Pos(NamedTuple):
    """A position in a file; line and column are 1-based. For a value from the command line, the file is the flag."""

    file: str
    line: int
    col: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.col}"


@dataclass(frozen=True)
class Diagnostic:
    """One fault. ``path``: the field of the resource (``spec.models[qwen].replicas``), empty for the whole file.
    ``absent``: the field whose absence is the fault."""

    pos: Pos
    path: str
    message: str
    hint: str | None = None
    absent: str = ""

    def __str__(self) -> str:
        where = f"{self.pos}: {self.path}" if self.path else str(self.pos)
        return f"{where}: {self.message}"

    def to_json(self) -> dict[str, str | int | None]:
        return {**self.pos._asdict(), "path": self.path, "message": self.message, "hint": self.hint}


class ManifestError(InvalidManifest):
    """Invalid manifests, with at least one diagnostic; the diagnostics are in file order."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        hints = dict.fromkeys(found.hint for found in self.diagnostics if found.hint)
        super().__init__("\n".join(map(str, self.diagnostics)), hint="; ".join(hints) or None)


@dataclass
class Problems:
    """Collects diagnostics. A fault that occurs several times (alias, template) is kept once, with the origins
    (``each[2]``) where it occurred; ``met`` counts all occurrences. ``files``: the files in the order read."""

    found: dict[Diagnostic, dict[str, None]] = field(default_factory=dict)
    met: int = 0
    files: dict[str, None] = field(default_factory=dict)

    def add(
        self, pos: Pos, path: str, message: str, *, hint: str | None = None, absent: str = "", origin: str = ""
    ) -> None:
        self.met += 1
        self.found.setdefault(Diagnostic(pos, path, message, hint, absent), {})[origin] = None

    def __bool__(self) -> bool:
        return bool(self.found)

    def diagnostics(self) -> list[Diagnostic]:
        """Return the diagnostics by file, in the order files were read, then by position."""
        files = {**self.files, **{diagnostic.pos.file: None for diagnostic in self.found}}
        order = {file: index for index, file in enumerate(files)}
        ordered = sorted(self.found, key=lambda found: (order[found.pos.file], found.pos[1:]))
        placed = []
        for each in ordered:
            origins = [origin for origin in self.found[each] if origin]
            more = f" and {len(origins) - 1} more" if len(origins) > 1 else ""
            placed.append(replace(each, message=f"{each.message} ({origins[0]}{more})" if origins else each.message))
        return placed


Value: TypeAlias = str | int | float | bool | None


_UNREADABLE = -1
_COMPUTED = -2


class ScalarNode(NamedTuple):
    """``text_col``: column of the value's first character if its text is verbatim on one line, else 0; -1 marks an
    unreadable value, -2 the value of an expression."""

    value: Value
    pos: Pos
    text_col: int = 0


class SequenceNode(NamedTuple):
    items: tuple[Node, ...]
    pos: Pos


class MappingNode(NamedTuple):
    """``keys``: the position of every key of ``entries``."""

    entries: dict[str, Node]
    keys: dict[str, Pos]
    pos: Pos

    def get(self, key: str) -> Node | None:
        return self.entries.get(key)

    def key_pos(self, key: str) -> Pos:
        """Return the position of ``key``, or of the map if it has no such key."""
        return self.keys.get(key, self.pos)


Node: TypeAlias = ScalarNode | SequenceNode | MappingNode


def plain(node: Node) -> Any:
    """Return the value without positions."""
    if isinstance(node, MappingNode):
        return {key: plain(value) for key, value in node.entries.items()}
    if isinstance(node, SequenceNode):
        return [plain(item) for item in node.items]
    return node.value


def to_node(value: Any, pos: Pos) -> Node:
    """Convert the value of an expression to nodes that all have the position ``pos``."""
    if isinstance(value, Mapping):
        entries = {str(key): to_node(item, pos) for key, item in value.items()}
        return MappingNode(entries, dict.fromkeys(entries, pos), pos)
    if isinstance(value, (list, tuple)):
        return SequenceNode(tuple(to_node(item, pos) for item in value), pos)
    return ScalarNode(value, pos, _COMPUTED)


def is_computed(node: Node | None) -> bool:
    """Return whether ``node`` is a scalar that is the value of an expression."""
    return isinstance(node, ScalarNode) and node.text_col == _COMPUTED


def unreadable(pos: Pos) -> ScalarNode:
    """Return a placeholder for a value whose fault has been reported, so that it is not also reported as missing."""
    return ScalarNode(None, pos, _UNREADABLE)


def is_unreadable(node: Node | None) -> bool:
    """Return whether ``node`` is an unreadable value, or a map with one as an entry."""
    if isinstance(node, MappingNode):
        return any(isinstance(value, ScalarNode) and is_unreadable(value) for value in node.entries.values())
    return isinstance(node, ScalarNode) and node.text_col == _UNREADABLE


def text_place(node: ScalarNode, column: int) -> tuple[Pos, str]:
    """Return the position of a 1-based ``column`` of a scalar's text, and "". If the file does not show the text
    verbatim, returns the scalar's position and the column in words."""
    if node.text_col > 0:
        return node.pos._replace(col=node.text_col + column - 1), ""
    return node.pos, f" (column {column} of the text)"


def at_path(node: Node, path: FieldPath) -> Node | None:
    """Return the node at ``path``; None if there is none."""
    found: Node | None = node
    for step in path:
        found = child(found, step) if found is not None else None
    return found


def mapping(entries: Mapping[str, Node], pos: Pos) -> MappingNode:
    """Return a map in which each key has the position of its value."""
    return MappingNode(dict(entries), {key: node.pos for key, node in entries.items()}, pos)


def with_entry(node: MappingNode, key: str, value: Node, key_pos: Pos | None = None) -> MappingNode:
    """Return ``node`` with ``key`` set. The key's position is ``key_pos``, else its old position, else the value's."""
    where = key_pos or node.keys.get(key, value.pos)
    return MappingNode({**node.entries, key: value}, {**node.keys, key: where}, node.pos)


def without_entry(node: MappingNode, *keys: str) -> MappingNode:
    entries = {key: value for key, value in node.entries.items() if key not in keys}
    return MappingNode(entries, {key: node.keys[key] for key in entries}, node.pos)


def child(node: Node, step: str | int) -> Node | None:
    """Return the node one path step below; None if there is none."""
    name = bracketed(step)
    if isinstance(node, MappingNode):
        key = str(step).removeprefix("\\")
        found = node.entries.get(key)
        return found if found is not None or name is None else node.entries.get(name)
    if isinstance(node, SequenceNode):
        if name is not None:
            return next((item for item in node.items if item_name(item) == name), None)
        if isinstance(step, int) and 0 <= step < len(node.items):
            return node.items[step]
    return None


def item_name(node: Node) -> str | None:
    """Return the ``name`` of a list item; None if it has none."""
    name = node.entries.get("name") if isinstance(node, MappingNode) else None
    return name.value if isinstance(name, ScalarNode) and isinstance(name.value, str) else None


def text_of(node: Node | None) -> str:
    """Return the text of a scalar; empty for any other value."""
    return node.value if isinstance(node, ScalarNode) and isinstance(node.value, str) else ""


def locate(node: Node, path: FieldPath, *, at_key: bool = False) -> Pos:
    """Return the position of ``path``, or of the deepest part of it that exists.

    The position of a scalar is that of its text; of a list or map, or of any value if ``at_key``, that of its key.
    """
    pos = node.pos
    for step in path:
        found = child(node, step)
        if found is None:
            return pos
        held = isinstance(node, MappingNode) and (at_key or not isinstance(found, ScalarNode))
        pos = node.key_pos(str(step).removeprefix("\\")) if held and isinstance(node, MappingNode) else found.pos
        node = found
    return pos


DIRECTIVE = "$patch"
APPEND = "$append"


def patched(base: Node, patch: Node, problems: Problems) -> Node:
    """Apply the merge patch ``patch`` to ``base``."""
    directive = _directive(patch, problems)
    if directive == "replace" or (isinstance(patch, MappingNode) and isinstance(base, ScalarNode)):
        return stripped(patch, problems)
    if isinstance(patch, MappingNode) and APPEND in patch.entries:
        return _appended(base, patch, problems)
    if isinstance(base, MappingNode) and isinstance(patch, MappingNode):
        return _merged(base, patch, problems)
    if (
        isinstance(base, SequenceNode)
        and isinstance(patch, SequenceNode)
        and _names(patch)
        and (_names(base) or not base.items)
    ):
        return _merged_items(base, patch, problems)
    return stripped(patch, problems)


def stripped(patch: Node, problems: Problems) -> Node:
    """Apply a patch to nothing: its removals and directives are dropped."""
    if isinstance(patch, MappingNode):
        if APPEND in patch.entries:
            return _appended(SequenceNode((), patch.pos), patch, problems)
        _directive(patch, problems)
        entries = {
            key: stripped(value, problems)
            for key, value in patch.entries.items()
            if key != DIRECTIVE and not _removes(value, problems)
        }
        return MappingNode(entries, {key: patch.keys[key] for key in entries}, patch.pos)
    if isinstance(patch, SequenceNode):
        kept = (item for item in patch.items if not _is_marker(item) and _directive(item, problems) != "delete")
        return SequenceNode(tuple(stripped(item, problems) for item in kept), patch.pos)
    return patch


def _merged(base: MappingNode, patch: MappingNode, problems: Problems) -> MappingNode:
    entries, keys = dict(base.entries), dict(base.keys)
    for key, value in patch.entries.items():
        if key == DIRECTIVE:
            continue
        if _removes(value, problems):
            entries.pop(key, None)
            keys.pop(key, None)
            continue
        entries[key] = patched(entries[key], value, problems) if key in entries else stripped(value, problems)
        keys.setdefault(key, patch.keys[key])
    return MappingNode(entries, keys, base.pos)


def _merged_items(base: SequenceNode, patch: SequenceNode, problems: Problems) -> SequenceNode:
    if patch.items and _is_marker(patch.items[0]):
        return SequenceNode(tuple(stripped(item, problems) for item in patch.items[1:]), patch.pos)
    patches = {item_name(item): item for item in patch.items}
    items: list[Node] = []
    for item in base.items:
        over = patches.pop(item_name(item), None)
        if over is None:
            items.append(item)
        elif _directive(over, problems) != "delete":
            items.append(patched(item, over, problems))
    added = (stripped(item, problems) for item in patches.values() if _directive(item, problems) != "delete")
    return SequenceNode((*items, *added), base.pos)


def _appended(base: Node, patch: MappingNode, problems: Problems) -> Node:
    added = patch.entries[APPEND]
    if not isinstance(base, SequenceNode) or not isinstance(added, SequenceNode) or len(patch.entries) != 1:
        problems.add(patch.keys[APPEND], "", f"{APPEND} adds a list to a list, alone in its map")
        return base
    return SequenceNode((*base.items, *added.items), base.pos)


def _names(node: SequenceNode) -> bool:
    """Return whether every item has a name; a leading ``{$patch: replace}`` does not count."""
    items = node.items[1:] if node.items and _is_marker(node.items[0]) else node.items
    names = [item_name(item) for item in items]
    return bool(node.items) and None not in names and len(set(names)) == len(names)


def _is_marker(node: Node) -> bool:
    return isinstance(node, MappingNode) and list(node.entries) == [DIRECTIVE]


def _removes(node: Node, problems: Problems) -> bool:
    if isinstance(node, ScalarNode):
        return node.value is None and not is_unreadable(node)
    return _directive(node, problems) == "delete"


def _directive(node: Node, problems: Problems) -> str | None:
    found = node.get(DIRECTIVE) if isinstance(node, MappingNode) else None
    if found is None:
        return None
    if isinstance(found, ScalarNode) and found.value in ("delete", "replace"):
        return str(found.value)
    problems.add(found.pos, DIRECTIVE, 'expected "delete" or "replace"')
    return None
