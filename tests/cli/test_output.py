"""Tables, colours and the one way out for data."""

from __future__ import annotations

import io
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from areal.cli.invocation import fancy
from areal.cli.output.emit import to_yaml
from areal.cli.output.formats import FORMATS, Format, parse_format
from areal.cli.output.table import Column, field, render_table, text_of
from areal.errors import UsageFault
from areal.resources.render import RenderRequest, render

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Zl", "Zp")), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


COLUMNS = (field("NAME", "name"), field("COUNT", "count", right=True), field("WHY", "status", "why", wide=True))
ROWS = [{"name": "a", "count": 1, "status": {"why": "x y"}}, {"name": "long-name", "count": 1000}]


def test_table_is_aligned_and_ends_without_spaces() -> None:
    assert render_table(ROWS, COLUMNS).splitlines() == ["NAME       COUNT", "a              1", "long-name   1000"]


def test_wide_table_shows_more_and_absent_is_a_dash() -> None:
    assert render_table(ROWS, COLUMNS, wide=True).splitlines()[1:] == ["a              1  x y", "long-name   1000  -"]


def test_table_off_a_terminal_cuts_nothing() -> None:
    long = "x" * 500
    assert long in render_table([{"name": long}], (field("NAME", "name"),))


def test_table_on_a_terminal_cuts_the_last_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    lines = render_table(
        [{"name": "a", "text": "y" * 500}], (field("NAME", "name"), field("TEXT", "text"))
    ).splitlines()
    assert len(lines[1]) == 40
    assert lines[1].endswith("…")


def test_states_are_coloured_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = (Column("STATUS", lambda row: row["s"], state=True), Column("NAME", lambda row: row["s"]))
    assert "\x1b" not in render_table([{"s": "Ready"}], columns)
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[32mReady" in render_table([{"s": "Ready"}], columns)
    assert "\x1b[31mFailed" in render_table([{"s": "Failed"}], columns)


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colour_is_left_out_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert fancy(Terminal())
    monkeypatch.setenv(variable, value)
    assert not fancy(Terminal())
    assert not fancy(io.StringIO())


@given(VALUES)
def test_any_value_is_one_line_of_a_table(value: object) -> None:
    assert "\n" not in text_of(value)


@given(VALUES)
def test_yaml_is_read_back_the_same(value: object) -> None:
    assert yaml.safe_load(to_yaml([{"spec": value}])) == {"spec": value}


@pytest.mark.parametrize(
    "text", ["yes", "on", "1e-3", "0o17", "12:30:00", "null", "a: b", "- x", "#", "two\nlines", "'", "1_000", "0x1F"]
)
def test_yaml_text_that_looks_like_something_else_stays_text_for_our_loader(text: str) -> None:
    spec = {"backend": "embedded", "path": "./m", "env": {"A": text}}
    manifest = {"apiVersion": "areal.dev/v1alpha1", "kind": "Model", "metadata": {"name": "m"}, "spec": spec}
    rendered = render(RenderRequest(files=("-",), stdin=to_yaml([manifest])))
    assert rendered.resources[0].spec["env"] == {"A": text}


def test_yaml_repeats_instead_of_referring() -> None:
    shared = {"a": 1}
    assert "&" not in to_yaml([{"x": shared, "y": shared}])


@pytest.mark.parametrize("name", FORMATS)
def test_format_names(name: str) -> None:
    assert parse_format(name) == Format(name)


def test_format_jsonpath_is_checked_at_once() -> None:
    assert parse_format("jsonpath={.a}") == Format("jsonpath", "{.a}")
    with pytest.raises(UsageFault):
        parse_format("jsonpath={.a[}")


def test_format_of_another_verb_is_refused() -> None:
    assert parse_format("manifest", ("manifest",)) == Format("manifest")
    with pytest.raises(UsageFault, match="manifest"):
        parse_format("manifest")
