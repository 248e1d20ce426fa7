"""Plain JSON-like trees as values: merge, leaves, changes and their cost. Standard library only, nothing is mutated.

A list whose items are all maps with distinct string ``name``s is *keyed*: it merges by name and its items are
addressed by name, ``("models", "[qwen]", "replicas")``, so that the order of items never matters. Every other list is
one leaf. ``None`` is a value like any other, and nothing here deletes by merging: an empty keyed list merged over a
keyed list names no item and so changes none.

Merging is associative over trees of one shape (a path never a map in one and a scalar in another), which is what a
schema guarantees; layers rely on it.

A field declares the cost of its change as ``Annotated[int, UpdateClass.ROLL]``. On a field that holds a map it is a
floor: the least that a change of any field inside costs there. So a block that kinds share is cheap to change in one (a
gateway's scheduling) and impossible in another (a running job's).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Final, TypeAlias

Step: TypeAlias = str | int
FieldPath: TypeAlias = tuple[Step, ...]


class _Sentinel(Enum):
    ABSENT = "absent"

    def __repr__(self) -> str:
        return "ABSENT"

    def __bool__(self) -> bool:
        return False


ABSENT: Final = _Sentinel.ABSENT
"""No value at a path, as opposed to ``None``."""


@dataclass(frozen=True)
class Change:
    """One leaf, before and after; ABSENT where there was or will be none."""

    path: FieldPath
    old: Any
    new: Any


def merge(base: Any, patch: Any) -> Any:
    """``patch`` over ``base``: maps merge, keyed lists merge by name, anything else replaces."""
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        merged = dict(base)
        for key, value in patch.items():
            merged[key] = merge(base[key], value) if key in base else value
        return merged
    if is_keyed(base) and (patch == [] or is_keyed(patch)):
        patches = {item["name"]: item for item in patch}
        items = [merge(item, patches.pop(item["name"])) if item["name"] in patches else item for item in base]
        return [*items, *patches.values()]
    return patch


def is_keyed(value: Any) -> bool:
    """A non-empty list of maps that all have distinct string names."""
    if not isinstance(value, list) or not value:
        return False
    names = [item.get("name") if isinstance(item, Mapping) else None for item in value]
    return all(isinstance(name, str) for name in names) and len(set(names)) == len(names)


def leaves(tree: Any) -> dict[FieldPath, Any]:
    """Every leaf by its path, in document order. Empty maps and lists are leaves, but an empty tree has none."""
    return {} if tree == {} else dict(_walk(tree, ()))


def changes(old: Any, new: Any) -> tuple[Change, ...]:
    """The leaves that differ, by path; equal for trees that differ in the order of keyed items alone. An empty map that
    is filled is told by its new entries."""
    before, after = leaves(old), leaves(new)
    filled = {path[:length] for path in after for length in range(len(path))}
    paths = [path for path in before if before[path] != {} or path not in filled]
    paths += [path for path in after if path not in before]
    pairs = ((path, before.get(path, ABSENT), after.get(path, ABSENT)) for path in paths)
    return tuple(Change(path, a, b) for path, a, b in pairs if not _same(a, b))


def get_path(tree: Any, path: FieldPath) -> Any:
    """The value at ``path``, ``ABSENT`` when there is none."""
    for step in path:
        slot = _slot(tree, step)
        if slot is None:
            return ABSENT
        tree = tree[slot]
    return tree


def set_path(tree: Any, path: FieldPath, value: Any) -> Any:
    """A copy of ``tree`` with ``value`` at ``path``; missing maps and keyed items on the way are created."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    name = bracketed(step)
    if name is not None and not (isinstance(tree, Mapping) and tree):
        tree = tree if isinstance(tree, list) else []
    if isinstance(tree, list):
        slot = _slot(tree, step)
        if slot is None and name is not None:
            return [*tree, set_path({"name": name}, rest, value)]
        if slot is None:
            raise KeyError(path_text(path))
        return [set_path(item, rest, value) if at == slot else item for at, item in enumerate(tree)]
    copy = dict(tree) if isinstance(tree, Mapping) else {}
    slot = _slot(copy, step)
    key = _key(step) if slot is None else slot
    copy[key] = set_path(copy.get(key, {}), rest, value)
    return copy


def delete_path(tree: Any, path: FieldPath) -> Any:
    """A copy of ``tree`` without ``path``; branches that become empty go too. Unchanged when there is no such path."""
    if not path:
        return {}
    slot = _slot(tree, path[0])
    if slot is None:
        return tree
    shorter = delete_path(tree[slot], path[1:]) if len(path) > 1 else ABSENT
    gone = shorter is ABSENT or (_is_empty(shorter) and not _is_empty(tree[slot]))
    if isinstance(tree, list):
        kept = [] if gone else [shorter]
        return [*tree[:slot], *kept, *tree[slot + 1 :]]
    copy = {key: value for key, value in tree.items() if key != slot}
    return copy if gone else {key: shorter if key == slot else value for key, value in tree.items()}


def path_text(path: FieldPath) -> str:
    """``spec.models[qwen].replicas``; other keys than plain words go in brackets: ``labels[areal.dev/x]``."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif bracketed(step) is not None:
            text += step
        elif _PLAIN_KEY.fullmatch(step):
            text += f".{step}" if text else step
        else:
            text += f"[{_key(step)}]"
    return text


def parse_path(text: str) -> FieldPath:
    """The inverse of ``path_text``; digits in brackets are an index. Raises ValueError with the offending column."""
    steps: list[Step] = []
    at = 0
    while at < len(text):
        match = _STEP.match(text, at)
        if match is None or (match["key"] is not None and bool(steps) != bool(match["dot"])):
            raise ValueError(f'"{text}" is not a path: unexpected "{text[at]}" at column {at + 1}')
        if match["key"] is not None:
            steps.append(match["key"])
        else:
            inner = match["inner"]
            steps.append(int(inner) if inner.isdigit() else f"[{inner}]")
        at = match.end()
    return tuple(steps)


def bracketed(step: Step) -> str | None:
    """The name in a ``[name]`` step, None for any other step."""
    if isinstance(step, str) and len(step) > 2 and step[0] == "[" and step[-1] == "]":
        return step[1:-1]
    return None


_PLAIN_KEY = re.compile(r"[\w$-]+")
_STEP = re.compile(r"(?P<dot>\.)?(?P<key>[\w$-]+)|\[(?P<inner>[^\[\]]+)\]")


def _walk(tree: Any, path: FieldPath) -> Iterator[tuple[FieldPath, Any]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            escaped = f"\\{key}" if key[:1] in ("[", "\\") else key  # else it would read as a ``[name]`` step
            yield from _walk(value, (*path, escaped))
    elif is_keyed(tree):
        for item in tree:
            yield from _walk(item, (*path, f"[{item['name']}]"))
    else:
        yield path, tree


def _slot(tree: Any, step: Step) -> Any:
    """The key or index in ``tree`` that ``step`` addresses, None when there is none."""
    name = bracketed(step)
    if isinstance(tree, Mapping):
        for key in (_key(step), name):
            if key is not None and key in tree:
                return key
        return None
    if not isinstance(tree, list):
        return None
    if name is not None:
        return next(
            (at for at, item in enumerate(tree) if isinstance(item, Mapping) and item.get("name") == name), None
        )
    return step if isinstance(step, int) and -len(tree) <= step < len(tree) else None


def _key(step: Step) -> Any:
    return step[1:] if isinstance(step, str) and step[:1] == "\\" else step


def _is_empty(value: Any) -> bool:
    return value in ({}, [])


def _same(a: Any, b: Any) -> bool:
    """Equal and of one type: ``1`` is not ``True``, ``1`` is not ``1.0``, to someone who wrote one of them."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)


class UpdateClass(IntEnum):
    """Ordered by cost; a plan takes the highest class among the changed leaves and names the leaf that decided."""

    META = 0
    """Recorded only: no process learns of it."""
    HOT = 1
    """Applied to what runs: a call to a router or gateway, or replicas added or removed."""
    ROLL = 2
    """New processes beside the old ones, then the old ones drained: no request is lost."""
    RECREATE = 3
    """The old processes stop before the new ones start: requests fail in between."""
    IMMUTABLE = 4
    """Only by deleting and creating the object (``--replace``)."""


# -- changes of a job's configuration from a command line or a manifest. ``key=value`` sets a key; ``+key=value`` (or
# ``++``) one that may be new; ``~key`` removes a key, ``~key=value`` only where it has that value. Keys are dotted,
# list items are numbers: ``actor.optimizer.lr=1e-4``, ``rollout.scheduling_spec.0.gpu=1``. A value is YAML.

_OVERRIDE = re.compile(r"(?P<op>\+\+|\+|~)?(?P<key>[^=+~\s][^=\s]*)(?P<eq>=(?P<value>.*))?", re.S)


@dataclass(frozen=True)
class Override:
    """``op`` is "", "+" or "~". ``value`` is text in YAML, None where none was given."""

    text: str
    op: str
    path: FieldPath
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


def apply_override(tree: Any, override: Override, value: Any) -> None:
    """Change ``tree`` in place, making the maps on the way; ``value`` is the decoded one. Raises BadOverride."""
    *way, last = override.path
    missing = BadOverride(f"~{dotted(override.path)}: the file has no such key")
    node = tree
    for depth, part in enumerate(way):
        slot = _place(node, part, override.path[:depth])
        below = node.get(slot) if isinstance(node, dict) else node[slot]
        if below is None and override.op == "~":
            raise missing
        if below is None:
            below = node[slot] = {}
        node = below
    if override.op != "~":
        node[_place(node, last, tuple(way))] = value
    elif not isinstance(node, dict) or str(last) not in node:
        raise missing
    elif override.value is not None and node[str(last)] != value:
        raise BadOverride(f"~{dotted(override.path)}: the file says {node[str(last)]!r} there")
    else:
        del node[str(last)]


def _place(node: Any, part: Step, at: FieldPath) -> Any:
    """The key or index that ``part`` means in ``node``, which stands at ``at``. Raises BadOverride."""
    if isinstance(node, list) and isinstance(part, int):
        if part >= len(node):
            raise BadOverride(f"{dotted(at)} has {len(node)} items, there is none with number {part}")
        return part
    if not isinstance(node, dict):
        raise BadOverride(f"{dotted(at)} is {node!r}, it has no keys")
    return str(part)


def dotted(path: FieldPath) -> str:
    return ".".join(map(str, path))
