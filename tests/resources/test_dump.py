"""What we print we read back, and so does everybody else."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from areal.resources.diagnostics import Problems
from areal.resources.dump import dump_documents
from areal.resources.loader import load_documents
from areal.resources.nodes import plain

from .helpers import rendered

_TRAPS = ["1e-3", "1:30", "yes", "off", "0o17", "017", "~", ".inf", "1_000", "a: b", "# c", "${x}", "x\ny\n", "  x\n"]
_CHARACTERS = st.characters(codec="utf-8", exclude_categories=("Cs",))
_TEXT = st.text(_CHARACTERS, max_size=20) | st.sampled_from([*_TRAPS, "\ttab", "-", "=", "<<"])
_NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
_KEYS = _TEXT.filter(lambda key: key != "<<" and "${{" not in key)
_VALUES = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=8,
)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)


@given(st.lists(st.dictionaries(st.sampled_from(["a", "b"]), _VALUES, min_size=1), min_size=1, max_size=2))
def test_dump_loads_back_the_same(documents: list[dict[str, Any]]) -> None:
    problems = Problems()
    text = dump_documents(documents)
    found = [plain(node) for node in load_documents(text, "f", problems)]
    assert not problems, (text, problems.diagnostics())
    assert _same(found, documents)


@given(_VALUES)
def test_dump_reads_the_same_by_yaml_1_1(value: Any) -> None:
    assert _same(yaml.safe_load(dump_documents([{"a": value}])), {"a": value})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("1e-3", 'a: "1e-3"\n'),
        ("yes", "a: 'yes'\n"),
        ("plain", "a: plain\n"),
        ("two\nlines\n", "a: |\n  two\n  lines\n"),
        (1e-3, "a: 0.001\n"),
        ({}, "a: {}\n"),
        ("é", "a: é\n"),
    ],
)
def test_dump_is_what_a_person_would_write(value: Any, text: str) -> None:
    assert dump_documents([{"a": value}]) == text


def test_dump_keeps_order_and_repeats_instead_of_aliasing() -> None:
    shared = {"x": 1}
    assert dump_documents([{"b": shared, "a": shared}]) == "b:\n  x: 1\na:\n  x: 1\n"


def test_dump_escapes_what_would_be_an_expression() -> None:
    manifest = {
        "apiVersion": "areal.dev/v1alpha1",
        "kind": "Model",
        "metadata": {"name": "a"},
        "spec": {"backend": "embedded", "path": "m", "env": {"A": "${{ env.HOME }}", "B": "a ${{ b"}},
    }
    (found,) = rendered(dump_documents([manifest])).resources
    assert found.spec == manifest["spec"]
