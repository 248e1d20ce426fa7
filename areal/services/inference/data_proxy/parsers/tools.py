"""The tools of a request, as the parsers need to know them: their names, and the types of their parameters."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def is_name_char(char: str) -> bool:
    return char.isalnum() or char in "_-.:/"


class Tools:
    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [tool["function"] for tool in tools]
        self._parameters = {function["name"]: _properties(function) for function in functions}

    @property
    def names(self) -> list[str]:
        return list(self._parameters)

    def knows(self, name: str) -> bool:
        return name in self._parameters

    def is_text(self, tool: str, parameter: str) -> bool:
        """Whether this parameter can only be a string."""
        schema = self._parameters.get(tool, {}).get(parameter)
        return isinstance(schema, Mapping) and schema.get("type") in ("string", ["string"])


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def json_of_text(text: str) -> str:
    """A value of a parameter that is not only text, as JSON: what reads as JSON is that, all else is a string."""
    if text.strip() in _PYTHON_WORDS:
        return json.dumps(_PYTHON_WORDS[text.strip()])
    try:
        return _compact(json.loads(text))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def json_of_python(text: str) -> str:
    """A Python literal as JSON. What is none is JSON after all, or a string."""
    try:
        return _compact(ast.literal_eval(text.strip()))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json_of_text(text)


def _compact(value: object) -> str:
    """Raises ValueError for what JSON has no text for."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text
