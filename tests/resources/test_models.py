"""Rules that every field of every kind obeys, checked over the models themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from areal.resources import registry
from areal.resources.docs import field_docs, model_doc
from areal.resources.fields import SpecModel, quantity_bytes
from areal.resources.kinds import KINDS
from areal.resources.metadata import Metadata
from areal.resources.overlay_file import Overlay
from areal.resources.registry import FieldInfo
from areal.resources.tree import ABSENT, path_text
from areal.resources.typetext import default_text, plain_default, type_text
from areal.resources.update import Update

_ROOTS: dict[str, type[SpecModel]] = {
    **{kind: registry.spec_model(kind) for kind in KINDS},
    "Metadata": Metadata,
    "Overlay": Overlay,
}
_SUFFIXES = {"seconds": ("_seconds", "_seconds_after_finished"), "bytes": ("_bytes", "memory")}


def _fields() -> Iterator[tuple[str, FieldInfo]]:
    for root, model in _ROOTS.items():
        for path, info in registry.all_fields(model):
            yield f"{root}.{path_text(path)}", info


_ALL = dict(_fields())


@pytest.mark.parametrize("name", _ALL)
def test_field_has_update_class_description_and_unit(name: str) -> None:
    info = _ALL[name]
    assert isinstance(info.update, Update), "no update class"
    doc = field_docs(info.owner).get(info.attribute, "")
    assert len(doc) > 8 and doc.endswith((".", "?")), f"no description: {doc!r}"
    if type_text(info).startswith(("integer", "number")):
        assert info.unit is not None, "a number without a unit"
    if info.unit is not None and info.unit.name in _SUFFIXES:
        assert info.attribute.endswith(_SUFFIXES[info.unit.name]), "the unit is not in the name"
    if re.search(r"timeout|deadline|period|backoff_|delay|ttl|_window", info.attribute):
        assert (info.unit is not None and info.unit.name == "seconds") or info.nested is not None


@pytest.mark.parametrize("name", _ALL)
def test_field_name_is_camel_case_and_its_type_has_words(name: str) -> None:
    info = _ALL[name]
    assert re.fullmatch(r"[a-z][A-Za-z]*", info.name)
    assert type_text(info) and default_text(info)


@pytest.mark.parametrize(
    "model",
    sorted({info.owner for info in _ALL.values()}, key=lambda model: model.__name__),
    ids=lambda model: str(model.__name__),
)
def test_model_has_a_docstring_and_valid_defaults(model: type[SpecModel]) -> None:
    assert model_doc(model)
    defaults = {
        name: plain_default(info.default)
        for name, info in registry.fields_of(model).items()
        if info.default is not ABSENT and info.default is not None
    }
    filled = {name: "x" for name, info in registry.fields_of(model).items() if info.required}
    errors = [fault for fault in _faults(model, {**filled, **defaults}) if fault.path[:1] not in {(n,) for n in filled}]
    assert not [fault for fault in errors if fault.path], "a default that its own validation refuses"


def _faults(model: type[SpecModel], value: dict[str, object]) -> list[registry.Any]:
    from areal.resources.validation import check_model

    return check_model(model, value)[1]


def test_update_classes_follow_the_design() -> None:
    expected = {
        ("InferenceService", ("router", "strategy")): Update.HOT,
        ("InferenceService", ("limits", "maxBodyBytes")): Update.HOT,
        ("InferenceService", ("gateway", "port")): Update.RECREATE,
        ("InferenceService", ("scheduler", "type")): Update.IMMUTABLE,
        ("Model", ("replicas",)): Update.HOT,
        ("Model", ("path",)): Update.ROLL,
        ("Model", ("backend",)): Update.ROLL,
        ("Model", ("chatTemplate",)): Update.ROLL,
        ("Model", ("resources", "gpus")): Update.ROLL,
        ("Model", ("service",)): Update.IMMUTABLE,
        ("AgentService", ("pairs",)): Update.HOT,
        ("TrainJob", ("config",)): Update.IMMUTABLE,
    }
    assert {key: registry.update_class(*key) for key in expected} == expected


def test_quantity_reads_binary_and_decimal_multiples() -> None:
    assert quantity_bytes("64Gi") == 64 * 2**30
    assert quantity_bytes("1.5G") == 1_500_000_000
    assert quantity_bytes("512") == 512
    with pytest.raises(ValueError, match="not a size"):
        quantity_bytes("64 GB")
