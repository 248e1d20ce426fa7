"""The base of every spec model, and the scalar types its fields are made of.

Every field of a spec declares, beside its type: what a change of it costs (``Update``), a docstring (read by
``docs``), a default unless it is required, and for a number its ``Unit``. YAML names are camelCase, attributes
snake_case. Validation is strict: YAML has already said which scalars are numbers, and ``"8080"`` is not one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from areal.resources.kinds import MAX_NAME_LENGTH, NAME_PATTERN, name_problem
from areal.resources.rules import Schema, text
from areal.resources.tree import Path


class SpecModel(BaseModel):
    """A map in a manifest: unknown fields are errors, values are frozen."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, alias_generator=to_camel, defer_build=True, allow_inf_nan=False
    )

    def problems(self) -> Iterator[tuple[Path, str]]:
        """What is wrong between fields that are each right alone, as (path with YAML names, message)."""
        return iter(())

    @classmethod
    def schema_rules(cls) -> list[Schema]:
        """The same as JSON Schema, as far as that can say it."""
        return []


@dataclass(frozen=True)
class Unit:
    """What a number counts. A duration or a size has its unit in the field's name as well."""

    name: str


def _check_name(name: str) -> str:
    problem = name_problem(name)
    if problem is not None:
        raise PydanticCustomError("areal_name", "{problem}", {"problem": problem})
    return name


def _check_quantity(size: str) -> str:
    if _QUANTITY.fullmatch(size) is None:
        raise PydanticCustomError(
            "areal_quantity", 'must be a size like "64Gi" or "500M", got "{text}"', {"text": size}
        )
    return size


_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|k|M|G|T)?")
_MULTIPLES = {
    "": 1,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}


def quantity_bytes(size: str) -> int:
    """``"64Gi"`` in bytes."""
    match = _QUANTITY.fullmatch(size)
    if match is None:
        raise ValueError(f'"{size}" is not a size')
    return int(float(match[1]) * _MULTIPLES[match[2] or ""])


NAME_SCHEMA: Schema = {**text(NAME_PATTERN), "maxLength": MAX_NAME_LENGTH}
Name: TypeAlias = Annotated[str, AfterValidator(_check_name), WithJsonSchema(NAME_SCHEMA)]
Quantity: TypeAlias = Annotated[
    str, AfterValidator(_check_quantity), WithJsonSchema(text(_QUANTITY.pattern)), Unit("bytes")
]
Text: TypeAlias = Annotated[str, Field(min_length=1)]

_LONGEST_S = 1e9  # 31 years

Port: TypeAlias = Annotated[int, Field(ge=1, le=65535), Unit("port")]
Count: TypeAlias = Annotated[int, Field(ge=0, le=1_000_000), Unit("count")]
PositiveCount: TypeAlias = Annotated[int, Field(ge=1, le=1_000_000), Unit("count")]
Replicas: TypeAlias = Annotated[int, Field(ge=0, le=4096), Unit("replicas")]
Cores: TypeAlias = Annotated[float, Field(gt=0, le=1_000_000), Unit("cores")]
Ratio: TypeAlias = Annotated[float, Field(ge=0, le=1), Unit("ratio")]
Factor: TypeAlias = Annotated[float, Field(ge=1, le=100), Unit("factor")]
Bytes: TypeAlias = Annotated[int, Field(ge=1, le=2**60), Unit("bytes")]
Seconds: TypeAlias = Annotated[float, Field(ge=0, le=_LONGEST_S), Unit("seconds")]
PositiveSeconds: TypeAlias = Annotated[float, Field(gt=0, le=_LONGEST_S), Unit("seconds")]
