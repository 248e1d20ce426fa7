"""Prints data to stdout in the chosen format.

Data (``-o json|yaml|jsonl|jsonpath``, logs, answers) is exact. Tables and pages for people use the spelling of a
terminal wherever they are written. A terminal only receives characters that ``areal.terminal`` allows.
"""

from __future__ import annotations

import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from areal.cli.failures import report
from areal.cli.options import Format, Invocation
from areal.errors import ArealError, Conflict, InvalidManifest, UsageFault, did_you_mean
from areal.numbers import number
from areal.terminal import ESCAPE, can_move, fancy, pause, safe, spelled, style

if TYPE_CHECKING:
    from pathlib import Path

# Characters that a terminal interprets and JSON does not escape, and halves of a surrogate pair. Their escapes are
# valid in JSON and in quoted YAML.
_UNSAFE = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


_UNDERSCORE = re.compile("(?<=[a-z])_([a-z])")


def write(text: str) -> None:
    """Write data to stdout, with one trailing newline."""
    if text:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")


def refuse_existing(path: Path, *, force: bool) -> None:
    """Raise Conflict for a file that exists, unless ``force`` replaces it; ArealError where none can be."""
    try:
        exists = path.exists()
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise ArealError(f"cannot write {path}: {error.strerror}") from error
    if exists and not force:
        raise Conflict(f"{path} exists already", hint="--force replaces it")


def write_file(path: Path, text: str) -> None:
    """Write a file, and its folder. Raise ArealError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArealError(f"cannot write {path}: {error.strerror}") from error


def show(text: str) -> None:
    """Write a page for people, wrapped to the width of the terminal."""
    write(folded(spelled(text)))


def clear() -> None:
    """Clear the terminal's window."""
    sys.stdout.write(f"{ESCAPE}[H{ESCAPE}[2J")


def emit_rows(
    cli: Invocation,
    rows: Sequence[Row],
    columns: Sequence[Column],
    *,
    name: Callable[[Row], str],
    empty: str = "nothing found",
    wrap: Callable[[Sequence[Row]], Any] | None = None,
    answered: bool = False,
) -> None:
    """Print a list. ``wrap`` builds the document for JSON, YAML and JSONPath, by default a List as in Kubernetes;
    jsonl and name print row by row. ``answered``: the rows are a service's answer, with keys of another spelling."""
    chosen = cli.format
    if answered and not chosen.is_table and chosen.kind != "name":
        rows = camel(rows)
    if chosen.is_table:
        if rows:
            write(render_table(rows, columns, wide=chosen.kind == "wide"))
        elif empty:
            cli.info(empty)
    elif chosen.kind == "name":
        write("\n".join(text_of(name(row)) for row in rows))
    elif chosen.kind == "jsonl":
        write("\n".join(compact(row) for row in rows))
    else:
        write(dump(chosen, (wrap or as_list)(rows)))


def emit_one(cli: Invocation, document: Row, *, name: str, text: Callable[[], str], answered: bool = False) -> None:
    """Print one document. ``text`` returns the page for people and is called only for the table formats."""
    chosen = cli.format
    if chosen.is_table:
        show(text())
    elif chosen.kind == "name":
        write(text_of(name))
    else:
        write(dump(chosen, camel(document) if answered else document))


def dump(chosen: Format, document: Any) -> str:
    if chosen.kind == "json":
        import json

        return _escaped(json.dumps(document, indent=2, ensure_ascii=False))
    if chosen.kind == "jsonl":
        return compact(document)
    if chosen.kind == "yaml":
        return to_yaml([document])
    assert chosen.kind == "jsonpath", f"no writer for -o {chosen.kind}"
    from areal.resources.jsonpath import evaluate

    return evaluate(chosen.expression, document)


def emit_next(cli: Invocation, document: Any, *, name: str) -> None:
    """Print the next document of an output that has no end: a line of JSON, or the document in the format of -o."""
    chosen = cli.format
    if chosen.kind == "name":
        write(text_of(name))
    elif chosen.kind == "yaml":
        write(f"---\n{dump(chosen, document)}")
    else:
        write(dump(chosen, document) if chosen.kind == "jsonpath" else compact(document))


def compact(document: Any) -> str:
    import json

    return _escaped(json.dumps(document, ensure_ascii=False, separators=(",", ":")))


def _escaped(text: str) -> str:
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def to_yaml(documents: Iterable[Any], *, manifests: bool = False) -> str:
    """Return documents as YAML. ``manifests``: the text can be applied again."""
    from areal.resources.yaml_io import dump_documents

    return _escaped(dump_documents(documents, manifests=manifests))


def as_list(items: Sequence[Any]) -> dict[str, object]:
    """Return a List as in Kubernetes."""
    from areal.resources.kinds import API_VERSION

    return {"apiVersion": API_VERSION, "kind": "List", "items": list(items)}


_AS_WRITTEN = {"messages", "message", "metadata", "failures"}  # whose keys are data


def camel(value: Any) -> Any:
    """Return a service's answer with keys as in our own documents, at every depth."""
    if isinstance(value, list | tuple):
        return [camel(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {
        _UNDERSCORE.sub(lambda found: found[1].upper(), key): each if key in _AS_WRITTEN else camel(each)
        for key, each in value.items()
    }


Row = Mapping[str, Any]

_STATE_COLOURS = {
    "green": ["ready", "running", "true", "alive", "succeeded", "normal", "created", "healed"],
    "red": ["failed", "dead", "crashloop", "stalled", "unhealthy", "error", "missing", "unreachable"],
    "yellow": [
        "progressing",
        "starting",
        "backoff",
        "intended",
        "degraded",
        "draining",
        "unknown",
        "suspended",
        "warning",
    ],
}


class Column(NamedTuple):
    title: str
    cell: Callable[[Row], Any]  # what people see; JSON shows the row itself
    wide: bool = False  # only with -o wide
    right: bool = False  # numbers
    state: bool = False  # coloured by its word
    order: Callable[[Row], Any] | None = None  # what it sorts by, if not by what people see


def field(title: str, *path: str, wide: bool = False, right: bool = False, state: bool = False) -> Column:
    """Return a column that shows ``row[path[0]][path[1]]...``; empty if any step is absent."""

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
        return number(value)
    if isinstance(value, Mapping):
        value = ",".join(f"{key}={text_of(value[key])}" for key in value)
    elif isinstance(value, list | tuple):
        value = ",".join(text_of(item) for item in value)
    return safe(" ".join(str(value).split())) or "-"


def render_table(
    rows: Sequence[Row], columns: Sequence[Column], *, wide: bool = False, header: bool = True, indent: int = 0
) -> str:
    """Render one line per row. On a terminal, no line is wider than the terminal and no text is cut: the last column
    wraps below itself, and columns that do not fit follow on separate lines, each value after its title. ``indent``:
    characters that the caller puts before each line."""
    shown = [column for column in columns if wide or not column.wide]
    cells = [[text_of(column.cell(row)) for column in shown] for row in rows]
    titles = [column.title for column in shown]
    widths = [
        max((cell_width(line[i]) for line in ([titles] if header else []) + cells), default=0)
        for i in range(len(shown))
    ]
    room = _room(indent)
    aligned = _aligned(widths, room, last_is_text=bool(shown) and not shown[-1].right)
    paint = paint_state if fancy(sys.stdout) else None
    lines = [_line(titles, widths, shown, aligned, None)] if header else []
    for row in cells:
        if room is not None and row and aligned == len(shown):  # the last cell may take several lines
            before = sum(widths[:-1]) + 2 * (len(widths) - 1)
            space = max(_LEAST, room - before)
            first, *more = _wrapped(row[-1], space, space)
            lines.append(_line([*row[:-1], first], widths, shown, aligned, paint))
            lines += [" " * before + part for part in more]
            continue
        if room is not None and row and cell_width(row[0]) > room:
            lines += _indented(row[0], room)
        else:
            lines.append(_line(row, widths, shown, aligned, paint))
        rest = [f"{titles[i]} {text}".lstrip() for i, text in enumerate(row) if i >= aligned and text != "-"]
        lines += _packed(rest, room) if room is not None else []
    return "\n".join(lines)


def cell_width(text: str) -> int:
    """Return the terminal columns of ``text``: wide East Asian characters take two, marks and joiners none."""
    if text.isascii():
        return len(text)
    return sum(
        0
        if unicodedata.category(each) in ("Mn", "Me", "Cf")
        else 2
        if unicodedata.east_asian_width(each) in "WF"
        else 1
        for each in text
    )


def folded(text: str) -> str:
    """Wrap the lines of a page that are wider than the terminal, with an extra indent. Without a terminal, returns
    ``text`` unchanged."""
    room = _room(0)
    if room is None:
        return text
    lines = []
    for line in text.split("\n"):
        if ESCAPE in line:  # a line of a table, which already fits
            lines.append(line)
            continue
        start = line[: len(line) - len(line.lstrip())]
        first, *more = _wrapped(line.strip(), max(_LEAST, room - len(start)), max(_LEAST, room - len(start) - 4))
        lines += [start + first, *(f"{start}    {part}" for part in more)]
    return "\n".join(lines)


_LEAST = 8
_TEXT_LEAST = 24  # minimum width of a last column that wraps; narrower text is easier to read on separate lines
_INDENT = "    "


def _room(indent: int) -> int | None:
    if not sys.stdout.isatty():
        return None
    import shutil

    return max(_LEAST + len(_INDENT), shutil.get_terminal_size().columns - indent)


def _aligned(widths: list[int], room: int | None, *, last_is_text: bool) -> int:
    """Return the number of columns that fit side by side."""
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


def _packed(fields: list[str], room: int) -> list[str]:
    """Return the fields in indented lines, with as many fields per line as fit."""
    space = room - len(_INDENT)
    lines: list[str] = []
    joins = False  # whether a field may follow on the last line: not if that ends a value of several lines
    for each in fields:
        if joins and cell_width(lines[-1]) + 2 + cell_width(each) <= space:
            lines[-1] += f"  {each}"
            continue
        parts = _indented(each, space)
        lines += parts
        joins = len(parts) == 1
    return [_INDENT + line for line in lines]


def _indented(text: str, space: int) -> list[str]:
    first, *more = _wrapped(text, space, space - 2)
    return [first, *(f"  {part}" for part in more)]


def _wrapped(text: str, first: int, others: int) -> list[str]:
    """Wrap ``text`` at spaces and commas, and inside longer words. ``first`` and ``others``: maximum columns of the
    first line and of the other lines."""
    lines, space = [], first
    while cell_width(text) > space:
        end = longest(text, space)
        gap = max(text.rfind(" ", 1, end + 1), text.rfind(",", 0, end) + 1)
        word = text[gap:].lstrip().partition(" ")[0]
        end = gap if gap > space // 3 or (gap > 0 and cell_width(word) <= others) else end
        lines.append(text[:end].rstrip())
        text, space = text[end:].lstrip(), others
    return [*lines, text]


def longest(text: str, space: int) -> int:
    """Return how many characters, at least one, fit into ``space`` columns."""
    taken = 0
    for count, each in enumerate(text):
        taken += cell_width(each)
        if taken > space:
            return max(1, count)
    return len(text)


def paint_state(word: str, padded: str) -> str:
    colour = next((colour for colour, words in _STATE_COLOURS.items() if word.lower() in words), None)
    return style(padded, fg=colour) if colour else padded


def clock(at: float | None) -> str:
    """Format local time, with the date unless it is today."""
    if at is None:
        return "-"
    moment = time.localtime(at)
    same_day = moment[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", moment)


_WATCH_S = 1.0
_CLOCKS = ("AGE", "UPTIME")


class Table(NamedTuple):
    """Rows to print. ``single``: one object was named, so the document is not a list. ``manifests``: for -o manifest.
    ``where``: the source of the rows, if it is not this home. ``note``: names the rows that are not listed."""

    rows: Sequence[Row]
    columns: Sequence[Column]
    name: Callable[[Row], str]
    single: bool = False
    unreadable: Sequence[tuple[Path | str, str]] = ()
    manifests: Sequence[Mapping[str, object]] = ()
    where: str = ""
    note: str = ""

    def sorted(self, sort_by: str | None) -> list[Row]:
        if sort_by is None:
            return list(self.rows)
        key = self._sort_key(sort_by)
        return sorted(self.rows, key=lambda row: orderable(key(row)))

    def _sort_key(self, sort_by: str) -> Callable[[Row], Any]:
        if sort_by[:1] in ".{$":
            from areal.resources.jsonpath import first

            return lambda row: first(sort_by, row)
        if sort_by.lower() == "age":
            return lambda row: row.get("metadata", {}).get("createdAt") or row.get("startedAt")
        titles = {column.title.lower(): column for column in self.columns}
        if sort_by.lower() not in titles:
            message = f'no column "{sort_by}"{did_you_mean(sort_by, titles)}'
            raise UsageFault(message, hint=f"one of {', '.join(titles)}")
        column = titles[sort_by.lower()]
        return column.order or column.cell


def orderable(value: Any) -> tuple[int, Any]:
    """Return a sort key: absent values first, then numbers, then text; values of different types are not compared."""
    if value is None:
        return 0, 0
    if isinstance(value, int | float):
        return 1, value
    return 2, text_of(value)


def show_table(cli: Invocation, table: Table, sort_by: str | None) -> int:
    """Print a table once. Returns the status of files that cannot be read after reporting them, else 0."""
    rows = table.sorted(sort_by)
    if cli.format.kind == "manifest":
        write(to_yaml(table.manifests, manifests=True) if table.manifests else "")
    elif table.single and not cli.format.is_table:
        emit_one(cli, rows[0], name=table.name(rows[0]), text=str)
    else:
        empty = table.note or ("" if table.unreadable else f"nothing in {table.where or cli.home.root} yet")
        emit_rows(cli, rows, table.columns, name=table.name, empty=empty)
    if table.note and rows:
        cli.info(table.note)
    return report_unreadable(cli, table.unreadable)


def report_unreadable(cli: Invocation, files: Sequence[tuple[Path | str, str]]) -> int:
    """Report records that a list lacks because they cannot be read. Returns the status of such files, or 0."""
    if files:
        from areal.state.files import remedy
    for path, reason in files:
        report(ArealError(f"{path} is unreadable: {reason}", hint=remedy(reason)), cli)
    return InvalidManifest.exit_code if files else 0


def print_rows(
    cli: Invocation, rows: Sequence[Row], columns: Sequence[Column], name: Callable[[Row], str], *, header: bool
) -> None:
    """Print rows of a table that is printed piece by piece."""
    if cli.format.is_table:
        write(render_table(rows, columns, wide=cli.format.kind == "wide", header=header))
    else:
        for row in rows:
            emit_next(cli, row, name=name(row))
    sys.stdout.flush()


def is_live(cli: Invocation) -> bool:
    """Return whether a watch is a view with keys: tables between a person's keyboard and a terminal that moves its
    cursor."""
    return cli.format.is_table and sys.stdin.isatty() and can_move(sys.stdout)


def watch_table(cli: Invocation, look: Callable[[], Table], sort_by: str | None) -> int:
    """Print the table, then each row again when one of its cells except AGE and UPTIME changes, until Ctrl-C."""
    wide = cli.format.kind != "table"
    seen: dict[str, Any] = {}
    header = True
    while True:
        table = look()
        rows = {table.name(row): row for row in table.sorted(sort_by)}
        shown = [column for column in table.columns if column.title not in _CLOCKS and (wide or not column.wide)]
        cells = {name: [text_of(column.cell(row)) for column in shown] for name, row in rows.items()}
        fresh = [row for name, row in rows.items() if seen.get(name) != cells[name]]
        if fresh:
            print_rows(cli, fresh, table.columns, table.name, header=header)
            header = False
        for name in seen.keys() - rows.keys():
            cli.info(f"{name} is gone")
        seen = cells
        pause(_WATCH_S)


_HOME, _LINE_END, _BELOW = f"{ESCAPE}[H", f"{ESCAPE}[K", f"{ESCAPE}[J"


def show_status(
    cli: Invocation,
    look: Callable[[], Row],
    name: Callable[[Row], str],
    page: Callable[[Row], str],
    *,
    watch: bool,
    interval: float,
    answered: bool = False,
) -> Row:
    """Print a document. With ``watch``, prints it every ``interval`` seconds until Ctrl-C: on a terminal in place
    (line by line, to avoid flicker), elsewhere one after the other."""
    while watch:
        document = look()
        if not cli.format.is_table:
            emit_next(cli, camel(document) if answered else document, name=name(document))
        elif fancy(sys.stdout):
            lines = spelled(page(document)).splitlines()
            sys.stdout.write(_HOME + "".join(f"{line}{_LINE_END}\n" for line in lines) + _BELOW)
        else:
            show(page(document) + "\n")
        sys.stdout.flush()
        pause(interval)
    document = look()
    emit_one(cli, document, name=name(document), text=lambda: page(document), answered=answered)
    return document
