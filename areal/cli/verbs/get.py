"""``areal get``: kinds, objects, processes. Imports no model, no YAML, no HTTP client unless a flag needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from areal.cli import listing, options, view
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.listing import Listing
from areal.cli.output.emit import emit_rows
from areal.cli.output.table import field
from areal.cli.remote import gateway
from areal.cli.targets import complete_targets, missing, parse_refs
from areal.errors import UsageFault
from areal.resources.kinds import KINDS, Ref, resolve_kind

if TYPE_CHECKING:
    from areal.runtime.backends.base import RunState
    from areal.state.records import StoredObject

_PROCESSES = ("processes", "process", "proc", "ps")
_KIND_COLUMNS = (
    field("NAME", "plural"),
    field("SHORT", "short"),
    field("KIND", "kind"),
)


@click.command()
@click.argument("targets", nargs=-1, metavar="[KINDS | KIND/NAME | processes]...", shell_complete=complete_targets)
@click.option("-l", "--selector", metavar="SELECTOR", help="a=b, a!=b, 'a in (x,y)', 'a notin (x,y)', a, !a.")
@click.option("-a", "--all", "all_", is_flag=True, help="Also jobs that have ended, with what they brought.")
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
    all_: bool,
    watch: bool,
    sort_by: str | None,
    show_origin: bool,
    show_defaults: bool,
) -> int:
    """List objects of KINDS (comma-separated; none: all), single objects, `processes`, or `kinds`. Jobs that have
    succeeded or failed are listed with --all, or by name.

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

        look: Callable[[], Listing] = partial(get_remote, chosen, targets)
    elif targets and targets[0] in _PROCESSES:
        look = partial(_processes, cli, targets[1:], all_)
    elif show_origin:
        return _origins(cli, targets, show_defaults)
    else:
        look = partial(_objects, cli, targets, selector, show_defaults, None if all_ else set())
    return listing.watch(cli, look, sort_by) if watch else listing.show(cli, look(), sort_by)


def _objects(
    cli: Invocation, targets: Sequence[str], selector: str | None, defaults: bool, shown: set[str] | None
) -> Listing:
    """``shown``: what was listed before, and stays so though its job has ended since; None: everything is listed."""
    from areal.reconcilers.status import statuses
    from areal.state.objects import ObjectStore

    store = ObjectStore(cli.home)
    refs, kinds = _asked(targets)
    unreadable: list[tuple[str, str]] = []
    ended: set[str] = set()
    if refs:
        found = [_require(cli, store.get(ref), ref) for ref in refs]
    else:
        everything = store.list()
        unreadable = [(str(path), reason) for path, reason in everything.unreadable]
        found = [item for item in everything if item.kind in kinds]
        ended = _ended(cli, everything) - shown if shown is not None else ended
    if selector is not None:
        from areal.cli.selectors import parse_selector

        matches = parse_selector(selector)
        found = [item for item in found if matches(item.labels)]
    hidden = len([item for item in found if str(item.ref) in ended])
    found = [item for item in found if str(item.ref) not in ended]
    if shown is not None:
        shown.update(str(item.ref) for item in found)
    if cli.format.kind == "manifest":
        return Listing(
            [], [], str, manifests=[view.manifest(item) for item in found], unreadable=unreadable, note=_note(hidden)
        )
    named_only = cli.format.kind == "name"  # then nobody reads a status
    runs = view.read_runs(cli.home) if found and not named_only else {}
    seen = statuses(cli.home, found, runs)
    rows = [view.document_of(item, seen[str(item.ref)], defaults=defaults) for item in found]
    shown_kinds = kinds if len(kinds) == 1 else [item.kind for item in found] or list(KINDS)
    columns = view.columns_for(shown_kinds if len(kinds) == 1 or refs else KINDS)
    return Listing(rows, columns, view.document_name, single=len(refs) == 1, unreadable=unreadable, note=_note(hidden))


def _ended(cli: Invocation, objects: Sequence[StoredObject]) -> set[str]:
    """Jobs among ``objects`` that have succeeded or failed, and what they brought."""
    jobs = [item for item in objects if item.kind == "TrainJob"]
    if not jobs:
        return set()
    from areal.cli.jobs import standing_of

    runs = view.read_runs(cli.home)
    ended = {str(item.ref) for item in jobs if standing_of(item, view.runs_of(runs, [item.ref])).finished}
    while more := {str(item.ref) for item in objects if item.owner in ended} - ended:
        ended |= more
    return ended


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


def _processes(cli: Invocation, targets: Sequence[str], all_: bool) -> Listing:
    from areal.state.objects import ObjectStore

    states: list[RunState] = sorted(view.read_runs(cli.home).values(), key=view.run_order)
    objects = list(ObjectStore(cli.home).list()) if states or targets else []
    if targets:
        known = {item.ref for item in objects}
        refs = parse_refs(targets)
        gone = next((ref for ref in refs if ref not in known), None)
        if gone is not None:
            raise missing(cli.home, gone)
        wanted = {str(ref) for asked in refs for ref in view.family(objects, asked)}
        states = [state for state in states if state.spec.owner in wanted]
    ended = set() if targets or all_ else _ended(cli, objects)
    shown = [state for state in states if state.pid or state.spec.owner not in ended]
    rows = [view.process_row(state) for state in shown]
    return Listing(rows, view.PROCESS_COLUMNS, view.process_name, note=_note(len(states) - len(shown)))


def _note(hidden: int) -> str:
    return f"not listed: {hidden} of jobs that have ended; --all lists them" if hidden else ""


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
