"""Expressions, ``${{ expr }}``: typed, bounded in length, depth and size, and sandboxed: they reach no Python object.

The grammar is Python's, parsed by ``ast`` and restricted to an allowlist of nodes, with four additions: ``&&``, ``||``
and ``!``; ``true``, ``false`` and ``null``; ``x | f(a)`` for ``f(x, a)``, which binds weakest; and keys after a dot
that are Python keywords. There are no loops; attributes are map entries; calls reach only the functions of
``operations``. Evaluation always terminates and raises only ExpressionError. Every value has one of JSON's types.

A name that is not set evaluates to Unset. Any use of Unset is an error, except in ``default(x, y)``, which returns y if
x, or a part of the path of x, is unset, or if x is null.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import takewhile
from typing import Any, NamedTuple

from areal.dataclasses import dataclass, field
from areal.errors import did_you_mean
from areal.resources.operations import BINARY, FUNCTIONS, MAX_TEXT, OperandError, check_size, negate, to_text, type_name
from areal.resources.tree import ABSENT, FieldPath

MAX_LENGTH = 2_000
MAX_DEPTH = 40
OPENING = "${{"


class ExpressionError(ValueError):
    """An invalid expression; ``column`` is the 1-based position of the fault in the scalar that holds it."""

    def __init__(self, message: str, column: int, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.column = column
        self.hint = hint


@dataclass
class EnvironmentVariables:
    """The environment variables that expressions can read. ``read`` records the variables that were read: the result of
    a rendering depends on them."""

    variables: Mapping[str, str]
    read: dict[str, str] = field(default_factory=dict)

    def get(self, name: str) -> str | None:
        value = self.variables.get(name)
        if value is not None:
            self.read[name] = value
        return value


@dataclass(frozen=True)
class Scope:
    """The names that an expression can use. ``item`` and ``index`` exist only in the template of a ``generate``."""

    values: Mapping[str, object]
    env: EnvironmentVariables
    profile: str | None = None
    item: Any = ABSENT
    index: Any = ABSENT

    @property
    def names(self) -> dict[str, object]:
        known = {"values": self.values, "env": self.env, "profile": self.profile}
        inner = {"item": self.item, "index": self.index}
        return {**known, **{name: value for name, value in inner.items() if value is not ABSENT}}


@dataclass(frozen=True)
class ExpressionText:
    """A scalar with expressions in it: literal texts and expressions in order."""

    parts: tuple[str | ast.expr, ...]
    reads: frozenset[FieldPath] = frozenset()
    """The paths below ``values``, and ``profile``, that are named, in branches that are not evaluated too."""

    def evaluate(self, scope: Scope) -> Any:
        """Return the value of the expression if there is no literal text, else text. Raises ExpressionError."""
        if len(self.parts) == 1 and not isinstance(self.parts[0], str):
            return evaluate(self.parts[0], scope)
        texts: list[str] = []
        for part in self.parts:
            try:
                texts.append(part if isinstance(part, str) else to_text(evaluate(part, scope)))
            except OperandError as error:
                assert isinstance(part, ast.expr)
                raise ExpressionError(str(error), part.col_offset)
            if sum(map(len, texts)) > MAX_TEXT:
                raise ExpressionError(f"the result is longer than {MAX_TEXT} characters", 1)
        return "".join(texts)


@lru_cache(maxsize=4096)
def parse_template(text: str) -> ExpressionText:
    """Parse a scalar; ``$${{`` is a literal ``${{``. Raises ExpressionError. The cache makes ``generate`` parse its
    template once."""
    parts: list[str | ast.expr] = []
    literal, at = "", 0
    while (found := text.find(OPENING, at)) >= 0:
        if found > at and text[found - 1] == "$":
            literal += text[at : found - 1] + OPENING
            at = found + len(OPENING)
            continue
        literal += text[at:found]
        tokens, at = _tokenize(text, found + len(OPENING))
        parts += [literal, _parse(tokens)] if literal else [_parse(tokens)]
        literal = ""
    literal += text[at:]
    if literal or not parts:
        parts.append(literal)
    reads = frozenset(path for part in parts if not isinstance(part, str) for path in _paths_read(part))
    return ExpressionText(tuple(parts), reads)


def _paths_read(tree: ast.expr) -> Iterator[FieldPath]:
    """Yield ``profile``, and the path of each lookup in ``values`` up to the first key that is not literal."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        keys: list[str | int | None] = []
        while isinstance(node, ast.Attribute | ast.Subscript):
            if isinstance(node, ast.Attribute):
                keys.insert(0, node.attr)
            else:
                literal = node.slice.value if isinstance(node.slice, ast.Constant) else None
                keys.insert(0, literal if isinstance(literal, str | int) else None)
                pending.append(node.slice)
            node = node.value
        if isinstance(node, ast.Name) and node.id in ("values", "profile"):
            yield (node.id, *takewhile(lambda key: key is not None, keys))  # type: ignore[arg-type]
        else:
            pending += ast.iter_child_nodes(node)


# Text to syntax tree. Python's parser gets one token per line, so that the line of a node identifies its token.
# ``col_offset`` of every node is then set to the column in the manifest at which its faults are reported.


class _Lexeme(NamedTuple):
    """One token; ``python`` is its spelling for Python's parser."""

    kind: str  # value | name | operator | end
    text: str
    column: int
    python: str


_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?)
    |(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<name>[A-Za-z_]\w*)
    |(?P<end>\}\})
    |(?P<operator>==|!=|<=|>=|//|\|\||&&|[-+*/%<>()\[\],.|!])""",
    re.VERBOSE | re.DOTALL,
)
_WORDS = {"true": "True", "false": "False", "null": "None"}
_OPERATORS = {"||": "or", "&&": "and", "!": "not", **{word: word for word in ("if", "else", "and", "or", "not", "in")}}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_CLOSING = {"(": ")", "[": "]"}
_PAIRS = {*_CLOSING.items(), ("not", "in")}  # (previous, current) tokens that are valid where an operand is due


def _tokenize(text: str, start: int) -> tuple[list[_Lexeme], int]:
    """Return the tokens from offset ``start`` to the closing braces, and the offset after the braces."""
    tokens: list[_Lexeme] = []
    at = start
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            unknown = "an unfinished string" if text[at] in "\"'" else f'"{text[at]}"'
            raise ExpressionError(f"{unknown} is not part of an expression", at + 1)
        at = match.end()
        if at - start > MAX_LENGTH:
            raise ExpressionError(f"the expression is longer than {MAX_LENGTH} characters", start + 1)
        if match.lastgroup != "space":
            after_dot = bool(tokens) and tokens[-1].text == "."
            tokens.append(_token(match.lastgroup, match[0], match.start() + 1, after_dot))
        if match.lastgroup == "end":
            return tokens, at
    raise ExpressionError('"${{" without "}}"', start - 2)


def _token(kind: str, text: str, column: int, after_dot: bool) -> _Lexeme:
    if kind == "number":
        if text.isdigit() and len(text) > 18:
            raise ExpressionError("the number has more than 18 digits", column)
        number = int(text) if text.isdigit() else float(text)
        if not math.isfinite(number):
            raise ExpressionError("the number is too large", column)
        return _Lexeme("value", text, column, repr(number))
    if kind == "string":
        string = re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), text[1:-1], flags=re.DOTALL)
        return _Lexeme("value", text, column, repr(string))
    if kind == "name" and after_dot:
        return _Lexeme("name", text, column, "_")
    if kind == "name" and text not in _OPERATORS:
        return _Lexeme("value" if text in _WORDS else "name", text, column, _WORDS.get(text, "_"))
    return _Lexeme("end" if kind == "end" else "operator", text, column, _OPERATORS.get(text, text))


def _parse(tokens: list[_Lexeme]) -> ast.expr:
    """Return the syntax tree of one expression; the last token is its end."""
    lines = _grouped(tokens)
    try:
        tree = ast.parse("\n".join(["(", *(token.python for token in lines[:-1]), ")"]), mode="eval").body
    except SyntaxError as error:
        token = lines[min(max((error.lineno or 0) - 2, 0), len(lines) - 1)]
        message = '"if" needs an "else"' if "'else'" in error.msg else f'cannot be read from "{token.text}" on'
        raise ExpressionError(message, token.column) from None
    except (RecursionError, MemoryError):
        raise ExpressionError(f"nested more than {MAX_DEPTH} deep", tokens[0].column) from None
    pending: list[tuple[ast.expr, int]] = [(tree, 1)]
    while pending:
        node, depth = pending.pop()
        _check(node, lines)
        if depth > MAX_DEPTH:
            raise ExpressionError(f"nested, or chained, more than {MAX_DEPTH} deep", node.col_offset)
        pending += [(child, depth + 1) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    return tree


def _grouped(tokens: list[_Lexeme]) -> list[_Lexeme]:
    """Return the tokens with parentheses around the left operand of every ``|``, so that ``|`` binds weakest."""
    grouped: list[_Lexeme] = []
    starts, closing = [0], ["}}"]  # for each open bracket: where its current expression begins, and its closing token
    pipes = 0
    previous = _Lexeme("operator", "", 0, "")
    for token in tokens:
        expected = _expected(previous, token, closing)
        if expected is not None:
            found = "the end" if token.kind == "end" else f'"{token.text}"'
            raise ExpressionError(f"expected {expected}, found {found}", token.column)
        if token.text == closing[-1]:
            closing.pop()
            starts.pop()
        elif token.text == "|":
            pipes += 1
            grouped.insert(starts[-1], _Lexeme("operator", "(", token.column, "("))
            grouped.append(_Lexeme("operator", ")", token.column, ")"))
        grouped.append(token)
        if token.text in _CLOSING:
            starts.append(len(grouped))
            closing.append(_CLOSING[token.text])
        elif token.text == ",":
            starts[-1] = len(grouped)
        if len(closing) + pipes > MAX_DEPTH:
            raise ExpressionError(f"nested, or chained, more than {MAX_DEPTH} deep", token.column)
        previous = token
    return grouped


def _expected(previous: _Lexeme, token: _Lexeme, closing: list[str]) -> str | None:
    """Return, in words, what must follow ``previous`` instead of ``token``; None if ``token`` is valid there."""
    is_operand = token.kind in ("value", "name")
    if previous.text in (".", "|"):
        return None if token.kind == "name" else "a name" if previous.text == "." else "a function"
    if previous.kind in ("value", "name") or previous.text in (")", "]"):
        closes = token.kind == "end" or token.text in (")", "]")
        misplaced = is_operand or (closes and token.text != closing[-1]) or (token.text == "," and len(closing) == 1)
        return f'"{closing[-1]}"' if misplaced else None
    fits = is_operand or token.python in ("(", "[", "-", "not") or (previous.text, token.text) in _PAIRS
    return None if fits else "a value"


def _check(node: ast.expr, lines: list[_Lexeme]) -> None:
    """Set the names and the column of a node. Raises ExpressionError for a node that the language does not have."""
    first = lines[node.lineno - 2]
    node.col_offset = first.column
    match node:
        case ast.Name():
            node.id = first.text
        case ast.Attribute():
            name = lines[(node.end_lineno or 2) - 2]
            node.attr, node.col_offset = name.text, name.column
        case ast.BinOp(op=ast.BitOr(), right=ast.Name() | ast.Call() as function):
            node.col_offset = lines[function.lineno - 2].column
        case ast.BinOp(op=ast.BitOr(), right=right):
            raise ExpressionError('expected a function after "|"', lines[right.lineno - 2].column)
        case ast.Compare(ops=[_, _, *_]):
            raise ExpressionError("comparisons cannot be chained: join them by and", node.col_offset)
        case ast.BinOp(left=left) | ast.Compare(left=left) | ast.Subscript(value=left) | ast.IfExp(body=left):
            after = (left.end_lineno or 2) - 1
            while lines[after].text == ")":
                after += 1
            node.col_offset = lines[after].column
        case ast.Call(func=ast.Name()) | ast.BoolOp() | ast.UnaryOp() | ast.List() | ast.Constant():
            pass
        case ast.Tuple():
            raise ExpressionError("a list is written [a, b]", node.col_offset)
        case _:
            raise ExpressionError(f'unexpected "{first.text}"', node.col_offset)


@dataclass(frozen=True)
class Unset:
    """The value of a name that is not set, with message and column for the error if a value is needed."""

    message: str
    column: int
    hint: str | None = None


def evaluate(tree: ast.expr, scope: Scope) -> Any:
    """Return the value of an expression. Raises only ExpressionError."""
    try:
        value = _value(tree, scope)
        check_size(value)
    except OperandError as error:
        raise ExpressionError(str(error), tree.col_offset)
    return value


def _value(node: ast.expr, scope: Scope) -> Any:
    value = _resolve(node, scope)
    if isinstance(value, Unset):
        raise ExpressionError(value.message, value.column, value.hint)
    if isinstance(value, EnvironmentVariables):
        raise ExpressionError("name a variable: env.NAME", node.col_offset)
    return value


def _resolve(node: ast.expr, scope: Scope) -> Any:
    """Return the value of ``node``, or Unset."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return _name(node, scope)
        case ast.Attribute() | ast.Subscript():
            return _lookup(node, scope)
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _call(name, arguments, node.col_offset, scope)
        case ast.BinOp(op=ast.BitOr(), left=left, right=ast.Call(func=ast.Name(id=name), args=arguments)):
            return _call(name, [left, *arguments], node.col_offset, scope)
        case ast.BinOp(op=ast.BitOr(), left=left, right=ast.Name(id=name)):
            return _call(name, [left], node.col_offset, scope)
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
            symbol, operate = BINARY[type(op)]
            return _guarded(f'"{symbol}"', operate, [_value(left, scope), _value(right, scope)], node.col_offset)
        case ast.BoolOp(op=op, values=values):
            for each in values:
                value = _value(each, scope)
                if bool(value) is isinstance(op, ast.Or):
                    break
            return value
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, scope)
        case ast.UnaryOp(operand=operand):
            return _guarded('"-"', negate, [_value(operand, scope)], node.col_offset)
        case ast.IfExp(test=test, body=body, orelse=otherwise):
            return _resolve(body if _value(test, scope) else otherwise, scope)
        case ast.List(elts=items):
            return [_value(item, scope) for item in items]
    raise AssertionError(f"{type(node).__name__} has been checked")


def _guarded(label: str, operate: Callable[..., Any], operands: list[Any], column: int) -> Any:
    try:
        return operate(*operands)
    except ZeroDivisionError:
        raise ExpressionError(f"{label}: division by zero", column) from None
    except OperandError as error:
        raise ExpressionError(f"{label}: {error}", column)


def _name(node: ast.Name, scope: Scope) -> Any:
    names = scope.names
    if node.id in names:
        return names[node.id]
    if node.id in ("item", "index"):
        raise ExpressionError(f'"{node.id}" exists only inside the template of a "generate"', node.col_offset)
    near = did_you_mean(node.id, (*names, "item"))
    raise ExpressionError(f'unknown name "{node.id}"{near}: values, env, item or profile', node.col_offset)


def _lookup(node: ast.Attribute | ast.Subscript, scope: Scope) -> Any:
    holder = _resolve(node.value, scope)
    if isinstance(holder, Unset):
        return holder
    key = node.attr if isinstance(node, ast.Attribute) else _value(node.slice, scope)
    column = node.col_offset
    if isinstance(holder, EnvironmentVariables):
        if not isinstance(key, str):
            raise ExpressionError("an environment variable is looked up by its name", column)
        from areal.resources.secrets import is_secret_name, is_secret_value  # its patterns are slow to compile

        value = None if is_secret_name(key) else holder.get(key)
        if is_secret_name(key) or (value is not None and is_secret_value(value)):
            stored = "manifests are stored in clear: use envFrom or apiKeyFrom"
            what = "looks like a secret" if is_secret_name(key) else "has a value that looks like a secret"
            raise ExpressionError(f"env.{key} {what}, and {stored}", column)
        return value if value is not None else Unset(f"the environment variable {key} is not set", column)
    if isinstance(holder, Mapping):
        if not isinstance(key, str):
            raise ExpressionError(f"a map is looked up by text, not by {type_name(key)}", column)
        if key in holder:
            return holder[key]
        text, near = _path_text(node), did_you_mean(key, holder)
        hint = (
            "--values FILE or --set values.NAME=VALUE sets values" if text.startswith("values") and not near else None
        )
        return Unset(f"{text} is not set{near}", column, hint)
    if isinstance(holder, list):
        if type(key) is not int:
            raise ExpressionError(f"a list is looked up by an integer, not by {type_name(key)}", column)
        if -len(holder) <= key < len(holder):
            return holder[key]
        return Unset(f"{_path_text(node)} is not set: the list has {len(holder)} items", column)
    raise ExpressionError(f"{_path_text(node.value)} is {type_name(holder)}, which has no items", column)


def _call(name: str, arguments: list[ast.expr], column: int, scope: Scope) -> Any:
    if name == "default":
        if len(arguments) != 2:
            raise ExpressionError("usage: default(value, fallback)", column)
        value = _resolve(arguments[0], scope)
        return _value(arguments[1], scope) if value is None or isinstance(value, Unset) else value
    function = FUNCTIONS.get(name)
    if function is None:
        raise ExpressionError(f'unknown function "{name}"{did_you_mean(name, (*FUNCTIONS, "default"))}', column)
    least, most = function.arity
    if not least <= len(arguments) <= most:
        raise ExpressionError(f"usage: {function.usage}", column)
    return _guarded(name, function.call, [_value(argument, scope) for argument in arguments], column)


def _path_text(node: ast.expr) -> str:
    """Return the text of a lookup; parts that are neither names nor literals are elided."""
    match node:
        case ast.Name(id=name):
            return name
        case (
            ast.Attribute(value=holder, attr=key)
            | ast.Subscript(value=holder, slice=ast.Constant(value=str() | int() as key))
        ):
            plain = isinstance(key, str) and key.isidentifier()
            return f"{_path_text(holder)}.{key}" if plain else f"{_path_text(holder)}[{key}]"
        case ast.Subscript(value=holder):
            return f"{_path_text(holder)}[...]"
    return "this"
