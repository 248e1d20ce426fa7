"""Reads the keys of a configuration from a YAML file, or from the words of a command."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from types import MappingProxyType
from typing import Any

import yaml

from areal.errors import ArealError
from areal.resources.nodes import Problems
from areal.resources.yaml_io import load_documents


class Unread(ArealError):
    """No configuration was found in a file, or it cannot be read."""


def read_yaml(
    text: str, name: str, *, nested: bool = True, environment: Mapping[str, str] = MappingProxyType({})
) -> dict[str, object]:
    """Return a YAML document's values by dotted keys, or its top level if ``nested`` is false. Raises Unread."""
    document = load_yaml(text, name)
    leaves = flat(document) if nested else ((str(key), _leaf(value)) for key, value in document.items())
    return {key: value for key, value in without_references(dict(leaves), environment).items() if value != _MISSING}


def load_yaml(text: str, name: str) -> dict[str, Any]:
    """Return the mapping of a YAML document by YAML 1.1, which the frameworks use. Raises Unread, also for a key that
    occurs twice: some frameworks refuse that, and others use the last value."""
    problems = Problems()
    load_documents(text, name, problems)
    try:
        for found in problems.diagnostics():
            raise Unread(f"{found.pos}: not YAML: {found.message}")
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # 2024-13-01 is no date
        raise Unread(f"{name}: not YAML: {error}") from error
    if not isinstance(document, dict):
        raise Unread(f"{name}: its top level is not a map of keys")
    return document


DOLLAR = "\ue000"
"""A dollar sign that stands for itself in a script: within single quotes, or after a backslash."""


def with_dollars(value: Any) -> Any:
    """Return a value with dollar signs for ``DOLLAR``."""
    if isinstance(value, list):
        return [with_dollars(each) for each in value]
    return value.replace(DOLLAR, "$") if type(value) is str else value


_MISSING = "???"  # OmegaConf's value of a key that the user must set


def without_references(keys: Mapping[str, object], environment: Mapping[str, str]) -> dict[str, object]:
    """Return ``keys`` with OmegaConf's references to other keys and to the ``environment`` resolved, if they can be."""
    known = {**{f"{_ENVIRONMENT}{variable}": value for variable, value in environment.items()}, **keys}
    return {key: _leaf(_resolved(value, key, known)) for key, value in keys.items()}


_ENVIRONMENT = "oc.env:"
_REFERENCE = re.compile(rf"\$\{{(?:oc\.select:)?((?:{_ENVIRONMENT})?[\w.]+)(?:,\s*([^}}]*))?\}}")
_MOST_REFERENCES = 10


def _resolved(given: Any, key: str, keys: Mapping[str, object]) -> Any:
    """Return the value of ``key`` with its references resolved: OmegaConf's ``${other.key}``, ``${.key}`` (in the same
    section), ``${oc.env:NAME}`` and ``${oc.select:key,default}``, whose default is text. Return ``given`` if a
    reference cannot be resolved."""
    value = given
    for _ in range(_MOST_REFERENCES):
        if not isinstance(value, str) or (match := _REFERENCE.search(value)) is None:
            return value
        name = _absolute(match[1], key)
        if name not in keys and match[2] is None:
            return given
        name, inner = (name, keys[name]) if name in keys else (key, match[2])
        key, value = (name, inner) if match[0] == value else (key, value.replace(match[0], str(inner)))
    return given


def _absolute(reference: str, key: str) -> str:
    """Return the key that OmegaConf's ``reference`` in the value of ``key`` names. Its first dot stands for the section
    of ``key``, and each further dot for the next outer one. Empty above the top level."""
    name = reference.lstrip(".")
    steps, up = key.split("."), len(reference) - len(name)
    if up == 0:
        return name
    return ".".join((*steps[: len(steps) - up], name)) if up <= len(steps) else ""


def flat(document: Mapping[str, object], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a nested document with their values."""
    for key, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", _leaf(value)


def _leaf(value: Any) -> Any:
    return typed(value) if isinstance(value, str) else str(value) if isinstance(value, date) else value


def flags(words: Sequence[str], name: str) -> dict[str, object]:
    """Read options as argparse does: ``--key value``, ``--key=value``, ``--key`` (true), ``--no_key`` (false) and
    ``--key v1 v2`` (a list). Dashes become underscores. A YAML file before them is ``config``. Raises Unread."""
    found: dict[str, object] = {}
    key = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            found[key] = typed(value) if equals else True
            fresh = not equals
        elif not key and word.endswith((".yaml", ".yml")):  # as scripts of TRL's users read theirs
            found["config"] = word
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


_UNSPACED = re.compile(r"([{,]\s*[A-Za-z_][\w.]*):(?=\S)")  # {key:value}, which YAML reads as one word


def assignments(words: Sequence[str], name: str) -> dict[str, object]:
    """Read ``key=value``, ``+key=value`` and ``~key`` (which deletes one, and stays with its ``~``) as Hydra does, and
    Hydra's own options (``--``). Raises Unread."""
    found: dict[str, object] = {}
    flag = ""
    for word in words:
        key, equals, value = word.partition("=")
        if flag or (equals and word.startswith("--")):  # an option of Hydra: --config-name NAME, or with "="
            found[flag or key], flag = word if flag else value, ""
        elif word.startswith("--"):
            flag = word
        elif word.startswith("~"):
            found.pop(key[1:], None)
            found[key] = True
        elif not equals:
            raise _unread_word(word, "key=value", name)
        else:
            found[key.lstrip("+")] = typed(_UNSPACED.sub(r"\1: ", value) if value.startswith("{") else value)
    return found


def typed(text: str) -> Any:
    """Return the value of a text as YAML reads it: number, boolean or list, and other text unchanged. Differs from YAML
    1.1 in ``1e-6`` and ``010``, which are decimal numbers, and in ``1:30`` and dates, which stay text."""
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text):
        return float(text)
    if re.fullmatch(r"[+-]?0\d+", text):  # YAML 1.1 reads octal numbers, and 1:30 to base 60
        return int(text)
    if re.fullmatch(r"\d+(:\d+)+(\.\d*)?", text) or "#" in text:  # which is no comment
        return text
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):  # 2024-13-01 is no date
        return text
    return text if isinstance(value, date) else value
