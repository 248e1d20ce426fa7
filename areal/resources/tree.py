"""JSON-like trees: merging, leaves, changes and the cost of changes. Standard library only. Only ``apply_override``
changes a tree in place.

A list whose items are all maps with distinct string ``name``s is *keyed*: it merges by name and its items are
addressed by name, ``("models", "[qwen]", "replicas")``, so that the order of items does not matter. Every other list is
one leaf. ``None`` is a value like any other. Merging never deletes: an empty list over a keyed list changes nothing.

Merging is associative for trees of one shape (no path is a map in one tree and a scalar in another). Schemas guarantee
this shape, and layers rely on it.

A field declares the cost of its change as ``Annotated[int, UpdateClass.ROLL]``. On a field that holds a map, the class
is the minimum for every field inside. A section that several kinds share can thus differ in cost: ``scheduler`` is
RECREATE in an InferenceService and IMMUTABLE in a TrainJob.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, IntEnum
from typing import Any, Final, TypeAlias

from areal.dataclasses import dataclass

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
    """A changed leaf. ``old`` or ``new`` is ABSENT if the leaf is added or removed."""

    path: FieldPath
    old: Any
    new: Any


def merge(base: Any, patch: Any) -> Any:
    """Merge ``patch`` over ``base``: maps merge, keyed lists merge by name, any other value replaces."""
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


def merge_values(base: Any, over: Any) -> Any:
    """Merge ``over`` over ``base``, values of templates or configurations: maps merge, any other value replaces, as in
    Helm."""
    if not (isinstance(base, Mapping) and isinstance(over, Mapping)):
        return over
    return {**base, **{key: merge_values(base[key], value) if key in base else value for key, value in over.items()}}


def is_keyed(value: Any) -> bool:
    """Return whether ``value`` is a non-empty list of maps with distinct string names."""
    if not isinstance(value, list) or not value:
        return False
    names = [item.get("name") if isinstance(item, Mapping) else None for item in value]
    return all(isinstance(name, str) for name in names) and len(set(names)) == len(names)


def leaves(tree: Any) -> dict[FieldPath, Any]:
    """Return every leaf by path, in document order. Empty maps and lists are leaves, but an empty tree has none."""
    return {} if tree == {} else dict(_walk(tree, ()))


def changes(old: Any, new: Any) -> tuple[Change, ...]:
    """Return the leaves that differ; none if only the order of keyed items differs. If an empty map is filled, only its
    new entries are changes."""
    before, after = leaves(old), leaves(new)
    filled = {path[:length] for path in after for length in range(len(path))}
    paths = [path for path in before if before[path] != {} or path not in filled]
    paths += [path for path in after if path not in before]
    pairs = ((path, before.get(path, ABSENT), after.get(path, ABSENT)) for path in paths)
    return tuple(Change(path, a, b) for path, a, b in pairs if not _same(a, b))


def get_path(tree: Any, path: FieldPath) -> Any:
    """Return the value at ``path``; ``ABSENT`` if there is none."""
    for step in path:
        slot = _slot(tree, step)
        if slot is None:
            return ABSENT
        tree = tree[slot]
    return tree


def set_path(tree: Any, path: FieldPath, value: Any) -> Any:
    """Return a copy of ``tree`` with ``value`` at ``path``; missing maps and keyed items on the path are created.
    Raises KeyError for a list index that does not exist."""
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
    key = (name or _key(step)) if slot is None else slot
    copy[key] = set_path(copy.get(key, {}), rest, value)
    return copy


def delete_path(tree: Any, path: FieldPath) -> Any:
    """Return a copy of ``tree`` without ``path``, and without branches that become empty; an unknown path changes
    nothing."""
    if not path:
        return {}
    slot = _slot(tree, path[0])
    if slot is None:
        return tree
    shorter = delete_path(tree[slot], path[1:]) if len(path) > 1 else ABSENT
    is_removed = shorter is ABSENT or (_is_empty(shorter) and not _is_empty(tree[slot]))
    if isinstance(tree, list):
        kept = [] if is_removed else [shorter]
        return [*tree[:slot], *kept, *tree[slot + 1 :]]
    copy = {key: value for key, value in tree.items() if key != slot}
    return copy if is_removed else {key: shorter if key == slot else value for key, value in tree.items()}


def path_text(path: FieldPath) -> str:
    """Return a path as text: ``spec.models[qwen].replicas``; keys with special characters are in brackets:
    ``labels[areal.dev/x]``."""
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
    """Return the path of a text, the inverse of ``path_text``. Digits in brackets are an index, and a key in brackets
    may be quoted. Raises ValueError with the column of the fault."""
    steps: list[Step] = []
    at = 0
    while at < len(text):
        match = _STEP.match(text, at)
        if match is None or (match["key"] is not None and bool(steps) != bool(match["dot"])):
            raise ValueError(f'"{text}" is not a path: unexpected "{text[at]}" at column {at + 1}')
        if match["key"] is not None:
            steps.append(match["key"])
        elif match["inner"] is not None and match["inner"].isdigit():
            steps.append(int(match["inner"]))
        else:
            steps.append(f"[{match['inner'] or match['quoted']}]")
        at = match.end()
    return tuple(steps)


def bracketed(step: Step) -> str | None:
    """Return the name in a ``[name]`` step; None for any other step."""
    if isinstance(step, str) and len(step) > 2 and step[0] == "[" and step[-1] == "]":
        return step[1:-1]
    return None


_PLAIN_KEY = re.compile(r"[\w$-]+")
_STEP = re.compile(
    r"(?P<dot>\.)?(?P<key>[\w$-]+)|\[(?:(?P<quote>[\"'])(?P<quoted>.+?)(?P=quote)|(?P<inner>[^\[\]]+))\]"
)


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
    """Return the key or index in ``tree`` that ``step`` addresses; None if there is none."""
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
    """Return whether two values are equal and of the same types: ``1``, ``1.0`` and ``True`` differ in YAML."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)


class UpdateClass(IntEnum):
    """Cost of a change, ascending. A plan uses the highest class among the changed leaves, and names that leaf."""

    META = 0
    """Recorded only; no process is affected."""
    HOT = 1
    """Applied to running processes: a request to a router or gateway, or replicas added or removed."""
    ROLL = 2
    """New processes beside the old ones, then the old ones drained: no request is lost."""
    RECREATE = 3
    """The old processes stop before the new ones start: requests fail in between."""
    IMMUTABLE = 4
    """Refused; only ``--replace`` applies it, by deleting and recreating the object."""


# Overrides of a job's configuration, from a command line or a manifest. ``key=value`` sets a key; ``+key=value`` (or
# ``++``) may also add a new key; ``~key`` removes a key, ``~key=value`` only if it has that value. Keys are dotted and
# list items are numbers: ``actor.optimizer.lr=1e-4``, ``rollout.scheduling_spec.0.gpu=1``. A value is YAML.

_OVERRIDE = re.compile(r"(?P<op>\+\+|\+|~)?(?P<key>[^=+~\s][^=\s]*)(?P<eq>=(?P<value>.*))?", re.S)


@dataclass(frozen=True)
class Override:
    """A parsed override. ``op``: "", "+" or "~"; ``value``: YAML text, None if none is given."""

    text: str
    op: str
    path: FieldPath
    value: str | None


class BadOverride(ValueError):
    pass


def parse_override(text: str) -> Override:
    """Parse an override. Raises BadOverride."""
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
    """Change ``tree`` in place; missing maps on the path are created. ``value``: the parsed value of ``override``.
    Raises BadOverride."""
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
    """Return the key or index in ``node`` for ``part``; ``at`` is the path of ``node``. Raises BadOverride."""
    if isinstance(node, list) and isinstance(part, int):
        if part >= len(node):
            raise BadOverride(f"{dotted(at)} has {len(node)} items, there is none with number {part}")
        return part
    if not isinstance(node, dict):
        raise BadOverride(f"{dotted(at)} is {node!r}, it has no keys")
    return str(part)


def dotted(path: FieldPath) -> str:
    return ".".join(map(str, path))


TRAINERS = ("grpo", "ppo", "sft", "rw", "dpo")


def lifted(tree: dict[str, object], overridden: Iterable[FieldPath] = ()) -> dict[str, object]:
    """Move the keys that AReaL-lite nests below ``trainer.grpo`` (or another trainer) to the top level, where what
    overrides have set (``overridden``) is left as it is."""
    trainer = tree.get("trainer")
    if not isinstance(trainer, dict):
        return tree
    nested = [part for name in TRAINERS if isinstance(part := trainer.get(name), dict)]
    found = {**tree, "trainer": {key: value for key, value in trainer.items() if key not in TRAINERS}}
    for part in nested:
        found = merge_values(found, part)
    for path in overridden:
        depth = 2 if path[0] == "trainer" and path[1:2] and path[1] in TRAINERS else 0
        if len(path) > depth and (value := get_path(tree, path)) is not ABSENT:
            found = set_path(found, path[depth:], value)
    return found
