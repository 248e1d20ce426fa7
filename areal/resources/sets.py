"""``--set``: one field from the command line, over everything the files say.

    spec.gateway.port=9000                  when there is one resource
    Model/qwen:spec.replicas=2              any resource, inline models too
    values.size=7b                          a value for expressions

The value is read as YAML. It stands in the resource's own spec, and its position is the flag: ``--set:2:21`` is
column 21 of the second ``--set``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass
from typing import Any

from areal.errors import ArealError
from areal.resources import registry, tree
from areal.resources.diagnostics import Pos, Problems
from areal.resources.documents import Document
from areal.resources.kinds import KINDS, Ref, parse_ref
from areal.resources.loader import MAX_DEPTH, load_value
from areal.resources.nodes import Mapping, Node, Scalar, Sequence, item_name, mapping, plain, with_entry
from areal.resources.rename import declared
from areal.resources.suggest import did_you_mean
from areal.resources.tree import Path, bracketed, path_text

FLAG = "--set"

_FORM = re.compile(r"(?:(?P<ref>[A-Za-z]+/[^:=]*):)?(?P<path>[^=]*)=(?P<value>.*)", re.DOTALL)
_ROOTS = ("spec", "metadata", "values")


@dataclass(frozen=True)
class Setting:
    """One ``--set``, read. ``ref`` None: the only resource there is, or a value."""

    ref: Ref | None
    path: Path
    value: Node
    pos: Pos


def parse_settings(texts: AnySequence[str], problems: Problems) -> list[Setting]:
    found = (_parse(text, line, problems) for line, text in enumerate(texts, start=1))
    return [setting for setting in found if setting is not None]


def set_values(values: dict[str, Any], settings: AnySequence[Setting], problems: Problems) -> dict[str, Any]:
    """``values`` with every ``values.x=...``."""
    for setting in settings:
        if setting.path[0] != "values":
            continue
        if setting.ref is not None or len(setting.path) < 2:
            problems.add(setting.pos, path_text(setting.path), "a value is set as values.NAME=..., for no resource")
            continue
        values = tree.set_path(values, setting.path[1:], plain(setting.value))
    return values


def apply_settings(documents: list[Document], settings: AnySequence[Setting], problems: Problems) -> list[Document]:
    """The documents with every setting that is not a value in its place."""
    fields = [setting for setting in settings if setting.path[0] != "values"]
    if not fields:
        return documents
    documents = list(documents)
    names = {name: at for at, document in reversed(list(enumerate(documents))) for name in declared(document)}
    for setting in fields:
        at = _target(documents, names, setting, problems)
        if at is None:
            continue
        document = documents[at]
        try:
            node = _set(document.node, _path_in(document, setting), setting, (), _text(document.node.get("kind")))
        except _NoPlace as error:
            problems.add(setting.pos, path_text(setting.path), str(error))
            continue
        assert isinstance(node, Mapping)
        documents[at] = document._replace(node=node)
    return documents


class _NoPlace(Exception):
    pass


def _parse(text: str, line: int, problems: Problems) -> Setting | None:
    start = Pos(FLAG, line, 1)
    match = _FORM.fullmatch(text)
    if match is None:
        problems.add(start, "", f'"{text}" is not PATH=VALUE', hint="for example --set spec.gateway.port=9000")
        return None
    pos = start._replace(col=match.start("path") + 1)
    try:
        ref = parse_ref(match["ref"]) if match["ref"] is not None else None
        path = tree.parse_path(match["path"])
    except (ArealError, ValueError) as error:
        problems.add(start, "", str(error))
        return None
    if len(path) > MAX_DEPTH:
        problems.add(pos, "", f"the path has more than {MAX_DEPTH} steps")
        return None
    if not path or path[0] not in _ROOTS:
        first = str(path[0]) if path else ""
        problems.add(pos, match["path"], f"a path begins with spec, metadata or values{did_you_mean(first, _ROOTS)}")
        return None
    if path == ("metadata", "name"):
        problems.add(pos, match["path"], "the name is who the object is: it cannot be set")
        return None
    value = load_value(match["value"], FLAG, problems, line=line, col=match.start("value") + 1)
    return None if value is None else Setting(ref, path, value, pos)


def _target(documents: list[Document], names: dict[Ref, int], setting: Setting, problems: Problems) -> int | None:
    """The index of the document that the setting is for."""
    text = path_text(setting.path)
    if setting.ref is None:
        if len(documents) == 1:
            return 0
        hint = f"name one: {FLAG} {min(names, key=names.__getitem__)}:{text}=..." if names else None
        problems.add(setting.pos, text, f"there are {len(documents)} resources, and no one is named", hint=hint)
        return None
    if setting.ref not in names:
        near = did_you_mean(str(setting.ref), map(str, names))
        problems.add(setting.pos, text, f"{setting.ref} is not in these manifests{near}")
        return None
    return names[setting.ref]


def _path_in(document: Document, setting: Setting) -> Path:
    """The path inside the document: an inline model's fields are in its service's list."""
    names = declared(document)
    if setting.ref is not None and names and names[0] != setting.ref:
        return ("spec", "models", f"[{setting.ref.name}]", *setting.path[1:])
    return setting.path


def _set(node: Node | None, path: Path, setting: Setting, above: Path, kind: str) -> Node:
    """``node`` with the setting's value at ``path``; what is missing on the way is made as the kind's model says."""
    if not path:
        return setting.value
    step, here = path[0], (*above, path[0])
    if isinstance(node, Scalar) and node.value is None:
        node = None
    if isinstance(node, Sequence) or (node is None and _is_list(above, kind)):
        items = node.items if isinstance(node, Sequence) else ()
        return Sequence(_set_item(items, path, setting, above, kind), node.pos if node is not None else setting.pos)
    if isinstance(node, Scalar):
        raise _NoPlace(f"{path_text(above)} is no map")
    holder = node if node is not None else mapping({}, setting.pos)
    key = bracketed(step) or str(step)
    return with_entry(
        holder, key, _set(holder.get(key), path[1:], setting, here, kind), holder.keys.get(key, setting.pos)
    )


def _set_item(items: tuple[Node, ...], path: Path, setting: Setting, above: Path, kind: str) -> tuple[Node, ...]:
    step, here = path[0], (*above, path[0])
    name = bracketed(step)
    for at, item in enumerate(items):
        if (name is not None and item_name(item) == name) or step == at:
            return (*items[:at], _set(item, path[1:], setting, here, kind), *items[at + 1 :])
    if name is None:
        raise _NoPlace(f"{path_text(above)} has no item {path_text((step,))}; it has {len(items)}")
    fresh = mapping({"name": Scalar(name, setting.pos)}, setting.pos)
    return (*items, _set(fresh, path[1:], setting, here, kind))


def _is_list(path: Path, kind: str) -> bool:
    if path[:1] != ("spec",) or kind not in KINDS:
        return False
    fields = list(registry.resolve(registry.spec_model(kind), path[1:]))
    return bool(fields) and fields[-1].repeated and fields[-1].name == path[-1]


def _text(node: Node | None) -> str:
    return node.value if isinstance(node, Scalar) and isinstance(node.value, str) else ""
