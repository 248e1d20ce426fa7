r"""Whether two answers are equal.

``structure`` makes a value of one of three types of the tokens of an answer: a ``Quantity``, which is a formula with
words, a ``Group`` (list, tuple, set, interval, alternatives), or a ``Relation``. ``same`` has a rule for each pair of
types. Formulas are compared exactly, and only decimals with a tolerance, relative to the right one. Words beside a
number (a unit, ``apples``) may be left out, unless they choose between values (``pm``, ``loss``). Where both answers
have words, those of one are among those of the other.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from areal.dataclasses import dataclass
from areal.reward.formulas import (
    ONE,
    Formula,
    NotAFormula,
    close,
    inexact,
    is_real,
    names_in,
    ratio_of,
    same_items,
    same_value,
    value_of,
)
from areal.reward.notation import Token, render, tokens
from areal.reward.units import SCALES, measure, words_in

SCALE = rf"(?:dozens?|tens|(?:{'|'.join(SCALES)})s?)"
CHANGES = re.compile(  # words that make a number another one, or one of several
    r"\b(?:not|cannot|incorrect|wrong|never|[a-z]+n['’]t|or|and|than|least|most|between|without|except|but|half|halves|third"
    r"|quarter|fifth|tenth|\w+ths|double|twice|thrice|n?either|nor|none|mod|modulo|over|under|above|below|up|instead|minus"
    r"|negative|plus|squared|cubed|root|cube|factorial|reciprocal|inverse|opposite|logarithm|(?:co)?sine|tangent|score"
    rf"|infinity|inf|out|floor|ceil(?:ing)?|remainder|[不没非错]\w*|{SCALE})\b",
    re.IGNORECASE,
)
CHOICES = re.compile(  # words that a reference with them asks for
    r"\b(?:[ap]m|noon|midnight|bc|ad|base|mod\d+|(?:north|south)(?:east|west)?|east|west|(?:in|de)crease[sd]?|profit|gain|loss"
    r"|debt|left|right|(?:counter)?clockwise|positive|negative|more|less|fewer|before|after|early|late|up|down|wins?|loses?"
    r"|lost|won|(?:jan|febr)uary|march|april|may|june|july|august|(?:sept|nov|dec)ember|october|\w+days?|true|false|yes|no"
    r"|odd|even)\b"
)
_IDLE = words_in(
    """the a an of is are was has have answer final approximate approximately approx about total unit each on at exact
    its exactly solution in simplified therefore thus"""
)
_BOUND = words_in(
    """integer natural number real constant any all every each some an arbitrary positive nonnegative negative is are be
    a for where with"""
)
_WINS = re.compile(r" (?:(?:always|will|can|has a) )*win(?:ning strategy)?\Z")
_WHOLE = {
    r"none|(?:there (?:are|is|exists?) )?no (?:\w+ )?(?:solution|value|number|root|integer|function|pair|triple)"
    r"(?: exists?)?": r"\emptyset",
    "(?:the )?empty set": r"\emptyset",
    r"(?:the set of )?all (?:the )?reals?(?: number)?(?: [a-z])?": r"(-\infty,\infty)",
    r"(?:the \w+ )?(?:dne|does? not exist)": r"\text{undefined}",
    r"neither \w+ nor \w+": r"\text{neither}",
    r"(?:the set of )?all (?:the )?integer(?: [a-z])?": r"\mathbb{Z}",
}


@dataclass(frozen=True)
class Quantity:
    """A formula with words beside it. Without a formula, the text is only words. ``text`` is the whole."""

    text: str
    formula: Formula
    words: tuple[str, ...] = ()
    sign: str = ""  # % or °


@dataclass(frozen=True)
class Group:
    """Items in ``()``, ``[]``, ``[)``, ``(]`` or ``{}``. A bare list has ``,``, alternatives have ``or``, a ratio has
    ``:``, sets with an operator have ``∪``, ``∩`` or ``∖``, and the numbers that meet a condition have ``|``."""

    brackets: str
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Relation:
    """Sides of an equation, an inequality or a chain of them. ``values`` are the sides that a name equals."""

    sides: tuple[Formula, ...]
    operators: tuple[str, ...]
    name: str = ""
    values: tuple[Node, ...] = ()


Node = Quantity | Group | Relation

_PAIRS = {"(": ")", "[": "]", "{": "}", r"\{": r"\}"}
_CLOSING = frozenset(_PAIRS.values())
_ORDERED = frozenset(("()", "[]", "[)", "(]"))
_RELATIONS = words_in("= < > ≤ ≥ ≠ ≈ ∈ ≡ ∼ cong")
_TURNED = {">": "<", "≥": "≤"}
_BOTH = frozenset("±∓")
_TRUTHS = words_in("yes no true false")
_DEEPEST, _MOST_ITEMS = 12, 64


@lru_cache(maxsize=1024)
def structure(found: Formula) -> Node | None:
    """The structure of an answer; None if it is too deep, or contradicts itself as ``[1, \\infty]`` does."""
    plain = re.sub(r"[{}.]", "", render(found)).strip().casefold()
    found = next((tokens(to) for pattern, to in _WHOLE.items() if re.fullmatch(pattern, plain)), found)
    levels = _levels(found)
    if not found or levels[-1] != 0 or max(levels) > _DEEPEST:
        return None
    try:
        node = _read(_unbound(found))
    except NotAFormula:
        return None
    is_one = isinstance(node, Group) and node.brackets == "{}" and len(node.items) == 1 and "∅" not in _texts(found)
    return node.items[0] if is_one and isinstance(node, Group) else node


def _texts(found: Formula) -> list[str]:
    return [each.text for each in found]


def _has(found: Formula, kinds: str) -> bool:
    return any(each.kind in kinds for each in found)


def _levels(found: Formula) -> list[int]:
    """The number of brackets around each token, and around the end."""
    levels, depth = [], 0
    for text in _texts(found):
        depth -= text in _CLOSING
        levels.append(depth)
        depth += text in _PAIRS
    return [*levels, depth]


def _split(found: Formula, *separators: str) -> tuple[list[Formula], list[str]]:
    """The parts between the separators outside brackets, and the separators."""
    levels = _levels(found)
    at = [i for i, each in enumerate(found) if each.kind == "o" and each.text in separators and levels[i] == 0]
    parts = [found[start + 1 : end] for start, end in itertools.pairwise((-1, *at, len(found)))]
    return parts, [found[i].text for i in at]


def _unwrapped(found: Formula) -> tuple[str, Formula]:
    """The brackets around the whole, and what is between them."""
    if len(found) > 1 and found[0].text in _PAIRS and found[-1].text in _CLOSING and all(_levels(found)[1:-2]):
        return (found[0].text + found[-1].text).replace("\\", ""), found[1:-1]
    return "", found


def _unbound(found: Formula) -> Formula:
    r"""Without a condition at the end that only says what a letter may be: ``, k \in \mathbb{Z}``, ``for any c``."""
    texts, levels = _texts(found), _levels(found)
    for i in range(1, len(found)):
        is_start = levels[i] == 0 and texts[i] in (",", "(", "for", "where", "with") and texts[i - 1] not in "=<>≤≥"
        if not is_start or not _has(found[:i], "ns"):
            continue
        rest = [each for each in found[i:] if each.text not in ("{", "}", "(", ")", ",", "and")]
        body = [each for each in rest if each.kind == "s" or each.text.casefold() not in _BOUND]
        names = {each.text for each in body if each.kind == "s" and len(each.text) == 1 and each.text.islower()}
        others = " ".join(each.text for each in body if each.text not in names)
        is_set = re.fullmatch(r"∈ (?:- ∞ ∞|mathbb \w)\S*(?: \S+)*", others) and not re.search(r"[<]", others)
        is_natural = names <= set("kmn") and re.fullmatch(r"(?:> 0|≥ [01])", others)
        is_domain = re.match("≠", others) and not {"<", ">", "≤", "≥", "≠"} & set(texts[:i]) and names <= set(texts[:i])
        if len(names) < 3 and (is_domain or (names and is_set) or is_natural or (len(body) < len(rest) and not others)):
            return found[:i]
    return found


def _read(found: Formula) -> Node:
    if not found:
        raise NotAFormula
    if total := _sum_of(found):
        return total
    brackets, inner = _unwrapped(found)
    if found[0].text == "{" and brackets and _condition(inner) is None:
        return _read(inner)
    parts, separators = _split(found, "or")
    if separators:
        return _group("or", [each[:-1] if each[-1:] and each[-1].text == "," else each for each in parts])
    parts, separators = _split(found, ",", ";", "and")
    is_list = set(separators) != {"and"} or (parts[0][-1:] and parts[0][-1].text == ")") or not _has(found, "n")
    if set(separators) == {","} and _has(parts[0], "n") and not any(_has(part, "nsfmvo") for part in parts[1:]):
        return _quantity(tuple(each for each in found if each.text != ","))  # 5 N, to the left
    if separators and (is_list or all(map(_is_mathematics, parts))):
        return _group(",", [each for each in parts if each] if "and" in separators else parts)
    signs = _BOTH & set(_texts(found))
    if brackets and not (brackets == "()" and "," in _texts(inner) and len(signs) == 1):
        return _bracketed(brackets, inner)
    parts, operators = _split(found, "∪", "∩", "∖")
    if operators:
        return _group(operators[-1], [found[: -len(parts[-1]) - 1], parts[-1]])
    parts, operators = _split(found, *_RELATIONS)
    if operators and any(parts):
        return _relation(parts, operators)
    if signs:
        return _both_signs(found)
    parts, separators = _split(found, ":")
    if separators and all(_has(each, "n") and not _has(each, "w") for each in parts):
        return _group(":", parts)
    if found[0].kind == "s" and found[0].text.isupper() and _unwrapped(found[1:])[0] == "()" and "," in _texts(found):
        return _relation([found[:1], found[1:]], ["="])  # the point A(1,2)
    return _quantity(found)


def _is_mathematics(found: Formula) -> bool:
    return _has(found, "nfm") or bool(_RELATIONS & set(_texts(found))) or (len(found) <= 3 and _has(found, "s"))


def _both_signs(found: Formula) -> Group:
    signs = ({"±": "+", "∓": "-"}, {"±": "-", "∓": "+"})
    return _group(",", [tuple(each._replace(text=sign.get(each.text, each.text)) for each in found) for sign in signs])


def _group(brackets: str, parts: Sequence[Formula]) -> Group:
    nodes: list[Node] = []
    for part in parts:
        node = _read(part)
        last = nodes[-1] if nodes else None
        if isinstance(last, Relation) and last.operators == ("≠",) and isinstance(node, Quantity):
            node = Relation((last.sides[0], part), ("≠",))  # x ≠ 1, 2
        is_flat = (
            isinstance(node, Group)
            and node.brackets == ","
            and _BOTH & set(_texts(part))
            and brackets in ("{}", ",", "or")
        )
        nodes += node.items if isinstance(node, Group) and is_flat else [node]  # 0, ±2 has three items
        if len(nodes) > _MOST_ITEMS:
            raise NotAFormula
    return Group(brackets, tuple(nodes))


def _condition(inner: Formula) -> Formula | None:
    r"""The condition of ``\{x \mid x > 2\}`` and of ``\{x \in \mathbb{R} : x > 2\}``."""
    head = _split(inner, "|", ":")[0][0]
    is_head = head and head[0].kind == "s" and "".join(_texts(head[1:])) in ("", "∈(-∞,∞)") and len(head) < len(inner)
    return inner[len(head) + 1 :] if is_head else None


def _bracketed(brackets: str, inner: Formula) -> Node:
    if brackets == "{}" and (condition := _condition(inner)) is not None:
        node = _read(condition)
        return node if isinstance(node, Relation) and node.values else Group("|", (node,))
    parts, _ = _split(inner, ",", ";")
    if len(parts) == 1 and brackets != "{}":
        return _read(inner) if {",", ";", *_RELATIONS} & set(_texts(inner)) else _quantity(inner)
    if (brackets[0] == "[" and "∞" in _texts(parts[0])) or (brackets[1] == "]" and "∞" in _texts(parts[-1])):
        raise NotAFormula
    return _group(brackets, parts if parts != [()] else [])


def _relation(sides: list[Formula], operators: list[str]) -> Node:
    if any(each not in "=≈∈≡" for each in operators):
        sides = [tuple(each for each in side if each.kind != "w" or each.text not in _BOUND) for side in sides]
        if _TURNED.keys() >= set(operators):
            sides, operators = sides[::-1], [_TURNED[each] for each in reversed(operators)]
        if operators == ["≠"] and _BOTH & set(_texts(sides[1])):
            values = [each.formula for each in _both_signs(sides[1]).items if isinstance(each, Quantity)]
            return Group(",", tuple(Relation((sides[0], each), ("≠",)) for each in values))
        return Relation(tuple(sides), tuple(operators))
    if _is_name(sides[-1]) and not _is_name(sides[0]):
        sides = sides[::-1]  # 18 = x
    are_names = all(_is_name(each) and len(each) == 1 for each in sides[:-1]) and not _is_name(sides[-1])
    if len(sides) > 2 and are_names and set(operators) == {"="}:  # x = y = 1
        return Group(",", tuple(_relation([each, sides[-1]], ["="]) for each in sides[:-1]))
    is_named = not sides[0] or _is_name(sides[0])
    if not is_named and names_in(*sides):
        return Relation(tuple(sides), tuple(operators))
    name = "".join(each for each in _texts(sides[0]) if each not in "{}") if is_named else ""
    return Relation(tuple(sides), tuple(operators), name, tuple(_read(each) for each in sides[is_named:]))


def _is_name(side: Formula) -> bool:
    """Whether a side has no number, as in ``x``, ``S_5``, ``f(2)``, ``m + n``, or has words."""
    texts = _texts(side)
    is_call = len(side) > 3 and side[0].kind == "s" and (texts[1] == "(" and texts[-1] == ")")
    is_inverse = texts[1:6] == ["^", "{", "-", "1", "}"]
    is_value = _has(side, "nf") or {"sqrt", "∞", "pi"} & set(texts)
    return _has(side, "w") if is_value and not (is_call or is_inverse) else _has(side, "sw")


def _quantity(found: Formula) -> Quantity:
    text = render(found)
    dress = _brackets_of_words(found)
    for i, (one, other) in enumerate(itertools.pairwise(found)):
        if one.kind == "w" and other.text == "(" and not other.gap and i + 1 not in dress:
            return Quantity(text, (), (text,))  # floor(18)
    words, formula, is_below = list[str](), list[Token](), False
    kept = [each for i, each in enumerate(found) if i not in dress]
    for last, token, following in zip((None, *kept), kept, (*kept[1:], None), strict=False):
        is_beside = (last and last.kind == "w") or (following and following.kind == "w")
        if token.kind == "w":
            name, _, power = token.text.partition("^")
            sign = "/" if is_below != power.startswith("-") else ""
            power = power.lstrip("-")
            if name not in _IDLE or (name == "in" and text.count(" ") == 1):
                words.append(sign + name + f"^{power}" * (power not in ("", "1")))
        elif token.text == "/" and following and following.kind == "w":
            is_below = True
        elif not (token.text == "*" and is_beside):
            formula.append(token)
            is_below = False
    while formula and formula[0].text in (".", ",", ":", "*", "/", "'", "≈", "…"):
        del formula[0]
    while formula and formula[-1].text in (".", ",", ":", "*", "/", "'"):
        del formula[-1]
    sign = next((each for each in "%°" if each in _texts(tuple(formula)) and not _has(tuple(formula), "f")), "")
    joined = re.sub(r"\b(square|cubic) (\w+)", lambda m: f"{m[2]}^{2 if m[1] == 'square' else 3}", " ".join(words))
    return Quantity(text, tuple(formula), tuple(joined.split()), sign)


def _brackets_of_words(found: Formula) -> set[int]:
    """Where brackets open and close that have only words, or nothing."""
    result, opened = set[int](), list[tuple[int, bool]]()
    for i, token in enumerate(found):
        if token.text in _PAIRS:
            opened.append((i, i == 0 or found[i - 1].text not in ("sqrt", "frac")))
        elif token.text in _CLOSING and opened:
            start, is_words = opened.pop()
            result |= {start, i} if is_words else set()
        if token.kind != "w" and token.text not in ("*", "/", *_PAIRS, *_CLOSING):
            opened = [(start, False) for start, _ in opened]
    return result


def _sum_of(found: Formula) -> Quantity | None:
    """``1 hour 30 minutes`` in its last unit; None for what is not several amounts of one dimension."""
    kept = [each for each in found if each.text not in (",", "and", "{", "}")]
    numbers, units = kept[::2], kept[1::2]
    if len(units) < 2 or len(numbers) != len(units) or {each.kind for each in numbers} != {"n"}:
        return None
    measures = [measure(each.text) for each in units if each.kind == "w"]
    sizes = [each[0] for each in measures if each]
    if len({each and each[1] for each in measures}) > 1 or len(sizes) < len(units) or sizes != sorted(set(sizes))[::-1]:
        return None
    total = sum(Fraction(each.text) * size for each, size in zip(numbers, sizes, strict=True))
    unit = 0 if units[0].text == "dollar" else -1
    total /= sizes[unit]
    return Quantity(render(found), tokens(f"{total.numerator}/{total.denominator}"), (units[unit].text,))


def same(answer: Node | None, right: Node | None) -> bool:
    """Whether the answer equals the right one."""
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
    if isinstance(right, Relation) and right.values and not re.search(r"[-+*/^]|frac", right.name):
        return any(same(answer, value) for value in right.values)
    if isinstance(answer, Group) and isinstance(right, Group) and _same_group(answer, right):
        return True
    if isinstance(answer, Quantity) == isinstance(right, Quantity) or "∅" in _plain(answer) + _plain(right):
        return _same_region(answer, right)
    if isinstance(answer, Group) and isinstance(right, Quantity):
        if answer.brackets == "or":
            return all(same(each, right) for each in answer.items)
        if answer.brackets == "," and _plain(answer.items[0]) in _TRUTHS:  # yes, it is true
            return same(answer.items[0], right) or (_plain(answer.items[0]) == "yes" and same(answer.items[1], right))
    group, other = (answer, right) if isinstance(answer, Group) else (right, answer)
    if isinstance(group, Group) and isinstance(other, Quantity):
        if group.brackets == ":" and len(group.items) == 2:
            return _is_proportional(group.items, (other, _quantity((Token("n", "1"),))))
        items = [each.formula for each in group.items if isinstance(each, Quantity)]
        return group.brackets in ("()", "[]") and len(items) == len(group.items) and same_items(items, other.formula)
    return False


def is_number(node: Node | None) -> bool:
    """Whether a text has only numbers, operators and words."""
    if isinstance(node, Relation):
        return bool(node.values) and all(map(is_number, node.values))
    return isinstance(node, Quantity) and _has(node.formula, "n") and not _has(node.formula, "sfmv")


def exact_number(node: Node | None) -> Fraction | None:
    """The value of a rational number."""
    if isinstance(node, Relation) and node.values and node.name:
        node = node.values[-1]
    is_plain = isinstance(node, Quantity) and not CHANGES.search(" ".join(node.words))
    value = _real(node) if is_plain and node else None
    return value if isinstance(value, Fraction) else None


def _real(node: Node) -> Any:
    """The value of a real number; None for anything else."""
    try:
        value = value_of(node.formula) if isinstance(node, Quantity) and node.formula else None
    except NotAFormula:
        return None
    return value if value is not None and is_real(value) else None


def _is_consistent(answer: Relation) -> bool:
    """Whether the values of a chain are equal; decimals nearly. ``20 = 18`` is not."""
    for left, right in itertools.pairwise(answer.values):
        if isinstance(left, Quantity) and isinstance(right, Quantity) and not _same_measured(left, right):
            is_rough = "≈" in answer.operators or "." in left.text + right.text
            if not _same_values(left, right, Fraction(1, 20) if is_rough else None):
                return False
    return True


def _same_group(answer: Group, right: Group) -> bool:
    """A tuple's items are compared in their order, those of sets and lists in any. Only a set may repeat an item."""
    brackets = {answer.brackets, right.brackets}
    first, second = _items(answer), _items(right)
    if brackets == {":"}:
        return len(first) == len(second) and _is_proportional(first, second)
    if brackets & _ORDERED:
        is_like = len(brackets) == 1 or brackets == {"()", ","} or (len(first) > 2 and brackets <= {"()", "[]", ","})
        return is_like and len(first) == len(second) and all(map(same, first, second))
    if all(_plain(each) in _TRUTHS for each in first):
        return len(first) == len(second) and all(map(same, first, second))
    is_inequality = any(isinstance(each, Relation) and not each.values for each in first)
    if len(brackets) > 1 and (brackets & set("∪∩∖|:") or is_inequality):  # and is not or
        return False
    for item in first:
        place = next((i for i, each in enumerate(second) if same(item, each)), None)
        if place is None:
            return False
        del second[place]
    return not second


def _is_proportional(first: Sequence[Node], second: Sequence[Node]) -> bool:
    is_time = len(first) == 2 and all(len(_plain(each[1])) > 1 for each in (first, second))  # 10:30
    one, other = ([_real(each) for each in part] for part in (first, second))
    if is_time or None in one + other:
        return all(map(same, first, second))
    return all(close(a * other[0], b * one[0]) for a, b in zip(one, other, strict=True))


def _items(group: Group) -> list[Node]:
    """The items, in a set each once."""
    items = group.items
    if group.brackets != "{}":
        return list(items)
    return [each for i, each in enumerate(items) if not any(same(each, one) for one in items[:i])]


def _values(group: Group, names: dict[str, Node] | None, brackets: str) -> Group:
    """``x = 2, y = 3`` as ``(2, 3)``: the values in the order of their names. A list has those of ``x_1``, ``x_2`` in
    any order."""
    if not names:
        return group
    is_one_name = brackets == "," and len({name.partition("_")[0] for name in names}) == 1
    return Group("," if is_one_name else "()", tuple(names[name] for name in sorted(names)))


def _assignments(group: Node) -> dict[str, Node] | None:
    """The values of ``x = 2, y = 3`` or ``(x, y) = (2, 3)`` by their names; None for other items."""
    if isinstance(group, Relation) and group.name[:1] == "(" and group.values and isinstance(group.values[-1], Group):
        names, items = group.name.strip("()").split(","), group.values[-1].items
        return dict(zip(names, items, strict=True)) if len(set(names)) == len(names) == len(items) else None
    named = [each for each in getattr(group, "items", ()) if isinstance(each, Relation) and each.name and each.values]
    values = {each.name.casefold(): each.values[-1] for each in named}
    return values if isinstance(group, Group) and len(values) == len(group.items) > 1 else None


def _same_relation(answer: Relation, right: Relation) -> bool:
    if (answer.operators, [*map(_texts, answer.sides)]) == (right.operators, [*map(_texts, right.sides)]):
        return True
    if answer.values and right.values:
        one, other = answer.name.casefold(), right.name.casefold()
        calls = [re.fullmatch(r"(\w+)\(([a-z])\)", each.name) for each in (answer, right)]
        if calls[0] and calls[1] and calls[0][1] == calls[1][1] and calls[0][2] != calls[1][2]:  # f(n) and f(x)
            value = _renamed(answer.sides[-1], calls[0][2], calls[1][2])
            return same(_read(value), right.values[-1])
        described = [_has(each.sides[0], "w") for each in (answer, right)]
        is_same_name = one == other or (all(described) and (one in other or other in one))
        if is_same_name or not one or not other or described[0] != described[1]:
            return _is_consistent(answer) and any(same(value, right.values[0]) for value in answer.values)
    if _same_region(answer, right):
        return True
    if len(answer.operators) != 1 or answer.operators != right.operators:
        return False
    is_equation = answer.operators[0] in "=≠≡"
    minus, end = tokens("-("), tokens(")")
    ratio = ratio_of(*((*a, *minus, *b, *end) for a, b in (answer.sides, right.sides)), of_numerators=is_equation)
    return ratio is not None and (is_equation or ratio > 0)  # the sign of a denominator turns an inequality


def _words_agree(answer: Quantity, right: Quantity) -> bool:
    found, wanted = set(answer.words), set(right.words)
    changed = [set(CHANGES.findall(" ".join(words))) for words in (found, wanted)]
    points = set("NSEW" if right.sign == "°" else "")
    chosen = [{word for word in words if CHOICES.fullmatch(word) or word in points} for words in (found, wanted)]
    if changed[0] != changed[1] or chosen[1] - found:
        return False
    return not wanted or not found or found <= wanted or (wanted <= found and not chosen[0] - wanted)


def _plain(node: Node) -> str:
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", node.text) if isinstance(node, Quantity) else ""


def _ends_with(answer: Quantity, right: Quantity) -> bool:
    """Whether the answer is a sentence that ends with the right words: ``The series converges`` for ``converges``."""
    sentence, ending = (re.sub(r"[^\w\s]", "", each.text.casefold()) for each in (answer, right))
    before = sentence.removesuffix(ending)
    subject = r"(?:the|this|that|it)\b((?: (?!is|are)\w+){0,4} (?:is|are)(?: an?| the)?| \w+|) "
    is_subject = re.fullmatch(subject, before)
    return bool(ending and is_subject and not CHANGES.search(before) and not CHOICES.search(before))


def _same_quantity(answer: Quantity, right: Quantity) -> bool:
    if _plain(answer) == _plain(right):
        return True
    if not _has(right.formula, "nsfmv") or not _has(answer.formula, "nsfmv"):
        one, other = (re.sub(r"[\W_]", "", _WINS.sub("", each.text.casefold())) for each in (answer, right))
        words = [sorted(each.words) if {"all", "only"} & {*each.words} else each.words for each in (answer, right)]
        is_name = len(answer.formula) == 1 and answer.formula[0].kind == "s"  # all odd integers n
        is_same = one == other != "" or words[0] == words[1] != ()
        return (is_name or not answer.formula) and not right.formula and (is_same or _ends_with(answer, right))
    measured = _same_measured(answer, right)
    return _words_agree(answer, right) and _same_values(answer, right) if measured is None else measured


def _same_measured(answer: Quantity, right: Quantity) -> bool | None:
    """Whether two amounts in units are equal; None if one has no units."""
    sizes = [None if each.sign or not each.formula else measure(*each.words) for each in (answer, right)]
    if not sizes[0] or not sizes[1]:
        return None
    return sizes[0][1] == sizes[1][1] and _same_formula(answer.formula, right.formula, factor=sizes[0][0] / sizes[1][0])


def _same_values(answer: Quantity, right: Quantity, tolerance: Fraction | None = None) -> bool:
    if "…" in (answer.formula[-1:] + right.formula[-1:])[0].text + right.formula[-1].text:
        return _is_cut(answer.formula, right) or _is_cut(right.formula, answer)
    factors = {"%": [Fraction(1, 100)], "°": [value_of(tokens(r"\pi/180"))]}
    one, other = ([ONE, *(factors.get(each.sign, []) if answer.sign != right.sign else [])] for each in (answer, right))
    units = [*itertools.product(one, other)]
    if answer.sign != right.sign and {"rad", "radian"} & {*answer.words, *right.words}:
        units.remove((ONE, ONE))
    return any(_same_formula(answer.formula, right.formula, tolerance, each) for each in units)


def _is_cut(cut: Formula, whole: Quantity) -> bool:
    """Whether a number goes on where the digits of a decimal end: 1.414... is the square root of 2, and not 1.414."""
    digits, value = re.fullmatch(r"(-?\d+\.(\d{3,}))…", "".join(_texts(cut))), _real(whole)
    if digits is None or value is None:
        return False
    return bool(0 < abs(inexact(value) - inexact(Fraction(digits[1]))) < inexact(Fraction(1, 10 ** len(digits[2]))))


def _same_formula(
    answer: Formula,
    right: Formula,
    tolerance: Fraction | None = None,
    units: tuple[Any, Any] = (ONE, ONE),
    factor: Fraction = ONE,
) -> bool:
    constants = [each[-1].text for each in (answer, right) if len(each) > 1 and each[-2].text in ("+", "-")]
    if len(constants) == 2 and "C" in constants and set(constants) <= set("cCkK"):  # of integration
        answer, right = ((*each[:-2], *tokens("+C")) for each in (answer, right))
    mine, other = (names_in(each) & set("kmn") for each in (answer, right))
    if "pi" in _texts(right) and len(mine) == len(other) == 1:  # the one integer in multiples of pi
        answer = _renamed(answer, *mine, *other)
    has_decimals = any(each.kind == "n" and "." in each.text for each in (*answer, *right))
    if tolerance is None and has_decimals and not re.fullmatch(r"[-+]?\d+(?:\.0*)?", "".join(_texts(right))):
        tolerance = Fraction(1, 10**6)
    if same_value(answer, right, tolerance, units, factor):
        return True
    is_natural = "log" in _texts(right) and "ln" in _texts(answer)
    return is_natural and same_value(answer, _renamed(right, "log", "ln"), tolerance)


def _renamed(formula: Formula, old: str, new: str) -> Formula:
    return tuple(each._replace(text=new) if each.text == old else each for each in formula)


_GRID = [Fraction(i * 3, 7) for i in range(-24, 25)]
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: not close(a, b) and bool(inexact(a) < inexact(b)),
    "≤": lambda a, b: close(a, b) or bool(inexact(a) < inexact(b)),
    ">": lambda a, b: not close(a, b) and bool(inexact(a) > inexact(b)),
    "≥": lambda a, b: close(a, b) or bool(inexact(a) > inexact(b)),
    "≠": lambda a, b: not close(a, b),
    "=": lambda a, b: close(a, b),
}


def _same_region(one: Node, other: Node) -> bool:
    """Whether both are the same set of real numbers: at the ends of their parts, between and beyond these, and on a
    grid."""
    names = [_unknowns(each) for each in (one, other)]
    if max(map(len, names)) > 1 or len(names[0] | names[1]) > 1:
        return False
    ends = sorted({*_ends(one), *_ends(other)}, key=inexact)
    between = [(inexact(a) + inexact(b)) / 2 for a, b in itertools.pairwise(ends)]
    probes = [*ends, *between, *_GRID, *((inexact(ends[0]) - 1, inexact(ends[-1]) + 1) if ends else ())]
    try:
        found, wanted = ([_contains(node, x) for x in probes] for node in (one, other))
    except NotAFormula:
        return False
    is_list = any(isinstance(each, Group) and each.brackets == "," for each in (one, other))
    return found == wanted and (any(found) or not is_list)


def _unknowns(node: Node) -> set[str]:
    if isinstance(node, Relation):
        return {node.name} if node.operators == ("∈",) else names_in(*node.sides)
    if isinstance(node, Quantity) or node.brackets == "|":
        return set()
    return set[str]().union(*map(_unknowns, node.items))


def _ends(node: Node) -> set[Any]:
    if isinstance(node, Relation):
        values = [_real(Quantity("", side)) for side in node.sides]
        inner = [_ends(each) for each in node.values]
    else:
        values, inner = [_real(node)], [_ends(each) for each in node.items] if isinstance(node, Group) else []
    finite = {sign * each for each in values if each is not None and each - each == 0 for sign in (1, -1)}
    return finite.union(*inner)


def _contains(node: Node, x: Any, is_condition: bool = False) -> bool:
    """Whether a number is in the set of an interval, a solved inequality, a union or alternatives. A condition of a set
    need not be solved. Raises NotAFormula for what is no set of real numbers."""
    if isinstance(node, Quantity):
        if _texts(node.formula) != ["∅"]:
            raise NotAFormula
        return False
    if isinstance(node, Relation):
        return _satisfies(node, x, is_condition)
    brackets, items = node.brackets, node.items
    if brackets == "{}" or brackets in _ORDERED:
        values = [_real(each) for each in items]
        if None in values or (brackets != "{}" and not (len(values) == 2 and _COMPARED["<"](*values))):
            raise NotAFormula
        if brackets == "{}":
            return any(close(x, each) for each in values)
        low, high = "<≤"[brackets[0] == "["], "<≤"[brackets[1] == "]"]
        return _COMPARED[low](values[0], x) and _COMPARED[high](x, values[1])
    found = [_contains(each, x, is_condition or brackets == "|") for each in items]
    if brackets == "∖":
        return found[0] and not found[1]
    if brackets == "or" and sum(found) > 1:  # x > 3 or x > 4
        raise NotAFormula
    if brackets == ":":
        raise NotAFormula
    is_every = brackets == "∩" or (brackets == "," and all(isinstance(each, Relation) for each in items))
    return all(found) if is_every else any(found)


def _satisfies(node: Relation, x: Any, is_condition: bool) -> bool:
    if node.operators == ("∈",) and node.values:
        return _contains(node.values[0], x)
    names = names_in(*node.sides)
    if len(names) != 1 or not set(node.operators) <= _COMPARED.keys() or (node.values and not is_condition):
        raise NotAFormula
    (name,) = names
    for pair in itertools.pairwise(node.sides):
        is_alone = any("".join(_texts(side)) in (name, f"|{name}|") for side in pair) and not all(map(names_in, pair))
        if not is_condition and not is_alone:
            raise NotAFormula
    values: list[Any] = []
    for side in node.sides:
        try:
            values.append(value_of(side, {name: x}))
        except NotAFormula:
            if not names_in(side):
                raise
            return False
    if not all(map(is_real, values)):
        if any(not names_in(side) and not is_real(value) for side, value in zip(node.sides, values, strict=True)):
            raise NotAFormula
        return False
    return all(map(lambda how, a, b: _COMPARED[how](a, b), node.operators, values, values[1:]))
