r"""The tokens of an answer in LaTeX, Unicode and plain text.

Tables say what a notation stands for: ``_REWRITES``, ``pattern => text``, for those of several tokens, ``_COMMANDS``
for LaTeX commands, and ``_WORDS``. Words of ``\text{}``, units after a number and names such as ``\angle ABC`` are one
token each, so that they are not read as products of letters.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from areal.reward.units import MONTHS, NUMBERS, PARTS, SCALES, is_unit, measure, number_in_words, symbol_of, words_in

LONGEST = 1000


class Token(NamedTuple):
    """``kind`` is ``n`` (number), ``s`` (symbol), ``w`` (word), ``f`` (function), ``m`` (matrix), ``v`` (determinant)
    or ``o`` (operators, brackets and other commands). ``gap`` says whether white space is before it."""

    kind: str
    text: str
    gap: bool = False


_REWRITES = r"""
\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?|\\(?:no)?limits(?![A-Za-z])|\\hline|\\!\s* =>
(?<=\d)\{,\}(?=(?:\d\d?|\d{4,})(?!\d)) => .
(?<![\d.])(\d{1,3})\.(\d{3}),(?=\d+(?!\d)) => \1\2.
\{([:,.])\} => \1
\\[dtc]frac(?![A-Za-z]) => \\frac
\\(?:begin|end)\{(?:equation|displaymath)\*?\} =>
\\begin\{[dr]?cases\} => \\begin{array}{l}
\\\\\s*\[-?[\d.]+\s*[a-z]{2}\] => \\\\
\\\{\s*\\begin\{\w+\*?\}(?:\{[^{}]*\})?(?!.*\\\}) => \\begin{array}{l}
\A(?=\D*\d).*\\(?:implies|therefore|Rightarrow|Longrightarrow)(?![A-Za-z])(?=\D*\d) =>
\\(?:text)?color\s*\{\w+\}|\\[hv]space\*?\{[^{}]*\} =>
(?<=\d)\*\*(?=\d) => ^
\*\*|(?<!\w)__|__(?!\w)|` =>
\^?\s*\{\s*\^?\s*\\(?:circ|degree)\s*\}|\^?\s*\\(?:circ|degree)(?![A-Za-z]) => °
(?<![\d.])(\d{1,9}(?:\.\d+)?)\s*°\s*(\d+)\s*(?:['′]|\^\s*\{?\s*\\prime\s*\}?) => (\1+\\frac{\2}{60})°
\b([aApP])\.\s?[mM]\b\.? => \1m
(?<=\d)\s*(?:\^\s*\{\s*\\text\w*\s*\{\s*{{th}}\s*\}\s*\}|\^?\s*\\text\w*\s*\{\s*{{th}}\s*\}|\^\s*\{{{th}}\}|{{th}}\b) =>
(?<=\\text\{)\s*(?:an?|the)\s+(?!dozen)(?=[a-z]{3}|\}\s*\d) =>
\\frac\s*\{(\\{{text}}\{[^{}]*\})\}\s*\{(\\{{text}}\{[^{}]*\}(?:\^\{?\d\}?)?)\} => \1/(\2)
(?<=\d)\s+and\s+a\s+half\b => .5
(?<=\d):00(?=\s*(?:\\text\{\s*|~)?[aApP][mM]) =>
(?<![A-Za-z\\])([A-Za-z]'*)\s?\(0\) => \1_0@
12(?::00)?\s*(?=(?:\\text\s*\{\s*)?(?:noon|midnight)) =>
\bUS\s*(?=\\?\$) =>
\\(?:text\{\s*\\)?text(dollar|euro)(?![A-Za-z])(?:\s*\})?\s*(-?[\d.]+) => \2\\text{ \1}@
\A\s*\\sim\s*(?=[\d.]) => \\approx@
(?:\\text\{\s*)?\(\s*(?:approx(?:imately|\.)?|about)\s*\}?\s*([^(){}]*)\)\s*\}? => \\approx \1
(?<=[a-z]day),(?=\s+[A-Z][a-z]{2,}\.?\s+\d) =>
((?:\\text\w*\{)?\b[A-Z][a-z]{2,8}\.?\s*\}?)\s*(\d\d?),?\s+(\d{4})\b => \2 \1 \3
(?<=\w)\s+is\s+the\s+one\s+(?:who|that)\b(?!.*(?:\b(?:not|never|or|and)\b|n['’]t)).* =>
(?<=[a-z])\s+by\s+(?:the\s+)?[A-Za-z\s-]+(?:test|theorem|criterion) =>
(?i:\b(?:both|only|(?:the\s+)?statements?)\s+)(?=(?:I{1,3}|IV|V)\b)|(?<=[IV])\s+only\b =>
\\frac\s*\{\s*d\s*(\w)\s*\}\s*\{\s*d\s*\w\s*\} => \1'
\^\s*\{?\s*\\prime\s*\}? => '
(?:\A|(?<=\\cup)|(?<=\\in)|(?<==))\s*\](?=[^\[\]()]*,) => (
(?<=[\[(])([^\[\]()]*,[^\[\]()]*)\[(?=\s*(?:\\cup|\Z)) => \1)
(?<![A-Za-z\\])C\(([nmN]),\s*(\w+)\) => \\binom{\1}{\2}
\{\}\s*[_^]\s*\{?\s*([0-9a-z]+)\s*\}?\s*C\s*_\s*\{?\s*([0-9a-z]+)\s*\}? => \\binom{\1}{\2}
([(\[][^()\[\]]*,[^()\[\]]*[)\]])\s*\^\s*\{?\s*(?:T|\\top)\s*\}?\s*\Z => \1
\[\s*(\[[^\[\]]*(?:\],\s*\[[^\[\]]*)+\])\s*\] => \\begin{matrix}\1\\end{matrix}
(\w)\^(\w|\{[^{}]*\})_(\w|\{[^{}]*\}) => \1_\3^\2
\\math(?:bb|rm|bf)\s*\{?\s*R\s*\}?|\\(?:R|Reals)(?![A-Za-z])|ℝ => (-\\infty,\\infty)
\(-\\infty,\\infty\)\s*[\^_]\s*\{?\s*\+\s*\}? => (0,\\infty)
(?<=\))\s*-\s*(?=\\\{) => \\setminus@
(?<=\d)(?:[eE]|\s+[Ee]\s?|\s*\\{{text}}\{[eE]\}\s?)(?:\{([+-]?\d+)\}|([+-]?\d+))(?!\w|\.\d) => *10^{\1\2}
\A([^$]*)(?<!\\)\$(?=\s*-?[\d.])([^$]*)\Z => \1\\$\2
\\\$\s*(-?[\d.]+) => \1\\text{ dollar}@
€\s*(-?[\d.]+) => \1\\text{ euro}@
平方([千厘毫]?米) => \1^2@
立方([千厘毫]?米) => \1^3@
\\{{text}}\{abs\}\s*\(([^()]*)\) => |\1|
\\?(?:{{text}}\{\s*cis\s*\}|cis\b)\s*(?:\(([^()]*)\)|([^\s(]\S*)) => (\\cos(\1\2)+i\\sin(\1\2))
\A\W*(?:text\W*)?{{all but}}[\s}$]*(?:[a-z]\s*(?:=|\\ne)\s*)?(.+?)\Z => {{reals}}\1\\}
\b(\d+)\s+(?:\\text\{\s*)?to\s*\}?\s+(\d+)\b => \1:\2
\b(\d+)\s+(?:\\text\{\s*)?(?:in|out\s+of)\s*\}?\s+(\d+)\b => \1/\2
\(\s*((?:\\approx|or\b)[^()]*)\) => \1
(?<=[\d}])(?:\s|\\ )*\(\s*(-?[\d.]+\s*\\?%)\s*\)\Z => = \1
°\s*\\{{text}}\s*\{\s*([CF])\s*\}|(?:°|\bdegrees?)\s*([CF])(?:elsius|ahrenheit)?\b => \\text{ deg\1\2}
(?<=\d)\s*'\s*(\d+)\s*(?:''|") => \\text{ ft }\1\\text{ in}
(?<=\d)\s+(?:\\text\{\s*)?in the (?:afternoon|evening)\s*\}? => \\text{ pm}
(?<=\d)(?:\\text\{)?[时点]\}?(\d\d)(?:\\text\{)?分\}? => :\1
(\\\{\s*\([a-z](?:,\s*[a-z])*\)\s*): => \1|
\A\W*(?i:(?:the\s+)?(?:final\s+)?(?:solution|answer)s?(?:\s+(?:is|are))?)\s*:\s* =>
\A(?=[^:]*(?:[<>]|\\[gl]e))[^:|{}]*:\s*(?=[(\[]) =>
"""
_PATTERNS = {
    "th": "(?:st|nd|rd|th)",
    "text": "(?:text(?:rm|bf|it)?|mathrm|operatorname)",
    "all but": r"(?i:(?:all\s+)?(?:real\s+)?(?:reals|numbers?)\s+(?:\$?\w\$?\s+)?(?:except|other\s+than)(?:\s+for)?)",
    "reals": r"(-\\infty,\\infty)\\setminus\\{",
}


def _rewrite(line: str) -> tuple[re.Pattern[str], str]:
    for name, value in _PATTERNS.items():
        line = line.replace("{{" + name + "}}", value)
    pattern, to = line.split(" =>")
    return re.compile(pattern, re.DOTALL), to.strip(" ").replace("@", " ")


_TABLE = [_rewrite(line) for line in _REWRITES.strip().splitlines()]
_COMMANDS: dict[str, str] = {
    name: to
    for line in re.split(
        r" = |\n\s*",
        r"""* times cdot ast bullet star = / div = ≤ le leq leqslant = ≥ ge geq geqslant = ≠ ne neq = < lt = > gt
        : colon = ≈ approx simeq doteq thickapprox = ∼ sim = ∞ infty = ∅ emptyset varnothing O = ∪ cup = ∩ cap
        ∖ setminus backslash smallsetminus = ∈ in = ± pm = ∓ mp = | mid vert lvert rvert Vert lVert rVert = ⌊ lfloor
        ⌋ rfloor = ⌈ lceil = ⌉ rceil = \{ lbrace = \} rbrace = ( langle lparen = ) rangle rparen = [ lbrack = ] rbrack
        … ldots cdots dots = % percent = ≡ equiv = mod bmod pmod = or lor vee = and land wedge = ¬ neg lnot
        → to rightarrow longrightarrow Rightarrow implies = ↔ iff leftrightarrow Leftrightarrow = frac nicefrac sfrac
        binom dbinom tbinom = cong = sqrt = over = choose
        sum = prod = int = lim""",
    )
    for to, *names in [line.split()]
    for name in (*names, to)
}
_WORDS = dict.fromkeys(("percent", "percentage", "pct"), "%") | {"degree": "°", "degrees": "°", "per": "/"}
_WORDS |= {"or": "or", "and": "and", "minus": "-", "negative": "-", "mod": "mod", "modulo": "mod", "sqrt": "sqrt"}
_FUNCTIONS = words_in("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp gcd lcm max min det")
_TEXT = words_in("text emph textbf textit textrm textnormal texttt textsf mathrm mathnormal mbox hbox operatorname")
_NAMED = words_in(
    """angle measuredangle triangle overline bar vec overrightarrow overleftarrow overleftrightarrow widehat hat tilde
    dot ddot mathbb mathcal mathscr mathfrak mathbf boldsymbol bm"""
)
_BOLD = words_in("mathbf boldsymbol bm mathcal mathscr")
_FORMATTING = words_in(
    """displaystyle textstyle scriptstyle large Large LARGE huge Huge small normalsize boxed fbox fboxed underline
    mathit mathsf mathtt mathop checkmark square blacksquare Box qed therefore bf rm it sf tt hfill notag nonumber
    phantom left right middle quad qquad par noindent centering newline break displaylimits hline textcolor color
    dollar"""
)
_SYMBOLS = words_in(
    """alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi
    omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega hbar ell partial nabla Re Im perp parallel oint
    forall exists circ dagger leftarrow varphi varepsilon vartheta varrho varsigma"""
)
_SIGNS = dict(
    re.findall(
        r"(\S)(\S+)",
        r"""−- –- —- ×\times ·\cdot ÷\div ⁄/ ∪\cup ∩\cap ∞\infty π\pi ≤\le ≥\ge ≠\ne ≈\approx ∅\emptyset ±\pm ∈\in
        ∠\angle △\triangle θ\theta ≡\equiv Ω\Omega Ω\Omega Å\AA µ\mu μ\mu ⇒\Rightarrow ¢cents ٫. ٬, ،, ∶: 、, 。. ；;
        或or 和and 与and 且and""",
    )
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SEPARATOR = r"(?:,|[ ]?\{,[ ]?\}|\\[,;: ]|~|'|_|[ ])"
_TUPLE = re.compile(r"(?<!\w)(?:[(\[]|\\\{)\s*-?\d+(?:\s*,\s*-?\d+)+\s*(?=[)\]]|\\\})")
_GROUPED = re.compile(
    rf"(?<![\d.])(?!0\d*{_SEPARATOR})(?:\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+|\d{{1,2}}(?:,\d{{2}})+,\d{{3}})"
    rf"(?!\d|(?!_\d\d?(?!\d)){_SEPARATOR}\d)"
)
_REPEATING = re.compile(
    r"(?<![\d.])(\d{0,20})\.(?:(\d{0,20}?)(?:\\(?:overline|bar)\s*\{(\d{1,20})\}|\((\d{1,20})\)(?!\d)"
    r"|\\dot\s*\{?(\d)\}?(?:(\d{0,20})\\dot\s*\{?(\d)\}?)?)|(\d{0,3}?)(\d{1,6}?)\9{2,}(?:\\[lc]?dots|\.\.\.))"
)
_BASED = re.compile(
    r"(?<![\w.])\(?(?:\\(?:text|mathrm)\{)?(\d\w*?|[A-F]+\d\w*?|[A-F]{2,})\}?\)?\s*_\s*\{?\s*(?:\\text\w*\{\s*)?(\d+|[a-z]{3,})\s*\}*(?=\s*(?:\Z|\$|\\\)))"
)
_DATE = re.compile(r"\A\W*(?:(\d{4})[-/年](\d\d?)[-/月](\d\d?)日?|(\d\d?)/(\d\d?)/(\d{4}))\W*\Z")
_LINES = re.compile(
    r"\\begin\{(?:array|aligned|align\*?|gathered|split)\}(?:\{[^{}]*\})?(.*?)\\end\{\w+\*?\}", re.DOTALL
)
_COUNTED = re.compile(  # 24 (cubes)
    r"([\d.,/]+)\s\((?![A-J]\)|mod\b|[ap]m\)|(?:north|south|east|west|loss|profit|gain|increase|decrease)\b)"
    r"([A-Za-z][^()]*)\)"
)
_WRAPPER = re.compile(r"\{(?![^|:]*(?:[|:]|\\mid))")
_EDGES = re.compile(r"\A(?:[\s~]|\\[,;:!(\[ ]|\\displaystyle(?![A-Za-z]))+|(?:[\s~]|\\[,;:!)\] ]|\\|(?<!\.)\.)+\Z")
_IF = re.compile(r"(?:\\text\w*\s*\{\s*)?\b(?:if|for|when|where)\b\s*\}?(?:\\ )?")
_SCAN = re.compile(
    r"(?P<gap>\s+|~|\\[,;: ]|\\q?quad(?![A-Za-z]))|(?P<n>\d+(?:\.\d+)?|\.\d+)|\\(?P<c>[A-Za-z]+)\*?|(?P<e>\\.)"
    r"|(?P<w>[A-Za-z]-[a-z]{5,}|[A-Za-z]+)|(?P<z>[万亿]|[\u4e00-\u9fff]+)|(?P<o>\.\.\.|[<>!]=|=<|.)",
    re.DOTALL,
)
_MATRIX = re.compile(r"\{([bBpvV]?)(?:small)?matrix\*?\}(.*?)\\end\{\w+\*?\}", re.DOTALL)
_POWER = re.compile(r"\s*\^\s*(?:\{\s*([-+]?\d)\s*\}|(-?\d))")
_ARGUMENT = re.compile(r"\s*(\\[A-Za-z]+|[a-z]{2,}|.)", re.DOTALL)
_POINTS = re.compile(r"\s*(\\?[A-Z]+'*|\\[A-Za-z]+|\w)")
_UNIT_LETTERS = "mgshdlLCFKNJWVASEMTH"
_UNITS_ONLY = re.compile(
    rf"(?:\s*\^\s*\{{?\s*-?\d\s*\}}?|\s*/\s*\(?[A-Za-z]+|\s+[{_UNIT_LETTERS}k](?![A-Za-z])|\s*\))*\s*(?:\Z|\d)"
)
_CLOCK = re.compile(r"(?:0?\d|1[0-2]):[0-5]\d")
_ARGUMENTS = re.compile(r"(?:\^\{|frac\{|\b(?:sin|cos|tan|exp|ln|log)h?\()[-\d.]*\Z")  # e^{at}
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_ARTICLE = re.compile(r"\s+(?:(?!sin|cos|tan|log|ln|exp|sqrt)[a-z]{3}|\d)")
_EQUAL = {"!=": "≠", "<=": "≤", "=<": "≤", ">=": "≥", "...": "…", r"\%": "%", r"\&": "and", r"\|": "|"}
_SHORT = words_in("is of to no it at on by be if am pm do as")
_ROMAN = ("i", "ii", "iii", "iv")
_MONEY = {"k": 10**3, "m": 10**6, "b": 10**9}
_NOONS = {"noon": "pm", "midnight": "am"}


def in_latex(text: str) -> str:
    """Convert Unicode digits, separators, fractions, roots and operators to LaTeX."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub("[₀-₉]+", r"_{\g<0>}", text)
    text = re.sub("[\u00ad\u0304\u0305\u200b-\u200d\u2060\ufeff]", "", text)
    text = re.sub(r"(?<=\d)[\u00a0\u2009\u202f](?=\d{3}(?!\d))", ",", text)
    text = unicodedata.normalize("NFKC", re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text))
    for sign, operator in _SIGNS.items():
        text = text.replace(sign, f" {operator} " if operator.isalpha() else operator + " " * operator[-1].isalpha())
    text = re.sub(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))", r"\\sqrt{\1\2\3}", text)
    return re.sub(r"(?<=\d)(?<!\b0) ?[xX] ?(?=\d)", r"\\times ", text)


@lru_cache(maxsize=1024)  # all samples of a row have one reference
def tokens(text: str) -> tuple[Token, ...]:
    (first, to), *others = _TABLE
    text = _without_wrapping(text)
    text = _with_unit(counted) if (counted := _COUNTED.fullmatch(text)) else text
    text = re.sub(r"(?<!\w)0(?:x[\dA-Fa-f]+|b[01]+)(?!\w)", lambda match: str(int(match[0], 0)), text)
    if re.search(r"\\\\[A-Za-z]", text) and not re.search(r"(?<!\\)\\[A-Za-z]", text):
        text = text.replace("\\\\", "\\")  # escaped twice
    text = first.sub(to, in_latex(text))
    text = _TUPLE.sub(lambda match: match[0].replace(",", ", "), text)  # the interval (0,100) is not the number 0100
    text = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = _DATE.sub(_date, _REPEATING.sub(_repeating, _BASED.sub(_based, text)))
    for pattern, to in others:
        text = pattern.sub(to, text)
    found: list[Token] = []
    _scan(_LINES.sub(_lines, text)[: 3 * LONGEST], found, is_text=False)
    while found and found[-1].text in (".", ",", ";", ":"):
        found.pop()
    return tuple(_with_indices(_with_moduli(_with_numbers(found))))


def _without_wrapping(text: str) -> str:
    """Return the text without the space, dollar signs and braces around it."""
    while True:
        inner = _EDGES.sub("", text)
        if inner[:1] == inner[-1:] == "$" and inner.count("$") == 2:
            inner = inner[1:-1]
        if (wrapper := _WRAPPER.match(inner)) and group(inner, wrapper.end() - 1)[1] == len(inner):
            inner = inner[wrapper.end() : -1]
        if inner == text:
            return text
        text = inner


def _with_unit(counted: re.Match[str]) -> str:
    """Return a number with the base or the unit that follows it in parentheses, without the name of counted things."""
    if base := re.fullmatch(r"base (\d+)", counted[2]):
        return f"{counted[1]}_{{{base[1]}}}"
    return counted[1] + (rf" \text{{{counted[2]}}}" if measure(symbol_of(counted[2])) else "")


def _based(match: re.Match[str]) -> str:
    """Return the value of a numeral and the word ``base``, so that it differs from a number without a base."""
    try:
        return rf"{int(match[1], NUMBERS.get(match[2], 0) or int(match[2]) or 1)} \text{{ base}}"
    except ValueError:
        return match[0]


def _date(match: re.Match[str]) -> str:
    year, month, day = (int(match[i] or match[j]) for i, j in ((1, 6), (2, 4), (3, 5)))
    if match[4] and month > 12:
        month, day = day, month
    return rf"{day} \text{{ {MONTHS[month - 1]} }} {year}" if 0 < month < 13 else match[0]


def _repeating(match: re.Match[str]) -> str:
    whole, *parts = (each or "" for each in match.groups())
    digits, period = parts[0] + parts[6], "".join(parts[1:6]) + parts[7]
    ends = int(whole + digits or 0)
    return rf"\frac{{{int(whole + digits + period) - ends}}}{{{(10 ** len(period) - 1) * 10 ** len(digits)}}}"


def _lines(match: re.Match[str]) -> str:
    """Convert a table of numbers to a matrix, values with conditions to pairs, and other lines to a list."""
    relation = r"[=<>]|\\(?:[gl]eq?|ne)(?![a-z])"
    if "&" in match[1] and not re.search(rf"{relation}|\\text", match[1]):
        return rf"\begin{{pmatrix}}{match[1]}\end{{pmatrix}}"
    lines, is_piecewise = [], False
    for line in match[1].split(r"\\"):
        value, _, condition = (part.strip(" ,;.~") for part in _IF.sub("", line).partition("&"))
        is_pair = value and not re.search(relation, value) and re.search(rf"\w.*(?:{relation})|\\text", condition)
        lines.append(f"({value}, {condition})" if is_pair else line.replace("&", " ").strip(" ,;."))
        is_piecewise |= bool(is_pair)
    joined = ", ".join(filter(None, lines))
    return rf"\{{{joined}\}}" if is_piecewise else joined


def group(text: str, start: int) -> tuple[str, int]:
    """Return the content of the braces that open at ``start``, and the index after them: 0 if they are not closed."""
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start + 1 : match.start()], match.end()
    return text[start + 1 :], 0


def _argument(text: str, at: int, pattern: re.Pattern[str] = _ARGUMENT) -> tuple[str, int]:
    """Return the argument of a command that ends at ``at``, and its end."""
    opening = re.compile(r"\s*\{").match(text, at)
    if opening:
        inner, end = group(text, opening.end() - 1)
        return inner, end or len(text)
    match = pattern.match(text, at)
    return (match[1], match.end()) if match else ("", at)


def _scan(text: str, found: list[Token], is_text: bool) -> None:
    at, gap = 0, False
    while at < len(text):
        match = _SCAN.match(text, at)
        assert match is not None
        kind, value, at, before = match.lastgroup, match[match.lastgroup or 0], match.end(), len(found)
        last = found[-1] if found else Token("", "")
        value = _EQUAL.get(value, value)
        if kind == "n" or kind == "z":
            found.append(Token("n", value, gap) if kind == "n" else Token("w", symbol_of(value), gap))
        elif kind == "w":
            _letters(value, found, gap, is_text, text[at:])
        elif kind == "c":
            at = _command(value, text, at, found, gap)
        elif value == "_" and last.kind in ("s", "w"):
            below, at = _argument(text, at)
            parts: list[Token] = []
            _scan(below, parts, is_text=False)
            found[-1] = last._replace(text=f"{last.text}_{''.join(each.text for each in parts)}")
        elif value in "'’′":
            found[-1:] = [last._replace(text=last.text + "'")] if last.kind == "s" else found[-1:]
        elif kind == "o" and value == "-" and (last.kind == "w" if text[at : at + 1].isalpha() else is_text):
            if text[at : at + 1].isdigit():
                found.append(Token("o", "-", gap))  # else a hyphen
        elif (kind == "o" and value not in '$€£¥₹"“”«»?') or value in ("%", "and", "|", r"\\", r"\{", r"\}"):
            found.append(Token("o", value, gap))
        gap = kind == "gap" or (gap and before == len(found))
        if before != len(found) and found[-1].kind == "w" and (power := _POWER.match(text, at)):
            found[-1] = found[-1]._replace(text=f"{found[-1].text}^{power[1] or power[2]}")
            at = power.end()


def _letters(run: str, found: list[Token], gap: bool, is_text: bool, rest: str) -> None:
    """Add the tokens of some letters: a function, a word, a unit after a number, or one symbol each."""
    low, last = run.casefold(), found[-1] if found else Token("", "")
    before = found[-2] if len(found) > 1 else Token("", "")
    is_after_unit = last.text in ("*", "/") and before.kind == "w"
    is_after_number = last.kind in ("n", "w") or last.text in (")", "}", "°", "%") or is_after_unit
    is_after_number |= last.text == "mu" and before.kind == "n"
    side = found[max((i for i, each in enumerate(found) if each.text in ("=", ",", "≈")), default=0) :]
    if run in _FUNCTIONS and not (run in ("min", "sec") and is_after_number):
        found.append(Token("f", run, gap))
    elif low in _ROMAN and last.text == "quadrant":
        found.append(Token("n", str(_ROMAN.index(low) + 1), gap=True))
    elif run == "pi" or low in ("inf", "infinity"):
        found.append(Token("s", "pi" if run == "pi" else "∞", gap))
    elif low in ("am", "pm") and is_after_number:
        found.append(Token("w", low, gap))
    elif run == "a" and _ARTICLE.match(rest):
        found.append(Token("w", run, gap))
    elif low in _WORDS:
        found.append(Token("o", _WORDS[low], gap))
    elif len(run) == 1:
        is_unit_at_end = run in _UNIT_LETTERS and is_after_number and (gap or last.text == "°")
        symbols = {each.text for each in side if each.kind == "s"} - {"mu"}
        symbols |= {"sum", "prod"} & {each.text for each in found}
        is_word = is_text and (is_after_number or any(each.kind == "n" for each in found[-8:]))
        is_measure = (last.text == "/" and is_after_unit) or (
            is_unit_at_end and not symbols and _UNITS_ONLY.match(rest)
        )
        found.append(Token("w" if is_word or is_measure else "s", run, gap))
    elif is_text or (_is_word(run, is_after_number) and not _is_argument(run, found)):
        found.append(Token("w", symbol_of(run), gap))
    else:
        found += [Token("s", letter, gap and not i) for i, letter in enumerate(run)]


def _is_argument(run: str, found: list[Token]) -> bool:
    return not is_unit(run) and bool(_ARGUMENTS.search(render(found[-4:])))


def _is_word(run: str, is_after_number: bool) -> bool:
    if len(run) < 3 or not re.search("[aeiouyAEIOUY]", run):
        is_known = run.casefold() in _SHORT or (is_after_number and is_unit(run))
        return is_known or (len(run) > 2 and run.isupper())
    return not re.fullmatch("[apx][bqy][crz]", run)


def _command(name: str, text: str, at: int, found: list[Token], gap: bool) -> int:
    """Add the tokens of a command that ends at ``at``; return the index of the text after its arguments."""
    last = found[-1] if found else Token("", "")
    if name in _TEXT:
        inner, at = _argument(text, at)
        is_function = inner in _FUNCTIONS and inner not in ("min", "sec")
        is_name = name in ("mathrm", "operatorname") and len(inner) == 1 and not found
        _scan(inner, found, is_text=not is_function and not is_name)
    elif name == "begin" and (matrix := _MATRIX.match(text, at)):
        rows = re.sub(r"\]\s*,\s*\[", r"\\\\", matrix[2])
        rows = rows.strip(" []").replace(",", "&") if rows[:1] == "[" else rows  # [[1, 2], [3, 4]]
        rows = re.sub(r"\s+", " ", rows)
        found.append(Token("v", rows + r"\\", gap) if matrix[1] == "v" else Token("m", rows, gap))
        return matrix.end()
    elif name in _COMMANDS:
        found.append(Token("s" if name == "infty" else "o", _COMMANDS[name], gap))
    elif name in _FUNCTIONS:
        found.append(Token("f", name, gap))
    elif name in ("AA", "Omega") and (last.kind in ("n", "w") or last.text in ("}", ")", "k", "M")):
        prefix = found.pop().text if last.text in ("k", "M", "m") else ""
        found.append(Token("w", "angstrom" if name == "AA" else prefix + "Omega", gap))
    elif name in _NAMED:
        inner, end = _argument(text, at, _POINTS)
        letters = re.sub(r"\\math(?:bf|rm|it)|\\hat|math(?=\Z)|[^A-Za-z\d]", "", inner)
        if letters in ("i", "j", "k") and name in ("hat", "vec", "widehat", "mathbf", "bm", "boldsymbol"):
            found.append(Token("s", f"unit {letters}", gap))
        elif (
            name in _BOLD
            or (name == "vec" and len(letters) == 1)
            or not letters
            or (name == "overline" and letters.isupper() and len(letters) > 1)
        ):
            return at
        else:
            found.append(Token("s", _name(name, letters if letters.isalnum() else inner, text), gap))
        return end
    elif name not in _FORMATTING:
        found.append(Token("s" if name in _SYMBOLS else "o", name.removeprefix("var"), gap))
    return at


def _name(kind: str, points: str, text: str) -> str:
    """Return one name for all orders of the points: angles may be read backwards, triangles from any point."""
    kind = kind.removeprefix("measured").replace("widehat", "arc").replace("overline", "bar")
    if kind == "triangle" and not re.search(r"\\(?:sim|cong)(?![A-Za-z])", text):
        points = "".join(sorted(points))
    return f"{kind} {min(points, points[::-1]) if kind in ('angle', 'arc', 'overleftrightarrow') else points}"


def _with_numbers(found: list[Token]) -> list[Token]:
    """Convert numbers in words to digits, ``million`` to a factor, and hours with ``pm`` to 24-hour time."""
    result: list[Token] = []
    words = [each.text.casefold() for each in found]
    i = 0
    while i < len(found):
        token, word, last = found[i], words[i], result[-1] if result else Token("", "")
        is_first = {each.text for each in result} <= {"the"}
        is_amount = last.kind == "n" or last.text in ("dollar", "}", ")")
        if word in SCALES and is_amount:
            at = len(result) - (last.kind == "w")
            result[at:at] = [Token("o", "*"), Token("n", str(SCALES[word]))]
        elif word in NUMBERS or (last.text == "a" and word in SCALES):
            number, taken = number_in_words(words[i:])
            result += [
                Token("n" if each.isdigit() else "o", each, each == "(") for each in re.findall(r"\d+|.", number)
            ]
            i += taken - 1
        elif last.text == "dollar" and word in _MONEY:
            result[-1:] = [Token("o", "*"), Token("n", str(_MONEY[word])), last]
        elif word in _NOONS:
            result += [Token("n", "12", token.gap), Token("w", _NOONS[word], gap=True)]
        elif is_first and PARTS.get(word, 2) > 2 and i + 1 < len(found):
            result.append(Token("n", str(PARTS[word])))  # the fourth quadrant
        elif word == "pm" and _CLOCK.fullmatch("".join(each.text for each in result[-3:])):
            result[-3] = Token("n", str(int(result[-3].text) % 12 + 12))
        elif word == "mu" and i + 1 < len(found) and found[i + 1].kind == "w":
            result.append(Token("w", "u" + found[i + 1].text, token.gap))
            i += 1
        else:
            result.append(token)
        i += 1
    return result


def _with_moduli(found: list[Token]) -> list[Token]:
    r"""Convert ``12 \pmod{7}`` to 5 and the word ``mod7``."""
    at = next((i for i, each in enumerate(found) if each.text == "mod"), 0)
    digits = [int(each.text) for each in found[at:] if each.text.isdigit()]
    start = max((i + 1 for i, each in enumerate(found[:at]) if each.text in ("≡", "=", "∈")), default=0)
    if not at or len(digits) != 1 or not digits[0] or any(each.kind not in "no" for each in found[start:at]):
        return found
    result: list[Token] = []
    for i, token in enumerate(found[: at - (found[at - 1].text == "(")]):
        result.append(token)
        if i >= start and token.text.isdigit():
            sign = -1 if result[-2:-1] and result[-2].text == "-" else 1
            residue = Token("n", str(sign * int(token.text) % digits[0]), token.gap)
            result[len(result) - 1 - (sign < 0) :] = [residue, Token("w", f"mod{digits[0]}")]
    return result


def _with_indices(found: list[Token]) -> list[Token]:
    """Give the index of each sum and product a name of its own, so that it may have any letter."""
    heads = zip(found, found[1:], found[2:], found[3:], found[4:], strict=False)
    named = [head[3].text for head in heads if head[0].text in ("sum", "prod") and head[4].text == "="]
    places = {name: f"index {i}" for i, name in enumerate(dict.fromkeys(named))}
    return [each._replace(text=places.get(each.text, each.text)) if each.kind == "s" else each for each in found]


def render(found: Sequence[Token]) -> str:
    """Return the text of the tokens, without formatting commands."""
    text = ""
    for token in found:
        text += " " * bool(text and (token.gap or (text[-1:].isalnum() and token.kind in "wsf"))) + token.text
    return text
