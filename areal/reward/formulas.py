"""Values of formulas in LaTeX, and their comparison.

Formulas are parsed by latex2sympy2_extended and evaluated exactly. Two constants are equal if they agree in 40 digits,
rationals if they are the same; with a tolerance, within it relative to the right one. Two expressions with unknowns are
equal if they are at several points. What could have more than ``_MOST_DIGITS`` digits is not evaluated.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

_MOST_DIGITS, _MOST_FACTORS = 20_000.0, 5_000

_DECIMAL = re.compile(
    r"[({\s]*([+-]?)[({\s]*(\d+\.?\d*|\.\d+)\s*(?:/\s*(\d+\.?\d*))?[)}\s]*(?:(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*([+-]?\d{1,3})\s*\}?)?"
)


def decimal(formula: str) -> Fraction | None:
    """The value of a number in digits, or of a fraction of two such numbers; None for other expressions."""
    match = _DECIMAL.fullmatch(re.sub(r"\\frac\s*\{\s*([\d.]+)\s*\}\s*\{\s*([\d.]+)\s*\}", r"\1/\2", formula))
    try:
        if match is not None:
            value = Fraction(match[2]) / Fraction(match[3] or 1) * Fraction(10) ** int(match[4] or 0)
            return -value if match[1] == "-" else value
    except (ValueError, ZeroDivisionError):
        pass
    return None


@lru_cache(maxsize=1024)
def parsed(formula: str) -> Any:
    """The formula as a sympy object; None if it cannot be parsed, or is too large to evaluate."""
    import sympy
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    settings = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
    try:
        if "'" in formula:  # the parser drops it
            return None
        found = latex2sympy(formula, normalization_config=None, conversion_config=settings)
        if digits_of(found) > _MOST_DIGITS:
            return None
        exact = {each: sympy.Rational(str(each)) for each in found.atoms(sympy.Float)}
        named = {each: each.name for each in found.free_symbols}
        constants = {each: sympy.I if name == "i" else sympy.E for each, name in named.items() if name in ("i", "e")}
        return found.xreplace(exact).subs(constants).doit()
    except Exception:  # noqa: BLE001 - the parser and sympy raise many kinds
        return None


def solved(sides: tuple[str, ...], operators: tuple[str, ...], is_condition: bool) -> Any:
    """The set of real numbers that meet a chain of inequalities in one unknown; None if there is none. Unless it is a
    condition, the unknown must stand alone on a side of each inequality."""
    import sympy

    values = [parsed(side) for side in sides]
    symbols = set().union(*(getattr(value, "free_symbols", ()) for value in values))
    if None in values or len(symbols) != 1:
        return None
    kinds = {"<": sympy.Lt, ">": sympy.Gt, r"\le": sympy.Le, r"\ge": sympy.Ge, r"\ne": sympy.Ne, "=": sympy.Eq}
    unknown = {symbols.pop(): sympy.Symbol("x", real=True)}
    *_, alone = unknown
    result = sympy.Reals
    try:
        for left, operator, right in zip(values, operators, values[1:], strict=False):
            if not is_condition and not {alone, sympy.Abs(alone)} & {left, right}:
                return None
            result &= kinds[operator](left.subs(unknown), right.subs(unknown)).as_set()
        return result
    except Exception:  # noqa: BLE001 - sympy raises many kinds
        return None


def same_set(found: Any, wanted: Any) -> bool:
    return bool(_rounded(found) == _rounded(wanted))


def _rounded(found: Any) -> Any:
    """A set or number with 30 digits for its irrational numbers, so that equal ones are the same object."""
    import sympy

    if isinstance(found, sympy.Interval):
        return sympy.Interval(_rounded(found.start), _rounded(found.end), found.left_open, found.right_open)
    if isinstance(found, sympy.Union | sympy.FiniteSet):
        return found.func(*map(_rounded, found.args))
    is_irrational = isinstance(found, sympy.Expr) and found.is_number and found.is_finite and not found.is_Rational
    return sympy.Rational(str(found.evalf(50).n(30))) if is_irrational else found


def begins_with(number: Any, digits: Fraction, places: int) -> bool:
    """Whether a number goes on where the digits of a decimal end."""
    import sympy

    is_number = isinstance(number, sympy.Expr) and number.is_extended_real and not number.free_symbols
    return bool(is_number and 0 < abs((number - sympy.Rational(digits)).evalf(60)) < sympy.Rational(1, 10**places))


def _points(*expressions: Any) -> list[dict[Any, Any]]:
    import sympy

    symbols = sorted({symbol for each in expressions for symbol in each.free_symbols}, key=str)
    return [
        {symbol: sympy.Rational(sign * (13 + 5 * i + 3 * start), 7 + 2 * i) for i, symbol in enumerate(symbols)}
        for start, sign in ((0, 1), (2, 1), (5, 1), (1, -1), (4, -1))
    ][: 5 if symbols else 1]


def _value(expression: Any, point: dict[Any, Any]) -> Any:
    value = expression.subs(point)
    return value if value.is_Rational else value.evalf(60)


def same_value(found: Any, wanted: Any, tolerance: Fraction | None) -> bool:
    import sympy

    if isinstance(wanted, sympy.MatrixBase) or isinstance(found, sympy.MatrixBase):
        return getattr(found, "shape", 0) == getattr(wanted, "shape", 1) and all(
            same_value(*each, tolerance) for each in zip(found.flat(), wanted.flat(), strict=True)
        )
    if found == wanted and found is not sympy.nan and found is not sympy.zoo:
        return True
    if not all(isinstance(each, sympy.Expr) and each.is_finite is not False for each in (found, wanted)):
        return False
    same_points = 0
    for point in _points(found, wanted):
        one, other = _value(found, point), _value(wanted, point)
        if min(point.values(), default=1) < 0 and other.is_real is not True:
            continue
        if not (one.is_number and other.is_number) or not _is_close(one, other, tolerance):
            return False
        same_points += 1
    return same_points > 0


def _is_close(one: Any, other: Any, tolerance: Fraction | None) -> bool:
    import sympy

    if one.is_Rational and other.is_Rational and tolerance is None:
        return bool(one == other)
    limit = sympy.Rational(tolerance or Fraction(1, 10**40))
    difference = (one - other).evalf(60)
    parts = difference.as_real_imag()
    return all(part == 0 or part._prec <= 1 or abs(part) <= limit * abs(other) for part in parts)


def ratio_of(found: Any, wanted: Any, *, of_numerators: bool) -> Any:
    """The constant ratio of two expressions, or of their numerators; None if it is not constant, or not real."""
    import sympy

    if found is None or wanted is None or not wanted.free_symbols or found.free_symbols != wanted.free_symbols:
        return None
    if of_numerators:
        found, wanted = (sympy.numer(sympy.together(each)) for each in (found, wanted))
    ratios = [_value(found / wanted, point) for point in _points(found, wanted)]
    is_constant = all(each.is_real and each != 0 and _is_close(each, ratios[0], None) for each in ratios)
    return ratios[0] if is_constant else None


def digits_of(expression: Any) -> float:
    """An upper bound on the decimal digits of all numbers in the evaluation of an unevaluated sympy expression."""
    import sympy

    if isinstance(expression, sympy.Rational):
        return float((expression.p.bit_length() + expression.q.bit_length()) * math.log10(2) + 1)
    if isinstance(expression, sympy.Symbol):
        return 3.0  # of the points
    if isinstance(expression, sympy.Float):
        value = abs(float(expression))
        return 16.0 + (abs(math.log10(value)) if value and math.isfinite(value) else 0.0)
    parts = [digits_of(part) for part in getattr(expression, "args", ())]
    if max(parts, default=0.0) > _MOST_DIGITS:
        return math.inf
    if isinstance(expression, sympy.Pow) and expression.exp.is_number:
        return parts[0] * max(1.0, _magnitude(expression.exp, parts[1])) + parts[1]
    if isinstance(expression, sympy.Product):  # the multiplication of long numbers cannot be interrupted
        spans = [high - low for _, low, high in expression.limits]
        if any(span.is_number and not span <= _MOST_FACTORS for span in spans):
            return math.inf
    if isinstance(expression, sympy.factorial | sympy.gamma) and expression.args[0].is_number:
        argument = _magnitude(expression.args[0], parts[0])
        return argument * math.log10(argument + 2) + 1
    return sum(parts) + len(parts)


def _magnitude(number: Any, digits: float) -> float:
    """The absolute value of a number; infinite for one of over 20 digits, which is not evaluated."""
    try:
        return abs(complex(number)) if digits <= 20 else math.inf
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):
        return math.inf
