"""Pieces of JSON Schema for what holds between fields, as ``SpecModel.schema_rules`` says it beside ``problems``.

An expression may become any value, so that only what is written out is refused.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

EXPRESSION_PATTERN = r"[\s\S]*\$\{\{[\s\S]*\}\}[\s\S]*"  # of a text
EXPRESSION: Schema = {"$ref": "#/definitions/Expression"}
EMPTY: Schema = {"anyOf": [{"enum": [None, 0, "", [], {}]}, EXPRESSION]}  # what counts as not given


def text(pattern: str) -> Schema:
    """A text that is all ``pattern``."""
    return {"type": "string", "pattern": f"^(?:{pattern})$"}


def given(*names: str) -> Schema:
    """Each is there, or may be there once its expression is evaluated."""
    return {"required": list(names), "properties": {name: {"not": {"type": "null"}} for name in names}}


def written(name: str, shape: Schema | None = None) -> Schema:
    """It is there for certain, in this shape."""
    value: Schema = {"not": {"anyOf": [{"type": "null"}, EXPRESSION]}}
    return {"required": [name], "properties": {name: {**value, **(shape or {})}}}


def when(condition: Schema, then: Schema | bool) -> Schema:
    return {"if": condition, "then": then}


def without(*names: str) -> Schema:
    return {"properties": dict.fromkeys(names, EMPTY)}
