"""Spellings, references, names."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import NotFound, UsageFault
from areal.resources.kinds import KINDS, Ref, check_name, name_problem, parse_ref, resolve_kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("model", "Model"),
        ("MODELS", "Model"),
        ("mdl", "Model"),
        ("inf", "InferenceService"),
        ("isvc", "InferenceService"),
        ("InferenceService", "InferenceService"),
        ("agent", "AgentService"),
        ("job", "TrainJob"),
        ("trainjobs", "TrainJob"),
    ],
)
def test_resolve_kind_returns_canonical_name(text: str, kind: str) -> None:
    assert resolve_kind(text) == kind


def test_resolve_kind_typo_suggests() -> None:
    with pytest.raises(NotFound, match=r'unknown kind "modle" \(did you mean "model"\?\)') as caught:
        resolve_kind("modle")
    assert caught.value.exit_code == 4
    assert "InferenceService" in str(caught.value.hint)


def test_parse_ref_prints_canonically() -> None:
    assert str(parse_ref("mdl/qwen")) == "Model/qwen"
    assert parse_ref("model/qwen") == Ref("Model", "qwen")


@pytest.mark.parametrize("text", ["qwen", "model/", "model/../x", "model/a/b", "model/A", "/x", "model/-a"])
def test_parse_ref_of_bad_text_is_a_usage_error(text: str) -> None:
    with pytest.raises((UsageFault, NotFound)):
        parse_ref(text)


def test_kinds_sort_in_convergence_order() -> None:
    refs = [Ref("TrainJob", "a"), Ref("Model", "b"), Ref("Model", "a"), Ref("InferenceService", "z")]
    assert [str(ref) for ref in sorted(refs, key=lambda ref: ref.sort_key)] == [
        "InferenceService/z",
        "Model/a",
        "Model/b",
        "TrainJob/a",
    ]
    assert [KINDS[kind].order for kind in KINDS] == [0, 1, 2, 3]


@given(st.text(max_size=70))
def test_accepted_names_are_safe_path_segments(name: str) -> None:
    if name_problem(name) is None:
        assert check_name(name) == name
        assert "/" not in name and not name.startswith((".", "-")) and name == name.lower() and 1 <= len(name) <= 63


def test_name_length_limit_is_63() -> None:
    assert name_problem("a" * 63) is None
    assert "64 characters" in str(name_problem("a" * 64))


def test_light_modules_import_neither_pydantic_nor_yaml() -> None:
    modules = "addresses, backend, jsonpath, kinds, nodes, paths, tree"
    heavy = "[m for m in ('pydantic', 'yaml', 'click') if m in sys.modules]"
    code = f"import sys; from areal.resources import {modules}; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
