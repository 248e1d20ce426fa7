r"""Whether two answers in LaTeX or plain text are equal.

``read`` takes a text in one notation (``areal.reward.notation``) apart: into lists, tuples, sets, intervals, equations,
and quantities, which are a formula with words. Equal structures are compared part by part, formulas by
``areal.reward.formulas``: exactly, and only a decimal with a tolerance, relative to the right one. Words beside a
number (a unit, ``apples``) may be left out, unless they choose between values (``pm``, ``loss``). Where both answers
have words, those of one are among those of the other. The code needs neither the main thread nor signals.
"""

from __future__ import annotations

import itertools
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from areal.dataclasses import dataclass
from areal.reward.formulas import begins_with, decimal, parsed, ratio_of, same_set, same_value, solved
from areal.reward.notation import LONGEST, SCALES, normal
from areal.reward.units import measure, symbol_of

_DEEPEST, _MOST_ITEMS = 12, 64
_TOLERANCE, _ROUGH = Fraction(1, 10**6), Fraction(1, 20)

SCALE = rf"(?:dozens?|tens|(?:{'|'.join(SCALES)})s?)"
CHANGES = re.compile(  # words that make a number another one, or one of several
    r"\b(?:not|never|[a-z]+n['’]t|or|and|than|least|most|between|without|except|but|half|halves|third|quarter|fifth|tenth|\w+ths"
    r"|double|twice|thrice|n?either|nor|none|mod|modulo|over|under|above|below|up|instead|minus|negative|plus|squared|cubed"
    r"|root|cube|factorial|reciprocal|inverse|opposite|logarithm|(?:co)?sine|tangent|score|infinity|inf|out|floor|ceil(?:ing)?"
    rf"|remainder|[不没非]\w*|{SCALE})\b",
    re.IGNORECASE,
)
CHOICES = re.compile(  # words that a reference with them asks for
    r"\b(?:[ap]m|noon|midnight|bc|ad|base|(?:north|south)(?:east|west)?|east|west|(?:in|de)crease[sd]?|profit|gain|loss|debt|left"
    r"|right|(?:counter)?clockwise|positive|negative|more|less|fewer|before|after|early|late|up|down|wins?|loses?|lost|won"
    r"|(?:jan|febr)uary|march|april|may|june|july|august|(?:sept|nov|dec)ember|october|\w+days?|true|false|yes|no|odd|even)\b"
)


@dataclass(frozen=True)
class Quantity:
    """A formula with words beside it. Without a formula, the text is only words. ``text`` is the whole."""

    text: str
    formula: str
    words: tuple[str, ...] = ()
    sign: str = ""  # % or °


@dataclass(frozen=True)
class Group:
    r"""Items in ``()``, ``[]``, ``[)``, ``(]`` or ``{}``. A bare list has ``,``, alternatives have ``or``, sets with an
    operator have ``\cup``, ``\cap`` or ``\setminus``, and the numbers that meet a condition have ``|``."""

    brackets: str
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Relation:
    """Sides of an equation, an inequality or a chain of them. ``values`` are the sides that a name equals."""

    sides: tuple[str, ...]
    operators: tuple[str, ...]
    name: str = ""
    values: tuple[Node, ...] = ()


Node = Quantity | Group | Relation


class _Unreadable(Exception):
    """The text has too many items, or an interval with an infinite end that is closed."""


_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPENING, _CLOSING = frozenset(("(", "[", "{", r"\{")), frozenset((")", "]", "}", r"\}"))
_ORDERED = frozenset(("()", "[]", "[)", "(]"))
_AND, _OR = re.compile(r"[,;]?\s*\band\b|[,;]"), re.compile(r",?\s*\bor\b")
_SET_OPERATOR = re.compile(r"\\(?:cup|cap|setminus)(?![A-Za-z])")
_RELATION = re.compile(r"(?<![\\<>!])=|[<>]|\\(?:le|ge|ne|approx|in|equiv)(?![A-Za-z])")
_TURNED = {">": "<", r"\ge": r"\le"}
_CONDITION = re.compile(r"\\?[A-Za-z]+\s*(?:\\in\s*\(-\\infty,\\infty\)\s*)?[|:](.*)", re.DOTALL)
_ARGUMENT = re.compile(r"_\s*(?:\{[^{}]*\}|\w)|\^\s*\{-1\}|(?<=[A-Za-z}'])\s*\([^()]*\)")  # a_1, A^{-1}, f(2)
_UNKNOWN = re.compile(r"(?<![A-Za-z\\«])[A-Za-df-hj-z](?![A-Za-z])|\\(?:alpha|beta|theta|lambda|mu|omega)")
_WORDS = re.compile(
    r"(?:«([^»]*)»|(?<![\\A-Za-z\d}^_«])(?<!begin\{)(?<!end\{)([A-Za-z]{3,}(?:['’.-][A-Za-z]+)*)|(?<=\d)([A-Za-z]{5,}))"
    r"(?:\s*\^\s*\{?(-?\d)\}?)?(?:\s*/\s*«?([A-Za-z]+)»?(?:\s*\^\s*\{?(-?\d)\}?)?)?"
)
_IDLE = re.compile(
    r"the|an?|of|is|are|was|has|have|answer|final|approx(?:imately)?|about|total|units?|each|on|in|at|exact(?:ly)?|solution"
)
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*«?([A-Za-z]+\.?)»?\s*(?:,|«?\band\b»?|\Z)?\s*")
_CONSTANT = re.compile(r"(?<=[+-])\s*([cCkK])\s*\Z")
_LOGARITHM = re.compile(r"\\log(?![A-Za-z]|\s*_)")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")


def read(text: str) -> Node | None:
    """The structure of a text; None if it is too long or too deep, or contradicts itself as ``20 = 18`` does."""
    return _structure(text) if len(text) <= LONGEST else None


@lru_cache(maxsize=1024)  # all samples of a row have one reference
def _structure(text: str) -> Node | None:
    text = normal(text)
    levels = _levels(text)
    if not text or len(text) > 2 * LONGEST or levels[-1] != 0 or max(levels) > _DEEPEST:
        return None  # the parser's time grows much faster than linearly with the depth
    try:
        node = _read(text)
    except _Unreadable:
        return None
    if isinstance(node, Group) and node.brackets == "{}" and len(node.items) == 1 and r"\emptyset" not in text:
        return node.items[0]
    return node


def _levels(text: str) -> list[int]:
    """The number of brackets around each character, and around the end."""
    levels, depth = [], 0
    for token in _TOKEN.findall(text):
        depth -= token in _CLOSING
        levels += [depth] * len(token)
        depth += token in _OPENING
    return [*levels, depth]


def _split(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The parts of a text between the separators outside brackets, and the separators."""
    levels = _levels(text)
    found = [each for each in separator.finditer(text) if levels[each.start()] == 0]
    starts, ends = [0, *(each.end() for each in found)], [*(each.start() for each in found), len(text)]
    parts = [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]
    return parts, [each[0].strip() for each in found]


def _unwrapped(text: str) -> tuple[str, str]:
    """The brackets around the whole of a text, and what is between them."""
    tokens = _TOKEN.findall(text) or [""]
    first, last = tokens[0], tokens[-1]
    if first in _OPENING and last in _CLOSING and all(_levels(text)[len(first) : len(text) - len(last)]):
        return first + last, text[len(first) : -len(last)].strip()
    return "", text


def _read(text: str) -> Node:
    if total := _sum_of(text):
        return total
    brackets, inner = _unwrapped(text)
    if brackets == "{}" and not _CONDITION.fullmatch(inner):
        return _read(inner)
    parts, separators = _split(text, _OR)
    if separators:
        return _group("or", parts)
    parts, separators = _split(text, _AND)
    if separators and ("," in text or all(map(_is_mathematics, parts)) or not re.search(r"\d", text)):
        return _group(",", parts)
    if brackets == "()" and len(re.findall(r"\\[pm][mp](?![a-z])", inner)) == 1 and "," in inner:
        return _both_signs(text)
    if brackets:
        return _bracketed(brackets.replace("\\", ""), inner)
    parts, operators = _split(text, _SET_OPERATOR)
    if operators:
        last = text.rindex(operators[-1])
        return _group(operators[-1], [text[:last].strip(), parts[-1]])
    parts, operators = _split(text, _RELATION)
    if operators:
        return _relation(parts, operators)
    if re.search(r"\\[pm][mp](?![a-z])", text):
        return _both_signs(text)
    return _quantity(text)


def _both_signs(text: str) -> Group:
    signs = (("+", "-"), ("-", "+"))
    return _group(",", [re.sub(r"\\pm(?![a-z])", a, re.sub(r"\\mp(?![a-z])", b, text)) for a, b in signs])


def _group(brackets: str, parts: list[str]) -> Group:
    nodes: list[Node] = []
    for part in parts:
        node = _read(part)
        if len(nodes) > _MOST_ITEMS:
            raise _Unreadable
        if isinstance(node, Group) and brackets in ("{}", ",", "or") and r"\pm" in part:
            nodes += node.items  # 0, \pm 2 has three items
        else:
            nodes.append(node)
    return Group(brackets, tuple(nodes))


def _is_mathematics(text: str) -> bool:
    return bool(re.search(r"[\d=<>\\]", text) or re.fullmatch(r"\(?«?[A-Za-z]»?\)?", text))


def _bracketed(brackets: str, inner: str) -> Node:
    if brackets == "{}" and (condition := _CONDITION.fullmatch(inner)):
        node = _read(condition[1])
        return node if isinstance(node, Relation) and node.values else Group("|", (node,))
    parts, _ = _split(inner, re.compile("[,;]"))
    if len(parts) == 1 and brackets != "{}":
        return _read(inner) if re.search("[,;=<>]", inner) else _quantity(inner)
    if (brackets[0] == "[" and "infty" in parts[0]) or (brackets[1] == "]" and "infty" in parts[-1]):
        raise _Unreadable
    return _group(brackets, parts if parts != [""] else [])


def _relation(sides: list[str], operators: list[str]) -> Relation:
    if any(each not in ("=", r"\approx", r"\in", r"\equiv") for each in operators):
        if _TURNED.keys() >= set(operators):
            sides, operators = sides[::-1], [_TURNED[each] for each in reversed(operators)]
        return Relation(tuple(sides), tuple(operators))
    if _is_name(sides[-1]) and not _is_name(sides[0]):
        sides = sides[::-1]  # 18 = x
    is_named = not sides[0] or _is_name(sides[0])
    if not is_named and any(map(_UNKNOWN.search, sides)):
        return Relation(tuple(sides), tuple(operators))
    name = re.sub(r"[\s«»{}]", "", sides[0]) if is_named else ""
    return Relation(tuple(sides), tuple(operators), name, _group("=", sides[is_named:]).items)


def _is_name(side: str) -> bool:
    """Whether a side has no number, as in ``x``, ``S_5``, ``f(2)``, ``m + n``, or has words."""
    plain = re.sub(r"\\(?:pi|sqrt|ln|log|infty)(?![A-Za-z])", "1", _ARGUMENT.sub("", side))
    has_words = re.search(r"«|(?<!\\)\b[A-Za-z]{3,}", plain)
    return bool(re.search("[A-Za-z]", plain) and (has_words or not re.search(r"\d", plain)))


def _quantity(text: str) -> Quantity:
    if re.search(r"[A-Za-z]{3,}\(|»\s?\([^«]", text.replace("\\", " \\ ")) and not re.search(r"\\[a-z]+\s?\(", text):
        return Quantity(text, "", (text,))
    if letter := re.fullmatch(r"\(?\s*«?([A-Za-z])»?\s*\)?", text):
        return Quantity(letter[1], letter[1])
    joined = " ".join(map(_canonical, _WORDS.finditer(text)))
    joined = re.sub(r"\b(square|cubic) (\w+)", lambda each: f"{each[2]}^{2 if each[1] == 'square' else 3}", joined)
    formula = _WORDS.sub(" ", text)
    sign = "%" if "%" in formula else "°" if "°" in formula and not _TRIGONOMETRY.search(formula) else ""
    if not sign:
        formula = re.sub(r"(\d+(?:\.\d+)?|\.\d+)\s*°", r"\\frac{\1\\pi}{180}", formula)
    formula = re.sub(r"[%°]|/?\s*\((?:\s|\\cdot)*\)", "", formula)
    formula = re.sub(r"^[\s.,:()/]*\s(?=[-+]?[\d.({\\A-Za-z])|(?:[\s.,:/*(]|\\cdot)+$", "", formula).strip()
    if joined and not re.search(r"[\dA-Za-z]", re.sub(rf"\b(?:{_IDLE.pattern})\b", "", formula)):
        formula = ""
    words = (word for word in joined.split() if not _IDLE.fullmatch(word) or joined == "in")
    return Quantity(text, formula, tuple(words), sign)


def _canonical(match: re.Match[str]) -> str:
    """A word in lower case, a unit by its symbol: ``m /s^2`` for «meters»/«s»^2, and for «m» «s»^{-2} too."""
    found = symbol_of(match[1] or match[2] or match[3] or "")
    power = match[4] or ""
    found = (
        f"/{found}{'^' * (power != '-1')}{power.strip('-1')}" if power[:1] == "-" else found + "^" * bool(power) + power
    )
    return found + (f" /{symbol_of(match[5])}{'^' if match[6] else ''}{match[6] or ''}" if match[5] else "")


def _sum_of(text: str) -> Quantity | None:
    """``1 hour 30 minutes`` in its last unit; None for what is not several amounts of one dimension."""
    amounts = [(Fraction(number), symbol_of(unit)) for number, unit in _AMOUNT.findall(text)]
    measures = [measure(unit) for _, unit in amounts]
    if len(amounts) < 2 or _AMOUNT.sub("", text) or len({each and each[1] for each in measures}) > 1 or not measures[0]:
        return None
    sizes = [each[0] for each in measures if each]
    total = sum((number * size for (number, _), size in zip(amounts, sizes, strict=True)), Fraction(0)) / sizes[-1]
    is_sum = sizes == sorted(set(sizes), reverse=True)
    return Quantity(text, rf"\frac{{{total.numerator}}}{{{total.denominator}}}", (amounts[-1][1],)) if is_sum else None


# Comparison


def same(answer: Node | None, right: Node | None) -> bool:
    """Whether the answer equals the right one. It may take very long, unless the answer ``is_number``."""
    if answer is None or right is None:
        return False
    names, others = _assignments(answer), _assignments(right)
    if names and others:
        return names.keys() == others.keys() and all(same(names[each], others[each]) for each in names)
    if isinstance(answer, Group) and isinstance(right, Group) and (names or others):
        brackets = right.brackets if names else answer.brackets
        return brackets in ("()", ",") and same(_values(answer, names, brackets), _values(right, others, brackets))
    if isinstance(answer, Quantity) and isinstance(right, Quantity):
        return _same_quantity(answer, right)
    if isinstance(answer, Relation) and isinstance(right, Relation):
        return _same_relation(answer, right)
    if isinstance(answer, Relation) and answer.values:
        return _is_consistent(answer) and any(same(value, right) for value in answer.values)
    if isinstance(right, Relation) and right.values and not re.search(r"[-+*/^]|\\frac", right.name):
        return any(same(answer, value) for value in right.values)
    if isinstance(answer, Group) and isinstance(right, Group) and _same_group(answer, right):
        return True
    wanted = _solutions(right)
    found = None if wanted is None else _solutions(answer)
    if found is not None:
        return same_set(found, wanted)
    if isinstance(answer, Group) and answer.brackets == "or" and isinstance(right, Quantity):
        return all(same(each, right) for each in answer.items)
    for one, other in ((answer, right), (right, answer)):
        if isinstance(one, Group) and one.brackets == "()" and isinstance(other, Quantity) and "pmatrix" in other.text:
            items = [each.text for each in one.items if isinstance(each, Quantity)]
            vectors = [rf"\begin{{pmatrix}}{between.join(items)}\end{{pmatrix}}" for between in (r"\\", "&")]
            return any(_same_formula(each, other.formula) for each in vectors)
    return False


def is_number(node: Node | None) -> bool:
    """Whether a text has only numbers, operators and words, so that it is compared in no time."""
    if isinstance(node, Relation):
        return bool(node.values) and all(map(is_number, node.values))
    return isinstance(node, Quantity) and bool(_NUMBERS_ONLY.fullmatch(node.formula))


def _is_consistent(answer: Relation) -> bool:
    """Whether the values of a chain are equal; decimals nearly. ``20 = 18`` is not."""
    for left, right in itertools.pairwise(answer.values):
        if isinstance(left, Quantity) and isinstance(right, Quantity):
            is_rough = r"\approx" in answer.operators or "." in left.text + right.text
            if not _same_values(left, right, _ROUGH if is_rough else None):
                return False
    return True


def _same_group(answer: Group, right: Group) -> bool:
    """A tuple's items are compared in their order, those of sets and lists in any. Only a set may repeat an item."""
    brackets = {answer.brackets, right.brackets}
    first, second = _items(answer), _items(right)
    if brackets & _ORDERED:
        is_like = len(brackets) == 1 or brackets == {"()", ","} or (len(first) > 2 and brackets == {"()", "[]"})
        return is_like and len(first) == len(second) and all(map(same, first, second))
    is_inequality = [isinstance(each, Relation) and not each.values for each in first]
    if len(brackets) > 1 and (any("\\" in each for each in brackets) or any(is_inequality)):  # and is not or
        return False
    for item in first:
        place = next((i for i, each in enumerate(second) if same(item, each)), None)
        if place is None:
            return False
        del second[place]
    return not second


def _items(group: Group) -> list[Node]:
    """The items, in a set each once."""
    items = group.items
    if group.brackets != "{}":
        return list(items)
    return [each for i, each in enumerate(items) if not any(same(each, one) for one in items[:i])]


def _values(group: Group, names: dict[str, Node] | None, brackets: str) -> Group:
    """``x = 2, y = 3`` as ``(2, 3)``: the values in the order of their names. A list has those of ``x_1``, ``x_2`` in
    any order."""
    if names and brackets == "," and len({name.partition("_")[0] for name in names}) == 1:
        return Group(",", tuple(names.values()))
    return Group(
        "()" if names else group.brackets, tuple(names[name] for name in sorted(names)) if names else group.items
    )


def _assignments(group: Node) -> dict[str, Node] | None:
    """The values of ``x = 2, y = 3`` or ``(x, y) = (2, 3)`` by their names; None for other items."""
    if isinstance(group, Relation) and group.name[:1] == "(" and isinstance(group.values[-1], Group):
        names, items = group.name.strip("()").split(","), group.values[-1].items
        return dict(zip(names, items, strict=True)) if len(set(names)) == len(names) == len(items) else None
    if not isinstance(group, Group):
        return None
    named = [each for each in group.items if isinstance(each, Relation) and each.name and each.values]
    values = {each.name.casefold(): each.values[-1] for each in named}
    return values if len(values) == len(group.items) > 1 else None


def _same_relation(answer: Relation, right: Relation) -> bool:
    written = [([side.replace(" ", "") for side in each.sides], each.operators) for each in (answer, right)]
    if written[0] == written[1]:
        return True
    if answer.values and right.values:
        one, other = answer.name.casefold(), right.name.casefold()
        described = [re.search(r"(?<![\\a-z])[a-z]{3,}", name) is not None for name in (one, other)]
        is_same_name = one == other or (all(described) and (one in other or other in one))
        if is_same_name or not one or not other or described[0] != described[1]:
            return _is_consistent(answer) and any(same(value, right.values[0]) for value in answer.values)
    found, wanted = _solutions(answer), _solutions(right)
    if found is not None and wanted is not None:
        return _unknown(answer) == _unknown(right) and same_set(found, wanted)
    if len(answer.operators) != 1 or answer.operators != right.operators:
        return False
    is_equation = answer.operators[0] in ("=", r"\ne", r"\equiv")
    expressions = (parsed(f"({each.sides[0]})-({each.sides[1]})") for each in (answer, right))
    ratio = ratio_of(*expressions, of_numerators=is_equation)  # the sign of a denominator turns an inequality
    return ratio is not None and (is_equation or ratio > 0)


def _words_agree(answer: Quantity, right: Quantity) -> bool:
    found, wanted = set(answer.words), set(right.words)
    changed = [set(CHANGES.findall(" ".join(words))) for words in (found, wanted)]
    points = set("NSEW" if right.sign == "°" else "")
    chosen = [{word for word in words if CHOICES.fullmatch(word) or word in points} for words in (found, wanted)]
    if changed[0] != changed[1] or chosen[1] - found:
        return False
    return not wanted or not found or found <= wanted or (wanted <= found and not chosen[0] - wanted)


def _without_spaces(text: str) -> str:
    return re.sub(r"[«»]|(?<!\d)\s+|\s+(?!\d)", "", text)


def _ends_with(answer: Quantity, right: Quantity) -> bool:
    """Whether the answer is a sentence that ends with the right words: ``The series converges`` for ``converges``."""
    sentence, ending = (re.sub(r"[^\w\s]", "", each.text.casefold()) for each in (answer, right))
    before = sentence.removesuffix(ending)
    is_subject = re.fullmatch(
        r"(?:the|this|that|it)\b((?: (?!is|are)\w+){0,4} (?:is|are)(?: an?| the)?| \w+|) ", before
    )
    return bool(ending and is_subject and not CHANGES.search(before) and not CHOICES.search(before))


def _same_quantity(answer: Quantity, right: Quantity) -> bool:
    if _without_spaces(answer.text) == _without_spaces(right.text):
        return True
    if not answer.formula or not right.formula:
        one, other = (re.sub(r"[^a-z0-9]", "", each.text.casefold()) for each in (answer, right))
        words = [sorted(each.words) if "all" in each.words else each.words for each in (answer, right)]
        is_same = one == other != "" or words[0] == words[1] != ()
        return not answer.formula and not right.formula and (is_same or _ends_with(answer, right))
    sizes = [None if each.sign else measure(*each.words) for each in (answer, right)]
    if sizes[0] and sizes[1] and sizes[0][1] == sizes[1][1]:
        factor = sizes[0][0] / sizes[1][0]
        return _same_formula(
            rf"({answer.formula})\cdot\frac{{{factor.numerator}}}{{{factor.denominator}}}", right.formula
        )
    return _words_agree(answer, right) and _same_values(answer, right)


def _same_values(answer: Quantity, right: Quantity, tolerance: Fraction | None = None) -> bool:
    readings = [[each.formula] for each in (answer, right)]
    if answer.sign != right.sign:
        for each, own in zip((answer, right), readings, strict=True):
            factor = {"%": r"\frac{%s}{100}", "°": r"\frac{(%s)\pi}{180}"}.get(each.sign)
            own += [factor % each.formula] if factor else []
    if r"\ln" in answer.formula:  # a logarithm without a base may be the natural one
        readings[1] += [_LOGARITHM.sub(r"\\ln", each) for each in readings[1] if _LOGARITHM.search(each)]
    return any(_same_formula(one, other, tolerance) for one, other in itertools.product(*readings))


_NUMBERS_ONLY = re.compile(r"(?:[\d.+\-*/^(){}\s!]|\\(?:frac|over|sqrt|times|cdot|div)(?![A-Za-z]))+")
_ADJACENT = re.compile(r"(?<![\d_^{])\d+\.?\s+[\d.]|[-+*/^]\s*\Z|\\[lc]?dots")
_CUT = re.compile(r"(-?\d+\.(\d{3,}))\s*\\ldots")


def _same_formula(answer: str, right: str, tolerance: Fraction | None = None) -> bool:
    constants = [_CONSTANT.search(each) for each in (answer, right)]
    if constants[0] and constants[1] and "C" in (constants[0][1], constants[1][1]):
        answer, right = _CONSTANT.sub("C", answer), _CONSTANT.sub("C", right)
    found, wanted = decimal(answer), decimal(right)
    if tolerance is None and re.search(r"\.\d", f"{answer} {right}") and not re.fullmatch(r"[-+]?\d+(?:\.0*)?", right):
        tolerance = _TOLERANCE
    if found is not None and wanted is not None:
        return found == wanted or (tolerance is not None and abs(found - wanted) <= tolerance * abs(wanted))
    for one, other in ((answer, right), (right, answer)):
        if cut := _CUT.fullmatch(one):  # 1.414... is the square root of 2, and not 1.414
            return begins_with(parsed(other), Fraction(cut[1]), len(cut[2]))
    if _ADJACENT.search(answer) or _ADJACENT.search(right):
        return False
    one, other = parsed(answer), parsed(right)
    return one is not None and other is not None and same_value(one, other, tolerance)


# Sets of real numbers


def _unknown(node: Node) -> str:
    """The unknown of an inequality that stands alone on one of its sides; "" if none or more than one does."""
    sides = node.sides if isinstance(node, Relation) else ()
    found = {side for side in sides if re.fullmatch(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?|\|\w\|", side)}
    found = {side.strip("|") for side in found}
    return found.pop() if len(found) == 1 else ""


def _solutions(node: Node, is_condition: bool = False) -> Any:
    """The set of real numbers that an interval, a solved inequality, a union or a list of alternatives describes, as a
    sympy set; None for anything else. A condition of a set need not be solved."""
    import sympy

    if isinstance(node, Quantity):
        return sympy.EmptySet if r"\emptyset" in node.text else None
    if isinstance(node, Relation):
        if node.values:
            return _solutions(node.values[0]) if node.operators == (r"\in",) else None
        return solved(node.sides, node.operators, is_condition)
    brackets = node.brackets
    if brackets == "{}" or brackets in _ORDERED:
        values: list[Any] = [
            parsed(each.formula) if isinstance(each, Quantity) and each.formula else None for each in node.items
        ]
        if not all(each is not None and each.is_extended_real and not each.free_symbols for each in values):
            return None
        if brackets == "{}":
            return sympy.FiniteSet(*values)
        is_interval = len(values) == 2 and values[0] < values[1]
        return sympy.Interval(*values, brackets[0] == "(", brackets[1] == ")") if is_interval else None
    parts = [_solutions(each, is_condition or brackets == "|") for each in node.items]
    if None in parts:
        return None
    if brackets[0] == "\\":
        return {r"\cup": sympy.Union, r"\cap": sympy.Intersection, r"\setminus": sympy.Complement}[brackets](*parts)
    if len(set(map(_unknown, node.items))) != 1:
        return None
    if brackets == "," and all(isinstance(each, Relation) for each in node.items):
        common = sympy.Intersection(*parts)
        return None if common is sympy.EmptySet else common
    union = sympy.Union(*parts)
    pieces = [each.args if isinstance(each, sympy.Union) else (each,) for each in (union, *parts)]
    return union if len(pieces[0]) == sum(map(len, pieces[1:])) else None  # x > 3 or x > 4
