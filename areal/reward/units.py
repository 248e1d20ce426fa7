"""Names, symbols and sizes of units, the measure that several of them make, and numbers in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

Measure = tuple[Fraction, frozenset[tuple[str, int]]]  # the size, and the powers of basic units

# A unit's symbol (with * where prefixes may be before it), its names, and what it is made of.
_TABLE = """m* meter metre 米; g* gram gm 克; s* second sec 秒 秒钟; A* ampere amp; K kelvin; mol* mole; dollar USD;
    euro EUR; 元; degC; degF; oz ounce; M = 1000 mol /m^3; mM = 1 mol /m^3; 千克 = 1 kg;
    千米 公里 = 1 km; 厘米 = 1 cm; 毫米 = 1 mm; cent = 1/100 dollar; L* liter litre l 升 = 1/1000 m^3;
    N* newton = 1000 g m /s^2; J* joule = 1 N m; W* watt = 1 J /s; Wh* = 3600 J; Pa* pascal = 1 N /m^2;
    Hz* hertz = 1 /s; V* volt = 1 W /A; C* coulomb = 1 A s; Omega* ohm = 1 V /A; F* farad = 1 C /V;
    T* tesla = 1 N /A /m; eV* = 1602176634/10000000000000000000000000000 J;
    min minute 分钟 分 = 60 s; h hour hr 小时 = 60 min; day 天 = 24 h; week = 7 day; month; year yr = 12 month;
    in inche inch = 127/5000 m; ft foot feet = 12 in; yd yard = 3 ft; mi mile = 1760 yd; mph = 1 mi /h;
    kph kmph = 1 km /h; angstrom = 1/10000000000 m; ton tonne 吨 = 1000 kg; lb pound = 16 oz"""
_OTHER_NAMES = """sq=square losse=loss AM=am PM=pm sept=september mon=monday tue=tuesday tues=tuesday wed=wednesday
    thu=thursday thur=thursday thurs=thursday fri=friday sat=saturday sun=sunday"""
MONTHS = re.findall(r"\w+", "january february march april may june july august september october november december")
_PREFIXES = "=0 k/kilo=3 c/centi=-2 m/milli=-3 M/mega=6 G/giga=9 u/micro=-6 n/nano=-9"
_UNIT = re.compile(r"(/?)([^\W\d_]+)(?:\^(-?\d))?")
_SIZES: dict[str, Measure] = {}
_SYMBOLS = dict(re.findall(r"(\w+)=(\w+)", _OTHER_NAMES)) | {month[:3]: month for month in MONTHS}


def words_in(text: str) -> frozenset[str]:
    return frozenset(text.split())


def symbol_of(word: str) -> str:
    """Return the symbol of a unit, the whole name of a month, and other words in lower case and the singular."""
    if len(word) < 3:
        return _SYMBOLS.get(word, word)
    lower, singular = word.casefold(), re.sub(r"(?<=..[^s])(?<!\bthi)s\Z", "", word.casefold())
    known = (_SYMBOLS.get(each) for each in (word, lower, singular, word.removesuffix("s")))
    return next(filter(None, known), word if word.isupper() else singular)


def is_unit(word: str) -> bool:
    return symbol_of(word) in _SIZES


def measure(*words: str) -> Measure | None:
    """Return the measure of a product such as ``km``, ``/h``; None without words, or if one is not a unit."""
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
    for prefix in _PREFIXES.split() if "*" in symbol else ("=0",):
        affix, _, exponent = prefix.partition("=")
        short, _, long = affix.partition("/")
        unit = short + symbol.rstrip("*")
        _SIZES[unit] = (size * Fraction(number) * Fraction(10) ** int(exponent), bases)
        _SYMBOLS.update(dict.fromkeys((unit, *(long + other for other in others)), unit))


for _line in _TABLE.split(";"):
    _define(_line)

SCALES = {"million": 10**6, "mil": 10**6, "mn": 10**6, "billion": 10**9, "bn": 10**9, "trillion": 10**12}
SCALES |= {"hundred": 100, "thousand": 1000, "lakh": 10**5, "crore": 10**7, "dozen": 12, "万": 10**4, "亿": 10**8}
_ONES = re.findall(
    r"\w+",
    """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen""",
)
_TENS = re.findall(r"\w+", "twenty thirty forty fifty sixty seventy eighty ninety")
NUMBERS = {name: i for i, name in enumerate(_ONES)} | {name: 10 * i for i, name in enumerate(_TENS, 2)}
_PARTS = re.findall(r"\w+", "half third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth")
PARTS = {name: i for i, name in enumerate(_PARTS, 2)} | {"quarter": 4, "hundredth": 100, "halve": 2}


def number_in_words(words: Sequence[str]) -> tuple[str, int]:
    """Return the formula for ``two hundred and five``, ``two fifths``, ``two and a half``, and the number of words."""
    total, below, last, i = 0, 0, "", 0
    for i, word in enumerate((*words, "")):
        if word in SCALES:
            below = (below or 1) * SCALES[word]
            total, below = (total, below) if word == "hundred" else (total + below, 0)
        elif word in NUMBERS and (last in SCALES or not last or (last in _TENS and 0 < NUMBERS[word] < 10)):
            below += NUMBERS[word]
        elif not (word == "and" and last in SCALES and words[i + 1 : i + 2] and words[i + 1] in NUMBERS):
            break
        last = word if word != "and" else last
    value, rest = str(total + below), [*words[i : i + 3], "", "", ""]
    if rest[0] in PARTS:
        return f"{value}/{PARTS[rest[0]]}", i + 1
    if rest[0] == "and" and rest[1] in ("a", "one") and rest[2] in PARTS:
        return f"({value}+1/{PARTS[rest[2]]})", i + 3
    return value, i
