"""Reads the keys of a configuration: a YAML file, or the command in a shell script.

Of a script, assignments of variables (``N=8``, ``${N}``, ``${1:-8}``, ``$((N * 2))``, ``A=(...)``, ``A+=...``), the
branch of an ``if`` that compares two values, and the last command that runs a trainer are read. All branches of another
``if`` or of a ``case`` are read: a variable to which they give another value is unknown. Nothing is executed.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from areal.errors import ArealError
from areal.resources.tree import ABSENT, resolved

_DECLARED = r"(?:(?:export|readonly|local|declare|typeset)\s+(?:-\w+\s+)*)?"
_ASSIGNMENT = re.compile(rf"^\s*{_DECLARED}([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
_CHANGED = re.compile(r"^\s*(?:for|select|let|unset|read(?:\s+-\S+)*|\(\()\s*([A-Za-z_]\w*)")  # by what is not read
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*|\d)(?::?-([^${}]*))?\}|\$([A-Za-z_]\w*)")  # of nested ones the inner
_ARRAY = re.compile(r"\$\{([A-Za-z_]\w*)\[@\]\}")
_ARGUMENTS = re.compile(r"\$(?:[@*]|\{[@*][^}]*\})")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_NAME = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}
_MOST_BYTES = 1 << 20


class Unread(ArealError):
    """A file in which no configuration is found."""


def read_yaml(text: str, name: str, *, nested: bool = True) -> dict[str, object]:
    """Return the leaves of a YAML document, by keys with dots; with ``nested`` false, its top level."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise Unread(f"{name}: not YAML: {error}") from error
    if not isinstance(document, Mapping):
        raise Unread(f"{name}: its top level is not a map of keys")
    leaves = flat(document) if nested else ((str(key), _leaf(value)) for key, value in document.items())
    return {key: value for key, value in without_references(dict(leaves)).items() if value != _MISSING}


_MISSING = "???"  # OmegaConf's value of a key that the user has to give


def without_references(keys: Mapping[str, object]) -> dict[str, object]:
    """``keys`` with references replaced, but for those that lead nowhere."""
    found = {key: resolved(value, key, lambda name: keys.get(name, ABSENT)) for key, value in keys.items()}
    return {key: keys[key] if value is ABSENT else _leaf(value) for key, value in found.items()}


def flat(document: Mapping[str, object], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", _leaf(value)


def _leaf(value: Any) -> Any:
    return typed(value) if isinstance(value, str) else value


class Command(NamedTuple):
    """A command that runs a trainer. ``program``: the match of its name. ``launcher``: the words before it."""

    program: re.Match[str]
    launcher: list[str]
    words: list[str]


def script_command(
    text: str, programs: re.Pattern[str], environment: Mapping[str, str], name: str, hint: str = ""
) -> Command:
    """Return the last command that runs one of ``programs``: a pattern of a word, or of two words with a space between
    them. Raises Unread, with ``hint`` where there is none."""
    if len(text) > _MOST_BYTES:
        raise Unread(f"{name}: {len(text)} characters are not a script of a training run")
    variables, arrays = dict(environment), dict[str, list[str]]()
    found: Command | None = None
    for line, doubtful in _taken(text, variables):
        if (changed := _CHANGED.match(line)) is not None:
            variables[changed[1]] = f"${{{changed[1]}}}"
        assigned = _ASSIGNMENT.match(line)
        key, more, given = (assigned[1], assigned[2], assigned[3].strip()) if assigned is not None else ("", "", "")
        if given.startswith("(") and given.endswith(")"):
            words = _words(given[1:-1], variables, arrays, name)
            arrays[key] = [*arrays.get(key, ()), *words] if more else words
        elif key and (value := _one_word(_expanded(given, variables))) is not None:
            value = variables.get(key, "") + value if more else value
            unknown = doubtful and variables.get(key, value) != value
            variables[key] = f"${{{key}}}" if unknown else value
        elif line.split()[:1] not in (["echo"], ["printf"]) and programs.search(_expanded(line, variables)) is not None:
            found = _command(_words(line, variables, arrays, name, programs), programs, name) or found
    if found is None:
        raise Unread(f"{name}: no command in it runs a trainer that is known here", hint=hint)
    return found


def _one_word(text: str) -> str | None:
    """Return the value of an assignment; None if more than one word follows: the rest of the line is a command. The
    output of a command is not known: its text stays."""
    if text.startswith(("$(", "`")):
        return text
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return text
    return " ".join(words) if len(words) < 2 else None


def _command(words: Sequence[str], programs: re.Pattern[str], name: str) -> Command | None:
    for at in range(len(words) - 1, -1, -1):
        if " " in words[at].strip() and programs.search(words[at]) is not None:  # bash -c "..."
            try:
                return _command(shlex.split(words[at]), programs, name)
            except ValueError as error:
                raise Unread(f"{name}: the command cannot be read: {error}") from error
        pair = " ".join(words[max(0, at - 1) : at + 1])
        match = programs.search(pair)
        if match is not None and match.end() == len(pair):
            return Command(match, list(words[:at]), list(words[at + 1 :]))
    return None


_TEST = re.compile(r"^\s*(?:el)?if\s+\[\[?\s+(.+?)\s+\]\]?\s*;?\s*(?:then)?\s*$")
_SHORT = re.compile(r"^\s*(\[\[?\s.*?\s\]\]?)\s*(&&|\|\|)\s*(.*)$", re.DOTALL)
_CLAUSE = re.compile(r";\s*(?=(?:then|else|elif|fi)\b)")
_COMPARED = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt}
_COMPARED["ge"] = operator.ge


def _clauses(line: str) -> list[str]:
    """Return the clauses of an ``if``, of ``[ test ] && command`` and of ``A=1; B=2`` as lines of their own."""
    short = _SHORT.match(line)
    if short is not None:
        return [f"if {short[1]}", *(["else"] if short[2] == "||" else []), short[3], "fi"]
    if _ASSIGNMENT.match(line) and not re.search(r"[\"'(`]", line):
        exported = re.match(r"\s*export\s", line)
        split = re.split(r";\s*", line) if exported is None else line.split()[1:]
        return [each.rstrip(";") for each in split if each.strip()]
    if not re.match(r"\s*(?:if|elif|then|else)\b", line):
        return [line]
    parts = (re.match(r"(then\b|else\b)?(.*)$", each, re.DOTALL) for each in _CLAUSE.split(line))
    split = [word for each in parts if each is not None for word in (each[1], each[2])]
    lines = [word.strip() for word in split if word and word.strip(" ;") and word != "then"]
    return [clause for each in lines for clause in (_clauses(each) if _ASSIGNMENT.match(each) else [each])]


def _taken(text: str, variables: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Yield the lines that run, as far as the conditions of ``if`` are known, and whether one of them is not known.
    ``variables`` change while this iterates."""
    open_ifs: list[list[bool]] = []  # of each: whether its branch is read, whether one was chosen, whether in doubt
    for line in (clause for whole in _lines(text) for clause in _clauses(whole)):
        word = line.split(maxsplit=1)[0].rstrip(";") if line.split() else ""
        if word == "if":
            chosen = _holds(line, variables)
            open_ifs.append([chosen is not False, chosen is True, chosen is None])
        elif word == "case":
            open_ifs.append([True, False, True])
        elif word == "elif" and open_ifs:
            chosen = _holds(line, variables)
            _, before, doubtful = open_ifs[-1]
            open_ifs[-1] = [not before and chosen is not False, before or chosen is True, doubtful or chosen is None]
        elif word == "else" and open_ifs:
            open_ifs[-1] = [not open_ifs[-1][1], True, open_ifs[-1][2]]
        elif word in ("fi", "esac") and open_ifs:
            open_ifs.pop()
        elif all(each[0] for each in open_ifs):
            yield line, any(each[2] for each in open_ifs)


def _holds(line: str, variables: Mapping[str, str]) -> bool | None:
    """Return whether a comparison of two texts or numbers holds, or a text is empty; None for any other condition."""
    test = _TEST.match(line)
    try:
        words = shlex.split(_expanded(test[1], variables)) if test is not None else []
    except ValueError:
        return None
    if len(words) == 2 and words[0] in ("-z", "-n"):
        unset = _VARIABLE.fullmatch(words[1])
        name = (unset[1] or unset[3]) if unset is not None else ""
        if "$" in words[1] and (not name or name.isdigit() or name in variables):
            return None
        return (words[0] == "-z") == (not words[1] or bool(name))
    if len(words) != 3 or "$" in words[0] + words[2]:
        return None
    if (compared := _COMPARED.get(words[1].removeprefix("-"))) is not None:
        numbers = [int(each) for each in (words[0], words[2]) if re.fullmatch(r"[+-]?\d+", each)]
        return bool(compared(*numbers)) if len(numbers) == 2 else None
    return (words[0] == words[2]) == (words[1] != "!=") if words[1] in ("=", "==", "!=") else None


def _lines(text: str) -> Iterator[str]:
    """Logical lines: a backslash, an open bracket of an array, an open quote of a variable or of a long command
    continues one; comments between its lines go."""
    parts: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        stripped = re.sub(r"\s#[^'\"]*$", "", line).rstrip()
        parts.append(stripped.removesuffix("\\"))
        whole = " ".join(parts)
        open_array = re.match(rf"\s*{_DECLARED}[A-Za-z_]\w*\+?=\((?!.*\))", parts[0]) and not stripped.endswith(")")
        open_quote = re.fullmatch(rf"\s*{_DECLARED}[A-Za-z_]\w*\+?=\"[^\"]*", whole)
        if not stripped.endswith("\\") and not open_array and not open_quote and not (parts[1:] and _is_open(whole)):
            yield whole
            parts = []
    if parts:
        yield " ".join(parts)


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


def _words(
    line: str,
    variables: Mapping[str, str],
    arrays: Mapping[str, list[str]],
    name: str,
    programs: re.Pattern[str] | None = None,
) -> list[str]:
    """Return the words of a command: of ``programs``, where the line has several commands; else of the first."""
    # A variable outside quotes becomes several words: it is marked, as quotes are gone after the split.
    line = _ALONE.sub("\x00\\1\x00", f" {_calculated(line, variables)}")
    try:
        split = shlex.split(line, comments=True)
    except ValueError as error:
        raise Unread(f"{name}: the command cannot be read: {error}") from error
    found: list[str] = []
    for word in (part for each in split for part in ((each[:-1], ";") if each.endswith(";") else (each,)) if part):
        if word == "\\" or _REDIRECTED.fullmatch(word):
            break
        if word in _SEPARATORS:
            if programs is None or _command(found, programs, name) is not None:
                break
            found = []
            continue
        if _ARGUMENTS.fullmatch(word) or not word.strip(" \t\"'"):
            continue
        array, alone = _ARRAY.fullmatch(word), _MARK.fullmatch(word)
        if array is not None:
            found += arrays.get(array[1], [])
        elif alone is not None and alone[1] in variables:
            found += _expanded(variables[alone[1]], variables).split()
        else:
            found.append(_expanded(_ARGUMENTS.sub("", _MARK.sub(r"${\1}", word)), variables))
    return found


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        known = variables.get(match[1] or match[3])
        return known if known is not None else match[2] if match[2] is not None else match[0]

    for _ in range(8):  # a default may have a variable itself
        replaced = _calculated(_VARIABLE.sub(value, text), variables)
        if replaced == text:
            break
        text = replaced
    return text


def _calculated(text: str, variables: Mapping[str, str]) -> str:
    """``text`` with the value of each ``$((...))`` that can be computed."""

    def value(match: re.Match[str]) -> str:
        numbers = _NAME.sub(lambda each: variables.get(each[1], each[0]), match[1])
        try:
            return str(_number(ast.parse(numbers.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return match[0]

    return _ARITHMETIC.sub(value, text)


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_number(node.left), _number(node.right)))
    raise ValueError(ast.dump(node))


def flags(words: Sequence[str], name: str) -> dict[str, object]:
    """``--key value``, ``--key=value``, ``--key`` alone (true), ``--no_key`` (false) and ``--key v1 v2`` (a list), as
    argparse reads them. Dashes in a key are underscores."""
    found: dict[str, object] = {}
    key = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            found[key] = typed(value) if equals else True
            fresh = not equals
        elif not key:
            raise _unread_word(word, "--key", name)
        else:
            value = typed(word.removesuffix(","))
            before = found[key]
            found[key] = value if fresh else [*before, value] if isinstance(before, list) else [before, value]
            fresh = False
    negated = [key for key, value in found.items() if key.startswith("no_") and value is True]
    return {
        key.removeprefix("no_") if key in negated else key: key not in negated and value for key, value in found.items()
    }


def _unread_word(word: str, form: str, name: str) -> Unread:
    if (variable := re.fullmatch(r"\$\{?(\w+)\}?", word)) is None:
        return Unread(f"{name}: {word!r} is not {form}")
    why = f"{name}: ${variable[1]} is not set, or set under a condition that is not known here"
    return Unread(why, hint=f"export {variable[1]}, or the variables of that condition")


def assignments(words: Sequence[str], name: str) -> dict[str, object]:
    """``key=value`` words, as Hydra reads them: ``+key`` adds, ``~key`` removes."""
    found: dict[str, object] = {}
    flag = ""
    for word in words:
        key, equals, value = word.partition("=")
        if flag or (equals and word.startswith("--")):  # of Hydra itself: --config-name NAME, or with "="
            found[flag or key], flag = word if flag else value, ""
        elif word.startswith("--"):
            flag = word
        elif not equals:
            raise _unread_word(word, "key=value", name)
        else:
            found[key.lstrip("+")] = typed(value)
    return found


def typed(text: str) -> Any:
    """Return the value as YAML reads it: numbers, booleans, lists; other text unchanged. ``1e-6`` is a number."""
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text):
        return float(text)
    if re.fullmatch(r"[+-]?0\d+", text):  # YAML 1.1 reads it to base 8, and 1:30 to base 60
        return int(text)
    if re.fullmatch(r"\d+(:\d+)+(\.\d*)?", text):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
