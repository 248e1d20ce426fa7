"""``areal get``, ``describe``, ``events`` and ``top``: state and /proc, and a gateway elsewhere.

A model, YAML or an HTTP client is imported for the flags that need it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from areal.cli.objects import (
    ORIGIN_COLUMNS,
    PROCESS_COLUMNS,
    HomeView,
    columns_for,
    complete_targets,
    document_name,
    document_of,
    manifest,
    one_ref,
    origin_rows,
    parse_refs,
    parse_selector,
    process_row,
    replaced,
    service_of,
    stored,
    targets_argument,
)
from areal.cli.options import Invocation, Seconds, read_options, watch_options
from areal.cli.output import (
    Column,
    Row,
    Table,
    age,
    clear,
    clock,
    compact,
    emit_one,
    emit_rows,
    field,
    iso,
    render_table,
    show_table,
    size,
    text_of,
    to_yaml,
    watch_table,
    write,
)
from areal.cli.remote import gateway, local_options, service_key
from areal.errors import ArealError, UsageFault
from areal.resources.kinds import KINDS, Ref, resolve_kind
from areal.terminal import fancy

if TYPE_CHECKING:
    from areal.runtime.backends.base import RunState
    from areal.state.events import Event
    from areal.state.records import StoredObject


_PROCESSES = ("processes", "process", "proc", "ps")
_KIND_COLUMNS = (field("NAME", "plural"), field("SHORT", "short"), field("KIND", "kind"))


@click.command()
@click.argument("targets", nargs=-1, metavar="[KINDS | KIND/NAME | processes]...", shell_complete=complete_targets)
@click.option("-l", "--selector", metavar="SELECTOR", help="a=b, a!=b, 'a in (x,y)', 'a notin (x,y)', a, !a.")
@click.option("-a", "--all", "all_", is_flag=True, help="Also jobs and processes that have ended.")
@click.option("-w", "--watch", is_flag=True, help="Go on, printing changes.")
@click.option("--sort-by", metavar="COLUMN|JSONPATH", help="age, name, ... or {.metadata.generation}.")
@click.option("--show-origin", is_flag=True, help="Which layer set each field, who, from which file.")
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
    if targets == ("kinds",):
        rows = [{"kind": info.kind, "plural": info.plural, "short": list(info.short)} for info in KINDS.values()]
        emit_rows(cli, rows, _KIND_COLUMNS, name=lambda row: str(row["plural"]))
        return 0
    chosen = gateway(cli)
    if chosen is not None:
        from areal.cli.remote_view import get_remote

        look: Callable[[], Table] = partial(get_remote, chosen, targets)
    elif targets and targets[0] in _PROCESSES:
        look = partial(_processes, cli, targets[1:], all_)
    elif show_origin:
        return _origins(cli, targets, show_defaults)
    else:
        look = partial(_objects, cli, targets, selector, show_defaults, None if all_ else set())
    return watch_table(cli, look, sort_by) if watch else show_table(cli, look(), sort_by)


def _objects(
    cli: Invocation, targets: Sequence[str], selector: str | None, defaults: bool, listed: set[str] | None
) -> Table:
    """``listed``: the objects that were listed before, and stay so though their job has ended since; None: all are
    listed."""
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
    if cli.format.kind == "manifest":
        return Table([], [], str, manifests=[manifest(item) for item in shown], unreadable=unreadable, note=note)
    seen = home.statuses(shown, probe=cli.format.kind != "name")  # then nobody reads a status
    rows = [document_of(item, seen[str(item.ref)], defaults=defaults) for item in shown]
    columns = columns_for([item.kind for item in shown] if refs else kinds)
    return Table(rows, columns, document_name, single=len(refs) == 1, unreadable=unreadable, note=note)


def _requested(targets: Sequence[str]) -> tuple[list[Ref], list[str]]:
    """The single objects that are named, or the kinds."""
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
    hidden = set() if all_ else replaced(states)
    shown = [s for s in states if s.pid or (s.spec.owner not in ended and s.spec.uid not in hidden)]
    rows = [process_row(state) for state in shown]
    note = _note(len(states) - len(shown))
    return Table(rows, PROCESS_COLUMNS, lambda row: f"process/{row['uid']}", note=note)


def _note(hidden: int) -> str:
    return f"not listed: {hidden} that ended; --all lists them" if hidden else ""


def _origins(cli: Invocation, targets: Sequence[str], defaults: bool) -> int:
    refs, _ = _requested(targets)
    if len(refs) != 1:
        raise UsageFault("--show-origin explains one object", hint="areal get model/NAME --show-origin")
    rows = origin_rows(stored(cli.home, refs[0]), defaults=defaults)
    emit_rows(cli, rows, ORIGIN_COLUMNS, name=lambda row: str(row["path"]), empty="no field is set")
    return 0


# -- describe

_EVENTS = 10
_LOG_LINES = 8

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
    """One object: its spec and who set each field, conditions, processes with their last exit, last events."""
    chosen = gateway(cli)
    ref = one_ref(targets)
    if chosen is not None:
        from areal.cli.remote_view import describe_remote

        document = describe_remote(chosen, ref)
    else:
        document = _describe(cli, stored(cli.home, ref))
    page = _page if chosen is None else lambda document: to_yaml([document])
    emit_one(cli, document, name=document_name(document), text=lambda: page(document))
    return 0


def _describe(cli: Invocation, found: StoredObject) -> dict[str, Any]:
    from areal.state.events import EventLog

    home = HomeView(cli.home)
    refs = home.family(found.ref)
    related = [item for item in home.objects if item.ref in refs[1:]]
    seen = home.statuses([found, *related])
    document = document_of(found, seen[str(found.ref)])
    document["origins"] = origin_rows(found)
    document["processes"] = [_process(cli, state) for state in home.states(refs)]
    document["related"] = [
        {"ref": status.ref, "phase": status.phase, "ready": status.ready, "message": status.message}
        for status in (seen[str(item.ref)] for item in related)
    ]
    document["events"] = [_event_row(event) for event in EventLog(cli.home).read(found.ref, _EVENTS)]
    return document


def _process(cli: Invocation, state: RunState) -> dict[str, Any]:
    """A process; where it failed, also its first exception and last lines."""
    row = process_row(state)
    if state.last_exit is not None and state.last_exit.reason != "stopped":
        from areal.runtime.backends import Backends
        from areal.runtime.logs import first_exception, tail

        paths = Backends(cli.home.root).log_paths(state.spec.uid)
        row["firstException"] = first_exception(paths)
        row["lastLines"] = tail(paths, _LOG_LINES)
    return row


def _page(document: Mapping[str, Any]) -> str:
    metadata, status = document["metadata"], document["status"]
    head = {
        "Name": metadata["name"],
        "Kind": document["kind"],
        "Status": f"{status['phase']} ({status['ready']})",
        "Message": status.get("message"),
        "Address": status.get("address"),
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
        *[_last_exit(process) for process in document["processes"] if process["lastExit"]],
        _section("Events", document["events"], tuple(c for c in _EVENT_COLUMNS if c.title != "OBJECT")),
    ]
    return "\n\n".join(section for section in sections if section)


def _section(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> str:
    if not rows:
        return f"{title}: none" if title != "Objects" else ""
    table = render_table(rows, columns, indent=2)
    return f"{title}:\n" + "\n".join(f"  {line}" for line in table.splitlines())


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


# -- events

_EVENTS_POLL_S = 0.5


@click.command()
@click.argument("targets", nargs=-1, metavar="[KIND/NAME]...", shell_complete=complete_targets)
@click.option("-w", "--watch", is_flag=True, help="Go on, printing new events.")
@click.option("-n", "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="The last so many.")
@click.option("--since", type=Seconds(), metavar="TIME", help="Only of the last TIME.")
@click.option("--type", "type_", type=click.Choice(["Normal", "Warning"]), help="Only this type.")
@local_options
def events(
    cli: Invocation, targets: tuple[str, ...], watch: bool, limit: int, since: float | None, type_: str | None
) -> int:
    """Events of objects, newest last. A deleted object keeps its last events."""
    refs = parse_refs(targets)
    rows = _read(cli, refs, type_)
    recent = [row for row in rows if since is None or time.time() - row["at"] <= since][-limit:]
    if not watch:
        emit_rows(cli, recent, _EVENT_COLUMNS, name=_event_name, empty="nothing happened yet")
        return 0
    _print(cli, recent, header=True)
    seen = {_identity(row) for row in rows}
    while True:
        time.sleep(_EVENTS_POLL_S)
        fresh = [row for row in _read(cli, refs, type_) if _identity(row) not in seen]
        seen.update(_identity(row) for row in fresh)
        _print(cli, fresh, header=False)


def _read(cli: Invocation, refs: Sequence[Ref], type_: str | None) -> list[dict[str, Any]]:
    from areal.state.events import EventLog

    log = EventLog(cli.home)
    found = [event for ref in refs for event in log.read(ref)] if refs else log.read()
    found.sort(key=lambda event: event.at)
    return [_event_row(event) for event in found if type_ is None or event.type == type_]


def _event_row(event: Event) -> dict[str, Any]:
    return {
        "ref": event.ref,
        "type": event.type,
        "reason": event.reason,
        "message": event.message,
        "actor": event.actor,
        "at": event.at,
        "time": iso(event.at),
        "count": event.count,
        "firstAt": event.first_at,
    }


def _event_name(row: Row) -> str:
    return f"{row['ref']} {row['reason']}"


def _identity(row: Row) -> tuple[object, ...]:
    return row["ref"], row["reason"], row["message"], row["at"], row["count"]


def _print(cli: Invocation, rows: Sequence[Row], *, header: bool) -> None:
    if cli.format.is_table:
        if rows or header:
            write(render_table(rows, _EVENT_COLUMNS, wide=cli.format.kind == "wide", header=header))
    else:
        for row in rows:
            write(_event_name(row) if cli.format.kind == "name" else compact(row))
    sys.stdout.flush()


# -- top

_SAMPLE_S = 0.5
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

_TOP_COLUMNS = (
    field("OWNER", "owner"),
    field("PROCESS", "process"),
    field("PID", "pid", right=True),
    Column("CPU", lambda row: None if row["cpuPercent"] is None else f"{row['cpuPercent']:.0f}%", right=True),
    Column("MEMORY", lambda row: size(row["memoryBytes"]), right=True),
    Column("GPU", lambda row: [f"{gpu['index']}:{size(gpu['usedBytes'])}" for gpu in row["gpus"]]),
    field("TOKENS/S", "tokensPerSecond", right=True),
    field("STATE", "state", state=True),
    Column("UPTIME", lambda row: age(row["uptimeSeconds"]), right=True),
    field("PROCESSES", "processes", wide=True, right=True),
)


class Usage(NamedTuple):
    """The usage of one session at one moment."""

    cpu_s: float
    memory_bytes: int
    processes: int


@click.command()
@click.argument("targets", nargs=-1, metavar="[KIND/NAME]...", shell_complete=complete_targets)
@watch_options()
@click.option(
    "--sort-by",
    type=click.Choice(["cpu", "memory", "name"]),
    default="name",
    show_default=True,
    help="What comes first: the largest, or by name.",
)
@local_options
def top(cli: Invocation, targets: tuple[str, ...], watch: bool, interval: float, sort_by: str) -> int:
    """CPU, memory, GPU and tokens a second of each process; of a service, its models' too."""
    while True:
        rows = _measure(cli, targets, max(_SAMPLE_S, interval) if watch else _SAMPLE_S)
        if sort_by != "name":
            key = {"cpu": "cpuPercent", "memory": "memoryBytes"}[sort_by]
            rows.sort(key=lambda row: -(row[key] or 0))
        if watch and not cli.format.is_table:
            write(compact(rows))
        else:
            if watch and fancy(sys.stdout):
                clear()
            emit_rows(cli, rows, _TOP_COLUMNS, name="{owner} {process}".format_map, empty="no process runs")
        if not watch:
            return 0
        sys.stdout.flush()


def _measure(cli: Invocation, targets: tuple[str, ...], seconds: float) -> list[dict[str, Any]]:
    home = HomeView(cli.home)
    refs = [each for ref in parse_refs(targets) for each in home.family(ref)] if targets else None
    states = [state for state in home.states(refs) if state.phase in ("starting", "running", "backoff")]
    usage_before, tokens_before, at = _usage(), _tokens(home, states), time.monotonic()
    time.sleep(seconds)
    usage, tokens, took = _usage(), _tokens(home, states), time.monotonic() - at
    gpus = _gpus(states)
    rows = []
    for state in states:
        row, uid = process_row(state), state.spec.uid
        session = 0 if state.node else state.shim_pid or 0  # of this machine's /proc
        before, after = usage_before.get(session), usage.get(session)
        cpu_s = max(0.0, after.cpu_s - before.cpu_s) if before is not None and after is not None else None
        generated = tokens[uid] - tokens_before[uid] if uid in tokens and uid in tokens_before else -1.0
        rows.append(
            {
                "owner": row["owner"],
                "process": f"{row['component']}/{row['replica']}",
                "pid": row["pid"],
                "state": row["state"],
                "uptimeSeconds": row["uptimeSeconds"],
                "cpuPercent": None if cpu_s is None else round(100 * cpu_s / took, 1),
                "memoryBytes": after.memory_bytes if after else None,
                "processes": after.processes if after else None,
                "gpus": [gpus.get(uuid, {"uuid": uuid, "index": None, "usedBytes": None}) for uuid in state.spec.gpus],
                "tokensPerSecond": None if generated < 0 else round(generated / took, 1),
            }
        )
    return rows


def _usage() -> dict[int, Usage]:
    """CPU time and resident memory of every visible process, by session id."""
    found: dict[int, Usage] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        session = int(fields[3])
        so_far = found.get(session, Usage(0.0, 0, 0))
        found[session] = Usage(
            so_far.cpu_s + (int(fields[11]) + int(fields[12])) / _TICKS,
            so_far.memory_bytes + int(fields[21]) * _PAGE,
            so_far.processes + 1,
        )
    return found


def _gpus(states: Sequence[RunState]) -> dict[str, Mapping[str, Any]]:
    if not any(state.spec.gpus for state in states):
        return {}
    from areal.runtime.gpus import list_gpus

    return {
        gpu.uuid: {"uuid": gpu.uuid, "index": gpu.index, "usedBytes": gpu.used_bytes, "totalBytes": gpu.total_bytes}
        for gpu in list_gpus().gpus
    }


# -- token counters: our engine's statistics, other engines' Prometheus pages

_TIMEOUT_S = 1.0
_COUNTERS = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")


def _tokens(home: HomeView, states: Sequence[RunState]) -> dict[str, float]:
    """Tokens generated since the engine started, by uid. An engine without a readable counter is left out."""
    from concurrent.futures import ThreadPoolExecutor

    engines = [state for state in states if state.spec.component == "engine" and state.spec.url]
    if not engines:
        return {}
    services = {str(item.ref): service_of(item) for item in home.objects}
    keys: dict[str, str] = {}  # admin keys, where they can be read: other counters stay closed to us
    for owner in {state.spec.owner for state in engines}:
        if (service := services.get(owner)) is not None:
            with contextlib.suppress(ArealError):
                keys[owner] = service_key(home.home, service)
    with ThreadPoolExecutor(min(16, len(engines)), thread_name_prefix="counter") as pool:
        found = pool.map(lambda state: _generated_tokens(str(state.spec.url), keys.get(state.spec.owner)), engines)
        return {state.spec.uid: count for state, count in zip(engines, found, strict=True) if count is not None}


def _generated_tokens(url: str, key: str | None) -> float | None:
    from areal.client.http import AdminClient
    from areal.client.prometheus import parse

    client = AdminClient(url, key, timeout_s=_TIMEOUT_S)
    try:
        status, document = client.get("/stats")
        if status == 200 and isinstance(document, dict) and "generated_tokens" in document:
            return float(document["generated_tokens"])
        status, text = client.get("/metrics")
    except OSError:
        return None
    page = parse(text) if status == 200 and isinstance(text, str) else parse("")
    return next((total for total in map(page.total, _COUNTERS) if total is not None), None)
