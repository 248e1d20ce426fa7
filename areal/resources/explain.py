"""``areal explain KIND.PATH``: what a field means, takes, defaults to, and what changing it costs."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from areal.errors import NotFound
from areal.resources import registry
from areal.resources.docs import field_docs, model_doc
from areal.resources.kinds import resolve_kind
from areal.resources.registry import FieldInfo
from areal.resources.suggest import did_you_mean
from areal.resources.typetext import default_text, type_text
from areal.resources.update import Update

if TYPE_CHECKING:
    from areal.resources.fields import SpecModel

_COST = {
    Update.META: "recorded, no process is touched",
    Update.HOT: "applied to what runs",
    Update.ROLL: "new processes beside the old, then the old drained",
    Update.RECREATE: "processes stop, then start: requests fail in between",
    Update.IMMUTABLE: "refused; --replace deletes the object and creates it anew",
}
_INDENT = "  "
_WIDTH = 100


def explain(path: str) -> str:
    """``inferenceservice.spec.gateway`` explained. Raises NotFound with a suggestion for an unknown kind or field."""
    first, *steps = [step.partition("[")[0] for step in path.strip().strip(".").split(".")]
    if first.lower() in ("overlay", "overlays"):
        from areal.resources.overlay_file import Overlay

        return _explained("Overlay", Overlay, [], steps)
    kind = resolve_kind(first)
    if not steps:
        return _kind_text(kind)
    root, *steps = steps
    if root == "metadata":
        from areal.resources.metadata import Metadata

        return _explained(kind, Metadata, [root], steps)
    if root != "spec":
        near = did_you_mean(root, ("spec", "metadata", *registry.fields_of(registry.spec_model(kind))))
        raise NotFound(f"{kind} has no field {root}{near}", hint=f"areal explain {first.lower()}.spec")
    return _explained(kind, registry.spec_model(kind), [root], steps)


def fields_below(path: str) -> dict[str, str]:
    """The fields of what ``path`` leads to, each with the first line of its explanation; none of what has none."""
    from areal.resources.metadata import Metadata

    first, *steps = [step.partition("[")[0] for step in path.split(".")]
    try:
        kind = resolve_kind(first)
    except NotFound:
        return {}
    roots: dict[str, type[SpecModel]] = {"metadata": Metadata, "spec": registry.spec_model(kind)}
    if not steps:
        return {name: model_doc(model).partition("\n")[0] for name, model in roots.items()}
    holder = roots.get(steps[0])
    mapped = False
    for step in steps[1:]:
        fields = registry.fields_of(holder) if holder is not None else {}
        if step in fields:
            holder, mapped = fields[step].nested, fields[step].mapped
        elif mapped:  # a key of a map
            mapped = False
        else:
            return {}
    if holder is None or mapped:
        return {}
    docs = field_docs(holder)
    return {name: docs.get(info.attribute, "").partition("\n")[0] for name, info in registry.fields_of(holder).items()}


def _kind_text(kind: str) -> str:
    from areal.resources.metadata import Metadata

    model = registry.spec_model(kind)
    parts = [f"KIND: {kind}", "", _wrapped(model_doc(model)), "", "FIELDS"]
    for name, inner in (("metadata", Metadata), ("spec", model)):
        parts += [f"{_INDENT}{name}: map", _wrapped(model_doc(inner), 2)]
    return "\n".join(parts) + "\n"


def _explained(kind: str, model: type[SpecModel], above: list[str], steps: list[str]) -> str:
    """The text for the field that ``steps`` lead to from ``model``, or for ``model`` itself."""
    holder: type[SpecModel] | None = model
    info: FieldInfo | None = None
    floor = Update.META
    for step in steps:
        fields = registry.fields_of(holder) if holder is not None else {}
        if step in fields:
            info = fields[step]
            floor = max(floor, info.update or floor)
            holder = info.nested
        elif info is None or not info.mapped:  # below a map, a step may be one of its keys
            raise NotFound(_unknown(kind, above, step, info, fields))
        above = [*above, step]
    head = [f"KIND:    {kind}", f"FIELD:   {'.'.join(above) or kind}"]
    body = model_doc(model)
    if info is not None:
        head += _facts(info, floor)
        body = field_docs(info.owner).get(info.attribute, "")
    lines = [*head, "", _wrapped(body)]
    if holder is not None:
        lines += [
            "",
            "FIELDS",
            *(line for inner in registry.fields_of(holder).values() for line in _summary(inner, floor)),
        ]
    return "\n".join(lines) + "\n"


def _unknown(kind: str, above: list[str], step: str, info: FieldInfo | None, fields: dict[str, FieldInfo]) -> str:
    at = ".".join((kind, *above))
    if info is not None and not fields:
        return f"{at} is {type_text(info)}: it has no fields to explain"
    return f"{at} has no field {step}{did_you_mean(step, fields)}"


def _facts(info: FieldInfo, update: Update) -> list[str]:
    lines = [f"TYPE:    {type_text(info)}"]
    if info.nested is None or info.required:
        lines.append(f"DEFAULT: {default_text(info)}")
    if info.nested is None:
        lines.append(f"CHANGE:  {update.name}: {_COST[update]}")
    return lines


def _summary(info: FieldInfo, floor: Update) -> list[str]:
    default = f" = {default_text(info)}" if info.nested is None and info.default is not None else ""
    if info.required:
        default = ", required"
    update = f"  [{max(floor, info.update or floor).name}]" if info.nested is None else ""
    doc = field_docs(info.owner).get(info.attribute, "")
    return [f"{_INDENT}{info.name}: {type_text(info)}{default}{update}", _wrapped(doc, 2)]


def _wrapped(text: str, levels: int = 1) -> str:
    indent = _INDENT * levels
    return textwrap.fill(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
