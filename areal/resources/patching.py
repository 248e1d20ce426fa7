"""Merge patches on nodes: what an overlay says over what its base says.

Maps merge, keyed lists merge by ``name``, anything else is replaced. Beyond ``tree.merge`` a patch can remove:
``key: null`` and ``{$patch: delete}`` remove, ``$patch: replace`` (in a map, or as the first item of a list) replaces
instead of merging, and ``{$append: [...]}`` adds to a list without names. Whatever the patch writes keeps the patch's
position, everything else the base's.
"""

from __future__ import annotations

from areal.resources.diagnostics import Problems
from areal.resources.nodes import Mapping, Node, Scalar, Sequence, is_unreadable, item_name

DIRECTIVE = "$patch"
APPEND = "$append"


def patched(base: Node, patch: Node, problems: Problems) -> Node:
    """``patch`` over ``base``."""
    directive = _directive(patch, problems)
    if directive == "replace" or (isinstance(patch, Mapping) and isinstance(base, Scalar)):
        return stripped(patch, problems)
    if isinstance(patch, Mapping) and APPEND in patch.entries:
        return _appended(base, patch, problems)
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        return _merged(base, patch, problems)
    if (
        isinstance(base, Sequence)
        and isinstance(patch, Sequence)
        and _names(patch)
        and (_names(base) or not base.items)
    ):
        return _merged_items(base, patch, problems)
    return stripped(patch, problems)


def stripped(patch: Node, problems: Problems) -> Node:
    """A patch that lands where nothing was: what it would remove is not there, its directives have no more to do."""
    if isinstance(patch, Mapping):
        if APPEND in patch.entries:
            return _appended(Sequence((), patch.pos), patch, problems)
        _directive(patch, problems)
        entries = {
            key: stripped(value, problems)
            for key, value in patch.entries.items()
            if key != DIRECTIVE and not _removes(value, problems)
        }
        return Mapping(entries, {key: patch.keys[key] for key in entries}, patch.pos)
    if isinstance(patch, Sequence):
        kept = (item for item in patch.items if not _is_marker(item) and _directive(item, problems) != "delete")
        return Sequence(tuple(stripped(item, problems) for item in kept), patch.pos)
    return patch


def _merged(base: Mapping, patch: Mapping, problems: Problems) -> Mapping:
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
    return Mapping(entries, keys, base.pos)


def _merged_items(base: Sequence, patch: Sequence, problems: Problems) -> Sequence:
    if patch.items and _is_marker(patch.items[0]):
        return Sequence(tuple(stripped(item, problems) for item in patch.items[1:]), patch.pos)
    patches = {item_name(item): item for item in patch.items}
    items: list[Node] = []
    for item in base.items:
        over = patches.pop(item_name(item), None)
        if over is None:
            items.append(item)
        elif _directive(over, problems) != "delete":
            items.append(patched(item, over, problems))
    added = (stripped(item, problems) for item in patches.values() if _directive(item, problems) != "delete")
    return Sequence((*items, *added), base.pos)


def _appended(base: Node, patch: Mapping, problems: Problems) -> Node:
    added = patch.entries[APPEND]
    if not isinstance(base, Sequence) or not isinstance(added, Sequence) or len(patch.entries) != 1:
        problems.add(patch.keys[APPEND], "", f"{APPEND} adds a list to a list, alone in its map")
        return base
    return Sequence((*base.items, *added.items), base.pos)


def _names(node: Sequence) -> bool:
    """Whether every item has a name; a leading ``{$patch: replace}`` does not count."""
    items = node.items[1:] if node.items and _is_marker(node.items[0]) else node.items
    names = [item_name(item) for item in items]
    return bool(node.items) and None not in names and len(set(names)) == len(names)


def _is_marker(node: Node) -> bool:
    return isinstance(node, Mapping) and list(node.entries) == [DIRECTIVE]


def _removes(node: Node, problems: Problems) -> bool:
    if isinstance(node, Scalar):
        return node.value is None and not is_unreadable(node)
    return _directive(node, problems) == "delete"


def _directive(node: Node, problems: Problems) -> str | None:
    found = node.get(DIRECTIVE) if isinstance(node, Mapping) else None
    if found is None:
        return None
    if isinstance(found, Scalar) and found.value in ("delete", "replace"):
        return str(found.value)
    problems.add(found.pos, DIRECTIVE, 'expected "delete" or "replace"')
    return None
