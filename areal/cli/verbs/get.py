"""``areal get``: kinds, objects, processes. Imports no model, no YAML, no HTTP client unless a flag needs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from areal.cli import options, view
from areal.cli.dryrun import as_list
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.output.emit import compact, emit_one, emit_rows, to_yaml, write
from areal.cli.output.table import Column, field, render_table, text_of
from areal.cli.remote import gateway
from areal.cli.targets import complete_targets, missing, parse_refs
from areal.errors import UsageFault
from areal.resources.kinds import KINDS, Ref, resolve_kind

if TYPE_CHECKING:
    from areal.runtime.backends.base import RunState
    from areal.state.records import StoredObject

_PROCESSES = ("processes", "process", "proc", "ps")
_WATCH_S = 1.0
_KIND_COLUMNS = (
    field("NAME", "plural"),
    field("SHORT", "short"),
    field("KIND", "kind"),
)

Document = dict[str, Any]


@click.command()
@click.argument("targets", nargs=-1, metavar="[KINDS | KIND/NAME | processes]...", shell_complete=complete_targets)
@click.option("-l", "--selector", metavar="SELECTOR", help="a=b, a!=b, 'a in (x,y)', 'a notin (x,y)', a, !a.")
@click.option("-w", "--watch", is_flag=True, help="Go on, printing what changes.")
@click.option("--sort-by", metavar="COLUMN|JSONPATH", help="age, name, ... or {.metadata.generation}.")
@click.option("--show-origin", is_flag=True, help="Which layer set each field, who, from which file.")
@click.option("--show-defaults", is_flag=True, help="Fill in the defaults.")
@options.remote
@options.output("manifest")
@options.common
@pass_invocation
def get(
    cli: Invocation,
    targets: tuple[str, ...],
    selector: str | None,
    watch: bool,
    sort_by: str | None,
    show_origin: bool,
    show_defaults: bool,
) -> int:
    """List objects of KINDS (comma-separated; none: all), single objects, `processes`, or `kinds`.

    \b
    areal get
    areal get models -l tier=prod -o wide
    areal get model/qwen -o manifest > qwen.yaml
    areal get processes inferenceservice/default -w
    """
    if targets == ("kinds",):
        return _kinds(cli)
    chosen = gateway(cli)
    if chosen is not None:
        from areal.cli.remote_view import get_remote

        single = len(targets) == 1 and "/" in targets[0]
        look: Callable[[], _Looked] = lambda: _Looked(*get_remote(chosen, targets), single=single)  # noqa: E731
    elif targets and targets[0] in _PROCESSES:
        look = lambda: _Looked(_process_rows(cli, targets[1:]), view.PROCESS_COLUMNS, view.process_name)  # noqa: E731
    elif show_origin:
        return _origins(cli, targets, show_defaults)
    else:
        look = lambda: _objects(cli, targets, selector, show_defaults)  # noqa: E731
    if watch:
        return _watch(cli, look, sort_by)
    return _print(cli, look(), sort_by)


class _Looked:
    """What was found at one moment, and how it is shown."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        columns: Sequence[Column],
        name: Callable[[Mapping[str, Any]], str],
        *,
        single: bool = False,
        unreadable: Sequence[tuple[str, str]] = (),
        manifests: Sequence[Document] = (),
    ) -> None:
        self.rows, self.columns, self.name = rows, columns, name
        self.single, self.unreadable, self.manifests = single, unreadable, manifests


def _objects(cli: Invocation, targets: Sequence[str], selector: str | None, defaults: bool) -> _Looked:
    from areal.reconcilers.status import object_status
    from areal.state.objects import ObjectStore

    store = ObjectStore(cli.home)
    refs, kinds = _asked(targets)
    unreadable: list[tuple[str, str]] = []
    if refs:
        found = [_require(cli, store.get(ref), ref) for ref in refs]
    else:
        listing = store.list()
        unreadable = [(str(path), reason) for path, reason in listing.unreadable]
        found = [item for item in listing if item.kind in kinds]
    if selector is not None:
        from areal.cli.selectors import parse_selector

        matches = parse_selector(selector)
        found = [item for item in found if matches(item.labels)]
    if cli.format.kind == "manifest":
        return _Looked([], [], str, manifests=[view.manifest(item) for item in found], unreadable=unreadable)
    runs = view.read_runs(cli.home) if found else {}
    rows = [
        view.document_of(item, object_status(cli.home, item, runs, probe=False), defaults=defaults) for item in found
    ]
    shown_kinds = kinds if len(kinds) == 1 else [item.kind for item in found] or list(KINDS)
    columns = view.columns_for(shown_kinds if len(kinds) == 1 or refs else KINDS)
    return _Looked(rows, columns, view.document_name, single=len(refs) == 1, unreadable=unreadable)


def _asked(targets: Sequence[str]) -> tuple[list[Ref], list[str]]:
    """The single objects asked for, or the kinds."""
    if not targets or targets in (("all",), ["all"]):
        return [], list(KINDS)
    if len(targets) == 1 and "/" not in targets[0]:
        return [], [resolve_kind(word) for word in targets[0].split(",") if word]
    return list(dict.fromkeys(parse_refs(targets))), []


def _require(cli: Invocation, found: StoredObject | None, ref: Ref) -> StoredObject:
    if found is None:
        raise missing(cli.home, ref)
    return found


def _process_rows(cli: Invocation, targets: Sequence[str]) -> list[Document]:
    states: list[RunState] = sorted(view.read_runs(cli.home).values(), key=view.run_order)
    if targets:
        from areal.state.objects import ObjectStore

        objects = list(ObjectStore(cli.home).list())
        known = {item.ref for item in objects}
        refs = parse_refs(targets)
        gone = next((ref for ref in refs if ref not in known), None)
        if gone is not None:
            raise missing(cli.home, gone)
        wanted = {str(ref) for asked in refs for ref in view.family(objects, asked)}
        states = [state for state in states if state.spec.owner in wanted]
    return [view.process_row(state) for state in states]


def _print(cli: Invocation, looked: _Looked, sort_by: str | None) -> int:
    rows = _sorted(looked, sort_by)
    if cli.format.kind == "manifest":
        write(to_yaml(looked.manifests) if looked.manifests else "")
    elif looked.single and not cli.format.is_table:
        emit_one(cli, rows[0], name=looked.name(rows[0]), text=str)
    else:
        emit_rows(cli, rows, looked.columns, name=looked.name, empty="nothing here yet", wrap=as_list)
    return _damaged(looked)


def _damaged(looked: _Looked) -> int:
    """Files that cannot be read are reported, never passed over: exit 1 when there are any."""
    from areal.cli.failures import report_line

    for path, reason in looked.unreadable:
        report_line(f"{path} is unreadable: {reason}", hint="areal doctor --fix restores it from its newest revision")
    return 1 if looked.unreadable else 0


def _sorted(looked: _Looked, sort_by: str | None) -> list[Mapping[str, Any]]:
    rows = list(looked.rows)
    if sort_by is None:
        return rows
    key = _sort_key(looked, sort_by)
    return sorted(rows, key=lambda row: _orderable(key(row)))


def _sort_key(looked: _Looked, sort_by: str) -> Callable[[Mapping[str, Any]], Any]:
    if sort_by[:1] in ".{$":
        from areal.resources.jsonpath import first

        return lambda row: first(sort_by, row)
    titles = {column.title.lower(): column for column in looked.columns}
    if sort_by.lower() == "age":
        return lambda row: row.get("metadata", {}).get("createdAt") or row.get("startedAt")
    if sort_by.lower() not in titles:
        from areal.resources.suggest import did_you_mean

        raise UsageFault(f'no column "{sort_by}"{did_you_mean(sort_by, titles)}', hint=f"one of {', '.join(titles)}")
    return titles[sort_by.lower()].cell


def _orderable(value: Any) -> tuple[int, Any]:
    """Absent first, then numbers, then text: values of different types never meet."""
    if value is None:
        return 0, 0
    if isinstance(value, int | float):
        return 1, value
    return 2, text_of(value)


def _watch(cli: Invocation, look: Callable[[], _Looked], sort_by: str | None) -> int:
    """The list, then each row again whenever what it shows changes, until Ctrl-C."""
    seen: dict[str, Any] = {}
    header = True
    while True:
        looked = look()
        rows = {looked.name(row): row for row in _sorted(looked, sort_by)}
        fresh = [row for name, row in rows.items() if seen.get(name) != _shape(cli, looked, row)]
        if fresh:
            _print_changes(cli, looked, fresh, header)
            header = False
        for name in seen.keys() - rows.keys():
            cli.say(f"{name} is gone")
        seen = {name: _shape(cli, looked, row) for name, row in rows.items()}
        time.sleep(_WATCH_S)


def _shape(cli: Invocation, looked: _Looked, row: Mapping[str, Any]) -> Any:
    """What makes a row new: all that is printed of it but its clock."""
    clocks = ("AGE", "UPTIME")
    wide = cli.format.kind != "table"
    return [text_of(c.cell(row)) for c in looked.columns if c.title not in clocks and (wide or not c.wide)]


def _print_changes(cli: Invocation, looked: _Looked, rows: Sequence[Mapping[str, Any]], header: bool) -> None:
    if cli.format.is_table:
        write(render_table(rows, looked.columns, wide=cli.format.kind == "wide", header=header))
    elif cli.format.kind == "name":
        write("\n".join(looked.name(row) for row in rows))
    else:
        write("\n".join(compact(row) for row in rows))
    import sys

    sys.stdout.flush()


def _origins(cli: Invocation, targets: Sequence[str], defaults: bool) -> int:
    from areal.state.objects import ObjectStore

    refs, _ = _asked(targets)
    if len(refs) != 1:
        raise UsageFault("--show-origin explains one object", hint="areal get model/NAME --show-origin")
    found = _require(cli, ObjectStore(cli.home).get(refs[0]), refs[0])
    rows = view.origin_rows(found, defaults=defaults)
    emit_rows(cli, rows, view.ORIGIN_COLUMNS, name=lambda row: str(row["path"]), empty="no field is set")
    return 0


def _kinds(cli: Invocation) -> int:
    rows = [{"kind": info.kind, "plural": info.plural, "short": list(info.short)} for info in KINDS.values()]
    emit_rows(cli, rows, _KIND_COLUMNS, name=lambda row: str(row["plural"]))
    return 0
