"""``metadata``, the same for every kind. Nothing in it reaches a process: its update class is META throughout."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from areal.errors import ArealError
from areal.resources.fields import Name, SpecModel
from areal.resources.kinds import parse_ref, ref_pattern
from areal.resources.rules import EXPRESSION_PATTERN, Schema, text
from areal.resources.update import Update

_KEY = re.compile(r"[A-Za-z0-9](?:[-._/A-Za-z0-9]{0,251}[A-Za-z0-9])?")
_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[-._A-Za-z0-9]{0,61}[A-Za-z0-9])?)?")


def _check_labels(labels: dict[str, str]) -> dict[str, str]:
    for key, value in _check_keys(labels).items():
        if not _VALUE.fullmatch(value):
            raise PydanticCustomError(
                "areal_label",
                '"{value}" is no label value: at most 63 letters, digits and "-_.", no sign first or last',
                {"key": key, "value": value},
            )
    return labels


def _check_keys(entries: dict[str, str]) -> dict[str, str]:
    for key in entries:
        if not _KEY.fullmatch(key):
            raise PydanticCustomError("areal_label", '"{key}" is not a key for labels or annotations', {"key": key})
    return entries


def _check_ref(text: str) -> str:
    try:
        return str(parse_ref(text))
    except ArealError as error:
        raise PydanticCustomError("areal_ref", "{problem}", {"problem": error.message}) from error


_ANNOTATIONS: Schema = {
    "type": "object",
    "propertyNames": text(_KEY.pattern),
    "additionalProperties": {"type": "string"},
}
_LABELS: Schema = {**_ANNOTATIONS, "additionalProperties": text(f"{_VALUE.pattern}|{EXPRESSION_PATTERN}")}
_REF = text(f"{ref_pattern()}|{EXPRESSION_PATTERN}")


class Metadata(SpecModel):
    """Who the object is."""

    name: Annotated[Name, Update.META]
    """Unique within its kind: lower case letters, digits and `-`, at most 63."""
    labels: Annotated[dict[str, str], AfterValidator(_check_labels), WithJsonSchema(_LABELS), Update.META] = {}
    """Short values to select objects by (`-l team=rl`)."""
    annotations: Annotated[dict[str, str], AfterValidator(_check_keys), WithJsonSchema(_ANNOTATIONS), Update.META] = {}
    """Anything else worth keeping with the object. `areal.dev/protect: "true"` refuses its deletion."""
    depends_on: Annotated[list[Annotated[str, AfterValidator(_check_ref), WithJsonSchema(_REF)]], Update.META] = []
    """Objects, as KIND/NAME, that must be ready first, beside those the spec refers to."""
