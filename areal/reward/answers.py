"""Extraction of the final answer from a text, and comparison with the reference answer.

The answer is the last ``\\boxed{...}`` or ``####``, whichever comes later; without either, the last number or formula
in the prose. The whole answer must match: neither ``\\boxed{18, 19}``, nor two boxes joined by "or", nor the prose
``18 million``, ``17 and 18``, ``not 18`` or ``at least 18`` equals 18. Plain numbers are compared here, expressions by
math-verify. The code needs neither the main thread nor signals, and does not evaluate expressions whose value could
have more than ``_MOST_DIGITS`` digits.
"""

from __future__ import annotations

import logging
import math
import re
import unicodedata
from fractions import Fraction
from typing import Any

_LONGEST, _DEEPEST, _MOST_DIGITS, _MOST_BOXES = 200, 8, 1000.0, 20

_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]*\|>|</s>|<end_of_turn>|<eos>")
_BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])\s*")
_MARK = re.compile(r"####\s*(?=[-+\d.$€£¥({*\\]|\Z)")  # before other text it is a heading
_FORMULA = re.compile(r"\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SCALE = r"(?:dozens?|tens|hundreds?|thousands?|(?:m|b|tr)illions?|mil|mn|bn|lakhs?|crores?)"
_QUANTITY = (
    r"(?:(?:\d{1,3}(?:[,_' ]\d{3})+(?!\d)|\d+[ ]\d+/\d+|\d+)(?:\.\d+)*(?:[eE][-+]?\d+(?!\w))?|(?<![\w.])\.\d+"
    r"|\\[dtc]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}|\\sqrt\s*\{[^{}]*\})"
)
_BETWEEN = r"(?:[:,]|[ ]?(?:-{1,3}|\+/-|\+|±|\*{1,2}|/|~|\\(?:times|cdot|div|pm)[ ]{0,2})[ ]?|[ ]?\^[ ]?\{?-?)"
_PROSE_NUMBER = re.compile(  # including context that changes its value or adds more numbers: 2^18, 18 million, 17-18
    r"(?<![^\W_])(?<![^\W_]_)(?<!_\{)(?<!\d\.)(?<!\^)(?<!\^[{-])(?<!\^\{-)"  # CO2, x_2, cm^2
    rf"(?:(?<![)\]}}.])[-+]|(?:\\pm|±)[ ]{{0,2}}|(?:minus|negative)[ ])?(?:[$€£¥]-?)?{_QUANTITY}"
    rf"(?:{_BETWEEN}{_QUANTITY}\}}?)*"
    rf"(?:[^\W\d_]\w*|\\sqrt\s*\{{[^{{}}]*\}}|[ ]?\\pi(?![A-Za-z])|[ ](?:{_SCALE}|squared|cubed|and[ ]a[ ]half)\b)?"
)
_WINDOW = 80
_GAP = r"[^\w\n.!?:=]*"
_DOUBT_BEFORE = re.compile(  # text before the last number that makes it one of several numbers, or not the answer
    rf"\d[^\n.!?:=]*\bor\b{_GAP}(?:[A-Za-z'’]+{_GAP}){{0,3}}\Z"  # 18 eggs, or maybe 20
    r"|\d[^\w\n.!?:=()<>]*(?:\b(?:and|to|through|vs|versus)\b\.?)?[^\w\n.!?:=()<>]*\Z"  # 17, 18 and 20
    r"|\d[ ](?:hours?|minutes?|days?|weeks?|months?|years?|f(?:ee|oo)?t|yards?|dollars?|pounds?|remainder|r),?"
    rf"(?:[ ]and)?{_GAP}\Z"  # 1 hour and 18 minutes
    r"|\b(?:not|never|cannot|[a-z]+n['’]t)\b(?:\s+[A-Za-z]+){0,4}[^\w\n.!?:;,=]*\Z"
    r"|(?:[≤≥≠]|!=|[<>]=|[ \d)$][<>]|(?<![\w</])[A-Za-z][<>]|\\(?:[gl]eq?|neq?)(?![A-Za-z]))\s*[$\\]*\Z",
    re.IGNORECASE,
)
_DOUBT_AFTER = re.compile(
    r"\W{0,3}\?|\s*(?:[A-Za-z]+\s+)?(?:or\s+(?:so|more|less|fewer|over|under|above|below|higher|lower)|at\s+(?:least|most))\b"
    r"|\s*(?:is|was)(?:n['’]t|\s+(?:not|wrong|incorrect|impossible))\b",
    re.IGNORECASE,
)
_NEIGHBOURS = re.compile(r"(?:[A-Za-z'’]+[ ](?=(?:of|to)\b))?[A-Za-z'’]+(?=[ $\\*_]*\Z)")
_NEGATED = re.compile(r"(?:\A|[=$(:])[-−]\Z|[=$]\s*[-−]\s*\Z")
_JOINED = re.compile(
    r"[\s$()]*(?:[,;/|&~]|-{1,3}|[,;]?\s*\b(?:and/or|or|and|to|vs\.?)\b"
    r"(?:\s+(?:else|even|also|maybe|perhaps|possibly|alternatively))?)[\s$()]*",
    re.IGNORECASE,
)


def final_answer(text: str) -> str | None:
    """The final answer in a text; None if there is none, or if it was truncated."""
    text = _SPECIAL_TOKEN.sub("", text)
    marks = [*_BOX.finditer(text), *_MARK.finditer(text)]
    if not marks:
        return _last_in_prose(text, doubt=True)
    last = max(marks, key=re.Match.start)
    if last[0].startswith("\\"):
        return _last_boxes(text, [mark for mark in marks if mark[0].startswith("\\")])
    return text[last.end() :].partition("\n")[0].strip() or None


def right_answer(answer: Any) -> str:
    """The reference answer of a row: the marked answer of its solution, else the whole text. Raises ValueError if it is
    empty."""
    text = "" if answer is None else str(answer).strip()
    found = final_answer(text) if _BOX.search(text) or _MARK.search(text) else text
    if not found:
        raise ValueError(f"the row has no answer: {text[-80:]!r}")
    return found


def right_number(answer: Any) -> str:
    """The reference number of a row: the marked one, else the last one of the text. Raises ValueError without one."""
    found = right_answer(answer)
    if as_number(found) is None:
        found = _last_in_prose(found) or ""
    if as_number(found) is None:
        raise ValueError(f"the row's answer has no number: {str(answer)[-80:]!r}")
    return found


def _last_boxes(text: str, boxes: list[re.Match[str]]) -> str | None:
    """The content of the last box, joined with preceding boxes that only a comma or a conjunction separates from it. Of
    nested boxes, the outermost is used."""
    arguments: list[tuple[int, int, int]] = []
    covered = 0
    for box in boxes[-_MOST_BOXES:]:
        if box.start() >= covered:
            start, end = _argument(text, box.end())
            arguments.append((box.start(), start, end))
            covered = end or start + len(text[start:].partition("\n")[0])
    found: list[str] = []
    after = 0
    for begin, start, end in reversed(arguments):
        if found and not _JOINED.fullmatch(_SPACING.sub(" ", _SIGNS.sub("", _without_layout(text[end:after])))):
            break
        if not end:
            return ", ".join(found) or None
        content = text[start:end].removeprefix("{").removesuffix("}").strip()
        if _NEGATED.search(text[max(0, begin - _WINDOW) : begin]):
            content = f"-({content})"
        found[:0] = [content] if content not in found else []
        after = begin
    return ", ".join(found)


def _argument(text: str, start: int) -> tuple[int, int]:
    """Start and end, with braces, of the argument of the LaTeX command that ends at ``start``. The end is 0 if the
    argument is missing or truncated."""
    if text[start : start + 1] != "{":
        argument = re.match(r"[^\s$]+", text[start:])
        return start, start + argument.end() if argument else 0
    depth, at = 0, start
    while at < len(text):
        if text[at] == "\\":
            at += 1
        else:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return start, at + 1
        at += 1
    return start, 0


def _last_in_prose(text: str, doubt: bool = False) -> str | None:
    """The last number or formula in prose. With ``doubt``, None if the words beside it say that it is not the answer,
    or only a part of it."""
    text = _in_latex(text)
    found = [
        (match.end(), -match.start(), inner)
        for match in _FORMULA.finditer(text)
        if re.search(r"\d", inner := next(filter(None, match.groups())))
    ]
    found += [(match.end(), -match.start(), match[0]) for match in _PROSE_NUMBER.finditer(text)]
    if not found:
        return None
    end, start, answer = max(found)
    return (
        None if doubt and _is_doubtful(text[max(0, -start - _WINDOW) : -start], text[end : end + _WINDOW]) else answer
    )


def _is_doubtful(before: str, after: str) -> bool:
    beside = _NEIGHBOURS.search(before)
    return bool(
        _DOUBT_BEFORE.search(before) or _DOUBT_AFTER.match(after) or (beside is not None and _BEFORE.search(beside[0]))
    )


def same_number(answer: str | None, right: str | None) -> bool:
    """Whether ``answer`` as a whole equals the number ``right``. False if ``right`` is not a number.

    Units, currency and percent signs, and the name in ``x = 18``, are ignored. Several numbers, ranges, alternatives
    and unknowns never equal one number. Raises ImportError if math-verify is needed and not installed: for an answer
    that is not written in digits."""
    wanted, expression = as_number(right), arithmetic(answer) if answer else None
    if wanted is None or expression is None or _is_incomparable(answer or "", right or ""):
        return False
    return _is_value(expression, wanted)


def as_number(text: str | None) -> Fraction | None:
    """The value of a text that is one number, which may have separators, a currency or a unit, or be a fraction. None
    for any other text."""
    expression = arithmetic(text) if text else None
    return None if expression is None else _decimal(expression)


_TEXT_COMMAND = re.compile(
    r"\\(?:f?box(?:ed)?|text(?:bf|it|rm|normal|tt|sf)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname|bm|boldsymbol|underline)"
    r"\s*\{([^{}]*)\}"
)
_UNIT_FRACTION = re.compile(
    r"\\[dtc]?frac\s*\{\\(?:text|mathrm)\{([A-Za-z ]+)\}\}\s*\{\\(?:text|mathrm)\{([A-Za-z ]+)\}\}"
)
_LAYOUT = re.compile(
    r"\\(?:text)?color\{\w+\}|\\(?:left|right|displaystyle|textstyle|big|Big|limits)(?![A-Za-z])|\\!|\\\(|\\\)|\\\[|\\\]"
)
_SPACING = re.compile(r"(?<!\\)\\[,;:> ]|\\q?quad(?![A-Za-z])|~")
_SEPARATOR = r"(?:,|\{,\}|\\[,;: ]|~|'|_|[ ])"
_TUPLE = re.compile(r"(?<!\w)(?:[(\[]|\\\{)\s*-?\d+(?:\s*,\s*-?\d+)+\s*(?=[)\]]|\\\})")
_GROUPED = re.compile(
    rf"(?<![\d.])(?!0\d*{_SEPARATOR})(?:\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+|\d{{1,2}}(?:,\d{{2}})+,\d{{3}})(?!\d|{_SEPARATOR}\d)"
)
_CIRCLE = r"\^?\s*\\(?:circ|degree)(?![A-Za-z])"
_DEGREES = rf"(?:\^?\s*\{{\s*{_CIRCLE}\s*\}}|{_CIRCLE}|°)"
_SIGNS = re.compile(rf"\\?[$%]|[€£¥₹]|\\(?:euro|pounds|yen|textdollar)(?![A-Za-z])|{_DEGREES}")
_ANGLE = re.compile(rf"(?<![\d.])(\d+(?:\.\d+)?|\.\d+)\s*{_DEGREES}")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_OPERATORS = {"−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "⁄": "/"}
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200d\u2060\ufeff]")
_NARROW_SPACE = re.compile(r"(?<=\d)[\u00a0\u2009\u202f](?=\d{3}(?!\d))")
_MIXED_UNICODE = re.compile(r"(?<=\d)(?=[¼-¾⅐-⅞])")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))")
_REPEATING = re.compile(r"(?<![\d.])(\d{0,20})\.(\d{0,20})\\overline\s*\{(\d{1,20})\}")
_ORDINAL = re.compile(r"(?<=\d)\s*\^\s*\{?\s*(?:st|nd|rd|th)\b\s*\}?")
_TIMES = re.compile(r"(?<=\d)(?<!\b0) ?[xX] ?(?=\d)")
_EXACT_EQUALITY = re.compile(r"(?<![<>!\\])=")
_EQUALITY = re.compile(rf"{_EXACT_EQUALITY.pattern}|\\approx(?![A-Za-z])|\\simeq(?![A-Za-z])|≈")
_SCIENTIFIC = re.compile(r"(?<=\d)[eE]([+-]?\d+)(?![\w.])")
_MIXED = re.compile(r"(?<![\d.])(-?)(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
_MIXED_LATEX = re.compile(r"(?<![\d.^{])(-?)(\d+)\s*\\[dtc]?frac\s*\{(\d+)\}\s*\{(\d+)\}")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+")
# Possessive quantifiers are on single characters: before Python 3.11.5 one on a group may miss a match (gh-106052).
_LEADING_WORDS = re.compile(r"(?:[A-Za-z](?:['’./-]?[A-Za-z])*(?!['’./-]?[A-Za-z])[.\s:,]*+)+(?=[-+]?\s*[\d.({\\])")
_TRAILING_WORDS = re.compile(
    r"(?<=[\d.)}\s!])[(\s]*+(?:(?<![A-Za-z\\])[A-Za-z][A-Za-z.'’]*+\s*+(?:\^\s*\{?-?\d\}?)?[\s/()*-]*+)+\Z"
)
# Words that change the value of the number beside them, or make it one of several.
_BEFORE = re.compile(
    r"\b(?:not|never|[a-z]+n['’]t|or|than|least|most|between|minus|negative|without|except|half|third|quarter|fifth|tenth"
    r"|double|twice|thrice|n?either|nor|none|mod|modulo)\b"
    r"|\b(?:over|under|above|below|up\s+to|instead\s+of|but|sqrt|log|ln|exp|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|gcd|lcm|max|min|sum"
    rf"|(?:root|square|cube|factorial|reciprocal|inverse|opposite|logarithm|sine|cosine|tangent)\s+of|{_SCALE})\s*\Z",
    re.IGNORECASE,
)
_AFTER = re.compile(
    rf"\b(?:or|and|at\s+(?:most|least)|plus|minus|than|mod|modulo|score|squared|cubed|factorial|negative|below|pi|inf|infinity|half|halves"
    rf"|thirds|tenths|hundredths|thousandths|{_SCALE})\b",
    re.IGNORECASE,
)
_UNITS_OF_ONE_LETTER = frozenset("mgshdlLJNWVACF")
_COMMANDS = frozenset(("frac", "dfrac", "tfrac", "cfrac", "over", "sqrt", "times", "cdot", "div"))


def arithmetic(text: str) -> str | None:
    """``text`` as LaTeX of only numbers and operators, without typography, currency, units and the quantity's name.
    None for any other text: a list, a range, an unknown, words that relate several numbers."""
    if len(text) > 4 * _LONGEST:
        return None
    text = _without_separators(_SIGNS.sub("", _without_layout(text)))
    text = _SPACING.sub(" ", text).strip().rstrip(".,;:").strip()
    *names, value = _EQUALITY.split(text)
    expression = _without_words(value)
    if expression is None or any(_is_several(name) or _is_scaled(name) for name in names):
        return None
    if len(names) == len(_EXACT_EQUALITY.findall(text)):
        sides = [side for name in names if (side := _without_words(name)) is not None]
        if not all(_equal(side, expression) for side in sides):
            return None  # 20 = 18
    return expression


_ARGUMENT = re.compile(r"_\s*(?:\{[^{}]*\}|\w)|(?<=[A-Za-z}])\s*\([^()]*\)")  # subscripts, and f(2)
_UNKNOWN = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_PROSE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{3,}")


def _is_scaled(side: str) -> bool:
    """Whether a side of an equation has an unknown and a number, as in ``2x = 36`` or ``x + 2 = 36``: the other side is
    not the unknown's value. ``m + n = 36`` names the answer."""
    side = _ARGUMENT.sub("", side)
    return bool(_UNKNOWN.search(side) and re.search(r"\d", side)) and not _PROSE.search(side)


def _is_relation(text: str) -> bool:
    """Whether a reference is an equation of unknowns, such as a line's ``x - y = 1``, and not a named value."""
    *sides, _ = _EQUALITY.split(_without_layout(text))
    plain = [_ARGUMENT.sub("", side) for side in sides]
    return any(_UNKNOWN.search(side) and re.search(r"[-+*/^\d]", side) and not _PROSE.search(side) for side in plain)


def _name(text: str) -> str:
    """The unknown that the text gives the value of; "" if it is not one letter."""
    name, *value = _EQUALITY.split(_without_layout(text).replace("$", ""))
    return name.strip().casefold() if len(value) == 1 and _UNKNOWN.fullmatch(name.strip()) else ""


def _is_incomparable(answer: str, right: str) -> bool:
    """Whether a value is compared with a relation, or the value of one unknown with that of another."""
    return _is_relation(right) or bool(_name(answer) and _name(right) and _name(answer) != _name(right))


def _in_latex(text: str) -> str:
    """Convert Unicode digits, separators, fractions, roots and operators to LaTeX."""
    text = _SUPERSCRIPT.sub(lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", text)
    text = _NARROW_SPACE.sub(",", _INVISIBLE.sub("", text))
    text = unicodedata.normalize("NFKC", _MIXED_UNICODE.sub(" ", text))
    for sign, operator in _OPERATORS.items():
        text = text.replace(sign, operator)
    return _TIMES.sub(r"\\times ", _ROOT.sub(lambda match: rf"\sqrt{{{match[match.lastindex or 1]}}}", text))


def _without_layout(text: str) -> str:
    """Convert Unicode to LaTeX, and remove commands that only affect the layout."""
    text = _LAYOUT.sub("", _in_latex(text))
    text = _UNIT_FRACTION.sub(r" \1/\2 ", text)
    while (inner := _TEXT_COMMAND.sub(r" \1 ", text)) != text:
        text = inner
    text = _ORDINAL.sub("", _REPEATING.sub(_repeating, text))
    return re.sub(r"(?<=\d)\*\*(?=\d)", "^", text).replace("**", "").replace("`", "")


def _repeating(match: re.Match[str]) -> str:
    """``0.1\\overline{6}`` as a fraction."""
    whole, digits, period = match.groups()
    ends = int(whole + digits or 0)
    return rf"\frac{{{int(whole + digits + period) - ends}}}{{{(10 ** len(period) - 1) * 10 ** len(digits)}}}"


def _without_separators(text: str) -> str:
    """``70,000`` as ``70000``, but not the interval ``(0,100)``."""
    text = _TUPLE.sub(lambda match: match[0].replace(",", ", "), text)
    return _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)


def _is_several(name: str) -> bool:
    """Whether a side of an equation has more than one quantity, as ``20 or y`` in ``x = 20 or y = 18``, or ``20 y`` in
    ``x = 20 y = 18``."""
    return "," in name or bool(
        re.search(r"\d[\s;]+[A-Za-z](?:_\S+)?\s*\Z", name)
        or (re.search(r"\d", name) and re.search(r"\b(?:or|and)\b", name))
    )


def _without_words(text: str) -> str | None:
    text = _SCIENTIFIC.sub(r"*10^{\1}", text.strip())
    lead = _LEADING_WORDS.match(text)
    if lead is not None:
        is_function = text[: lead.end() + 1].endswith("(") and lead[0][-1:].isalpha()
        if is_function or _BEFORE.search(lead[0]) or len(lead[0].strip()) == 1:  # x - 18
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
    """The depth of brackets, infinite if unbalanced. The parser's time grows much faster than linearly with it."""
    depth = deepest = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    return math.inf if depth else deepest


_PLAIN_FRACTION = re.compile(r"\\[dtc]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_DECIMAL = re.compile(r"[({\s]*([+-]?)\s*(\d+\.?\d*|\.\d+)\s*(?:/\s*(\d+\.?\d*))?[)}\s]*")


def _decimal(expression: str) -> Fraction | None:
    """The value of a number in digits, or of a fraction of two such numbers; None for other expressions."""
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
    """Whether the expression equals ``wanted``: exactly for integers, to six decimals otherwise, as in math-verify."""
    value = _decimal(expression)
    if value is None:
        import sympy

        return _verified(sympy.Rational(wanted.numerator, wanted.denominator), expression)
    return value == wanted or (wanted.denominator != 1 and abs(value - wanted) < Fraction(1, 10**6))


def _equal(one: str, other: str) -> bool:
    first, second = _decimal(one), _decimal(other)
    if second is not None:
        return _is_value(one, second)
    if first is not None:
        return _is_value(other, first)
    gold = _parsed(other)
    return gold is not None and _verified(gold, one)


_MATHEMATICS = re.compile(rf"\\(?!(?:{'|'.join(sorted(_COMMANDS))})(?![A-Za-z]))[A-Za-z]")
_SIDE_BY_SIDE = re.compile(r"(?<![\d_^{])\d+\s+\d")  # math-verify adds them
_UNIT = re.compile(
    rf"(?<=[\w}}])(?:\\[,;: ])*\s*\\(?:text|mbox|mathrm)\s*\{{(?![^{{}}]*\b(?:or|and|if|at|{_SCALE})\b)"
    r"[A-Za-z\s./]+\}(?:\s*\^\s*\{?-?\d\}?)?[\s$.]*\Z"
)
_CHOICE = re.compile(r"\(?([A-Z])\)?")
_BASE, _ELLIPSIS = re.compile(r"(?<=\d)_\s*\{?\s*(\d+)"), re.compile(r"(\\[lcd]?dots|\.\.\.|\\mod)(?![A-Za-z])")
_CONSTANT = re.compile(r"(?:[^A-Za-z\\]|\\[A-Za-z]+)*\d(?:[^A-Za-z\\]|\\[A-Za-z]+)*")  # no name of a quantity
_PLAIN_TEXT = re.compile(r"(?=.*[A-Za-z]{3})[A-Za-z'’ -]{2,}|\([A-Za-z]\)")  # p - q and ab are formulas


def same_expression(answer: str, right: str) -> bool:
    """Whether both are mathematically equal, or the same text if they are not mathematics. It may take very long.
    Raises ImportError without math-verify."""
    number, wanted = arithmetic(answer), arithmetic(right)
    incomparable = _is_incomparable(answer, right)
    answer, right = _one_line(_UNIT.sub("", answer)), _one_line(_UNIT.sub("", right))
    if answer.casefold() == right.casefold():
        return True
    if incomparable and not _is_relation(right):
        return False
    if number is not None and wanted is not None and not incomparable:  # without its unit
        answer, right = number, wanted
    choice = _CHOICE.fullmatch(right)
    if choice is not None:
        return re.fullmatch(rf"\(?{choice[1]}\)?[.:]?", answer, re.IGNORECASE) is not None
    # Notation that math-verify ignores: bases of numerals, ellipses.
    if any(set(mark.findall(answer)) - set(mark.findall(right)) for mark in (_BASE, _ELLIPSIS)):
        return False
    if _PLAIN_TEXT.fullmatch(right) or _SIDE_BY_SIDE.search(answer):
        return False
    if as_number(right) is not None and not _MATHEMATICS.search(answer):
        return False  # ``same_number`` has compared the whole answer already
    if {_bracket(answer), _bracket(right)} == {"(", "\\{"}:
        return False
    gold = _parsed(right)
    constants = [] if "=" in right else filter(_CONSTANT.fullmatch, _EXACT_EQUALITY.split(answer)[:-1])
    return gold is not None and all(_verified(gold, each) for each in (answer, *constants))


def _bracket(text: str) -> str:
    return text[: 2 if text.startswith("\\") else 1]


def _one_line(text: str) -> str:
    text = _without_separators(_without_layout(text).replace("$", ""))
    if _TRIGONOMETRY.search(text):  # math-verify drops the degrees, and leaves radians
        text = _ANGLE.sub(r"\\frac{\1\\pi}{180}", text)
    return re.sub(r"\s+", " ", _SPACING.sub(" ", text)).strip().rstrip(".,;:").strip()


def _verified(gold: Any, answer: str) -> bool:
    import sympy
    from math_verify import verify

    found = _parsed(answer)
    if isinstance(gold, (sympy.Interval, sympy.Union)):
        found = _solutions(found, answer)
    if found is None or (_repeats(found) > _repeats(gold) and _bracket(answer) != "\\{"):
        return False
    return bool(verify(gold, found, timeout_seconds=None))


def _solutions(found: Any, answer: str) -> Any:
    """The set that solved inequalities such as ``1 < x < 3``, or ``x < 1 or x > 3``, describe; ``found`` if it is
    anything else."""
    import sympy

    is_list = isinstance(found, sympy.FiniteSet) and re.search(r"\bor\b", answer) and "," not in answer
    parts = found._unsorted_args if is_list else [found]
    each = [one for part in parts for one in (part.args if isinstance(part, sympy.And) else (part,))]
    if not all(map(_is_solved, each)) or len({symbol for one in each for symbol in one.free_symbols}) != 1:
        return found
    solutions = sympy.Union(*(part.as_set() for part in parts))
    apart = len(solutions.args) if isinstance(solutions, sympy.Union) else 1
    return solutions if apart == len(parts) else found  # x > 3 or x > 4 is not sure


def _is_solved(relation: Any) -> bool:
    import sympy

    if not isinstance(relation, (sympy.Gt, sympy.Ge, sympy.Lt, sympy.Le)):
        return False
    values = [side for side in relation.args if not side.is_Symbol]
    return len(values) == 1 and bool(values[0].is_extended_real)


def _repeats(found: Any) -> int:
    """How many elements of a list equal an earlier one. math-verify compares lists as sets."""
    import sympy
    from math_verify.grader import safe_sympy_doit

    elements = getattr(found, "_unsorted_args", ()) if isinstance(found, sympy.FiniteSet) else ()
    return len(elements) - len(sympy.FiniteSet(*map(safe_sympy_doit, elements)))


def _parsed(formula: str) -> Any:
    """The formula as an unevaluated sympy expression; None if it cannot be parsed or is too large to evaluate."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no timeout
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
    """An upper bound on the decimal digits of all numbers in the evaluation of an unevaluated sympy expression."""
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
    """The absolute value of a number; infinite for one of over 20 digits, which is not evaluated."""
    try:
        return abs(complex(number)) if digits <= 20 else math.inf
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):
        return math.inf


# Built-in rewards: ``--reward exact`` and ``--reward number``


def exact(completion: str, answer: object) -> float:
    """1 if the completion equals the answer, apart from surrounding white space, else 0."""
    return float(completion.strip() == str(answer).strip())


def number(completion: str, answer: object) -> float:
    """1 if the final answer equals the number of the example, as in GSM8K, else 0. Answers that are not in digits, such
    as ``\\boxed{\\frac{36}{2}}``, need math-verify."""
    return float(same_number(final_answer(completion), right_number(answer)))


BUILT_IN = {"exact": f"{__name__}:exact", "number": f"{__name__}:number"}
