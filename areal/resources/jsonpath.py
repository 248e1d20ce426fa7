"""A subset of kubectl's JSONPath templates.

``{.items[*].metadata.name}``, ``.status.phase`` (braces may be left out), ``[0]``, ``[-1]``, ``[1:3]``, ``[*]``,
``['a.b']`` or ``.a\\.b``, ``..name`` (any depth), ``[?(@.kind=="Model")]``, ``{range .items[*]}...{end}`` and literal
text around the braces. An absent field prints nothing, as in kubectl. docs/dependencies.md compares libraries.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from areal.errors import UsageFault

_SPLIT = re.compile(r"\{((?:[^{}'\"]|'[^']*'|\"[^\"]*\")*)\}")
_STEP = re.compile(
    r"""\.\.(?P<deep>[\w-]+|\*)
      | (?P<all>\.\*|\[\*\])
      | \.(?P<name>(?:[\w/-]|\\.)+)
      | \[(?P<index>-?\d+)\]
      | \[(?P<slice>-?\d*:-?\d*)\]
      | \[(?P<quoted>'[^']*'|"[^"]*")\]
      | \[\?\((?P<filter>(?:[^()'"]|'[^']*'|"[^"]*")*)\)\]
    """,
    re.VERBOSE,
)
_FILTER = re.compile(r"\s*@(?P<path>[^\s=!<>]*)\s*(?:(?P<op>==|!=|>=|<=|>|<)\s*(?P<value>.+?))?\s*$")
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r"}
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}

Step: TypeAlias = Callable[[Any], Iterable[Any]]
"""A function from a value to the values that one path step selects in it."""


class Node(NamedTuple):
    """Part of a template: literal ``text``, a path (``steps``) whose values are printed, or a ``range`` over them
    with a ``body``."""

    text: str = ""
    steps: tuple[Step, ...] | None = None
    body: tuple[Node, ...] | None = None


def evaluate(template: str, document: Any) -> str:
    return "".join(_render(compile_template(template), document))


def first(expression: str, document: Any) -> Any:
    """Return the first value that one expression selects; None if it selects nothing."""
    for node in compile_template(expression):
        if node.steps is not None and node.body is None:
            return next(iter(_select(node.steps, document)), None)
    return None


def compile_template(template: str) -> tuple[Node, ...]:
    """Parse ``template``. Raises UsageFault with the part that is invalid."""
    return _parse(_tokens(template if "{" in template else f"{{{template}}}"), closing=False)


def _tokens(text: str) -> Iterator[tuple[bool, str]]:
    """Yield (False, literal text) and (True, expression)."""
    at = 0
    for match in _SPLIT.finditer(text):
        if match.start() > at:
            yield False, text[at : match.start()]
        yield True, match[1].strip()
        at = match.end()
    if "{" in text[at:]:
        raise UsageFault(f"jsonpath: an unclosed {{ in {text!r}")
    if text[at:]:
        yield False, text[at:]


def _parse(tokens: Iterator[tuple[bool, str]], *, closing: bool) -> tuple[Node, ...]:
    nodes: list[Node] = []
    for is_expression, text in tokens:
        quoted = is_expression and text[:1] in ("'", '"')
        if quoted or not is_expression:
            literal = text[1:-1] if quoted else text
            nodes.append(Node(re.sub(r"\\[ntr]", lambda match: _ESCAPES[match[0]], literal)))
        elif text == "end":
            if not closing:
                raise UsageFault("jsonpath: {end} without {range}")
            return tuple(nodes)
        elif text.startswith("range "):
            nodes.append(Node("", _steps(text[6:].strip()), _parse(tokens, closing=True)))
        else:
            nodes.append(Node("", _steps(text)))
    if closing:
        raise UsageFault("jsonpath: {range} without {end}")
    return tuple(nodes)


def _steps(path: str) -> tuple[Step, ...]:
    rest = path[1:] if path[:1] in ("$", "@") else path
    if rest in ("", "."):
        return ()
    if rest[0] not in ".[":
        rest = "." + rest
    steps, at = [], 0
    while at < len(rest):
        match = _STEP.match(rest, at)
        if match is None or match.lastgroup is None:
            raise UsageFault(f'jsonpath: cannot read "{rest[at:]}" in "{path}"')
        steps.append(_step(match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return tuple(steps)


def _step(kind: str, text: str) -> Step:
    match kind:
        case "all":
            return _children
        case "deep":
            return lambda item: _descendants(text, item)
        case "name" | "quoted":
            key = re.sub(r"\\(.)", r"\1", text) if kind == "name" else text[1:-1]
            return lambda item: [item[key]] if isinstance(item, dict) and key in item else []
        case "filter":
            steps, holds = _condition(text)
            return lambda item: (
                [each for each in item if any(map(holds, _select(steps, each)))] if isinstance(item, list) else []
            )
    bounds = [int(part) if part else None for part in text.split(":")]
    if kind == "index":
        bounds = [int(text), int(text) + 1 or None]
    return lambda item: item[slice(*bounds)] if isinstance(item, list) else []


def _condition(text: str) -> tuple[tuple[Step, ...], Callable[[Any], bool]]:
    """Return the path of a filter and the predicate for its values; without a comparison, every value passes."""
    match = _FILTER.match(text)
    if match is None:
        raise UsageFault(f"jsonpath: cannot read the filter {text!r}", hint='write [?(@.field=="value")]')
    steps, op, value = _steps(match["path"]), match["op"], match["value"]
    if op is None:
        return steps, lambda found: True
    try:
        wanted = value[1:-1] if value[0] == value[-1] == "'" else json.loads(value)
    except ValueError:
        raise UsageFault(f"jsonpath: {value} is neither a quoted text, a number nor true/false") from None

    def holds(found: Any) -> bool:
        try:
            return _COMPARISONS[op](found, wanted)
        except TypeError:
            return False

    return steps, holds


def _render(nodes: tuple[Node, ...], here: Any) -> Iterator[str]:
    for node in nodes:
        if node.steps is None:
            yield node.text
        elif node.body is None:
            found = _select(node.steps, here)
            yield " ".join(each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in found)
        else:
            for item in _select(node.steps, here):
                yield from _render(node.body, item)


def _select(steps: tuple[Step, ...], here: Any) -> list[Any]:
    found = [here]
    for step in steps:
        found = [value for item in found for value in step(item)]
    return found


def _children(item: Any) -> Iterable[Any]:
    return item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()


def _descendants(name: str, item: Any) -> Iterator[Any]:
    if name != "*" and isinstance(item, dict) and name in item:
        yield item[name]
    for child in _children(item):
        if name == "*":
            yield child
        yield from _descendants(name, child)
