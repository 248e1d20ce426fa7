"""JSONPath templates: kubectl's reading of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import UsageFault
from areal.resources.jsonpath import compile_template, evaluate, first

DOCUMENT: dict[str, Any] = {
    "kind": "List",
    "items": [
        {"kind": "Model", "metadata": {"name": "a", "labels": {"x.y/z": "1"}}, "status": {"ready": 2, "ok": True}},
        {"kind": "Model", "metadata": {"name": "b"}, "status": {"ready": 0}},
        {"kind": "Service", "metadata": {"name": "c"}},
    ],
}
KEYS = st.from_regex(r"[a-z][a-z0-9_-]{0,4}", fullmatch=True)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{.kind}", "List"),
        (".kind", "List"),
        ("kind", "List"),
        ("{$.kind}", "List"),
        ("{.items[0].metadata.name}", "a"),
        ("{.items[-1].metadata.name}", "c"),
        ("{.items[0:2].metadata.name}", "a b"),
        ("{.items[1:].metadata.name}", "b c"),
        ("{.items[*].metadata.name}", "a b c"),
        ("{.items[*].status.ready}", "2 0"),
        ("{..name}", "a b c"),
        ("{.items[0].metadata.labels['x.y/z']}", "1"),
        ("{.items[0].metadata.labels.x\\.y/z}", "1"),
        ('{.items[?(@.kind=="Model")].metadata.name}', "a b"),
        ("{.items[?(@.kind!='Model')].metadata.name}", "c"),
        ("{.items[?(@.status.ready>0)].metadata.name}", "a"),
        ("{.items[?(@.status.ready<=0)].metadata.name}", "b"),
        ("{.items[?(@.status)].metadata.name}", "a b"),
        ("{.items[?(@.status.ok==true)].metadata.name}", "a"),
        ("{.none.of.this}", ""),
        ("{.items[9].kind}", ""),
        ("n={.kind}!", "n=List!"),
        ("{.kind}{'\\t'}{.kind}", "List\tList"),
        ("{range .items[*]}{.metadata.name},{end}", "a,b,c,"),
        ("{range items[*]}{.metadata.name},{end}", "a,b,c,"),
        ("{range .items[0:2]}{.metadata.name}:{range .metadata.labels.*}{@}{end};{end}", "a:1;b:;"),
        ("{.items[0].status}", '{"ready": 2, "ok": true}'),
        ("{.items[0].metadata.labels.*}", "1"),
    ],
)
def test_template_over_a_document(template: str, text: str) -> None:
    assert evaluate(template, DOCUMENT) == text


@pytest.mark.parametrize(
    "template",
    [
        "{.a",
        "{.a[}",
        "{.a[x]}",
        "{range .a}{.b}",
        "{end}",
        "{.a[?(b==1)]}",
        "{.a[?(@.b==x y)]}",
        "{.a b}",
        "{..}",
        "{.a]}",
    ],
)
def test_invalid_template_is_refused_at_compile_time(template: str) -> None:
    with pytest.raises(UsageFault, match="jsonpath"):
        compile_template(template)


def test_first_value_keeps_its_type() -> None:
    assert first("{.items[*].status.ready}", DOCUMENT) == 2
    assert first(".none", DOCUMENT) is None


@given(st.lists(KEYS, min_size=1, max_size=5), st.integers())
def test_name_path_reaches_leaf(path: list[str], value: int) -> None:
    document: Any = value
    for key in reversed(path):
        document = {key: document}
    assert evaluate("{." + ".".join(path) + "}", document) == str(value)
    assert evaluate("{" + "".join(f"['{key}']" for key in path) + "}", document) == str(value)


@given(st.dictionaries(KEYS, st.integers() | st.text(max_size=5)))
def test_whole_document_is_json(document: dict[str, Any]) -> None:
    assert json.loads(evaluate("{@}", document)) == document


@given(st.lists(st.integers(), max_size=8), st.integers(-9, 9), st.integers(-9, 9))
def test_slices_behave_like_python(items: list[int], start: int, end: int) -> None:
    assert evaluate(f"{{.x[{start}:{end}]}}", {"x": items}) == " ".join(map(str, items[start:end]))
