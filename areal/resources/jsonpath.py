"""kubectl's JSONPath templates, the part that scripts use.

``{.items[*].metadata.name}``, ``.status.phase`` (braces may be left out), ``[0]``, ``[-1]``, ``[1:3]``, ``[*]``,
``['a.b']``, ``..name`` (any depth), ``[?(@.kind=="Model")]``, ``{range .items[*]}...{end}`` and literal text around
the braces. An absent field prints nothing, as in kubectl.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from areal.errors import UsageFault

_SPLIT = re.compile(r"\{((?:[^{}'\"]|'[^']*'|\"[^\"]*\")*)\}")
_STEP = re.compile(
    r"""\.\.(?P<deep>[\w-]+|\*)
      | \.(?P<name>[\w/-]+|\*)
      | \[(?P<index>-?\d+)\]
      | \[(?P<slice>-?\d*:-?\d*)\]
      | \[(?P<all>\*)\]
      | \[(?P<quoted>'[^']*'|"[^"]*")\]
      | \[\?\((?P<filter>(?:[^()'"]|'[^']*'|"[^"]*")*)\)\]
    """,
    re.VERBOSE,
)
_FILTER = re.compile(r"\s*@(?P<path>[^\s=!<>]*)\s*(?:(?P<op>==|!=|>=|<=|>|<)\s*(?P<value>.+?))?\s*$")
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r"}


class Step(NamedTuple):
    kind: str
    text: str


class Node(NamedTuple):
    """``text``: literal; ``path``: an expression; ``range``: a loop over a path with a body."""

    kind: str
    text: str = ""
    steps: tuple[Step, ...] = ()
    body: tuple[Node, ...] = ()


def evaluate(template: str, document: Any) -> str:
    return "".join(_run(compile_template(template), document))


def first(expression: str, document: Any) -> Any:
    """The first value that one expression selects, None when it selects nothing."""
    for node in compile_template(expression):
        if node.kind == "path":
            return next(iter(_select(node.steps, document)), None)
    return None


def compile_template(template: str) -> tuple[Node, ...]:
    """Parse ``template``; UsageFault names the part that is wrong."""
    text = template if "{" in template else f"{{{template}}}"
    nodes, rest = _parse(_tokens(text), closing=False)
    assert not list(rest)
    return nodes


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    for match in _SPLIT.finditer(text):
        if match.start() > at:
            yield "text", _literal(text[at : match.start()])
        yield "expression", match[1].strip()
        at = match.end()
    if "{" in text[at:]:
        raise UsageFault(f"jsonpath: an unclosed {{ in {text!r}")
    if text[at:]:
        yield "text", _literal(text[at:])


def _literal(text: str) -> str:
    return re.sub(r"\\[ntr]", lambda match: _ESCAPES[match[0]], text)


def _parse(tokens: Iterator[tuple[str, str]], *, closing: bool) -> tuple[tuple[Node, ...], Iterator[tuple[str, str]]]:
    nodes: list[Node] = []
    for kind, text in tokens:
        if kind == "text":
            nodes.append(Node("text", text))
        elif text[:1] in "'\"" and text:
            nodes.append(Node("text", _literal(text[1:-1])))
        elif text == "end":
            if not closing:
                raise UsageFault("jsonpath: {end} without {range}")
            return tuple(nodes), tokens
        elif text.startswith("range "):
            body, tokens = _parse(tokens, closing=True)
            nodes.append(Node("range", text, _steps(text[6:].strip()), body))
        else:
            nodes.append(Node("path", text, _steps(text)))
    if closing:
        raise UsageFault("jsonpath: {range} without {end}")
    return tuple(nodes), tokens


def _steps(path: str) -> tuple[Step, ...]:
    rest = path[1:] if path[:1] in ("$", "@") else path
    if rest in ("", "."):
        return ()
    if rest[0] not in ".[":
        rest = "." + rest
    steps, at = [], 0
    while at < len(rest):
        match = _STEP.match(rest, at)
        if match is None:
            raise UsageFault(f"jsonpath: cannot read {rest[at:]!r} in {path!r}")
        assert match.lastgroup is not None
        steps.append(Step(match.lastgroup, match[match.lastgroup]))
        if match.lastgroup == "filter":
            _condition(steps[-1].text)
        at = match.end()
    return tuple(steps)


def _run(nodes: tuple[Node, ...], here: Any) -> Iterator[str]:
    for node in nodes:
        if node.kind == "text":
            yield node.text
        elif node.kind == "path":
            yield " ".join(_show(value) for value in _select(node.steps, here))
        else:
            for item in _select(node.steps, here):
                yield from _run(node.body, item)


def _select(steps: tuple[Step, ...], here: Any) -> list[Any]:
    found = [here]
    for step in steps:
        found = [value for item in found for value in _take(step, item)]
    return found


def _take(step: Step, item: Any) -> Iterator[Any]:
    kind, text = step
    if kind in ("name", "quoted"):
        key = text.strip("'\"") if kind == "quoted" else text
        if key == "*" and kind == "name":
            yield from _children(item)
        elif isinstance(item, dict) and key in item:
            yield item[key]
    elif kind == "deep":
        yield from _descend(text, item)
    elif kind == "all":
        yield from _children(item)
    elif isinstance(item, list):
        yield from _pick(kind, text, item)


def _pick(kind: str, text: str, items: list[Any]) -> Iterator[Any]:
    if kind == "index":
        if -len(items) <= int(text) < len(items):
            yield items[int(text)]
    elif kind == "slice":
        start, end = (int(part) if part else None for part in text.split(":"))
        yield from items[start:end]
    else:
        steps, op, wanted = _condition(text)
        yield from (item for item in items if _holds(_select(steps, item), op, wanted))


def _children(item: Any) -> Iterator[Any]:
    if isinstance(item, dict):
        yield from item.values()
    elif isinstance(item, list):
        yield from item


def _descend(name: str, item: Any) -> Iterator[Any]:
    if isinstance(item, dict) and name != "*" and name in item:
        yield item[name]
    for child in _children(item):
        if name == "*":
            yield child
        yield from _descend(name, child)


def _condition(text: str) -> tuple[tuple[Step, ...], str, Any]:
    match = _FILTER.match(text)
    if match is None:
        raise UsageFault(f"jsonpath: cannot read the filter {text!r}", hint='write [?(@.field=="value")]')
    return _steps(match["path"]), match["op"] or "", _value(match["value"])


def _value(text: str | None) -> Any:
    import json

    if text is None:
        return None
    if text[:1] == "'" and text[-1:] == "'":
        return text[1:-1]
    try:
        return json.loads(text)
    except ValueError:
        raise UsageFault(f"jsonpath: {text} is neither a quoted text, a number nor true/false") from None


def _holds(values: list[Any], op: str, wanted: Any) -> bool:
    if not op:
        return bool(values)
    return any(_compare(value, op, wanted) for value in values)


def _compare(value: Any, op: str, wanted: Any) -> bool:
    if op in ("==", "!="):
        return bool((value == wanted) == (op == "=="))
    try:
        order = (value > wanted) - (value < wanted)
    except TypeError:
        return False
    return bool({">": order > 0, "<": order < 0, ">=": order >= 0, "<=": order <= 0}[op])


def _show(value: Any) -> str:
    import json

    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
