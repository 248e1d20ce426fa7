"""From a kind to what is known of it: its model, what a change costs, what it refers to.

The only way from light code to the pydantic models, which are imported on the first call that needs one. Paths are
inside the spec and use YAML names; keyed items are steps like ``"[qwen]"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from areal.errors import InvalidManifest
from areal.resources.kinds import KINDS, Ref, load
from areal.resources.tree import ABSENT, FieldPath, UpdateClass, get_path, path_text

if TYPE_CHECKING:
    from areal.resources.fields import SpecModel


@dataclass(frozen=True)
class Reference:
    """``path`` inside the spec names ``kind``/``name``."""

    path: FieldPath
    kind: str
    name: str

    @property
    def ref(self) -> Ref:
        return Ref(self.kind, self.name)


@cache
def spec_model(kind: str) -> type[SpecModel]:
    """The pydantic model of a canonical kind's spec."""
    model: type[SpecModel] = load(KINDS[kind].spec)
    return model


def effective(kind: str, sparse: Mapping[str, Any]) -> Any:
    """The spec with every default filled in: an instance of ``spec_model(kind)``. Raises InvalidManifest.

    Returned as Any because its class depends on ``kind``: a caller that knows the kind annotates the result.
    """
    from areal.resources.validation import check_model

    spec, found = check_model(spec_model(kind), sparse)
    if found:
        lines = [f"{path_text(('spec', *fault.path))}: {fault.message}" for fault in found]
        raise InvalidManifest(f"the spec of this {kind} is not valid: {'; '.join(lines)}")
    return spec


def validate(kind: str, sparse: Mapping[str, Any]) -> list[tuple[FieldPath, str]]:
    """Everything wrong with a sparse spec, as (path inside the spec, message); empty when it is right."""
    from areal.resources.validation import check_model

    return [(fault.path, fault.message) for fault in check_model(spec_model(kind), sparse)[1]]


@cache
def update_class(kind: str, path: FieldPath) -> UpdateClass:
    """The cost of changing the leaf at ``path``: the highest class of any field on the way to it.

    So a block that several kinds share has the cost of its place in each. A leaf of a free-form map or list has the
    cost of its field; a field that this version does not know is RECREATE, which is safe.
    """
    from areal.resources.model_fields import resolve

    fields = list(resolve(spec_model(kind), path))
    known_steps = sum(2 if field.repeated or field.mapped else 1 for field in fields)  # an item is a step of its own
    if not fields or (fields[-1].nested is not None and len(path) > known_steps):
        return UpdateClass.RECREATE
    return max((field.update for field in fields if field.update is not None), default=UpdateClass.RECREATE)


def references(kind: str, sparse: Mapping[str, Any]) -> tuple[Reference, ...]:
    """The objects a sparse spec refers to, defaults included (a Model belongs to ``default`` unless it says else)."""
    from areal.resources.model_fields import resolve

    found = []
    for base, name, target in spec_model(kind).REFERENCES:
        holder = get_path(sparse, base)
        if not isinstance(holder, Mapping):
            continue
        value = holder.get(name, ABSENT)
        if value is ABSENT:
            value = next(reversed(list(resolve(spec_model(kind), (*base, name))))).default
        if isinstance(value, str):
            found.append(Reference((*base, name), target, value))
    return tuple(found)


def reference_fields(kind: str) -> tuple[tuple[FieldPath, str], ...]:
    """Every place in a kind's spec that names another object, as (path, kind of what is named)."""
    return tuple(((*base, name), target) for base, name, target in spec_model(kind).REFERENCES)
