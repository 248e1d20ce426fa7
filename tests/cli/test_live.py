"""The live view as a state machine, and the keys of a terminal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.cli.live import (
    HELP,
    Live,
    LivePage,
    LiveRow,
    LiveTarget,
    Pane,
    cut,
    failed,
    paged,
    press,
    refreshed,
    resized,
    screen,
    shown_rows,
)
from areal.cli.live_terminal import keys_of, pane_of
from areal.cli.output import Column, Table, cell_width, field, orderable
from areal.terminal import ESCAPE, spelled, style

COLUMNS = (field("NAME", "name"), field("COUNT", "count", right=True), field("STATUS", "status", state=True))


def row(name: str, count: int = 0, status: str = "Ready") -> LiveRow:
    cells = (name, str(count), status)
    return LiveRow(name, cells, (orderable(name), orderable(count), orderable(status)), LiveTarget(f"model/{name}"))


def pane(*rows: LiveRow, title: str = "Objects", at: float = 0.0) -> Pane:
    return Pane(title, COLUMNS, rows, at=at)


def live(*rows: LiveRow, width: int = 60, height: int = 10) -> Live:
    return refreshed(Live((Pane("Objects"), Pane("Processes")), width, height), 0, pane(*rows))


def typed(state: Live, *keys: str) -> Live:
    for key in keys:
        state = press(state, key)
    return state


def drawn(state: Live, now: float = 0.0) -> list[str]:
    return screen(state, now, colour=False)


def selected(state: Live) -> list[str]:
    return [line[2:].split()[0] for line in drawn(state) if line.startswith("> ")]


def test_screen_of_a_table_has_titles_rows_and_keys() -> None:
    assert drawn(live(row("a", 2), row("bb", 10, "Failed"), height=6)) == [
        "[Objects 2] Processes",
        "  NAME  COUNT  STATUS",
        "> a         2  Ready",
        "  bb       10  Failed",
        "",
        "enter describe  l logs  / filter  s sort  ? help  q quit",
    ]


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        (["j"], "b"),
        (["down", "down"], "c"),
        (["j", "k"], "a"),
        (["k"], "a"),
        (["G"], "c"),
        (["end", "j"], "c"),
        (["G", "g"], "a"),
        ([" "], "c"),
        (["G", "b"], "a"),
    ],
)
def test_keys_select_expected_row(keys: list[str], name: str) -> None:
    assert selected(typed(live(row("a"), row("b"), row("c")), *keys)) == [name]


def test_selection_follows_row_when_rows_are_inserted() -> None:
    state = typed(live(row("b"), row("c")), "j")
    assert selected(refreshed(state, 0, pane(row("a"), row("b"), row("c")))) == ["c"]


def test_selection_of_removed_row_moves_with_notice() -> None:
    state = refreshed(typed(live(row("a"), row("b"), row("c")), "j"), 0, pane(row("a"), row("c")))
    assert selected(state) == ["c"] and drawn(state)[-1] == "b is gone"
    gone = refreshed(state, 0, pane())
    assert selected(gone) == [] and "nothing yet" in "\n".join(drawn(gone))
    assert press(gone, "enter").message == "nothing is selected"


def test_filter_matches_all_words_until_escape() -> None:
    state = typed(live(row("qwen", 1), row("llama", 1), row("qwen-b", 2, "Failed")), "/", *"QWEN fai")
    assert [each.name for each in shown_rows(state.pane)] == ["qwen-b"]
    assert drawn(state)[-1] == "/QWEN fai_" and "1/3" in drawn(state)[0]
    kept = typed(state, "enter", "j")
    assert not kept.is_typing and "/QWEN fai" in drawn(kept)[0]
    assert len(shown_rows(press(kept, "esc").pane)) == 3
    assert typed(live(row("a")), "/", "q", "backspace", "x", "ctrl-u").pane.filter == ""
    assert "no row has these words" in "\n".join(drawn(typed(live(row("a")), "/", *"zz")))


def test_numeric_column_sorts_by_number() -> None:
    state = typed(live(row("a", 10), row("b", 9), row("c", 100)), "s", "s")
    assert [each.name for each in shown_rows(state.pane)] == ["b", "a", "c"] and "sort COUNT" in drawn(state)[0]
    assert [each.name for each in shown_rows(press(state, "S").pane)] == ["c", "a", "b"]
    assert typed(state, "s", "s").pane.sort == -1


def test_time_columns_sort_by_time() -> None:
    column = Column("UPTIME", lambda row: row["text"], order=lambda row: row["seconds"])
    rows = [
        {"kind": "M", "metadata": {"name": "a"}, "text": "10s", "seconds": 10},
        {"kind": "M", "metadata": {"name": "b"}, "text": "9m", "seconds": 540},
        {"kind": "M", "metadata": {"name": "c"}, "text": "1h", "seconds": 3600},
    ]
    table = Table(rows, [field("NAME", "metadata", "name"), column], lambda row: row["metadata"]["name"])
    state = refreshed(Live((Pane("Objects"),)), 0, pane_of(table, "Objects", wide=False))
    assert [each.name for each in shown_rows(typed(state, "s", "s").pane)] == ["a", "b", "c"]
    assert [row["text"] for row in table.sorted("uptime")] == ["10s", "9m", "1h"]


def test_arrows_scroll_wide_table() -> None:
    state = live(row("n" * 30, 123, "Ready"), width=26, height=5)
    assert not any("Ready" in line for line in drawn(state))
    assert any("Ready" in line for line in drawn(typed(state, "right")))
    assert drawn(typed(state, "right", "left")) == drawn(state)


def test_description_opens_scrolls_and_closes() -> None:
    state = typed(live(row("a"), row("b"), height=6), "j", "enter")
    assert state.page == LivePage("describe", LiveTarget("model/b")) and "reading" in drawn(state)[0]
    read = paged(state, LivePage("describe", LiveTarget("model/b"), tuple(f"line {n}" for n in range(9)), at=0.0))
    assert drawn(read)[:2] == ["describe model/b  4/9", "line 0"]
    assert drawn(typed(read, "j", "down"))[1] == "line 2" and drawn(typed(read, "G"))[4] == "line 8"
    assert drawn(typed(read, " ", " ", " "))[1] == "line 5" and drawn(typed(read, "G", "g"))[1] == "line 0"
    found = typed(read, "/", "7", "enter")
    assert drawn(found)[1:3] == ["line 7", ""]
    assert press(found, "esc").page is not None and typed(found, "esc", "esc").page is None
    assert selected(typed(found, "esc", "esc")) == ["b"]


def test_lines_of_closed_page_change_nothing() -> None:
    state = press(live(row("a")), "enter")
    assert paged(press(state, "esc"), LivePage("describe", LiveTarget("model/a"), ("x",))).page is None
    assert paged(press(state, "l"), LivePage("describe", LiveTarget("model/a"), ("x",))).page == press(state, "l").page


def test_logs_follow_until_scrolled_and_again_at_end() -> None:
    target = LiveTarget("model/a")
    state = paged(press(live(row("a"), height=5), "l"), LivePage("logs", target, tuple("abcdef"), at=0.0))
    assert drawn(state)[0].endswith("following") and drawn(state)[1:4] == ["d", "e", "f"]
    up = press(state, "k")
    assert drawn(paged(up, LivePage("logs", target, tuple("abcdefgh"), at=0.0)))[1:4] == ["c", "d", "e"]
    dropped = paged(up, LivePage("logs", target, tuple("cdefghij"), dropped=2, at=0.0))
    assert drawn(dropped)[1:4] == ["c", "d", "e"], "lines that are dropped do not move what is read"
    assert drawn(press(dropped, "G"))[1:4] == ["h", "i", "j"]


def test_failed_read_keeps_last_content_with_reason() -> None:
    state = failed(live(row("a")), 0, "http://gateway: timed out")
    assert drawn(state)[-1] == "cannot be read: http://gateway: timed out" and selected(state) == ["a"]
    assert "cannot" not in drawn(refreshed(state, 0, pane(row("a"))))[-1]
    assert "read 9s ago" in drawn(live(row("a")), now=9.0)[0]
    page = press(state, "enter")
    assert page.page is not None and "gone" in drawn(failed(page, page.page, "gone"))[-1]


def test_help_lists_keys_and_escape_closes_it() -> None:
    state = resized(press(live(row("a")), "?"), 80, 30)
    assert drawn(state)[0] == "Keys" and set(HELP) <= set(drawn(state))
    assert press(state, "esc").page is None and press(state, "q").has_ended


def test_colours_mark_states_and_the_selected_row() -> None:
    lines = screen(live(row("a"), row("b", 0, "Failed")), 0.0, colour=True)
    assert lines[2].startswith(f"{ESCAPE}[7m") and f"{ESCAPE}[31mFailed" in lines[3]
    assert not any(ESCAPE in line for line in drawn(live(row("a"))))


def test_unfitting_column_is_hidden_until_scrolled_to() -> None:
    state = live(row("n" * 40, 1, "s" * 20), width=60)
    assert "right: more columns" in drawn(state)[0] and drawn(state)[1].split() == ["NAME", "COUNT"]
    moved = typed(state, "right")
    assert "right: more columns" not in drawn(moved)[0] and drawn(moved)[1].split() == ["NAME", "STATUS"]


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "ab…"),
        ("日本語", 5, "日本…"),
        ("日本語", 4, "日…"),
        ("ab", 1, "…"),
        ("ab", 0, ""),
    ],
)
def test_cut_text_has_the_width_of_the_terminal(text: str, width: int, expected: str) -> None:
    assert cut(text, width) == expected


def test_cut_of_a_coloured_text_ends_its_colour() -> None:
    assert cut(style("abcdef", fg="red"), 4) == f"{ESCAPE}[31mabc{ESCAPE}[0m…"
    assert cut(style("abc", fg="red"), 3) == style("abc", fg="red")


def test_combining_marks_have_no_width() -> None:
    assert cell_width("e\u0301") == 1 and cell_width("\u2764\ufe0f") == 1 and cell_width("\u0e19\u0e33\u0e49") == 2


KEYS = st.sampled_from(
    [
        *"jkgGdlqsS/?b x",
        "enter",
        "esc",
        "up",
        "down",
        "left",
        "right",
        "tab",
        "backspace",
        "pageup",
        "pagedown",
        "é",
        "日",
    ]
)
TEXTS = st.text(st.characters(), max_size=12)


@st.composite
def happenings(draw: st.DrawFn) -> tuple[str, Any]:
    kind = draw(st.sampled_from(["key", "key", "key", "rows", "lines", "size", "error"]))
    if kind == "key":
        return kind, draw(KEYS)
    if kind == "rows":
        names = draw(st.lists(TEXTS, max_size=6, unique=True))
        return kind, (draw(st.integers(0, 1)), [(name, draw(st.integers(0, 99)), draw(TEXTS)) for name in names])
    if kind == "size":
        return kind, (draw(st.integers(0, 60)), draw(st.integers(0, 14)))
    return kind, draw(st.lists(TEXTS, max_size=20)) if kind == "lines" else draw(TEXTS)


@given(st.lists(happenings(), max_size=25), st.booleans())
def test_screen_fits_terminal_after_any_events(events: list[tuple[str, Any]], colour: bool) -> None:
    state = Live((Pane("Objects"), Pane("Processes")))
    for kind, value in events:
        before = state
        if kind == "key":
            state = press(state, str(value))
        elif kind == "rows":
            place, rows = value
            columns = [field("NAME", "name"), field("COUNT", "count", right=True), field("STATUS", "text", state=True)]
            table = Table(
                [
                    {"kind": "m", "metadata": {"name": name}, "name": name, "count": n, "text": text}
                    for name, n, text in rows
                ],
                columns,
                lambda row: str(row["name"]),
            )
            state = refreshed(state, place, pane_of(table, "Objects", wide=False))
        elif kind == "lines" and state.page is not None:
            lines = tuple(spelled(line).replace("\n", " ").expandtabs() for line in value)
            state = paged(state, LivePage(state.page.kind, state.page.target, lines, at=0.0))
        elif kind == "size":
            state = resized(state, *value)
        elif kind == "error":
            state = failed(state, 0, spelled(str(value)))
        lines_now = screen(state, 0.0, colour=colour)
        assert len(lines_now) == state.height
        for line in lines_now:
            bare = spelled(line, "\x1b")
            assert "\n" not in line and ("\x1b" in bare) <= colour
            plain = screen(state, 0.0, colour=False)
        assert all(cell_width(line) <= state.width for line in plain)
        rows_now = shown_rows(state.pane)
        if state.page is None and rows_now and state.width > 4:
            assert sum(line.startswith("> ") for line in plain) == 1, "the selected row is on the screen"
        assert state.has_ended <= (before.has_ended or (kind, value) == ("key", "q"))


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("jk", ["j", "k"]),
        ("\x1b[A\x1bOB\x1b[C\x1b[D", ["up", "down", "right", "left"]),
        ("\x1b[5~\x1b[6~\x1b[1~\x1b[F", ["pageup", "pagedown", "home", "end"]),
        ("\x1b[1;5A\x1b[<0;3;4M\x1b[200~x", ["up", "x"]),
        ("\x1bj", ["esc", "j"]),
        ("\r\n\t\x7f\x0c\x00", ["enter", "enter", "tab", "backspace", "ctrl-l"]),
        ("é日", ["é", "日"]),
    ],
)
def test_terminal_input_is_parsed_into_keys(text: str, keys: list[str]) -> None:
    assert keys_of(text, is_whole=False) == (keys, "")


def test_escape_is_a_key_once_input_ends() -> None:
    assert keys_of("j\x1b", is_whole=False) == (["j"], "\x1b")
    assert keys_of("\x1b", is_whole=True) == (["esc"], "")
    assert keys_of("\x1b[1;", is_whole=False) == ([], "\x1b[1;")


@given(st.text(st.sampled_from("\x1b[O~A15;jq<\r"), max_size=30), st.integers(0, 30))
def test_split_keys_equal_whole_keys(text: str, at: int) -> None:
    first, rest = keys_of(text[:at], is_whole=False)
    second, left = keys_of(rest + text[at:], is_whole=False)
    assert (first + second, left) == keys_of(text, is_whole=False)
    assert keys_of(text, is_whole=True)[1] == ""
