r"""The structure of an answer.

``structure`` parses the tokens of an answer to a value of one of three types: a ``Quantity``, which is a formula with
words, ``Items`` (list, tuple, set, interval, alternatives), or a ``Relation``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from areal.dataclasses import dataclass
from areal.reward.formulas import Formula, NotAFormula, names_in
from areal.reward.notation import Token, render, tokens
from areal.reward.units import measure, words_in

_FILLERS = words_in(
    """the a an of is are was has have answer final approximate approximately approx about total unit each on at exact
    its exactly solution in simplified therefore thus"""
)
_QUANTIFIERS = words_in(
    """integer natural number real constant any all every each some an arbitrary positive nonnegative negative is are be
    a for where with"""
)
_PHRASES = {
    r"none|(?:(?:there (?:are|is|exists?)|(?:(?:the|this) \w+|it) (?:has|have)) )?"
    r"no (?:\w+ )?(?:solution|value|number|root|integer|function|pair|triple)(?: exists?)?": r"\emptyset",
    "(?:the )?empty set": r"\emptyset",
    r"(?:the set of )?all (?:the )?reals?(?: number)?(?: [a-z])?": r"(-\infty,\infty)",
    r"(?:the \w+ )?(?:dne|does? not exist|not defined)": r"\text{undefined}",
    r"neither \w\w+ nor \w\w+": r"\text{neither}",
    r"(?:there (?:is|are) )?(?:infinite(?: solution)?|infinitely many(?: \w+){0,2}"
    r"|(?:an )?infinite number(?: of(?: \w+){1,2})?)": r"\infty",
    r"(?:the \w+ )?does? not converge": r"\text{diverges}",
    "(?:it is )?not possible": r"\text{impossible}",
    r"(?:the set of )?all (?:the )?integer(?: [a-z])?": r"\mathbb{Z}",
    "(?:an? )?half": r"\frac{1}{2}",
}


@dataclass(frozen=True)
class Quantity:
    """A formula with words beside it. Without a formula, the text is only words. ``text`` is all of it."""

    text: str
    formula: Formula
    words: tuple[str, ...] = ()
    sign: str = ""  # % or °


@dataclass(frozen=True)
class Items:
    """Items in ``()``, ``[]``, ``[)``, ``(]`` or ``{}``. A bare list has ``,`` or ``and``, alternatives have ``or``, a
    ratio has ``:``, sets with an operator have ``∪``, ``∩`` or ``∖``, and numbers under a condition have ``|``."""

    brackets: str
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Relation:
    """Sides of an equation, an inequality or a chain of them. ``values`` are the sides that a name equals."""

    sides: tuple[Formula, ...]
    operators: tuple[str, ...]
    name: str = ""
    values: tuple[Node, ...] = ()


Node = Quantity | Items | Relation

LISTS = (",", "and")
_PAIRS = {"(": ")", "[": "]", "{": "}", r"\{": r"\}"}
_CLOSING = frozenset(_PAIRS.values())
_RELATIONS = words_in("= < > ≤ ≥ ≠ ≈ ∈ ≡ ∼ cong")
_REVERSED = {">": "<", "≥": "≤"}
_BOTH = frozenset("±∓")
_SIGNS = ({"±": "+", "∓": "-"}, {"±": "-", "∓": "+"})
_SCALAR = words_in("{ } - * / frac sqrt")
_DEEPEST, _MOST_ITEMS = 12, 64


@lru_cache(maxsize=1024)
def structure(found: Formula) -> Node | None:
    r"""Return the structure of an answer; None if it is too deep, or contradicts itself as ``[1, \infty]`` does."""
    plain = re.sub(r"[{}.]", "", render(found)).strip().casefold()
    found = next((tokens(to) for pattern, to in _PHRASES.items() if re.fullmatch(pattern, plain)), found)
    levels = _levels(found)
    if not found or levels[-1] != 0 or max(levels) > _DEEPEST:
        return None
    try:
        node = _read(_without_domain(found))
    except NotAFormula:
        return None
    is_one = isinstance(node, Items) and node.brackets == "{}" and len(node.items) == 1 and "∅" not in texts_of(found)
    return node.items[0] if is_one and isinstance(node, Items) else node


def texts_of(found: Formula) -> list[str]:
    return [each.text for each in found]


def has_kind(found: Formula, kinds: str) -> bool:
    return any(each.kind in kinds for each in found)


def _levels(found: Formula) -> list[int]:
    """Return the number of brackets around each token, and around the end."""
    levels, depth = [], 0
    for text in texts_of(found):
        depth -= text in _CLOSING
        levels.append(depth)
        depth += text in _PAIRS
    return [*levels, depth]


def _split(found: Formula, *separators: str) -> tuple[list[Formula], list[str]]:
    """Return the parts between the separators outside brackets, and the separators."""
    levels = _levels(found)
    at = [i for i, each in enumerate(found) if each.kind == "o" and each.text in separators and levels[i] == 0]
    parts = [found[start + 1 : end] for start, end in itertools.pairwise((-1, *at, len(found)))]
    return parts, [found[i].text for i in at]


def _outer_brackets(found: Formula) -> tuple[str, Formula]:
    """Return the brackets around a formula, and the formula between them; without brackets, none and the whole
    formula."""
    if len(found) > 1 and found[0].text in _PAIRS and found[-1].text in _CLOSING and all(_levels(found)[1:-2]):
        return (found[0].text + found[-1].text).replace("\\", ""), found[1:-1]
    return "", found


def _without_domain(found: Formula) -> Formula:
    r"""Return the formula without a condition at its end that only gives the values of a letter: ``, k \in
    \mathbb{Z}``, ``for any c``."""
    texts, levels = texts_of(found), _levels(found)
    for i in range(1, len(found)):
        is_start = levels[i] == 0 and texts[i] in (",", "(", "for", "where", "with") and texts[i - 1] not in "=<>≤≥"
        is_start &= not re.match(r",? ?\( \S+ ,", " ".join(texts[i : i + 4]))  # the point (n, n)
        if not is_start or not has_kind(found[:i], "ns"):
            continue
        rest = [each for each in found[i:] if each.text not in ("{", "}", "(", ")", ",", "and")]
        body = [each for each in rest if each.kind == "s" or each.text.casefold() not in _QUANTIFIERS]
        names = {each.text for each in body if each.kind == "s" and each.text.islower()}
        condition = " ".join(each.text for each in body if each.text not in names)
        domains = r"∈ (?:- ∞ ∞|mathbb \w)[^<]*" if names else "-"
        domains += r"|> 0|≥ [01]" if names <= set("kmn") else ""
        domains += "" if set("<>≤≥≠") & {*texts[:i]} else r"|≠.*"
        domains += "|" if len(body) < len(rest) else ""
        if names <= {*texts[:i]} and re.fullmatch(domains, condition):
            return found[:i]
    return found


def _read(found: Formula) -> Node:
    if not found:
        raise NotAFormula
    if total := _sum_of(found):
        return total
    start = max(i for i, each in enumerate(_levels(found[:-1])) if not each) if found[-1].text == ")" else 0
    factor, items = found[:start], _split(found[start + 1 : -1], ",")[0]
    is_scalar = has_kind(factor, "n") and all(each.kind == "n" or each.text in _SCALAR for each in factor)
    if is_scalar and len(items) > 1:  # 1/3 (1, 2)
        return _group("()", [(*factor, Token("o", "("), *each, Token("o", ")")) for each in items])
    brackets, inner = _outer_brackets(found)
    if found[0].text == "{" and brackets and _condition(inner) is None:
        return _read(inner)
    parts, separators = _split(found, "or")
    if separators:
        return _group("or", [each[:-1] if each[-1:] and each[-1].text == "," else each for each in parts])
    parts, separators = _split(found, ";")
    if separators and {",", "="} <= set(texts_of(found)):  # x = 1, y = 2; x = 3, y = 4
        return _group(",", parts)
    parts, separators = _split(found, ",", ";", "and")
    is_list = set(separators) != {"and"} or (parts[0][-1:] and parts[0][-1].text == ")") or not has_kind(found, "n")
    if set(separators) == {","} and has_kind(parts[0], "n") and not any(has_kind(part, "nsfmvo") for part in parts[1:]):
        return quantity(tuple(each for each in found if each.text != ","))  # 5 N, to the left
    if separators and (is_list or all(has_kind(each, "snfm") or _RELATIONS & {*texts_of(each)} for each in parts)):
        is_joined = "and" in separators
        return _group("and" if is_joined else ",", [each for each in parts if each] if is_joined else parts)
    signs = _BOTH & set(texts_of(found))
    if brackets and not (brackets == "()" and "," in texts_of(inner) and len(signs) == 1):
        return _bracketed(brackets, inner)
    parts, operators = _split(found, "∪", "∩", "∖")
    if operators and not _split(found, "=")[1]:
        return _group(operators[-1], [found[: -len(parts[-1]) - 1], parts[-1]])
    parts, operators = _split(found, *_RELATIONS)
    if operators and any(parts) and not (signs and operators == ["="]):
        return _relation(parts, operators)
    if signs:
        return _both_signs(found)
    parts, separators = _split(found, ":")
    if separators and all(has_kind(each, "n") and not has_kind(each, "w") for each in parts):
        return _group(":", parts)
    is_named = found[0].kind == "s" and found[0].text.isupper() and "," in texts_of(found)
    if is_named and _outer_brackets(found[1:])[0] == "()":  # the point A(1,2)
        return _relation([found[:1], found[1:]], ["="])
    return quantity(found)


def _both_signs(found: Formula) -> Items:
    """Return the values for both signs; of a point, the signs of each coordinate are its own."""
    texts = texts_of(found)
    start = min(texts.index(each) for each in _BOTH & {*texts})
    end = next((i for i, text in enumerate(texts) if i > start and text == ","), len(found))
    changed = ([each._replace(text=signs.get(each.text, each.text)) for each in found[:end]] for signs in _SIGNS)
    return _group(",", [(*each, *found[end:]) for each in changed])


def _group(brackets: str, parts: Sequence[Formula]) -> Items:
    nodes: list[Node] = []
    for part in parts:
        node = _read(part)
        last = nodes[-1] if nodes else None
        if isinstance(last, Relation) and last.operators == ("≠",) and isinstance(node, Quantity):
            node = Relation((last.sides[0], part), ("≠",))  # x ≠ 1, 2
        is_list = isinstance(node, Items) and node.brackets in LISTS and brackets in ("{}", *LISTS, "or")
        items = node.items if isinstance(node, Items) and is_list else ()  # of 0, ±2, and of 1, 2 or 3
        is_one_name = len({each.name for each in items if isinstance(each, Relation)}) == 1  # x = 1, 2
        is_flat = brackets == "{}" or bool(_BOTH & {*texts_of(part)})
        is_flat |= brackets == "or" and all(isinstance(each, Quantity) or is_one_name for each in items[1:])
        nodes += items if items[1:] and is_flat else [node]
        if len(nodes) > _MOST_ITEMS:
            raise NotAFormula
    return Items(brackets, tuple(nodes))


def _condition(inner: Formula) -> Formula | None:
    r"""Return the condition of ``\{x \mid x > 2\}`` and of ``\{x \in \mathbb{R} : x > 2\}``."""
    head = _split(inner, "|", ":")[0][0]
    is_head = head and head[0].kind == "s" and "".join(texts_of(head[1:])) in ("", "∈(-∞,∞)") and len(head) < len(inner)
    return inner[len(head) + 1 :] if is_head else None


def _bracketed(brackets: str, inner: Formula) -> Node:
    if brackets == "{}" and (condition := _condition(inner)) is not None:
        if inner[0].text not in texts_of(condition):
            raise NotAFormula
        node = _read(condition)
        return node if isinstance(node, Relation) and node.values else Items("|", (node,))
    parts, _ = _split(inner, ",", ";")
    if len(parts) == 1 and brackets != "{}":
        return _read(inner)
    if (brackets[0] == "[" and "∞" in texts_of(parts[0])) or (brackets[1] == "]" and "∞" in texts_of(parts[-1])):
        raise NotAFormula
    return _group(brackets, parts if parts != [()] else [])


def _relation(sides: list[Formula], operators: list[str]) -> Node:
    if any(each not in "=≈∈≡" for each in operators):
        sides = [side[texts_of(side).index("that") + 1 if "that" in texts_of(side) else 0 :] for side in sides]
        sides = [tuple(each for each in side if each.kind != "w" or each.text not in _QUANTIFIERS) for side in sides]
        if _REVERSED.keys() >= set(operators):
            sides, operators = sides[::-1], [_REVERSED[each] for each in reversed(operators)]
        if operators == ["≠"] and _BOTH & set(texts_of(sides[1])):
            values = [each.formula for each in _both_signs(sides[1]).items if isinstance(each, Quantity)]
            return Items(",", tuple(Relation((sides[0], each), ("≠",)) for each in values))
        return Relation(tuple(sides), tuple(operators))
    if _is_name(sides[-1]) and not _is_name(sides[0]):
        sides = sides[::-1]  # 18 = x
    are_names = all(_is_name(each) and len(each) == 1 for each in sides[:-1]) and not _is_name(sides[-1])
    if len(sides) > 2 and are_names and set(operators) == {"="}:  # x = y = 1
        return Items(",", tuple(_relation([each, sides[-1]], ["="]) for each in sides[:-1]))
    is_chain = len(sides) > 2 and has_kind(sides[-1], "nf") and not names_in(*sides[1:])  # a/(1-r) = 3/(1-1/4) = 4
    is_named = not sides[0] or _is_name(sides[0]) or is_chain
    if not is_named and names_in(*sides):
        return Relation(tuple(sides), tuple(operators))
    name = "".join(each for each in texts_of(sides[0]) if each not in "{}") if is_named else ""
    return Relation(tuple(sides), tuple(operators), name, tuple(_read(each) for each in sides[is_named:]))


def _is_name(side: Formula) -> bool:
    """Return whether a side has no number, as in ``x``, ``S_5``, ``f(2)``, ``m + n``, or has words."""
    texts = texts_of(side)
    is_call = len(side) > 3 and side[0].kind == "s" and (texts[1] == "(" and texts[-1] == ")")
    is_call |= texts[:1] in (["sum"], ["int"], ["lim"])
    is_inverse = texts[1:6] == ["^", "{", "-", "1", "}"]
    is_function = bool(side) and side[0].kind == "f" and names_in(side) and not {"+", "-"} & set(texts)  # sin 2x
    is_value = (has_kind(side, "nf") and not is_function) or {"sqrt", "∞", "pi"} & set(texts)
    is_described = any(each.kind == "w" and not measure(each.text) and each.text[:3] != "mod" for each in side)
    return is_described if is_value and not (is_call or is_inverse or "…" in texts) else has_kind(side, "sw")


def quantity(found: Formula) -> Quantity:
    text = render(found)
    ignored = _brackets_of_words(found)
    for i, (one, other) in enumerate(itertools.pairwise(found)):
        if one.kind == "w" and other.text == "(" and not other.gap and i + 1 not in ignored:
            return Quantity(text, (), (text,))  # floor(18)
    words, formula, is_below = list[str](), list[Token](), False
    kept = [each for i, each in enumerate(found) if i not in ignored]
    for last, token, following in zip((None, *kept), kept, (*kept[1:], None), strict=False):
        is_beside = (last and last.kind == "w") or (following and following.kind == "w")
        if token.kind == "w":
            name, _, power = token.text.partition("^")
            sign = "/" if is_below != power.startswith("-") else ""
            power = power.lstrip("-")
            if name not in _FILLERS or (name == "in" and (sign or power or text.count(" ") == 1)):
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
    sign = next((each for each in "%°" if each in texts_of(tuple(formula)) and not has_kind(tuple(formula), "f")), "")
    joined = re.sub(r"\b(square|cubic) (\w+)", lambda m: f"{m[2]}^{2 if m[1] == 'square' else 3}", " ".join(words))
    return Quantity(text, tuple(formula), tuple(joined.split()), sign)


def _brackets_of_words(found: Formula) -> set[int]:
    """Return the indices of the brackets that enclose only words, or nothing."""
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
    """Return the sum of amounts, ``1 hour 30 minutes``, in the last unit; None without several of one dimension."""
    kept = [each for each in found if each.text not in (",", "and", "{", "}")]
    numbers, units = kept[::2], kept[1::2]
    if len(units) < 2 or len(numbers) != len(units) or {each.kind for each in numbers} != {"n"}:
        return None
    measures = [each for unit in units if unit.kind == "w" and (each := measure(unit.text))]
    sizes = [size for size, _ in measures]
    if len({bases for _, bases in measures}) != 1 or len(sizes) < len(units) or sizes != sorted(set(sizes))[::-1]:
        return None
    total = sum(Fraction(each.text) * size for each, size in zip(numbers, sizes, strict=True))
    unit = 0 if units[0].text == "dollar" else -1
    total /= sizes[unit]
    return Quantity(render(found), tokens(f"{total.numerator}/{total.denominator}"), (units[unit].text,))
