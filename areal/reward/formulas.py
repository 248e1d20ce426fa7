"""The values of formulas, computed while their tokens are parsed.

Rationals are exact. Other numbers have 60 digits, of which 40 must agree. Formulas with symbols are equal if their
values at several points are. The work is bounded, whatever the formula: numbers of more than
``_MOST_BITS`` bits, long sums and deep brackets raise ``NotAFormula``, so that no deadline is needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache, reduce
from operator import add, mul
from typing import Any

from areal.reward.notation import Token, tokens

Formula = tuple[Token, ...]

ONE = Fraction(1)
_DEEPEST, _LONGEST, _MOST_BITS, _MOST_TERMS, _MOST_STEPS = 48, 1500, 70_000, 2_000, 30_000
_SAME = Fraction(1, 10**40)
_CLOSING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", "⌊": "⌋", "⌈": "⌉", "|": "|"}
_PRODUCT = 3
_BINDING = {"over": 1, "choose": 1, "+": 2, "-": 2, "*": 3, "/": 3, "^": 4, "!": 5, "%": 5, "°": 5}
_BINDERS = ("sum", "prod", "int", "lim")
_STARTS = frozenset(("(", "[", "{", "⌊", "⌈", "frac", "binom", "sqrt", *_BINDERS))
_CONSTANTS = frozenset(("pi", "e", "i", "∞"))
_VARIADIC: dict[str, Any] = {"gcd": math.gcd, "lcm": math.lcm, "max": max, "min": min}


class NotAFormula(Exception):
    """Raised for tokens that are not a formula, or whose value is not finite or too large to compute."""


@lru_cache(maxsize=1)
def _mp() -> Any:
    import mpmath  # imported here: rational numbers need no library

    context = mpmath.mp.clone()
    context.dps = 60
    return context


def inexact(value: Any) -> Any:
    return _mp().mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def is_real(value: Any) -> bool:
    return isinstance(value, Fraction) or (not isinstance(value, tuple) and value.imag == 0)


def _bits(*values: Fraction) -> int:
    return sum(each.numerator.bit_length() + each.denominator.bit_length() for each in values)


def _cells(one: Any, other: Any) -> list[list[tuple[Any, Any]]] | None:
    """Return the pairs of two matrices' cells; None unless both are of one shape."""
    if not isinstance(one, tuple) or not isinstance(other, tuple) or [*map(len, one)] != [*map(len, other)]:
        return None
    return [[*zip(*rows, strict=True)] for rows in zip(one, other, strict=True)]


def _combined(function: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    """Return a sum or product: exact if both are, and 0 if the first 45 digits cancel. A matrix is a tuple of rows."""
    if isinstance(other, tuple) and not isinstance(one, tuple):
        one, other = other, one
    if isinstance(one, tuple):
        cells = _cells(one, other) if function is add else [[(each, other) for each in row] for row in one]
        if cells is None or (function is mul and isinstance(other, tuple)):
            raise NotAFormula
        return tuple(tuple(_combined(function, *pair) for pair in row) for row in cells)
    if isinstance(one, Fraction) and isinstance(other, Fraction) and _bits(one, other) < 3 * _MOST_BITS:
        return function(one, other)
    one, other = inexact(one), inexact(other)
    result = function(one, other)
    return Fraction(0) if function is add and abs(result) < abs(one) * _mp().mpf(10) ** -45 else result


def _power(base: Any, exponent: Any) -> Any:
    are_exact = isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1
    if are_exact and _bits(base) * abs(exponent) < _MOST_BITS:
        return base ** int(exponent)
    base, exponent = inexact(base), inexact(exponent)
    if abs(exponent) > 10**7 or (base and abs(_mp().log(abs(base)) * exponent) > 10**7):
        raise NotAFormula
    return base**exponent


def _root(value: Any, index: Any) -> Any:
    is_odd = index.denominator == 1 and index % 2 and is_real(value) and value < 0
    return -inexact(_power(-value, 1 / index)) if is_odd else _power(value, 1 / index)


def _factorial(value: Any) -> Any:
    if isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= _MOST_TERMS:
        return Fraction(math.factorial(int(value)))
    if abs(value) > 10**5:
        raise NotAFormula
    return _mp().factorial(inexact(value))


def _binomial(value: Any, below: Any) -> Any:
    return _mp().binomial(inexact(value), inexact(below))


def _determinant(rows: Any) -> Any:
    return _mp().det(_mp().matrix([[inexact(each) for each in row] for row in rows]))


def _applied(name: str, argument: Any) -> Any:
    """Return a function's value; 0 for a rounding error beside 0. Raises NotAFormula if it is infinite."""
    if name == "exp":
        return _power(_mp().e, argument)
    known = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "log": "log10", "lg": "log10"}.get(name, name)
    if abs(argument) > 10**20 and name not in ("ln", "log", "lg"):
        raise NotAFormula
    value = getattr(_mp(), known)(inexact(argument))
    if abs(value) > 10**45:
        raise NotAFormula
    return Fraction(0) if abs(value) < _mp().mpf(10) ** -45 else value


def _rows(matrix: str) -> list[list[Formula]]:
    """Return the cells of a matrix in LaTeX."""
    return [[tokens(cell) for cell in row.split("&")] for row in matrix.split(r"\\") if row.strip()]


class _Evaluator:
    """Computes a value by operator precedence while it reads the tokens. ``divisors`` has each divisor."""

    def __init__(self, formula: Formula, point: Mapping[str, object], unit: Any, steps: Iterator[int]) -> None:
        if len(formula) > _LONGEST:
            raise NotAFormula
        self._tokens = [*formula, Token("o", "")]
        self._point, self._unit, self._steps = dict(point), unit, steps
        self._at = self._bars = self._depth = 0
        self.divisors: list[Any] = []

    def whole(self) -> Any:
        value = self._value()
        if self._at < len(self._tokens) - 1:
            raise NotAFormula
        return value

    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _is(self, *texts: str) -> bool:
        return self._next.kind == "o" and self._next.text in texts

    def _take(self, *texts: str) -> str:
        if texts and not self._is(*texts):
            raise NotAFormula
        self._at += 1
        return self._tokens[self._at - 1].text

    def _starts(self) -> bool:
        return self._next.kind in "nsfmv" or self._next.text in _STARTS or (self._is("|") and not self._bars)

    def _value(self, least: int = 0) -> Any:
        """Return the value of operators that bind more than ``least``; factors side by side are a product."""
        sign = ONE
        while self._is("+", "-"):
            sign *= -1 if self._take() == "-" else 1
        value = self._atom() if sign > 0 else _combined(mul, sign, self._value(_PRODUCT))
        while True:
            binding = _BINDING.get(self._next.text, 0) if self._next.kind == "o" else 0
            if max(binding, _PRODUCT * (not binding and self._starts())) <= least:
                return value
            if self._next.kind == self._tokens[self._at - 1].kind == "n":
                raise NotAFormula
            value = self._with(value, self._take() if binding and not self._is("+", "-") else "+" * bool(binding))

    def _with(self, value: Any, operator: str) -> Any:
        if operator == "+":
            return _combined(add, value, self._value(_PRODUCT - 1))
        if operator == "!":
            return _factorial(value)
        if operator in ("%", "°"):
            return _combined(mul, value, self._unit)
        if operator == "^":
            self._depth += 1  # of 9^9^9
            value = _power(value, self._bracketed() if self._is("{") else self._value(_PRODUCT))
            self._depth -= 1
            return value
        if operator in ("over", "choose"):
            return (self._divided if operator == "over" else _binomial)(value, self._value(1))
        factor = self._value(_PRODUCT)
        while operator == "/" and self._next[::2] == ("s", False) and self._tokens[self._at - 1].kind == "s":
            factor = _combined(mul, factor, self._value(_PRODUCT))  # t/RC
        return self._divided(value, factor) if operator == "/" else _combined(mul, value, factor)

    def _divided(self, value: Any, by: Any) -> Any:
        self.divisors.append(by)
        return _combined(mul, value, 1 / by)

    def _bracketed(self) -> Any:
        opening = self._take(*_CLOSING)
        bars, self._bars = self._bars, opening == "|"
        value = self._value()
        self._take(_CLOSING[opening])
        self._bars = bars
        return value

    def _argument(self) -> Any:
        """Return the argument of a LaTeX command: in braces, or one digit, letter or command."""
        text = self._next.text
        if self._next.kind == "n" and text.isdigit() and len(text) > 1:
            self._tokens[self._at] = Token("n", text[1:])
            return Fraction(text[0])
        return self._atom()

    def _atom(self) -> Any:
        self._depth += 1
        if self._depth > _DEEPEST or next(self._steps) > _MOST_STEPS:  # sums of sums
            raise NotAFormula
        kind, text = self._next[:2]
        value = self._bracketed() if self._is(*_CLOSING) else self._plain(kind, self._take())
        self._depth -= 1
        if text == "|":
            return _determinant(value) if isinstance(value, tuple) else abs(value)
        return Fraction(int(math.floor(value) if text == "⌊" else math.ceil(value))) if text in ("⌊", "⌈") else value

    def _plain(self, kind: str, text: str) -> Any:
        if kind == "n":
            return self._number(Fraction(text))
        if kind == "s" and text in self._point:
            return self._point[text]
        if text in _CONSTANTS:
            return {"pi": _mp().pi, "e": _mp().e, "i": _mp().j, "∞": _mp().inf}[text] * 1
        if kind == "f":
            return self._variadic(text) if text in _VARIADIC else self._function(text)
        if kind in "mv":
            inner = (self._point, ONE, self._steps)
            matrix = tuple(tuple(_Evaluator(each, *inner).whole() for each in row) for row in _rows(text))
            return matrix if kind == "m" else _determinant(matrix)
        if text.startswith("unit "):
            axes = "ijk" if any(each.text == "unit k" for each in self._tokens) else "ij"
            return tuple((Fraction(axis == text[-1]),) for axis in axes)
        if text == "sqrt":
            index = self._bracketed() if self._is("[") else Fraction(2)
            return _root(self._argument(), index)
        if text in ("frac", "binom"):
            return (self._divided if text == "frac" else _binomial)(self._argument(), self._argument())
        if text in _BINDERS:
            return self._binder(text)
        raise NotAFormula

    def _number(self, value: Fraction) -> Any:
        r"""Return a number, perhaps a mixed one: ``2\frac34`` or ``2 3/4``."""
        start, tail = self._at, self._tokens[self._at : self._at + 3]
        if value.denominator == 1 and self._is("frac"):
            part = self._plain("o", self._take())
            if all(each.kind == "n" or each.text in "{}" for each in self._tokens[start + 1 : self._at]):
                return value + part
            self._at = start
        elif [each.kind for each in tail] == ["n", "o", "n"] and tail[1].text == "/":
            self._at += 3
            return value + Fraction(tail[0].text) / Fraction(tail[2].text)
        return value

    def _function(self, name: str) -> Any:
        base, power = None, None
        while self._is("_", "^"):
            if self._take() == "_":
                base = self._argument()
            else:
                power = -self._argument() if self._is("-") and self._take() else self._argument()
        outer = self._unit
        self._unit = _mp().pi / 180 if name in ("sin", "cos", "tan", "cot", "sec", "csc") else outer
        if self._is("(", "{", "["):
            argument = self._bracketed()
        else:
            argument = self._value(_PRODUCT)
            while self._starts() and self._next.kind != "f" and not self._is("(", "["):
                argument = _combined(mul, argument, self._value(_PRODUCT))
        self._unit = outer
        if power == -1:
            return _applied("arc" + name, argument)
        value = _applied(name if base is None else "ln", argument)
        value = value if base is None else _combined(mul, value, 1 / _applied("ln", base))
        return value if power is None else _power(value, power)

    def _variadic(self, name: str) -> Fraction:
        closing = _CLOSING[self._take("(", "{", r"\{")]
        parts = [self._value()]
        while self._is(","):
            self._take()
            parts.append(self._value())
        self._take(closing)
        if name in ("gcd", "lcm"):
            parts = [int(each) for each in parts if each.denominator == 1]
        return Fraction(_VARIADIC[name](*parts))

    def _binder(self, name: str) -> Any:
        r"""Return the value of ``\sum_{k=a}^{b}``, ``\prod``, ``\lim_{x \to a}`` or ``\int_a^b ... dx``."""
        limits, variable = [], ""
        while self._is("_", "^"):
            self._take()
            if self._is("{") and self._tokens[self._at + 2].text in ("=", "→"):
                variable = self._tokens[self._at + 1].text
                self._at += 3
                limits.append(self._value())
                self._take("}")
            else:
                limits.append(self._argument())
        start = self._at
        if name == "int":
            end = [each.text for each in self._tokens].index("d", start)
            variable, self._tokens[end : end + 2] = self._tokens[end + 1].text, [Token("o", ";")]

        def body(value: Any) -> Any:
            self._at, self._point[variable] = start, value
            return self._value(_PRODUCT - 1) if name != "int" else inexact(self._value())

        if name == "lim":
            return _mp().limit(lambda x: inexact(body(x)), inexact(limits[0]))
        first, last = limits
        if name == "int":
            value = _mp().quad(body, [inexact(first), inexact(last)])
            self._take(";")
            return value
        is_series = last == _mp().inf and name == "sum"
        last = first + 24 if is_series else last
        if not 0 <= last - first < _MOST_TERMS or first.denominator * last.denominator > 1:
            raise NotAFormula
        values = [body(Fraction(i)) for i in range(int(first), int(last) + 1)]
        values += [_combined(mul, values.pop(), +_mp().catalan)] if is_series else []  # equals series alone
        return reduce(lambda a, b: _combined(add if name == "sum" else mul, a, b), values)


def names_in(*formulas: Formula) -> set[str]:
    """Return the symbols that are not constants."""
    found = [*itertools.chain(*formulas)]
    inner = [cell for each in found if each.kind in "mv" for row in _rows(each.text) for cell in row]
    names = {each.text for each in itertools.chain(found, *inner) if each.kind == "s"}
    return {each for each in names - _CONSTANTS if not each.startswith("unit ")}


@lru_cache(maxsize=4096)
def _read(formula: Formula, point: tuple[tuple[str, Any], ...], unit: Any) -> tuple[Any, Any]:
    try:
        reader = _Evaluator(formula, dict(point), unit, itertools.count())
        value = reader.whole()
        return value.real if is_real(value) else value, reduce(lambda a, b: _combined(mul, a, b), reader.divisors, ONE)
    except (ArithmeticError, ValueError, TypeError, AttributeError) as error:
        raise NotAFormula from error


def value_of(formula: Formula, point: Mapping[str, object] | None = None, unit: Any = ONE) -> Any:
    """Return the value with the symbols' values in ``point``; a matrix is a tuple of rows. ``unit`` is the value of
    ``°`` and ``%``, except in a trigonometric function. Raises NotAFormula."""
    return _read(formula, tuple((point or {}).items()), unit)[0]


def _points(*formulas: Formula) -> Iterator[dict[str, Fraction]]:
    """Values for the symbols, negative ones at the end; of sums, whole ones, else none that are likely poles."""
    names = sorted(names_in(*formulas))
    texts = [each.text for formula in formulas for each in formula]
    signs = zip(texts, texts[1:], texts[2:], texts[3:], texts[4:], strict=False)
    is_whole = {"sum", "prod"} & {*texts} or ("(", "-", "1", ")", "^") in signs  # an integer power
    if names and {"⌊", "⌈", "gcd", "lcm"} & {*texts}:  # steps show only at neighbouring whole numbers
        yield from (
            {name: Fraction(start + (start**2 % 7 + 3) * i * i) for i, name in enumerate(names)}
            for start in range(2, 22)
        )
        if set(names) <= set("ijkmn") or {"gcd", "lcm"} & {*texts}:
            return
    for start, sign in ((0, 1), (2, 1), (5, 1), (1, -1), (4, -1))[: 5 if names else 1]:
        above = [sign * (13 + 5 * i + 3 * start) for i in range(len(names))]
        below = 7 if start < 5 else 63  # of values below 1
        values = above if is_whole else [Fraction(11 * each + 1, 11 * (below + 2 * i)) for i, each in enumerate(above)]
        yield dict(zip(names, map(Fraction, values), strict=True))


def close(one: Any, other: Any, tolerance: Fraction | None = None) -> bool:
    """Return whether ``one`` is ``other``: exactly for rationals without a tolerance, else relative to ``other``."""
    if isinstance(one, tuple) or isinstance(other, tuple):
        cells = _cells(one, other)
        return cells is not None and all(close(*pair, tolerance) for row in cells for pair in row)
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return abs(one - other) <= (tolerance or 0) * abs(other)
    one, other = inexact(one), inexact(other)
    difference = abs(one - other) if one != other else 0
    return bool(difference <= inexact(tolerance or _SAME) * abs(other) and difference < _mp().inf)


def same_value(
    found: Formula, wanted: Formula, tolerance: Fraction | None, units: Sequence[Any] = (ONE, ONE), factor: Any = ONE
) -> bool:
    """Return whether ``factor`` times a formula is the wanted one at each point where the latter has a real value; at
    each positive point, if it has none."""
    is_complex = any(each.text == "i" for each in wanted)
    compared = {True: list[bool](), False: list[bool]()}  # where the wanted value is real, and elsewhere
    for point in _points(found, wanted):
        is_positive = min(point.values(), default=1) > 0
        try:
            other = value_of(wanted, point, units[1])
            if is_positive or is_real(other):
                is_same = close(_combined(mul, value_of(found, point, units[0]), factor), other, tolerance)
                compared[is_complex or isinstance(other, tuple) or is_real(other)].append(is_same)
        except NotAFormula:
            if is_positive:
                return False
        if False in compared[True]:
            return False
    return all(compared[True] or compared[False] or [False])


def same_items(items: Sequence[Formula], wanted: Formula) -> bool:
    """Return whether a tuple has the items of a vector, which has one row or one column."""
    for point in _points(*items, wanted):
        try:
            found, value = [value_of(each, point) for each in items], value_of(wanted, point)
        except NotAFormula:
            return False
        if not isinstance(value, tuple) or (len(value) > 1 and len(value[0]) > 1):
            return False
        flat = [*itertools.chain(*value)]
        flat += [Fraction(0)] * (len(items) == 3 and len(flat) == 2 and any(each.text == "unit i" for each in wanted))
        if len(found) != len(flat) or not all(map(close, found, flat)):
            return False
    return True


def ratio_of(found: Formula, wanted: Formula, *, of_numerators: bool) -> Any:
    """Return the constant real ratio of two formulas of the same symbols, or of their numerators, or None."""
    if names_in(found) != names_in(wanted) or not names_in(found):
        return None
    ratios = []
    for point in _points(found, wanted):
        try:
            (one, below), (other, beside) = (_read(each, tuple(point.items()), ONE) for each in (found, wanted))
            ratio = _combined(mul, one, 1 / other)
            ratios.append(_combined(mul, ratio, _combined(mul, below, 1 / beside)) if of_numerators else ratio)
        except (NotAFormula, ZeroDivisionError):
            continue
    is_constant = len(ratios) > 2 and all(is_real(each) and each != 0 and close(each, ratios[0]) for each in ratios)
    return ratios[0] if is_constant else None
