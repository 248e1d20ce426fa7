"""``areal explain KIND.PATH`` (meaning, type, default and update class of a field) and ``areal init KIND``.

``areal init`` writes a manifest with the required fields filled in. Every other field is a comment with its meaning and
default; deleting ``# `` sets it.
"""

from __future__ import annotations

import json
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from areal.errors import NotFound, did_you_mean
from areal.resources.fields import FieldInfo, Metadata, SpecModel, fields_of
from areal.resources.kinds import API_VERSION, resolve_kind
from areal.resources.schema import ALL_KINDS, field_docs, model_doc
from areal.resources.tree import ABSENT, UpdateClass
from areal.resources.validation import spec_model

_WORDS = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null"}
_BOUNDS = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
_INDENT = "  "
_WIDTH = 100
_MANIFEST_WIDTH = 110


def type_text(info: FieldInfo) -> str:
    """Return the type of a field in words: ``integer from 1 to 65535 (port)``, ``list of maps``, ``auto | prefix``."""
    field = info.owner.model_fields[info.attribute]
    text = _type(info.annotation, list(_bounds(field.metadata)))
    return f"{text} ({info.unit.name})" if info.unit is not None and info.unit.name not in text else text


def default_text(info: FieldInfo) -> str:
    """Return the default in YAML flow style; ``required`` for a required field, ``absent`` for a null default."""
    if info.default is ABSENT or info.default is None:
        return "required" if info.default is ABSENT else "absent"
    return json.dumps(plain_default(info.default), ensure_ascii=False)


def plain_default(value: Any) -> Any:
    """Convert a default that is a model to a map with YAML names, without null entries."""
    dump = getattr(value, "model_dump", None)
    return dump(by_alias=True, exclude_none=True) if dump is not None else value


def _type(annotation: Any, bounds: list[Any]) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(args[0], [*bounds, *_bounds(annotation.__metadata__)])
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " | ".join(_type(arm, bounds) for arm in args if arm is not type(None))
    if origin is list:
        return f"list of {_type(args[0], []).replace('map', 'maps')}"
    if origin is dict:
        value = _type(args[1], [])
        return "map" if value == "anything" else f"map from text to {value}"
    word = _WORDS.get(annotation)
    if annotation in (int, float):
        found = {name: getattr(mark, name) for mark in bounds for name in _BOUNDS if hasattr(mark, name)}
        return f"{word}{''.join(f' {words} {found[name]:.12g}' for name, words in _BOUNDS.items() if name in found)}"
    if word is not None:
        return word
    return "map" if isinstance(annotation, type) else "anything"


def _bounds(metadata: Any) -> Iterator[Any]:
    """Yield the bounds of a field, including those inside a pydantic ``FieldInfo``."""
    for mark in metadata:
        if hasattr(mark, "metadata"):
            yield from _bounds(mark.metadata)
        elif any(hasattr(mark, name) for name in _BOUNDS):
            yield mark


_COST = {
    UpdateClass.META: "recorded, no process is touched",
    UpdateClass.HOT: "applied to what runs",
    UpdateClass.ROLL: "new processes beside the old, then the old drained",
    UpdateClass.RECREATE: "processes stop, then start: requests fail in between",
    UpdateClass.IMMUTABLE: "refused; --replace deletes the object and creates it anew",
}


def explain(path: str) -> str:
    """Explain a kind or a field (``inferenceservice.spec.gateway``). Raises NotFound, with a suggestion."""
    first, *steps = [step.partition("[")[0] for step in path.strip().strip(".").split(".")]
    if first.lower() in ("overlay", "overlays"):
        from areal.resources.overlay import Overlay

        return _explained("Overlay", Overlay, [], steps)
    kind = resolve_kind(first)
    spec = spec_model(kind)
    roots: dict[str, type[SpecModel]] = {"metadata": Metadata, "spec": spec}
    if not steps:
        lines = [f"KIND: {kind}", "", _wrapped(model_doc(spec)), "", "FIELDS"]
        for name, model in roots.items():
            lines += [f"{_INDENT}{name}: map", _wrapped(model_doc(model), 2)]
        return "\n".join(lines) + "\n"
    root, *steps = steps
    if root not in roots:
        near = did_you_mean(root, ("spec", "metadata", *fields_of(spec)))
        raise NotFound(f"{kind} has no field {root}{near}", hint=f"areal explain {first.lower()}.spec")
    return _explained(kind, roots[root], [root], steps)


def fields_below(path: str) -> dict[str, str]:
    """Return the description of each field below ``path``; empty if ``path`` is unknown or has no fields."""
    first, *steps = [step.partition("[")[0] for step in path.split(".")]
    try:
        kind = resolve_kind(first)
    except NotFound:
        return {}
    roots: dict[str, type[SpecModel]] = {"metadata": Metadata, "spec": spec_model(kind)}
    if not steps:
        return {name: model_doc(model) for name, model in roots.items()}
    holder = roots.get(steps[0])
    needs_key = False
    for step in steps[1:]:
        fields = fields_of(holder) if holder is not None else {}
        if step in fields:
            holder, needs_key = fields[step].nested, fields[step].mapped
        elif needs_key:
            needs_key = False
        else:
            return {}
    if holder is None or needs_key:
        return {}
    docs = field_docs(holder)
    return {name: docs.get(info.attribute, "") for name, info in fields_of(holder).items()}


def _explained(kind: str, model: type[SpecModel], above: list[str], steps: list[str]) -> str:
    """Explains the field at ``steps`` below ``model``, or ``model`` itself. ``above``: the path of ``model``."""
    holder: type[SpecModel] | None = model
    info: FieldInfo | None = None
    floor = UpdateClass.META
    for step in steps:
        fields = fields_of(holder) if holder is not None else {}
        at = ".".join((kind, *above))
        if step in fields:
            info = fields[step]
            floor = max(floor, info.update or floor)
            holder = info.nested
        elif info is not None and not info.mapped and not fields:
            raise NotFound(f"{at} is {type_text(info)}: it has no fields to explain")
        elif info is None or not info.mapped:  # below a map, a step may be one of its keys
            raise NotFound(f"{at} has no field {step}{did_you_mean(step, fields)}")
        above = [*above, step]
    lines = [f"KIND:    {kind}", f"FIELD:   {'.'.join(above) or kind}"]
    body = model_doc(model)
    if info is not None:
        lines.append(f"TYPE:    {type_text(info)}")
        if info.nested is None or info.required:
            lines.append(f"DEFAULT: {default_text(info)}")
        if info.nested is None:
            lines.append(f"CHANGE:  {floor.name}: {_COST[floor]}")
        body = field_docs(info.owner).get(info.attribute, "")
    lines += ["", _wrapped(body)]
    if holder is not None:
        lines += ["", "FIELDS"]
        for inner in fields_of(holder).values():
            lines += [_summary(inner, floor), _wrapped(field_docs(inner.owner).get(inner.attribute, ""), 2)]
    return "\n".join(lines) + "\n"


def _summary(info: FieldInfo, floor: UpdateClass) -> str:
    default = f" = {default_text(info)}" if info.nested is None and info.default is not None else ""
    if info.required:
        default = ", required"
    update = f"  [{max(floor, info.update or floor).name}]" if info.nested is None else ""
    return f"{_INDENT}{info.name}: {type_text(info)}{default}{update}"


def _wrapped(text: str, levels: int = 1) -> str:
    indent = _INDENT * levels
    return textwrap.fill(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)


_BARE = re.compile(r"[A-Za-z][\w./-]*(?::[\w.]+)?")

# Values that ``init`` shows, commented out, for fields whose default is null or empty.
_EXAMPLES: dict[str, object] = {
    "models": [{"name": "my-model", "backend": "embedded", "path": "Qwen/Qwen3-0.6B"}],
    "engineArgs": {"max-model-len": 8192},
    "overrides": ["actor.optimizer.lr=5e-6"],
    "external": {"url": "https://api.openai.com/v1", "model": "gpt-5", "apiKeyFrom": {"env": "OPENAI_API_KEY"}},
    "envFrom": {"HF_TOKEN": {"env": "HF_TOKEN"}},
    "rollout": {"service": "default", "model": "my-model"},
    "adminKeyFrom": {"file": "admin.key"},
}


def init(kind: str, name: str | None = None) -> str:
    """Return a manifest of ``kind``, with the example's name unless one is given, and a modeline with the file of the
    JSON Schema of all kinds for editors."""
    model = spec_model(kind)
    fields = fields_of(model)
    example, filled = model.EXAMPLE
    order = dict.fromkeys((*filled, *fields))
    lines = [
        f"# yaml-language-server: $schema={ALL_KINDS}",
        *_comment(model_doc(model), 0),
        *_comment(f"Every field explained: areal explain {kind.lower()}.spec", 0),
        f"apiVersion: {API_VERSION}",
        f"kind: {kind}",
        "metadata:",
        f"  name: {name or example}",
        "  # labels: {team: rl}",
        "spec:",
        *(line for field in order for line in _field(fields[field], filled)),
    ]
    return "\n".join(lines) + "\n"


def _field(info: FieldInfo, filled: Mapping[str, object]) -> Iterator[str]:
    doc = field_docs(info.owner).get(info.attribute, "")
    yield from _comment(f"{doc} ({type_text(info)})" if info.nested is None else doc, 2)
    if info.name in filled:
        yield from _yaml({info.name: filled[info.name]}, "  ")
    else:
        yield from (f"  # {line}" for line in _yaml({info.name: _shown(info)}, ""))


def _shown(info: FieldInfo) -> Any:
    """Return the example of a field, else its default, else an empty map or null."""
    if info.name in _EXAMPLES:
        return _EXAMPLES[info.name]
    default = plain_default(info.default)
    if default is not None and default is not ABSENT:
        return default
    return {} if info.nested is not None or info.repeated else None


def _yaml(value: dict[str, object], indent: str) -> Iterator[str]:
    """Yield YAML lines: block style for non-empty maps and lists of maps, flow style for other values."""
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield f"{indent}{key}:"
            yield from _yaml(item, indent + "  ")
        elif isinstance(item, list) and item and isinstance(item[0], dict):
            yield f"{indent}{key}:"
            for entry in item:
                first, *rest = _yaml(entry, "")
                yield f"{indent}- {first}"
                yield from (f"{indent}  {line}" for line in rest)
        else:
            yield f"{indent}{key}: {_flow(item)}"


def _flow(value: Any) -> str:
    from areal.resources.yaml_io import resolve_plain  # imports PyYAML, which ``explain`` does not need

    bare = isinstance(value, str) and _BARE.fullmatch(value) and isinstance(resolve_plain(value), str)
    return str(value) if bare else json.dumps(value, ensure_ascii=False)


def _comment(text: str, indent: int) -> Iterator[str]:
    start = " " * indent + "# "
    yield from textwrap.wrap(text, _MANIFEST_WIDTH, initial_indent=start, subsequent_indent=start)
