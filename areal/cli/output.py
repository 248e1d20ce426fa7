"""Data on stdout in the chosen format, errors and hints on stderr.

Data is exact (``-o json|yaml|jsonl|jsonpath``, logs, answers); tables and pages for people are spelled as on a terminal
wherever they go. A terminal is only ever sent characters that ``areal.terminal`` lets through.
"""

from __future__ import annotations

import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from areal.cli.options import Format, Invocation
from areal.errors import ArealError, UsageFault
from areal.terminal import ESCAPE, fancy, safe, spelled, style

if TYPE_CHECKING:
    from pathlib import Path

# What a terminal obeys and JSON leaves as it is, and halves of a surrogate pair: their escapes are those of JSON and of
# quoted YAML.
_UNSAFE = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def write(text: str) -> None:
    """Data: stdout, one trailing newline."""
    if text:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")


def write_file(path: Path, text: str) -> None:
    """Raises ArealError where the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArealError(f"cannot write {path}: {error.strerror}") from error


def show(text: str) -> None:
    """A page for people. It is laid out for the terminal that it goes to."""
    write(folded(spelled(text)))


def clear() -> None:
    """Empty the terminal's window."""
    sys.stdout.write(f"{ESCAPE}[H{ESCAPE}[2J")


def emit_rows(
    cli: Invocation,
    rows: Sequence[Row],
    columns: Sequence[Column],
    *,
    name: Callable[[Row], str],
    empty: str = "nothing found",
    wrap: Callable[[Sequence[Row]], Any] = list,
) -> None:
    """Print a list. ``wrap`` makes the JSON, YAML and JSONPath document; jsonl and name go row by row."""
    chosen = cli.format
    if chosen.is_table:
        if rows:
            write(render_table(rows, columns, wide=chosen.kind == "wide"))
        else:
            cli.say(empty)
    elif chosen.kind == "name":
        write("\n".join(text_of(name(row)) for row in rows))
    elif chosen.kind == "jsonl":
        write("\n".join(compact(row) for row in rows))
    else:
        write(dump(chosen, wrap(rows)))


def emit_one(cli: Invocation, document: Row, *, name: str, text: Callable[[], str]) -> None:
    """Print one document; ``text`` makes the page for people and is called for tables only."""
    chosen = cli.format
    if chosen.is_table:
        show(text())
    elif chosen.kind == "name":
        write(text_of(name))
    elif chosen.kind == "jsonl":
        write(compact(document))
    else:
        write(dump(chosen, document))


def dump(chosen: Format, document: Any) -> str:
    if chosen.kind == "json":
        import json

        return _escaped(json.dumps(document, indent=2, ensure_ascii=False))
    if chosen.kind == "yaml":
        return to_yaml([document])
    assert chosen.kind == "jsonpath", f"no writer for -o {chosen.kind}"
    from areal.resources.jsonpath import evaluate

    return evaluate(chosen.expression, document)


def compact(document: Any) -> str:
    import json

    return _escaped(json.dumps(document, ensure_ascii=False, separators=(",", ":")))


def _escaped(text: str) -> str:
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def to_yaml(documents: Iterable[Any], *, manifests: bool = False) -> str:
    """YAML documents; ``manifests``: to be applied again."""
    from areal.resources.yaml_io import dump_documents

    return _escaped(dump_documents(documents, manifests=manifests))


def as_list(items: Sequence[Any]) -> dict[str, Any]:
    """A List as in Kubernetes."""
    from areal.resources.kinds import API_VERSION

    return {"apiVersion": API_VERSION, "kind": "List", "items": list(items)}


# -- tables: upper-case titles, two spaces between columns, nothing to strip for ``awk``

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
    paint = _paint_state if fancy(sys.stdout) else None
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


def _packed(fields: list[str], room: int) -> list[str]:
    """The fields in indented lines, each as full as fits."""
    space = room - len(_INDENT)
    lines: list[str] = []
    joins = False  # the last line may be gone on with: it is not the end of a value in several lines
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


def _paint_state(word: str, padded: str) -> str:
    colour = next((colour for colour, words in _STATE_COLOURS.items() if word.lower() in words), None)
    return style(padded, fg=colour) if colour else padded


# -- units: tables only, JSON keeps the numbers


def age(seconds: float | None) -> str:
    """``45s``, ``3m20s``, ``5h12m``, ``3d4h``: two units at most."""
    if seconds is None:
        return "-"
    left = max(0, int(seconds))
    if left < 120:
        return f"{left}s"
    big, small, size, part = next(
        units for units in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)) if left >= units[2]
    )
    count, rest = left // size, left % size // part
    return f"{count}{big}{rest}{small}" if rest and count < 10 else f"{count}{big}"


def size(count: float | None) -> str:
    """Bytes: ``512B``, ``1.5KiB``, ``12GiB``."""
    if count is None:
        return "-"
    value, units = float(count), ["TiB", "GiB", "MiB", "KiB", "B"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop()
    return f"{value:.0f}{units[-1]}" if units[-1] == "B" or value >= 100 else f"{value:.3g}{units[-1]}"


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


# -- errors


def report(error: BaseException, cli: Invocation) -> int:
    """Print ``error`` and return the process's exit status."""
    lines, code = _describe(error)
    if cli.debug:
        import traceback

        lines = [*traceback.format_exception(error), *lines]
    sys.stdout.flush()
    click.echo("\n".join(line.rstrip("\n") for line in lines), err=True)
    return code


def error_lines(error: ArealError) -> list[str]:
    return message_lines(error.message, error.hint, error.detail)


def message_lines(message: str, hint: str | None = None, detail: str | None = None) -> list[str]:
    return [
        f"{_paint('error:', 'red')} {message}",
        *(f"  | {line}" for line in (detail or "").splitlines()),
        *_hint(hint),
    ]


def fault_lines(text: str, hint: str | None) -> list[str]:
    """One fault of a manifest."""
    return [_paint(text, "red", bold=False), *_hint(hint)]


def _describe(error: BaseException) -> tuple[list[str], int]:
    if isinstance(error, ArealError):
        faults = getattr(error, "diagnostics", ())
        if not faults:
            return error_lines(error), error.exit_code
        lines = [line for fault in faults for line in fault_lines(str(fault), getattr(fault, "hint", None))]
        plural = "error" if len(faults) == 1 else "errors"
        last = message_lines(f"{len(faults)} {plural} in the manifests; nothing was changed")
        return [*lines, *last], error.exit_code
    if isinstance(error, click.UsageError):
        text = error.format_message()
        first, *_ = message_lines(text[:1].lower() + text[1:].rstrip("."))
        if error.ctx is None:
            return [first], 2
        return [first, f"  {error.ctx.get_usage()}", *_hint(f"{error.ctx.command_path} --help")], 2
    if isinstance(error, click.ClickException):
        return message_lines(error.format_message()), 2
    text = f"unexpected {type(error).__name__}" + (f": {error}" if str(error) else "")
    return message_lines(text, "run the same command with --debug and report what it prints"), 1


def _hint(hint: str | None) -> list[str]:
    return [f"  {_paint('hint:', 'cyan')} {hint}"] if hint else []


def _paint(text: str, colour: str, *, bold: bool = True) -> str:
    return style(text, fg=colour, bold=bold) if fancy(sys.stderr) else text


# -- a table at one moment: printed, sorted, or watched

_WATCH_S = 1.0
_CLOCKS = ("AGE", "UPTIME")


class Table(NamedTuple):
    """``single``: one object was named, so that its document is no list. ``manifests``: for -o manifest. ``where``: the
    place that was read, when it is not this home. ``note``: of rows that are not listed."""

    rows: Sequence[Row]
    columns: Sequence[Column]
    name: Callable[[Row], str]
    single: bool = False
    unreadable: Sequence[tuple[str, str]] = ()
    manifests: Sequence[Mapping[str, Any]] = ()
    where: str = ""
    note: str = ""

    def sorted(self, sort_by: str | None) -> list[Row]:
        if sort_by is None:
            return list(self.rows)
        key = self._sort_key(sort_by)
        return sorted(self.rows, key=lambda row: _orderable(key(row)))

    def _sort_key(self, sort_by: str) -> Callable[[Row], Any]:
        if sort_by[:1] in ".{$":
            from areal.resources.jsonpath import first

            return lambda row: first(sort_by, row)
        if sort_by.lower() == "age":
            return lambda row: row.get("metadata", {}).get("createdAt") or row.get("startedAt")
        titles = {column.title.lower(): column for column in self.columns}
        if sort_by.lower() not in titles:
            from areal.errors import did_you_mean

            message = f'no column "{sort_by}"{did_you_mean(sort_by, titles)}'
            raise UsageFault(message, hint=f"one of {', '.join(titles)}")
        return titles[sort_by.lower()].cell


def _orderable(value: Any) -> tuple[int, Any]:
    """Absent first, then numbers, then text: values of different types never meet."""
    if value is None:
        return 0, 0
    if isinstance(value, int | float):
        return 1, value
    return 2, text_of(value)


def show_table(cli: Invocation, table: Table, sort_by: str | None) -> int:
    """Print once. Files that cannot be read are reported, never passed over: then the status is 1."""
    rows = table.sorted(sort_by)
    if cli.format.kind == "manifest":
        write(to_yaml(table.manifests, manifests=True) if table.manifests else "")
    elif table.single and not cli.format.is_table:
        emit_one(cli, rows[0], name=table.name(rows[0]), text=str)
    else:
        empty = table.note or f"nothing in {table.where or cli.home.root} yet"
        emit_rows(cli, rows, table.columns, name=table.name, empty=empty, wrap=as_list)
    if table.note and rows:
        cli.say(table.note)
    for path, reason in table.unreadable:
        hint = "areal doctor --fix restores it from its newest revision"
        report(ArealError(f"{path} is unreadable: {reason}", hint=hint), cli)
    return 1 if table.unreadable else 0


def watch_table(cli: Invocation, look: Callable[[], Table], sort_by: str | None) -> int:
    """The table, then each row again whenever one of its cells but its clock changes, until Ctrl-C."""
    wide = cli.format.kind != "table"
    seen: dict[str, Any] = {}
    header = True
    while True:
        table = look()
        rows = {table.name(row): row for row in table.sorted(sort_by)}
        shown = [column for column in table.columns if column.title not in _CLOCKS and (wide or not column.wide)]
        cells = {name: [text_of(column.cell(row)) for column in shown] for name, row in rows.items()}
        fresh = [row for name, row in rows.items() if seen.get(name) != cells[name]]
        if fresh and cli.format.is_table:
            write(render_table(fresh, table.columns, wide=cli.format.kind == "wide", header=header))
            header = False
        elif fresh:
            write("\n".join(table.name(row) if cli.format.kind == "name" else compact(row) for row in fresh))
        sys.stdout.flush()
        for name in seen.keys() - rows.keys():
            cli.say(f"{name} is gone")
        seen = cells
        time.sleep(_WATCH_S)


# -- one document, printed or watched

_HOME, _LINE_END, _BELOW = f"{ESCAPE}[H", f"{ESCAPE}[K", f"{ESCAPE}[J"


def show_status(
    cli: Invocation,
    look: Callable[[], Row],
    name: Callable[[Row], str],
    page: Callable[[Row], str],
    *,
    watch: bool,
    interval: float,
) -> Row:
    """Print a document; with ``watch`` until Ctrl-C: on a terminal in place, line by line, so that nothing flickers,
    elsewhere one after the other, a line of JSON each."""
    while watch:
        document = look()
        if not cli.format.is_table:
            write(compact(document))
        elif fancy(sys.stdout):
            lines = spelled(page(document)).splitlines()
            sys.stdout.write(_HOME + "".join(f"{line}{_LINE_END}\n" for line in lines) + _BELOW)
        else:
            show(page(document) + "\n")
        sys.stdout.flush()
        time.sleep(interval)
    document = look()
    emit_one(cli, document, name=name(document), text=lambda: page(document))
    return document
