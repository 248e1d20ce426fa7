"""Names, symbols and sizes of units, and the measure that several of them make."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import cache

_TABLE = """
m meter metre
g gram
s second sec
L liter litre = 1/1000 m^3
min minute = 60 s
h hour hr = 3600 s
day = 24 h
week = 7 day
in inche inch = 127/5000 m
ft foot feet = 12 in
yd yard = 3 ft
mi mile = 5280 ft
mph = 1 mi /h
oz ounce
lb pound = 16 oz
N newton = 1000 g m /s^2
J joule = 1 N m
W watt = 1 J /s
Pa pascal = 1 N /m^2
Hz hertz = 1 /s
V volt = 1 W /A
A ampere amp
mol mole
dollar
cent = 1/100 dollar
"""
_OTHER_NAMES = """sq=square ml=mL losse=loss jan=january feb=february mar=march apr=april jun=june jul=july aug=august
    sep=september sept=september oct=october nov=november dec=december mon=monday tue=tuesday wed=wednesday thu=thursday
    fri=friday sat=saturday sun=sunday"""
_PREFIXES = {
    "kilo": (3, "k"),
    "centi": (-2, "c"),
    "milli": (-3, "m"),
    "mega": (6, "M"),
    "micro": (-6, "u"),
    "nano": (-9, "n"),
}
_LINES = [line.partition("=") for line in _TABLE.strip().splitlines()]
_SIZES = {line[0].split()[0]: line[2].split() for line in _LINES}
_SYMBOLS = {name: line[0].split()[0] for line in _LINES for name in line[0].split()}
_SYMBOLS |= dict(re.findall(r"(\w+)=(\w+)", _OTHER_NAMES))
_METRIC = re.compile(
    rf"({'|'.join(_PREFIXES)})(meter|metre|gram|liter|litre|second|newton|joule|watt|pascal|hertz|volt)"
)
_UNIT = re.compile(r"(/?)([A-Za-z]+)(?:\^(-?\d))?")


def symbol_of(word: str) -> str:
    """The symbol of a unit, the whole name of a month, and other words in lower case and the singular."""
    word = word.replace(".", "")
    word = word.casefold() if len(word) > 2 else word
    singular = re.sub(r"(?<=..[^s])s\Z", "", word)
    if len(word) > 2 and measure(word[:-1]) and word.endswith("s"):
        return _SYMBOLS.get(word[:-1], word[:-1])
    if metric := _METRIC.fullmatch(singular):
        return _PREFIXES[metric[1]][1] + _SYMBOLS[metric[2]]
    return _SYMBOLS.get(word) or _SYMBOLS.get(singular) or singular


@cache
def measure(*words: str) -> tuple[Fraction, frozenset[tuple[str, int]]] | None:
    """The size and the dimensions of a product such as ``km``, ``/h``; None if a word is no unit."""
    size, dimensions = Fraction(1), dict[str, int]()
    for word in words:
        unit = _UNIT.fullmatch(word)
        found = _measure_of(unit[2]) if unit else None
        if unit is None or found is None:
            return None
        power = int(unit[3] or 1) * (-1 if unit[1] else 1)
        size *= found[0] ** power
        for base, exponent in found[1]:
            dimensions[base] = dimensions.get(base, 0) + exponent * power
    return (size, frozenset(each for each in dimensions.items() if each[1])) if words else None


def _measure_of(symbol: str) -> tuple[Fraction, frozenset[tuple[str, int]]] | None:
    if symbol in _SIZES:
        number, *made_of = _SIZES[symbol] or ("1",)
        base = measure(*made_of)
        return (Fraction(number) * base[0], base[1]) if base else (Fraction(number), frozenset({(symbol, 1)}))
    for exponent, prefix in _PREFIXES.values():
        if symbol.startswith(prefix) and symbol[1:] in ("m", "g", "s", "L", "N", "J", "W", "Pa", "Hz", "V", "A", "mol"):
            base = measure(symbol[1:])
            return (base[0] * Fraction(10) ** exponent, base[1]) if base else None
    return None
