"""One way out for data: rows in, the chosen format on stdout.

Data is exact (``-o json|yaml|jsonl|jsonpath``, logs, answers); what is laid out for people (tables, pages) is spelled
as on a terminal wherever it goes. A terminal is only ever sent what ``areal.terminal`` lets through.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from areal.cli.output.table import Column, Row, folded, render_table, text_of
from areal.terminal import ESCAPE, spelled

if TYPE_CHECKING:
    from areal.cli.invocation import Invocation
    from areal.cli.output.formats import Format


# What a terminal obeys and JSON leaves as it is, and halves of a surrogate pair: their escapes are those of JSON and of
# quoted YAML.
_UNSAFE = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def write(text: str) -> None:
    """Data: stdout, one trailing newline."""
    if text:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")


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
    """Print one thing; ``text`` is what people read and is only called for them."""
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


def to_yaml(documents: Iterable[Any]) -> str:
    """YAML documents that our own loader reads back the same (strings that look like something else are quoted)."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    Dumper.add_representer(str, _represent_text)
    return _escaped(
        yaml.dump_all(
            documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120
        )
    )


def _represent_text(dumper: Any, text: str) -> Any:
    """Quoted whenever it could be a number: PyYAML leaves `1e-3` and `0o17` bare, our loader reads them as numbers."""
    style = "|" if "\n" in text else "'" if text[:1] and text[0] in "+-.0123456789" else None
    if _UNSAFE.search(text):
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)
