"""The functions of the expression language: total over JSON values, and bounded in what they return.

Each takes evaluated arguments and raises Refused for values it cannot take. What could grow checks before it does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_TEXT = 64 * 1024
MAX_NODES = 20_000


class Refused(ValueError):
    """A function or operator cannot take these values."""


@dataclass(frozen=True)
class Function:
    """``arity``: least and most number of arguments. ``usage`` is shown when a call does not fit."""

    call: Callable[..., Any]
    arity: tuple[int, int]
    usage: str


def bounded_text(value: str) -> str:
    _check_length(len(value))
    return value


def count_nodes(value: Any, limit: int = MAX_NODES) -> int:
    """Values in ``value``, itself included; stops and refuses above ``limit``, so that shared parts cannot blow up."""
    pending, count = [value], 0
    while pending:
        found = pending.pop()
        count += 1
        if count > limit:
            raise Refused(f"the result has more than {limit} values")
        if isinstance(found, list):
            pending += found
        elif isinstance(found, dict):
            pending += found.values()
    return count


def number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Refused(f"needs a number, got {type_name(value)}")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise Refused(f"needs text, got {type_name(value)}")
    return value


def to_text(value: Any) -> str:
    """A scalar as it reads in YAML."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return value
        case int() | float():
            return str(value)
        case None:
            raise Refused("null has no text; use default()")
        case _:
            raise Refused(f"{type_name(value)} has no text; use join() or json()")


def type_name(value: Any) -> str:
    names = {str: "text", bool: "a boolean", int: "an integer", float: "a number", list: "a list", dict: "a map"}
    return "null" if value is None else names.get(type(value), "nothing")


def checked_number(value: int | float) -> int | float:
    """A number that JSON and 64 bits can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        raise Refused("the result is not a finite number")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise Refused("the result does not fit in 64 bits")
    return value


def _check_length(length: int) -> None:
    if length > MAX_TEXT:
        raise Refused(f"the result is longer than {MAX_TEXT} characters")


def concatenate(a: Any, b: Any) -> Any:
    if isinstance(a, str) and isinstance(b, str):
        _check_length(len(a) + len(b))
        return a + b
    if isinstance(a, list) and isinstance(b, list):
        if len(a) + len(b) > MAX_NODES:
            raise Refused(f"the list has more than {MAX_NODES} items")
        return a + b
    if isinstance(a, str) or isinstance(b, str):
        raise Refused(f"cannot add {type_name(a)} and {type_name(b)}; use string()")
    return checked_number(number(a) + number(b))


def divide(a: Any, b: Any) -> int | float:
    """An integer where integers divide, else a float: ``8 / 2`` can be a port."""
    x, y = number(a), number(b)
    if y == 0:
        raise Refused("division by zero")
    if isinstance(x, int) and isinstance(y, int) and x % y == 0:
        return checked_number(x // y)
    return checked_number(x / y)


def floor_divide(a: Any, b: Any) -> int | float:
    if number(b) == 0:
        raise Refused("division by zero")
    return checked_number(number(a) // number(b))


def modulo(a: Any, b: Any) -> int | float:
    if number(b) == 0:
        raise Refused("division by zero")
    return checked_number(number(a) % number(b))


def contains(container: Any, item: Any) -> bool:
    if isinstance(container, str):
        return text(item) in container
    if isinstance(container, list):
        return any(type(item) is type(found) and item == found for found in container)
    if isinstance(container, dict):
        return isinstance(item, str) and item in container
    raise Refused(f'"in" needs text, a list or a map on its right, got {type_name(container)}')


def compare(a: Any, b: Any) -> int:
    """-1, 0 or 1. Numbers with numbers, text with text."""
    if isinstance(a, str) and isinstance(b, str):
        return (a > b) - (a < b)
    x, y = number(a), number(b)
    return (x > y) - (x < y)


def _join(items: Any, separator: Any = ",") -> str:
    texts = [to_text(item) for item in _items(items)]
    _check_length(sum(map(len, texts)) + len(text(separator)) * max(0, len(texts) - 1))
    return str(separator).join(texts)


def _split(value: Any, separator: Any = ",") -> list[str]:
    if not text(separator):
        raise Refused("the separator is empty")
    if text(value).count(separator) >= MAX_NODES:
        raise Refused(f"the list has more than {MAX_NODES} items")
    return list(value.split(separator))


def _replace(value: Any, old: Any, new: Any) -> str:
    if not text(old):
        raise Refused("the text to replace is empty")
    _check_length(len(text(value)) + value.count(old) * max(0, len(text(new)) - len(old)))
    return str(value.replace(old, new))


def _range(*bounds: Any) -> list[int]:
    if not all(type(bound) is int for bound in bounds):
        raise Refused("needs integers")
    span = range(*bounds)
    if abs(span.stop - span.start) > MAX_NODES:
        raise Refused(f"the list has more than {MAX_NODES} items")
    return list(span)


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Refused(f"needs a list, got {type_name(value)}")
    return value


def _map(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused(f"needs a map, got {type_name(value)}")
    return value


def _len(value: Any) -> int:
    if not isinstance(value, (str, list, dict)):
        raise Refused(f"needs text, a list or a map, got {type_name(value)}")
    return len(value)


def _int(value: Any) -> int:
    try:
        if isinstance(value, str) and len(value) > 30:
            raise ValueError
        return int(checked_number(int(value) if isinstance(value, str) else int(number(value))))
    except ValueError as error:
        raise error if isinstance(error, Refused) else Refused(f'"{str(value)[:40]}" is not an integer')


def _float(value: Any) -> float:
    try:
        return float(checked_number(float(value) if isinstance(value, str) else float(number(value))))
    except ValueError as error:
        raise error if isinstance(error, Refused) else Refused(f'"{str(value)[:40]}" is not a number')


def _extreme(choose: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    def extreme(*arguments: Any) -> Any:
        items = _items(arguments[0]) if len(arguments) == 1 else list(arguments)
        if not items:
            raise Refused("the list is empty")
        return choose([number(item) for item in items])

    return extreme


def _round(value: Any, digits: Any = 0) -> int | float:
    if type(digits) is not int or not 0 <= digits <= 15:
        raise Refused("digits must be an integer from 0 to 15")
    return checked_number(round(number(value), digits) if digits else round(number(value)))


def _json(value: Any) -> str:
    count_nodes(value)
    return bounded_text(json.dumps(value, ensure_ascii=False))


FUNCTIONS: dict[str, Function] = {
    "abs": Function(lambda value: checked_number(abs(number(value))), (1, 1), "abs(number)"),
    "basename": Function(lambda value: text(value).rstrip("/").rsplit("/", 1)[-1], (1, 1), "basename(path)"),
    "ceil": Function(lambda value: checked_number(math.ceil(number(value))), (1, 1), "ceil(number)"),
    "endswith": Function(lambda value, end: text(value).endswith(text(end)), (2, 2), "endswith(text, end)"),
    "float": Function(_float, (1, 1), "float(value)"),
    "floor": Function(lambda value: checked_number(math.floor(number(value))), (1, 1), "floor(number)"),
    "int": Function(_int, (1, 1), "int(value)"),
    "join": Function(_join, (1, 2), 'join(list, separator = ",")'),
    "json": Function(_json, (1, 1), "json(value)"),
    "keys": Function(lambda value: sorted(_map(value)), (1, 1), "keys(map)"),
    "len": Function(_len, (1, 1), "len(value)"),
    "lower": Function(lambda value: bounded_text(text(value).lower()), (1, 1), "lower(text)"),
    "max": Function(_extreme(max), (1, 50), "max(list), max(a, b, ...)"),
    "min": Function(_extreme(min), (1, 50), "min(list), min(a, b, ...)"),
    "range": Function(_range, (1, 2), "range(stop), range(start, stop)"),
    "replace": Function(_replace, (3, 3), "replace(text, old, new)"),
    "round": Function(_round, (1, 2), "round(number, digits = 0)"),
    "split": Function(_split, (1, 2), 'split(text, separator = ",")'),
    "startswith": Function(lambda value, start: text(value).startswith(text(start)), (2, 2), "startswith(text, start)"),
    "string": Function(to_text, (1, 1), "string(value)"),
    "trim": Function(lambda value: text(value).strip(), (1, 1), "trim(text)"),
    "upper": Function(lambda value: bounded_text(text(value).upper()), (1, 1), "upper(text)"),
}
