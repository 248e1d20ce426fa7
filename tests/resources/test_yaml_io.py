"""YAML read with its traps closed, at the right place; YAML written that every reader takes alike."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from areal.resources.nodes import MappingNode, Pos, Problems, ScalarNode, locate, plain
from areal.resources.yaml_io import MAX_DEPTH, dump_documents, load_documents, load_value

from .helpers import rendered


def _load(text: str) -> Any:
    problems = Problems()
    documents = [plain(node) for node in load_documents(text, "f", problems)]
    assert not problems, problems.diagnostics()
    return documents


def _faults(text: str) -> list[str]:
    problems = Problems()
    load_documents(text, "f", problems)
    return [str(fault) for fault in problems.diagnostics()]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("Off", "Off"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("1e-3", 1e-3),
        ("5e6", 5e6),
        (".5", 0.5),
        ("1.", 1.0),
        ("1:30", "1:30"),
        ("190:20:30", "190:20:30"),
        ("0o17", 15),
        ("017", 17),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("+12", 12),
        ("-0", 0),
        ("2001-12-14", "2001-12-14"),
        ("2001-12-14t21:59:43.10-05:00", "2001-12-14t21:59:43.10-05:00"),
        ("=", "="),
        ("0b101", "0b101"),
        ("1.2.3", "1.2.3"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("!!str 5", "5"),
        ("!!float 5", 5.0),
        ("|\n  a\n  b\n", "a\nb\n"),
        (">-\n  a\n  b\n", "a b"),
    ],
)
def test_scalar_follows_yaml_1_2(text: str, value: object) -> None:
    ((_, found),) = _load(f"a: {text}")[0].items()
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: .inf", "f:1:4: .inf is not a finite number; quote it if text is meant"),
        ("a: .NaN", "f:1:4: .NaN is not a finite number; quote it if text is meant"),
        ("a: 1e999", "f:1:4: 1e999 is too large for a number; quote it if text is meant"),
        ("a: 99999999999999999999", "f:1:4: 99999999999999999999 does not fit in 64 bits; quote it if text is meant"),
        ("a: " + "9" * 5000, "f:1:4: 99999999999999999999... does not fit in 64 bits; quote it if text is meant"),
        ("a: !!python/object:os.system x", "f:1:4: the tag !!python/object:os.system is not allowed: plain YAML only"),
        ("a: !env X", "f:1:4: the tag !env is not allowed: plain YAML only"),
        ("a: !!int x", 'f:1:4: "x" is not of type !!int'),
        ("a: !!set {x}", "f:1:4: the tag !!set is not allowed: plain YAML only"),
        ("a: 1\nb: 2\na: 3", 'f:3:1: duplicate key "a": first at line 1, column 1'),
        ("a: {b: 1, b: 2}", 'f:1:11: duplicate key "b": first at line 1, column 5'),
        ("a:\n\t- b", "f:2:1: a tab cannot indent YAML: use spaces"),
        ("\ta: 1", "f:1:1: a tab cannot indent YAML: use spaces"),
        ("a: *x", "f:1:4: unknown alias *x: no &x before it in this document"),
        ("a: &x\n  b: *x", "f:2:6: the alias *x is inside its own anchor"),
        ("? [a]\n: b", "f:1:3: a key must be a word, not a list or map"),
        ("a: &k x\n*k : 1", "f:2:1: a key must be a word, not an alias"),
        ("<<: 1", 'f:1:5: "<<" merges a map, or a list of maps'),
        ("a: b: c", "f:1:5: mapping values are not allowed in this context"),
        ("a: @x", "f:1:4: found character that cannot start any token"),
        ("a: \x07", "f:1:4: binary data: the character U+0007 is not allowed in YAML"),
        ("x: 1\nb: \x00", "f:2:4: binary data: the character U+0000 is not allowed in YAML"),
        ("'${{ x }}': 1", "f:1:1: an expression cannot be a key, only a value"),
    ],
)
def test_ambiguous_yaml_is_refused_at_its_position(text: str, message: str) -> None:
    assert _faults(text) == [message]


@pytest.mark.parametrize(
    ("text", "hint"), [("a: {{ .Values.x }}", "helm template"), ("a: { {b: c}: d}", "quote a value")]
)
def test_template_of_helm_is_recognised(text: str, hint: str) -> None:
    problems = Problems()
    load_documents(text, "f", problems)
    assert hint in str(next(iter(problems.found)).hint)


def test_unclosed_bracket_error_gives_start_line() -> None:
    (fault,) = _faults("a:\n  b: [1, 2\nc: 3\n")
    assert fault.startswith("f:3:") and "begins at line 2" in fault


def test_independent_faults_are_all_reported() -> None:
    assert len(_faults("a: 1\na: 2\nb: .inf\nc: !x y\nd: *nope\n")) == 4


def test_documents_before_a_syntax_error_are_read() -> None:
    problems = Problems()
    documents = load_documents("a: 1\n---\nb: [\n", "f", problems)
    assert [plain(node) for node in documents] == [{"a": 1}]
    assert len(problems.found) == 1


def test_empty_documents_are_skipped() -> None:
    assert _load("---\n---\na: 1\n---\n# only a comment\n...\n") == [{"a": 1}]
    assert _load("") == []


def test_json_is_read() -> None:
    assert _load('{\n\t"a": [1, 2.5, true, null, "x\\u00e9"],\n\t"b": {}\n}') == [
        {"a": [1, 2.5, True, None, "xé"], "b": {}}
    ]


@pytest.mark.parametrize("value", ["😀", "a\\😀", "\\ud83d\\ude00", "é😀😀"])
def test_json_escapes_of_characters_beyond_16_bits_are_read(value: str) -> None:
    assert _load(json.dumps({"a": value})) == [{"a": value}]


def test_alias_and_merge_key_share_without_copying() -> None:
    (found,) = load_documents("base: &b {x: 1, y: 2}\nuse:\n  <<: *b\n  y: 3\nagain: *b\n", "f", Problems())
    assert plain(found) == {"base": {"x": 1, "y": 2}, "use": {"x": 1, "y": 3}, "again": {"x": 1, "y": 2}}
    assert isinstance(found, MappingNode) and found.entries["again"] is found.entries["base"]


def test_alias_bomb_is_refused_without_growing() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    (fault,) = _faults("\n".join(lines))
    assert "alias bomb" in fault and fault.startswith("f:")


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 5_000, "\n".join(" " * i + "a:" for i in range(3_000))])
def test_deep_nesting_is_refused_without_recursion(text: str) -> None:
    assert any(f"nested more than {MAX_DEPTH} deep" in fault for fault in _faults(text))


def test_positions_are_kept_in_tree() -> None:
    (node,) = load_documents("spec:\n  models:\n  - name: a\n  - name: qwen\n    replicas: 2\n", "f", Problems())
    assert str(locate(node, ("spec", "models", "[qwen]", "replicas"))) == "f:5:15"
    assert str(locate(node, ("spec", "models", 1, "replicas"), at_key=True)) == "f:5:5"
    assert str(locate(node, ("spec", "models", "[qwen]", "absent"))) == "f:4:5"
    assert str(locate(node, ("spec", "models"))) == "f:2:3"


@pytest.mark.parametrize(
    ("text", "col"), [("a: xyz", 4), ("a: 'xyz'", 5), ('a: "xyz"', 5), ('a: "x\\tz"', 0), ("a: |\n  x", 0)]
)
def test_text_column_is_known_only_for_verbatim_text(text: str, col: int) -> None:
    (node,) = load_documents(text, "f", Problems())
    assert isinstance(node, MappingNode)
    scalar = node.entries["a"]
    assert isinstance(scalar, ScalarNode) and scalar.text_col == col


def test_command_line_value_has_position_in_flag() -> None:
    node = load_value("[1, {a: x}]", Pos("--set", 2, 10), Problems())
    assert node is not None and plain(node) == [1, {"a": "x"}]
    assert str(locate(node, (1, "a"))) == "--set:2:18"


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(min_size=1), inner, max_size=4),
    max_leaves=12,
)


@given(_JSON)
def test_pyyaml_output_is_read_or_refused_with_position(value: Any) -> None:
    problems = Problems()
    load_documents(yaml.safe_dump({"a": value}), "f", problems)
    assert all(fault.pos.line >= 1 and fault.pos.col >= 1 for fault in problems.diagnostics())


@given(st.text(max_size=200) | st.text("ab:-{}[],&*!|>'\"#%@ \n\t?<0", max_size=60))
def test_any_text_gives_documents_or_positioned_faults(text: str) -> None:
    problems = Problems()
    load_documents(text, "f", problems)
    lines = text.count("\n") + 2 + text.count("\r") + text.count("\x85") + text.count("\u2028") + text.count("\u2029")
    assert all(1 <= fault.pos.line <= lines for fault in problems.diagnostics())


_TRAPS = ["1e-3", "1:30", "yes", "off", "0o17", "017", "~", ".inf", "1_000", "a: b", "# c", "${x}", "x\ny\n", "  x\n"]
_CHARACTERS = st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="\0")
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
def test_dump_round_trips(documents: list[dict[str, Any]]) -> None:
    problems = Problems()
    text = dump_documents(documents, manifests=True)
    found = [plain(node) for node in load_documents(text, "f", problems)]
    assert not problems, (text, problems.diagnostics())
    assert _same(found, documents)


@given(_VALUES)
def test_dump_reads_equal_under_yaml_1_1(value: Any) -> None:
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
def test_dump_is_human_readable(value: Any, text: str) -> None:
    assert dump_documents([{"a": value}]) == text


def test_dump_keeps_order_and_repeats_values() -> None:
    shared = {"x": 1}
    assert dump_documents([{"b": shared, "a": shared}]) == "b:\n  x: 1\na:\n  x: 1\n"


def test_dump_escapes_expression_syntax() -> None:
    manifest = {
        "apiVersion": "areal.dev/v1alpha1",
        "kind": "Model",
        "metadata": {"name": "a"},
        "spec": {"backend": "embedded", "path": "m", "env": {"A": "${{ env.HOME }}", "B": "a ${{ b"}},
    }
    (found,) = rendered(dump_documents([manifest], manifests=True)).resources
    assert found.spec == manifest["spec"]


def test_leading_byte_order_mark_is_stripped_per_document() -> None:
    """As where files that each begin with one are joined."""
    problems = Problems()

    documents = load_documents("\ufeffa: 1\n---\n\ufeffb: 2\n\ufeff---\nc: |\n  \ufeffkept\n", "f", problems)

    assert not problems and [plain(each) for each in documents] == [{"a": 1}, {"b": 2}, {"c": "\ufeffkept\n"}]
