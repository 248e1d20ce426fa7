"""Reads the keys of a configuration: a YAML file, or the command in a shell script.

Of a script, assignments of variables (``N=8``, ``${N}``, ``${1:-8}``, ``$((N * 2))``, ``A=(...)``) and the last command
that runs a trainer are read. Nothing is executed.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from areal.errors import ArealError

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*|\d)(?::?-([^}]*))?\}|\$([A-Za-z_]\w*)")
_ARRAY = re.compile(r"\$\{([A-Za-z_]\w*)\[@\]\}")
_ARGUMENTS = re.compile(r"\$(?:[@*]|\{[@*][^}]*\})")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_NAME = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}
_MOST_BYTES = 1 << 20


class Unread(ArealError):
    """A file in which no configuration is found."""


def read_yaml(text: str, name: str) -> dict[str, Any]:
    """The leaves of a YAML document, by keys with dots."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise Unread(f"{name}: not YAML: {error}") from error
    if not isinstance(document, Mapping):
        raise Unread(f"{name}: its top level is not a map of keys")
    return {key: value for key, value in _resolved(dict(flat(document))).items() if value != _MISSING}


_MISSING = "???"  # OmegaConf's value of a key that the user has to give
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^}]*))?\}")


def _resolved(keys: Mapping[str, Any]) -> dict[str, Any]:
    """``keys`` with OmegaConf's ``${key}`` and ``${oc.select:key,default}`` replaced where the key is there, or has a
    default."""

    def value(given: Any, key: str, depth: int = 0) -> Any:
        match = _REFERENCE.fullmatch(given) if isinstance(given, str) else None
        if match is None or depth > 8:
            return given
        name = key.rpartition(".")[0] + match[1] if match[1].startswith(".") else match[1]
        if name in keys:
            return value(keys[name], name, depth + 1)
        return typed(match[2]) if match[2] is not None else given

    return {key: value(given, key) for key, given in keys.items()}


def flat(document: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", typed(value) if isinstance(value, str) else value


def script_command(text: str, programs: Sequence[str], environment: Mapping[str, str], name: str) -> list[str]:
    """The words behind the program, of the last command that runs one of ``programs``. Raises Unread."""
    if len(text) > _MOST_BYTES:
        raise Unread(f"{name}: {len(text)} characters are not a script of a training run")
    variables, arrays = dict(environment), dict[str, list[str]]()
    found = None
    for line in _lines(text):
        runs = any(each in line for each in programs)
        if runs:
            found = _words(line, variables, arrays, name)
        elif (assigned := _ASSIGNMENT.match(line)) is not None:
            variable, value = assigned[1], assigned[2].strip()
            if value.startswith("(") and value.endswith(")"):
                arrays[variable] = _words(value[1:-1], variables, arrays, name)
                continue
            value = _expanded(value, variables)
            try:
                variables[variable] = " ".join(shlex.split(value, comments=True))
            except ValueError:
                variables[variable] = value
    if found is None:
        raise Unread(f"{name}: no command in it runs {' or '.join(programs)}")
    at = max(index for index, word in enumerate(found) if any(each in word for each in programs))
    return found[at + 1 :]


def _lines(text: str) -> Iterator[str]:
    """Logical lines: a backslash or an open bracket of an array continues one; comments between its lines go."""
    parts: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        stripped = re.sub(r"\s#[^'\"]*$", "", line).rstrip()
        parts.append(stripped.removesuffix("\\"))
        open_array = re.match(r"\s*[A-Za-z_]\w*=\((?!.*\))", parts[0]) and not stripped.endswith(")")
        if not stripped.endswith("\\") and not open_array:
            yield " ".join(parts)
            parts = []
    if parts:
        yield " ".join(parts)


def _words(line: str, variables: Mapping[str, str], arrays: Mapping[str, list[str]], name: str) -> list[str]:
    try:
        words = shlex.split(_calculated(line, variables), comments=True)
    except ValueError as error:
        raise Unread(f"{name}: the command cannot be read: {error}") from error
    found: list[str] = []
    for word in words:
        if word in ("|", ">", "2>&1", "&", "&&", ";"):
            break
        if _ARGUMENTS.fullmatch(word) or not word.strip(" \t\"'"):
            continue
        array = _ARRAY.fullmatch(word)
        if array is not None:
            found += arrays.get(array[1], [])
            continue
        expanded = _expanded(_ARGUMENTS.sub("", word), variables)
        several = _VARIABLE.fullmatch(word) is not None and "=" in expanded
        found += expanded.split() if several else [expanded]
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


def assignments(words: Sequence[str], name: str) -> dict[str, Any]:
    """``key=value`` words, as Hydra reads them: ``+key`` adds, ``~key`` removes."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if word.startswith("--"):
            continue  # --config-name and others of Hydra itself
        if not equals:
            raise Unread(f"{name}: {word!r} is not key=value")
        found[key.lstrip("+")] = typed(value)
    return found


def typed(text: str) -> Any:
    """The value as YAML reads it: numbers, booleans, lists; other text unchanged. ``1e-6`` is a number."""
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text):
        return float(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
