"""``areal top``: CPU, memory, GPU and tokens per second of each process.

CPU and memory are sums over the process's session (engines fork). CPU needs two samples, half a second apart. Processes
on nodes of a cluster cannot be measured from here: their values are Unknown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import click

from areal.cli.objects import complete_targets, parse_refs
from areal.cli.options import Invocation, watch_options
from areal.cli.output import Column, Table, age, clear, compact, emit_rows, field, is_live, size, write
from areal.cli.remote import local_options
from areal.reconcilers.home_view import HomeView
from areal.terminal import fancy

if TYPE_CHECKING:
    from areal.reconcilers.usage import Sample

UNKNOWN = "Unknown"
_SAMPLE_S = 0.5

_COLUMNS = (
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
    if watch and is_live(cli):
        from areal.cli.live_view import show_live

        return show_live(cli, usage=UsageMeter(cli, targets, sort_by).table, interval=interval)
    while True:
        rows = UsageMeter(cli, targets, sort_by, max(_SAMPLE_S, interval) if watch else _SAMPLE_S).read()
        if watch and not cli.format.is_table:
            write(compact(rows))
        else:
            if watch and fancy(sys.stdout):
                clear()
            emit_rows(cli, rows, _COLUMNS, name="{owner} {process}".format_map, empty="no process runs")
        if not watch:
            return 0
        sys.stdout.flush()


class UsageMeter:
    """``read``: the figures since the last read; the first one takes ``seconds``."""

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
        return Table(self.read(), _COLUMNS, "{owner} {process}".format_map)
