"""``generate``: one document into many, a template evaluated once for each item.

    generate:
      each: [{name: small, replicas: 1}, ...]      # or an expression; or matrix: {size: [7b, 32b], tp: [1, 2]}
    template: {kind: Model, metadata: {name: "${{ item.name }}"}, ...}     # or a list of them

``item`` is the item (of a matrix: a map with one value of each axis, the last axis fastest), ``index`` counts from 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from areal.resources.diagnostics import Problems
from areal.resources.documents import Document
from areal.resources.nodes import Mapping, Node, Sequence, plain
from areal.resources.suggest import did_you_mean
from areal.resources.templating import TOO_MUCH, Context, substitute
from areal.resources.validation import describe

MAX_ITEMS = 20_000

_KEYS = ("apiVersion", "generate", "template", "profiles")


def expand(document: Document, context: Context) -> Iterator[Document]:
    """The documents that ``document`` stands for, without expressions."""
    context = replace(context, document=document)
    if "generate" not in document.node.entries and "template" not in document.node.entries:
        node = substitute(document.node, context)
        assert isinstance(node, Mapping)
        yield document._replace(node=node)
        return
    templates = _templates(document, context.problems)
    for index, (item, label) in enumerate(_items(document, context)):
        for template in templates:
            if not context.budget.spend(template):
                context.report(template.pos, ("template",), TOO_MUCH)
                return
            generated = Document(template, document.source, f"{label}[{index}]")
            inner = replace(context.with_item(item, index), document=generated)
            node = substitute(template, inner)
            assert isinstance(node, Mapping)
            yield generated._replace(node=node)


def _templates(document: Document, problems: Problems) -> list[Mapping]:
    for key in document.node.entries:
        if key not in _KEYS:
            message = f'unknown field beside "generate"{did_you_mean(key, _KEYS)}'
            problems.add(document.node.keys[key], key, message)
    node = document.node.get("template")
    if node is None:
        problems.add(document.node.key_pos("generate"), "", '"generate" needs a "template" beside it')
        return []
    found = node.items if isinstance(node, Sequence) else (node,)
    for template in found:
        if not isinstance(template, Mapping):
            problems.add(template.pos, "template", "expected a resource, or a list of resources")
    return [_versioned(document, template) for template in found if isinstance(template, Mapping)]


def _versioned(document: Document, template: Mapping) -> Mapping:
    """A template takes the apiVersion, and the profiles, that stand beside ``generate``."""
    entries, keys = dict(template.entries), dict(template.keys)
    for key in ("apiVersion", "profiles"):
        node = document.node.get(key)
        if node is not None and key not in entries:
            entries[key], keys[key] = node, document.node.keys[key]
    return Mapping(entries, keys, template.pos)


def _items(document: Document, context: Context) -> list[tuple[Any, str]]:
    generate = document.node.get("generate")
    if not isinstance(generate, Mapping) or len(generate.entries) != 1:
        pos = document.node.key_pos("generate")
        context.report(pos, ("generate",), 'exactly one of "each" and "matrix" is needed')
        return []
    (key,) = generate.entries
    before = context.problems.met
    node = substitute(generate.entries[key], context, ("generate", key))
    if context.problems.met > before:
        return []
    if key == "each":
        return [(item, "each") for item in _list(node, context, ("generate", "each"))]
    if key == "matrix":
        return [(item, "matrix") for item in _matrix(node, context)]
    near = did_you_mean(key, ("each", "matrix"))
    context.report(generate.keys[key], ("generate", key), f'unknown field{near}: "each" or "matrix"')
    return []


def _matrix(node: Node, context: Context) -> list[dict[str, Any]]:
    if not isinstance(node, Mapping) or not node.entries:
        context.report(node.pos, ("generate", "matrix"), "expected a map from a name to a list of values")
        return []
    axes = [_list(axis, context, ("generate", "matrix", name)) for name, axis in node.entries.items()]
    size = 1
    for axis in axes:
        size *= len(axis)
    if size > MAX_ITEMS:
        context.report(node.pos, ("generate", "matrix"), f"{size} combinations, at most {MAX_ITEMS} are allowed")
        return []
    return [dict(zip(node.entries, values, strict=True)) for values in itertools.product(*axes)]


def _list(node: Node, context: Context, path: tuple[str, ...]) -> list[Any]:
    if not isinstance(node, Sequence):
        context.report(node.pos, path, f"expected a list, got {describe(plain(node))}")
        return []
    if len(node.items) > MAX_ITEMS:
        context.report(node.pos, path, f"{len(node.items)} items, at most {MAX_ITEMS} are allowed")
        return []
    return [plain(item) for item in node.items]
