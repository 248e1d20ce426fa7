r"""Whether two answers are equal: a rule for each pair of types of ``areal.reward.structure``.

Formulas are compared exactly, and only decimals with a tolerance, relative to the right one. Words beside a number (a
unit, ``apples``) may be omitted, unless they distinguish values (``pm``, ``loss``). Where both answers have words, one
has all words of the other.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from areal.reward import formulas
from areal.reward.formulas import ONE, Formula, NotAFormula, close, inexact, is_real, names_in, value_of
from areal.reward.notation import Token, tokens
from areal.reward.structure import LISTS, Items, Node, Quantity, Relation, has_kind, quantity, structure, texts_of
from areal.reward.units import MONTHS, SCALES, measure, words_in

SCALE = rf"(?:dozens?|tens|(?:{'|'.join(SCALES)})s?)"
CHANGES = re.compile(  # words that change the value of a number, or make it one of several
    r"\b(?:not|cannot|incorrect|wrong|never|[a-z]+n['’]t|or|and|than|least|most|between|without|except|but|half|halves|third"
    r"|quarter|fifth|tenth|\w+ths|double|twice|thrice|n?either|nor|none|mod|modulo|over|under|above|below|up|instead|minus"
    r"|negative|plus|squared|cubed|root|cube|factorial|reciprocal|inverse|opposite|logarithm|(?:co)?sine|tangent|score"
    rf"|infinity|inf|depend|multiple|divisible|proportional|out|floor|ceil(?:ing)?|remainder|[不没非错]\w*|{SCALE})\b",
    re.IGNORECASE,
)
CHOICES = re.compile(  # words that an answer must have if its reference has them
    r"(?<!\\)\b(?:[ap]m|noon|midnight|bc|ad|base|mod\d+|(?:north|south)(?:east|west)?|east|west|(?:in|de)crease[sd]?|profit|gain|loss"
    r"|debt|left|right|(?:counter)?clockwise|positive|negative|more|less|fewer|before|after|early|late|up|down|wins?|loses?"
    rf"|lost|won|{'|'.join(MONTHS)}|\w+days?|true|false|yes|no"
    r"|odd|even)\b"
)
_WINNING = re.compile(r" (?:(?:always?|will|can|has a) )*win(?:ning strategy)?\Z")
_WINDS = words_in("north south east west")
_TRUTH_VALUES = words_in("yes no true false")
_ORDERED = frozenset(("()", "[]", "[)", "(]"))


def same(answer: Node | None, right: Node | None) -> bool:
    """Return whether the answer equals the right one."""
    if answer is None or right is None:
        return False
    if isinstance(answer, Quantity) and isinstance(right, Quantity):
        return _same_quantity(answer, right)
    if "otherwise" in (_plain(answer), _plain(right)):  # the last condition of a function by cases
        return any(isinstance(each, Relation) for each in (answer, right))
    names, others = _assignments(answer), _assignments(right)
    if names and others:
        return names.keys() == others.keys() and all(same(names[each], others[each]) for each in names)
    if isinstance(answer, Items) and isinstance(right, Items) and (names or others):
        return _same_values_of(names or others or {}, right if names else answer)
    if isinstance(answer, Relation) and isinstance(right, Relation):
        return _same_relation(answer, right)
    if isinstance(answer, Relation) and {*answer.operators} == {"="} and not answer.values:  # an identity
        return all(same(quantity(each), right) for each in answer.sides)
    if isinstance(answer, Relation) and answer.values:
        return _is_consistent(answer) and any(same(value, right) for value in answer.values)
    if isinstance(right, Relation) and right.values and not re.search(r"[-+*/^]|frac(?![A-Z]{4})", right.name):
        return any(same(answer, value) for value in right.values)
    if isinstance(answer, Items) and isinstance(right, Items) and _same_group(answer, right):
        return True
    if isinstance(answer, Quantity) == isinstance(right, Quantity) or "∅" in _plain(answer) + _plain(right):
        return _same_region(answer, right)
    group, other = (answer, right) if isinstance(answer, Items) else (right, answer)
    if not isinstance(group, Items) or not isinstance(other, Quantity):
        return False
    if group.brackets == "or":
        return group is answer and all(same(each, right) for each in group.items)
    if group.brackets in LISTS and _plain(group.items[0]) in _TRUTH_VALUES:  # yes, it is true
        verdict, reason = group.items[:2]
        if group is answer and _plain(verdict) == "yes" and same(reason, right):
            return True
        return same(verdict, other) and (group is answer or not is_number(reason))
    is_like = group is answer or {"/", "frac"} & {*texts_of(other.formula)}
    if group.brackets == ":" and len(group.items) == 2 and is_like and _plain(group.items[1])[:1] != "0":
        return _is_proportional(group.items, (other, quantity((Token("n", "1"),))))
    items = [each.formula for each in group.items if isinstance(each, Quantity)]
    is_vector = group.brackets in ("()", "[]") and len(items) == len(group.items)
    return is_vector and formulas.same_items(items, other.formula)


def is_number(node: Node | None) -> bool:
    """Return whether a text has only numbers, operators and words."""
    if isinstance(node, Relation):
        return bool(node.values) and all(map(is_number, node.values))
    return isinstance(node, Quantity) and has_kind(node.formula, "n") and not has_kind(node.formula, "sfmv")


def exact_number(node: Node | None) -> Fraction | None:
    """Return the value of a rational number."""
    if isinstance(node, Relation) and node.values and node.name:
        node = node.values[-1]
    is_plain = isinstance(node, Quantity) and not CHANGES.search(" ".join(node.words))
    value = _real(node) if is_plain and node else None
    return value if isinstance(value, Fraction) else None


def _real(node: Node) -> Any:
    """Return the value of a real number; None for anything else."""
    try:
        value = value_of(node.formula) if isinstance(node, Quantity) and node.formula else None
    except NotAFormula:
        return None
    return value if value is not None and is_real(value) else None


def _is_consistent(answer: Relation) -> bool:
    """Return whether the values of a chain are equal, and decimals nearly equal. ``20 = 18`` is not consistent."""
    if answer.operators[-1] == "≡":
        return True
    values = [each for each in answer.values if not re.search(r"…(?!\s*\Z)", getattr(each, "text", ""))]
    for left, right in itertools.pairwise(values):  # 1 + 2 + ... + 100 has no value
        if isinstance(left, Quantity) and isinstance(right, Quantity) and not _same_measured(left, right):
            is_rough = "≈" in answer.operators or "." in left.text + right.text
            if not _same_values(left, right, Fraction(1, 20) if is_rough else None):
                return False
    return True


def _same_group(answer: Items, right: Items) -> bool:
    """Return whether groups have the same items: tuples in order, sets and lists in any order. A set may repeat one."""
    brackets = {answer.brackets, right.brackets}
    first, second = _items(answer), _items(right)
    if brackets == {":"}:
        return len(first) == len(second) and _is_proportional(first, second)
    are_truths = all(_plain(each) in _TRUTH_VALUES for each in first)
    if brackets & _ORDERED or are_truths:
        is_like = len(brackets) == 1 or brackets == {"()", ","} or (len(first) > 2 and brackets <= {"()", "[]", ","})
        return (is_like or are_truths) and len(first) == len(second) and all(map(same, first, second))
    cut = min(len(first), len(second)) - 1
    if cut > 2 and _plain(first[-1]) == _plain(second[-1]) == "…":  # 1, 3, 5, ...
        first, second = first[:cut], second[:cut]
    ends = [[_plain(each.items[-1]) for each in items if isinstance(each, Items)] for items in (first, second)]
    if ("otherwise" in ends[0]) != ("otherwise" in ends[1]) and not _is_whole([*first, *second]):
        return False
    is_condition = any(isinstance(each, Relation) and not each.values for each in first)
    is_condition |= all(isinstance(each, Quantity) and not has_kind(each.formula, "nfm") for each in first)
    if len(brackets) > 1 and (brackets & set("∪∩∖|:") or ("or" in brackets and is_condition)):  # and is not or
        return False
    for item in first:
        place = next((i for i, each in enumerate(second) if same(item, each)), None)
        if place is None:
            return False
        del second[place]
    return not second


def _is_whole(cases: Sequence[Node]) -> bool:
    """Return whether each real number meets a condition of ``cases``, as it must if one is ``otherwise``."""
    conditions = [each.items[-1] for each in cases if isinstance(each, Items) and _plain(each.items[-1]) != "otherwise"]
    try:
        is_whole = all(any(_contains(each, x, True) for each in conditions) for x in _probes(*conditions))
        return is_whole or bool(set("kmn").intersection(*map(_unknowns, conditions)))
    except NotAFormula:
        return True


def _is_proportional(first: Sequence[Node], second: Sequence[Node]) -> bool:
    is_time = len(first) == 2 and all(len(_plain(each[1])) > 1 for each in (first, second))  # 10:30
    one, other = ([_real(each) for each in part] for part in (first, second))
    if is_time or None in one + other:
        return all(map(same, first, second))
    return all(close(a * other[0], b * one[0]) for a, b in zip(one, other, strict=True))


def _items(group: Items) -> list[Node]:
    """Return the items, without the repeated ones of a set."""
    items = group.items
    if group.brackets != "{}":
        return list(items)
    return [each for i, each in enumerate(items) if not any(same(each, one) for one in items[:i])]


def _same_values_of(names: dict[str, Node], other: Items) -> bool:
    """Return whether a group has the values of ``x = 2, y = 3`` in order; those of ``x_1``, ``x_2`` in any."""
    stems = {name.partition("_")[0] for name in names}
    relations = [each for each in other.items if isinstance(each, Relation)]
    if len(relations) > 1 and stems != {each.name for each in relations}:  # y = 1, y = 2
        return False
    values = tuple(names[name] for name in sorted(names))
    return same(Items("," if len(stems) == 1 else "()", values), other)


def _assignments(group: Node) -> dict[str, Node] | None:
    """Return the values of ``x = 2, y = 3`` or ``(x, y) = (2, 3)`` by their names; None for other items."""
    if isinstance(group, Relation) and group.name[:1] == "(" and group.values and isinstance(group.values[-1], Items):
        names, items = group.name.strip("()").split(","), group.values[-1].items
        return dict(zip(names, items, strict=True)) if len(set(names)) == len(names) == len(items) else None
    named = [each for each in getattr(group, "items", ()) if isinstance(each, Relation) and each.name and each.values]
    values = {each.name.casefold(): each.values[-1] for each in named}
    return values if isinstance(group, Items) and len(values) == len(group.items) > 1 else None


def _same_relation(answer: Relation, right: Relation) -> bool:
    if (answer.operators, [*map(texts_of, answer.sides)]) == (right.operators, [*map(texts_of, right.sides)]):
        return True
    if answer.values and right.values:
        one, other = (re.sub(r"\([a-z]\)\Z", "", each.name.casefold()) for each in (answer, right))
        calls = [re.fullmatch(r"(.+)\(([a-z])\)", each.name) for each in (answer, right)]
        if calls[0] and calls[1] and calls[0][1] == calls[1][1]:  # f(n) and f(x)
            value = _renamed(answer.sides[-1], {calls[0][2]: "argument"})
            return same(structure(value), structure(_renamed(right.sides[-1], {calls[1][2]: "argument"})))
        described = [has_kind(each.sides[0], "w") for each in (answer, right)]
        is_same_name = one == other or (all(described) and (one in other or other in one))
        if is_same_name or not one or not other or described[0] != described[1]:
            return _is_consistent(answer) and any(same(value, right.values[0]) for value in answer.values)
    if _same_region(answer, right):
        return True
    if len(answer.operators) != 1 or answer.operators != right.operators:
        return False
    is_equation = answer.operators[0] in "=≠≡"
    minus, end = tokens("-("), tokens(")")
    found, wanted = ((*a, *minus, *b, *end) for a, b in (answer.sides, right.sides))
    ratio = formulas.ratio_of(found, wanted, of_numerators=is_equation)
    return ratio is not None and (is_equation or ratio > 0)  # the sign of a denominator turns an inequality


def _words_agree(answer: Quantity, right: Quantity) -> bool:
    found, wanted = set(answer.words), set(right.words)
    months = {each for each in found | wanted if each in MONTHS}
    if months and found ^ wanted == months:  # July 1969
        return False
    if months <= found & wanted:
        found = {each for each in found if each in wanted or not (months and re.fullmatch(r"\w{3,}day", each))}
    changed = [set(CHANGES.findall(" ".join(words))) for words in (found, wanted)]
    points = set("NSEW" if right.sign == "°" else "")
    chosen = [{word for word in words if CHOICES.fullmatch(word) or word in points} for words in (found, wanted)]
    winds = [[word for word in words if word in _WINDS] for words in (answer.words, right.words)]
    if changed[0] != changed[1] or chosen[1] - found or (all(winds) and winds[0] != winds[1]):  # north of east
        return False
    return not wanted or found <= wanted or (wanted <= found and not chosen[0] - wanted)


def _plain(node: Node) -> str:
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)|(?<=[A-Za-z])_(?=\d)", "", node.text) if isinstance(node, Quantity) else ""


def _ends_with(answer: Quantity, right: Quantity) -> bool:
    """Return whether the answer is a sentence with the right words at its end: ``It converges`` for ``converges``."""
    sentence, ending = (re.sub(r"[^\w\s]", "", each.text.casefold()) for each in (answer, right))
    before = sentence.removesuffix(ending)
    subject = r"(?:the|this|that|it)\b((?: (?!is|are)\w+){0,4} (?:is|are)(?: an?| the)?| \w+|) "
    is_subject = re.fullmatch(subject, before)
    return bool(ending and is_subject and not CHANGES.search(before) and not CHOICES.search(before))


def _same_quantity(answer: Quantity, right: Quantity) -> bool:
    if _plain(answer) == _plain(right):
        return True
    answer, right = _as_product(answer, right), _as_product(right, answer)
    if not has_kind(right.formula, "nsfmv") or not has_kind(answer.formula, "nsfmv"):
        one, other = (
            re.sub(r"[\W_]|number|triangle|function", "", _WINNING.sub("", each.text.casefold()))
            for each in (answer, right)
        )
        words = [sorted(each.words) if {"all", "only"} & {*each.words} else each.words for each in (answer, right)]
        is_name = len(answer.formula) == 1 and answer.formula[0].kind == "s"  # all odd integers n
        is_same = one == other != "" or words[0] == words[1] != ()
        return (is_name or not answer.formula) and not right.formula and (is_same or _ends_with(answer, right))
    answer, right = _with_unit(answer, right), _with_unit(right, answer)
    measured = _same_measured(answer, right)
    return _words_agree(answer, right) and _same_values(answer, right) if measured is None else measured


def _with_unit(node: Quantity, other: Quantity) -> Quantity:
    """``5m`` as 5 and the word ``m`` beside an amount in a unit or one number."""
    units = "mgsLNJWVKAC" if other.words else "mLNJWVK" if len(other.formula) == 1 else ""
    if node.words or [each.kind for each in node.formula] != ["n", "s"] or node.formula[1].text not in units:
        return node
    return Quantity(node.text, node.formula[:1], (node.formula[1].text,), node.sign)


def _as_product(node: Quantity, other: Quantity) -> Quantity:
    """``2 kA^2`` as a product of symbols beside a formula that has symbols."""
    is_short = len(node.words) == 1 and len(node.words[0]) < 4 and not node.formula  # cab
    is_amount = node.words and measure(*node.words) and {each.kind for each in node.formula} <= {"n", "o"}
    if not (is_amount or is_short) or other.words or sum(each.kind == "s" for each in other.formula) < 2:
        return node
    return quantity(tokens(re.sub("[A-Za-z]", r"{\g<0>}", node.text)))


def _same_measured(answer: Quantity, right: Quantity) -> bool | None:
    """Return whether two amounts in units are equal; None if one has no units."""
    sizes = [None if each.sign or not each.formula else measure(*each.words) for each in (answer, right)]
    if not sizes[0] or not sizes[1]:
        return None
    return sizes[0][1] == sizes[1][1] and _same_formula(answer.formula, right.formula, factor=sizes[0][0] / sizes[1][0])


def _same_values(answer: Quantity, right: Quantity, tolerance: Fraction | None = None) -> bool:
    if "…" in (answer.formula[-1:] + right.formula[-1:])[0].text + right.formula[-1].text:
        return _is_truncated(answer.formula, right) or _is_truncated(right.formula, answer)
    factors = {"%": [Fraction(1, 100)], "°": [value_of(tokens(r"\pi/180"))]}
    one, other = ([ONE, *(factors.get(each.sign, []) if answer.sign != right.sign else [])] for each in (answer, right))
    units = [*itertools.product(one, other)]
    value = _real(right) if answer.sign == "%" != right.sign else None
    is_part = value is not None and inexact(abs(value)) < 1  # 0.35% is not 0.35, and 35% is 35
    if is_part or (answer.sign != right.sign and {"rad", "radian"} & {*answer.words, *right.words}):
        units.remove((ONE, ONE))
    return any(_same_formula(answer.formula, right.formula, tolerance, each) for each in units)


def _is_truncated(cut: Formula, whole: Quantity) -> bool:
    """Return whether a decimal is the beginning of another: 1.414... is the square root of 2, not 1.414."""
    digits, value = re.fullmatch(r"(-?\d+\.(\d{3,}))…", "".join(texts_of(cut))), _real(whole)
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
    for axis in "ijk" if any("unit" in each.text for each in (*answer, *right)) else "":  # 2i + j without hats
        answer, right = (_renamed(each, {axis: f"unit {axis}"}) for each in (answer, right))
    free, wanted_free = _arbitrary(answer, right), _arbitrary(right, answer)
    if 1 < len(free) == len(wanted_free) < 4:
        names = ["constant 0", "constant 1", "constant 2"]
        right = _renamed(right, dict(zip(wanted_free, names, strict=False)))
        orders = (dict(zip(order, names, strict=False)) for order in itertools.permutations(free))
        return any(_same_formula(_renamed(answer, each), right, tolerance, units, factor) for each in orders)
    constants = [each[-1].text for each in (answer, right) if len(each) > 1 and each[-2].text in ("+", "-")]
    is_integral = len(constants) == 2 and "C" in constants and set(constants) <= set("cCkK")
    if is_integral:
        answer, right = ((*each[:-2], *tokens("+C")) for each in (answer, right))
    mine, other = (names_in(each) & set("kmn") for each in (answer, right))
    if "pi" in texts_of(right) and len(mine) == len(other) == 1:  # the one integer in multiples of pi
        answer = _renamed(answer, dict(zip(mine, other, strict=True)))
    has_decimals = any(each.kind == "n" and "." in each.text for each in (*answer, *right))
    if tolerance is None and has_decimals and not re.fullmatch(r"[-+]?\d+(?:\.0*)?", "".join(texts_of(right))):
        tolerance = Fraction(1, 10**6)
    if formulas.same_value(answer, right, tolerance, units, factor):
        return True
    if is_integral and "".join(names_in(right) - {"C"}).islower():  # they may differ by a number
        found, wanted = ((*tokens("exp("), *each, *tokens(")")) for each in (answer, right))
        return formulas.ratio_of(found, wanted, of_numerators=False) is not None
    is_natural = "log" in texts_of(right) and "ln" in texts_of(answer)
    return is_natural and formulas.same_value(answer, _renamed(right, {"log": "ln"}), tolerance)


def _arbitrary(formula: Formula, other: Formula) -> list[str]:
    """Return the constants ``C_1``, ``C_2`` of a general solution; ``A``, ``B`` if the other formula has such ones."""
    names, others = ([*filter(re.compile(r"[cC]_\d").fullmatch, names_in(each))] for each in (formula, other))
    return sorted(names or [each for each in names_in(formula) - names_in(other) if each in "ABCDKPQ" and others])


def _renamed(formula: Formula, names: Mapping[str, str]) -> Formula:
    return tuple(each._replace(text=names.get(each.text, each.text)) for each in formula)


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
    """Return whether both are one set of real numbers: at the ends of parts, between and beyond these, on a grid."""
    if len(_unknowns(one) | _unknowns(other)) > 1:
        return False
    try:
        found, wanted = ([_contains(node, x) for x in _probes(one, other)] for node in (one, other))
    except NotAFormula:
        return False
    is_list = any(isinstance(each, Items) and each.brackets in LISTS for each in (one, other))
    return found == wanted and (any(found) or not is_list)


def _probes(*nodes: Node) -> list[Any]:
    ends = sorted(set[Any]().union(*map(_ends, nodes)), key=inexact)
    between = [(inexact(a) + inexact(b)) / 2 for a, b in itertools.pairwise(ends)]
    return [*ends, *between, *_GRID, *((inexact(ends[0]) - 1, inexact(ends[-1]) + 1) if ends else ())]


def _unknowns(node: Node) -> set[str]:
    if isinstance(node, Relation):
        return {node.name} if node.operators == ("∈",) else names_in(*node.sides)
    if isinstance(node, Quantity) or node.brackets == "|":
        return set()
    return set[str]().union(*map(_unknowns, node.items))


def _ends(node: Node) -> set[Any]:
    if isinstance(node, Quantity):
        value = _real(node)
        return set() if value is None or value - value != 0 else {value, -value}
    sides = [Quantity("", each) for each in node.sides] if isinstance(node, Relation) else node.items
    return set[Any]().union(*map(_ends, [*sides, *getattr(node, "values", ())]))


def _contains(node: Node, x: Any, is_condition: bool = False) -> bool:
    """Return whether a number is in the set of an interval, a solved inequality, a union or alternatives. A condition
    of a set need not be solved. Raises NotAFormula for other objects than sets of real numbers."""
    if isinstance(node, Quantity):
        if texts_of(node.formula) != ["∅"]:
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
    found = [_contains(each, x, is_condition or brackets in ("|", "or")) for each in items]
    if brackets == "∖":
        return found[0] and not found[1]
    is_every = brackets == "∩" or (brackets in LISTS and all(isinstance(each, Relation) for each in items))
    if brackets in ("or", *LISTS) and not is_every and sum(found) > 1:  # x > 3 or x > 4
        raise NotAFormula
    return all(found) if is_every else any(found)


def _satisfies(node: Relation, x: Any, is_condition: bool) -> bool:
    if node.operators == ("∈",) and node.values:
        return _contains(node.values[0], x)
    names = names_in(*node.sides)
    if len(names) != 1 or not set(node.operators) <= _COMPARED.keys() or (node.values and not is_condition):
        raise NotAFormula
    (name,) = names
    for pair in itertools.pairwise(node.sides):
        is_alone = any("".join(texts_of(side)) in (name, f"|{name}|") for side in pair) and not all(map(names_in, pair))
        if not is_condition and not is_alone:
            raise NotAFormula
    if any(not names_in(side) and _real(Quantity("", side)) is None for side in node.sides):
        raise NotAFormula
    try:
        values = [value_of(side, {name: x}) for side in node.sides]
    except NotAFormula:  # 1/x at 0
        return False
    return all(map(is_real, values)) and all(
        _COMPARED[how](*pair) for how, pair in zip(node.operators, itertools.pairwise(values), strict=True)
    )
