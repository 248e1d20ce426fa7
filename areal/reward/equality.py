r"""Whether two answers in LaTeX or plain text are equal.

``read`` takes a text in one notation (``areal.reward.notation``) apart: into lists, tuples, sets, intervals, equations,
and quantities, which are a formula with words. Equal structures are compared part by part, formulas by
``areal.reward.formulas``: exactly, and only a decimal with a tolerance, relative to the right one. Words beside a
number (a unit, ``apples``) may be left out, unless they choose between values (``pm``, ``loss``). Where both answers
have words, those of one are among those of the other. The code needs neither the main thread nor signals.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from areal.reward.formulas import decimal, parsed, ratio_of, same_value
from areal.reward.notation import LONGEST, SCALES, normal

_DEEPEST, _MOST_ITEMS = 12, 64
_TOLERANCE = Fraction(1, 10**6)

SCALE = rf"(?:dozens?|tens|(?:{'|'.join(SCALES)})s?)"
CHANGES = re.compile(  # words that make a number another one, or one of several
    r"\b(?:not|never|[a-z]+n['’]t|or|and|than|least|most|between|without|except|but|half|halves|third|quarter|fifth|tenth|\w+ths"
    r"|double|twice|thrice|n?either|nor|none|mod|modulo|over|under|above|below|up|instead|minus|negative|plus|squared|cubed"
    r"|root|cube|factorial|reciprocal|inverse|opposite|logarithm|(?:co)?sine|tangent|score|infinity|inf|out|floor|ceil(?:ing)?"
    rf"|remainder|{SCALE})\b",
    re.IGNORECASE,
)
CHOICES = re.compile(  # words that a reference with them asks for
    r"\b(?:[ap]m|noon|midnight|bc|ad|base|(?:north|south)(?:east|west)?|east|west|(?:in|de)crease[sd]?|profit|gain|loss|debt|left"
    r"|right|(?:counter)?clockwise|positive|negative|more|less|fewer|before|after|early|late|up|down|wins?|loses?|lost|won"
    r"|(?:jan|febr)uary|march|april|may|june|july|august|(?:sept|nov|dec)ember|october|\w+days?|true|false|yes|no|odd|even)\b"
)

# Structure


@dataclass(frozen=True)
class Quantity:
    """A formula with words beside it. Without a formula, the text is only words. ``text`` is the whole."""

    text: str
    formula: str
    words: tuple[str, ...]
    sign: str = ""  # % or °


@dataclass(frozen=True)
class Group:
    """Items in ``()``, ``[]``, ``[)``, ``(]`` or ``{}``; a bare list has ``,``, alternatives have ``or``."""

    brackets: str
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Relation:
    """Sides of an equation, an inequality or a chain of them. ``values`` are the sides that a name equals."""

    sides: tuple[str, ...]
    operators: tuple[str, ...]
    name: str = ""
    values: tuple[Node, ...] = ()


@dataclass(frozen=True)
class SetOperation:
    operands: tuple[Node, ...]
    operators: tuple[str, ...]


Node = Quantity | Group | Relation | SetOperation

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPENING, _CLOSING = frozenset(("(", "[", "{", r"\{")), frozenset((")", "]", "}", r"\}"))
_AND, _OR = re.compile(r"[,;]?\s*\band\b|[,;]"), re.compile(r",?\s*\bor\b")
_SET_OPERATOR = re.compile(r"\\(?:cup|cap|setminus)(?![A-Za-z])")
_RELATION = re.compile(r"(?<![\\<>!])=|[<>]|\\(?:le|ge|ne|approx|in|equiv)(?![A-Za-z])")
_ARGUMENT = re.compile(r"_\s*(?:\{[^{}]*\}|\w)|(?<=[A-Za-z}'])\s*\([^()]*\)")  # subscripts, and f(2)

_WORDS = re.compile(
    r"(?:«([^»]*)»|(?<![\\A-Za-z\d}^_«])(?<!begin\{)(?<!end\{)([A-Za-z]{3,}(?:['’.-][A-Za-z]+)*)|(?<=\d)([A-Za-z]{5,}))"
    r"(?:\s*\^\s*\{?(-?\d)\}?)?(?:\s*/\s*«?([A-Za-z]+(?:»?\s*\^\s*\{?-?\d\}?)?)»?)?"
)
_IDLE = frozenset(
    re.findall(r"\w+", "the a an of is are was has have answer final approximately about total units unit each")
)
_SAME_WORDS = """inch=in inches=in foot=ft feet=ft second=s sec=s minute=min hour=h hr=h pound=lb yard=yd mile=mi
ounce=oz sq=square newton=N joule=J ml=mL losses=loss jan=january feb=february mar=march apr=april jun=june jul=july
aug=august sep=september sept=september oct=october nov=november dec=december"""
_ALIASES: dict[str, str] = dict(re.findall(r"(\w+)=(\w+)", _SAME_WORDS))
_METRIC = re.compile(r"(kilo|centi|milli)?(m)et(?:er|re)s?|(kilo|centi|milli)?(g)rams?|(milli)?(l)it(?:er|re)s?")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")


def read(text: str) -> Node | None:
    """The structure of a text; None if it is too long or too deep, or contradicts itself as ``20 = 18`` does."""
    if len(text) > LONGEST:
        return None
    text = normal(text)
    return _read(text) if _depth(text) <= _DEEPEST and len(text) <= 2 * LONGEST else None


def _depth(text: str) -> float:
    """The depth of brackets, infinite if unbalanced. The parser's time grows much faster than linearly with it."""
    depth = deepest = 0
    for token in _TOKEN.findall(text):
        depth += (token in _OPENING) - (token in _CLOSING)
        deepest = max(deepest, depth)
    return math.inf if depth else deepest


def _split(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The parts of a text between the separators outside brackets, and the separators."""
    parts, separators, depth, start, at = [], [], 0, 0, 0
    while at < len(text):
        found = separator.match(text, at) if depth == 0 else None
        if found:
            parts.append(text[start:at].strip())
            separators.append(found[0].strip())
            start = at = found.end()
            continue
        token = _TOKEN.match(text, at)
        assert token is not None
        depth += (token[0] in _OPENING) - (token[0] in _CLOSING)
        at = token.end()
    return [*parts, text[start:].strip()], separators


def _unwrapped(text: str) -> tuple[str, str]:
    """The brackets around the whole of a text, and what is between them."""
    opening = _TOKEN.match(text)
    if opening is None or opening[0] not in _OPENING:
        return "", text
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in _OPENING) - (token[0] in _CLOSING)
        if depth == 0:
            whole = token.end() == len(text)
            return (opening[0] + token[0], text[opening.end() : token.start()].strip()) if whole else ("", text)
    return "", text


def _read(text: str) -> Node | None:
    brackets, inner = _unwrapped(text)
    if brackets == "{}" and not re.match(r"[A-Za-z]\s*[|:]", inner):
        return _read(inner)
    for mark, separator in (("or", _OR), (",", _AND)):
        parts, _ = _split(text, separator)
        if len(parts) > 1 and ((separator is _AND and "," in text) or all(map(_is_mathematics, parts))):
            return _list(mark, parts)
    if brackets:
        return _bracketed(text, brackets, inner)
    parts, operators = _split(text, _SET_OPERATOR)
    if operators:
        operands = _read_all(parts)
        return SetOperation(operands, tuple(operators)) if operands else None
    parts, operators = _split(text, _RELATION)
    if operators:
        return _relation(parts, operators)
    if "\\pm" in text.replace("\\pmod", "") or "\\mp" in text:
        return _list(
            ",", [re.sub(r"\\pm(?![a-z])", plus, re.sub(r"\\mp(?![a-z])", minus, text)) for plus, minus in ("+-", "-+")]
        )
    return _quantity(text)


def _read_all(parts: Sequence[str]) -> tuple[Node, ...] | None:
    nodes = [_read(part) for part in parts]
    return None if None in nodes or len(nodes) > _MOST_ITEMS else tuple(node for node in nodes if node is not None)


def _is_mathematics(text: str) -> bool:
    return bool(re.search(r"[\d=<>\\]", text) or re.fullmatch(r"\(?«?[A-Za-z]»?\)?", text))


def _list(mark: str, parts: Sequence[str]) -> Node | None:
    nodes = _read_all(parts[: -1 if not parts[-1] else None])
    if not nodes:
        return None
    first = nodes[0]
    names = {each.name for each in nodes if isinstance(each, Relation)}
    if isinstance(first, Relation) and first.values and len(names) == 1 and names != {""}:  # x = 2 or x = 3; x = 2, 3
        values = [each.values[-1] if isinstance(each, Relation) and each.values else each for each in nodes]
        return Relation(tuple(parts), (), first.name, (Group(mark, tuple(values)),))
    return Group(mark, nodes)


def _bracketed(text: str, brackets: str, inner: str) -> Node | None:
    brackets = brackets.replace("\\", "")
    if brackets == "{}":
        head, *condition = _split(inner, re.compile(r"[|:]"))[0]
        if condition and re.fullmatch(r"\\?[A-Za-z]+(?:\s*\\in\s*\(-\\infty,\\infty\))?", head):
            return _read(condition[0])
    parts, _ = _split(inner, re.compile(r"[,;]"))
    if len(parts) == 1 and brackets != "{}":
        return _read(inner) if re.search(r"[,;=<>]", inner) else _quantity(inner)
    items = _read_all(parts)
    return Group(brackets, items) if items is not None else None


def _relation(sides: list[str], operators: list[str]) -> Node | None:
    if any(each not in ("=", r"\approx", r"\in", r"\equiv") for each in operators):
        return Relation(tuple(sides), tuple(operators))
    if len(sides) == 2 and _is_name(sides[1]) and not _is_name(sides[0]) and not re.search("[A-Za-z]", sides[0]):
        sides = sides[::-1]  # 18 = x
    name = sides[0] if _is_name(sides[0]) or not sides[0] else ""
    rest = sides[1:] if name or not sides[0] else sides
    if not name and sides[0] and any(_has_unknown(side) for side in sides):
        return Relation(tuple(sides), tuple(operators))
    values = _read_all(rest)
    return Relation(tuple(sides), tuple(operators), re.sub(r"[\s«»{}]", "", name), values) if values else None


def _is_name(side: str) -> bool:
    """Whether a side has no number, as in ``x``, ``S_5``, ``f(2)``, ``m + n``, or has words."""
    plain = re.sub(r"\\(?:pi|sqrt|frac|ln|log|infty)(?![A-Za-z])", "1", _ARGUMENT.sub("", side))
    return bool(re.search("[A-Za-z]", plain)) and (
        not re.search(r"\d", plain) or bool(re.search(r"«|(?<!\\)\b[A-Za-z]{3,}", plain))
    )


def _has_unknown(side: str) -> bool:
    return bool(re.search(r"(?<![A-Za-z\\«])[A-Za-df-hj-z](?![A-Za-z])|\\(?:alpha|beta|theta|lambda|mu|omega)", side))


def _quantity(text: str) -> Quantity:
    if re.search(r"[A-Za-z]{3,}\(|»\s?\(", text.replace("\\", " \\ ")) and not re.search(r"\\[a-z]+\s?\(", text):
        return Quantity(text, "", (text,))
    if letter := re.fullmatch(r"\(?\s*«?([A-Za-z])»?\s*\)?", text):
        return Quantity(letter[1], letter[1], ())
    words = [_canonical(match) for match in _WORDS.finditer(text)]
    joined = re.sub(
        r"\b(square|cubic) (\w+)", lambda match: f"{match[2]}^{2 if match[1] == 'square' else 3}", " ".join(words)
    )
    formula = _WORDS.sub(" ", text)
    sign = "%" if "%" in formula else "°" if "°" in formula and not _TRIGONOMETRY.search(formula) else ""
    if not sign and "°" in formula:
        formula = re.sub(r"(\d+(?:\.\d+)?|\.\d+)\s*°", r"\\frac{\1\\pi}{180}", formula)
    formula = re.sub(r"^[\s.,:()/-]*\s(?=[-+]?[\d.({\\A-Za-z])|[\s.,:/*(]+$", "", re.sub("[%°]", "", formula)).strip()
    if words and not re.search(r"[\dA-Za-z]", formula):
        formula = ""
    return Quantity(text, formula, tuple(word for word in joined.split() if word not in _IDLE), sign)


def _canonical(match: re.Match[str]) -> str:
    """A word in lower case, a unit by its symbol."""
    word: str = (match[1] or match[2] or match[3] or "").replace(".", "")
    metric = _METRIC.fullmatch(word.casefold())
    if metric is not None:
        *prefix, base = [str(group) for group in metric.groups() if group]
        word = (prefix[0][0] if prefix else "") + base
    else:
        word = word.casefold() if len(word) > 2 else word
        singular = re.sub(r"(?<=..[^s])s\Z", "", word)
        word = _ALIASES.get(word) or _ALIASES.get(singular) or singular
    divisor = re.sub(r"\W", "", match[5] or "")
    return word + (f"^{match[4]}" if match[4] else "") + (f" /{divisor}" if divisor else "")


# Comparison


def same(answer: Node | None, right: Node | None, wide: bool = True, tolerance: Fraction | None = None) -> bool:
    """Whether the answer equals the right one. ``wide`` allows formulas with more than numbers and operators; they may
    take very long."""
    if answer is None or right is None:
        return False
    if isinstance(answer, Quantity) and isinstance(right, Quantity):
        return _same_quantity(answer, right, wide, tolerance)
    if isinstance(answer, Relation) and isinstance(right, Relation):
        return _same_relation(answer, right, wide)
    if isinstance(answer, Relation) and answer.values:
        return _is_consistent(answer, wide) and any(same(value, right, wide, tolerance) for value in answer.values)
    if isinstance(right, Relation) and right.values and not re.search(r"[-+*/^]|\\frac", right.name):
        return any(same(answer, value, wide, tolerance) for value in right.values)
    if isinstance(answer, Group) and isinstance(right, Group) and _same_group(answer, right, wide):
        return True
    if not wide:
        return False
    found, wanted = _solutions(answer), _solutions(right)
    if found is not None and wanted is not None:
        return _same_set(found, wanted)
    for group, other, turned in ((answer, right, False), (right, answer, True)):
        if isinstance(group, Group) and group.brackets == "{}" and len(group.items) == 1 and _solutions(other) is None:
            return same(other, group.items[0]) if turned else same(group.items[0], other)
    return False


def _is_consistent(answer: Relation, wide: bool) -> bool:
    """Whether the values of a chain are equal; decimals nearly. ``20 = 18`` is not."""
    for left, right in itertools.pairwise(answer.values):
        if isinstance(left, Quantity) and isinstance(right, Quantity):
            if _has_unknown(left.formula) != _has_unknown(right.formula):
                return False  # x = 20 y = 18
            if not (wide or (_NUMBERS_ONLY.fullmatch(left.formula) and _NUMBERS_ONLY.fullmatch(right.formula))):
                continue
            rough = r"\approx" in answer.operators or "." in left.text + right.text
            if not _same_formula(left.formula, right.formula, wide, Fraction(1, 20) if rough else None):
                return False
    return True


def _same_group(answer: Group, right: Group, wide: bool) -> bool:
    """A tuple's items are compared in their order, those of sets and lists in any. Only a set may repeat an item."""
    if len(answer.items) > 1 and any(
        all(isinstance(each, Relation) and each.name for each in one.items) for one in (answer, right)
    ):
        return _same_assignments(answer, right, wide)
    ordered = ("()", "[]", "[)", "(]")
    first, second = answer.items, right.items
    if answer.brackets in ordered or right.brackets in ordered:
        one, other = answer.brackets, right.brackets
        alike = one == other or (len(first) > 2 and {one, other} <= {"()", "[]"}) or ({one, other} in ({"()", ","},))
        return alike and len(first) == len(second) and all(same(a, b, wide) for a, b in zip(first, second, strict=True))
    if answer.brackets == "{}":
        first = _distinct(first, wide)
    if right.brackets == "{}":
        second = _distinct(second, wide)
    left = list(second)
    for item in first:
        place = next((i for i, each in enumerate(left) if same(item, each, wide)), None)
        if place is None:
            return False
        del left[place]
    return not left


def _distinct(items: tuple[Node, ...], wide: bool) -> tuple[Node, ...]:
    return tuple(each for i, each in enumerate(items) if not any(same(each, one, wide) for one in items[:i]))


def _same_assignments(answer: Group, right: Group, wide: bool) -> bool:
    """``x = 2, y = 3`` equals itself in any order, and ``(2, 3)``: the values in the order of their names."""
    sides: list[list[Node]] = []
    names = []
    for one in (answer, right):
        named = [each for each in one.items if isinstance(each, Relation) and each.values]
        if len(named) == len(one.items):
            named.sort(key=lambda each: each.name.casefold())
            names.append([each.name.casefold() for each in named])
        sides.append([each.values[-1] for each in named] if len(named) == len(one.items) else list(one.items))
    if any(one.brackets == "{}" or one.brackets[:1] == "[" for one in (answer, right)):
        return False
    return (
        (len(names) < 2 or names[0] == names[1])
        and len(sides[0]) == len(sides[1])
        and all(same(a, b, wide) for a, b in zip(*sides, strict=True))
    )


def _same_relation(answer: Relation, right: Relation, wide: bool) -> bool:
    written = [([side.replace(" ", "") for side in each.sides], each.operators) for each in (answer, right)]
    if written[0] == written[1]:
        return True
    if answer.values and right.values:
        one, other = answer.name.casefold(), right.name.casefold()
        if one == other or not one or not other or re.search(r"(?<![\\a-z])[a-z]{3,}", one + " " + other):
            return _is_consistent(answer, wide) and any(same(value, right.values[-1], wide) for value in answer.values)
    if not wide:
        return False
    found, wanted = _solutions(answer), _solutions(right)
    if found is not None and wanted is not None:
        return _symbols(answer) == _symbols(right) and _same_set(found, wanted)
    if len(answer.operators) != 1 or len(right.operators) != 1:
        return False
    turn = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
    differences = [parsed(f"({each.sides[0]})-({each.sides[1]})") for each in (answer, right)]
    ratio = ratio_of(*differences)
    same_way, other_way = answer.operators == right.operators, turn.get(answer.operators[0]) == right.operators[0]
    is_equation = answer.operators[0] in ("=", r"\ne", r"\equiv") and same_way
    return ratio is not None and (is_equation or (ratio > 0 and same_way) or (ratio < 0 and other_way))


def _words_agree(answer: Quantity, right: Quantity) -> bool:
    found, wanted = set(answer.words), set(right.words)
    changed = [set(CHANGES.findall(" ".join(words))) for words in (found, wanted)]
    points = set("NSEW" if right.sign == "°" else "")
    chosen = [{word for word in words if CHOICES.fullmatch(word) or word in points} for words in (found, wanted)]
    if changed[0] != changed[1] or chosen[1] - found:
        return False
    return not wanted or not found or (found <= wanted or (wanted <= found and not chosen[0] - wanted))


def _same_quantity(answer: Quantity, right: Quantity, wide: bool, tolerance: Fraction | None) -> bool:
    if re.sub(r"\s", "", answer.text) == re.sub(r"\s", "", right.text):
        return True
    if not answer.formula or not right.formula:
        one, other = (re.sub(r"[^a-z0-9]", "", each.text.casefold()) for each in (answer, right))
        return not answer.formula and not right.formula and (one == other != "" or answer.words == right.words != ())
    if not _words_agree(answer, right):
        return False
    readings = [[each.formula] for each in (answer, right)]
    if answer.sign != right.sign:
        for each, own in zip((answer, right), readings, strict=True):
            factor = {"%": r"\frac{%s}{100}", "°": r"\frac{(%s)\pi}{180}"}.get(each.sign)
            own += [factor % each.formula] if factor else []
    return any(_same_formula(one, other, wide, tolerance) for one, other in itertools.product(*readings))


_NUMBERS_ONLY = re.compile(r"(?:[\d.+\-*/^(){}\s!]|\\(?:frac|over|sqrt|times|cdot|div)(?![A-Za-z]))+")
_ADJACENT = re.compile(r"(?<![\d_^{])\d+\.?\s+[\d.]|[-+*/^]\s*\Z|\\[lc]?dots|\.\.\.")


def _same_formula(answer: str, right: str, wide: bool, tolerance: Fraction | None = None) -> bool:
    found, wanted = decimal(answer), decimal(right)
    is_integer = re.fullmatch(r"[-+]?\d+(?:\.0*)?", right)
    if tolerance is None and re.search(r"\.\d", f"{answer} {right}") and not is_integer:
        tolerance = _TOLERANCE
    if found is not None and wanted is not None:
        return found == wanted or (tolerance is not None and abs(found - wanted) <= tolerance * abs(wanted))
    if _ADJACENT.search(answer) or _ADJACENT.search(right) or not (wide or _NUMBERS_ONLY.fullmatch(answer)):
        return False
    one, other = parsed(answer), parsed(right)
    return one is not None and other is not None and same_value(one, other, tolerance)


# Sets


def _symbols(node: Node) -> set[str]:
    """The unknowns of an inequality."""
    sides = node.sides if isinstance(node, Relation) else ()
    return {side for side in sides if re.fullmatch(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?", side)}


def _solutions(node: Node) -> Any:
    """The set of real numbers that an interval, a solved inequality, a union or a list of alternatives describes, as a
    sympy set; None for anything else."""
    import sympy

    if isinstance(node, Quantity):
        return sympy.EmptySet if r"\emptyset" in node.text else None
    if isinstance(node, Group) and node.brackets in ("()", "[]", "[)", "(]"):
        ends = _ends(node.items)
        if ends is None or sympy.Lt(*ends) is not sympy.true:
            return None
        return sympy.Interval(*ends, node.brackets[0] == "(", node.brackets[1] == ")")
    if isinstance(node, Group):
        if node.brackets == "{}":
            values = _ends(node.items, len(node.items))
            return values and sympy.FiniteSet(*values)
        parts = [_solutions(item) for item in node.items]
        if None in parts or len(set().union(*map(_symbols, node.items))) != 1:
            return None
        if node.brackets == ",":
            common = sympy.Intersection(*parts) if all(isinstance(each, Relation) for each in node.items) else None
            return None if common is sympy.EmptySet else common
        union = sympy.Union(*parts)
        return union if len(_pieces(union)) == sum(len(_pieces(part)) for part in parts) else None  # x > 3 or x > 4
    if isinstance(node, SetOperation):
        found = [_solutions(operand) for operand in node.operands]
        if None in found:
            return None
        result = found[0]
        for operator, operand in zip(node.operators, found[1:], strict=True):
            both = {r"\cup": sympy.Union, r"\cap": sympy.Intersection, r"\setminus": sympy.Complement}
            result = both[operator](result, operand)
        return result
    if node.values and node.operators == (r"\in",):
        return _solutions(node.values[0])
    symbols = _symbols(node)
    if len(symbols) != 1 or len(node.sides) > 3 or sum(side in symbols for side in node.sides) != 1:
        return None
    if len(node.sides) == 3 and node.sides[1] not in symbols:
        return None
    result = sympy.Reals
    for left, operator, right in zip(node.sides, node.operators, node.sides[1:], strict=False):
        value = _ends([_quantity(left if right in symbols else right)], 1)
        if not value or operator not in ("<", ">", r"\le", r"\ge", r"\ne"):
            return None
        if operator == r"\ne":
            result -= sympy.FiniteSet(*value)
            continue
        is_below = (operator in ("<", r"\le")) == (left in symbols)
        low, high = (-sympy.oo, value[0]) if is_below else (value[0], sympy.oo)
        result = result.intersect(sympy.Interval(low, high, "\\" not in operator, "\\" not in operator))
    return result


def _ends(items: Sequence[Node], count: int = 2) -> list[Any] | None:
    values = [parsed(each.formula) if isinstance(each, Quantity) and each.formula else None for each in items]
    is_real = all(each is not None and each.is_extended_real and not each.free_symbols for each in values)
    return values if len(values) == count and is_real else None


def _pieces(found: Any) -> tuple[Any, ...]:
    import sympy

    return found.args if isinstance(found, sympy.Union) else (found,)


def _outline(piece: Any) -> tuple[Any, list[Any]]:
    """What two pieces must have in common exactly, and their points."""
    import sympy

    if isinstance(piece, sympy.Interval):
        return (piece.left_open, piece.right_open), [piece.inf, piece.sup]
    return (len(piece), sorted(piece.args, key=float)) if isinstance(piece, sympy.FiniteSet) else (piece, [])


def _same_set(found: Any, wanted: Any) -> bool:
    if found == wanted:
        return True
    pairs = [sorted(_pieces(each), key=lambda piece: float(piece.inf)) for each in (found, wanted) if not each.is_empty]
    if len(pairs) != 2 or len(pairs[0]) != len(pairs[1]):
        return False
    outlines = [(_outline(one), _outline(other)) for one, other in zip(*pairs, strict=True)]
    return all(
        kind == other_kind and all(same_value(one, other, None) for one, other in zip(points, others, strict=True))
        for (kind, points), (other_kind, others) in outlines
    )
