"""Tables, their units, colours and data; durations of flags."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from areal.cli.options import FORMATS, Format, parse_format, parse_seconds
from areal.cli.output import Column, camel, cell_width, field, folded, render_table, text_of, to_yaml
from areal.errors import UsageFault
from areal.numbers import age, iso, quantity_bytes, size
from areal.resources.render import RenderRequest, render
from areal.terminal import fancy, spelled

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


def test_table_is_aligned_without_trailing_spaces() -> None:
    assert render_table(ROWS, COLUMNS).splitlines() == ["NAME       COUNT", "a              1", "long-name   1000"]


def test_wide_table_shows_more_and_dash_for_missing() -> None:
    assert render_table(ROWS, COLUMNS, wide=True).splitlines()[1:] == ["a              1  x y", "long-name   1000  -"]


def test_table_without_terminal_is_not_cut() -> None:
    long = "x" * 500
    assert long in render_table([{"name": long}], (field("NAME", "name"),))


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_width(columns: int) -> None:
        monkeypatch.setattr(sys, "stdout", Terminal())
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("NO_COLOR", "1")

    return set_width


def test_last_column_wraps_below_itself(narrow: Callable[[int], None]) -> None:
    narrow(40)
    rows = [{"name": "a", "text": "it could not be reached because nothing is there"}]
    table = render_table(rows, (field("NAME", "name"), field("TEXT", "text")))
    assert table.splitlines() == [
        "NAME  TEXT",
        "a     it could not be reached because",
        "      nothing is there",
    ]


def test_unfitting_columns_follow_with_their_titles(narrow: Callable[[int], None]) -> None:
    narrow(40)
    columns = (field("NAME", "n"), field("STATUS", "s"), field("ADDRESS", "a"), field("AGE", "g", right=True))
    rows = [
        {"n": "inferenceservice/default", "s": "Ready", "a": "http://127.0.0.1:8080", "g": "3m20s"},
        {"n": "model/qwen-of-a-long-name", "s": "Unknown", "g": "12d"},
    ]
    assert render_table(rows, columns).splitlines() == [
        "NAME                       STATUS",
        "inferenceservice/default   Ready",
        "    ADDRESS http://127.0.0.1:8080",
        "    AGE 3m20s",
        "model/qwen-of-a-long-name  Unknown",
        "    AGE 12d",
    ]


WORDS = st.text(st.sampled_from("abcdefgh /.-0漢é"), max_size=70)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example([["a" * 70, "", "x", "y" * 50]], 40, True)
@example([["model/" + "b" * 63, "Ready", "http://127.0.0.1:8080", "c d " * 15]], 60, False)
@given(st.lists(st.lists(WORDS, min_size=4, max_size=4), max_size=4), st.integers(20, 130), st.booleans())
def test_table_fits_terminal_without_losing_text(
    narrow: Callable[[int], None], rows: list[list[str]], columns: int, right: bool
) -> None:
    narrow(columns)
    titles = [field(f"T{i}", str(i), right=right and i == 3) for i in range(4)]
    dicts = [{str(i): text for i, text in enumerate(row)} for row in rows]
    table = render_table(dicts, titles)
    assert all(cell_width(line) <= columns for line in table.splitlines())
    compact = "".join(table.split())
    assert all("".join(text_of(text).split()) in compact for row in rows for text in row if text_of(text) != "-")


def test_page_wraps_with_deeper_indent(narrow: Callable[[int], None]) -> None:
    narrow(30)
    page = "Head\n  spec.path: 'one' -> '/a/folder/that/is/quite/long'"
    assert folded(page) == ("Head\n  spec.path: 'one' ->\n      '/a/folder/that/is/quite\n      /long'")
    assert max(map(len, folded(page).splitlines())) <= 30
    assert folded("! drift Model/of-a-longish-name x") == "! drift\n    Model/of-a-longish-name x"


def test_states_are_coloured_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = (Column("STATUS", lambda row: row["s"], state=True), Column("NAME", lambda row: row["s"]))
    assert "\x1b" not in render_table([{"s": "Ready"}], columns)
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[32mReady" in spelled(render_table([{"s": "Ready"}], columns), "\x1b")
    assert "\x1b[31mFailed" in spelled(render_table([{"s": "Failed"}], columns), "\x1b")


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colour_can_be_disabled(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert fancy(Terminal())
    monkeypatch.setenv(variable, value)
    assert not fancy(Terminal())
    assert not fancy(io.StringIO())


@given(VALUES)
def test_any_value_fits_one_table_line(value: object) -> None:
    assert "\n" not in text_of(value)


@given(VALUES)
def test_yaml_reads_back_unchanged(value: object) -> None:
    assert yaml.safe_load(to_yaml([{"spec": value}])) == {"spec": value}


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "on",
        "1e-3",
        "0o17",
        "12:30:00",
        "null",
        "a: b",
        "- x",
        "#",
        "two\nlines",
        "'",
        "1_000",
        "0x1F",
        "${{ x }}",
    ],
)
def test_ambiguous_yaml_text_stays_text(text: str) -> None:
    spec = {"backend": "embedded", "path": "./m", "env": {"A": text}}
    manifest = {"apiVersion": "areal.dev/v1alpha1", "kind": "Model", "metadata": {"name": "m"}, "spec": spec}
    rendered = render(RenderRequest(files=("-",), stdin=to_yaml([manifest], manifests=True)))
    assert rendered.resources[0].spec["env"] == {"A": text}


def test_yaml_repeats_values_instead_of_anchors() -> None:
    shared = {"a": 1}
    assert "&" not in to_yaml([{"x": shared, "y": shared}])


@pytest.mark.parametrize("name", FORMATS)
def test_format_name_is_parsed(name: str) -> None:
    assert parse_format(name) == Format(name)


def test_jsonpath_format_is_validated_early() -> None:
    assert parse_format("jsonpath={.a}") == Format("jsonpath", "{.a}")
    for missing in ("jsonpath=", "jsonpath"):
        with pytest.raises(UsageFault, match="jsonpath=EXPR"):
            parse_format(missing)
    with pytest.raises(UsageFault):
        parse_format("jsonpath={.a[}")


def test_unsupported_format_of_verb_is_refused() -> None:
    assert parse_format("manifest", ("manifest",)) == Format("manifest")
    with pytest.raises(UsageFault, match="manifest"):
        parse_format("manifest")


# -- units


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (-1, "0s"),
        (0, "0s"),
        (119.9, "119s"),
        (120, "2m"),
        (200, "3m20s"),
        (900, "15m"),
        (3600, "1h"),
        (18720, "5h12m"),
        (86400, "1d"),
        (273600, "3d4h"),
        (121, "2m1s"),
        (3599, "59m"),
        (3601, "1h"),
        (35999, "9h59m"),
        (36720, "10h"),
        (86399, "23h"),
        (90000, "1d1h"),
        (864000 + 18000, "10d"),
        (86400 * 400, "400d"),
    ],
)
def test_age_has_at_most_two_units(seconds: float | None, text: str) -> None:
    assert age(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0B"), (1023, "1023B"), (1536, "1.5KiB"), (12 << 30, "12GiB"), (1 << 50, "1024TiB")],
)
def test_size_uses_powers_of_1024(count: int | None, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("quantity", "count"), [("64Gi", 64 * 2**30), ("500M", 500_000_000), ("1.5k", 1500), ("1.5M", 1.5e6), ("12", 12)]
)
def test_quantity_of_manifest_is_bytes(quantity: str, count: float) -> None:
    assert quantity_bytes(quantity) == count


@pytest.mark.parametrize("text", ["", "Gi", "1.", "1.2.3", "-1", "64 Gi", "64gi"])
def test_quantity_of_other_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        quantity_bytes(text)


def test_answer_keys_are_camel_case_and_data_is_kept() -> None:
    answer = {
        "session_id": "a",
        "rows": [{"input_ids": [1], "failures": {"agent_error": 2}}],
        "messages": [{"tool_calls": []}],
    }

    assert camel(answer) == {
        "sessionId": "a",
        "rows": [{"inputIds": [1], "failures": {"agent_error": 2}}],
        "messages": [{"tool_calls": []}],
    }


def test_iso_is_utc() -> None:
    assert iso(1.0) == "1970-01-01T00:00:01Z"
    assert iso(None) is None and iso(0.0) is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("1d", 86400), ("500ms", 0.5), (30, 30)]
)
def test_duration_with_a_unit_is_seconds(text: object, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1", "1w", "nan", "inf", "1m30s", "ten"])
def test_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_seconds(text)


@given(st.floats(min_value=0, max_value=1e9, allow_nan=False))
def test_any_plain_number_is_seconds(number: float) -> None:
    assert parse_seconds(f"{number:.6f}s") == pytest.approx(number, abs=1e-6)


@given(st.integers(0, 10**9))
def test_age_accepts_any_number(seconds: int) -> None:
    assert age(seconds)[:-1].replace("m", "").replace("h", "").replace("d", "").isdigit()
