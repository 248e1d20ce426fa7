"""Expressions in documents, evaluated on nodes and never on text: what is not an expression keeps its position, and
what an expression yields stands where the expression does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from areal.resources.diagnostics import Pos, Problems
from areal.resources.documents import Document
from areal.resources.expressions import ExpressionError, Scope, parse_template
from areal.resources.expressions.template import OPENING
from areal.resources.nodes import Mapping, Node, Scalar, Sequence, item_name, to_node, unreadable
from areal.resources.tree import Path, Step, path_text

MAX_RENDERED = 4_000_000
TOO_MUCH = "templates and expressions yield more than any set of manifests needs"


_RESULT_COST = 4  # a value made by an expression, against one of a template, which is shared


@dataclass
class Budget:
    """What the templates and expressions of one rendering may yield together, in values and 64-character pieces of
    text: the bound on a small file that asks for gigabytes."""

    left: int = MAX_RENDERED

    def spend(self, node: Node, cost: int = 1) -> bool:
        """False when the budget is used up."""
        pending = [node]
        while pending and self.left > 0:
            found = pending.pop()
            self.left -= cost
            if isinstance(found, Mapping):
                pending += found.entries.values()
            elif isinstance(found, Sequence):
                pending += found.items
            elif isinstance(found.value, str):
                self.left -= len(found.value) // 64 * cost
        return self.left > 0


@dataclass(frozen=True)
class Context:
    """What expressions of one place may use, and where their faults go."""

    scope: Scope
    problems: Problems
    budget: Budget
    document: Document | None = None

    def with_item(self, item: Any, index: int) -> Context:
        return replace(self, scope=replace(self.scope, item=item, index=index))

    def report(self, pos: Pos, path: Path, message: str) -> None:
        if self.document is not None:
            self.document.report(self.problems, pos, path_text(path), message)
        else:
            self.problems.add(pos, path_text(path), message)


def substitute(node: Node, context: Context, path: Path = ()) -> Node:
    """``node`` with every expression evaluated; the very same node when there is none."""
    if isinstance(node, Scalar):
        return _scalar(node, context, path) if isinstance(node.value, str) and OPENING in node.value else node
    if isinstance(node, Sequence):
        items = tuple(substitute(item, context, (*path, _step(item, at))) for at, item in enumerate(node.items))
        changed = any(new is not old for new, old in zip(items, node.items, strict=True))
        return Sequence(items, node.pos) if changed else node
    entries = {key: substitute(value, context, (*path, key)) for key, value in node.entries.items()}
    changed = any(value is not node.entries[key] for key, value in entries.items())
    return Mapping(entries, node.keys, node.pos) if changed else node


def _step(item: Node, at: int) -> Step:
    name = item_name(item)
    return at if name is None or OPENING in name else f"[{name}]"


def _scalar(node: Scalar, context: Context, path: Path) -> Node:
    if context.budget.left <= 0:
        return unreadable(node.pos)
    try:
        value = parse_template(str(node.value)).evaluate(context.scope)
    except ExpressionError as error:
        pos, message = _place(node, error)
        context.report(pos, path, message)
        return unreadable(node.pos)
    result = to_node(value, node.pos)
    if not context.budget.spend(result, _RESULT_COST):
        context.report(node.pos, path, TOO_MUCH)
        return unreadable(node.pos)
    return result


def _place(node: Scalar, error: ExpressionError) -> tuple[Pos, str]:
    if node.text_col:
        return node.pos._replace(col=node.text_col + error.column - 1), error.message
    return node.pos, f"{error.message} (column {error.column} of the text)"
