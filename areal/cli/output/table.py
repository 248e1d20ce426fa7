"""Plain aligned tables: upper-case titles, two spaces between columns, nothing to strip for ``awk``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]

_GOOD = frozenset(("ready", "running", "true", "alive", "succeeded", "normal", "created", "healed"))
_BAD = frozenset(("failed", "dead", "crashloop", "stalled", "unhealthy", "error", "missing", "unreachable"))
_BUSY = frozenset(
    ("progressing", "starting", "backoff", "intended", "degraded", "draining", "unknown", "suspended", "warning")
)


class Column(NamedTuple):
    title: str
    cell: Callable[[Row], Any]  # what people see; JSON shows the row itself
    wide: bool = False  # only with -o wide
    right: bool = False  # numbers
    state: bool = False  # coloured by its word


def field(title: str, *path: str, wide: bool = False, right: bool = False, state: bool = False) -> Column:
    """A column that shows ``row[path[0]][path[1]]...``; empty when any step is absent."""

    def cell(row: Row) -> Any:
        value: Any = row
        for step in path:
            value = value.get(step) if isinstance(value, Mapping) else None
        return value

    return Column(title, cell, wide, right, state)


def text_of(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if value is True or value is False:
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping):
        return ",".join(f"{key}={value[key]}" for key in value) or "-"
    if isinstance(value, list | tuple):
        return ",".join(str(item) for item in value) or "-"
    return " ".join(str(value).split()) or "-"


def render_table(rows: Sequence[Row], columns: Sequence[Column], *, wide: bool = False, header: bool = True) -> str:
    shown = [column for column in columns if wide or not column.wide]
    cells = [[text_of(column.cell(row)) for column in shown] for row in rows]
    titles = [[column.title for column in shown]] if header else []
    widths = [max((len(line[i]) for line in titles + cells), default=0) for i in range(len(shown))]
    widths = _fit(widths, titles)
    paint = _painter()
    lines = [_line(line, widths, shown, None) for line in titles]
    lines += [_line(line, widths, shown, paint) for line in cells]
    return "\n".join(lines)


def _fit(widths: list[int], titles: list[list[str]]) -> list[int]:
    """On a terminal the last column gives way rather than wrap; off one nothing is cut."""
    if not sys.stdout.isatty() or not widths:
        return widths
    import shutil

    room = shutil.get_terminal_size().columns - sum(widths[:-1]) - 2 * (len(widths) - 1)
    floor = len(titles[0][-1]) if titles else 8
    return [*widths[:-1], max(floor, min(widths[-1], room))]


def _line(
    cells: list[str], widths: list[int], columns: Sequence[Column], paint: Callable[[str, str], str] | None
) -> str:
    parts = []
    for i, (text, width, column) in enumerate(zip(cells, widths, columns, strict=True)):
        last = i == len(cells) - 1
        shown = text if len(text) <= width else text[: max(1, width - 1)] + "…"
        padded = shown.rjust(width) if column.right else shown if last else shown.ljust(width)
        parts.append(paint(text, padded) if paint and column.state else padded)
    return "  ".join(parts).rstrip()


def _painter() -> Callable[[str, str], str] | None:
    from areal.cli.invocation import fancy

    if not fancy(sys.stdout):
        return None

    def paint(word: str, padded: str) -> str:
        import click

        low = word.lower()
        colour = "green" if low in _GOOD else "red" if low in _BAD else "yellow" if low in _BUSY else None
        return click.style(padded, fg=colour) if colour else padded

    return paint
