"""Operators and functions of expressions. They are defined for all JSON values, and their results are bounded.

An operation whose result can be larger than its operands checks the size first, so that evaluation always terminates.
An operation raises OperandError for operands that it cannot take, or ZeroDivisionError, and no other exception.
"""

from __future__ import annotations

import ast
import json
import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from areal.dataclasses import dataclass

MAX_TEXT = 64 * 1024
MAX_NODES = 20_000


class OperandError(ValueError):
    """A function or operator cannot take these values."""


def to_text(value: Any) -> str:
    """Return a scalar as text, as YAML writes it. Raises OperandError for null, lists and maps."""
    if value is None:
        raise OperandError("null has no text; use default()")
    if isinstance(value, (list, dict)):
        raise OperandError(f"{type_name(value)} has no text; use join() or json()")
    return json.dumps(value) if isinstance(value, bool) else str(value)


def type_name(value: Any) -> str:
    names = {str: "text", bool: "a boolean", int: "an integer", float: "a number", list: "a list", dict: "a map"}
    return "null" if value is None else names.get(type(value), "nothing")


def check_size(value: Any) -> None:
    """Raise OperandError if ``value`` has more than MAX_NODES values; shared parts count each time."""
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
    """Return ``value``. Raises OperandError unless it is finite and fits in 64 bits."""
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
        raise OperandError(f"needs {expected}, got {type_name(value)}")
    return value


_number = partial(_require, (int, float), "a number")
_text = partial(_require, (str,), "text")
_list = partial(_require, (list,), "a list")
_map = partial(_require, (dict,), "a map")
_container = partial(_require, (str, list, dict), "text, a list or a map")


def _arithmetic(operate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: _bounded(operate(_number(a), _number(b)))


def _ordered(holds: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Return a comparison of two numbers or two texts."""
    return lambda a, b: holds(a, b) if isinstance(a, str) and isinstance(b, str) else holds(_number(a), _number(b))


def _add(a: Any, b: Any) -> Any:
    if isinstance(a, str) and isinstance(b, str):
        _check_length(len(a) + len(b))
    elif isinstance(a, list) and isinstance(b, list):
        _check_items(len(a) + len(b))
    elif isinstance(a, str) or isinstance(b, str):
        raise OperandError(f"cannot add {type_name(a)} and {type_name(b)}; use string()")
    else:
        return _bounded(_number(a) + _number(b))
    return a + b


def negate(value: Any) -> int | float:
    return _bounded(-_number(value))


def _divide(a: int | float, b: int | float) -> int | float:
    """Return an integer if two integers divide evenly, else a float: ``8 / 2`` can be a port."""
    return a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else a / b


def _equal(a: Any, b: Any) -> bool:
    """Return whether two JSON values are equal. In Python, ``True`` equals 1."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def _contains(item: Any, container: Any) -> bool:
    if isinstance(_container(container), list):
        return any(_equal(item, found) for found in container)
    return _text(item) in container if isinstance(container, str) else isinstance(item, str) and item in container


BINARY: dict[type[ast.AST], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", _add),
    ast.Sub: ("-", _arithmetic(operator.sub)),
    ast.Mult: ("*", _arithmetic(operator.mul)),
    ast.Div: ("/", _arithmetic(_divide)),
    ast.FloorDiv: ("//", _arithmetic(operator.floordiv)),
    ast.Mod: ("%", _arithmetic(operator.mod)),
    ast.Eq: ("==", _equal),
    ast.NotEq: ("!=", lambda a, b: not _equal(a, b)),
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
    check_size(value)
    return _bounded_text(json.dumps(value, ensure_ascii=False))


@dataclass(frozen=True)
class Function:
    """One function. ``arity``: minimum and maximum number of arguments; ``usage`` is shown for any other number."""

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


def can(name: str, value: Any) -> bool:
    """Return whether the function takes the value."""
    try:
        FUNCTIONS[name].call(value)
    except OperandError:
        return False
    return True
