"""The budget of work for rendering a chat template, and the cost of each operation.

A template is not trusted, so each operation has a cost in units, of about one byte that is produced or read:

- a pass of a loop and a call of a macro cost the size of their body;
- an operation that produces a text or a container costs its size: ``+``, ``~``, slices, literals, filters, calls;
- an operation whose result may be far larger than its operands (``*``, ``%``, ``**``, ``|center``, ``|replace`` and so
  on) is charged before it runs;
- an operation that reads nested values completely (as text, as JSON, ``==``, ``in``, ``|sort``) is charged for all of
  them, once for each time that they are reached, because nested lists of shared lists grow exponentially.

The time between two charges is bounded, so the CPU time is checked at each charge.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Set, ValuesView
from contextvars import ContextVar
from typing import Any, NoReturn

from jinja2.exceptions import SecurityError

from areal.dataclasses import dataclass

_MOST_UNITS = 2**29
_MOST_BITS = 2**16  # of a number
NODE = 16  # units of a value, and of a step


class TemplateLimit(SecurityError):
    """A rendering exceeds its budget of time or of output."""


class TakesLonger(Exception):
    """A rendering exceeds the budget of a first try (``TemplateBudget.first_try``)."""


@dataclass(frozen=True)
class TemplateBudget:
    """The budget of a rendering. ``units``: a fixed number of units. ``of_input``: additional units for each unit of
    the input, used when ``units`` are exhausted. ``seconds``: CPU time, shared by all renderings in one block of
    ``used``. ``first_try``: a rendering that exceeds the budget raises TakesLonger, and may be repeated elsewhere."""

    units: int = 2**24
    of_input: int = 128
    seconds: float = 5.0
    first_try: bool = False

    def used(self) -> BudgetInUse:
        """Apply this budget to the renderings in the block, which share its seconds."""
        return BudgetInUse(self)


class BudgetInUse:
    """A budget, and the CPU time that the renderings in its block have used."""

    __slots__ = ("_token", "budget", "seconds")

    def __init__(self, budget: TemplateBudget) -> None:
        self.budget = budget
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._token = _in_use.set(self)

    def __exit__(self, *error: object) -> None:
        _in_use.reset(self._token)


_in_use: ContextVar[BudgetInUse | None] = ContextVar("budget", default=None)


def budget_in_use() -> BudgetInUse:
    """Return the budget of the innermost block; outside of any, a new one."""
    return _in_use.get() or BudgetInUse(TemplateBudget())


class Meter:
    """The remainder of a budget. ``given``: the input of the rendering, measured when ``units`` are exhausted."""

    __slots__ = ("_budget", "_given", "_spent", "_start", "room", "steps")

    def __init__(self, used: BudgetInUse, given: Mapping[str, object]) -> None:
        self.room = used.budget.units
        self.steps = 0
        self._budget = used.budget
        self._given: Mapping[str, object] | None = given
        self._spent = used
        self._start = time.thread_time()  # CPU time: a busy machine must not make a template fail
        if used.seconds:
            self.check_time()  # a short rendering has no other check

    def pay(self, units: int) -> None:
        self.room -= units
        if self.room < 0:
            self.extend()

    def extend(self) -> None:
        """Add the units for the input, once. Raises TemplateLimit if none are left."""
        budget, given, self._given = self._budget, self._given, None
        if given is not None and budget.of_input:
            size, waiting = 0, list[Any]((given,))
            while waiting and size < _MOST_UNITS:
                size += budget.of_input * _size(waiting.pop(), waiting)
            self.room += min(size, _MOST_UNITS)
        if self.room < 0:
            self._end_it("it makes more text and values, or takes more steps, than a prompt needs")

    def check_time(self) -> None:
        if self._spent.seconds + time.thread_time() - self._start > self._budget.seconds:
            self._end_it(f"it takes more than {self._budget.seconds:g} seconds")

    def close(self) -> None:
        """Add the time of this rendering to the time of its block."""
        self._spent.seconds += time.thread_time() - self._start

    def _end_it(self, reason: str) -> NoReturn:
        if self._budget.first_try:
            raise TakesLonger(reason)
        raise TemplateLimit(reason)

    def weigh(self, value: Any) -> int:
        """Charge for everything that is reachable from a value. Returns its units."""
        room, total, waiting = self.room, 0, [value]
        while waiting:
            item = waiting.pop()
            if type(item) is dict:
                room -= NODE
                for key, held in item.items():
                    room -= 2 * NODE
                    if type(key) is str:
                        room -= len(key)
                    else:
                        waiting.append(key)
                    if type(held) is str:
                        room -= len(held)
                    else:
                        waiting.append(held)
            else:
                room -= _size(item, waiting)
            if room < 0:
                total += self.room - room
                self.room = room
                self.extend()
                room = self.room
        total += self.room - room
        self.room = room
        return total


def _size(item: Any, waiting: list[Any]) -> int:
    """Return the units of a value itself. Its items are appended to ``waiting``."""
    if isinstance(item, str | bytes):
        return NODE + len(item)
    if isinstance(item, int):
        return NODE + item.bit_length() // 8
    if isinstance(item, Mapping):
        waiting += item.keys()
        waiting += item.values()
        return NODE * (1 + 2 * len(item))
    if isinstance(item, list | tuple | Set | ValuesView):
        waiting += item
        return NODE * (1 + len(item))
    return 4 * NODE


_meter: ContextVar[Meter] = ContextVar("meter")
meter = _meter.get
use_meter = _meter.set
restore_meter = _meter.reset


def tick(units: int) -> bool:
    """Charge for a pass of a loop, or for a call."""
    each = meter()
    each.steps += 1
    each.room -= units
    if each.room < 0:
        each.extend()
    if not each.steps & 63:
        each.check_time()
    return True


def sized(value: Any) -> Any:
    """Charge for the size of a new value, without the values that it refers to."""
    if isinstance(value, str):
        each = meter()
        each.room -= NODE + len(value)
        if each.room < 0:
            each.extend()
    elif isinstance(value, int):
        if value.bit_length() > _MOST_BITS:
            _refuse_number()
    elif value is not None and hasattr(type(value), "__len__"):
        meter().pay(NODE * (1 + len(value)))
    return value


_SCALARS = frozenset((str, int, float, bool, type(None)))


def weighed(value: Any) -> Any:
    """Charge for a value that is read completely."""
    if type(value) not in _SCALARS:
        meter().weigh(value)
    return value


def text_of(value: Any) -> str:
    """Return ``str(value)``, without a copy if the value is a string."""
    if type(value) is str:
        return value
    return str(weighed(value))


def joined(values: Iterable[Any]) -> str:
    pieces = [text_of(value) for value in values]
    meter().pay(NODE + sum(map(len, pieces)))
    return "".join(pieces)


def concat(texts: Iterable[str]) -> str:
    """Replace Jinja's ``concat``. Each text has been charged, but their sum may be far larger."""
    pieces = list(texts)
    meter().pay(NODE * (1 + len(pieces)) + sum(map(len, pieces)))
    return "".join(pieces)


def compared(value: Any, other: Any = None) -> Any:
    """Charge for the comparison of a value with another one, or with each item of it."""
    units = meter().weigh(value)
    if isinstance(other, list | tuple):
        meter().pay(units * len(other))
    return value


# Operations whose result may be far larger than their operands.


def refuse(message: str) -> NoReturn:
    raise TemplateLimit(message)


def _refuse_number() -> NoReturn:
    refuse(f"it makes a number of more than {_MOST_BITS} bits")


def magnitude(value: Any) -> int:
    """Return the factor by which a value can multiply another: a number, a text's length, a container's content."""
    if isinstance(value, int):
        return 1 + abs(value)
    if isinstance(value, float) or value is None:
        return 1
    return 1 + meter().weigh(value)


def _pay_product(*values: Any, **named: Any) -> None:
    product = 1
    for value in (*values, *named.values()):
        product *= min(magnitude(value), 2**40)
    meter().pay(product)


def _pay_replace(text: Any, old: Any = "", new: Any = "", *rest: Any, **named: Any) -> None:
    text, old, new = text_of(text), text_of(old), text_of(new)
    times = text.count(old) if len(new) > len(old) else 0
    meter().pay(NODE + len(text) + times * len(new))


def _pay_join(values: Any, separator: Any = "", *rest: Any, **named: Any) -> None:
    """Charge for ``join``. ``named``: keyword arguments; the filter names its separator ``d``."""
    separator = text_of(named.get("d", separator))
    size = meter().weigh(values)
    meter().pay(size + (len(values) if hasattr(values, "__len__") else size) * len(separator))


def _pay_split(text: Any, separator: Any = None, *rest: Any, **named: Any) -> None:
    """Charge for the parts, each of which is a separate text of about fifty bytes."""
    text = text_of(text)
    parts = text.count(separator) if separator and isinstance(separator, str) else len(text) // 2
    meter().pay(NODE + len(text) + 4 * NODE * parts)


WIDE = re.compile(r"\d{4}")
_STAR = re.compile(r"%[^a-zA-Z%]*\*|\{[^}]*\{")  # a width that is an argument


def pay_format(form: Any, *values: Any, **named: Any) -> None:
    text = text_of(form)
    if WIDE.search(text) or _STAR.search(text):
        refuse("a format has a width of four digits, or one that is an argument")
    places = 1 + text.count("%") + text.count("{")
    meter().pay(NODE + len(text) + places * (1000 + meter().weigh([values, named])))


def _pay_multiply(left: Any, right: Any) -> None:
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        _pay_product(left, right)
    elif _bits(left) + _bits(right) > 2 * _MOST_BITS:
        _refuse_number()


def _bits(value: float) -> int:
    return value.bit_length() if isinstance(value, int) else 1


def _pay_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and _bits(left) * abs(right) > 2 * _MOST_BITS:
        _refuse_number()


def _pay_percent(left: Any, right: Any) -> None:
    if isinstance(left, str | bytes):
        pay_format(left, right)


BEFORE_OPERATION: Mapping[str, Callable[[Any, Any], None]] = {"*": _pay_multiply, "%": _pay_percent, "**": _pay_power}

# Methods of texts. The first are as long as their text at most; the others cost what stands there.
LINEAR_METHODS = frozenset(
    (
        *("capitalize", "casefold", "count", "endswith", "find", "index", "lower", "lstrip", "partition"),
        *("removeprefix", "removesuffix", "rfind", "rindex", "rpartition", "rstrip", "startswith", "strip"),
        *("swapcase", "title", "upper", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier"),
        *("islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper"),
    )
)
BEFORE_METHOD: Mapping[str, Callable[..., None]] = {
    "split": _pay_split,
    "rsplit": _pay_split,
    "splitlines": lambda text, *rest, **named: _pay_split(text),
    "replace": _pay_replace,
    "join": lambda text, values: _pay_join(values, text),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "expandtabs"), _pay_product),
}

# Filters that read a value to its end, and those whose result may be far larger.
DEEP_FILTERS = frozenset(
    (
        *("abs", "capitalize", "dictsort", "e", "escape", "float", "int", "lower", "max", "min", "safe", "sort"),
        *("string", "tojson", "trim", "truncate", "unique", "upper", "urlencode"),
    )
)
BEFORE_FILTER: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(("batch", "center", "groupby", "indent", "round", "slice"), _pay_product),
    "format": pay_format,
    "join": _pay_join,
    "replace": _pay_replace,
    "title": lambda text: _pay_split(text),
}
