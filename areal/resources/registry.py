"""From a kind to what is known of it: its model, its fields, what a change costs, what it refers to.

The only way from light code to the pydantic models, which are imported on the first call that needs one. Paths are
inside the spec and use YAML names; keyed items are steps like ``"[qwen]"``.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from areal.errors import InvalidManifest
from areal.resources.kinds import KINDS, Ref
from areal.resources.tree import ABSENT, Path, get_path, path_text
from areal.resources.update import Update

if TYPE_CHECKING:
    from areal.resources.fields import SpecModel, Unit

_MODULES = {
    "InferenceService": ("inference_service", "InferenceServiceSpec"),
    "Model": ("model", "ModelSpec"),
    "AgentService": ("agent_service", "AgentServiceSpec"),
    "TrainJob": ("train_job", "TrainJobSpec"),
}

# Where a spec names other objects: the map that must be present for the default to count, the field, its kind.
_REFERENCES: dict[str, tuple[tuple[Path, str, str], ...]] = {
    "InferenceService": (),
    "Model": (((), "service", "InferenceService"),),
    "AgentService": ((("inference",), "service", "InferenceService"), (("inference",), "model", "Model")),
    "TrainJob": ((("rollout",), "service", "InferenceService"), (("rollout",), "model", "Model")),
}


@dataclass(frozen=True)
class FieldInfo:
    """One field of a spec model. ``nested`` is the model of its value, or of its items when ``repeated``, or of its
    map values when ``mapped``."""

    name: str
    attribute: str
    owner: type[SpecModel]
    annotation: Any
    update: Update | None
    unit: Unit | None
    required: bool
    default: Any
    nested: type[SpecModel] | None
    repeated: bool
    mapped: bool


@dataclass(frozen=True)
class Reference:
    """``path`` inside the spec names ``kind``/``name``."""

    path: Path
    kind: str
    name: str

    @property
    def ref(self) -> Ref:
        return Ref(self.kind, self.name)


@cache
def spec_model(kind: str) -> type[SpecModel]:
    """The pydantic model of a canonical kind's spec."""
    module, name = _MODULES[kind]
    model: type[SpecModel] = getattr(importlib.import_module(f"areal.resources.{module}"), name)
    return model


def effective(kind: str, sparse: Mapping[str, Any]) -> Any:
    """The spec with every default filled in: an instance of ``spec_model(kind)``. Raises InvalidManifest.

    Returned as Any because its class depends on ``kind``: a caller that knows the kind annotates the result.
    """
    from areal.resources.validation import check_spec

    spec, found = check_spec(kind, sparse)
    if found:
        lines = [f"{path_text(('spec', *fault.path))}: {fault.message}" for fault in found]
        raise InvalidManifest(f"the spec of this {kind} is not valid: {'; '.join(lines)}")
    return spec


def validate(kind: str, sparse: Mapping[str, Any]) -> list[tuple[Path, str]]:
    """Everything wrong with a sparse spec, as (path inside the spec, message); empty when it is right."""
    from areal.resources.validation import check_spec

    return [(fault.path, fault.message) for fault in check_spec(kind, sparse)[1]]


@cache
def update_class(kind: str, path: Path) -> Update:
    """What changing the leaf at ``path`` costs: the most that any field on the way to it says.

    So a block that several kinds share costs what its place in each demands. A leaf of a free-form map or list costs
    what its field costs; a field this version does not know is RECREATE, which is safe.
    """
    fields = list(resolve(spec_model(kind), path))
    if not fields or (fields[-1].nested is not None and len(path) > _reach(fields)):
        return Update.RECREATE
    return max((field.update for field in fields if field.update is not None), default=Update.RECREATE)


def _reach(fields: list[FieldInfo]) -> int:
    """How many steps of a path the fields account for: a list's or map's field takes its item as well."""
    return sum(2 if field.repeated or field.mapped else 1 for field in fields)


def references(kind: str, sparse: Mapping[str, Any]) -> tuple[Reference, ...]:
    """The objects a sparse spec refers to, defaults included (a Model belongs to ``default`` unless it says else)."""
    found = []
    for base, name, target in _REFERENCES[kind]:
        holder = get_path(sparse, base)
        if not isinstance(holder, Mapping):
            continue
        value = holder.get(name, ABSENT)
        if value is ABSENT:
            value = next(reversed(list(resolve(spec_model(kind), (*base, name))))).default
        if isinstance(value, str):
            found.append(Reference((*base, name), target, value))
    return tuple(found)


def reference_fields(kind: str) -> tuple[tuple[Path, str], ...]:
    """Every place in a kind's spec that names another object, as (path, kind of what is named)."""
    return tuple(((*base, name), target) for base, name, target in _REFERENCES[kind])


def resolve(model: type[SpecModel], path: Path) -> Iterator[FieldInfo]:
    """The fields on the way down ``path``, as far as models reach."""
    current: type[SpecModel] | None = model
    steps = iter(path)
    for step in steps:
        info = fields_of(current).get(str(step)) if current is not None else None
        if info is None:
            return
        yield info
        current = info.nested
        if info.repeated or info.mapped:
            next(steps, None)


@cache
def fields_of(model: type[SpecModel]) -> dict[str, FieldInfo]:
    """The fields of a model by YAML name, in declaration order."""
    return {info.name: info for info in (_field(model, name) for name in model.model_fields)}


def all_fields(model: type[SpecModel], prefix: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """Every field below ``model``, depth first, with its path (``[]`` stands for an item, ``*`` for a map key)."""
    for info in fields_of(model).values():
        path = (*prefix, info.name)
        yield path, info
        if info.nested is not None:
            inner: Path = (*path, "[]") if info.repeated else (*path, "*") if info.mapped else path
            yield from all_fields(info.nested, inner)


def _field(model: type[SpecModel], attribute: str) -> FieldInfo:
    from areal.resources.fields import Unit

    info = model.model_fields[attribute]
    nested, repeated, mapped = _nested(info.annotation)
    marks = [*info.metadata, *_marks(info.annotation)]
    return FieldInfo(
        name=info.alias or attribute,
        attribute=attribute,
        owner=model,
        annotation=info.annotation,
        update=next((mark for mark in marks if isinstance(mark, Update)), None),
        unit=next((mark for mark in marks if isinstance(mark, Unit)), None),
        required=info.is_required(),
        default=ABSENT if info.is_required() else info.default,
        nested=nested,
        repeated=repeated,
        mapped=mapped,
    )


def _nested(annotation: Any) -> tuple[type[SpecModel] | None, bool, bool]:
    """The model inside an annotation, and whether through a list or a map."""
    from areal.resources.fields import SpecModel

    if isinstance(annotation, type) and get_origin(annotation) is None:
        return (annotation, False, False) if issubclass(annotation, SpecModel) else (None, False, False)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _nested(args[0])
    if origin is list:
        nested = _nested(args[0])[0]
        return nested, nested is not None, False
    if origin is dict:
        nested = _nested(args[1])[0]
        return nested, False, nested is not None
    if origin in (Union, types.UnionType):
        return next((found for found in map(_nested, args) if found[0] is not None), (None, False, False))
    return None, False, False


def _marks(annotation: Any) -> Iterator[Any]:
    """Metadata that sits deeper than the field, as in ``Seconds | None``."""
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
        yield from _marks(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for arm in get_args(annotation):
            yield from _marks(arm)


assert _MODULES.keys() == KINDS.keys() == _REFERENCES.keys()
