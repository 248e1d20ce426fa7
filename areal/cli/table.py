"""Plain aligned tables: upper-case titles, two spaces between columns, nothing to strip for ``awk``; and units."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from areal.terminal import ESCAPE, fancy, safe, style

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
        value = ",".join(f"{key}={value[key]}" for key in value)
    elif isinstance(value, list | tuple):
        value = ",".join(str(item) for item in value)
    return safe(" ".join(str(value).split())) or "-"


def render_table(
    rows: Sequence[Row], columns: Sequence[Column], *, wide: bool = False, header: bool = True, indent: int = 0
) -> str:
    """One line a row off a terminal. On one, no line is wider than it and nothing is cut: text of the last column goes
    on below itself, and columns that do not fit follow on lines of their own, each value after its title. ``indent``
    is what the caller will put before each line."""
    shown = [column for column in columns if wide or not column.wide]
    cells = [[text_of(column.cell(row)) for column in shown] for row in rows]
    titles = [column.title for column in shown]
    widths = [
        max((cell_width(line[i]) for line in ([titles] if header else []) + cells), default=0)
        for i in range(len(shown))
    ]
    room = _room(indent)
    aligned = _aligned(widths, room, last_is_text=bool(shown) and not shown[-1].right)
    paint = _painter()
    lines = [_line(titles, widths, shown, aligned, None)] if header else []
    for row in cells:
        if room is not None and aligned == len(shown):
            lines += _hanging(row, widths, shown, paint, room)
            continue
        if room is not None and row and cell_width(row[0]) > room:
            first, *more = _wrapped(row[0], room, room - 2)
            lines += [first, *(f"  {part}" for part in more)]
        else:
            lines.append(_line(row, widths, shown, aligned, paint))
        rest = [f"{titles[i]} {text}".lstrip() for i, text in enumerate(row) if i >= aligned and text != "-"]
        lines += _packed(rest, room) if room is not None else []
    return "\n".join(lines)


def cell_width(text: str) -> int:
    """Columns of a terminal: wide characters of East Asia take two, marks over others none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text
    )


def folded(text: str) -> str:
    """A page, with lines that are wider than the terminal gone on below, further in; off a terminal as it is."""
    room = _room(0)
    if room is None:
        return text
    lines = []
    for line in text.split("\n"):
        if ESCAPE in line:  # of a table, which is laid out
            lines.append(line)
            continue
        start = line[: len(line) - len(line.lstrip())]
        first, *more = _wrapped(line.strip(), max(_LEAST, room - len(start)), max(_LEAST, room - len(start) - 4))
        lines += [start + first, *(f"{start}    {part}" for part in more)]
    return "\n".join(lines)


_LEAST = 8
_TEXT_LEAST = 24  # of the last column: narrower than this it reads worse than on lines of its own
_INDENT = "    "


def _room(indent: int) -> int | None:
    if not sys.stdout.isatty():
        return None
    import shutil

    return max(_LEAST + len(_INDENT), shutil.get_terminal_size().columns - indent)


def _aligned(widths: list[int], room: int | None, *, last_is_text: bool) -> int:
    """The number of columns that fit side by side."""
    if room is None or sum(widths) + 2 * (len(widths) - 1) <= room:
        return len(widths)
    if len(widths) > 1 and last_is_text and sum(widths[:-1]) + 2 * (len(widths) - 1) + _TEXT_LEAST <= room:
        return len(widths)
    taken, count = -2, 0
    for width in widths:
        taken += width + 2
        if taken > room:
            break
        count += 1
    return max(1, count)


def _line(
    cells: Sequence[str],
    widths: list[int],
    columns: Sequence[Column],
    aligned: int,
    paint: Callable[[str, str], str] | None,
) -> str:
    parts = []
    for i, (text, width, column) in enumerate(zip(cells[:aligned], widths, columns, strict=False)):
        spaces = " " * (width - cell_width(text))
        padded = spaces + text if column.right else text if i == len(columns) - 1 else text + spaces
        parts.append(paint(text, padded) if paint and column.state else padded)
    return "  ".join(parts).rstrip()


def _hanging(
    cells: list[str],
    widths: list[int],
    columns: Sequence[Column],
    paint: Callable[[str, str], str] | None,
    room: int,
) -> list[str]:
    """A row whose last column may take several lines."""
    before = sum(widths[:-1]) + 2 * (len(widths) - 1)
    space = max(_LEAST, room - before)
    first, *more = _wrapped(cells[-1], space, space) if cells else [""]
    return [
        _line([*cells[:-1], first], widths, columns, len(columns), paint),
        *(" " * before + part for part in more),
    ]


def _packed(fields: list[str], room: int) -> list[str]:
    """The fields in indented lines, each as full as fits."""
    space = room - len(_INDENT)
    lines: list[str] = []
    joins = False  # the last line may be gone on with: it is not the end of a value in several lines
    for each in fields:
        if joins and cell_width(lines[-1]) + 2 + cell_width(each) <= space:
            lines[-1] += f"  {each}"
            continue
        first, *more = _wrapped(each, space, space - 2)
        lines += [first, *(f"  {part}" for part in more)]
        joins = not more
    return [_INDENT + line for line in lines]


def _wrapped(text: str, first: int, others: int) -> list[str]:
    """``text`` in lines of at most so many columns, broken between words, and inside one that is longer."""
    lines, space = [], first
    while cell_width(text) > space:
        end = _longest(text, space)
        gap = max(text.rfind(" ", 1, end + 1), text.rfind(",", 0, end) + 1)
        word = text[gap:].lstrip().partition(" ")[0]
        end = gap if gap > space // 3 or (gap > 0 and cell_width(word) <= others) else end
        lines.append(text[:end].rstrip())
        text, space = text[end:].lstrip(), others
    return [*lines, text]


def _longest(text: str, space: int) -> int:
    """The number of characters, at least one, that fit into ``space`` columns."""
    taken = 0
    for count, each in enumerate(text):
        taken += cell_width(each)
        if taken > space:
            return max(1, count)
    return len(text)


def _painter() -> Callable[[str, str], str] | None:
    if not fancy(sys.stdout):
        return None

    def paint(word: str, padded: str) -> str:
        low = word.lower()
        colour = "green" if low in _GOOD else "red" if low in _BAD else "yellow" if low in _BUSY else None
        return style(padded, fg=colour) if colour else padded

    return paint


# -- units: tables only, JSON keeps the numbers


def age(seconds: float | None) -> str:
    """``45s``, ``3m20s``, ``5h12m``, ``3d4h``: two units at most."""
    if seconds is None:
        return "-"
    left = max(0, int(seconds))
    if left < 120:
        return f"{left}s"
    for big, small, size, part in (("m", "s", 60, 1), ("h", "m", 3600, 60), ("d", "h", 86400, 3600)):
        if left < {"m": 3600, "h": 86400}.get(big, float("inf")):
            rest = left % size // part
            return f"{left // size}{big}{rest}{small}" if rest and left // size < 10 else f"{left // size}{big}"
    raise AssertionError("unreachable")


def size(count: float | None) -> str:
    """Bytes: ``512B``, ``1.5KiB``, ``12GiB``."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f}{unit}" if unit == "B" or value >= 100 else f"{value:.3g}{unit}"
        value /= 1024
    raise AssertionError("unreachable")


def clock(at: float | None) -> str:
    """Local time, with the date when it is not today's."""
    if at is None:
        return "-"
    import time

    moment = time.localtime(at)
    same_day = moment[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", moment)


def iso(at: float | None) -> str | None:
    """UTC, RFC 3339, for JSON and manifests."""
    if at is None:
        return None
    import time

    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
