"""Plain scalars by the YAML 1.2 core schema, which is what people mean.

PyYAML resolves by 1.1: ``yes``, ``on`` and ``no`` become booleans, ``1:30`` becomes 90, ``1e-3`` stays text. Here only
``true`` and ``false`` are booleans, ``1:30`` is text, and ``1e-3`` is a number.
"""

from __future__ import annotations

import math
import re

from areal.resources.nodes import Value

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_WORDS: dict[str, Value] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
# What can begin a number, so that most text is told by its first character.
_NUMBER_START = frozenset("0123456789+-.")
_MAX_DIGITS = 19
_TAGS: dict[str, tuple[type, ...]] = {
    "!!int": (int,),
    "!!float": (int, float),
    "!!bool": (bool,),
    "!!null": (type(None),),
}


class BadScalar(ValueError):
    """A scalar that has no value we could keep."""


def resolve_plain(text: str) -> Value:
    """The value of an unquoted scalar. Raises BadScalar for numbers that JSON or 64 bits cannot hold."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in _NUMBER_START:
        return text
    if _INT.fullmatch(text):
        return _integer(text)
    if _FLOAT.fullmatch(text):
        return _finite(text)
    if _NOT_FINITE.fullmatch(text):
        raise BadScalar(f"{text} is not a finite number; quote it if text is meant")
    return text


def resolve_tagged(text: str, tag: str) -> Value:
    """The value of a scalar with an explicit standard tag such as ``!!str`` or ``!!int``."""
    name = short_tag(tag)
    if name in ("!!str", "!"):
        return text
    if name not in _TAGS:
        raise BadScalar(f"the tag {name} is not allowed: plain YAML only")
    value = resolve_plain(text)
    if type(value) not in _TAGS[name]:
        raise BadScalar(f'"{text}" is not of type {name}')
    return float(value) if name == "!!float" and isinstance(value, int) else value


def short_tag(tag: str) -> str:
    """``tag:yaml.org,2002:int`` as it is written: ``!!int``."""
    prefix = "tag:yaml.org,2002:"
    return f"!!{tag.removeprefix(prefix)}" if tag.startswith(prefix) else tag


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS + 1:
        raise BadScalar(f"{text[:20]}... does not fit in 64 bits; quote it if text is meant")
    value = int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if not -(2**63) <= value < 2**64:
        raise BadScalar(f"{text} does not fit in 64 bits; quote it if text is meant")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadScalar(f"{text[:30]} is too large for a number; quote it if text is meant")
    return value
