"""The values of a shell's variables, the words that its expansions give, and the tests that compare them."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from areal.convert.reading import DOLLAR, Unread
from areal.convert.shell_nodes import (
    ArithmeticExpansion,
    Assignment,
    CommandSubstitution,
    Literal,
    Node,
    ParameterExpansion,
    Part,
    Word,
)
from areal.convert.shell_printing import NotKnown, calculated
from areal.dataclasses import dataclass, field

_Sized = TypeVar("_Sized", str, list[str])
_REFERENCE = re.compile(r"\$\{?([A-Za-z_]\w*)")
_RANGE = re.compile(r"(.*?)\{(-?\d{1,4})\.\.(-?\d{1,4})\}(.*)", re.DOTALL)
_LISTED = re.compile(r"([^=]*?)\{([^{},]*(?:,[^{},]*)+)\}(.*)", re.DOTALL)
_DEFAULTS = (":-", "-", ":=", "=", ":+", "+")
_MOST_CHARACTERS, _MOST_WORDS = 1 << 20, 1 << 15
_NUMBER = re.compile(r"-?\d+")


@dataclass
class Values:
    """Variables, arrays by index or key, and positional arguments (None for those of the script itself, which are not
    known). In a text ``${NAME}`` is not known, and ``DOLLAR`` is a dollar that stands for itself. ``unset``: variables
    that are never set, whose words a command therefore does not have. ``script``: the file that is read."""

    variables: dict[str, str]
    arrays: dict[str, dict[str, str]] = field(default_factory=dict)
    arguments: list[str] | None = None
    unset: list[str] = field(default_factory=list)
    script: Path = Path()

    def output(self, body: Sequence[Node]) -> str:
        """Return what commands print. Raises NotKnown."""
        raise NotKnown

    def text(self, word: Word) -> str:
        """Return the text of a word that is not split, as in an assignment."""
        return self.bounded("".join(self.part(part) for part in word))

    def bounded(self, value: _Sized) -> _Sized:
        """Return a value that no script grows without end. Raises Unread."""
        if len(value) > (_MOST_CHARACTERS if isinstance(value, str) else _MOST_WORDS):
            raise Unread(
                f"{self.script}: a value grows beyond {_MOST_CHARACTERS:,} characters or {_MOST_WORDS:,} words"
            )
        return value

    def part(self, part: Part) -> str:
        match part:
            case Literal():
                home = self.variables.get("HOME") if not part.quoted and re.match(r"~(?:/|$)", part.text) else None
                return (home + part.text[1:] if home else part.text).replace("$", DOLLAR)
            case ArithmeticExpansion():
                return calculated(self.text(part.inner), self.variables)
            case CommandSubstitution():
                try:
                    return self.output(part.body).rstrip("\n")
                except NotKnown:
                    return part.source
            case ParameterExpansion():
                elements = self.elements(part)
                return self.value(part)[0] if elements is None else " ".join(elements)

    def fields(self, words: Sequence[Word]) -> list[str]:
        """Return words as bash splits them. A variable that is never set gives none, unless an option precedes it."""
        found = list[str]()
        for word in words:
            only = word[0] if len(word) == 1 else None
            if isinstance(only, ParameterExpansion) and not only.quoted and self.elements(only) is None:
                is_option = bool(found) and re.match(r"--\w[^=]*$", found[-1]) is not None
                if not self.value(only)[1] and not is_option and not only.name.isdigit():
                    self.unset += [only.name]
                    continue
            is_plain = isinstance(only, Literal) and not only.quoted
            found += _braces(self.text(word)) if is_plain else self.split(word)
        return self.bounded(found)

    def split(self, word: Word) -> Iterator[str]:
        """Yield the words that one word becomes."""
        present, begun = "", False
        for part in word:
            elements, ends = self.elements(part) if isinstance(part, ParameterExpansion) else None, False
            if elements is not None and isinstance(part, ParameterExpansion):
                is_one = part.quoted and "*" in (part.name, self.text(part.index))
                pieces = elements if part.quoted else [piece for each in elements for piece in _split(each)]
                pieces = [self.variables.get("IFS", " ")[:1].join(pieces)] if is_one else pieces
            elif part.quoted or (isinstance(part, Literal) and not re.search(r"\s", part.text)):
                pieces = [self.part(part)]
            elif isinstance(part, ParameterExpansion) and (default := self.default(part)) is not None:
                pieces = list(self.split(default))
            else:
                text = self.part(part)
                pieces, ends = _split(text), text[-1:].isspace()
                if text[:1].isspace() and begun:
                    yield present
                    present, begun = "", False
            for piece in pieces[:-1]:
                yield present + piece
                present = ""
            present += "".join(pieces[-1:])
            begun = begun or bool(pieces)
            if ends and begun:
                yield present
                present, begun = "", False
        if begun:
            yield present

    def elements(self, variable: ParameterExpansion) -> list[str] | None:
        """Return the words that ``$@`` or ``${NAME[@]}`` stands for; None for a variable with one value."""
        if variable.name in "@*":
            found = list(self.arguments or [])
        elif variable.index and self.text(variable.index) in ("@", "*"):
            array = self.arrays.get(variable.name)
            one = [self.variables[variable.name]] if variable.name in self.variables else []
            found = one if array is None else list(array) if variable.prefix == "!" else list(array.values())
        else:
            return None
        operation, operand = variable.operation, self.text(variable.operand)
        if variable.prefix == "#":
            return None
        if operation in (":-", "-", ":+", "+"):
            return list(self.split(variable.operand)) if bool(found) == ("+" in operation) else found
        if operation == ":" and (bounds := re.fullmatch(r"\s*(\d+)(?::(\d+))?\s*", operand)) is not None:
            first = max(0, int(bounds[1]) - (variable.name in "@*"))
            return found[first:][: int(bounds[2]) if bounds[2] else None]
        return [_changed(each, operation, operand) for each in found] if operation else found

    def value(self, variable: ParameterExpansion) -> tuple[str, bool]:
        """Return the value of a variable, and whether it is set. If it is not, the value is a reference to it."""
        name, operation, prefix = variable.name, variable.operation, variable.prefix
        known = self.known(variable)
        if prefix == "!" and known is not None:
            return self.value(ParameterExpansion(known, variable.source, variable.quoted, operation=operation))
        if (default := self.default(variable)) is not None:
            if operation[-1] == "=":
                self.variables[name] = self.text(default)
            return self.text(default), True
        if operation in _DEFAULTS:
            return known or "", True
        if known is None:
            return (f"${{{name}}}" if operation or variable.index else variable.source), prefix == "#"
        if "$" in known and (operation not in ("", ":?", "?") or prefix == "#"):
            return f"${{{self.named([known]) or name}}}", True
        return (str(len(known)) if prefix == "#" else _changed(known, operation, self.text(variable.operand))), True

    def default(self, variable: ParameterExpansion) -> Word | None:
        """Return the word in an expansion that stands for the variable: a default, or what replaces any value."""
        if variable.operation not in _DEFAULTS:
            return None
        known = self.known(variable)
        is_missing = known is None or (not known and variable.operation[0] == ":")
        if variable.operation[-1] == "+":
            return () if is_missing else variable.operand
        return variable.operand if is_missing else None

    def known(self, variable: ParameterExpansion) -> str | None:
        """Return the value of a variable before its operation; None if it has none, or it is not known."""
        name, arguments = variable.name, self.arguments
        if name == "0" or (name == "BASH_SOURCE" and name not in self.arrays):
            return str(self.script)
        if name == "#" or (variable.prefix == "#" and name in "@*"):
            return None if arguments is None else str(len(arguments))
        if name.isdigit():
            found = (arguments or [])[int(name) - 1 : int(name)]
            return found[0] if found else None
        if variable.prefix == "#" and variable.index and self.text(variable.index) in "@*":
            return "$" * (name not in self.arrays) or "#" * len(self.arrays[name])  # whose length is the number
        if (array := self.arrays.get(name)) is None:
            return self.variables.get(name)
        index = self.text(variable.index or (Literal("0", True),))
        if index not in array:
            index = calculated(index, self.variables)
            index = str(len(array) + int(index)) if re.fullmatch(r"-\d+", index) else index
        return f"${{{self.named([index]) or name}}}" if "$" in index else array.get(index)

    def named(self, texts: Sequence[str]) -> str:
        """Return the first variable that is not known of those that the texts refer to, or ""."""
        names = (name for text in texts for name in _REFERENCE.findall(text))
        return next((name for name in names if "$" in self.variables.get(name, "$")), "")

    def assign(self, made: Assignment) -> None:
        name, value = made.name, made.value
        if isinstance(value, list):
            array = dict(self.arrays.get(name, {})) if made.extends else {}
            for index, word in value:
                place = max((int(each) for each in array if each.isdigit()), default=-1) + 1
                words = self.fields([word]) if not index else [self.text(word)]
                keys = [str(place + count) for count in range(len(words))] if not index else [self.text(index)]
                array |= dict(zip(keys, words, strict=True))
            self.arrays[name] = array
            self.variables.pop(name, None)
        elif made.key or name in self.arrays:
            array, key = self.arrays.get(name, {}), self.text(made.key or (Literal("0", True),))
            self.arrays[name] = {**array, key: array.get(key, "") * made.extends + self.text(value)}
        else:
            self.variables[name] = self.variables.get(name, "") * made.extends + self.text(value)

    # tests

    def holds(self, words: Sequence[Word]) -> bool | None:
        """Return whether a test holds; None if that is not known. A variable that is not set is empty beside ``-z``,
        ``-n`` and ``""``; its comparison with a text is not known, because it may be exported where the job starts."""
        found = [self.text(word) for word in words]
        for place, word in enumerate(words):
            only = word[0] if len(word) == 1 else None
            if isinstance(only, ParameterExpansion) and self.elements(only) is None and not self.value(only)[1]:
                beside = {*found[max(0, place - 2) : place], *found[place + 1 : place + 3]}
                if beside & {"-z", "-n", ""} and not (only.name.isdigit() and self.arguments is None):
                    found[place] = ""
        return self.connected([each for each in found if each not in ("[", "]", "[[", "]]", "test")])

    def connected(self, words: Sequence[str]) -> bool | None:
        depths = list(itertools.accumulate((word == "(") - (word == ")") for word in words))
        for operators, decided in ((("||", "-o"), True), (("&&", "-a"), False)):
            at = [place for place, word in enumerate(words) if word in operators and not depths[place] and place]
            if at:
                bounds = itertools.pairwise([-1, *at, len(words)])
                found = [self.connected(words[first + 1 : last]) for first, last in bounds]
                return decided if decided in found else None if None in found else not decided
        if words[:1] == ["!"]:
            holds = self.connected(words[1:])
            return None if holds is None else not holds
        return self.connected(words[1:-1]) if words[:1] == ["("] and words[2:] else self.compares(words)

    def compares(self, words: Sequence[str]) -> bool | None:
        """Return whether one comparison holds; None if that is not known."""
        if any("$" in each for each in words) or not 0 < len(words) < 4:
            return None
        if len(words) < 3:
            flag, name = words if len(words) == 2 else ("-n", words[0])
            path = Path(name).expanduser()
            tests = {"-z": lambda: not name, "-n": lambda: bool(name), "-d": path.is_dir, "-e": path.exists}
            tests |= dict.fromkeys(("-f", "-r", "-s"), path.is_file)
            tests["-v"] = lambda: name in self.variables or name in self.arrays
            return bool(tests[flag]()) if flag in tests else None
        first, operation, other = words
        if operation in ("=", "==", "!="):
            return (first == other or fnmatch.fnmatchcase(first, other)) == (operation != "!=")
        symbol = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}.get(operation)
        found = calculated(f"({first}) {symbol} ({other})", self.variables) if symbol else ""
        return found == "1" if _NUMBER.fullmatch(found) else None


def matches(word: str, patterns: Sequence[str]) -> bool | None:
    """Return whether ``word`` matches one of the ``patterns`` of a ``case``; None if that is not known."""
    if "*" in patterns:
        return True
    return (
        None
        if any("$" in each for each in (word, *patterns))
        else any(fnmatch.fnmatchcase(word, it) for it in patterns)
    )


def _split(text: str) -> list[str]:
    """Split a value into words. Of several lines those that begin with ``#`` are left out. The output of a command is
    one word."""
    if "$(" in text or "`" in text:
        return [text]
    lines = text.split("\n")
    return " ".join(each for each in lines if not lines[1:] or not each.lstrip().startswith("#")).split()


def _braces(word: str) -> list[str]:
    """Return the words of ``a{1..3}`` and ``a{b,c}``."""
    if (found := _RANGE.fullmatch(word)) is not None:
        first, last = int(found[2]), int(found[3])
        numbers = range(first, last + 1) if last >= first else range(first, last - 1, -1)
        return [each for number in numbers for each in _braces(f"{found[1]}{number}{found[4]}")]
    if (found := _LISTED.fullmatch(word)) is not None:
        return [each for one in found[2].split(",") for each in _braces(f"{found[1]}{one}{found[3]}")]
    return [word]


def _changed(text: str, operation: str, operand: str) -> str:
    """Return a value after an operation such as ``${NAME##*/}``."""
    if operation in ("#", "##", "%", "%%"):
        at_end, is_long = operation[0] == "%", len(operation) == 2
        cuts = range(len(text) + 1) if at_end == is_long else range(len(text), -1, -1)
        for cut in cuts:
            if fnmatch.fnmatchcase(text[cut:] if at_end else text[:cut], operand):
                return text[:cut] if at_end else text[cut:]
        return text
    if operation in ("/", "//"):
        pattern, _, by = operand.partition("/")
        regular = fnmatch.translate(pattern).removesuffix(r"\Z")
        return re.sub(regular, lambda _: by, text, count=0 if operation == "//" else 1)
    if operation[:1] in ("^", ","):
        rest = len(operation) == 2
        first, more = (text, "") if rest else (text[:1], text[1:])
        return (first.upper() if operation[0] == "^" else first.lower()) + more
    bounds = re.fullmatch(r"\s*\(?\s*(-?\d+)\s*\)?\s*(?::\s*(-?\d+)\s*)?", operand) if operation == ":" else None
    return text[int(bounds[1]) :][: int(bounds[2]) if bounds[2] else None] if bounds is not None else text
