"""Names, symbols and sizes of units, and the measure that several of them make."""

from __future__ import annotations

import re
from fractions import Fraction

Measure = tuple[Fraction, frozenset[tuple[str, int]]]  # the size, and the powers of basic units

_TABLE = """
m* meter metre
g* gram
s* second sec
A* ampere amp
mol* mole
dollar
oz ounce
cent = 1/100 dollar
L* liter litre = 1/1000 m^3
N* newton = 1000 g m /s^2
J* joule = 1 N m
W* watt = 1 J /s
Pa* pascal = 1 N /m^2
Hz* hertz = 1 /s
V* volt = 1 W /A
C* coulomb = 1 A s
Omega* ohm = 1 V /A
F* farad = 1 C /V
T* tesla = 1 N /A /m
min minute = 60 s
h hour hr = 60 min
day = 24 h
week = 7 day
in inche inch = 127/5000 m
ft foot feet = 12 in
yd yard = 3 ft
mi mile = 1760 yd
mph = 1 mi /h
lb pound = 16 oz
"""
_OTHER_NAMES = """sq=square ml=mL losse=loss jan=january feb=february mar=march apr=april jun=june jul=july aug=august
    sep=september sept=september oct=october nov=november dec=december mon=monday tue=tuesday wed=wednesday thu=thursday
    fri=friday sat=saturday sun=sunday"""
_PREFIXES = (
    ("k", "kilo", 3),
    ("c", "centi", -2),
    ("m", "milli", -3),
    ("M", "mega", 6),
    ("u", "micro", -6),
    ("n", "nano", -9),
)
_UNIT = re.compile(r"(/?)([A-Za-z]+)(?:\^(-?\d))?")
_SIZES: dict[str, Measure] = {}
_SYMBOLS = dict(re.findall(r"(\w+)=(\w+)", _OTHER_NAMES))


def symbol_of(word: str) -> str:
    """The symbol of a unit, the whole name of a month, and other words in lower case and the singular."""
    word = word.replace(".", "")
    if len(word) < 3:
        return _SYMBOLS.get(word, word)
    lower, singular = word.casefold(), re.sub(r"(?<=..[^s])s\Z", "", word.casefold())
    known = (_SYMBOLS.get(each) for each in (word, lower, singular, word.removesuffix("s")))
    return next(filter(None, known), singular)


def measure(*words: str) -> Measure | None:
    """The measure of a product such as ``km``, ``/h``; None without words, or if one is no unit."""
    size, powers = Fraction(1), dict[str, int]()
    for word in words:
        unit = _UNIT.fullmatch(word)
        if unit is None or unit[2] not in _SIZES:
            return None
        factor, bases = _SIZES[unit[2]]
        power = int(unit[3] or 1) * (-1 if unit[1] else 1)
        size *= factor**power
        for base, exponent in bases:
            powers[base] = powers.get(base, 0) + exponent * power
    return (size, frozenset(each for each in powers.items() if each[1])) if words else None


def _define(line: str) -> None:
    names, _, definition = line.partition("=")
    (symbol, *others), (number, *made_of) = names.split(), definition.split() or ("1",)
    size, bases = measure(*made_of) or (Fraction(1), frozenset({(symbol.rstrip("*"), 1)}))
    for short, prefix, exponent in (("", "", 0), *(_PREFIXES if "*" in symbol else ())):
        unit = short + symbol.rstrip("*")
        _SIZES[unit] = (size * Fraction(number) * Fraction(10) ** exponent, bases)
        _SYMBOLS.update(dict.fromkeys((unit, *(prefix + other for other in others)), unit))


for _line in _TABLE.strip().splitlines():
    _define(_line)
