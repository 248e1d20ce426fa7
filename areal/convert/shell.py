"""The commands of a shell script that run a trainer.

Four things are read: assignments of variables (``N=8``, ``${N}``, ``${1:-8}``, ``$((N * 2))``, ``A=(...)``,
``A+=...``), the commands, the files beside the script that it sources or runs, and of an ``if`` or ``case`` that
compares known values the branch that runs. If the values are not known, all branches are read, and a variable that they
set differently is unknown. Nothing is executed.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from areal.convert.reading import Unread
from areal.dataclasses import dataclass, field

_DECLARED = r"(?:(?:export|readonly|local|declare|typeset)\s+(?:-\w+\s+)*)?"
_ASSIGNMENT = re.compile(rf"^\s*{_DECLARED}([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
_CHANGED = re.compile(r"^\s*(?:for|select|let|unset|read(?:\s+-\S+)*|\(\()\s*([A-Za-z_]\w*)")  # values are not followed
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*|\d)(?:(:?)-([^${}]*))?\}|\$([A-Za-z_]\w*|\d)")  # the innermost one
_ARRAY = re.compile(r"\$\{([A-Za-z_]\w*)\[@\]\}")
_ARRAY_AS_TEXT = re.compile(
    r"\$\{#([A-Za-z_]\w*)\[[@*]\]\}|^(\s*[A-Za-z_]\w*=)\"?\$\{([A-Za-z_]\w*)\[[@*]\]\}\"?(?=\s*$)"
)
_ARGUMENTS = re.compile(r"\$(?:[@*]|\{[@*](?::([1-9]))?[^}]*\})")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_PRINTED_FOLDER = re.compile(r"\$\(pwd\)|`pwd`")
_NAME = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}
_OPERATORS[ast.Mod] = operator.mod


class Command(NamedTuple):
    """A command that runs a trainer. ``program``: the match of its name. ``launcher``: the words before it. ``first``
    and ``last``: its lines in the script. ``rest``: the number and the text of a later line that looks like a part of
    the command, but which a comment separates from it."""

    program: re.Match[str]
    launcher: list[str]
    words: list[str]
    first: int = 0
    last: int = 0
    rest: tuple[int, str] | None = None


def script_commands(text: str, programs: re.Pattern[str], environment: Mapping[str, str], name: str) -> list[Command]:
    """Return the commands that run one of ``programs``, which match one word, or two with a space between them. Raises
    Unread for a command that cannot be read."""
    return _commands(text, programs, _Shell(dict(environment), {}, set(environment)), [Path(name)])


def _commands(text: str, programs: re.Pattern[str], shell: _Shell, within: Sequence[Path]) -> list[Command]:
    """Return the commands of a file. ``within``: the script and each file that it runs, down to this one."""
    name, found, is_cut = str(within[-1]), list[Command](), False
    for line in _taken(_PRINTED_FOLDER.sub("$PWD", text), shell):
        place = shell.place
        if is_cut and _ARGUMENT.match(line):
            found[-1] = found[-1]._replace(rest=(place.first, line.strip()))
        is_cut = False
        line = _ARRAY_AS_TEXT.sub(shell.array_as_text, line)
        if (exported := _EXPORTED.match(line)) is not None:
            shell.exported.update(each.partition("=")[0] for each in exported[1].split())
        if (changed := _CHANGED.match(line)) is not None:
            shell.variables[changed[1]] = f"${{{changed[1]}}}"
        assigned = _ASSIGNMENT.match(line)
        key, more, given = (assigned[1], assigned[2], assigned[3].strip()) if assigned is not None else ("", "", "")
        if given.startswith("(") and given.endswith(")"):
            words = _words(given[1:-1], shell, name)[0]
            shell.arrays[key] = [*shell.arrays.get(key, ()), *words] if more else words
        elif key and (value := _one_word(_expanded(given, shell.variables))) is not None:
            shell.variables[key] = shell.variables.get(key, "") + value if more else value
        elif not _PRINTS.match(line):
            unquoted = re.sub(r"[\"']", " ", _expanded(line, shell.variables))
            called = _commands_of(line, shell, programs, name) if programs.search(unquoted) else []
            is_cut = place.is_cut and bool(called)
            if not called and _RUNS.search(line):
                called = _of_file(line, programs, shell, within)
            found += [each._replace(first=place.first, last=place.last) for each in called]
    return found


_PRINTS = re.compile(r"\s*(?:echo|printf)\b[^;&|]*$")
_ARGUMENT = re.compile(r"\s*(?:--\w|\+*\w+(?:\.\w+)+=)")
_EXPORTED = re.compile(r"\s*(?:export|declare\s+-\w*x\w*|set(?=\s+-a\b))(\s.*)", re.DOTALL)
_RUNS = re.compile(r"(?:^|[\s;&|])(?:source|\.|bash|sh|sbatch)\s+[^-\s]|^\s*\./")
_FILE = re.compile(r"^(?:(source|\.|bash|sh|sbatch) ([^-].*)|(\./\S*))$", re.DOTALL)
_TAKES_ARGUMENTS = re.compile(r"^\s*(?:shift|while\s+getopts)\b", re.MULTILINE)
_MOST_CHARACTERS = 1 << 20


def _of_file(line: str, programs: re.Pattern[str], shell: _Shell, within: Sequence[Path]) -> list[Command]:
    """Return the commands of a file beside the script that ``line`` sources, or runs with the exported variables. A
    file that reads its arguments in a loop is not followed."""
    try:
        called = next(iter(_commands_of(line, shell, _FILE, str(within[-1]))), None)
    except Unread:
        return []
    path = _beside(called.program[2] or called.program[3], within[-1]) if called is not None else None
    if called is None or path is None or path in within:
        return []
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(_MOST_CHARACTERS)
    except (OSError, UnicodeDecodeError):
        return []
    if called.program[1] in ("source", "."):
        return _commands(text, programs, shell, [*within, path])
    if called.words and _TAKES_ARGUMENTS.search(text):
        return []
    exported = shell.variables if "-a" in shell.exported else shell.exported & shell.variables.keys()
    variables = {key: shell.variables[key] for key in exported}
    variables |= {key: value for key, equals, value in (each.partition("=") for each in called.launcher) if equals}
    variables |= {str(place): word for place, word in enumerate(called.words, 1)}
    child = _Shell(variables, {"@": called.words}, set(shell.exported))
    return _commands(text, programs, child, [*within, path])


def _beside(name: str, script: Path) -> Path | None:
    """Return the file ``name`` in the working directory or in that of ``script``. If ``name`` has an unknown variable,
    its last part beside ``script`` is tried too."""
    unknown = [script.parent / name.rpartition("/")[2]] if "$" in name else []
    return next((each for each in (Path(name), script.parent / name, *unknown) if each.is_file()), None)


def _one_word(text: str) -> str | None:
    """Return the value of an assignment, or None if a command follows it. A command as the value stays as it is."""
    if re.fullmatch(r"`[^`]*`|\$\(.*\)", text) is not None:
        return text
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return text
    return " ".join(words) if len(words) < 2 else None


def _command(words: Sequence[str], programs: re.Pattern[str], name: str) -> Command | None:
    """Return the command whose program the words name, also within ``bash -c "..."``; None if they name none."""
    for at in range(len(words) - 1, -1, -1):
        if " " in words[at].strip() and programs.search(words[at]) is not None:  # bash -c "..."
            try:
                return _command(shlex.split(words[at]), programs, name)
            except ValueError as error:
                raise Unread(f"{name}: the command cannot be read: {error}") from error
        pair = " ".join(words[max(0, at - 1) : at + 1])
        match = programs.search(pair)
        of_another = re.match(r"--\w+ ", pair) and any(each.endswith(".py") for each in words[:at])
        if of_another or "=" in words[at]:
            continue  # an argument
        if match is not None and match.end() == len(pair):
            return Command(match, list(words[:at]), list(words[at + 1 :]))
    return None


_TEST = re.compile(r"^\s*(?:(?:el)?if|while)\s+\[\[?\s+(.+?)\s+\]\]?\s*;?\s*(?:then|do)?\s*$")
_CONNECTED = re.compile(r"\s+(?:\]\]?\s+)?(&&|\|\|)\s+(?:\[\[?\s+)?")
_PATTERN = re.compile(r"\s*\(?((?:[\w.*/?-]|\"[^\"]*\"|'[^']*')(?:[\w.*/?| -]|\"[^\"]*\"|'[^']*')*)\)\s*")
_BRANCH_OF_CASE = re.compile(rf"{_PATTERN.pattern}(.*\S)\s*;;\s*$")
_SHORT = re.compile(r"^\s*(\[\[?\s.*?\s\]\]?)\s*(&&|\|\|)\s*(.*)$", re.DOTALL)
_CLAUSE = re.compile(r";\s*(?=(?:then|else|elif|fi)\b)")
_COMPARED = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt}
_COMPARED["ge"] = operator.ge


def _clauses(line: str) -> list[str]:
    """Split a line into its clauses: those of an ``if``, of ``[ test ] && command``, and of ``A=1; B=2``."""
    short = _SHORT.match(line)
    if short is not None:
        then, either, otherwise = short[3].partition(" || ") if _ASSIGNMENT.match(short[3]) else (short[3], "", "")
        first = ["else"] if short[2] == "||" else []
        return [f"if {short[1]}", *first, *_clauses(then), *(["else", otherwise] if either else []), "fi"]
    if (pattern := _BRANCH_OF_CASE.match(line)) is not None:
        return [
            f"{pattern[1]})",
            *(clause for part in pattern[2].split(";") for clause in _clauses(part) if clause),
            ";;",
        ]
    if line.rstrip().endswith(";;") and line.strip() != ";;":
        return [*_clauses(line.rstrip()[:-2]), ";;"]
    if _ASSIGNMENT.match(line) and not re.search(r"[\"'(`]", line):
        exported = re.match(r"\s*export\s", line)
        split = re.split(r";\s*", line) if exported is None else [f"export {each}" for each in line.split()[1:]]
        return [each.rstrip(";") for each in split if each.strip()]
    if not re.match(r"\s*(?:if|elif|then|else)\b", line):
        return [line]
    parts = (re.match(r"(then\b|else\b)?(.*)$", each, re.DOTALL) for each in _CLAUSE.split(line))
    split = [word for each in parts if each is not None for word in (each[1], each[2])]
    lines = [word.strip() for word in split if word and word.strip(" ;") and word != "then"]
    return [clause for each in lines for clause in (_clauses(each) if _ASSIGNMENT.match(each) else [each])]


@dataclass
class _Shell:
    """The variables and arrays that a script has set so far. An array is replaced when it changes, because copies share
    it; the array ``@`` contains the arguments of a file. ``exported``: names of variables, or ``-a`` for all.
    ``place``: the position of the present line."""

    variables: dict[str, str]
    arrays: dict[str, list[str]]
    exported: set[str]
    place: _Line = field(default_factory=lambda: _Line(""))

    def copy(self) -> _Shell:
        return _Shell(dict(self.variables), dict(self.arrays), self.exported)

    def become(self, other: _Shell) -> None:
        self.variables, self.arrays = dict(other.variables), dict(other.arrays)

    def array_as_text(self, found: re.Match[str]) -> str:
        """Return the number of an array's elements, or the elements as the value of a variable."""
        elements = self.arrays.get(found[1] or found[3])
        if elements is None:
            return found[0]
        return str(len(elements)) if found[1] else f"{found[2]}{shlex.quote(shlex.join(elements))}"

    def merge(self, ends: Sequence[_Shell], cause: str) -> None:
        """Take the state after several branches, one of which has run. The value of a variable that they set
        differently is a reference to ``cause``, the variable that decides between them."""
        self.become(ends[0])
        if cause and len(ends) > 1:
            self.variables[cause] = f"${{{cause}}}"
        for key in {key for end in ends for key in end.variables} - {cause}:
            found = {end.variables[key] for end in ends if key in end.variables}
            self.variables[key] = found.pop() if len(found) == 1 else f"${{{cause or key}}}"
        for key in {key for end in ends for key in end.arrays}:
            options = [_options(end.arrays.get(key, ())) for end in ends]
            common = {each: all(each in others for others in options) for each in chain(*options)}
            self.arrays[key] = [
                word for each, known in common.items() for word in (each if known else _unknown(each, cause or key))
            ]


def _options(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Group words into options: ``key=value``, or ``--key`` with the values that follow it."""
    found = list[tuple[str, ...]]()
    for word in words:
        if found and found[-1][0].startswith("--") and "=" not in found[-1][0] + word and not word.startswith("--"):
            found[-1] = (*found[-1], word)
        else:
            found.append((word,))
    return found


def _unknown(option: Sequence[str], cause: str) -> Sequence[str]:
    """Return an option with a reference to ``cause`` in place of its value; a word without a value stays."""
    key, equals, _ = option[0].partition("=")
    return [f"{key}=${{{cause}}}"] if equals or key.startswith("--") else option


@dataclass
class _Branches:
    """The branches of an ``if``, or of a ``case`` of ``word``. ``cause``: the variable that decides. ``ends``: the
    states after the branches that may have run. ``live``: the present branch may run; ``certain``: it runs;
    ``settled``: no later branch runs."""

    before: _Shell
    cause: str
    word: str | None = None
    live: bool = False
    certain: bool = False
    settled: bool = False
    ends: list[_Shell] = field(default_factory=list)

    def begin(self, shell: _Shell, chosen: bool | None) -> None:
        """End the present branch and begin the next. ``chosen``: whether it runs; None if that is not known."""
        if self.live:
            self.ends.append(shell.copy())
        shell.become(self.before)
        self.live = not self.settled and chosen is not False
        self.certain = self.live and chosen is True and not self.ends
        self.settled = self.settled or chosen is True

    def end(self, shell: _Shell) -> None:
        """End the last branch, and merge the states of all that may have run."""
        self.begin(shell, False)
        if not self.settled and (self.word is None or not self.ends):  # one pattern of a case always matches
            self.ends.append(self.before)
        shell.merge(self.ends or [self.before], self.cause)


def _taken(text: str, shell: _Shell) -> Iterator[str]:
    """Yield the lines that may run. A condition of ``if`` or ``case`` that is known excludes the other branches. The
    caller updates ``shell`` between the lines."""
    stack: list[_Branches] = []
    in_function = False  # whose arguments are others than the script's
    for place, line in ((whole, clause) for whole in _lines(text) for clause in _clauses(whole.text)):
        shell.place = place
        word = line.split(maxsplit=1)[0].rstrip(";") if line.split() else ""
        top = stack[-1] if stack else None
        in_function = (in_function and line != "}") or _FUNCTION.match(line) is not None
        line = re.sub(r"\$\{(\d):?-[^}]*\}", r"${\1}", line) if in_function else line
        if word in ("if", "while", "until", "for") and not re.search(r";\s*done\b", line):
            stack.append(_Branches(shell.copy(), _cause(line, shell.variables)))
            stack[-1].begin(shell, _holds(line, shell.variables))
            stack[-1].settled = stack[-1].settled or word != "if"  # the body of a loop is read once
            if word == "for":
                yield line
        elif word == "case":
            stack.append(_Branches(shell.copy(), _cause(line, shell.variables), _word_of_case(line, shell.variables)))
        elif top is not None and word in ("fi", "esac", "done"):
            stack.pop().end(shell)
        elif top is not None and word == "elif":
            top.begin(shell, None if top.settled else _holds(line, top.before.variables))
        elif top is not None and word == "else":
            top.begin(shell, True)
        elif top is not None and top.word is not None and word == ";;":
            top.begin(shell, False)
        elif top is not None and top.word is not None and (pattern := _PATTERN.fullmatch(line)) is not None:
            top.begin(shell, _matches(top.word, pattern[1]))
        elif all(each.live for each in stack):
            if word == "exit" and not in_function and all(each.certain for each in stack) and not _FAILS.match(line):
                return
            if top is not None and word in ("exit", "return"):
                top.live = False
            yield line


_FUNCTION = re.compile(r"\s*(?:function\s+[\w-]+|[\w-]+\s*\(\))[^}]*$")
_FAILS = re.compile(r"\s*exit\s+[^0;\s]")  # usually a check of arguments: the script is read on


def _cause(line: str, variables: Mapping[str, str]) -> str:
    """Return the first unknown variable of a condition, or ""."""
    names = (match[1] or match[4] for text in (_expanded(line, variables), line) for match in _VARIABLE.finditer(text))
    return next((name for name in names if not name.isdigit() and "$" in variables.get(name, "$")), "")


def _word_of_case(line: str, variables: Mapping[str, str]) -> str:
    found = re.match(r"\s*case\s+(.*?)\s+in\b", line)
    return _expanded(found[1], variables).strip("\"'") if found is not None else "$"


def _matches(word: str, patterns: str) -> bool | None:
    """Return whether ``word`` matches one of the ``patterns`` of a ``case``; None if that is not known."""
    each = [pattern.strip().strip("\"'") for pattern in patterns.split("|")]
    return True if "*" in each else None if "$" in word else any(fnmatch.fnmatchcase(word, it) for it in each)


def _holds(line: str, variables: Mapping[str, str]) -> bool | None:
    """Return whether a condition holds; None if it is not a comparison, or a test for an empty text or a file."""
    test = _TEST.match(line)
    if test is None or re.search(r"[{(]\s", test[1]) is not None:
        return None
    text = test[1].replace("$#", "0") if line.lstrip().startswith("while") else test[1]
    first, *others = _CONNECTED.split(text)
    holds = _compares(first, variables)
    for operation, other in zip(others[::2], others[1::2], strict=True):
        both, decided = (holds, _compares(other, variables)), operation == "||"
        holds = decided if decided in both else None if None in both else not decided
    return holds


def _compares(text: str, variables: Mapping[str, str]) -> bool | None:
    """Return whether one test holds; None if that is not known."""
    try:
        words = shlex.split(_expanded(text, variables))
    except ValueError:
        return None
    if words[:1] == ["!"]:
        holds = _compares(text.replace("!", "", 1), variables)
        return None if holds is None else not holds
    if len(words) == 2 and words[0] in ("-f", "-d", "-e") and "$" not in words[1]:
        path = Path(words[1]).expanduser()
        return path.is_dir() if words[0] == "-d" else path.exists()
    if len(words) == 3 and "" in words and words[1] in ("=", "==", "!="):
        words = ["-n" if words[1] == "!=" else "-z", words[0] or words[2]]
    if len(words) == 2 and words[0] in ("-z", "-n"):
        unset = _VARIABLE.fullmatch(words[1])
        name = (unset[1] or unset[4]) if unset is not None else ""
        if "$" in words[1] and (not name or name.isdigit() or name in variables):
            return None
        return (words[0] == "-z") == (not words[1] or bool(name))
    if len(words) != 3 or "$" in words[0] + words[2]:
        return None
    if (compared := _COMPARED.get(words[1].removeprefix("-"))) is not None:
        numbers = [int(each) for each in (words[0], words[2]) if re.fullmatch(r"[+-]?\d+", each)]
        return bool(compared(*numbers)) if len(numbers) == 2 else None
    return (words[0] == words[2]) == (words[1] != "!=") if words[1] in ("=", "==", "!=") else None


_ARRAY_BEGINS = re.compile(rf"\s*{_DECLARED}[A-Za-z_]\w*\+?=\$?\(")  # or the output of a command, with =$(


class _Line(NamedTuple):
    """A logical line: the lines ``first`` to ``last`` of the file. ``is_cut``: a comment after a backslash ends it."""

    text: str
    first: int = 0
    last: int = 0
    is_cut: bool = False


def _lines(text: str) -> Iterator[_Line]:
    """Yield logical lines. A line continues after a backslash, in an open array, and in an open quote of a variable or
    of a command of several lines. Comments in arrays and quotes are removed. After a backslash they end the line."""
    parts: list[str] = []
    first = last = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            whole = " ".join(parts)
            if parts and not _is_open_array(whole) and not _is_open(whole):
                yield _Line(whole, first, last, is_cut=True)
                parts = []
            continue
        stripped = re.sub(r"\s#[^'\"]*$", "", line).rstrip()
        first, last = first if parts else number, number
        parts.append(stripped.removesuffix("\\"))
        whole = " ".join(parts)
        open_quote = re.fullmatch(rf"\s*{_DECLARED}[A-Za-z_]\w*\+?=\"[^\"]*", whole)
        is_open = _is_open_array(whole) or open_quote or (parts[1:] and _is_open(whole))
        if not stripped.endswith("\\") and not is_open:
            yield _Line(whole, first, last)
            parts = []
    if parts:
        yield _Line(" ".join(parts), first, last)


def _is_open_array(text: str) -> bool:
    unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", text)
    return _ARRAY_BEGINS.match(text) is not None and unquoted.count("(") > unquoted.count(")")


def _is_open(text: str) -> bool:
    try:
        shlex.split(text)
    except ValueError:
        return True
    return False


_ALONE = re.compile(r"(?<=\s)\$\{?([A-Za-z_]\w*)\}?(?=\s|$)")
_MARK = re.compile("\x00(\\w+)\x00")


_SEPARATORS = ("|", "||", "&", "&&", ";")
_REDIRECTED = re.compile(r"[\d&]?>.*", re.DOTALL)
_SUBSHELL = re.compile(r"^\s*\((?!\()(.*)\)", re.DOTALL)


def _words(line: str, shell: _Shell, name: str) -> list[list[str]]:
    """Return the words of each command of a line, without redirections."""
    # A variable outside of quotes becomes several words. It is marked, because the split removes the quotes. So is a #
    # within a word, which begins no comment.
    line = _ALONE.sub("\x00\\1\x00", f" {_calculated(line, shell.variables)}")
    try:
        split = shlex.split(re.sub(r"(?<=[^\s;&|])#", "\x01", line), comments=True)
    except ValueError as error:
        raise Unread(f"{name}: the command cannot be read: {error}") from error
    found, is_over, depth = list[list[str]]([[]]), False, 0  # of $( ... )
    ended = ((each[:-1], ";") if len(each) > 1 and each.endswith(";") else (each,) for each in split)
    for word in (each.replace("\x01", "#") for each in chain.from_iterable(ended)):
        words, depth = found[-1], max(0, depth + word.count("$(") - word.count(")"))
        if word in _SEPARATORS and not depth:
            found, is_over = [*found, []], False
            continue
        if is_over or (is_over := word == "\\" or _REDIRECTED.fullmatch(word) is not None):
            continue
        is_value = bool(words) and words[-1].startswith("--")
        if (given := _ARGUMENTS.fullmatch(word)) is not None:
            words += shell.arrays.get("@", [])[int(given[1] or 1) - 1 :]
            continue
        if not (is_value or word.strip(" \t\"'")):
            continue
        array, alone = _ARRAY.fullmatch(word), _MARK.fullmatch(word)
        if array is not None:
            words += shell.arrays.get(array[1], [])
        elif alone is not None and alone[1] in shell.variables:
            text = _ARGUMENTS.sub("", _expanded(shell.variables[alone[1]], shell.variables))
            words += [text] if "$(" in text else text.split()
        else:
            words.append(_expanded(_ARGUMENTS.sub("", _MARK.sub(r"${\1}", word)), shell.variables))
    return found


def _commands_of(line: str, shell: _Shell, programs: re.Pattern[str], name: str) -> list[Command]:
    """Return the commands of a line that run one of ``programs``. Commands that are only printed are omitted."""
    each_words = (words for words in _words(_SUBSHELL.sub(r"\1", line), shell, name) if words[:1] not in _PRINTING)
    found = (_command(words, programs, name) for words in each_words)
    return [each for each in found if each is not None]


_PRINTING = (["echo"], ["printf"])


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replace variables and ``$((...))`` by their values; unknown variables stay."""

    def value(match: re.Match[str]) -> str:
        known = variables.get(match[1] or match[4])
        if match[3] is not None and (known is None or (not known and match[2])):
            return match[3]
        return match[0] if known is None else known

    for _ in range(8):  # a default may contain a variable
        replaced = _calculated(_VARIABLE.sub(value, text), variables)
        if replaced == text:
            break
        text = replaced
    return text


def _calculated(text: str, variables: Mapping[str, str]) -> str:
    """Replace each ``$((...))`` by its value, or by the first unknown variable in it."""

    def value(match: re.Match[str]) -> str:
        names = _NAME.sub(lambda each: variables.get(each[1], f"${{{each[1]}}}"), _expanded(match[1], variables))
        numbers = _expanded(names, variables)
        try:
            return str(_number(ast.parse(numbers.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            unknown = _VARIABLE.search(numbers)
            whole = "".join(match[0].split())  # one word
            return "$(...)" if "$(" in numbers else whole if unknown is None else unknown[0]

    return _ARITHMETIC.sub(value, text)


def _number(node: ast.expr) -> int:
    """Return the value of an integer expression. Raises ValueError for any other."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_number(node.left), _number(node.right)))
    raise ValueError(ast.dump(node))
