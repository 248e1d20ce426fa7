"""Extraction of the final answer from a text, and comparison with the reference answer.

The answer is the last ``\\boxed{...}`` or ``####``, whichever comes later; without either, what follows "the answer
is", or the last number or formula in the prose. The whole answer must match: neither ``\\boxed{18, 19}``, nor two boxes
joined by "or", nor the prose ``18 million``, ``17 and 18``, ``not 18`` or ``at least 18`` equals 18.
"""

from __future__ import annotations

import itertools
import re
from fractions import Fraction
from typing import Any

from areal.reward.equality import CHANGES, CHOICES, SCALE, exact_number, is_number, same
from areal.reward.formulas import Formula
from areal.reward.notation import LONGEST, group, in_latex, render, tokens
from areal.reward.structure import Node, structure, texts_of
from areal.reward.units import MONTHS, measure, symbol_of

_MOST_BOXES = 20
_TAIL = 3000  # of a text without a marked answer: the patterns take quadratic time in the worst case

_SPECIAL_TOKEN = re.compile(r"</answer>|<\|[^|<>]*\|>|</s>|<end_of_turn>|<eos>")
_BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])\s*")
_MARK = re.compile(
    r"####\s*(?=[-+\d.$€£¥({*\\]|\Z|\S{1,99}(?: \S{1,99})?\s*\Z)|<answer>\s*"
)  # before other text it is a heading
_STATED = re.compile(
    r"(?:\b(?:[Aa]nswer|ANSWER|[Oo]ption|[Cc]hoice)(?:\s*[*:]|\s+[-–—]\s|\s+(?:is|(?:would|must|should|has\sto)\s+be)\b)"
    r"|(?:故|应|题|，)选择?(?:选项)?|【?答案】?[是为选]?)[\s:：*\"“]*(?=[^\s.!?*])"
    r"|(?:(?<!not )(?<!n't )\b(?:choose|pick|select|go(?:ing)? with|answer|is|must be|corresponds?\sto|matches|gives"
    r"|yields|leaves|leaving|(?:[Ii]t|[Tt]hat)['’]s|[Ss]o)\s+"
    r"(?:(?:the\s+)?(?:answer\s+)?(?:option|choice|answer)\s+)?|,\s(?:i\.e\.,?\s)?(?:answer\s)?(?:option|choice)\s)"
    r"(?=(?:\W|\\(?:text|math)\w*){0,6}[A-J]\b\W*(?:$|[.:\n]|because\b|since\b))"
    r"|(?<![A-J], )(?<!\), )(?<!or )(?<!and )(?<!that )(?<!ment )"
    r"(?=\(?\b[A-J]\b(?:\W{0,4}(?:which\s)?|\)?,[^,.\n]{1,40},\s)(?:is|as)"
    r"(?:\s(?:therefore|thus|also|the|only|most)){0,3}\s(?:correct|right|best|closest|nearest|appropriate|answer)\b)"
    r"|(?<![Nn]ot )\b[Oo]nly\s(?:option\s|choice\s)?(?=\(?[A-J]\)?\s(?:works|fits|holds|matches|satisfies|is)\b)"
    r"|(?=\([A-J]\)\sit\sis\b)"
)
_REJECTED = re.compile(  # before "but", and at the end of a sentence
    r"(?:\bnot|n['’]t)\s(?!only\b)(?:[^\s.!?]+\s){1,3}?but(?=\s)(?:\srather)?"
    r"|(?:(?:,\s*|\s\(|\s(?=and|but))(?:and\s|but\s)?not\s[^\s,.!?]+(?:\s[a-z]+)?"
    r"|\s(?:rather than|instead of)[^,.!?\n]*"
    r"|,\s(?:which\sis\s)?[$\d][^,!?\n]*\b(?:less|more|fewer|[a-z]+er)\sthan\s[^,!?\n]*)"
    r"(?=[.!]?(?:\n|\Z))"
)
_ASIDE = re.compile(
    r"(?<=[\w.])\s\((?!or\b|maybe|perhaps|possibly|mod)(?=[^()]*\d)(?=[^()]*(?<![\\A-Za-z])[A-Za-z]{2})[^()]*\)"
)
_BESIDE = re.compile(
    r"(?:\A|(?<=[.!?]\s)|(?<=\n))(?:Since|Because|As|Given|Between|Among|Of)\b(?:\$[^$\n]*\$|[^$,\n])*,\s"
    r"|(?:,?\s(?:since|because)|(?<=[\d$)}]),?\s(?:(?:which|and|it)\s)*(?:is\s)?(?:(?:attain|achiev|reach|obtain)ed"
    r"|occurs?|occurring|(?:when|at(?=[^\n]*=)|with equality)(?![^\n]*\b(?:and|or|but)\s[\d$-])))"
    r"\s(?:[^.!?\n]|\.\d)*[.!?]?\s*\Z"
    r"|(?<=[\d$])(?:\s(?!and|or|than|is|are|minus|plus)[a-z]+){0,5}\s(?:the|all|these|those)\s"  # 7 of the 12 apples
    r"\$?\d+\$?\s[a-z]+s\b(?=\D*\Z)"
)
_CLOSING = re.compile(
    r"\n\s*(?:Let me know|[^\w\s]*Note\b(?! that)(?![^\n]*(?:=|\b(?:so|total|answer|thus|therefore|hence)\b))"
    r"|Explanation|This is because|I hope|Hope|Feel free|Would you|Do you|If you|Please)\b[^\n]*\s*\Z"
    r"|(?<=[.!\n])[ ]?[^\w\s]{0,9}(?:Check|Verification|(?:To|Let['’]s|Let us|We) (?:can )?(?:check|verify))\b"
    r"(?!.*\b(?i:so|answer|thus|therefore|hence|total)\b).*\Z",
    re.DOTALL,
)
_CLAUSE = re.compile(  # after a number in bold, or an amount of money
    r"(?<!\*)(\*\*[^*\n]*\d[^*\n]*\*\*|\.\d\d)(?:,\s(?:which|i\.e\.)\s[^*\n]*\Z|\s(?!.*\d\D+\d)"
    r"(?!.*\b(?:and|or|but|so|then|otherwise|is|are|was|were|equals|gives|makes|leaves)\b)"
    r"(?:over|in|for|after|when|if|with|at|on|from|during|per|because|since|before)\b[^*\n.!?,;:=$]*[.!]?\s*\Z)"
)
_UNIT = re.compile(r"[ ]?\(?(?!in\b|A\b)([kM]?\\Omega|[A-Za-z]+)(?:\^\d)?(?:/[A-Za-z]+(?:\^\d)?)?\b")
_WITHDRAWN = re.compile(r"\b(?:Wait|[Nn]o,? wait|Actually|Hmm|On second thought|Correction)\b[\s,.:!…]*")
_REFUSAL = re.compile(
    r"(?:not|n['’]t|in)\s?(?:have\s)?(?:enough|sufficient)\s(?:information|data)"
    r"|(?:\b(?:can|could)\s?(?:not|n?['’]t)|\bunable\sto)"
    r"\s(?:be\s)?(?:determine|solve|answer|find\sthe\s(?:answer|solution))"
)
_RESTATED = re.compile(r"(?<=[\d$)}%])[,;]?\s+\(?(?:i\.e\.|that is,|which (?:is|equals)\b)")
_LABELLED = re.compile(r"\W*\(?[A-J][).:]\s[^\n]*\s*")
_EMPHASIS = re.compile(
    r"(?<!not )(?<!n't )\*\*\W*([A-J]|[A-Za-z][^\d*:$\\]+?)\W*\*\*(?:, (?!or|but|not|and)[^*\n]*)?\W*\Z"
)
_SENTENCE_END = re.compile(r"\n|(?<!\\)[.!?](?:\s(?!\\[a-z]|[-+*/=<>])|\Z)")
_FORMULA = re.compile(r"\$([^$\n]+(?:\$(?:,?\s*(?:or|and)|,)\s*\$[^$\n]+)*)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_DISPLAYED = re.compile(r"\\\[(.+?)\\\]|\$\$(.+?)\$\$", re.DOTALL)
_WORDS = re.compile(r"(?:\\\(|\$)\s*\\text\w*\{([A-Za-z][^{}$]*)\}\s*(?:\\\)|\$)")
_SUM = re.compile(r".*\band\s(?=\s*\w+(?:\s*[-+]\s*\w+)+\s*=)", re.DOTALL)  # m/n = 27/64 and m + n = 91
_QUANTITY = (
    r"(?:(?:\d{1,3}(?:[,_' ]\d{3})+(?!\d)|\d+[ ]\d+/\d+|\d+)(?:\.\d+)*|(?<![\w.])\.\d+"
    r"|\\[dtc]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}|\\sqrt\s*\{[^{}]*\})"
)
_BETWEEN = r"(?:[:,]|[ ]:[ ]|[ ]?(?:-{1,3}|\+/-|\+|±|\*{1,2}|/|~|\\(?:times|cdot|div|pm)[ ]{0,2})[ ]?|[ ]?\^[ ]?\{?-?)"
_PROSE_NUMBER = re.compile(  # including context that changes its value or adds more numbers: 2^18, 18 million, 17-18
    "(?<![^\\W_\u4e00-\u9fff])"
    r"(?<![^\W_]_)(?<!_\{)(?<!\d\.)(?<!\^)(?<!\^[{-])(?<!\^\{-)"  # CO2, x_2, cm^2
    rf"(?:(?<![)\]}}.])[-+]|(?:\\pm|±)[ ]{{0,2}}|(?:minus|negative)[ ])?(?:[$€£¥]-?)?{_QUANTITY}"
    rf"(?:{_BETWEEN}{_QUANTITY}\}}?)*"
    r"(?: ?[aApP]\.?[mM]\b\.?| ?\(mod \d+\)"
    rf"|[^\W\d_\u4e00-\u9fff]\w*|[\u4e00-\u9fff]++(?!\d)|\\sqrt\s*\{{[^{{}}]*\}}| ?\\pi(?![a-z])"
    rf"|(?:° ?[NSEW]\b| ?\\?%| (?:{SCALE}|squared|cubed|and a half)\b))?"
)
_REFUTED = r"(?:\s*(?:is|are|was)(?:n['’]t|\s+(?:not|wrong|false|incorrect|impossible))\b|\s*(?:错|不正确|不对|不成立))"
_PREDICATE = re.compile(
    r".*\b(?:is|are|equals)\s+(?!not\b|an?\b|the\b|true|false|correct|right|wrong|incorrect)([^?\n]+?)[.!\s]*",
    re.DOTALL,
)
_TRUTH = re.compile(r"(Yes|No)[,.](?=\s+(?:it|this|that|they|there|the)\b(?:[^\d$]|\^\d)*\Z)")
_THUS = re.compile(
    r"(?i)\A(?:.*[,;]\s(?=(?:so|thus|hence|therefore)\b))?"
    r"(?:(?:thus|therefore|hence|so|then|finally|in conclusion|(?:most )?likely|probably),?\s+)?"
    r"(?:(?:(?:we (?:find|see|conclude|get|know|deduce)|it follows|this (?:means|shows|implies)) )?that )?"
)
_UNBRACED = re.compile(r"[^\s${][^\s$]*")
_WINDOW = 80
_MEASURED = (
    r"(?:h(?:(?:ou)?rs?)?|min(?:ute)?s?|sec(?:ond)?s?|days?|weeks?|f(?:ee|oo)?t|inch(?:es)?|yards?|dollars?"
    r"|cents?|pounds?|ounces?)"
)
_ALL_BUT = r"\ball (?:the )?(?:real|numbers?|reals)(?: numbers?)?(?: \$?[a-z]\$?)? (?:except|other than)\b"
_IN_FORMULA = rf"\\[A-Za-z]+|\b(?:and|or|ln|sin|cos|tan|log|exp)\b|(?<=\d) {_MEASURED}\b|(?<=\d) to (?=\d)|{_ALL_BUT}"
_WORD = re.compile(r"(?:[^\W\d_]{2}|\bi\.e\.)[^\s]*[^\w$\\(\[{|<>=+√-]*")
_COMBINED = re.compile(r"[,(\[{<>^]|\\|\d[a-z]|\b(?:and|or|to|ln|all)\b|=.*[A-Za-z]")
_AMOUNTS = re.compile(rf"(?<![\d.,])(?:\d+ {_MEASURED}(?:,| and|, and)? )+\d+ {_MEASURED}\b")
_MONTH, _DAY = f"(?:{'|'.join(each[:3].title() for each in MONTHS)})[a-z]*", r"\d{1,2}(?:st|nd|rd|th)?"
_DATE = re.compile(rf"\b(?:{_MONTH}\.?\s{_DAY}|{_DAY}\s{_MONTH})(?:,?\s\d{{4}})?\b")
_GAP = r"[^\w\n.!?:=]*"
_DOUBT_BEFORE = re.compile(  # text before the last number that makes it one of several numbers, or not the answer
    rf"\d[^\n.!?:=]*\bor\b{_GAP}(?:[A-Za-z'’]+{_GAP}){{0,3}}\Z"  # 18 eggs, or maybe 20
    r"|\d[^\w\n.!?:=()<>]*(?:\b(?:and|to|through|vs|versus)\b\.?)?[^\w\n.!?:=()<>]*\Z"  # 17, 18 and 20
    rf"|\d[ ](?:{_MEASURED}|months?|years?|remainder|r),?"
    rf"(?:[ ]and)?{_GAP}\Z"  # 1 hour and 18 minutes
    r"|\d[ ][A-Za-z]+[ ]in[ ]\Z"  # 180 miles in 3 hours
    r"|\b(?:maybe|perhaps|possibly)\b[^\w\n]*\Z"
    r"|\b(?:not|never|cannot|whether|[a-z]+n['’]t)\b(?:\s+[A-Za-z]+){0,4}[^\w\n.!?:;,=]*\Z"
    r"|(?:[≤≥≠]|!=|[<>]=|[ \d)$][<>]|(?<![\w</])[A-Za-z][<>]|\\(?:[gl]eq?|neq?)(?![A-Za-z]))\s*[$\\]*\Z",
    re.IGNORECASE,
)
_DOUBT_AFTER = re.compile(
    r"\W{0,3}\?|\s*(?:[A-Za-z]+\s+)?(?:or\s+(?:so|more|less|over|under|above|below|[a-z]+er)|at\s+(?:least|most))\b"
    rf"|{_REFUTED}|\s*不|[^，。]*(?:增根|舍去|不成立|不合题意)",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(r"([A-Za-z]\w*\s*=)\s*\Z")
_NEIGHBOURS = re.compile(r"(?:[A-Za-z'’]+[ ](?=(?:of|to)\b))?[A-Za-z'’]+(?=[ $\\*_]*\Z)")
_NEGATED = re.compile(r"(?:\A|[=$(:])[-−]\Z|[=$]\s*[-−]\s*\Z")
_FORMATTING = re.compile(r"\\(?:text|mathrm|mbox)\s*|\\q?quad\b|\\[%,;: ()\[\]]|[{}%]")
_JOINED = re.compile(
    r"[\s$()]*(?:[,;/|&~]|-{1,3}|[,;]?\s*\b(?:and/or|or|and|to|vs\.?)\b"
    r"(?:\s+(?:else|even|also|maybe|perhaps|possibly|alternatively))?)[\s$()]*",
    re.IGNORECASE,
)


def final_answer(text: str, in_words: bool = False) -> str | None:
    """Return the final answer in a text; None if there is none, or if it was truncated. With ``in_words``, prose that
    ends with words is not searched for a number."""
    if not isinstance(text, str):
        raise TypeError(f"the completion is a {type(text).__name__}, not a text")
    text = _SPECIAL_TOKEN.sub("", text.rpartition("</think>")[2].partition("<think>")[0])
    marks = [*_BOX.finditer(text), *_MARK.finditer(text)]
    if not marks:
        return _unmarked(text[-_TAIL:], in_words)
    last = max(marks, key=re.Match.start)
    if last[0].startswith("\\"):
        return _last_boxes(text, [mark for mark in marks if mark[0].startswith("\\")])
    return text[last.end() :].partition("\n")[0].strip() or None


def _unmarked(text: str, in_words: bool) -> str | None:
    """Return what follows "the answer is" if it is a formula, a letter or has no number, else the last number."""
    for what in (_CLOSING, _ASIDE, _REJECTED, _BESIDE):
        text = what.sub("", text)
    text = _DISPLAYED.sub(lambda match: "$" + " ".join((match[1] or match[2]).split()) + "$", _CLAUSE.sub(r"\1", text))
    text = _WITHDRAWN.split(_WORDS.sub(r"\1", text))[-1]
    before, *statements = _STATED.split(text)
    is_stated = bool(statements)
    if not is_stated and _REFUSAL.search(text):
        return None
    if not is_stated and _LABELLED.fullmatch(text):
        return text
    emphasis = _EMPHASIS.search(text)
    if not is_stated and emphasis and not _DOUBT_BEFORE.search(text[: emphasis.start()]):
        return emphasis[1]
    after = statements[-1].strip() if is_stated else before.strip().rpartition("\n")[2]
    first, *restated = _RESTATED.split(after)
    sentence = _SENTENCE_END.split(first, maxsplit=1)[0].strip(' "”') if is_stated else after
    stated = _THUS.sub("", sentence).removesuffix(" only")
    if not is_stated and (truth := _TRUTH.match(stated)):
        return truth[1]
    subject = None if is_stated else re.fullmatch(r"(.+?)\s(?:is|are)\s(?:the|our)\s(?:(?!\band\b)[^,.;])*\.?", stated)
    if subject and _is_formula(subject[1]):
        return subject[1]
    if not is_stated and not in_words and (formula := _formula_at_end(stated)):
        return formula
    predicate = None if is_stated or "that " in stated else _PREDICATE.fullmatch(stated)
    if predicate and (in_words or not re.search(r"\d", text)):
        return predicate[1]
    is_short = len(stated.split()) < 6 and len(_PROSE_NUMBER.findall(stated)) == 1 and not CHANGES.search(stated)
    if is_stated and is_short and CHOICES.search(stated.replace(".", "").casefold()):  # a loss of $5
        return rf"\text{{{stated}}}"
    if after[len(sentence) :].startswith("?"):
        return None
    if stated and (
        in_words
        or not re.search(r"\d", after if is_stated else text)
        or (is_stated and (_is_formula(stated) or _FORMULA.fullmatch(stated) or choice_of(tokens(stated))[0]))
    ):
        return stated
    is_whole = is_stated and not restated and re.search(r"\d", sentence)
    return _last_in_prose(sentence if is_whole else text, doubt=True)


def _is_formula(text: str) -> bool:
    return not re.search(r"[^\W\d_]{2}", re.sub(_IN_FORMULA, "", in_latex(text)))


def _formula_at_end(sentence: str) -> str | None:
    """Return the formula after the last word of a sentence, if it is more than one number."""
    text = re.sub(r"(?<!\\)\$", "", in_latex(sentence))
    words = _WORD.finditer(re.sub(_IN_FORMULA, lambda each: "0" * len(each[0]), text))
    last = max((each.end() for each in words), default=0)
    formula = re.split(r"[.!?]\s+(?=\w)", _SUM.split(text[last:])[-1])[-1].strip(" *.!=")
    is_number = re.search(r"(?:\A|=)[\s\\$]*[-\d.,]+\Z", formula) and not re.search(r",\s|\b(?:and|or|all)\b", formula)
    is_number = is_number or ("=" in formula and not re.search("[A-Za-z]", formula))
    is_whole = re.match(r"[^\s<>/+)]", formula) and _COMBINED.search(formula) and not is_number
    return None if not is_whole or _DATE.search(text) or _DOUBT_BEFORE.search(text[:last]) else formula


def right_answer(answer: Any) -> str:
    """Return a row's reference answer: the marked one of its solution, else the whole text. Raises ValueError."""
    if isinstance(answer, (list, tuple)) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, (bytes, list, tuple, dict)):
        raise ValueError(f"the row's answer is a {type(answer).__name__}, not a text or a number: {str(answer)[:80]}")
    text = "" if answer is None else str(answer).strip()
    found = final_answer(text) if _BOX.search(text) or _MARK.search(text) else text
    if not found:
        raise ValueError(f"the row has no answer: {text[-80:]!r}")
    return found


def right_number(answer: Any) -> str:
    """Return a row's reference number: the marked one, else the last of the text. Raises ValueError without one."""
    found = right_answer(answer)
    if as_number(found) is None:
        found = _last_in_prose(found) or ""
    if as_number(found) is None:
        raise ValueError(f"the row's answer has no number: {str(answer)[-80:]!r}")
    return found


def _last_boxes(text: str, boxes: list[re.Match[str]]) -> str | None:
    """Return the content of the last box, joined with preceding boxes that only a comma or a conjunction separates from
    it. Of nested boxes, the outermost is used."""
    arguments: list[tuple[int, int, int]] = []
    covered = 0
    for box in boxes[-_MOST_BOXES:]:
        if box.start() >= covered:
            argument = _UNBRACED.match(text, box.end())
            end = argument.end() if argument else group(text, box.end())[1] if text[box.end() :][:1] == "{" else 0
            arguments.append((box.start(), box.end(), end))
            covered = end or box.end() + len(text[box.end() :].partition("\n")[0])
    found: list[tuple[str, str]] = []
    after = 0
    for begin, start, end in reversed(arguments):
        between, name = text[end:after], _ASSIGNED.search(text[max(0, begin - _WINDOW) : begin])
        if name and found and found[0][0]:  # x = 1 or x = 2
            between = _ASSIGNED.sub("", between)
        if found and not _JOINED.fullmatch(_FORMATTING.sub(" ", between)):
            break
        if not end:
            break
        content = text[start:end].removeprefix("{").removesuffix("}").strip()
        if _NEGATED.search(text[max(0, begin - _WINDOW) : begin]):
            content = f"-({content})"
        key = name[1].replace(" ", "") if name else ""
        is_repeated = any(content == each and (key == other or not key * bool(other)) for other, each in found)
        found[:0] = [] if is_repeated else [(key, content)]
        after = begin
    names = {name for name, _ in found}
    are_named = len(names) == len(found) > 1 and all(names)  # x = 1 and y = 2
    return ", ".join(name * are_named + content for name, content in found) if found else None


def _last_in_prose(text: str, doubt: bool = False) -> str | None:
    """Return the last number or formula in prose; with ``doubt``, None if the words beside it make it no answer."""
    text = in_latex(text)
    found = [
        (match.end(), -match.start(), re.sub(r"(?<!\\)\$", "", inner))
        for match in _FORMULA.finditer(text)
        if re.search(r"\d", inner := next(filter(None, match.groups())))
    ]
    numbers = itertools.chain(_PROSE_NUMBER.finditer(text), _AMOUNTS.finditer(text), _DATE.finditer(text))
    found += [(match.end(), -match.start(), match[0]) for match in numbers]
    if not found:
        return None
    end, start, answer = max(found)
    answer = _SUM.split(answer)[-1]
    before, after = text[max(0, -start - _WINDOW) : -start], text[end : end + _WINDOW]
    beside = _NEIGHBOURS.search(before)
    is_changed = beside is not None and CHANGES.search(beside[0])
    is_doubtful = doubt and (_DOUBT_BEFORE.search(before) or _DOUBT_AFTER.match(after) or is_changed)
    unit = _UNIT.match(after)
    is_unit = unit and measure(symbol_of(unit[1].replace("\\", "")))
    return None if is_doubtful else answer + (unit[0].replace("(", "") if unit and is_unit else "")


def _read(text: str) -> Node | None:
    return structure(tokens(text)) if len(text) <= LONGEST else None


def same_number(answer: str | None, right: str | None) -> bool:
    """Return whether ``answer`` as a whole equals the number ``right``. False if ``right`` is not a number.

    Units, currency and percent signs, and the name in ``x = 18``, are ignored. Several numbers, ranges, alternatives
    and unknowns never equal one number. One that is not rational needs mpmath: raises ImportError without it."""
    if answer is None or as_number(right) is None:
        return False
    node = _read(answer)
    return is_number(node) and same(node, _read(right or ""))


def as_number(text: str | None) -> Fraction | None:
    """Return the value of one number, with separators, a currency or a unit, or a fraction. None for other texts."""
    return exact_number(_read(text)) if text else None


def same_expression(answer: str, right: str) -> bool:
    """Return whether both are mathematically equal, or the same text if they are not mathematics."""
    if answer.strip() == right.strip():
        return True
    if max(len(answer), len(right)) > LONGEST:
        return False
    found, wanted = tokens(answer), tokens(right)
    (choice, rest), (other, other_rest) = choice_of(found), choice_of(wanted)
    if other and not choice and re.match(r"\W*(?:\\text\w*\{)?[A-Z][.)]\s", answer):  # V. Paris
        return False
    if choice and other and (choice != other or not rest or not other_rest):
        return choice == other
    plain, other_plain = (re.sub(r"\{\0([^\0]+)\0\}", r"\1", "\0".join(texts_of(each))) for each in (found, wanted))
    if found and plain == other_plain:
        return True
    pairs = {(found, wanted), (rest, other_rest)}
    if not _ASIDES.search(right):
        pairs.add((tokens(_ASIDES.sub("", answer)), wanted))
    elif not _ASIDES.search(answer):
        pairs.add((found, tokens(_BASE.sub("", right))))
    if re.search(r"\d\.\d", right) and not re.search(r"[()\[\]{}]", answer):
        pairs.add((tokens(re.sub(r"(?<=\d),(?=\d)", ".", answer)), wanted))  # a decimal comma
    return any(same(structure(one), structure(two)) for one, two in pairs if one and two)


_BASE = re.compile(r"(?<=\d)_\{?(?:\d+|\\text\{[a-z]+\})\}?\s*\Z")
_ASIDES = re.compile(  # a base, a multiplicity and what an interval is of, which the reference may leave out
    _BASE.pattern + r"|(?:\\text\w*\s*\{\s*)?\(?\b(?:with )?multiplicity\s*\}?\s*(?:\d|two|three)\)?\s*\}?"
    r"|\A\W*(?:text\w*\{)?(?!.*\bnot\b)[A-Za-z ]*\b(?:on|at|is|are)(?: the (?:interval|point))?"
    r"\s*\}?\s*(?=\$?(?:\\left)?\s*[(\[][^()\[\]]*,)"
)
_REASON = r"(?:is|as|since|because|因为|for|which|due)\b"
_LABEL = re.compile(
    r"(?:[Tt]he\s+)?(?:(?:[Cc]orrect|[Ff]inal|[Bb]est)\s+)?(?:[Oo]ption|[Cc]hoice|[Aa]nswer)?(?:\s+is)?[\s:]*"
    r"(?:\(\s*([A-Ja-j])\s*\)|([A-J])(?:\s?[.:)]|\s*\Z|\s(?=\([A-Za-z ]+\))"
    r"|\s-\s(?=(?:[\d.]+ )?[A-Za-z]{3}|[\d.]+ [a-z])"
    rf"|,[^,]{{1,40}},(?=\sis\b)|(?=(?:,|,?\s){_REASON}|,\s(?:the|an?|it|this|all|none|both)\s|,\s*-?\d+\Z))|([a-d])\)?\Z)\s*"
)
_NO_LABEL = re.compile(
    rf"{_REFUTED}|[/&+*^=<>]|[,;](?!\s*(?:因为|(?!or\b|and\b)[a-z]{{2}})|\s*-?\d)|-(?!\s*(?:[\d\\.]|frac|sqrt)|\s+[A-Za-z]{{3}})|or\b|and\b|\(?[A-J]\)?(?:\W|\Z)"
)
_LETTERS = re.compile(r"(?:\(?[A-J]\)?(?:\s*(?:[,;]|[,;]?\s*(?:&|\band\b))\s*|\s+|\Z))+|[A-J]{2,}")


def choice_of(found: Formula) -> tuple[str, Formula]:
    """Return the letters of a multiple-choice answer, such as ``(C) 27`` or ``A, C``, and the rest; "" for others."""
    if re.fullmatch(r"[\d.]+\([A-J]\)|[})]\([A-J]\)", "".join(each.text for each in found[-4:])):
        found = (*found[-3:], *found[:-3])  # 27 (C)
    plain = render([each for each in found if each.text not in ("{", "}")])
    label = _LABEL.match(plain)
    rest = plain[label.end() :].strip() if label else ""
    if label is None or _NO_LABEL.match(rest):
        if re.fullmatch(r"\(?[A-J]\)?(?:,?\s*or\s*\(?[A-J]\)?)+", plain):
            return "or", found
        letters = re.findall("[A-J]", plain) if _LETTERS.fullmatch(plain) else []
        return "".join(letters if plain.isalpha() else sorted(letters)), () if letters else found
    plains = ([each for each in found[i:] if each.text not in ("{", "}")] for i in range(len(found)))
    if re.match(rf",?\s*{_REASON}", rest):
        rest = ""
    after = next((found[i:] for i, each in enumerate(plains) if rest and render(each).strip() == rest), ())
    return (label[1] or label[2] or label[3]).upper(), after


# Built-in rewards: ``--reward exact`` and ``--reward number``


def exact(completion: str, answer: object) -> float:
    """Return 1 if the completion equals the answer, apart from surrounding white space, else 0."""
    return float(completion.strip() == str(answer).strip())


def number(completion: str, answer: object) -> float:
    """Return 1 if the final answer, as a whole, equals the number of the example, as in GSM8K, else 0."""
    return float(same_number(final_answer(completion), right_number(answer)))


BUILT_IN = {"exact": f"{__name__}:exact", "number": f"{__name__}:number"}
