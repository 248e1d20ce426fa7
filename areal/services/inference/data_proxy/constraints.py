"""What an answer is held to, as vLLM's and SGLang's own fields say it: ``structured_outputs`` and ``guided_*`` of vLLM,
``json_schema``, ``regex`` and ``ebnf`` of SGLang. Each is followed by the engine's grammar, or refused by name.

https://docs.vllm.ai/en/latest/features/structured_outputs.html
https://docs.sglang.ai/advanced_features/structured_outputs.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from areal.services.inference.data_proxy.fields import Fields, unsupported
from areal.services.web.errors import bad_request

_KINDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
_IN_STRUCTURED_OUTPUTS = ("json", "regex", "choice", "grammar", "json_object")
_REFUSED = {
    "structural_tag": "there are no structural tags",
    "guided_whitespace_pattern": "white space is the grammar's",
}
CONSTRAINTS = frozenset((*_KINDS, *_REFUSED, "structured_outputs"))


def read_constraint(fields: Fields) -> tuple[str, Mapping[str, Any]] | None:
    """The field that says it, and what the engine is to follow (``EngineCall.response_format``); None where nothing
    does. Raises 400 naming the field."""
    if fields.has_none(CONSTRAINTS):
        return None
    fields.refuse(_REFUSED)
    given = [(name, _KINDS[name], fields.take(name)) for name in _KINDS if fields.given(name)]
    options = Fields(fields.mapping("structured_outputs"))
    for kind in _IN_STRUCTURED_OUTPUTS:
        if options.given(kind):
            given.append((f"structured_outputs.{kind}", kind, options.take(kind)))
    if unknown := options.ignored():
        name = f"structured_outputs.{unknown[0]}"
        raise unsupported(name, "there is no such constraint here")
    wanted = [(name, kind, value) for name, kind, value in given if value is not False]
    if not wanted:
        return None
    if len(wanted) > 1:
        names = [name for name, _, _ in wanted]
        raise bad_request(f"only one of {', '.join(names)} can be followed", param=names[1])
    [(name, kind, value)] = wanted
    return name, _constraint(name, kind, value)


def _constraint(name: str, kind: str, value: object) -> Mapping[str, Any]:
    match kind:
        case "json":
            return {"type": "json_schema", "json_schema": {"name": "answer", "schema": _schema(name, value)}}
        case "json_object":
            if value is not True:
                raise bad_request(f"{name} must be true or false", param=name)
            return {"type": "json_object"}
        case "choice":
            if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
                raise bad_request(f"{name} must be a list of texts, none of them empty", param=name)
            return {"type": "choice", "choice": value}
    if not isinstance(value, str) or not value:
        raise bad_request(f"{name} must be a text, not an empty one", param=name)
    return {"type": kind, kind: value}


def _schema(name: str, value: object) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise bad_request(f"{name} is no JSON: {error}", param=name) from error
    if not isinstance(value, Mapping):
        raise bad_request(f"{name} must be a JSON schema", param=name)
    return value
