"""``areal get``, ``describe``, ``events`` and ``top``, which read state and /proc, or a remote gateway.

Pydantic models, YAML and the HTTP client are imported only for the flags that need them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import click

from areal.cli.objects import (
    ORIGIN_COLUMNS,
    PROCESS_COLUMNS,
    PROCESSES,
    columns_for,
    complete_targets,
    one_ref,
    parse_refs,
    parse_selector,
    stored,
    targets_argument,
)
from areal.cli.options import Invocation, Seconds, read_options, refuse_flags, watch_options
from areal.cli.output import (
    Column,
    Row,
    Table,
    clear,
    clock,
    compact,
    emit_one,
    emit_rows,
    field,
    is_live,
    print_rows,
    render_table,
    show_table,
    text_of,
    to_yaml,
    watch_table,
    write,
)
from areal.cli.remote import gateway, local_options
from areal.errors import UsageFault
from areal.numbers import age, size
from areal.reconcilers.home_view import (
    HomeView,
    description,
    document_name,
    document_of,
    event_row,
    manifest,
    origin_rows,
    process_row,
    weights_text,
)
from areal.resources.kinds import KINDS, Ref, resolve_kind
from areal.terminal import fancy, pause

if TYPE_CHECKING:
    from areal.client.gateway import GatewayClient
    from areal.reconcilers.usage import Sample

_KIND_COLUMNS = (field("NAME", "plural"), field("SHORT", "short"), field("KIND", "kind"))


@click.command()
@click.argument("targets", nargs=-1, metavar="[KINDS | KIND/NAME | processes]...", shell_complete=complete_targets)
@click.option("-l", "--selector", metavar="SELECTOR", help="a=b, a!=b, 'a in (x,y)', 'a notin (x,y)', a, !a.")
@click.option("-a", "--all", "all_", is_flag=True, help="Also jobs and processes that have ended.")
@click.option("-w", "--watch", is_flag=True, help="Keep printing changes.")
@click.option("--sort-by", metavar="COLUMN|JSONPATH", help="age, name, ... or {.metadata.generation}.")
@click.option("--show-origin", is_flag=True, help="The layer, actor and file that set each field.")
@click.option("--show-defaults", is_flag=True, help="Fill in the defaults.")
@read_options("manifest")
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
    of_list = {"all": all_, "watch": watch, "sort_by": sort_by}
    of_objects = {"selector": selector, "show_origin": show_origin, "show_defaults": show_defaults}
    if targets and targets[0] in ("kinds", *PROCESSES):
        refuse_flags(f"with {targets[0]}: only objects have specs and labels", of_objects)
    if targets == ("kinds",):
        refuse_flags("with kinds", of_list)
        rows = [{"kind": info.kind, "plural": info.plural, "short": list(info.short)} for info in KINDS.values()]
        emit_rows(cli, rows, _KIND_COLUMNS, name=lambda row: str(row["plural"]))
        return 0
    if watch and cli.format.kind == "manifest":
        raise UsageFault("-w prints status changes, and a manifest has no status", hint="-o json, or leave -w out")
    chosen = gateway(cli)
    if chosen is not None:
        from areal.cli.remote_view import get_remote

        refuse_flags("with a gateway, which has no manifests", of_objects)
        look: Callable[[], Table] = partial(get_remote, chosen, targets)
    elif targets and targets[0] in PROCESSES:
        look = partial(_processes, cli, targets[1:], all_)
    elif show_origin:
        refuse_flags("with --show-origin, which explains one object", of_list, {"selector": selector})
        refs, _ = _requested(targets)
        if len(refs) != 1:
            raise UsageFault("--show-origin explains one object", hint="areal get model/NAME --show-origin")
        rows = origin_rows(stored(cli.home, refs[0]), defaults=show_defaults)
        emit_rows(cli, rows, ORIGIN_COLUMNS, name=lambda row: str(row["path"]), empty="no field is set")
        return 0
    else:
        look = partial(_objects, cli, targets, selector, show_defaults, None if all_ else set())
    if watch and is_live(cli):
        from areal.cli.live_terminal import ViewTable, show_live

        tables = [ViewTable("Objects", look)]
        tables += [ViewTable("Processes", _UsageMeter(cli, ()).table, 2.0)] if chosen is None else []
        describe = _live_description(cli, chosen)
        return show_live(cli, tables, describe, sort_by=sort_by, read=look(), has_logs=chosen is None)
    return watch_table(cli, look, sort_by) if watch else show_table(cli, look(), sort_by)


def _live_description(cli: Invocation, chosen: GatewayClient | None) -> Callable[[Ref], str]:
    return lambda ref: _described(cli, chosen, ref)[1]()


def _objects(
    cli: Invocation, targets: Sequence[str], selector: str | None, defaults: bool, listed: set[str] | None
) -> Table:
    """Return the objects to list. ``listed``: the objects that earlier calls listed; they stay listed after they end,
    and other ended objects are left out. None: all are listed."""
    home = HomeView(cli.home)
    refs, kinds = _requested(targets)
    unreadable: list[tuple[str, str]] = []
    ended: set[str] = set()
    if refs:
        found = [stored(cli.home, ref) for ref in refs]
    else:
        unreadable = [(str(path), reason) for path, reason in home.objects.unreadable]
        found = [item for item in home.objects if item.kind in kinds]
        ended = home.ended() - listed if listed is not None else ended
    if selector is not None:
        matches = parse_selector(selector)
        found = [item for item in found if matches(item.labels)]
    shown = [item for item in found if str(item.ref) not in ended]
    if listed is not None:
        listed.update(str(item.ref) for item in shown)
    note = _note(len(found) - len(shown))
    if not found and home.objects:
        note = f"no labels match {selector}" if selector is not None else f"there is no {' or '.join(kinds)}"
    if cli.format.kind == "manifest":
        return Table([], [], str, manifests=[manifest(item) for item in shown], unreadable=unreadable, note=note)
    seen = home.statuses(shown, probe=cli.format.kind != "name")  # -o name prints no status
    rows = [document_of(item, seen[str(item.ref)], defaults=defaults) for item in shown]
    columns = columns_for([item.kind for item in shown] if refs else kinds)
    return Table(rows, columns, document_name, single=len(refs) == 1, unreadable=unreadable, note=note)


def _requested(targets: Sequence[str]) -> tuple[list[Ref], list[str]]:
    """Return (named objects, kinds); one of them is empty."""
    if not targets or tuple(targets) == ("all",):
        return [], list(KINDS)
    if len(targets) == 1 and "/" not in targets[0]:
        return [], [resolve_kind(word) for word in targets[0].split(",") if word]
    return list(dict.fromkeys(parse_refs(targets))), []


def _processes(cli: Invocation, targets: Sequence[str], all_: bool) -> Table:
    home = HomeView(cli.home)
    refs = [stored(cli.home, ref).ref for ref in parse_refs(targets)]
    states = home.states([each for ref in refs for each in home.family(ref)] if refs else None)
    ended = set() if refs or all_ or not states else home.ended()
    hidden = set() if all_ else home.gone(states)
    shown = [s for s in states if s.pid or (s.spec.owner not in ended and s.spec.uid not in hidden)]
    rows = [process_row(state) for state in shown]
    note = _note(len(states) - len(shown))
    return Table(rows, PROCESS_COLUMNS, lambda row: f"process/{row['uid']}", note=note)


def _note(hidden: int) -> str:
    return f"not listed: {hidden} that ended; --all lists them" if hidden else ""


_CONDITIONS = (
    field("TYPE", "type"),
    field("STATUS", "status", state=True),
    field("REASON", "reason"),
    field("SINCE", "lastTransitionTime"),
    field("MESSAGE", "message"),
)
_RELATED = (
    field("NAME", "ref"),
    field("READY", "ready"),
    field("STATUS", "phase", state=True),
    field("MESSAGE", "message"),
)
_EVENT_COLUMNS = (
    Column("WHEN", lambda row: clock(row["at"])),
    field("TYPE", "type", state=True),
    field("REASON", "reason"),
    field("OBJECT", "ref"),
    Column("MESSAGE", lambda row: f"{row['message']} (x{row['count']})" if row["count"] > 1 else row["message"]),
    field("WHO", "actor", wide=True),
)


@click.command()
@targets_argument
@read_options()
def describe(cli: Invocation, targets: tuple[str, ...]) -> int:
    """Show an object: its spec with the origin of each field, conditions, processes with last exits, last events."""
    chosen = gateway(cli)
    document, page = _described(cli, chosen, one_ref(targets))
    emit_one(cli, document, name=document_name(document), text=page)
    return 0


def _described(cli: Invocation, chosen: GatewayClient | None, ref: Ref) -> tuple[dict[str, object], Callable[[], str]]:
    """Return everything known about an object, of this home or behind a gateway, and the function that renders it as a
    page. Raises NotFound."""
    if chosen is not None:
        from areal.cli.remote_view import describe_remote

        document = describe_remote(chosen, ref)
        return document, lambda: to_yaml([document])
    found = description(cli.home, ref)
    return found, lambda: _page(found)


def _page(document: Mapping[str, Any]) -> str:
    metadata, status = document["metadata"], document["status"]
    head = {
        "Name": metadata["name"],
        "Kind": document["kind"],
        "Status": f"{status['phase']} ({status['ready']})",
        "Message": status.get("message"),
        "Address": status.get("address"),
        "Weights": weights_text(status),
        "Generation": f"{metadata['generation']} (revision {metadata['revision']})",
        "Created": metadata["createdAt"],
        "Owner": metadata.get("owner"),
        "Set": metadata.get("set"),
        "Labels": metadata["labels"],
        "Annotations": metadata["annotations"],
        "Depends on": metadata["dependsOn"],
    }
    sections = [
        "\n".join(f"{title + ':':<13}{text_of(value)}" for title, value in head.items() if value),
        _section("Spec", document["origins"], ORIGIN_COLUMNS),
        _section("Conditions", status.get("conditions", []), _CONDITIONS),
        _section("Objects", document["related"], _RELATED),
        _section("Processes", document["processes"], PROCESS_COLUMNS),
        *[_waiting(process) for process in document["processes"] if process["state"] == "queued"],
        *[_last_exit(process) for process in document["processes"] if process["lastExit"]],
        _section("Events", document["events"], tuple(c for c in _EVENT_COLUMNS if c.title != "OBJECT")),
    ]
    return "\n\n".join(section for section in sections if section)


def _section(title: str, rows: Sequence[Mapping[str, object]], columns: Sequence[Column]) -> str:
    if not rows:
        return f"{title}: none" if title != "Objects" else ""
    table = render_table(rows, columns, indent=2)
    return f"{title}:\n" + "\n".join(f"  {line}" for line in table.splitlines())


def _waiting(process: Mapping[str, object]) -> str:
    """Describe a queued process, with the scheduler's reason."""
    who = f"{process['owner']} {process['component']}/{process['replica']}"
    since = f" since {process['queuedAt']}" if process.get("queuedAt") else ""
    return f"{who} waits for a node{since}: {process['reason'] or 'no reason is given'}"


def _last_exit(process: Mapping[str, Any]) -> str:
    last = process["lastExit"]
    lines = [
        f"Last exit of {process['owner']} {process['component']}/{process['replica']}: {last['reason']}, {last['at']}"
    ]
    if process.get("firstException"):
        lines += [f"  | {line}" for line in process["firstException"].splitlines()]
        lines.append("  last lines:")
    lines += [f"  | {line}" for line in process.get("lastLines", [])]
    return "\n".join(lines)


_EVENTS_POLL_S = 0.5


@click.command()
@click.argument("targets", nargs=-1, metavar="[KIND/NAME]...", shell_complete=complete_targets)
@click.option("-w", "--watch", is_flag=True, help="Keep printing new events.")
@click.option(
    "-n", "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Number of events, the newest."
)
@click.option("--since", type=Seconds(), metavar="TIME", help="Only of the last TIME.")
@click.option("--type", "type_", type=click.Choice(["Normal", "Warning"]), help="Only this type.")
@local_options
def events(
    cli: Invocation, targets: tuple[str, ...], watch: bool, limit: int, since: float | None, type_: str | None
) -> int:
    """List events of objects, newest last. A deleted object keeps its last events."""
    refs = parse_refs(targets)
    rows = _read(cli, refs, type_)
    recent = [row for row in rows if since is None or time.time() - row["at"] <= since][-limit:]
    if not watch:
        emit_rows(cli, recent, _EVENT_COLUMNS, name=_event_name, empty="nothing happened yet")
        return 0
    _print(cli, recent, header=True)
    seen = {_identity(row) for row in rows}
    while True:
        pause(_EVENTS_POLL_S)
        fresh = [row for row in _read(cli, refs, type_) if _identity(row) not in seen]
        seen.update(_identity(row) for row in fresh)
        _print(cli, fresh, header=False)


def _read(cli: Invocation, refs: Sequence[Ref], type_: str | None) -> list[dict[str, Any]]:
    from areal.state.events import EventLog

    log = EventLog(cli.home)
    found = [event for ref in refs for event in log.read(ref)] if refs else log.read()
    found.sort(key=lambda event: event.at)
    return [event_row(event) for event in found if type_ is None or event.type == type_]


def _event_name(row: Row) -> str:
    return f"{row['ref']} {row['reason']}"


def _identity(row: Row) -> tuple[object, ...]:
    return row["ref"], row["reason"], row["message"], row["at"], row["count"]


def _print(cli: Invocation, rows: Sequence[Row], *, header: bool) -> None:
    if rows or header:
        print_rows(cli, rows, _EVENT_COLUMNS, _event_name, header=header)


_UNKNOWN = "Unknown"
_SAMPLE_S = 0.5

_USAGE_COLUMNS = (
    field("OWNER", "owner"),
    field("PROCESS", "process"),
    field("PID", "pid", right=True),
    Column("CPU", lambda row: _cell(row, "cpuPercent", "{:.0f}%".format), right=True, order=itemgetter("cpuPercent")),
    Column("MEMORY", lambda row: _cell(row, "memoryBytes", size), right=True, order=itemgetter("memoryBytes")),
    Column("GPU", lambda row: [_gpu_cell(row, gpu) for gpu in row["gpus"]]),
    field("TOKENS/S", "tokensPerSecond", right=True),
    field("STATE", "state", state=True),
    Column("UPTIME", lambda row: age(row["uptimeSeconds"]), right=True, order=itemgetter("uptimeSeconds")),
    field("PROCESSES", "processes", wide=True, right=True),
    field("NODE", "node", wide=True),
)


def _cell(row: Mapping[str, Any], name: str, form: Callable[[Any], str | None]) -> str | None:
    if row[name] is None:
        return _UNKNOWN if row["node"] else None
    return form(row[name])


def _gpu_cell(row: Mapping[str, object], gpu: Mapping[str, object]) -> str:
    name = gpu["uuid"] if gpu["index"] is None else gpu["index"]
    return f"{name}:{_cell({**gpu, 'node': row['node']}, 'usedBytes', size) or '-'}"


class _UsageMeter:
    """CPU, memory, GPU and tokens per second of each process, since the last read; the first one takes ``seconds``.

    CPU and memory are sums over the process's session (engines fork). CPU needs two samples. Processes on nodes of a
    cluster cannot be measured from here: their values are Unknown.
    """

    def __init__(
        self, cli: Invocation, targets: tuple[str, ...], sort_by: str = "name", seconds: float = _SAMPLE_S
    ) -> None:
        self._cli = cli
        self._key = {"cpu": "cpuPercent", "memory": "memoryBytes"}.get(sort_by)
        self._refs = parse_refs(targets)
        self._seconds = seconds
        self._before: Sample | None = None

    def read(self) -> list[dict[str, Any]]:
        from areal.reconcilers.usage import MEASURED, figures, sample

        home = HomeView(self._cli.home)
        refs = [each for ref in self._refs for each in home.family(ref)] if self._refs else None
        states = [state for state in home.states(refs) if state.phase in MEASURED]
        before = self._before or sample(home, states)
        if self._before is None:
            time.sleep(self._seconds)
        self._before = sample(home, states)
        rows = figures(states, before, self._before)
        if (key := self._key) is not None:
            rows.sort(key=lambda row: -(row[key] or 0))
        return rows

    def table(self) -> Table:
        return Table(self.read(), _USAGE_COLUMNS, "{owner} {process}".format_map)


@click.command()
@click.argument("targets", nargs=-1, metavar="[KIND/NAME]...", shell_complete=complete_targets)
@watch_options()
@click.option(
    "--sort-by",
    type=click.Choice(["cpu", "memory", "name"]),
    default="name",
    show_default=True,
    help="Order: the largest first, or by name.",
)
@local_options
def top(cli: Invocation, targets: tuple[str, ...], watch: bool, interval: float, sort_by: str) -> int:
    """Show CPU, memory, GPU and tokens a second of each process; of a service, its models' too."""
    if watch and is_live(cli):
        from areal.cli.live_terminal import ViewTable, show_live

        processes = ViewTable("Processes", _UsageMeter(cli, targets, sort_by).table, max(1.0, interval))
        objects = ViewTable("Objects", partial(_objects, cli, (), None, False, set()))
        return show_live(cli, [processes, objects], _live_description(cli, None))
    while True:
        rows = _UsageMeter(cli, targets, sort_by, max(_SAMPLE_S, interval) if watch else _SAMPLE_S).read()
        if watch and cli.format.kind in ("json", "jsonl"):
            write(compact(rows))
        else:
            if watch and cli.format.is_table and fancy(sys.stdout):
                clear()
            elif watch and cli.format.kind == "yaml":
                write("---")
            emit_rows(cli, rows, _USAGE_COLUMNS, name="{owner} {process}".format_map, empty="no process runs")
        if not watch:
            return 0
        sys.stdout.flush()
