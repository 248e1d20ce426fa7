"""``areal top``: CPU, memory, GPU and tokens a second of each process.

CPU and memory are summed over the process's whole session (engines fork). CPU needs two looks, half a second apart.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from areal.cli import options, view
from areal.cli.invocation import Invocation, fancy, pass_invocation
from areal.cli.options import Seconds
from areal.cli.output.emit import clear, compact, emit_rows, write
from areal.cli.output.table import Column, field
from areal.cli.output.units import age, size
from areal.cli.remote import not_remote
from areal.cli.targets import complete_targets, parse_refs

if TYPE_CHECKING:
    from areal.runtime.backends.base import RunState

_SAMPLE_S = 0.5
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

_COLUMNS = (
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
    """Of one session at one moment."""

    cpu_s: float
    memory_bytes: int
    processes: int


@click.command()
@click.argument("targets", nargs=-1, metavar="[KIND/NAME]...", shell_complete=complete_targets)
@click.option("-w", "--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.option("--interval", type=Seconds(), default="2s", show_default=True, metavar="TIME", help="Between refreshes.")
@click.option(
    "--sort-by",
    type=click.Choice(["cpu", "memory", "name"]),
    default="name",
    show_default=True,
    help="What comes first: the largest, or by name.",
)
@options.remote
@options.output()
@options.common
@pass_invocation
def top(cli: Invocation, targets: tuple[str, ...], watch: bool, interval: float, sort_by: str) -> int:
    """CPU, memory, GPU and tokens a second of each process; of a service, its models' too."""
    not_remote(cli, "top")
    while True:
        rows = _measure(cli, targets, max(_SAMPLE_S, interval) if watch else _SAMPLE_S)
        if sort_by != "name":
            key = {"cpu": "cpuPercent", "memory": "memoryBytes"}[sort_by]
            rows.sort(key=lambda row: -(row[key] or 0))
        _show(cli, rows, watch)
        if not watch:
            return 0


def _show(cli: Invocation, rows: Sequence[Mapping[str, Any]], watch: bool) -> None:
    if watch and cli.format.is_table and fancy(sys.stdout):
        clear()
    if watch and not cli.format.is_table:
        write(compact(list(rows)))
    else:
        emit_rows(cli, rows, _COLUMNS, name=lambda row: f"{row['owner']} {row['process']}", empty="no process runs")
    sys.stdout.flush()


def _measure(cli: Invocation, targets: tuple[str, ...], seconds: float) -> list[dict[str, Any]]:
    states = _states(cli, targets)
    before, counted_before, at = _usage(), _tokens(cli, states), time.monotonic()
    time.sleep(seconds)
    after, counted_after, took = _usage(), _tokens(cli, states), time.monotonic() - at
    gpus = _gpus(states)
    return [
        _row(
            state,
            before.get(state.shim_pid or 0),
            after.get(state.shim_pid or 0),
            _rate(counted_before.get(state.spec.uid), counted_after.get(state.spec.uid), took),
            gpus,
            took,
        )
        for state in states
    ]


def _states(cli: Invocation, targets: tuple[str, ...]) -> list[RunState]:
    from areal.state.objects import ObjectStore

    runs = view.read_runs(cli.home)
    alive = [state for state in runs.values() if state.phase in ("starting", "running", "backoff")]
    if targets:
        objects = list(ObjectStore(cli.home).list())
        wanted = {str(ref) for asked in parse_refs(targets) for ref in view.family(objects, asked)}
        alive = [state for state in alive if state.spec.owner in wanted]
    return sorted(alive, key=view.run_order)


def _row(
    state: RunState,
    before: Usage | None,
    after: Usage | None,
    tokens: float | None,
    gpus: Mapping[str, Mapping[str, Any]],
    took: float,
) -> dict[str, Any]:
    percent = None if before is None or after is None else max(0.0, 100 * (after.cpu_s - before.cpu_s) / took)
    row = view.process_row(state)
    return {
        "owner": row["owner"],
        "process": f"{row['component']}/{row['replica']}",
        "pid": row["pid"],
        "state": row["state"],
        "uptimeSeconds": row["uptimeSeconds"],
        "cpuPercent": None if percent is None else round(percent, 1),
        "memoryBytes": after.memory_bytes if after else None,
        "processes": after.processes if after else None,
        "gpus": [gpus.get(uuid, {"uuid": uuid, "index": None, "usedBytes": None}) for uuid in state.spec.gpus],
        "tokensPerSecond": tokens,
    }


def _usage() -> dict[int, Usage]:
    """By session id: the CPU time and resident memory of every process that can be seen."""
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


def _tokens(cli: Invocation, states: Sequence[RunState]) -> dict[str, float]:
    """Tokens generated so far, from the engines' own counters; an engine that does not tell is left out."""
    from areal.cli.counters import generated_tokens

    engines = {state.spec.uid: state for state in states if state.spec.component == "engine" and state.spec.url}
    return generated_tokens(cli.home, engines)


def _rate(before: float | None, after: float | None, took: float) -> float | None:
    if before is None or after is None or after < before:
        return None
    return round((after - before) / took, 1)
