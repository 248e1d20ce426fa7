"""Finds the final answer in a text and compares it with the right one.

The last ``\\boxed{...}`` or ``####`` is the answer, whichever comes later; without either, the last number or formula
of the prose. The whole of it counts: ``\\boxed{18, 19}`` is not 18. Plain numbers are compared here, expressions by
math-verify. Nothing here depends on the main thread or on signals, and no expression is evaluated whose value could be
too large to write down.
"""

from __future__ import annotations

import logging
import math
import re
import unicodedata
from fractions import Fraction
from typing import Any

_LONGEST, _DEEPEST, _MOST_DIGITS = 200, 8, 1000.0

_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]*\|>|</s>")
_BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])\s*")
_MARK = re.compile(r"####\s*(?=[-+\d.$€£¥({*\\]|\Z)")  # before other text it is a heading
_FORMULA = re.compile(r"\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_PROSE_NUMBER = re.compile(
    r"(?<![\w)\]}.])-?[$€£¥]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:\s*/\s*\d+(?![\d,]))?"  # signed, a fraction
    r"|(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
)
_ALTERNATIVE = re.compile(r"\d[^\w.]*\bor\b[^\w.]*\Z")


def final_answer(text: str) -> str | None:
    """The text of the answer; None where there is none, or where it was cut off."""
    text = _SPECIAL_TOKEN.sub("", text)
    marks = [*_BOX.finditer(text), *_MARK.finditer(text)]
    if not marks:
        return _last_in_prose(text)
    last = max(marks, key=re.Match.start)
    if last[0].startswith("\\"):
        return _boxed(text, last.end())
    return text[last.end() :].partition("\n")[0].strip() or None


def right_answer(answer: Any) -> str:
    """The answer of a data set's row: what its solution marks, else the whole of it. Raises ValueError where it is
    empty."""
    text = "" if answer is None else str(answer).strip()
    found = final_answer(text) if _BOX.search(text) or _MARK.search(text) else text
    if not found:
        raise ValueError(f"the row has no answer: {text[-80:]!r}")
    return found


def right_number(answer: Any) -> str:
    """The number of a data set's row; of a solution without marks its last one. Raises ValueError without one."""
    found = right_answer(answer)
    if as_number(found) is None:
        found = _last_in_prose(found) or ""
    if as_number(found) is None:
        raise ValueError(f"the row's answer has no number: {str(answer)[-80:]!r}")
    return found


def _boxed(text: str, start: int) -> str | None:
    """The argument of the command that ends at ``start``."""
    if text[start : start + 1] != "{":
        argument = re.match(r"[^\s$]+", text[start:])
        return argument[0] if argument else None
    depth, at = 0, start
    while at < len(text):
        if text[at] == "\\":
            at += 1
        else:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + 1 : at].strip()
        at += 1
    return None


def _last_in_prose(text: str) -> str | None:
    found = [
        (match.end(), -match.start(), inner)
        for match in _FORMULA.finditer(text)
        if re.search(r"\d", inner := next(filter(None, match.groups())))
    ]
    found += [(match.end(), -match.start(), match[0]) for match in _PROSE_NUMBER.finditer(text)]
    if not found:
        return None
    _, start, answer = max(found)
    return None if _ALTERNATIVE.search(text[max(0, -start - 20) : -start]) else answer


def same_number(said: str | None, right: str | None) -> bool:
    """Whether ``said`` as a whole is the number ``right``. False where ``right`` is no number.

    Units, currency and percent signs do not count, nor does the name in ``x = 18``. Several numbers, ranges,
    alternatives and unknown quantities are never equal to one number. Raises ImportError without math-verify, for an
    answer that is not in digits."""
    wanted, expression = as_number(right), arithmetic(said) if said else None
    if wanted is None or expression is None:
        return False
    return _is_value(expression, wanted)


def as_number(text: str | None) -> Fraction | None:
    """The value of a text that is one number: with separators, currency, a unit, or as a fraction."""
    expression = arithmetic(text) if text else None
    return None if expression is None else _decimal(expression)


_TEXT_COMMAND = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|tt|sf)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname|bm|boldsymbol|underline)"
    r"\s*\{([^{}]*)\}"
)
_LAYOUT = re.compile(
    r"\\(?:text)?color\{\w+\}|\\(?:left|right|displaystyle|textstyle|big|Big|limits)(?![A-Za-z])|\\!|\\\(|\\\)|\\\[|\\\]"
)
_SPACING = re.compile(r"\\[,;:> ]|\\q?quad(?![A-Za-z])|~")
_SEPARATOR = r"(?:,|\{,\}|\\[,;: ]|~|'|_|[ ])"
_GROUPED = re.compile(
    rf"(?<![\d.])(?:\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+|\d{{1,2}}(?:,\d{{2}})+,\d{{3}})(?!\d|{_SEPARATOR}\d)"
)
_SIGNS = re.compile(r"\\?[$%]|[€£¥₹]|\\(?:euro|pounds|yen|textdollar)(?![A-Za-z])|\^?\{?\\circ\}?|\^?\{?\\degree\}?|°")
_OPERATORS = {"−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "⁄": "/"}
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
_EXACT_EQUALITY = re.compile(r"(?<![<>!\\])=")
_EQUALITY = re.compile(rf"{_EXACT_EQUALITY.pattern}|\\approx(?![A-Za-z])|\\simeq(?![A-Za-z])|≈")
_SCIENTIFIC = re.compile(r"(?<=\d)[eE]([+-]?\d+)(?![\w.])")
_MIXED = re.compile(r"(?<![\d.])(-?)(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
_MIXED_LATEX = re.compile(r"(?<![\d.^{])(-?)(\d+)\s*\\[dtc]?frac\s*\{(\d+)\}\s*\{(\d+)\}")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+")
_LEADING_WORDS = re.compile(r"(?:[A-Za-z](?:['’./-]?[A-Za-z])*+[.\s:,]*+)++(?=[-+]?\s*[\d.({\\])")
_TRAILING_WORDS = re.compile(
    r"(?<=[\d.)}\s!])[(\s]*+(?:(?<![A-Za-z\\])[A-Za-z][A-Za-z.'’]*+\s*+(?:\^\s*\{?-?\d\}?)?[\s/()*-]*+)++\Z"
)
# Words that make the number beside them another one, or one of several.
_BEFORE = re.compile(
    r"\b(?:not|or|than|least|most|between|minus|negative|without|except|half|third|quarter|fifth|tenth|double|twice|thrice"
    r"|n?either|nor|mod|modulo)\b",
    re.IGNORECASE,
)
_AFTER = re.compile(
    r"\b(?:or|and|plus|minus|than|mod|modulo|dozens?|score|hundreds?|thousands?|(?:m|b|tr)illions?|squared|cubed|pi|inf"
    r"|infinity|half|halves|thirds|tenths|hundredths)\b",
    re.IGNORECASE,
)
_UNITS_OF_ONE_LETTER = frozenset("mgshdlLJNWVACF")
_COMMANDS = frozenset(("frac", "dfrac", "tfrac", "cfrac", "sqrt", "times", "cdot", "div"))


def arithmetic(text: str) -> str | None:
    """``text`` without typography, currency, units and the name of the quantity, as LaTeX of numbers and operators.
    None where it is something else: a list, a range, an unknown, words that relate several numbers."""
    if len(text) > 4 * _LONGEST:
        return None
    text = _GROUPED.sub(_digits, _SIGNS.sub("", _without_layout(text)))
    text = _SPACING.sub(" ", text).strip().rstrip(".,;:").strip()
    *names, value = _EQUALITY.split(text)
    expression = _without_words(value)
    if expression is None or any(_is_several(name) for name in names):
        return None
    if len(names) == len(_EXACT_EQUALITY.findall(text)):
        sides = [side for name in names if (side := _without_words(name)) is not None]
        if not all(_equal(side, expression) for side in sides):
            return None  # 20 = 18
    return expression


def _without_layout(text: str) -> str:
    """Unicode as LaTeX, and LaTeX without the commands that only change how it looks."""
    text = _SUPERSCRIPT.sub(lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", text)
    text = unicodedata.normalize("NFKC", text)
    for sign, operator in _OPERATORS.items():
        text = text.replace(sign, operator)
    text = _LAYOUT.sub("", text)
    while (inner := _TEXT_COMMAND.sub(r" \1 ", text)) != text:
        text = inner
    return re.sub(r"(?<=\d)\*\*(?=\d)", "^", text).replace("**", "").replace("`", "")


def _digits(match: re.Match[str]) -> str:
    return re.sub(r"\D", "", match[0])


def _is_several(name: str) -> bool:
    """Whether the left side of an equation is more than a name, as ``x = 20 or y`` of ``x = 20 or y = 18``."""
    return "," in name or bool(re.search(r"\d", name) and re.search(r"\b(?:or|and)\b", name))


def _without_words(text: str) -> str | None:
    text = _SCIENTIFIC.sub(r"*10^{\1}", text.strip())
    lead = _LEADING_WORDS.match(text)
    if lead is not None:
        if _BEFORE.search(lead[0]) or len(lead[0].strip()) == 1:  # x - 18
            return None
        text = text[lead.end() :]
    unit = _TRAILING_WORDS.search(text)
    if unit is not None:
        words = _WORD.findall(unit[0])
        if _AFTER.search(unit[0]) or (
            len(words) == 1 and len(words[0]) == 1 and words[0] not in _UNITS_OF_ONE_LETTER  # 18x
        ):
            return None
        text = text[: unit.start()]
    text = _MIXED_LATEX.sub(r"\1(\2+\\frac{\3}{\4})", _MIXED.sub(r"\1(\2+\3/\4)", text)).strip()
    return text if _is_arithmetic(text) else None


def _is_arithmetic(text: str) -> bool:
    if not re.search(r"\d", text) or len(text) > _LONGEST or re.search(r"[\d.]\s+[\d.]|[-+*/^]\s*\Z", text):
        return False
    rest = re.sub(r"\\([A-Za-z]+)", lambda match: "" if match[1] in _COMMANDS else "?", text)
    if re.search(r"[^\d.+\-*/^(){}\[\]\s!]", rest) or ("[" in rest and "\\sqrt" not in text):
        return False
    return _depth(text) <= _DEEPEST


def _depth(text: str) -> float:
    """The depth of the brackets, in which the parser's time is far from linear; infinite where they do not close."""
    depth = deepest = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    return math.inf if depth else deepest


_PLAIN_FRACTION = re.compile(r"\\[dtc]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_DECIMAL = re.compile(r"[({\s]*([+-]?)\s*(\d+\.?\d*|\.\d+)\s*(?:/\s*(\d+\.?\d*))?[)}\s]*")


def _decimal(expression: str) -> Fraction | None:
    """The value of a number in digits, or of a fraction of two."""
    match = _DECIMAL.fullmatch(_PLAIN_FRACTION.sub(r"\1/\2", expression))
    if match is None:
        return None
    sign, above, below = match.groups()
    try:
        value = Fraction(above) / Fraction(below or 1)
    except ZeroDivisionError:
        return None
    return -value if sign == "-" else value


def _is_value(expression: str, wanted: Fraction) -> bool:
    """Exact for whole numbers, to six decimals for others, as in math-verify."""
    value = _decimal(expression)
    if value is None:
        import sympy

        return _verified(sympy.Rational(wanted.numerator, wanted.denominator), expression)
    return value == wanted or (wanted.denominator != 1 and abs(value - wanted) < Fraction(1, 10**6))


def _equal(one: str, other: str) -> bool:
    first, second = _decimal(one), _decimal(other)
    if second is not None:
        return _is_value(one, second)
    return first is None or _is_value(other, first)


_MATHEMATICS = re.compile(rf"\\(?!(?:{'|'.join(sorted(_COMMANDS))})(?![A-Za-z]))[A-Za-z]")
_SIDE_BY_SIDE = re.compile(r"(?<![\d_^{])\d+\s+\d")  # math-verify adds them
_PLAIN_TEXT = re.compile(r"[A-Za-z'’ -]{2,}|\([A-Za-z]\)")


def same_expression(said: str, right: str) -> bool:
    """Whether both are the same mathematics, or the same text where they have none. May take long. Raises ImportError
    without math-verify."""
    said, right = _one_line(said), _one_line(right)
    if said.casefold() == right.casefold():
        return True
    if _PLAIN_TEXT.fullmatch(right) or _SIDE_BY_SIDE.search(said):
        return False
    if as_number(right) is not None and not _MATHEMATICS.search(said):
        return False  # ``same_number`` has seen all of it
    gold = _parsed(right)
    return gold is not None and _verified(gold, said)


def _one_line(text: str) -> str:
    text = _GROUPED.sub(_digits, _without_layout(text).replace("$", ""))
    return re.sub(r"\s+", " ", text).strip().rstrip(".,;:").strip()


def _verified(gold: Any, said: str) -> bool:
    from math_verify import verify

    found = _parsed(said)
    return found is not None and bool(verify(gold, found, timeout_seconds=None))


def _parsed(formula: str) -> Any:
    """A sympy expression, unevaluated; None for what is none, or is too large to evaluate."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the deadline is not its own
    # Units are off: math-verify would drop the "million" of "18 million".
    typography = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
    found = parse(
        f"${formula}$",
        extraction_config=[LatexExtractionConfig(normalization_config=typography)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    return found[0] if found and digits_of(found[0]) <= _MOST_DIGITS else None


def digits_of(expression: Any) -> float:
    """A bound on the decimal digits of the numbers that evaluating an unevaluated sympy expression makes."""
    import sympy

    if isinstance(expression, sympy.Rational):
        return float((expression.p.bit_length() + expression.q.bit_length()) * math.log10(2) + 1)
    if isinstance(expression, sympy.Float):
        value = abs(float(expression))
        return 16.0 + (abs(math.log10(value)) if value and math.isfinite(value) else 0.0)
    parts = [digits_of(part) for part in getattr(expression, "args", ())]
    if max(parts, default=0.0) > _MOST_DIGITS:
        return math.inf
    if isinstance(expression, sympy.Pow) and expression.exp.is_number:
        return parts[0] * max(1.0, _magnitude(expression.exp, parts[1])) + parts[1]
    if isinstance(expression, sympy.factorial) and expression.args[0].is_number:
        argument = _magnitude(expression.args[0], parts[0])
        return argument * math.log10(argument + 2) + 1
    return sum(parts) + len(parts)


def _magnitude(number: Any, digits: float) -> float:
    """Infinite for a number of many digits, which is not evaluated."""
    try:
        return abs(complex(number)) if digits <= 20 else math.inf
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):
        return math.inf


# Rewards that need no code of the user's: ``--reward exact`` and ``--reward number``


def exact(completion: str, answer: object) -> float:
    """1 for the very answer, apart from space around it."""
    return float(completion.strip() == str(answer).strip())


def number(completion: str, answer: object) -> float:
    """1 where the final answer is the number of the example, as in GSM8K. Answers that are not in digits, such as
    ``\\boxed{\\frac{36}{2}}``, need math-verify."""
    return float(same_number(final_answer(completion), right_number(answer)))


BUILT_IN = {"exact": f"{__name__}:exact", "number": f"{__name__}:number"}
