"""The live view of ``areal get -w`` and ``areal top -w`` as a pure state machine: its inputs are keys, rows and sizes,
its output is a screen.

A ``Live`` has panes (tables, one of which is shown) and at most one page over them: a description, logs or the help.
Texts in rows and pages have no control characters (``areal.terminal``); the only marks in them are colours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from areal.cli.output import Column, cell_width, longest, paint_state
from areal.dataclasses import dataclass, replace
from areal.numbers import age
from areal.terminal import ESCAPE, style

HINTS = "enter describe  l logs  / filter  s sort  ? help  q quit"
_PAGE_HINTS = "esc back  / filter  d describe  l logs  ? help  q quit"
HELP = tuple(
    line.rstrip()
    for line in """\
j, k, arrows     move; left and right show more columns
space, b         a screen down, up; also the page keys
g, G             to the first, to the last
enter, d         describe what is selected
l                its logs, which follow; G follows again
/                filter: lines with all words; enter keeps it
s, S             sort by the next column; reverse
tab              the next table: objects, processes
esc              back; without a page, drop the filter
q                leave; Ctrl-Z suspends, fg resumes""".splitlines()
)
_STALE_S = 3.0
_LEAST_FIRST = 8  # columns of the first cell
_SHIFT = 8  # characters of a page at a time
_MARK = re.compile(re.escape(ESCAPE) + r"\[[0-9;]*m")


class LiveTarget(NamedTuple):
    """The subject of a row: an object, or one of its processes."""

    ref: str
    component: str | None = None
    replica: int | None = None


class LiveRow(NamedTuple):
    """A row of a table. ``order``: the values by which each column is sorted."""

    name: str
    cells: tuple[str, ...]
    order: tuple[Any, ...]
    target: LiveTarget


@dataclass(frozen=True)
class Pane:
    """A table. ``selected``: the name of the selected row; ``index``: its last position. ``sort``: a column, or -1 for
    the order as read. ``at``: the time of the last read, None before the first. ``left``: the number of columns after
    the first that are scrolled out."""

    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[LiveRow, ...] = ()
    note: str = ""
    selected: str = ""
    index: int = 0
    sort: int = -1
    is_reversed: bool = False
    filter: str = ""
    left: int = 0
    at: float | None = None
    error: str = ""


@dataclass(frozen=True)
class LivePage:
    """A page. ``kind``: describe, logs or help. ``dropped``: the number of lines that were removed before ``lines``.
    ``follow``: the last lines are shown, also when new ones arrive."""

    kind: str
    target: LiveTarget
    lines: tuple[str, ...] = ()
    dropped: int = 0
    top: int = 0
    left: int = 0
    follow: bool = False
    filter: str = ""
    at: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Live:
    panes: tuple[Pane, ...]
    width: int = 80
    height: int = 24
    active: int = 0
    page: LivePage | None = None
    is_typing: bool = False  # the filter
    has_ended: bool = False
    message: str = ""

    @property
    def pane(self) -> Pane:
        return self.panes[self.active]

    @property
    def body(self) -> int:
        """The number of lines for rows, or for a page."""
        around = 2 if self.page is not None else 3  # lines of titles and keys; a low terminal has fewer
        return max(1, self.height - around, self.height - self.height // 2)


def matches(text: str, wanted: str) -> bool:
    """Return whether ``text`` contains all words of ``wanted``, ignoring case."""
    folded = text.casefold()
    return all(word in folded for word in wanted.casefold().split())


def shown_rows(pane: Pane) -> list[LiveRow]:
    rows = [row for row in pane.rows if matches(" ".join(row.cells), pane.filter)] if pane.filter else list(pane.rows)
    if 0 <= pane.sort < len(pane.columns):
        rows.sort(key=lambda row: row.order[pane.sort])
    return rows[::-1] if pane.is_reversed else rows


def place_of(pane: Pane, rows: Sequence[LiveRow]) -> int:
    """Return the position of the selected row; if it no longer exists, the row that is now at its position."""
    found = next((place for place, row in enumerate(rows) if row.name == pane.selected), pane.index)
    return max(0, min(found, len(rows) - 1))


def shown_lines(page: LivePage) -> list[str]:
    return [line for line in page.lines if matches(_MARK.sub("", line), page.filter)] if page.filter else [*page.lines]


def refreshed(live: Live, index: int, read: Pane) -> Live:
    """Return the state with new data ``read`` of a table. The user's position stays."""
    pane = live.panes[index]
    names = {row.name for row in read.rows}
    message = live.message
    if pane.selected and pane.selected not in names and any(row.name == pane.selected for row in pane.rows):
        message = f"{pane.selected} is gone"
    now = replace(pane, columns=read.columns, rows=read.rows, note=read.note, at=read.at, error="")
    return replace(_with_pane(live, _selected(now, place_of(pane, shown_rows(now))), index), message=message)


def paged(live: Live, read: LivePage) -> Live:
    """Return the state with new lines ``read`` of the open page. Lines of another page are dropped."""
    page = live.page
    if page is None or (page.kind, page.target) != (read.kind, read.target):
        return live
    gone = page.lines[: max(0, read.dropped - page.dropped)]
    top = page.top - len(shown_lines(replace(page, lines=gone)))
    now = replace(page, lines=read.lines, dropped=read.dropped, at=read.at, error="", top=top)
    return _scrolled(replace(live, page=now), top, follow=page.follow)


def failed(live: Live, target: int | LivePage, error: str) -> Live:
    """Return the state after a failed read. The previous data stays on the screen."""
    if isinstance(target, int):
        return _with_pane(live, replace(live.panes[target], error=error), target)
    page = live.page
    if page is None or (page.kind, page.target) != (target.kind, target.target):
        return live
    return replace(live, page=replace(page, error=error))


def resized(live: Live, width: int, height: int) -> Live:
    live = replace(live, width=max(1, width), height=max(1, height))
    return _scrolled(live, live.page.top, follow=live.page.follow) if live.page is not None else live


def _with_pane(live: Live, pane: Pane, index: int) -> Live:
    return replace(live, panes=(*live.panes[:index], pane, *live.panes[index + 1 :]))


def _selected(pane: Pane, place: int) -> Pane:
    rows = shown_rows(pane)
    place = max(0, min(place, len(rows) - 1))
    return replace(pane, selected=rows[place].name if rows else pane.selected, index=place)


def _scrolled(live: Live, top: int, *, follow: bool = False) -> Live:
    assert live.page is not None
    end = max(0, len(shown_lines(live.page)) - live.body)
    return replace(live, page=replace(live.page, top=end if follow else max(0, min(top, end)), follow=follow))


_MOVES = {"j": 1, "down": 1, "k": -1, "up": -1}
_SCREENS = {" ": 1, "pagedown": 1, "b": -1, "pageup": -1}
_ENDS = {"g": 0, "home": 0, "G": 1, "end": 1}


def press(live: Live, key: str) -> Live:
    """Return the state after a key. ``key``: a character, or the name of a key. Unknown keys change nothing."""
    live = replace(live, message="")
    if live.is_typing and key not in ("up", "down"):
        return _typed(live, key)
    live = replace(live, is_typing=False)
    if key == "q":
        return replace(live, has_ended=True)
    if key == "/" and (live.page is None or live.page.kind != "help"):
        return replace(live, is_typing=True)
    if key == "?":
        return _opened(live, "help")
    return _press_page(live, key) if live.page is not None else _press_table(live, key)


def _typed(live: Live, key: str) -> Live:
    wanted = live.page.filter if live.page is not None else live.pane.filter
    if key == "enter":
        return replace(live, is_typing=False)
    if key == "esc":
        return _filtered(replace(live, is_typing=False), "")
    if key == "backspace":
        return _filtered(live, wanted[:-1])
    if key == "ctrl-u":
        return _filtered(live, "")
    return _filtered(live, wanted + key) if len(key) == 1 and key.isprintable() else live


def _filtered(live: Live, wanted: str) -> Live:
    if live.page is not None:
        return _scrolled(replace(live, page=replace(live.page, filter=wanted)), live.page.top, follow=live.page.follow)
    pane = replace(live.pane, filter=wanted)
    return _with_pane(live, _selected(pane, place_of(pane, shown_rows(pane))), live.active)


def _opened(live: Live, kind: str) -> Live:
    if kind == "help":
        return replace(live, page=LivePage(kind, LiveTarget(""), HELP))
    if live.page is not None and live.page.kind != "help":
        target: LiveTarget | None = live.page.target
    else:
        rows = shown_rows(live.pane)
        target = rows[place_of(live.pane, rows)].target if rows else None
    if target is None:
        return replace(live, message="nothing is selected")
    return replace(live, page=LivePage(kind, target, follow=kind == "logs"))


def _press_table(live: Live, key: str) -> Live:
    pane, last = live.pane, len(shown_rows(live.pane)) - 1
    place = place_of(pane, shown_rows(pane))
    if key in ("enter", "d", "l"):
        return _opened(live, "logs" if key == "l" else "describe")
    if key in _MOVES:
        pane = _selected(pane, place + _MOVES[key])
    elif key in _SCREENS:
        pane = _selected(pane, place + _SCREENS[key] * live.body)
    elif key in _ENDS:
        pane = _selected(pane, _ENDS[key] * last)
    elif key in ("left", "right"):
        left = pane.left + (1 if key == "right" else -1)
        pane = replace(pane, left=max(0, min(left, len(pane.columns) - 2)))
    elif key == "s":
        pane = replace(pane, sort=pane.sort + 1 if pane.sort + 1 < len(pane.columns) else -1)
    elif key == "S":
        pane = replace(pane, is_reversed=not pane.is_reversed)
    elif key == "tab":
        return replace(live, active=(live.active + 1) % len(live.panes))
    elif key == "esc" and pane.filter:
        return _filtered(live, "")
    return _with_pane(live, pane, live.active)


def _press_page(live: Live, key: str) -> Live:
    page = live.page
    assert page is not None
    if key == "esc":
        return _filtered(live, "") if page.filter else replace(live, page=None)
    if key in ("d", "l"):
        return _opened(live, "logs" if key == "l" else "describe")
    if key in _ENDS:
        last = bool(_ENDS[key])
        return _scrolled(live, len(page.lines) if last else 0, follow=last and page.kind == "logs")
    if key in ("left", "right"):
        left = page.left + (_SHIFT if key == "right" else -_SHIFT)
        longest_line = max((cell_width(_MARK.sub("", line)) for line in shown_lines(page)), default=0)
        return replace(live, page=replace(page, left=max(0, min(left, longest_line - _SHIFT))))
    by = _MOVES.get(key, 0) or _SCREENS.get(key, 0) * live.body
    return _scrolled(live, page.top + by) if by else live


def screen(live: Live, now: float, *, colour: bool) -> list[str]:
    """Return as many lines as the terminal has, none wider than it."""
    above = [_page_title(live, live.page, now)] if live.page is not None else [_table_title(live, now, colour)]
    body = _page_body(live, live.page) if live.page is not None else _table_body(live, colour)
    error = (live.page or live.pane).error
    bottom = live.message or (f"cannot be read: {error}" if error else HINTS if live.page is None else _PAGE_HINTS)
    if live.page is None:
        titles = [column.title for column in live.pane.columns]
        above.append("  " + _cells(titles, live.pane, _layout(live), paint=False))
    if live.is_typing:
        wanted = live.page.filter if live.page is not None else live.pane.filter
        bottom = f"/{wanted[max(0, len(wanted) - max(0, live.width - 2)) :]}_"
    around = live.height - live.body  # what a low terminal has no room for is left out
    if live.is_typing and around < len(above) + 1:
        above = [bottom]
    lines = [*above[: min(around, len(above))], *body, *[""] * (live.body - len(body))]
    lines += [bottom] if len(lines) < live.height else []
    return [cut(line, live.width) for line in lines]


def cut(text: str, width: int) -> str:
    """Return the text in at most ``width`` columns, with an ellipsis if it is cut. Colours take no space."""
    if cell_width(_MARK.sub("", text)) <= width:
        return text
    if width < 1:
        return ""
    if ESCAPE not in text:
        return text[: longest(text, width - 1)] + "…" if width > 1 else "…"
    found, room = "", width - 1
    at = 0
    for mark in [*_MARK.finditer(text), None]:
        part = text[at : mark.start() if mark else len(text)]
        if cell_width(part) > room:
            part = part[: longest(part, room)] if room > 0 else ""
            return f"{found}{part}{ESCAPE}[0m…"
        found, room = found + part + (mark[0] if mark else ""), room - cell_width(part)
        at = mark.end() if mark else at
    return found


def _age(at: float | None, now: float, error: str) -> str:
    if at is None:
        return "" if error else "reading"
    return f"read {age(now - at)} ago" if now - at > _STALE_S else ""


def _table_title(live: Live, now: float, colour: bool) -> str:
    pane, rows = live.pane, shown_rows(live.pane)
    count = f"{len(rows)}/{len(pane.rows)}" if pane.filter else f"{len(rows)}"
    names = [f"[{each.title} {count}]" if each is pane else each.title for each in live.panes]
    sort = pane.columns[pane.sort].title if 0 <= pane.sort < len(pane.columns) else ""
    order = " ".join(filter(None, [f"sort {sort}" if sort else "", "reversed" if pane.is_reversed else ""]))
    state = _age(pane.at, now, pane.error)
    more = "right: more columns" if len(pane.columns) - 1 not in _layout(live) else ""
    facts = [state, f"/{pane.filter}" if pane.filter else "", order, more, pane.note]
    title = "  ".join([" ".join(names), *filter(None, facts)])
    return style(title, fg="yellow") if colour and state else style(title, bold=True) if colour else title


def _layout(live: Live) -> dict[int, int]:
    """Return the visible columns and their widths. Only columns that fit completely are visible."""
    pane, rows = live.pane, shown_rows(live.pane)
    places = [place for place in range(len(pane.columns)) if place == 0 or place > pane.left]
    widths = {
        place: max([cell_width(pane.columns[place].title), *(cell_width(row.cells[place]) for row in rows)])
        for place in places
    }
    if places and sum(widths.values()) + 2 * len(places) > live.width:
        widths[0] = min(widths[0], max(_LEAST_FIRST, live.width // 2))
    ends = zip(widths, accumulate(width + 2 for width in widths.values()), strict=True)
    return {place: widths[place] for number, (place, end) in enumerate(ends) if end <= live.width or not number}


def _table_body(live: Live, colour: bool) -> list[str]:
    pane, rows, widths = live.pane, shown_rows(live.pane), _layout(live)
    if not rows:
        empty = "  no row has these words" if pane.filter and pane.rows else "  nothing yet"
        return [empty] if pane.at is not None else []
    place = place_of(pane, rows)
    first = max(0, min(place - live.body // 2, len(rows) - live.body))
    lines = []
    for number, row in enumerate(rows[first : first + live.body], first):
        cells = _cells(row.cells, pane, widths, paint=colour and number != place)
        line = cut(("> " if number == place else "  ") + cells, live.width)
        lines.append(style(line, reverse=True) if colour and number == place else line)
    return lines


def _cells(cells: Sequence[str], pane: Pane, widths: dict[int, int], *, paint: bool) -> str:
    parts = []
    for place, width in widths.items():
        column, text = pane.columns[place], cut(cells[place], width)
        spaces = " " * (width - cell_width(text))
        padded = spaces + text if column.right else text + spaces
        parts.append(paint_state(text, padded) if paint and column.state else padded)
    return "  ".join(parts).rstrip()


def _page_title(live: Live, page: LivePage, now: float) -> str:
    if page.kind == "help":
        return "Keys"
    of = page.target.ref
    if page.kind == "logs" and page.target.component is not None:
        of += f" {page.target.component}/{page.target.replica}"
    count = len(shown_lines(page))
    place = "following" if page.follow else f"{min(count, page.top + live.body)}/{count}"
    state = _age(page.at, now, page.error)
    facts = [state, f"/{page.filter}" if page.filter else "", place if page.lines else ""]
    return "  ".join([f"{page.kind} {of}", *filter(None, facts)])


def _page_body(live: Live, page: LivePage) -> list[str]:
    lines = shown_lines(page)[page.top : page.top + live.body]
    if not page.left:
        return lines
    return [_MARK.sub("", line)[page.left :] for line in lines]
