"""``areal top``: CPU, memory, GPU and tokens per second of each process.

CPU and memory are sums over the process's session (engines fork). CPU needs two samples, half a second apart. Processes
on nodes of a cluster cannot be measured from here: their values are Unknown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import click

from areal.cli.objects import complete_targets, parse_refs
from areal.cli.options import Invocation, watch_options
from areal.cli.output import Column, age, clear, compact, emit_rows, field, size, write
from areal.cli.remote import local_options
from areal.reconcilers.home_view import HomeView
from areal.terminal import fancy

UNKNOWN = "Unknown"
_SAMPLE_S = 0.5

_COLUMNS = (
    field("OWNER", "owner"),
    field("PROCESS", "process"),
    field("PID", "pid", right=True),
    Column("CPU", lambda row: _cell(row, "cpuPercent", "{:.0f}%".format), right=True),
    Column("MEMORY", lambda row: _cell(row, "memoryBytes", size), right=True),
    Column("GPU", lambda row: [_gpu_cell(row, gpu) for gpu in row["gpus"]]),
    field("TOKENS/S", "tokensPerSecond", right=True),
    field("STATE", "state", state=True),
    Column("UPTIME", lambda row: age(row["uptimeSeconds"]), right=True),
    field("PROCESSES", "processes", wide=True, right=True),
    field("NODE", "node", wide=True),
)


def _cell(row: Mapping[str, Any], name: str, form: Callable[[Any], str | None]) -> str | None:
    if row[name] is None:
        return UNKNOWN if row["node"] else None
    return form(row[name])


def _gpu_cell(row: Mapping[str, Any], gpu: Mapping[str, Any]) -> str:
    name = gpu["uuid"] if gpu["index"] is None else gpu["index"]
    return f"{name}:{_cell({**gpu, 'node': row['node']}, 'usedBytes', size) or '-'}"


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
            emit_rows(cli, rows, _COLUMNS, name="{owner} {process}".format_map, empty="no process runs")
        if not watch:
            return 0
        sys.stdout.flush()


def _measure(cli: Invocation, targets: tuple[str, ...], seconds: float) -> list[dict[str, Any]]:
    from areal.reconcilers.usage import MEASURED, figures, sample

    home = HomeView(cli.home)
    refs = [each for ref in parse_refs(targets) for each in home.family(ref)] if targets else None
    states = [state for state in home.states(refs) if state.phase in MEASURED]
    before = sample(home, states)
    time.sleep(seconds)
    return figures(states, before, sample(home, states))
