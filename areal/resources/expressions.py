"""``${{ expr }}``: typed, sandboxed by having nothing to escape to, bounded in length, depth and size.

Python's grammar, parsed by ``ast`` and held to a list of nodes, with four additions: ``&&``, ``||`` and ``!``;
``true``, ``false`` and ``null``; ``x | f(a)`` for ``f(x, a)``, which binds weakest; and keys after a dot that may be
Python's keywords. There are no loops, no attributes but map entries and no calls but the functions listed here. An
operation that could grow its result checks the size first, so that evaluating never hangs, and it raises nothing but
ExpressionError. Every value is one of JSON's types.

A name that is not set evaluates to Unset, which any use turns into an error, except by ``default(x, y)``: the second
argument where the first is unset, anywhere along its path, or null.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

from areal.errors import did_you_mean
from areal.resources.tree import ABSENT

MAX_LENGTH = 2_000
MAX_DEPTH = 40
MAX_TEXT = 64 * 1024
MAX_NODES = 20_000
OPENING = "${{"

_SECRET_ENDINGS = {"KEY", "KEYS", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIALS"}


class ExpressionError(ValueError):
    """``column`` is the 1-based place of the fault inside the scalar that holds the expression."""

    def __init__(self, message: str, column: int) -> None:
        super().__init__(message)
        self.message = message
        self.column = column


class OperandError(ValueError):
    """A function or operator cannot take these values."""


@dataclass
class EnvironmentVariables:
    """The environment variables that expressions may read. ``read`` records those that were read, since a rendering
    depends on them."""

    variables: Mapping[str, str]
    read: dict[str, str] = field(default_factory=dict)

    def get(self, name: str) -> str | None:
        value = self.variables.get(name)
        if value is not None:
            self.read[name] = value
        return value


@dataclass(frozen=True)
class Scope:
    """The names of an expression. ``item`` and ``index`` exist inside a generated template alone."""

    values: Mapping[str, Any]
    env: EnvironmentVariables
    profile: str | None = None
    item: Any = ABSENT
    index: Any = ABSENT

    @property
    def names(self) -> dict[str, Any]:
        known = {"values": self.values, "env": self.env, "profile": self.profile}
        inner = {"item": self.item, "index": self.index}
        return {**known, **{name: value for name, value in inner.items() if value is not ABSENT}}


@dataclass(frozen=True)
class Template:
    """A scalar with expressions in it: literal texts and expressions in order."""

    parts: tuple[str | ast.expr, ...]

    def evaluate(self, scope: Scope) -> Any:
        """The value of the expression when there is nothing else, else text. Raises ExpressionError."""
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
def parse_template(text: str) -> Template:
    """``$${{`` stands for a literal ``${{``. Raises ExpressionError. Cached: a generated template is parsed once."""
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
    return Template(tuple(parts))


# Text to syntax tree. Python's parser is given one token a line, so that the line of a node names its token and the
# manifest's columns survive: ``col_offset`` of every node is set to the column where its faults are reported.


class _Token(NamedTuple):
    """``python`` is its spelling for Python's parser."""

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
_PAIRS = {*_CLOSING.items(), ("not", "in")}  # tokens that stand together where an operand would


def _tokenize(text: str, start: int) -> tuple[list[_Token], int]:
    """Tokens from offset ``start`` up to the closing braces, and the offset after those."""
    tokens: list[_Token] = []
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


def _token(kind: str, text: str, column: int, after_dot: bool) -> _Token:
    if kind == "number":
        if text.isdigit() and len(text) > 18:
            raise ExpressionError("the number has more than 18 digits", column)
        number = int(text) if text.isdigit() else float(text)
        if not math.isfinite(number):
            raise ExpressionError("the number is too large", column)
        return _Token("value", text, column, repr(number))
    if kind == "string":
        string = re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), text[1:-1], flags=re.DOTALL)
        return _Token("value", text, column, repr(string))
    if kind == "name" and after_dot:
        return _Token("name", text, column, "_")
    if kind == "name" and text not in _OPERATORS:
        return _Token("value" if text in _WORDS else "name", text, column, _WORDS.get(text, "_"))
    return _Token("end" if kind == "end" else "operator", text, column, _OPERATORS.get(text, text))


def _parse(tokens: list[_Token]) -> ast.expr:
    """The tree of one expression; the last token is its end."""
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


def _grouped(tokens: list[_Token]) -> list[_Token]:
    """The tokens with parentheses around the left side of every ``|``, which makes it bind weakest."""
    grouped: list[_Token] = []
    starts, closing = [0], ["}}"]  # where the expressions in open brackets begin, and what closes them
    pipes = 0
    previous = _Token("operator", "", 0, "")
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
            grouped.insert(starts[-1], _Token("operator", "(", token.column, "("))
            grouped.append(_Token("operator", ")", token.column, ")"))
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


def _expected(previous: _Token, token: _Token, closing: list[str]) -> str | None:
    """The kind of token that must follow ``previous`` instead of ``token``; None where ``token`` may."""
    is_operand = token.kind in ("value", "name")
    if previous.text in (".", "|"):
        return None if token.kind == "name" else "a name" if previous.text == "." else "a function"
    if previous.kind in ("value", "name") or previous.text in (")", "]"):
        closes = token.kind == "end" or token.text in (")", "]")
        misplaced = is_operand or (closes and token.text != closing[-1]) or (token.text == "," and len(closing) == 1)
        return f'"{closing[-1]}"' if misplaced else None
    fits = is_operand or token.python in ("(", "[", "-", "not") or (previous.text, token.text) in _PAIRS
    return None if fits else "a value"


def _check(node: ast.expr, lines: list[_Token]) -> None:
    """Sets the names and the column of a node. Raises ExpressionError for one that the language does not have."""
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


# Syntax tree to value.


@dataclass(frozen=True)
class Unset:
    """The reason that a name has no value, for the error when the value is needed."""

    message: str
    column: int


def evaluate(tree: ast.expr, scope: Scope) -> Any:
    """The value of an expression. Raises ExpressionError; never anything else."""
    try:
        value = _value(tree, scope)
        _check_size(value)
    except OperandError as error:
        raise ExpressionError(str(error), tree.col_offset)
    return value


def _value(node: ast.expr, scope: Scope) -> Any:
    value = _resolve(node, scope)
    if isinstance(value, Unset):
        raise ExpressionError(value.message, value.column)
    if isinstance(value, EnvironmentVariables):
        raise ExpressionError("name a variable: env.NAME", node.col_offset)
    return value


def _resolve(node: ast.expr, scope: Scope) -> Any:
    """The value of ``node``, Unset where it has none."""
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
            symbol, operate = _BINARY[type(op)]
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
            return _guarded('"-"', lambda value: _bounded(-_number(value)), [_value(operand, scope)], node.col_offset)
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
        return _variable(holder, key, column)
    if isinstance(holder, Mapping):
        if not isinstance(key, str):
            raise ExpressionError(f"a map is looked up by text, not by {_type_name(key)}", column)
        absent = f"{_path_text(node)} is not set"
        return holder[key] if key in holder else Unset(f"{absent}{did_you_mean(key, holder)}", column)
    if isinstance(holder, list):
        if type(key) is not int:
            raise ExpressionError(f"a list is looked up by an integer, not by {_type_name(key)}", column)
        if -len(holder) <= key < len(holder):
            return holder[key]
        return Unset(f"{_path_text(node)} is not set: the list has {len(holder)} items", column)
    raise ExpressionError(f"{_path_text(node.value)} is {_type_name(holder)}, which has nothing inside", column)


def _variable(env: EnvironmentVariables, name: Any, column: int) -> Any:
    if not isinstance(name, str):
        raise ExpressionError("an environment variable is looked up by its name", column)
    if name.upper().rsplit("_", 1)[-1] in _SECRET_ENDINGS:
        stored = "manifests are stored in clear: use envFrom or apiKeyFrom"
        raise ExpressionError(f"env.{name} looks like a secret, and {stored}", column)
    value = env.get(name)
    return value if value is not None else Unset(f"the environment variable {name} is not set", column)


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
    """A lookup as it was written, as far as it is names and literals."""
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


# Operators and functions: total over JSON values, and bounded in what they return.


def to_text(value: Any) -> str:
    """A scalar as it reads in YAML."""
    if value is None:
        raise OperandError("null has no text; use default()")
    if isinstance(value, (list, dict)):
        raise OperandError(f"{_type_name(value)} has no text; use join() or json()")
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _type_name(value: Any) -> str:
    names = {str: "text", bool: "a boolean", int: "an integer", float: "a number", list: "a list", dict: "a map"}
    return "null" if value is None else names.get(type(value), "nothing")


def _check_size(value: Any) -> None:
    """Counts the values in ``value`` up to the limit, so that shared parts cannot multiply."""
    pending, count = [value], 0
    while pending:
        found = pending.pop()
        count += 1
        if count > MAX_NODES:
            raise OperandError(f"the result has more than {MAX_NODES} values")
        if isinstance(found, list):
            pending += found
        elif isinstance(found, dict):
            pending += found.values()


def _check_length(length: int) -> None:
    if length > MAX_TEXT:
        raise OperandError(f"the result is longer than {MAX_TEXT} characters")


def _check_items(count: int) -> None:
    if count > MAX_NODES:
        raise OperandError(f"the list has more than {MAX_NODES} items")


def _bounded(value: int | float) -> int | float:
    """A number that JSON and 64 bits can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        raise OperandError("the result is not a finite number")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise OperandError("the result does not fit in 64 bits")
    return value


def _bounded_text(value: str) -> str:
    _check_length(len(value))
    return value


def _require(kinds: tuple[type, ...], expected: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise OperandError(f"needs {expected}, got {_type_name(value)}")
    return value


_number = partial(_require, (int, float), "a number")
_text = partial(_require, (str,), "text")
_list = partial(_require, (list,), "a list")
_map = partial(_require, (dict,), "a map")
_container = partial(_require, (str, list, dict), "text, a list or a map")


def _arithmetic(operate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: _bounded(operate(_number(a), _number(b)))


def _ordered(holds: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Numbers with numbers, text with text."""
    return lambda a, b: holds(a, b) if isinstance(a, str) and isinstance(b, str) else holds(_number(a), _number(b))


def _add(a: Any, b: Any) -> Any:
    if isinstance(a, str) and isinstance(b, str):
        _check_length(len(a) + len(b))
    elif isinstance(a, list) and isinstance(b, list):
        _check_items(len(a) + len(b))
    elif isinstance(a, str) or isinstance(b, str):
        raise OperandError(f"cannot add {_type_name(a)} and {_type_name(b)}; use string()")
    else:
        return _bounded(_number(a) + _number(b))
    return a + b


def _divide(a: int | float, b: int | float) -> int | float:
    """An integer where integers divide, else a float: ``8 / 2`` can be a port."""
    return a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else a / b


def _contains(item: Any, container: Any) -> bool:
    if isinstance(_container(container), list):
        return any(type(item) is type(found) and item == found for found in container)
    return _text(item) in container if isinstance(container, str) else isinstance(item, str) and item in container


_BINARY: dict[type[ast.AST], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", _add),
    ast.Sub: ("-", _arithmetic(operator.sub)),
    ast.Mult: ("*", _arithmetic(operator.mul)),
    ast.Div: ("/", _arithmetic(_divide)),
    ast.FloorDiv: ("//", _arithmetic(operator.floordiv)),
    ast.Mod: ("%", _arithmetic(operator.mod)),
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.Lt: ("<", _ordered(operator.lt)),
    ast.LtE: ("<=", _ordered(operator.le)),
    ast.Gt: (">", _ordered(operator.gt)),
    ast.GtE: (">=", _ordered(operator.ge)),
    ast.In: ("in", _contains),
    ast.NotIn: ("not in", lambda item, container: not _contains(item, container)),
}


def _join(items: Any, separator: Any = ",") -> str:
    texts = [to_text(item) for item in _list(items)]
    _check_length(sum(map(len, texts)) + len(_text(separator)) * max(0, len(texts) - 1))
    return str(separator).join(texts)


def _split(value: Any, separator: Any = ",") -> list[str]:
    if not _text(separator):
        raise OperandError("the separator is empty")
    _check_items(_text(value).count(separator) + 1)
    return list(value.split(separator))


def _replace(value: Any, old: Any, new: Any) -> str:
    if not _text(old):
        raise OperandError("the text to replace is empty")
    _check_length(len(_text(value)) + value.count(old) * max(0, len(_text(new)) - len(old)))
    return str(value.replace(old, new))


def _range(*bounds: Any) -> list[int]:
    if not all(type(bound) is int for bound in bounds):
        raise OperandError("needs integers")
    span = range(*bounds)
    _check_items(abs(span.stop - span.start))
    return list(span)


def _converter(kind: Callable[[Any], int | float], name: str) -> Callable[[Any], int | float]:
    def convert(value: Any) -> int | float:
        try:
            number = kind(value if isinstance(value, str) else _number(value))
        except ValueError as error:
            raise error if isinstance(error, OperandError) else OperandError(f'"{value[:40]}" is not {name}')
        return _bounded(number)

    return convert


def _extreme(choose: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    def extreme(*arguments: Any) -> Any:
        items = _list(arguments[0]) if len(arguments) == 1 else arguments
        if not items:
            raise OperandError("the list is empty")
        return choose([_number(item) for item in items])

    return extreme


def _round(value: Any, digits: Any = 0) -> int | float:
    if type(digits) is not int or not 0 <= digits <= 15:
        raise OperandError("digits must be an integer from 0 to 15")
    return _bounded(round(_number(value), digits or None))


def _json(value: Any) -> str:
    _check_size(value)
    return _bounded_text(json.dumps(value, ensure_ascii=False))


@dataclass(frozen=True)
class Function:
    """``arity``: least and most number of arguments. ``usage`` is shown when a call does not fit."""

    call: Callable[..., Any]
    arity: tuple[int, int]
    usage: str


FUNCTIONS: dict[str, Function] = {
    "abs": Function(lambda value: _bounded(abs(_number(value))), (1, 1), "abs(number)"),
    "basename": Function(lambda value: _text(value).rstrip("/").rsplit("/", 1)[-1], (1, 1), "basename(path)"),
    "ceil": Function(lambda value: _bounded(math.ceil(_number(value))), (1, 1), "ceil(number)"),
    "endswith": Function(lambda value, end: _text(value).endswith(_text(end)), (2, 2), "endswith(text, end)"),
    "float": Function(_converter(float, "a number"), (1, 1), "float(value)"),
    "floor": Function(lambda value: _bounded(math.floor(_number(value))), (1, 1), "floor(number)"),
    "int": Function(_converter(int, "an integer"), (1, 1), "int(value)"),
    "join": Function(_join, (1, 2), 'join(list, separator = ",")'),
    "json": Function(_json, (1, 1), "json(value)"),
    "keys": Function(lambda value: sorted(_map(value)), (1, 1), "keys(map)"),
    "len": Function(lambda value: len(_container(value)), (1, 1), "len(value)"),
    "lower": Function(lambda value: _bounded_text(_text(value).lower()), (1, 1), "lower(text)"),
    "max": Function(_extreme(max), (1, 50), "max(list), max(a, b, ...)"),
    "min": Function(_extreme(min), (1, 50), "min(list), min(a, b, ...)"),
    "range": Function(_range, (1, 2), "range(stop), range(start, stop)"),
    "replace": Function(_replace, (3, 3), "replace(text, old, new)"),
    "round": Function(_round, (1, 2), "round(number, digits = 0)"),
    "split": Function(_split, (1, 2), 'split(text, separator = ",")'),
    "startswith": Function(
        lambda value, start: _text(value).startswith(_text(start)), (2, 2), "startswith(text, start)"
    ),
    "string": Function(to_text, (1, 1), "string(value)"),
    "trim": Function(lambda value: _text(value).strip(), (1, 1), "trim(text)"),
    "upper": Function(lambda value: _bounded_text(_text(value).upper()), (1, 1), "upper(text)"),
}
