"""JSON Schemas of the kinds, for editors and CI, generated from the models and checked in under ``schemas/``.

    python -m areal.resources.schema --write schemas/      (--check: exit 1 when a file is stale)

A value of any other type than text may also be an expression (``${{ ... }}``), so that templates are valid in an
editor. ``x-areal-update`` is the update class of a field. The files use draft 7, which YAML editors read.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import json
import sys
from functools import cache
from pathlib import Path

from areal.resources.fields import EXPRESSION, Metadata, Schema, SpecModel, all_fields, fields_of
from areal.resources.kinds import API_VERSION, KINDS
from areal.resources.validation import spec_model, validate

ALL_KINDS = "areal.schema.json"
BASE_URL = "https://areal.dev/schemas/v1alpha1/"
COMBINED = "areal"

_DRAFTS = {7: "http://json-schema.org/draft-07/schema#", 2020: "https://json-schema.org/draft/2020-12/schema"}
_EXPRESSION: Schema = {
    "type": "string",
    "pattern": r"\$\{\{[\s\S]*\}\}",
    "description": "An expression, evaluated when the manifest is rendered.",
}
_PROFILES: Schema = {
    "type": "array",
    "items": {"type": "string"},
    "description": "Profiles (`--profile`) that the resource belongs to. Absent: all.",
}


def json_schema(kind: str, draft: int = 7) -> Schema:
    """Return the schema of a manifest of ``kind``, or of ``Overlay``; ``draft`` is 7 or 2020 (2020-12)."""
    if kind == "Overlay":
        definitions = _overlay_definitions()
        body: Schema = definitions.pop("Overlay")
    else:
        definitions = _definitions(kind)
        body = definitions.pop(kind)
        body = {**body, "required": ["apiVersion", *body["required"]]}
    return _finished(kind.lower(), f"areal {kind}", body, definitions, draft)


def combined_schema(draft: int = 7) -> Schema:
    """Return one schema for files that hold any kind, a ``generate``, a List or an overlay."""
    definitions: Schema = _overlay_definitions()
    for kind in KINDS:
        definitions.update(_definitions(kind))
    by_kind = [_when_kind(kind, {"$ref": f"#/definitions/{kind}"}) for kind in (*KINDS, "Overlay")]
    kinds: Schema = {"enum": [*KINDS, "Overlay", "List"], "description": "What the document declares."}
    definitions["Resource"] = {
        "type": "object",
        "required": ["kind"],
        "properties": {"kind": kinds, "apiVersion": {"const": API_VERSION, "description": "Version of this format."}},
        "allOf": [*by_kind, _when_kind("List", {"$ref": "#/definitions/List"})],
    }
    definitions["List"] = {
        "type": "object",
        "description": "Several resources in one document.",
        "properties": {
            "apiVersion": {"const": API_VERSION},
            "kind": {"const": "List"},
            "items": {"type": "array", "items": {"$ref": "#/definitions/Resource"}},
        },
        "required": ["items"],
        "additionalProperties": False,
    }
    definitions["Generate"] = _generate_schema()
    body: Schema = {
        "type": "object",
        "if": {"required": ["generate"]},
        "then": {"$ref": "#/definitions/Generate"},
        "else": {"$ref": "#/definitions/Resource"},
    }
    return _finished(COMBINED, "areal manifests", body, definitions, draft)


def schema_files() -> dict[str, str]:
    """Return the content of each file of ``schemas/``, by name."""
    schemas = {kind.lower(): json_schema(kind) for kind in (*KINDS, "Overlay")}
    schemas[COMBINED] = combined_schema()
    return {f"{name}.schema.json": json.dumps(schema, indent=2) + "\n" for name, schema in schemas.items()}


def stale_files(folder: Path) -> list[str]:
    """Return the names of files in ``folder`` that are missing, out of date, or superfluous."""
    wanted = schema_files()
    present = {path.name: path.read_text("utf-8") for path in sorted(folder.glob("*.schema.json"))}
    return [name for name in sorted({*wanted, *present}) if wanted.get(name) != present.get(name)]


def _definitions(kind: str) -> Schema:
    """Return the definitions of a kind: its envelope, under the kind's name, and the models that it uses."""
    spec = spec_model(kind)
    needed = bool(validate(kind, {}))
    envelope: Schema = {
        "type": "object",
        "description": model_doc(spec),
        "properties": {
            "apiVersion": {"const": API_VERSION, "description": "Version of this format."},
            "kind": {"const": kind, "description": f"{kind}: {model_doc(spec)}"},
            "metadata": _ref(Metadata),
            "spec": _ref(spec) if needed else {**_ref(spec), "anyOf": [*_ref(spec)["anyOf"], {"type": "null"}]},
            "profiles": _PROFILES,
        },
        "required": ["kind", "metadata", *(["spec"] if needed else [])],
        "additionalProperties": False,
    }
    return {kind: envelope, **_models(Metadata), **_models(spec)}


def _overlay_definitions() -> Schema:
    from areal.resources.overlay import Overlay

    return _models(Overlay)


def _models(model: type[SpecModel]) -> Schema:
    """Return every model below ``model`` by class name, with docs, defaults and update classes."""
    generated = model.model_json_schema(by_alias=True, ref_template="#/definitions/{model}")
    raw = {**generated.pop("$defs", {}), model.__name__: generated}
    nested = (info.nested for _, info in all_fields(model))
    classes = {model.__name__: model, **{cls.__name__: cls for cls in nested if cls is not None}}
    definitions = {name: _model_schema(cls, raw[name]) for name, cls in classes.items()}
    extra = {name: schema for name, schema in raw.items() if name not in classes}  # JsonValue
    return {**definitions, **extra, "Expression": _EXPRESSION}


def _model_schema(model: type[SpecModel], raw: Schema) -> Schema:
    docs = field_docs(model)
    properties: Schema = {}
    for name, info in fields_of(model).items():
        found: Schema = raw["properties"][name]
        shape = {key: value for key, value in found.items() if key not in ("title", "default", "description")}
        properties[name] = {
            **_templated(shape),
            "description": docs.get(info.attribute, ""),
            **({} if "default" not in found or found["default"] is None else {"default": found["default"]}),
            **({} if info.update is None else {"x-areal-update": info.update.name}),
        }
    required = [name for name, info in fields_of(model).items() if info.required]
    return {
        "type": "object",
        "description": model_doc(model),
        "properties": properties,
        **({"required": required} if required else {}),
        "additionalProperties": False,
        **({"allOf": rules} if (rules := model.schema_rules()) else {}),
    }


def _templated(shape: Schema) -> Schema:
    """Allow ``shape`` or an expression. A ``$ref`` moves into ``anyOf``: draft 7 ignores the keywords beside it."""
    if shape.get("type") == "string" and not {"enum", "const", "pattern"} & shape.keys():
        return shape
    arms = shape.pop("anyOf", None)
    if arms is None:
        arms = [shape]
        shape = {}
    plain_text = any(arm == {"type": "string"} for arm in arms)
    return {**shape, "anyOf": arms if plain_text else [*arms, EXPRESSION]}


def _ref(model: type[SpecModel]) -> Schema:
    return {"anyOf": [{"$ref": f"#/definitions/{model.__name__}"}, EXPRESSION], "description": model_doc(model)}


def _when_kind(kind: str, then: Schema) -> Schema:
    return {"if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]}, "then": then}


def _generate_schema() -> Schema:
    values: Schema = {"anyOf": [{"type": "array"}, EXPRESSION]}
    resource: Schema = {"$ref": "#/definitions/Resource"}
    return {
        "type": "object",
        "description": "Many resources from one template.",
        "properties": {
            "apiVersion": {"const": API_VERSION, "description": "Version of this format."},
            "generate": {
                "type": "object",
                "description": "What the template is evaluated for.",
                "properties": {
                    "each": {**values, "description": "The items, `item` in expressions."},
                    "matrix": {
                        "anyOf": [{"type": "object", "additionalProperties": values}, EXPRESSION],
                        "description": "Every combination of the axes' values, `item.AXIS` in expressions.",
                    },
                },
                "minProperties": 1,
                "maxProperties": 1,
                "additionalProperties": False,
            },
            "template": {
                "anyOf": [resource, {"type": "array", "items": resource}],
                "description": "The resource, or resources, made for each item.",
            },
            "profiles": _PROFILES,
        },
        "required": ["generate", "template"],
        "additionalProperties": False,
    }


def _finished(name: str, title: str, body: Schema, definitions: Schema, draft: int) -> Schema:
    head = {"$schema": _DRAFTS[draft], "$id": f"{BASE_URL}{name}.schema.json", "title": title}
    schema: Schema = {**head, **body, "definitions": dict(sorted(definitions.items()))}
    if draft == 2020:
        schema = json.loads(
            json.dumps(schema).replace('"#/definitions/', '"#/$defs/').replace('"definitions":', '"$defs":')
        )
    return schema


# Docstrings of fields are parsed from the source of the spec models on demand: parsing them at import would cost each
# ``apply`` more than validating its manifests.


@cache
def field_docs(model: type[SpecModel]) -> dict[str, str]:
    """Return the docstring of each field, own or inherited, by attribute name; fields without one are left out."""
    docs: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if cls.__module__ not in ("pydantic.main", "builtins"):
            body = _class_bodies(cls.__module__).get(cls.__name__, [])
            for field, below in itertools.pairwise(body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        docs[name] = " ".join(text.split())
    return docs


def model_doc(model: type[SpecModel]) -> str:
    return " ".join((model.__doc__ or "").split())


@cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def main(arguments: list[str]) -> int:
    match arguments:
        case ["--write", folder]:
            Path(folder).mkdir(parents=True, exist_ok=True)
            for name in stale_files(Path(folder)):
                content = schema_files().get(name)
                path = Path(folder, name)
                path.unlink(missing_ok=True) if content is None else path.write_text(content, "utf-8")
                print(f"{path} {'removed' if content is None else 'written'}")
            return 0
        case ["--check", folder]:
            stale = stale_files(Path(folder))
            for name in stale:
                print(f"{Path(folder, name)} is stale: run python -m areal.resources.schema --write {folder}")
            return 1 if stale else 0
        case _:
            print("usage: python -m areal.resources.schema --write|--check FOLDER", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
