r"""One notation for answers in LaTeX, Unicode and plain text.

``normal`` applies the lines of ``_TABLE``, ``pattern => replacement``, in their order. In a pattern, ``\>`` stands for
the end of a command, and ``{{name}}`` for a constant; a replacement ``@name`` is a function, other ``@`` are spaces.
Words of ``\text{}``, names such as ``\angle ABC`` and units stand between ``«»`` in the result, so that they are no
products of letters.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable

LONGEST = 1000
SCALES = {"million": 6, "mil": 6, "mn": 6, "billion": 9, "bn": 9, "trillion": 12, "hundred": 2, "thousand": 3}
SCALES |= {"lakh": 5, "crore": 7}

_TABLE = r"""
(?<!\\)\\[,;: ]|(?<!\\)\\q?quad\>|(?<!\\)~ => @
\{([:,])\} => \1
\.{3,}|\\[cd]ots\> => \\ldots
\A(?=\D*\d).*\\(?:implies|therefore|Rightarrow|Longrightarrow)\>(?=\D*\d) =>
\\(?:checkmark|(?:black)?square|Box|qed|bf|rm|it|sf|tt)\> =>
\\(?:middle|hline|[lL]arge|LARGE|[hH]uge|[bB]igg?[lrm]?|(?:display|text)style|(?:no)?limits)\>|\\! =>
\\begin\{[dr]?cases\} => \\begin{array}{l}
\\\{\s*\\begin\{\w+\*?\}(?:\{[^{}]*\})?(?!.*\\\}) => \\begin{array}{l}
[(\[]\s*\\begin\{array\}\{[^{}]*\}((?:(?!\\begin).)*?)\\end\{array\}\s*[)\]] => \\begin{pmatrix}\1\\end{pmatrix}
(\\(?:begin|end))\{[bBpV]?(?:small)?matrix\} => \1{pmatrix}
\\begin\{(?:array|aligned|align\*?|gathered|split)\}(?:\{[^{}]*\})?(.*?)\\end\{\w+\*?\} => @lines
(?:\A|(?<=\\cup)|(?<=\\in)|(?<==))\s*\](?=[^\[\]()]*,) => (
(?<=[\[(])([^\[\]()]*,[^\[\]()]*)\[(?=\s*(?:\\cup|\Z)) => \1)
\\(?:hat|vec|widehat|mathbf|bm|boldsymbol){{open}}{{bold}}?\\?([ijk])(?:math)?(?!\w)(?:\s*\})* => «u\1»
(\A|=)((?:\s*[-+]?(?:[^«=,+(){}-]|\([^()]*\)|\{[^{}]*\})*«u[ijk]»)+)\s*\Z => @vector
\\(?:text)?color\s*\{\w+\}|\\f?box(?:ed)?(?=\s*\{)|\\(?:bm|boldsymbol|underline|math(?:bf|it|sf|tt))\> =>
\\(?:begin|end)\{equation\*?\}|(?<!\\)\\[()\[\]]|(?<!\\)\$|`|\\[hv]space\*?\{[^{}]*\} =>
(?<=\d)\*\*(?=\d) => ^
\*\*|(?<!\w)__|__(?!\w) =>
\\({{commands}})\> => @command
[€£¥₹]|\\(?:euro|pounds|yen|textdollar)\> =>
\\?%|\\text\w*\{\s*(?:percent|\\?%)\s*\}|\\?\bpercent(?:age)?\b => %
\^?\s*\{\s*\^?\s*\\(?:circ|degree)\s*\}|\^?\s*\\(?:circ|degree)\>|\\text\w*\{\s*degrees?\s*\}|\bdegrees?\b => °
\\leq?(?:slant)?\>|<=|=< => \\le@
\\geq?(?:slant)?\>|>= => \\ge@
\\neq?\>|!= => \\ne@
\\(?:approx|simeq|doteq|thickapprox)\> => \\approx@
\(\s*(\\approx[^()]*)\) => \1
\\(?:varnothing|O)\>|\\\{\s*\\\} => \\emptyset@
\\(?:var|measured)(phi|epsilon|theta|angle)\> => \\\1
\\math(?:bb|rm|bf)\s*\{?\s*R\s*\}?|\\(?:R|Reals)\> => (-\\infty,\\infty)
\(-\\infty,\\infty\)\s*[\^_]\s*\{?\s*\+\s*\}? => (0,\\infty)
\\mathbb\s*([A-Z]) => \\mathbb{\1}
\+\s*\\infty => \\infty
\\(?:backslash|smallsetminus)\>|(?<=\))\s*-\s*(?=\\\{) => \\setminus@
\\bmod|\\(?:text|mathrm|operatorname)\s*\{\s*mod\s*\}|(?<![\\a-z])mod\b => \\mod
\(\s*\\mod\s*\{?\s*(\w+)\s*\}?\s*\)|\\p?mod\s*(?:\{\s*(\w+)\s*\}|(\w+)) => \\pmod{\1\2\3}
\\(overline|over(?:left)?rightarrow|widehat|vec|triangle|angle)\s*(?:\{\s*([A-Z]{2,})'*\s*\}|([A-Z]{2,})) => @name
\\math(?:rm|normal)\s*\{\s*([eidTP])\s*\} => @\1@
\\frac\s*\{\\(?:text|mathrm)\s*\{([A-Za-z ]+)\}\}\s*\{\\(?:text|mathrm)\s*\{([A-Za-z ]+)\}{{power}}\} => «\1»/«\2»\3
\\(?:operatorname|text|mathrm)\s*\{({{functions}})\} => \\\1@
\\(?:text(?:bf|it|rm|normal|tt|sf)?|math(?:rm|normal)|[mh]box|operatorname)\s*{{group}} => @words
(?<![\\A-Za-z«])(?!min\s*\Z)({{functions}})(?=[\s(_^\d]|\Z) => \\\1
\\sqrt\s*\(([^()]*)\) => \\sqrt{\1}
(?<!\w)«?abs»?\s*\(([^()]*)\) => |\1|
(?<!\\)\\& => @and@
«(or|and)»|\b(or|and)\b => @\1\2@
(?<![\d.])(\d{1,9}(?:\.\d+)?)\s*°\s*(\d+)\s*(?:['′]|\^\s*\{?\s*\\prime\s*\}?) => (\1+\\frac{\2}{60})°
\\frac\s*\{d(\w)\}\s*\{d\w\}\s*(?==) => \1'
(?<![A-Za-z\\])C\(([nmN]),\s*(\w+)\) => \\binom{\1}{\2}
(\([^()]*,[^()]*\))\s*\^\s*\{?\s*(?:T|\\top)\s*\}?\s*\Z => \1
\A(?=.*\\pi).*\Z => @bound
12\s*«?(noon|midnight)»? => «\1»
([A-Za-z])\s*\\ne\s*\\pm\s*([\w.]+) => \1\\ne\2,\1\\ne-\2
([A-Za-z])\s*\\ne\s*([^,<>=]+?)\s*(?:,|\b(?:or|and)\b)\s*([^,<>=\sA-Za-z]+)\Z => \1\\ne\2,\1\\ne\3
[\u4e00-\u9fff]+ => «\g<0>»
\A[\s«]*(?i:({{counts}}|\d+\s+(?={{and_a}}?«?{{parts}}))({{and_a}})?(?:«?({{parts}})s?»?)?){{ends}} => @counted
\A(\s*(?:«The»\s*)?«[A-Z]\w+»)\s*(?:(?:«(?:always|will|can)»\s*)*«wins?»|«has»\s*«a»\s*«winning»\s*«strategy») => \1
\s*«?\bper\b»?\s*(?=«|[A-Za-z]) => /
\(\s*«(?:exact(?:ly)?|approx\w*|simplified)»\s*\) =>
(?<=\S)[,;]?\s*\(?\s*(?:{{any}}\s*)*[a-z]\s*\\in\s*(?:\\mathbb\{Z\}|\(-\\infty,\\infty\))\s*\)?\Z =>
(?<=[\w)}]),?\s*(?:«for»|«where»)\s*(?:{{any}}\s*)+(?:«?[a-z]»?\s*)?\Z =>
(?<=[\w)}])(?:,\s*|\s*«(?:for|where)»\s*)(?:[kmn]\s*{{of_naturals}}|{{natural}}[kmn]\s*)\Z =>
(?i:(?:«?(?:all|real)»?\s+)+«?(?:reals?|numbers?)»?[ «x»]*?«?except»?)\s+(.+)\Z => (-\\infty,\\infty)\\setminus\\{\1\\}
«?\\?cis»?\s*(?:\(([^()]*)\)|([^\s(]\S*)) => (\\cos(\1\2)+i\\sin(\1\2))
\\mu\s*«(\w+)» => «u\1»
(?<=[\d}])\s*(?:«([kMm])»)?\s*\\(Omega|AA)\> => «\1\2»
(?<![A-Za-z\\«])(?!{{plurals}})(?=[A-Z]*[a-z])({{cons}})({{cons}})({{cons}})({{cons}}?){{last}} => \1 \2 \3 \4
(?<![A-Za-z\\«])([apx])([bqy])([crz])(?![A-Za-z»]) => \1 \2 \3
\\lg\> => \\log_{10}
(?:\A|(?<=[,;])|(?<= and ))\s*([A-Z])\s*(\((?:[^()]|\([^()]*\))*,(?:[^()]|\([^()]*\))*\))\s*(?=\Z|[,;]| and ) => \1=\2
\b(\d+)\s+«?to»?\s+(\d+)\b => \1:\2
(?<![\w.:])(\d+(?:\s*:\s*\d+){2,})(?![\w.:]) => @ratio
(?<=\d)\s*(?:«E»| [eE])\s?([+-]?\d+)(?![\w.]) => *10^{\1}
«?\b(?:minus|negative)\b»?\s*(?=[\d.\\]) => -
(?<=\d)\s*«?[aA]\.?\s?[mM]\b\.?»? => «am»
(?<=\d)\s*«?[pP]\.?\s?[mM]\b\.?»? => «pm»
(\d):00\s*«([ap]m)» => \1«\2»
(?<=[\d)}°])\s*({{units}})(?![A-Za-z»]) => @«\1»@
(?:(?<=[\d)}])\s+|(?<=°)\s*)([mgshdlLCFKNJWVASE]){{end}} => @unit
(?<![\d.])(\d{0,20})\.(\d{0,20}?)(?:\\(?:overline|bar)\s*\{(\d{1,20})\}|\((\d{1,20})\)(?!\d)) => @repeating
(?<![\d.])(\d{0,20})\.(\d{0,20}?)\\dot\s*\{?(\d)\}?(?:(\d{0,20})\\dot\s*\{?(\d)\}?)? => @repeating
(?<![\d.])(\d{0,20})\.(\d{0,3}?)(\d{1,6}?)\3{2,}(?:\\[lc]?dots|\.\.\.) => @repeating
(?<=\d)\s*\^?\s*\{?\s*(?:«(?:st|nd|rd|th)»|(?:st|nd|rd|th)\b)\s*\}? =>
(?<=\d)[eE]([+-]?\d+)(?![\w.]) => *10^{\1}
\^\s*(-?\d{2,}|-\d) => ^{\1}
\\frac(?:\s*(\d)|\s+(\w))\s*(\w) => \\frac{\1\2}{\3}
\\frac\s*(\w)\s*(?=\{) => \\frac{\1}
\\frac\s*(\{[^{}]*\})\s*(\w) => \\frac\1{\2}
\\frac\s+(?=\{) => \\frac
\\sqrt\s*(\w) => \\sqrt{\1}
\\sqrt\s*\[([3579])\]\s*\{\s*-\s*(\d+)\s*\} => -\\sqrt[\1]{\2}
\^\s*(\\frac\{[^{}]*\}\{[^{}]*\}) => ^{\1}
\A([^{}]*\\(?:over|choose)\>[^{}]*)\Z => {\1}
\{([^{}]*)\\over\>([^{}]*)\} => \\frac{\1}{\2}
\{([^{}]*)\\choose\>([^{}]*)\} => \\binom{\1}{\2}
(?<![\d.^{_])(-?)\s*(\d+)\s*\\frac\{(\d+)\}\{(\d+)\} => \1(\2+\\frac{\3}{\4})
(?<![\d.])(-?)(\d+)\s+(?:and\s+)?(\d+)\s*/\s*(\d+)(?![\d.]) => \1(\2+\\frac{\3}{\4})
\A\s*([a-z])\s*=\s*([a-z])\s*=\s*([^=,A-Za-z]+)\Z => \1=\3,\2=\3
(?<=\d)_\s*\{?\s*«(\w+)»\s*\}? => @base
(\\\{\s*\([a-z](?:,\s*[a-z])*\)\s*): => \1|
(?<![\w.])\(?(\d\w*)\)?\s*_\s*\{?\s*(\d+)\s*\}?(?=\s*\Z) => @based
(?<!\w)(\d+)(?=(?:\s*(?:,|\bor\b|\band\b)\s*-?\d+)+\s*(\\pmod\{\d+\})) => \1\2
(-?\d+)\s*\\pmod\{(\d+)\} => @remainder
(?<=[\d}])\s*«?({{scales}})s?»?(?![A-Za-z]) => @scale
(?<=\d)\s*«?dozens?»?(?![A-Za-z]) => \\cdot 12
\\\$\s*(-?[\d.]+) => \1«dollar»
\\\$ =>
\s+ => @
"""
_WHOLE = {
    r"none|(?:there (?:are|is|exists?) )?no (?:\w+ )?(?:solution|value|number|root|integer|function|pair|triple)s?"
    r"(?: exists?)?": r"\emptyset",
    "(?:the )?empty set": r"\emptyset",
    r"(?:the set of )?all (?:the )?real(?: number)?s(?: [a-z])?": r"(-\infty,\infty)",
    r"dne|does not exist": "undefined",
    r"neither \w+ nor \w+": "neither",
    r"(?:the set of )?all (?:the )?integers(?: [a-z])?": r"\mathbb{Z}",
    r"(?:positive )?infinity": r"\infty",
}
_ONES = re.findall(
    r"\w+",
    """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen""",
)
_TENS = re.findall(r"\w+", "twenty thirty forty fifty sixty seventy eighty ninety")
_NUMBERS = {name: i for i, name in enumerate(_ONES)} | {name: 10 * i for i, name in enumerate(_TENS, 2)}
_PARTS = re.findall(r"\w+", "half third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth")
_DENOMINATORS = {name: i for i, name in enumerate(_PARTS, 2)} | {"halve": 2, "quarter": 4, "hundredth": 100}
_SIGNS: dict[str, str] = dict(
    re.findall(
        r"(\S)(\S+)",
        r"""−- –- —- ×\times ·\cdot ÷\div ⁄/ ∪\cup ∞\infty π\pi ≤\le ≥\ge ≠\ne ≈\approx ∅\emptyset ±\pm ∈\in ∠\angle
        △\triangle ℝ\mathbb{R} θ\theta ≡\equiv Ω\Omega Ω\Omega µ\mu μ\mu ⇒\Rightarrow
        ¢cents 、, 。. 或or 和and 与and 且and""",
    )
)
_COMMANDS = dict(
    re.findall(
        r"([a-z]+)(\S+)",
        r"lbrace\{ rbrace\} langle( rangle) lparen( rparen) lbrack[ rbrack] lt< gt> colon: dfrac\frac tfrac\frac",
    )
)
_COMMANDS |= dict.fromkeys(("mid", "vert", "lvert", "rvert", "Vert", "lVert", "rVert"), "|")
_COMMANDS |= dict.fromkeys(("cfrac", "nicefrac", "sfrac"), r"\frac")
_COMMANDS |= {"lor": " or ", "vee": " or ", "land": " and ", "wedge": " and "}
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SEPARATOR = r"(?:,|\{,\}|\\[,;: ]|~|'|_|[ ])"
_TUPLE = re.compile(r"(?<!\w)(?:[(\[]|\\\{)\s*-?\d+(?:\s*,\s*-?\d+)+\s*(?=[)\]]|\\\})")
_GROUPED = re.compile(
    rf"(?<![\d.])(?!0\d*{_SEPARATOR})(?:\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+|\d{{1,2}}(?:,\d{{2}})+,\d{{3}})(?!\d|(?!_\d\d?(?!\d)){_SEPARATOR}\d)"
)


def in_latex(text: str) -> str:
    """Convert Unicode digits, separators, fractions, roots and operators to LaTeX."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub("[\u00ad\u200b-\u200d\u2060\ufeff]", "", text)
    text = re.sub(r"(?<=\d)[\u00a0\u2009\u202f](?=\d{3}(?!\d))", ",", text)
    text = unicodedata.normalize("NFKC", re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text))
    for sign, operator in _SIGNS.items():
        text = text.replace(sign, f" {operator} " if operator.isalpha() else operator + " " * operator[-1].isalpha())
    text = re.sub(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))", r"\\sqrt{\1\2\3}", text)
    return re.sub(r"(?<=\d)(?<!\b0) ?[xX] ?(?=\d)", r"\\times ", text)


def without_separators(text: str) -> str:
    """``70,000`` as ``70000``, but not the interval ``(0,100)``."""
    text = _TUPLE.sub(lambda match: match[0].replace(",", ", "), text)
    return _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)


def normal(text: str) -> str:
    """The text in one notation."""
    text = without_separators(
        re.sub(r"\\(?:left|right)(?![A-Za-z])(?:\s*\.)?|\\!\s*|(?<=\d)\\\s(?=\d{3})", "", in_latex(text))
    )
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".,;:").strip()
    plain = re.sub(r"[«».]", "", text).casefold()
    return next((value for pattern, value in _WHOLE.items() if re.fullmatch(pattern, plain)), text)


def _name(match: re.Match[str]) -> str:
    """Segments and angles are the same backwards, triangles in any order of their points."""
    kind, points = match[1], match[2] or match[3]
    correspond = kind == "triangle" and re.search(r"\\(?:sim|cong)(?![A-Za-z])", match.string)
    turned = "".join(sorted(points)) if kind == "triangle" else points[::-1]
    if kind == "overline":
        return f" {min(points, turned)} "
    return f" «{kind}{points if correspond or kind in ('vec', 'overrightarrow') else min(points, turned)}» "


def _bound(match: re.Match[str]) -> str:
    """The one integer in multiples of pi is named n."""
    names = set(re.findall(r"(?<![A-Za-z\\«])[kmn](?![A-Za-z])", match[0]))
    return re.sub(rf"(?<![A-Za-z\\«]){names.pop()}(?![A-Za-z])", "n", match[0]) if len(names) == 1 else match[0]


def _repeating(match: re.Match[str]) -> str:
    whole, digits, *periods = (each or "" for each in match.groups())
    period, ends = "".join(periods), int(whole + digits or 0)
    return rf"\frac{{{int(whole + digits + period) - ends}}}{{{(10 ** len(period) - 1) * 10 ** len(digits)}}}"


def _lines(match: re.Match[str]) -> str:
    """A table of numbers as a matrix, values with conditions as pairs, other lines as a list."""
    relation = r"[=<>]|\\(?:[gl]e|ne)"
    if "&" in match[1] and not re.search(rf"{relation}|\\text", match[1]):
        return rf"\begin{{pmatrix}}{match[1]}\end{{pmatrix}}"
    lines = []
    for line in re.split(r"\\\\(?:\[\w+\])?", match[1]):
        value, _, condition = (part.strip(" ,;.") for part in line.partition("&"))
        is_pair = value and not re.search(relation, value) and re.search(rf"\w.*(?:{relation})", condition)
        lines.append(f"({value}, {condition})" if is_pair else line.replace("&", " ").strip(" ,;."))
    return ", ".join(filter(None, lines))


def _unit(match: re.Match[str]) -> str:
    """A letter at the end is a unit, unless its side of an equation has other symbols."""
    side = match.string[: match.start()].rpartition("=")[2]
    return (
        match[0] if re.search(r"(?<![A-Za-z\\«])[A-Za-z](?![A-Za-z»])|\\[a-z]+a(?![a-z])", side) else f" «{match[1]}» "
    )


def _ratio(match: re.Match[str]) -> str:
    """``2:4:6`` as ``(1, 2, 3)``."""
    terms = [int(each) for each in match[1].split(":")]
    return f"({', '.join(str(each // (math.gcd(*terms) or 1)) for each in terms)})"


def _remainder(match: re.Match[str]) -> str:
    rest, modulus = int(match[1]), int(match[2])
    return rf"{rest % modulus if modulus else rest}\pmod{{{modulus}}}"


def _vector(match: re.Match[str]) -> str:
    """``2i - k``, of unit vectors, as ``(2, 0, -1)``."""
    terms = re.findall(r"(.*?)«u([ijk])»", match[2])
    values = {
        axis: part + "1" * (part in ("", "+", "-")) for part, axis in ((re.sub(r"\s", "", a), b) for a, b in terms)
    }
    return f"{match[1]}({', '.join(values.get(axis, '0') for axis in ('ijk' if 'k' in values else 'ij'))})"


def _counted(match: re.Match[str]) -> str:
    """``two hundred and five`` in digits, ``two fifths`` as a fraction."""
    total, below, last = 0, 0, "hundred"
    for word in re.findall(r"\d+|\b(?!and\b)[a-z]+", match[1].casefold()):
        if word in SCALES:
            below = (below or 1) * 10 ** SCALES[word]
            total, below = (total, below) if word == "hundred" else (total + below, 0)
        elif word.isdigit():
            total = int(word)
        elif last in SCALES or (last in _TENS and 0 < _NUMBERS[word] < 10):
            below += _NUMBERS[word]
        else:
            return match[0]
        last = word
    value, part = total + below, _DENOMINATORS.get((match[3] or "").casefold())
    fraction = part and (rf"({value}+\frac{{1}}{{{part}}})" if match[2] else rf"\frac{{{value}}}{{{part}}}")
    return f"{fraction or value} "


def _based(match: re.Match[str]) -> str:
    """A numeral as its value and a word, so that it differs from a number without a base."""
    try:
        return f"{int(match[1], int(match[2]))} «base»"
    except ValueError:
        return match[0]


_FUNCTIONS: dict[str, Callable[[re.Match[str]], str]] = {
    "base": lambda match: f"_{{{_NUMBERS.get(match[1], match[1])}}}",
    "based": _based,
    "counted": _counted,
    "vector": _vector,
    "command": lambda match: _COMMANDS[match[1]],
    "lines": _lines,
    "bound": _bound,
    "name": _name,
    "remainder": _remainder,
    "ratio": _ratio,
    "unit": _unit,
    "repeating": _repeating,
    "scale": lambda match: rf"\cdot 10^{{{SCALES[match[1]]}}}",
    "words": lambda match: re.sub(r"(?<![\\A-Za-z])[A-Za-z]+(?:['’.-][A-Za-z]+)*\.?", r"«\g<0>»", f" {match[1]} "),
}
_GROUP = r"[^{}]*"
for _ in range(4):
    _GROUP = rf"(?:[^{{}}]|\{{{_GROUP}\}})*"
_CONSTANTS = {
    "any": "«(?:for|where|with|any|all|every|each|some|real|integers?|constants?)»",
    "commands": "|".join(_COMMANDS),
    "counts": rf"(?:(?:{'|'.join((*_TENS, *reversed(_ONES), *SCALES))})(?![A-Za-z])(?:[\s«»,-]|\band\b)*)+",
    "parts": f"(?:{'|'.join(_DENOMINATORS)})",
    "and_a": r"(?:(?:\band\b)?\s*«?\ban?\b»?\s*)",
    "open": r"\s*\{?\s*",
    "bold": r"(?:\\math(?:bf|rm|it)\s*\{?\s*)",
    "of_naturals": r"(?:\\ge\s*[01]|>\s*0|\\in\s*\\mathbb\{[NZ]\}[^,]*|«(?:is|are)»{{natural}})",
    "natural": r"(?:\s|«(?:an?|any|all|every|some|(?:non-?)?negative|positive|natural|integers?|numbers?)»)+",
    "functions": "sqrt|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|exp|pi|gcd|lcm|max|min",
    "units": "km|cm|mm|kg|mg|m[lL]|min|ft|in|yd|mi|hr|lb|oz|[kM]?Hz|kN|kJ|kW|Pa|cc",
    "power": r"(\s*\^\s*\{?\d\}?)?",
    "plurals": "mph|kmh|lbs|hrs|rpm|pts|cms|kms|kgs|gms|mls|yrs",
    "cons": "[b-df-hj-np-tv-xzB-DF-HJ-NP-TV-XZ]",
    "last": "(?![A-Za-z»])",
    "ends": r"(?![A-Za-z]|[\s«»]*to\b)",  # not one to one
    "end": r"(?=\s*(?:(?:\^\s*\{?-?\d\}?\s*|/\s*\w+\s*(?:\^\s*\{?\d\}?\s*)?)?\Z|\s\d+\s*[a-z]))",
    "scales": "|".join(SCALES),
    "group": rf"\{{({_GROUP})\}}",
}


def _rewrite(line: str) -> tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]:
    pattern, replacement = (side.strip(" ") for side in line.split(" =>"))
    for name, value in _CONSTANTS.items():
        pattern = pattern.replace("{{" + name + "}}", value)
    function = _FUNCTIONS.get(replacement.removeprefix("@"))
    return re.compile(pattern.replace(r"\>", "(?![A-Za-z])")), function or replacement.replace("@", " ")


_REWRITES = [_rewrite(line) for line in _TABLE.strip().splitlines()]
